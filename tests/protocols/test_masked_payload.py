"""Updates as whole numbers that a cohort adds up: exact bounds, exact sums, the client's own units,
and what a plan of the masked lane refuses."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpress_compression.compressor import Compressor, Public, from_config
from fedpress_compression.linear import as_linear, restricts, support_of
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.tensors import ModelSpec, TensorSpec, Vector
from fedpress_protocols.errors import IncompatiblePlan, InvalidUpdate
from fedpress_protocols.masking.payload import SECRET_BYTES, Aggregate, Contribution, Payload
from fedpress_protocols.messages import TaskConfig
from fedpress_protocols.plan import LEAST_MASKED, RoundPlan, parsed

SPEC = ModelSpec(
    (TensorSpec("w", (40, 30)), TensorSpec("b", (40,)), TensorSpec("conv", (6, 5, 2, 2)))
)
SMALLEST = {"scale_bits": 0, "max_abs": 1.0, "max_examples": 1}
SHARED = {"id": "shared_support", "fraction": 0.1, "explore": 0.1}
DENSE = {"id": "quantize", "clip": 0.1}
METHODS: dict[str, dict[str, Any]] = {
    "shared_support": SHARED,
    "randomk": {"id": "randomk", "fraction": 0.1, "bits": 8},
    "randomk scaled": {
        "id": "randomk", "fraction": 0.1, "bits": 8, "unbiased": True, "rounding": "stochastic"
    },
    "powersgd_onesided": {"id": "powersgd_onesided", "rank": 2},
    "count_sketch": {"id": "count_sketch", "fraction": 0.3},
    "quantize": DENSE,
    "clip": {"id": "clip", "inner": SHARED, "max_norm": 0.5},
    "per_tensor": {"id": "per_tensor", "large": SHARED, "small": DENSE, "min_size": 200},
    "error_feedback": {"id": "error_feedback", "inner": SHARED},
}  # fmt: skip
KNOWN = np.random.default_rng(7).standard_t(3, SPEC.size).astype(np.float32) * np.float32(0.01)
KNOWN[::5] = 0


def plan_fields(compressor: dict[str, Any], **changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "task": "digits",
        "round": 2,
        "attempt": 1,
        "model": "a" * 64,
        "previous_model": "b" * 64,
        "spec": SPEC.digest,
        "lane": "masked",
        "masking": {},
        "profiles": [{"name": "only", "compressor": compressor}],
        "cohort": {"size": 10, "minimum": 5},
        "deadline": 0.0,
        "fixed_point": {"scale_bits": 30, "max_abs": 64.0, "max_examples": 1000},
        "public_seed": "0" * 64,
    }
    return {**fields, **changes}


def made_plan(compressor: dict[str, Any], **changes: Any) -> RoundPlan:
    return RoundPlan.from_json(json.dumps(plan_fields(compressor, **changes)))


def payload_of(name: str, previous: Vector = KNOWN, **masking: Any) -> Payload:
    plan = made_plan(METHODS[name], masking=masking)
    return Payload(plan, plan.public(SPEC, {"previous": previous}))


def some_update(seed: int) -> Vector:
    rng = np.random.default_rng(seed)
    return (rng.standard_t(3, SPEC.size) * 0.02).astype(np.float32)


def secret_of(seed: int) -> bytes:
    return np.random.default_rng([seed, 1]).bytes(SECRET_BYTES)


def contributions(payload: Payload, weights: list[int], **report: float) -> list[Contribution]:
    return [
        payload.compress(some_update(i), weight, report, secret_of(i))
        for i, weight in enumerate(weights)
    ]


def summed(payload: Payload, made: list[Contribution]) -> Aggregate:
    """Through the words that are masked and the bytes that travel, added mod 2**64."""
    packing = payload.packing
    words = np.zeros(packing.num_words, np.uint64)
    for each in made:
        words += packing.from_bytes(packing.to_bytes(packing.pack(each.integers)))
    return payload.decompress(packing.unpack(words), len(made))


# What adds up


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("max_weight", [None, 64])
def test_the_sum_is_the_weighted_mean_of_what_each_client_sent(
    name: str, max_weight: int | None
) -> None:
    payload = payload_of(name, max_weight=max_weight)
    examples = [3, 64, 17, 500, 1, 64, 32]
    made = contributions(payload, examples)
    found = summed(payload, made)
    weights = np.array([1.0 if max_weight is None else min(w, 64) for w in examples])
    sent = np.stack([each.update.dense() for each in made]).astype(np.float64)
    expected = (weights[:, None] * sent).sum(axis=0) / weights.sum()
    scale = np.abs(sent).max()
    np.testing.assert_allclose(found.mean.dense(), expected, atol=4e-7 * scale)
    assert (found.num_clients, found.num_examples) == (7, sum(examples))


@pytest.mark.parametrize("name", METHODS)
def test_numbers_go_there_and_back_and_add_up(name: str) -> None:
    payload = payload_of(name)
    made, public = payload.plan.compressor("only"), payload.public
    linear = as_linear(made).linear_map(public)
    first, second = (some_update(i) * np.float32(0.01) for i in (1, 2))
    one, two = linear.project(first), linear.project(second)
    assert one.shape == linear.spread.shape
    assert one.dtype == np.float64
    both = linear.project(first + second)
    np.testing.assert_allclose(both, one + two, atol=1e-6 * np.abs(both).max())
    lifted = linear.lift(one + two).dense()
    apart = linear.lift(one).dense() + linear.lift(two).dense()
    np.testing.assert_allclose(lifted, apart, atol=1e-6 * np.abs(lifted).max())
    support = support_of(made, public)
    assert restricts(made) == (support is not None)
    if support is not None:
        outside = np.ones(SPEC.size, bool)
        outside[support] = False
        assert not lifted[outside].any()
        assert (np.diff(support) > 0).all()


@given(data=st.data())
def test_no_cohort_overflows_whatever_it_sends(data: st.DataObject) -> None:
    """Every client at the end of its range, the same way: the sum is still exact."""
    size = data.draw(st.integers(3, 300))
    levels = data.draw(st.integers(1, 3000))
    plan = made_plan(
        METHODS["shared_support"],
        masking={"levels": levels, "max_weight": data.draw(st.sampled_from([None, 1, 1000]))},
        cohort={"size": size, "minimum": 3},
        report=["loss"],
    )
    payload = Payload(plan, plan.public(SPEC, {"previous": KNOWN}))
    sign = data.draw(st.sampled_from([1, -1]))
    huge = np.full(SPEC.size, sign * 1e6, np.float32)
    made = payload.compress(huge, 1000, {"loss": 2.0**24}, secret_of(0))
    assert (made.integers["values"] == sign * levels).all()
    words = payload.packing.pack(made.integers) * np.uint64(size)
    sums = payload.packing.unpack(words)
    for name, integers in made.integers.items():
        assert (sums[name] == size * integers).all()
    found = payload.decompress(sums, size)
    assert found.clipped == 1
    assert found.report["loss"] == pytest.approx(2.0**24)


def test_a_body_has_no_more_bits_than_the_sums_range_needs() -> None:
    for size, levels in ((10, 4), (20, 3), (100, 15), (1000, 1)):
        plan = made_plan(DENSE, masking={"levels": levels}, cohort={"size": size, "minimum": 3})
        payload = Payload(plan, plan.public(SPEC, {"previous": KNOWN}))
        needed = SPEC.size * np.log2(2 * levels * size + 1) / 8
        assert payload.packing.num_bytes <= 1.04 * needed + 24


# The client's own units


@given(
    st.sampled_from(sorted(METHODS)),
    st.sampled_from([None, 1, 7, 64]),
    st.integers(1, 1000),
    st.integers(1, 200),
    st.integers(0, 2**32),
)
def test_what_was_sent_is_in_units_of_the_update_whatever_the_weight(
    name: str, max_weight: int | None, num_examples: int, levels: int, seed: int
) -> None:
    """|project(update - sent)| is below one step of the client's, and a step grows as the weight
    falls, wherever nothing was clipped."""
    payload = payload_of(name, max_weight=max_weight, levels=levels)
    linear = as_linear(payload.plan.compressor("only")).linear_map(payload.public)
    update = some_update(seed)
    made = payload.compress(update, num_examples, {}, secret_of(seed))
    spread = linear.spread
    share = 1.0 if max_weight is None else min(num_examples, max_weight) / max_weight
    unit = np.where(spread > 0, 8.0 * spread, 0.1) / levels / share
    numbers = linear.project(update)
    inside = np.abs(numbers) < unit * levels
    off = np.abs(made.integers["values"] * unit - numbers)
    assert (off[inside] <= unit[inside] * (1 + 1e-9)).all()
    assert int(made.integers["clipped"][0]) == np.count_nonzero(np.abs(numbers) > unit * levels)
    np.testing.assert_allclose(  # the unit here is rounded in another order than the client's
        made.update.dense(),
        linear.lift(made.integers["values"] * unit).dense(),
        rtol=1e-6,
        atol=1e-12,
    )


def test_rounding_is_unbiased_and_private() -> None:
    payload = payload_of("quantize", levels=3)
    update = some_update(0)
    sent = np.mean(
        [payload.compress(update, 1, {}, secret_of(i)).update.dense() for i in range(400)], axis=0
    )
    step = 8.0 * as_linear(payload.plan.compressor("only")).linear_map(payload.public).spread / 3
    inside = np.abs(update) < 3 * step
    off = (sent - update)[inside] / step[inside]
    assert abs(off.mean()) < 5 / np.sqrt(400 * 12 * inside.sum())
    assert np.abs(off).max() < 5 * 0.5 / np.sqrt(400)
    once, again = (payload.compress(update, 1, {}, secret_of(5)) for _ in range(2))
    np.testing.assert_array_equal(once.integers["values"], again.integers["values"])


# What is public


@pytest.mark.parametrize("name", METHODS)
def test_the_digest_is_that_of_the_support_and_its_steps(name: str) -> None:
    payload = payload_of(name)
    assert payload_of(name, KNOWN.copy()).digest == payload.digest
    assert payload_of(name, KNOWN * np.float32(1.01)).digest != payload.digest
    assert payload_of(name, headroom=9.0).digest != payload.digest
    assert payload_of(name, support=payload.digest).digest == payload.digest
    with pytest.raises(IncompatiblePlan, match="the plan says 111111111111"):
        payload_of(name, support="1" * 64)


GOLDEN = {
    "shared_support": "4c8c208ade9c20997c8c1586c3147a2de8724ddc9928d45e1e633efb64af5b49",
    "powersgd_onesided": "a645e2ad6860439a79014ece97be01a1a8060a63efdb2c12f9d62152884a374a",
    "count_sketch": "49e4abe2df59c2bc61cd71dc95d6142bba7cf69aa457a36a5c0365fc9ccfe693",
}


@pytest.mark.parametrize("name", GOLDEN)
def test_a_known_digest_never_changes(name: str) -> None:
    """Whole multiples of a power of two: the test's own arithmetic must not differ either."""
    plan = made_plan(METHODS[name])
    steps = (np.arange(SPEC.size) * 37 % 101 - 50).astype(np.float32) * np.float32(2.0**-10)
    assert Payload(plan, plan.public(SPEC, {"previous": steps})).digest == GOLDEN[name]


