"""Robust rules against a few lines of numpy, their promises under attack, and what they refuse."""

from __future__ import annotations

import itertools
import os
import resource
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpress_compression.compressor import compressors, from_config
from fedpress_compression.fixed_point import FixedPoint
from fedpress_compression.tensors import ModelSpec, TensorSpec
from fedpress_compression.update import Piece, Update
from fedpress_protocols.errors import (
    ConfigurationError,
    FedpressError,
    IncompatiblePlan,
    InvalidUpdate,
)
from fedpress_protocols.plan import CohortRules, FixedPointTerms, Profile, RoundPlan
from fedpress_strategies import Aggregator
from fedpress_strategies import from_config as strategy_from_config
from fedpress_strategies.robust import common_support, support_of
from fedpress_strategies.rows import Rows, memory_for
from fedpress_strategies.strategy import AggregationSpace

FIXED = FixedPoint.widest(max_abs=2.0**20, max_weight=10_000)
SPEC = ModelSpec((TensorSpec("w", (60, 50)), TensorSpec("b", (17,))))
Values = npt.NDArray[np.float32]

RULES: dict[str, dict[str, Any]] = {
    "median": {},
    "trimmed_mean": {"trim": 0.2},
    "krum": {"byzantine": 0.2},
    "multi_krum": {"byzantine": 0.2},
    "bulyan": {"byzantine": 0.1},
    "geometric_median": {},
    "norm_bounding": {},
}
COORDINATEWISE = ("median", "trimmed_mean", "bulyan")


def made(name: str, **settings: Any) -> dict[str, Any]:
    return {"id": name, **RULES[name], **settings}


def aggregated(
    config: dict[str, Any],
    rows: Values,
    weights: list[int] | None = None,
    memory: int = 2**20,
) -> npt.NDArray[np.float64]:
    make: Callable[..., Aggregator] = strategy_from_config(config).aggregator
    space = {} if "max_norm" in config else {"space": AggregationSpace(None, memory)}
    aggregator = make(rows.shape[1], FIXED, **space)
    for values, weight in zip(rows, weights or [1] * len(rows), strict=True):
        aggregator.add(Update.from_dense(values), weight)
    return aggregator.result()


def drawn(number: int, width: int = 3017, seed: int = 0) -> Values:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((number, width)) + rng.standard_normal(width)).astype(np.float32)


# References, as the papers have them


def distances(rows: Values) -> npt.NDArray[np.float64]:
    wide = rows.astype(np.float64)
    return np.square(wide[:, None] - wide[None]).sum(axis=2)


def krum_scores(rows: Values, forged: int) -> list[list[float]]:
    neighbours = max(2, len(rows) - forged - 2)
    found = distances(rows)
    return [sorted(np.delete(found[i], i).tolist())[:neighbours] for i in range(len(rows))]


def krum_order(rows: Values, forged: int) -> list[int]:
    return [int(i) for i in np.argsort([sum(s) for s in krum_scores(rows, forged)], kind="stable")]


def reference_median(rows: Values, weights: list[int]) -> Any:
    return np.median(rows.astype(np.float64), axis=0)


