"""Averages of adapters are the averages of their products, whatever is kept for later."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fedpress_compression.compressor import Public
from fedpress_compression.compressors.none import Uncompressed
from fedpress_compression.fixed_point import FixedPoint
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.tensors import ModelSpec, TensorSpec
from fedpress_compression.update import Update
from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan
from fedpress_protocols.plan import CohortRules, FixedPointTerms, Profile, RoundPlan, TrainingTerms
from fedpress_strategies import from_config
from fedpress_strategies.lora import AVERAGING_ERROR, layers_of
from fedpress_strategies.strategy import AggregationSpace, Tally, figures

OUT, IN, RANK = 7, 9, 5
WEIGHTS = (3, 1, 5)
Dense = npt.NDArray[np.float64]


def spec_of(rank: int = RANK, b: tuple[int, ...] | None = None) -> ModelSpec:
    tensors = [TensorSpec("head", (4,))]
    for layer in ("one", "two"):
        tensors.append(TensorSpec(f"{layer}.lora_A.weight", (rank, IN)))
        tensors.append(TensorSpec(f"{layer}.lora_B.weight", b or (OUT, rank)))
    return ModelSpec(tuple(tensors))


def plan_of(spec: ModelSpec, **lane: Any) -> RoundPlan:
    return RoundPlan(
        task="task",
        round=1,
        attempt=1,
        model="0" * 64,
        spec=spec.digest,
        profiles=(Profile(name="one", compressor=Uncompressed()),),
        training=TrainingTerms(),
        cohort=CohortRules(size=3, minimum=1),
        deadline=1e9,
        fixed_point=FixedPointTerms(scale_bits=24, max_abs=256.0, max_examples=1000),
        public_seed="0" * 64,
        **lane,
    )


def products(spec: ModelSpec, flat: npt.NDArray[Any]) -> list[Dense]:
    made = []
    for layer in layers_of(spec):
        b, a = layer.factors(flat.astype(np.float64))
        made.append(b @ a)
    return made


def drawn(seed: int, spec: ModelSpec, trained: int) -> npt.NDArray[np.float32]:
    """An update of the first `trained` ranks."""
    flat = np.random.default_rng(seed).normal(0, 0.3, spec.size).astype(np.float32)
    for layer in layers_of(spec):
        b, a = layer.factors(flat)
        b[:, trained:] = 0
        a[trained:] = 0
    return flat


def aggregator_of(config: dict[str, Any], spec: ModelSpec) -> Any:
    planned = from_config(config).planned_aggregator
    assert planned is not None
    public = Public(spec, PublicRandomness(bytes(32)), {}, round=1)
    return planned(plan_of(spec), public, AggregationSpace())


@pytest.mark.parametrize("every", [1, 3])
def test_the_products_and_the_rest_are_the_means_of_all_products(every: int) -> None:
    config = {"id": "lora", "rank": 2, "every": every}
    made, spec = from_config(config), spec_of()
    parameters = np.random.default_rng(0).normal(0, 0.3, spec.size).astype(np.float32)
    state = made.optimizer.init(parameters)
    expected = products(spec, parameters)
    head = parameters[:4].astype(np.float64)
    share = np.array(WEIGHTS) / sum(WEIGHTS)
    for number in range(6):
        sums = aggregator_of(config, spec)
        changes = [drawn(10 * number + i, spec, trained=2) for i in range(3)]
        for change, weight in zip(changes, WEIGHTS, strict=True):
            sums.add(Update.from_dense(change), weight)
        moved = [products(spec, parameters + change) for change in changes]
        before = products(spec, parameters)
        for i in range(2):
            steps = [s * (each[i] - before[i]) for s, each in zip(share, moved, strict=True)]
            expected[i] += np.sum(steps, axis=0)
        head += np.sum([s * c[:4] for s, c in zip(share, changes, strict=True)], axis=0)
        parameters, state = made.optimizer.apply(
            parameters, sums.result(), state, Tally(3, spec=spec)
        )
        got = products(spec, parameters)
        rests = [np.asarray(each) for name, each in state.items() if name.startswith("rest.")]
        for product, rest, due in zip(got, rests, expected, strict=True):
            np.testing.assert_allclose(product + rest, due, atol=2e-5)
        assert 0.01 < figures(made.optimizer, state)[AVERAGING_ERROR] < 2
    np.testing.assert_allclose(parameters[:4], head, atol=1e-5)


def test_ranks_enough_for_the_error_leave_no_rest() -> None:
    config = {"id": "lora", "rank": 2}
    made, spec = from_config(config), spec_of(rank=2 + IN)
    parameters = drawn(0, spec, trained=2)
    sums = aggregator_of(config, spec)
    changes = [drawn(seed, spec, trained=2) for seed in (1, 2)]
    for change in changes:
        sums.add(Update.from_dense(change), 1)
    after, state = made.optimizer.apply(
        parameters, sums.result(), made.optimizer.init(parameters), Tally(2, spec=spec)
    )
    for name, rest in state.items():
        assert not name.startswith("rest.") or np.abs(rest).max() < 1e-6
    pairs = zip(*(products(spec, parameters + change) for change in changes), strict=True)
    for got, (one, two) in zip(products(spec, after), pairs, strict=True):
        np.testing.assert_allclose(got, (one + two) / 2, atol=1e-5)


def test_plain_averages_are_those_of_fedavg_with_the_error_measured() -> None:
    made, spec = from_config({"id": "lora", "averages": "plain"}), spec_of()
    parameters = drawn(0, spec, trained=RANK)
    sums = aggregator_of({"id": "lora", "averages": "plain"}, spec)
    changes = [drawn(seed, spec, trained=RANK) for seed in (1, 2)]
    for change in changes:
        sums.add(Update.from_dense(change), 1)
    after, state = made.optimizer.apply(
        parameters, sums.result(), made.optimizer.init(parameters), Tally(2, spec=spec)
    )
    np.testing.assert_allclose(after, parameters + sum(changes) / 2, atol=1e-6)
    each = [products(spec, parameters + change) for change in changes]
    right = [(one + two) / 2 for one, two in zip(*each, strict=True)]
    wrong = products(spec, parameters + sum(changes) / 2)
    off = sum(float(np.square(r - w).sum()) for r, w in zip(right, wrong, strict=True))
    due = np.sqrt(off / sum(float(np.square(r).sum()) for r in right))
    assert figures(made.optimizer, state)[AVERAGING_ERROR] == pytest.approx(due, rel=1e-4)
    assert set(state) == {AVERAGING_ERROR, "rounds"}
    wrapped = from_config({"id": "ema", "inner": {"id": "lora", "averages": "plain"}})
    within = wrapped.optimizer.init(parameters)
    assert figures(wrapped.optimizer, within) == {AVERAGING_ERROR: 0.0}


def test_clipping_scales_the_products_of_a_change_as_it_scales_the_change() -> None:
    """All devices send the same, so the averages have no error, in a clipped round either; what
    is clipped is the change alone, whatever its products are."""
    inner = {"id": "lora", "averages": "plain"}
    made = from_config({"id": "spike_clipping", "ratio": 1.0, "inner": inner})
    spec = spec_of()
    parameters, change = drawn(0, spec, trained=RANK), drawn(1, spec, trained=RANK)
    state = made.optimizer.init(parameters)
    for times in (1.0, 50.0):
        sums = aggregator_of(inner, spec)
        sums.add(Update.from_dense(np.float32(times) * change), 1)
        before = parameters
        parameters, state = made.optimizer.apply(
            parameters, sums.result(), state, Tally(1, spec=spec)
        )
        assert figures(made.optimizer, state)[AVERAGING_ERROR] < 1e-6
    assert figures(made.optimizer, state)["clipped_share"] == pytest.approx(0.96)
    np.testing.assert_allclose(parameters - before, 2 * change, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"averages": "right"}, "averages is exact or plain, not 'right'"),
        ({}, "exact averages need `rank`"),
        ({"rank": 0}, "at least 1, not 0"),
        ({"averages": "plain", "rank": 2}, "plain averages take no rank"),
        ({"rank": 2, "every": 0}, "every must be a whole number of at least 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        from_config({"id": "lora", **config})


def test_plans_that_cannot_work_are_refused() -> None:
    exact = {"id": "lora", "rank": 2}
    with pytest.raises(IncompatiblePlan, match="has rank 2, and the devices train 2 of it"):
        aggregator_of(exact, spec_of(rank=2))
    with pytest.raises(IncompatiblePlan, match=r"expected \[rank, in\] and \[out, rank\]"):
        aggregator_of(exact, spec_of(b=(OUT, RANK, 1, 1)))
    plain = ModelSpec((TensorSpec("w", (4,)),))
    with pytest.raises(IncompatiblePlan, match="no trained factors lora_A and lora_B"):
        aggregator_of(exact, plain)
    assert not from_config(exact).linear


def test_one_sum_of_all_uploads_is_refused() -> None:
    spec, planned = spec_of(), from_config({"id": "lora", "rank": 2}).planned_aggregator
    assert planned is not None
    plan = plan_of(spec).model_copy(update={"lane": "masked"})
    public = Public(spec, PublicRandomness(bytes(32)), {}, round=1)
    with pytest.raises(IncompatiblePlan, match="averages='ffa'"):
        planned(plan, public, AggregationSpace())


def test_a_round_within_the_bounds_of_fixed_point_adds_up() -> None:
    bounds = FixedPoint.widest(max_abs=256.0, max_weight=10)
    sums = from_config({"id": "lora", "rank": 2}).aggregator(4, bounds)
    sums.add(Update.from_dense(np.ones(4, np.float32)), 2)
    np.testing.assert_allclose(sums.result(), 1.0)