def steps_by_the_specification(
    plan: RoundPlan, previous: Vector, support: list[int]
) -> list[float]:
    """SPEC-payload.md, "Numbers" and "Steps", in Python's own numbers."""

    def rms(values: list[float]) -> float:
        largest = max(map(abs, values), default=0.0)
        if not largest:
            return 0.0
        whole = [round(value * (2**14 / largest)) for value in values]
        return math.sqrt(sum(w * w for w in whole) / len(values)) * (largest / 2**14)

    moved = {j: float(previous[j]) for j in support if previous[j]}
    overall = rms(list(moved.values()))
    assert plan.masking is not None
    steps = []
    for where in SPEC.slices.values():
        here = [j for j in support if where.start <= j < where.stop]
        spread = rms([moved[j] for j in here if j in moved]) or overall
        reach = plan.masking.headroom * spread or plan.masking.first_range
        steps += [reach / plan.masking.levels] * len(here)
    return steps


@pytest.mark.parametrize("moved", [KNOWN, np.zeros_like(KNOWN)])
def test_the_specification_alone_gives_digest_steps_and_sum(moved: Vector) -> None:
    plan = made_plan(SHARED, masking={"levels": 9, "max_weight": 50})
    public = plan.public(SPEC, {"previous": moved})
    payload = Payload(plan, public)
    compressor: Any = plan.compressor("only")
    support = compressor.support(public).tolist()
    steps = steps_by_the_specification(plan, moved, support)
    text = b"fedpress masked support v1\x00" + bytes.fromhex(SPEC.digest)
    text += struct.pack(f"<{1 + len(support)}q", len(support), *support)
    text += struct.pack(f"<{len(steps)}d", *steps)
    assert payload.digest == hashlib.sha256(text).hexdigest()
    made = contributions(payload, [20, 80])
    total = {
        name: np.sum([each.integers[name] for each in made], axis=0) for name in made[0].integers
    }
    weight = int(total["weight"][0])
    assert weight == 70
    mean = np.zeros(SPEC.size, np.float32)
    mean[support] = [
        int(q) * (u * (50 / weight)) for q, u in zip(total["values"], steps, strict=True)
    ]
    np.testing.assert_array_equal(payload.decompress(total, 2).mean.dense(), mean)


