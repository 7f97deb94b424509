"""FedBuff and FedAsync: the sums they make of updates of different age."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpress_compression.fixed_point import FixedPoint
from fedpress_compression.update import Update
from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan, InvalidUpdate
from fedpress_strategies import from_config
from fedpress_strategies.staleness import UNIT, DiscountedMean, Hinge, Polynomial

FIXED = FixedPoint.widest(max_abs=256.0, max_weight=10_000)
SIZE = 50


def test_fedbuff_follows_its_formula_over_five_buffers() -> None:
    made = from_config({"id": "fedbuff", "learning_rate": 0.5, "momentum": 0.7, "exponent": 0.5})
    parameters = np.linspace(-1, 1, SIZE, dtype=np.float32)
    expected, velocity = parameters.astype(np.float64), np.zeros(SIZE)
    state = made.optimizer.init(parameters)
    for number in range(5):
        rng = np.random.default_rng(number)
        aggregator = made.aggregator(SIZE, FIXED)
        assert isinstance(aggregator, DiscountedMean)
        total, examples = np.zeros(SIZE), 0
        for _ in range(4):
            values = rng.standard_normal(SIZE).astype(np.float32)
            weight, staleness = int(rng.integers(1, 99)), int(rng.integers(0, 9))
            aggregator.add(Update.from_dense(values), weight, staleness=staleness)
            total += weight * (1 + staleness) ** -0.5 * values.astype(np.float64)
            examples += weight
        velocity = 0.7 * velocity + total / examples
        expected += 0.5 * velocity
        parameters, state = made.optimizer.apply(parameters, aggregator.result(), state)
    # The discounts are rounded to shares of UNIT.
    assert parameters == pytest.approx(expected, abs=10 / UNIT)
    assert np.abs(parameters - expected).mean() < 1 / UNIT


def test_without_examples_every_upload_counts_the_same() -> None:
    aggregator = from_config({"id": "fedbuff", "weighted": False}).aggregator(2, FIXED)
    aggregator.add(Update.from_dense(np.array([1, 0], np.float32)), 100)
    aggregator.add(Update.from_dense(np.array([0, 1], np.float32)), 1)
    assert aggregator.result().tolist() == [0.5, 0.5]


def test_fresh_updates_make_a_plain_mean() -> None:
    aggregator = from_config({"id": "fedbuff"}).aggregator(SIZE, FIXED)
    mean = from_config({"id": "fedavg"}).aggregator(SIZE, FIXED)
    rng = np.random.default_rng(0)
    for weight in (3, 5, 90):
        update = Update.from_dense(rng.standard_normal(SIZE).astype(np.float32))
        aggregator.add(update, weight)
        mean.add(update, weight)
    assert aggregator.result() == pytest.approx(mean.result(), abs=1e-8)


uploads = st.lists(
    st.tuples(st.integers(0, 2**32 - 1), st.integers(1, 2000), st.integers(0, 10**6)),
    min_size=1,
    max_size=5,
)


@given(uploads, st.data())
def test_the_sum_does_not_depend_on_the_order(
    taken: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    def result(order: list[tuple[int, int, int]]) -> bytes:
        aggregator = DiscountedMean(SIZE, FIXED, Polynomial(0.5))
        for seed, weight, staleness in order:
            values = np.random.default_rng(seed).uniform(-256, 256, SIZE).astype(np.float32)
            aggregator.add(Update.from_dense(values), weight, staleness=staleness)
        return aggregator.result().tobytes()

    assert result(taken) == result(data.draw(st.permutations(taken)))


def test_the_largest_updates_that_a_plan_allows_do_not_overflow() -> None:
    """At the bound of the plan's own sum, which leaves no room for the discount's units."""
    tight = FixedPoint(32, 256.0, 2**22)
    aggregator = DiscountedMean(3, tight, Polynomial(0.5))
    update = Update.from_dense(np.array([256, -256, 1], np.float32))
    for _ in range(4):
        aggregator.add(update, 2**20)
    assert aggregator.sums.total.tolist()[0] > 2**61
    assert aggregator.result() == pytest.approx([256, -256, 1])
    with pytest.raises(InvalidUpdate, match="1 on top of 4194304"):
        aggregator.add(update, 1)
    assert aggregator.result() == pytest.approx([256, -256, 1])


def test_bounds_that_leave_no_bit_are_refused() -> None:
    with pytest.raises(IncompatiblePlan, match="can overflow 63 bits"):
        DiscountedMean(1, FixedPoint(1, 2.0**40, 2**20), Polynomial())


def test_an_upload_counts_for_something_however_old() -> None:
    aggregator = DiscountedMean(1, FIXED, Polynomial(4.0))
    assert aggregator.weight_of(7, 10**6) == 7
    assert aggregator.weight_of(7, 0) == 7 * UNIT


def test_discounts_are_those_of_the_papers() -> None:
    assert [Polynomial(0.5)(tau) for tau in (0, 3, 8)] == pytest.approx([1, 1 / 2, 1 / 3])
    assert [Polynomial(0.0)(tau) for tau in (0, 3)] == [1, 1]
    assert [Hinge(10, 4)(tau) for tau in (0, 4, 5, 7)] == pytest.approx([1, 1, 1 / 11, 1 / 31])


def test_fedasync_moves_by_its_share() -> None:
    for kind, share in (("polynomial", 0.5), ("hinge", 1 / 11), ("constant", 1.0)):
        config = {"id": "fedasync", "mixing": 0.4, "staleness": kind, "free": 2}
        made = from_config(config)
        aggregator = made.aggregator(1, FIXED)
        assert isinstance(aggregator, DiscountedMean)
        assert aggregator.mixes
        aggregator.add(Update.from_dense(np.ones(1, np.float32)), 50, staleness=3)
        parameters, _ = made.optimizer.apply(np.zeros(1, np.float32), aggregator.result(), {})
        assert parameters[0] == pytest.approx(0.4 * share, abs=1 / UNIT)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"id": "fedbuff", "exponent": -1}, "exponent must be at least 0"),
        ({"id": "fedbuff", "momentum": 1}, r"momentum must lie in \[0, 1\)"),
        ({"id": "fedasync", "mixing": 1.5}, r"mixing must lie in \(0, 1\]"),
        ({"id": "fedasync", "staleness": "cubic"}, "polynomial, hinge, constant, not 'cubic'"),
        ({"id": "fedasync", "free": -1}, "must be at least 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(config: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        from_config(config)


def test_neither_may_be_masked() -> None:
    assert not from_config({"id": "fedbuff"}).linear
    assert not from_config({"id": "fedasync"}).linear
