"""Probes on clients made up for them: what sketches tell of a mean, and when they tell nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from fedpress_compression import sketches
from fedpress_compression.compressor import Public
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.tensors import ModelSpec, TensorSpec, Vector
from fedpress_compression.update import Update
from fedpress_protocols.policies import LEAST_COMPARED, Comparison
from fedpress_protocols.upload import Upload
from fedpress_strategies.policies.probing import Probe

SIZE, CELLS = 4000, 1024
SPEC = ModelSpec((TensorSpec("w", (SIZE,)),))
STATED = 1 / math.sqrt(CELLS)
"""The error of a product of sketches, relative to the norms; that of the mean with itself is the
same in all clients' products, which do not show it."""


def public(seed: int) -> Public:
    return Public(SPEC, PublicRandomness(seed.to_bytes(32, "big")))


def clients(seed: int, count: int, common: float) -> list[Vector]:
    """Updates of norm 1 with a part `common` of their squared norm in one direction, the rest each
    in its own."""
    rng = np.random.default_rng(seed)
    shared, *own = rng.standard_normal((1 + count, SIZE)) / math.sqrt(SIZE)
    made = [math.sqrt(common) * shared + math.sqrt(1 - common) * each for each in own]
    return [each.astype(np.float32) for each in made]


def thinned(updates: Sequence[Vector], kept: float, seed: int = 0) -> list[Vector]:
    """What comes of them where each value is sent with this probability: as much of their mean."""
    rng = np.random.default_rng([seed, 1])
    return [np.where(rng.random(SIZE) < kept, each, np.float32(0)) for each in updates]


def compared(
    updates: Sequence[Vector],
    sent: Sequence[Vector],
    examples: Sequence[int] | None = None,
    seed: int = 0,
) -> Comparison | None:
    """The comparison of clients of which each sends a sketch of its update and one of `sent`."""
    known, weights = public(seed), examples or [10] * len(updates)
    probe = Probe(known, CELLS)
    for update, came, weight in zip(updates, sent, weights, strict=True):
        cells = sketches.sketch(update, CELLS, known.stream(sketches.LABEL))
        upload = Upload(0, weight, (), sketch=sketches.to_bytes(cells))
        probe.add(upload, Update.from_dense(came))
    return probe.comparison()


def found(
    updates: Sequence[Vector],
    sent: Sequence[Vector],
    examples: Sequence[int] | None = None,
    seed: int = 0,
) -> Comparison:
    comparison = compared(updates, sent, examples, seed)
    assert comparison is not None
    assert comparison.clients == len(updates)
    return comparison


# What is told


@pytest.mark.parametrize("common", [0.1, 0.3])
@pytest.mark.parametrize("count", [10, 30])
def test_the_progress_is_right_within_three_of_its_errors(count: int, common: float) -> None:
    for seed in range(20):
        for kept in (0.1, 0.5):
            updates = clients(seed, count, common)
            told = found(updates, thinned(updates, kept, seed), seed=seed)
            assert told.progress is not None
            assert told.error is not None
            assert abs(told.progress - kept) < 3 * math.hypot(told.error, kept * STATED)
            assert told.progress == pytest.approx(told.inner / told.norm)


def test_the_more_clients_the_smaller_the_error_and_the_mean_that_is_told() -> None:
    errors = list[float]()
    for count in (6, 12, 24, 48):
        cohorts = [clients(seed, count, 0.1) for seed in range(10)]
        told_of = [found(updates, thinned(updates, 0.3)) for updates in cohorts]
        errors.append(float(np.mean([each.error for each in told_of if each.error is not None])))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0] / 3
    told = [0, 0]
    for place, count in enumerate((6, 30)):
        for seed in range(20):
            updates = clients(seed, count, 0.01)
            comparison = found(updates, thinned(updates, 0.5, seed), seed=seed)
            told[place] += comparison.progress is not None
    assert told[0] < 10
    assert told[1] == 20


@pytest.mark.parametrize("count", [4, 6, 10, 30])
def test_a_mean_that_drowns_in_the_differences_between_clients_tells_nothing(count: int) -> None:
    """Of clients that have nothing in common; by chance a few cohorts seem to have something."""
    told = []
    for seed in range(40):
        updates = clients(seed, count, 0.0)
        comparison = found(updates, thinned(updates, 0.5, seed), seed=seed)
        if comparison.progress is None:
            assert (comparison.cosine, comparison.nmse) == (None, None)
            assert comparison.error is None or comparison.error > 0.25
        else:
            told.append(seed)
        assert abs(comparison.norm) < 0.1
    assert len(told) < 5


def test_what_the_draw_of_a_cohort_does_to_both_sides_drops_out() -> None:
    """Half of each update is told as a half, where nothing else tells of the mean either."""
    updates = clients(2, 10, 0.03)
    told = found(updates, [each / np.float32(2) for each in updates])
    assert told.progress == pytest.approx(0.5, abs=0.1)
    assert told.cosine == pytest.approx(1.0, abs=0.05)
    assert told.nmse == pytest.approx(0.25, abs=0.15)


def test_what_all_clients_leave_out_is_missing_from_the_direction() -> None:
    """Of the first quarter of the values alone: a quarter of the way, at half the cosine."""
    updates = clients(3, 20, 0.3)
    quarter = (np.arange(SIZE) < SIZE / 4).astype(np.float32)
    told = found(updates, [quarter * each for each in updates])
    assert told.progress == pytest.approx(0.25, abs=0.05)
    assert told.cosine == pytest.approx(0.5, abs=0.06)
    assert told.nmse == pytest.approx(0.75, abs=0.08)