def test_a_number_of_which_nothing_is_known_has_the_first_range() -> None:
    payload = payload_of("shared_support", np.zeros_like(KNOWN), levels=10, first_range=0.5)
    update = np.full(SPEC.size, 0.05, np.float32)
    made = payload.compress(update, 1, {}, secret_of(0))
    assert (made.integers["values"] == 1).mean() > 0.99
    # A tensor that has not moved is rounded as the others are.
    moved = np.zeros_like(KNOWN)
    moved[SPEC.slices["w"]] = 0.02
    dense = Payload(made_plan(DENSE), made_plan(DENSE).public(SPEC, {"previous": moved}))
    sent = dense.compress(np.full(SPEC.size, 1.0, np.float32), 1, {}, secret_of(0)).update.dense()
    np.testing.assert_allclose(sent, 8 * 0.02, rtol=1e-3)


def test_counts_and_reports_travel_in_the_sum() -> None:
    plan = made_plan(SHARED, report=["loss", "steps", "drift"])
    payload = Payload(plan, plan.public(SPEC, {"previous": KNOWN}))
    told = [(10, 0.5, 7.0, -3.0), (30, 1.25, 9.0, 1000.0), (5, 0.0, 1.0, 2.0**24)]
    made = [
        payload.compress(
            some_update(i), n, {"loss": loss, "steps": steps, "drift": drift}, secret_of(i)
        )
        for i, (n, loss, steps, drift) in enumerate(told)
    ]
    found = summed(payload, made)
    weights = np.array([row[0] for row in told])
    for column, name in enumerate(("loss", "steps", "drift"), start=1):
        expected = float(weights @ np.array([row[column] for row in told]) / weights.sum())
        assert found.report[name] == pytest.approx(expected, abs=1e-4)
    assert found.num_examples == 45
    assert 0 <= found.clipped < 1
    with pytest.raises(InvalidUpdate, match="steps of 0"):
        payload.compress(some_update(0), 1, {"loss": 0.0, "steps": 0.0, "drift": 0.0}, secret_of(0))


