"""Aggregators that may be added up in batches: any split, in any order, comes to the same last
bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpress_compression.compressor import Public
from fedpress_compression.compressors.count_sketch import CountSketch
from fedpress_compression.fixed_point import FixedPoint
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.tensors import ModelSpec, TensorSpec
from fedpress_compression.update import Update
from fedpress_protocols.errors import InvalidUpdate
from fedpress_strategies import Strategy, from_config, strategies
from fedpress_strategies.strategy import EXAMPLE_TERMS, Divisible, SymbolSum, example_of
from tests.lengths import examples

SIZE = 40
FIXED = FixedPoint.widest(max_abs=256.0, max_weight=10_000)


def made_of(name: str) -> Strategy:
    return from_config(example_of(name), EXAMPLE_TERMS)


DIVISIBLE = [name for name in strategies() if made_of(name).divisible]
SPEC = ModelSpec((TensorSpec("w", (SIZE,)),))
PUBLIC = Public(SPEC, PublicRandomness(bytes(32)), {}, round=1)
Weights = list[int]
splits = st.lists(st.lists(st.integers(1, 99), max_size=4), min_size=1, max_size=5)


def update(seed: int) -> Update:
    return Update.from_dense(np.random.default_rng(seed).normal(0, 3, SIZE).astype(np.float32))


def test_means_are_divisible_and_aggregators_that_compare_updates_are_not() -> None:
    assert {"fedavg", "fedavgm", "fedbuff", "fetchsgd", "scaffold"} <= set(DIVISIBLE)
    assert not {"median", "krum", "trimmed_mean", "qfedavg", "adasum"} & set(DIVISIBLE)


@pytest.mark.parametrize("name", DIVISIBLE)
@settings(max_examples=examples(6, 20), deadline=None)
@given(batches=splits)
def test_batches_in_any_order_come_to_what_all_at_once_do(
    name: str, batches: list[Weights]
) -> None:
    made = made_of(name)
    whole, parts, seed = made.aggregator(SIZE, FIXED), [], 0
    for weights in batches:
        batch = made.aggregator(SIZE, FIXED)
        for weight in weights:
            seed += 1
            for aggregator in (whole, batch):
                aggregator.add(update(seed), weight)
        assert isinstance(batch, Divisible)
        parts.append(batch.part())
    merged: Any = made.aggregator(SIZE, FIXED)
    for part in reversed(parts):
        merged.merge(part)
    assert merged.result().tobytes() == whole.result().tobytes()


@settings(max_examples=examples(6, 20), deadline=None)
@given(batches=splits)
def test_sums_of_symbols_are_divisible_too(batches: list[Weights]) -> None:
    made, rng = CountSketch(), np.random.default_rng(0)
    whole, merged = SymbolSum(made, PUBLIC, FIXED), SymbolSum(made, PUBLIC, FIXED)
    for weights in batches:
        batch = SymbolSum(made, PUBLIC, FIXED)
        for weight in weights:
            symbols, _ = made.compress(update(weight).dense(), None, PUBLIC, rng)
            whole.add(symbols, weight)
            batch.add(symbols, weight)
        merged.merge(batch.part())
    assert merged.result().tobytes() == whole.result().tobytes()


@pytest.mark.parametrize("name", ["fedavg", "fedbuff"])
def test_batches_beyond_the_plan_s_bounds_are_refused(name: str) -> None:
    made = made_of(name)
    merged, batch = (made.aggregator(SIZE, FIXED) for _ in range(2))
    batch.add(update(1), 6_000)
    assert isinstance(merged, Divisible)
    assert isinstance(batch, Divisible)
    merged.merge(batch.part())
    before = merged.result().tobytes()
    with pytest.raises(InvalidUpdate, match="on top of"):
        merged.merge(batch.part())
    assert merged.result().tobytes() == before


def test_symbols_beyond_the_plan_s_bounds_are_refused() -> None:
    made, rng = CountSketch(), np.random.default_rng(0)
    merged, batch = (SymbolSum(made, PUBLIC, FIXED) for _ in range(2))
    symbols, _ = made.compress(update(1).dense(), None, PUBLIC, rng)
    batch.add(symbols, 6_000)
    merged.merge(batch.part())
    with pytest.raises(InvalidUpdate, match="weight 6000 on top of 6000"):
        merged.merge(batch.part())