def reference_trimmed_mean(rows: Values, weights: list[int]) -> Any:
    cut = -(-len(rows) // 5)
    return np.sort(rows.astype(np.float64), axis=0)[cut : len(rows) - cut].mean(axis=0)


def reference_krum(rows: Values, weights: list[int]) -> Any:
    return rows[krum_order(rows, -(-len(rows) // 5))[0]].astype(np.float64)


def reference_multi_krum(rows: Values, weights: list[int]) -> Any:
    forged = -(-len(rows) // 5)
    return rows[krum_order(rows, forged)[: len(rows) - forged]].astype(np.float64).mean(axis=0)


def reference_bulyan(rows: Values, weights: list[int]) -> Any:
    forged = -(-len(rows) // 10)
    left, chosen = list(range(len(rows))), list[int]()
    while len(chosen) < len(rows) - 2 * forged:
        chosen.append(left.pop(krum_order(rows[left], forged)[0]))
    selected = rows[chosen].astype(np.float64)
    far = np.abs(selected - np.median(selected, axis=0))
    closest = np.argsort(far, axis=0, kind="stable")[: len(chosen) - 2 * forged]
    return np.take_along_axis(selected, closest, axis=0).mean(axis=0)


def reference_geometric_median(rows: Values, weights: list[int]) -> Any:
    wide, shares = rows.astype(np.float64), np.array(weights, np.float64)
    found = shares @ wide / shares.sum()
    for _ in range(100):
        parts = shares / np.maximum(1e-6, np.linalg.norm(wide - found, axis=1))
        found = parts @ wide / parts.sum()
    return found


def reference_norm_bounding(rows: Values, weights: list[int]) -> Any:
    norms = np.linalg.norm(rows.astype(np.float64), axis=1)
    factors = np.minimum(1, np.median(norms) / norms)
    return (np.array(weights) * factors) @ rows.astype(np.float64) / sum(weights)


REFERENCES: dict[str, Callable[[Values, list[int]], Any]] = {
    "median": reference_median,
    "trimmed_mean": reference_trimmed_mean,
    "krum": reference_krum,
    "multi_krum": reference_multi_krum,
    "bulyan": reference_bulyan,
    "geometric_median": reference_geometric_median,
    "norm_bounding": reference_norm_bounding,
}


@pytest.mark.parametrize("number", [7, 8, 15, 20])
@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_what_its_source_says(name: str, number: int) -> None:
    rows = drawn(number, seed=number)
    weights = [1 + i % 4 for i in range(number)]
    expected = REFERENCES[name](rows, weights)
    assert aggregated(made(name), rows, weights) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_a_given_norm_bounds_every_update_in_a_stream() -> None:
    rows, weights = drawn(5), [3, 1, 2, 2, 9]
    norms = np.linalg.norm(rows.astype(np.float64), axis=1)
    bound = float(np.sort(norms)[2])
    factors = np.minimum(1, bound / norms)
    for weighted, shares in ((True, np.array(weights)), (False, np.ones(5))):
        expected = (shares * factors) @ rows.astype(np.float64) / shares.sum()
        config = made("norm_bounding", max_norm=bound, weighted=weighted)
        assert aggregated(config, rows, weights) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", ["median", "trimmed_mean", "krum", "multi_krum", "bulyan"])
def test_examples_are_a_clients_own_word_and_move_nothing(name: str) -> None:
    rows = drawn(9)
    assert (aggregated(made(name), rows, [99] + [1] * 8) == aggregated(made(name), rows)).all()


@pytest.mark.parametrize("name", ["geometric_median", "norm_bounding"])
def test_examples_count_where_the_source_counts_them(name: str) -> None:
    rows, weights = drawn(9), [99] + [1] * 8
    alike = aggregated(made(name, weighted=False), rows, weights)
    assert (aggregated(made(name), rows, weights) != alike).any()
    assert (alike == aggregated(made(name), rows)).all()


# What is promised of all


@pytest.mark.parametrize("name", RULES)
def test_memory_leaves_no_trace(name: str) -> None:
    rows = drawn(12, width=20_000)
    whole = aggregated(made(name), rows, memory=2**30)
    for memory in (0, 12 * 32 * 3000, 12 * 32 * 5000, 12 * 32 * 16_384):
        assert (aggregated(made(name), rows, memory=memory) == whole).all()


@given(st.permutations(range(9)), st.sampled_from(sorted(RULES)))
def test_order_changes_nothing(order: list[int], name: str) -> None:
    rows = drawn(9, width=40)
    result, again = aggregated(made(name), rows), aggregated(made(name), rows[order])
    if name in ("median", "trimmed_mean", "krum"):
        assert (result == again).all()
    assert again == pytest.approx(result, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", RULES)
def test_updates_that_agree_are_the_result(name: str) -> None:
    rows = np.tile(drawn(1, width=1500), (9, 1))
    assert aggregated(made(name), rows) == pytest.approx(rows[0], rel=1e-12)


@pytest.mark.parametrize("name", RULES)
def test_zeros_keep_no_sign_and_no_updates_are_zeros(name: str) -> None:
    rows = np.full((9, 5), -0.0, np.float32)
    assert not np.signbit(aggregated(made(name), rows)).any()
    assert (aggregated(made(name), rows[:0]) == 0).all()


floats = st.floats(-1e6, 1e6, width=32)


@given(
    st.sampled_from(["median", "trimmed_mean"]),
    st.lists(floats, min_size=16, max_size=16),
    st.lists(floats, min_size=4, max_size=4),
)
def test_forged_updates_leave_each_coordinate_within_the_honest(
    name: str, honest: list[float], forged: list[float]
) -> None:
    rows = np.array([*honest, *forged], np.float32)[:, np.newaxis]
    result = aggregated(made(name), rows)[0]
    assert min(honest) <= result <= max(honest)


@given(
    st.lists(st.floats(-1, 1, width=32), min_size=16, max_size=16),
    st.lists(floats, min_size=4, max_size=4),
)
def test_bulyan_strays_no_farther_than_the_honest_are_apart(
    honest: list[float], forged: list[float]
) -> None:
    rows = np.array([*honest, *forged], np.float32)[:, np.newaxis]
    spread = max(honest) - min(honest)
    result = aggregated(made("bulyan", byzantine=0.2), rows)[0]
    assert min(honest) - spread - 1e-9 <= result <= max(honest) + spread + 1e-9


@given(st.sampled_from(sorted(set(RULES) - {"norm_bounding"})), st.floats(0, 5, width=32))
def test_the_farther_forged_updates_are_the_less_they_matter(name: str, power: float) -> None:
    rows = drawn(20, width=200)
    honest = rows[4:].astype(np.float64).mean(axis=0)
    rows[:4] = -(10 ** np.float32(power)) * rows[:4]
    radius = np.linalg.norm(rows[4:] - honest, axis=1).max()
    config = made(name, **({"byzantine": 0.2} if name == "bulyan" else {}))
    assert np.linalg.norm(aggregated(config, rows) - honest) <= 1.5 * radius


@given(st.floats(0, 5, width=32))
def test_a_bounded_norm_bounds_what_a_forged_update_does(power: float) -> None:
    rows = drawn(20, width=200)
    largest = np.linalg.norm(rows[4:], axis=1).max()
    rows[:4] *= -(10 ** np.float32(power))
    assert np.linalg.norm(aggregated(made("norm_bounding"), rows)) <= largest


def test_values_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    for name, bad in itertools.product(RULES, (np.nan, np.inf, 2.0**21)):
        aggregator = strategy_from_config(made(name)).aggregator(3, FIXED)
        with pytest.raises(InvalidUpdate, match=r"NaN|larger than the plan"):
            aggregator.add(Update.from_dense(np.array([0, bad, 0], np.float32)), 1)
        assert (aggregator.result() == 0).all()
        assert not aggregator.linear


@pytest.mark.parametrize("name", sorted(set(RULES) - {"norm_bounding"}))
def test_sizes_and_weights_are_the_plans(name: str) -> None:
    aggregator = strategy_from_config(made(name)).aggregator(3, FIXED)
    with pytest.raises(InvalidUpdate, match="an update of 4 values, expected 3"):
        aggregator.add(Update.from_dense(np.zeros(4, np.float32)), 1)
    for weight in (0, 10_001):
        with pytest.raises(InvalidUpdate, match="where the plan allows 10000 in all"):
            aggregator.add(Update.from_dense(np.zeros(3, np.float32)), weight)


# Space


def test_rows_lie_in_a_file_without_a_name_and_go_with_their_owner(tmp_path: Path) -> None:
    descriptors = len(os.listdir("/dev/fd"))
    rows = Rows(5000, AggregationSpace(tmp_path, 0))
    for values in drawn(3, 5000):
        rows.add(values)
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/dev/fd")) == descriptors + 1
    assert rows.products().shape == (3, 3)
    del rows
    assert len(os.listdir("/dev/fd")) == descriptors


def test_a_row_that_finds_no_space_is_not_there() -> None:
    first, second = drawn(2, 5000)
    rows = Rows(5000, AggregationSpace())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
        with pytest.raises(OSError, match="too large"):
            rows.add(first)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert rows.number == 0
    rows.add(second)
    assert (np.concatenate([block[0] for _, block in rows.blocks()]) == second).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_memory_stays_within_its_limit(name: str) -> None:
    """Besides the limit: the result as the rule makes it, and as the aggregator gives it."""
    width, limit = 60_000, memory_for(30)
    rows = drawn(30, width)
    aggregator: Any = strategy_from_config(made(name)).aggregator(width, FIXED)
    aggregator._rows._memory = limit
    for values in rows:
        aggregator.add(Update.from_dense(values), 1)
    tracemalloc.start()
    aggregator.result()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak <= limit + 3 * 8 * width < rows.nbytes


def test_distances_are_symmetric() -> None:
    given_rows = drawn(6, 3000)
    given_rows[4] = given_rows[1]
    rows = Rows(3000, AggregationSpace())
    for values in given_rows:
        rows.add(values)
    found = rows.squared_distances()
    assert (found == found.T).all()
    assert (found.diagonal() == 0).all()
    assert found == pytest.approx(distances(given_rows), rel=1e-9, abs=1e-9)
    assert rows.norms() == pytest.approx(np.linalg.norm(given_rows.astype(np.float64), axis=1))


# Plans


def plan(
    *configs: dict[str, Any], size: int = 20, minimum: int = 19, lane: Any = "clear"
) -> RoundPlan:
    made_plan = RoundPlan(
        task="t",
        round=1,
        attempt=1,
        model="0" * 64,
        spec=SPEC.digest,
        profiles=tuple(
            Profile(name=f"p{i}", compressor=from_config(c)) for i, c in enumerate(configs)
        ),
        cohort=CohortRules(size=size, minimum=minimum),
        deadline=0.0,
        fixed_point=FixedPointTerms(scale_bits=16, max_abs=16.0, max_examples=4),
        public_seed="1" * 64,
        previous_model="0" * 64,
        first_model="0" * 64,
    )
    return made_plan.model_copy(update={"lane": lane})


def planned(
    config: dict[str, Any], of: RoundPlan, space: AggregationSpace | None = None
) -> Aggregator:
    strategy = strategy_from_config(config)
    assert strategy.planned_aggregator is not None
    zeros = np.zeros(SPEC.size, np.float32)
    public = of.public(SPEC, {"previous": zeros, "drift": zeros})
    return strategy.planned_aggregator(of, public, space or AggregationSpace())


SENTENCE = (
    "coordinate-wise rules need dense or shared-support updates: the median of client-chosen "
    "top-k is zero nearly everywhere"
)


@pytest.mark.parametrize(
    "config",
    [
        {"id": "topk"},
        {"id": "threshold"},
        {"id": "stc"},
        {"id": "bernoulli"},
        {"id": "ecsq"},
        {"id": "randomk", "shared": False},
        {"id": "count_sketch", "recover": "median"},
        {"id": "per_tensor"},
        {"id": "error_feedback", "inner": {"id": "clip", "inner": {"id": "topk"}}},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", COORDINATEWISE)
def test_coordinate_wise_rules_refuse_supports_that_clients_choose(
    name: str, config: dict[str, Any]
) -> None:
    with pytest.raises(IncompatiblePlan, match=SENTENCE):
        planned(made(name), plan(config))


@pytest.mark.parametrize(
    "configs",
    [
        [{"id": "none"}],
        [{"id": "quantize", "bits": 4}, {"id": "eden"}],
        [{"id": "shared_support", "fraction": 0.1}],
        [{"id": "error_feedback", "inner": {"id": "randomk", "fraction": 0.1, "bits": 8}}],
        [{"id": "per_tensor", "large": {"id": "randomk"}, "small": {"id": "none"}}],
        [{"id": "clip", "inner": {"id": "powersgd"}}],
    ],
    ids=str,
)
@pytest.mark.parametrize("name", RULES)
def test_every_rule_takes_dense_and_shared_supports(
    name: str, configs: list[dict[str, Any]]
) -> None:
    """And over a shared support the result is that of the dense rule, zero elsewhere."""
    of = plan(*configs)
    zeros = np.zeros(SPEC.size, np.float32)
    public = of.public(SPEC, {"previous": zeros, "drift": zeros})
    compressor = of.compressor("p0")
    aggregator, dense = planned(made(name), of), []
    for client, values in enumerate(drawn(19, SPEC.size) / 100):
        rng = np.random.default_rng(client)
        symbols, _ = compressor.compress(values, compressor.init(SPEC), public, rng)
        update = compressor.decompress(symbols, public)
        aggregator.add(update, 1)
        dense.append(update.dense())
    result = aggregator.result()
    assert result == pytest.approx(aggregated(made(name), np.array(dense)), rel=1e-9, abs=1e-12)
    support = common_support(of, public)
    assert (result[~support] == 0).all()
    assert (result[support] != 0).any()


def test_over_a_shared_support_the_disk_holds_the_support_alone(tmp_path: Path) -> None:
    aggregator: Any = planned(made("median"), plan({"id": "randomk", "fraction": 0.01}))
    assert aggregator._rows.width == 31


def test_profiles_must_have_one_support() -> None:
    with pytest.raises(IncompatiblePlan, match=f"{SENTENCE}.*'p0' and 'p1' they are not the same"):
        planned(made("median"), plan({"id": "none"}, {"id": "randomk"}))


@pytest.mark.parametrize("name", ["krum", "multi_krum", "geometric_median", "norm_bounding"])
def test_rules_for_whole_vectors_take_any_support(name: str) -> None:
    aggregator = planned(made(name), plan({"id": "topk"}, {"id": "randomk"}))
    for client in range(19):
        where = np.array([client, client + 30], np.int64)
        aggregator.add(Update(SPEC.size, (Piece(where, np.ones(2, np.float32)),)), 1)
    result = aggregator.result()
    assert np.flatnonzero(result).size >= 2
    assert (result[60:] == 0).all()


@pytest.mark.parametrize("name", COORDINATEWISE)
def test_an_update_with_holes_is_refused_without_a_plan_too(name: str) -> None:
    aggregator = strategy_from_config(made(name)).aggregator(4, FIXED)
    hole = Update(4, (Piece(np.array([1, 2], np.int64), np.ones(2, np.float32)),))
    with pytest.raises(InvalidUpdate, match=SENTENCE):
        aggregator.add(hole, 1)
    assert (aggregator.result() == 0).all()


def test_what_two_uploads_tell_holds_for_every_compressor() -> None:
    """A compressor that is said to have a common support gives it for updates of any kind."""
    zeros = np.zeros(SPEC.size, np.float32)
    for wire_id in compressors():
        try:
            of = plan({"id": wire_id})
        except ValueError:  # one that no plan takes by itself
            continue
        public = of.public(SPEC, {"previous": zeros, "drift": zeros})
        compressor = of.compressor("p0")
        try:
            support = common_support(of, public)
        except IncompatiblePlan:
            continue
        for seed in range(3):
            values = drawn(1, SPEC.size, seed)[0] * np.float32(10.0 ** (seed - 2))
            values[seed::2] = 0
            state, rng = compressor.init(SPEC), np.random.default_rng(seed)
            symbols, _ = compressor.compress(values, state, public, rng)
            found = support_of(compressor.decompress(symbols, public))
            assert (found == support).all(), wire_id


@pytest.mark.parametrize("name", [*RULES, "norm_bounding to a norm"])
def test_masked_updates_cannot_be_compared(name: str) -> None:
    config = made("norm_bounding", max_norm=1.0) if " " in name else made(name)
    dense = {"id": "quantize", "clip": 0.1}
    with pytest.raises(IncompatiblePlan, match=r"masked lane sees the sum alone.*clip"):
        planned(config, plan(dense, lane="masked"))


@pytest.mark.parametrize(
    ("config", "size", "minimum", "says"),
    [
        (made("krum"), 20, 4, "close with 4 uploads, and krum with 1 forged needs at least 5"),
        (made("krum", byzantine=0.45), 20, 15, "krum with 7 forged needs at least 17"),
        (
            made("bulyan", byzantine=0.2),
            20,
            18,
            "close with 18 uploads, and bulyan with 4 forged needs at least 19",
        ),
        (
            made("trimmed_mean", trim=0.4),
            9,
            2,
            "2 uploads, and trimmed_mean without 1 updates at either end",
        ),
        (made("multi_krum"), 3000, 2999, "takes 288000000 bytes of memory"),
        (made("median"), 9000, 8999, "takes 294912000 bytes of memory"),
    ],
    ids=str,
)
def test_a_cohort_that_cannot_work_is_refused(
    config: dict[str, Any], size: int, minimum: int, says: str
) -> None:
    with pytest.raises(IncompatiblePlan, match=says):
        planned(config, plan({"id": "none"}, size=size, minimum=minimum))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (made("trimmed_mean", trim=0.5), r"trim must lie in \[0, 0.5\)"),
        (made("krum", byzantine=-0.1), r"byzantine must lie in \[0, 0.5\)"),
        (made("bulyan", byzantine=0.6), r"byzantine must lie in \[0, 0.5\)"),
        (made("geometric_median", smoothing=0), "smoothing must be positive"),
        (made("geometric_median", iterations=0), "iterations must be at least 1"),
        (made("geometric_median", weighted=1), "weighted must be true or false"),
        (made("norm_bounding", max_norm=0), "max_norm must be positive"),
        (made("norm_bounding", weighted="no"), "weighted must be true or false"),
        (made("median", momentum=1), r"momentum must lie in \[0, 1\)"),
    ],
)
def test_a_setting_that_cannot_work_says_why(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        strategy_from_config(config)


def test_too_few_updates_are_an_error_of_the_aggregation() -> None:
    with pytest.raises(FedpressError, match="bulyan with 1 forged needs at least 7 updates, not 3"):
        aggregated(made("bulyan"), drawn(3))


@pytest.mark.parametrize("name", RULES)
def test_strategies_say_what_they_keep(name: str) -> None:
    plain = strategy_from_config(made(name))
    heavy = strategy_from_config(made(name, momentum=0.9, learning_rate=0.5))
    assert (plain.properties.server_state, heavy.properties.server_state) == (
        "none",
        "velocity [d]",
    )
    assert plain.properties.source
    assert not plain.linear
    assert heavy.optimizer.init(np.zeros(3, np.float32)).keys() == {"velocity"}