def test_what_is_no_update_or_no_sum_is_refused() -> None:
    payload = payload_of("shared_support")
    bad = some_update(0)
    bad[3] = np.nan
    with pytest.raises(InvalidUpdate, match="NaN"):
        payload.compress(bad, 1, {}, secret_of(0))
    for num_examples in (0, 1001):
        with pytest.raises(InvalidUpdate, match=f"not {num_examples}"):
            payload.compress(some_update(0), num_examples, {}, secret_of(0))
    made = payload.compress(some_update(0), 5, {}, secret_of(0))
    with pytest.raises(InvalidUpdate, match="examples: not a valid sum of 2 clients"):
        payload.decompress({**made.integers, "examples": np.array([2001])}, 2)
    with pytest.raises(InvalidUpdate, match="values: not a valid sum"):
        payload.decompress({**made.integers, "values": np.zeros(3, np.int64)}, 1)
    with pytest.raises(InvalidUpdate, match="0 examples and weight 1 is impossible"):
        payload.decompress({**made.integers, "examples": np.array([0])}, 1)
    clear = made_plan(SHARED, lane="clear", masking=None)
    with pytest.raises(IncompatiblePlan, match="a plan of the clear lane"):
        Payload(clear, clear.public(SPEC, {"previous": KNOWN}))