def test_the_way_back_is_told_as_such() -> None:
    updates = clients(4, 10, 0.3)
    told = found(updates, [-each / np.float32(2) for each in updates])
    assert told.progress == pytest.approx(-0.5, abs=0.05)
    assert told.cosine == pytest.approx(-1, abs=0.05)


@pytest.mark.parametrize("kept", [1.0, 0.25, 0.02])
def test_the_energy_is_that_of_what_comes(kept: float) -> None:
    """Of each value with a chance of `kept`, as it is or, to keep the mean, so much larger."""
    updates = clients(5, 10, 0.3)
    as_it_is = thinned(updates, kept)
    assert found(updates, as_it_is).energy == pytest.approx(kept, rel=0.1)
    larger = [each / np.float32(kept) for each in as_it_is]
    assert found(updates, larger).energy == pytest.approx(1 / kept, rel=0.1)


def test_clients_count_by_their_examples() -> None:
    """One half of them has three times as many as the other, and sends all of its updates."""
    updates = clients(6, 20, 0.3)
    sent = [*updates[:10], *[np.zeros_like(each) for each in updates[10:]]]
    told = found(updates, sent, [30] * 10 + [10] * 10)
    assert told.progress == pytest.approx(0.75, abs=0.08)
    assert found(updates, sent).progress == pytest.approx(0.5, abs=0.08)


def test_clients_that_all_say_the_same_are_told_an_eighth_short() -> None:
    """What four levels take off is then the same of all of them, and does not cancel."""
    (update,) = clients(7, 1, 0.3)
    told = found([update] * 4, [update / np.float32(2)] * 4)
    assert told.progress == pytest.approx(0.88 / 2, abs=0.02)
    assert told.error == pytest.approx(0, abs=0.01)


# What does not decide it


@pytest.mark.parametrize("times", [-1000, 1000])
def test_a_client_whose_training_diverged_does_not_decide(times: float) -> None:
    for seed in range(10):
        updates = clients(seed, 12, 0.3)
        sent = thinned(updates, 0.3, seed)
        without = found(updates[1:], sent[1:], seed=seed)
        diverged = [np.float32(times) * updates[0], *updates[1:]]
        told = found(diverged, [-np.float32(times) * updates[0], *sent[1:]], seed=seed)
        assert without.progress is not None
        assert told.error is not None
        assert told.error > (without.error or 0)
        assert told.inner == pytest.approx(0.3 * told.norm, abs=3 * told.error * abs(told.norm))
        assert told.energy < 2


@pytest.mark.parametrize("count", [10, 30])
def test_a_client_that_forges_what_it_sends_does_not_decide(count: int) -> None:
    """Whatever it sends, beside an honest sketch or one of next to nothing."""
    updates = clients(11, count, 0.2)
    sent = thinned(updates, 0.5)
    honest = found(updates, sent)
    assert honest.progress is not None
    forged = np.full(SIZE, 256, np.float32)
    for first in (updates[0], updates[0] * np.float32(1e-6)):
        told = found([first, *updates[1:]], [forged, *sent[1:]])
        assert told.progress == pytest.approx(honest.progress, abs=0.25)
        assert told.energy < 6


def test_a_thousand_clients_are_compared_as_a_few_are() -> None:
    updates = clients(3, 1000, 0.05)
    told = found(updates, thinned(updates, 0.4))
    assert told.progress == pytest.approx(0.4, abs=0.02)
    assert told.error is not None
    assert told.error < 0.02


def test_clients_that_did_not_train_are_part_of_the_mean_and_no_yardstick() -> None:
    updates = clients(8, 12, 0.3)
    idle = [np.zeros(SIZE, np.float32)] * 8
    told = found([*idle, *updates], [*idle, *thinned(updates, 0.3)])
    assert told.progress == pytest.approx(0.3, abs=0.06)
    assert told.energy == pytest.approx(0.3, rel=0.1)


def test_the_order_in_which_clients_are_added_changes_nothing() -> None:
    updates, examples = clients(9, 9, 0.1), list(range(1, 10))
    sent = thinned(updates, 0.3)
    one = found(updates, sent, examples)
    other = found(updates[::-1], sent[::-1], examples[::-1])
    assert one.model_dump() == pytest.approx(other.model_dump())


# When there is none


def test_fewer_than_four_clients_or_updates_of_nothing_are_not_compared() -> None:
    updates = clients(10, 4, 0.3)
    assert LEAST_COMPARED == 4
    for count in range(4):
        assert compared(updates[:count], updates[:count]) is None
    assert compared(updates, updates) is not None
    zeros = [np.zeros(SIZE, np.float32)] * 6
    assert compared(zeros, zeros) is None
    assert compared(zeros[:4], updates) is None, "residuals alone say nothing of training"


def test_one_client_alone_that_trained_tells_nothing() -> None:
    zeros = [np.zeros(SIZE, np.float32)] * 4
    trained = [*zeros, *clients(11, 1, 0.3)]
    told = found(trained, trained)
    assert (told.progress, told.error, told.cosine, told.nmse) == (None, None, None, None)
