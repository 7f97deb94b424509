"""The benchmark of policies over rounds, and with it whole tasks that are steered: real training,
real bodies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import adaptive_rates as benchmark
import numpy as np
import pytest
from adaptive_rates import Fleet, run, rung
from threadpoolctl import threadpool_limits

from fedpress_compression.sketches import num_bytes


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Products this small cost twenty times as much when they are shared out."""
    with threadpool_limits(1):
        yield


def test_two_thirds_of_the_fleet_make_the_deadline() -> None:
    fleet = Fleet.drawn(0)
    size = 1_000_000
    deadline = fleet.deadline(size)
    is_in = fleet.training + size / fleet.uplinks <= deadline
    assert 0.6 < is_in.mean() < 0.73
    assert 0.2e6 / 8 <= fleet.uplinks.min() < fleet.uplinks.max() <= 50e6 / 8


@pytest.mark.slow
def test_each_its_own_rate_brings_in_those_whom_one_rate_leaves_out(tmp_path: Path) -> None:
    ladder, fleet = [rung(share) for share in benchmark.LADDER], Fleet.drawn(0)
    one = run(ladder[:1], [], 0, 3, tmp_path)
    deadline = fleet.deadline(benchmark.TIMES_AS_LONG * one.uploaded // one.given)
    fixed = run(ladder[:1], [], 0, 6, tmp_path, fleet, deadline)
    aware = run(ladder, [{"id": "bandwidth_aware"}], 0, 6, tmp_path, fleet, deadline)
    assert fixed.came < 0.8 * fixed.given
    assert aware.came > 0.9 * aware.given


@pytest.mark.slow
def test_a_rate_that_is_too_high_for_a_task_is_caught_and_corrected(tmp_path: Path) -> None:
    """One value in ten thousand: 40 rounds of it leave a model that hardly knows anything."""
    ladder = [rung(share) for share in benchmark.TOO_HIGH]
    alone = run(ladder[-1:], [], 0, 40, tmp_path)
    guard = {"id": "divergence_guard"}
    guarded = run(ladder, [guard], 0, 40, tmp_path)
    assert guarded.rungs[0] == len(ladder) - 1
    assert guarded.rungs[-1] < len(ladder) - 1
    assert any("of the way, less than" in each for each in guarded.warnings)
    assert guarded.accuracy > alone.accuracy + 0.1
    assert guarded.sketched == len(guarded.progress) * benchmark.COHORT * num_bytes(2048) > 0
    assert alone.sketched == 0
    sound = run([rung(0.1), rung(0.03)], [guard], 0, 10, tmp_path)
    assert set(sound.rungs) == {1}, "a rate that the task bears is left alone"
    assert not sound.warnings


@pytest.mark.slow
def test_the_loop_on_the_loss_saves_bytes_and_repeats(tmp_path: Path) -> None:
    ladder = [rung(share) for share in benchmark.LADDER]
    loop = run(ladder, [{"id": "accuracy_driven"}], 0, 30, tmp_path)
    gentlest = run(ladder[:1], [], 0, 30, tmp_path)
    assert loop.uploaded < 0.8 * gentlest.uploaded
    assert loop.accuracy > gentlest.accuracy - 0.05
    short = [run(ladder, [{"id": "accuracy_driven"}], 0, 5, tmp_path) for _ in range(2)]
    assert short[0] == short[1]


@pytest.mark.slow
def test_a_corrected_rate_is_the_one_that_is_trained_with(tmp_path: Path) -> None:
    plain, same = (run([rung(0.1, 1.0)], [], 0, 2, tmp_path) for _ in range(2))
    slower = run([rung(0.1, 0.5)], [], 0, 2, tmp_path)
    assert plain.accuracies == same.accuracies
    assert not np.array_equal(plain.accuracies, slower.accuracies)
