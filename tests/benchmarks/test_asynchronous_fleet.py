"""The fleet's benchmark: it repeats itself, its books balance, and the slow hold nobody up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import asynchronous_fleet as benchmark
import numpy as np
import pytest
from asynchronous_fleet import CHOSEN, CONCURRENCY, Mode, Run, Simulation
from threadpoolctl import threadpool_limits


def mode(name: str) -> Mode:
    return next(mode for mode in CHOSEN if mode.name == name)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Products this small cost twenty times as much when they are shared out."""
    with threadpool_limits(1):
        yield


def test_a_target_is_reached_when_the_mean_of_ten_seconds_is_above_it() -> None:
    run = Run(accuracies=[0.0] * 10 + [1.0] * 10)
    assert run.time_to(0.5) == 15.0
    assert run.time_to(1.0) == 20.0
    assert Run(accuracies=[1.0] * 9).time_to(0.5) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rounds, over-selection 1.3", "fedbuff"])
def test_nothing_that_a_fleet_computes_is_lost(name: str, tmp_path: Path) -> None:
    """What devices hold, and how far the uploads went: all of it is in their accounts."""
    fleet = Simulation(mode(name), 0, tmp_path)
    run = fleet.go(6)
    open_ = sum(part.is_open for part in fleet.attempt.round.parts.values())
    pending = sum(len(ledger.pending) for ledger in fleet.ledgers)
    settled = sum(ledger.included + ledger.not_included for ledger in fleet.ledgers)
    assert sum(ledger.included for ledger in fleet.ledgers) == run.included > 0
    assert run.trained == settled + pending + len(fleet.ends)
    if fleet.mode.asynchronous:
        assert open_ == len(fleet.ends) == CONCURRENCY
        assert len(fleet.attempt.round.staged) == pending < fleet.mode.size
    again = Simulation(mode(name), 0, tmp_path).go(6)
    assert again == run


@pytest.mark.slow
def test_buffers_do_not_wait_for_the_slow() -> None:
    """In as many seconds, more than twice the uploads that rounds get, and more often a model."""
    buffers, rounds = (benchmark.simulated(mode(name), 0, 24) for name in ("fedbuff", "rounds"))
    assert buffers.included > 2 * rounds.included
    assert buffers.models > 4 * rounds.models
    assert np.mean(buffers.accuracies[-5:]) > np.mean(rounds.accuracies[-5:]) + 0.1