# What a plan refuses when it is made


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"masking": None}, "the masked lane needs masking terms"),
        ({"lane": "clear"}, "masking terms are set, but the lane is clear"),
        (
            {"profiles": [{"name": "a", "compressor": {"id": "topk"}}]},
            "does not commute with the sum.*use shared_support",
        ),
        (
            {"profiles": [{"name": "a", "compressor": {"id": "randomk", "shared": False}}]},
            "does not commute with the sum",
        ),
        (
            {"profiles": [{"name": "a", "compressor": {"id": "cafe", "inner": SHARED}}]},
            "makes symbols of its own",
        ),
        (
            {
                "profiles": [
                    {
                        "name": "a",
                        "compressor": {"id": "clip", "inner": {"id": "cafe", "inner": SHARED}},
                    }
                ]
            },
            "makes symbols of its own",
        ),
        (
            {"profiles": [{"name": name, "compressor": SHARED} for name in "ab"]},
            "2 profiles in the masked lane",
        ),
        ({"cohort": {"size": 10, "minimum": 2}}, "a masked sum of 2 would be unmasked"),
        (
            {"cohort": {"size": 10**9, "minimum": 3}, "fixed_point": SMALLEST},
            "a cohort of 1000000000 in the masked lane, which has at most 10000",
        ),
        (
            {"masking": {"corrupt": 0.9}, "cohort": {"size": 200, "minimum": 150}},
            "of 200 clients must stay",
        ),
        ({"masking": {"levels": 0}}, "levels"),
        ({"masking": {"adversary": "bored"}}, "adversary"),
        ({"previous_model": None}, "a profile reads previous"),
        (
            {"profiles": [{"name": "a", "compressor": DENSE}], "training": {"restricted": True}},
            "the support of 'a' is not known",
        ),
    ],
)
def test_a_masked_plan_that_cannot_work_says_why(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(IncompatiblePlan, match=says):
        made_plan(SHARED, **changes)


def test_a_masked_plan_survives_json() -> None:
    plan = made_plan(SHARED, masking={"seconds": {"mask": 7}, "levels": 4, "max_weight": 32})
    assert RoundPlan.from_json(plan.to_json()) == plan
    assert plan.masking is not None
    assert (plan.masking.seconds.mask, plan.masking.seconds.share) == (7, 30)
    assert plan.needs == {"previous"}
    assert LEAST_MASKED == 3
    config = parsed(
        TaskConfig,
        '{"task": "t", "model": "%s", "rounds": 1, "lane": "masked", "masking": {"levels": 2}, '
        '"profiles": [{"name": "a", "compressor": {"id": "shared_support"}}], '
        '"cohort": {"size": 3, "minimum": 3}}' % ("a" * 64),
    )
    assert config.masking is not None
    assert config.masking.levels == 2


# Restricted training


def support(plan: RoundPlan, spec: ModelSpec = SPEC) -> Any:
    shared = plan.shared(spec)
    return plan.support("only", spec, plan.public(spec, {"previous": KNOWN[: shared.size]}))


def test_the_support_of_training_is_what_will_be_sent() -> None:
    restricted = {"training": {"restricted": True}}
    for lane in ({}, {"lane": "clear", "masking": None}):
        plan = made_plan(METHODS["error_feedback"], **restricted, **lane)
        public = plan.public(SPEC, {"previous": KNOWN})
        compressor: Any = plan.compressor("only")
        np.testing.assert_array_equal(support(plan), compressor.inner.support(public))
    assert support(made_plan(SHARED)) is None
    plain = made_plan({"id": "randomk", "fraction": 0.1}, lane="clear", masking=None, **restricted)
    assert support(plain).size == 136
    mixed = {"id": "per_tensor", "large": SHARED, "small": {"id": "quantize"}, "min_size": 200}
    free = support(made_plan(mixed, lane="clear", masking=None, **restricted))
    assert free.size == 120 + 160
    assert set(range(SPEC.slices["b"].start, SPEC.size)) <= set(free.tolist())


def test_personal_tensors_are_trained_too() -> None:
    plan = made_plan(SHARED, training={"restricted": True}, client_terms={"personal": ["b"]})
    free = support(plan)
    inside = np.zeros(SPEC.size, bool)
    inside[free] = True
    assert inside[SPEC.slices["b"]].all()
    shared = plan.shared(SPEC)
    assert free.size == 40 + round(0.1 * shared.size)


@pytest.mark.parametrize("fraction", [0.1, 1.0])
def test_nine_tenths_of_a_support_are_where_the_model_moved_most(fraction: float) -> None:
    made: Any = from_config({**SHARED, "fraction": fraction})
    public = Public(SPEC, PublicRandomness(bytes(32)), knowledge={"previous": KNOWN})
    found = made.support(public)
    order = np.argsort(-np.abs(KNOWN), kind="stable")
    top = min(int(0.9 * found.size), np.count_nonzero(KNOWN))
    assert set(order[:top]) <= set(found.tolist())


def test_a_compressor_of_another_kind_is_no_linear_one() -> None:
    plain: Compressor[Any] = from_config({"id": "topk"})
    with pytest.raises(IncompatiblePlan, match="does not commute"):
        as_linear(plain)
