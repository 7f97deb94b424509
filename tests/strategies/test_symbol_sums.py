"""Sums of symbols: exact, and the same model as from decoded updates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedpress_compression.compressor import Compressor, Public
from fedpress_compression.compressors.count_sketch import CountSketch
from fedpress_compression.compressors.none import Uncompressed
from fedpress_compression.compressors.powersgd_onesided import OneSidedPowerSGD
from fedpress_compression.compressors.quantize import Quantize
from fedpress_compression.fixed_point import FixedPoint
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.tensors import ModelSpec, TensorSpec
from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan, InvalidUpdate
from fedpress_strategies import from_config
from fedpress_strategies.strategy import SymbolSum, WeightedMean

SPEC = ModelSpec((TensorSpec("w", (30, 40)), TensorSpec("b", (30,))))
FIXED = FixedPoint.widest(max_abs=64.0, max_weight=100)
RNG = np.random.default_rng(0)
PREVIOUS = RNG.standard_normal(SPEC.size).astype(np.float32)
PUBLIC = Public(SPEC, PublicRandomness(bytes(32)), {"previous": PREVIOUS}, round=2)


@pytest.mark.parametrize("made", [OneSidedPowerSGD(2), CountSketch(), Quantize(8, clip=4.0)])
def test_summed_symbols_give_the_mean_of_the_updates(made: Compressor[Any]) -> None:
    sums, mean = SymbolSum(made, PUBLIC, FIXED), WeightedMean(SPEC.size, FIXED)
    for weight in (3, 50, 7):
        update = RNG.standard_normal(SPEC.size).astype(np.float32)
        symbols, _ = made.compress(update, made.init(SPEC), PUBLIC, RNG)
        sums.add(symbols, weight)
        mean.add(made.decompress(symbols, PUBLIC), weight)
    assert sums.result() == pytest.approx(mean.result(), abs=1e-5)


def test_no_symbols_are_no_step() -> None:
    assert not SymbolSum(CountSketch(), PUBLIC, FIXED).result().any()


def test_what_cannot_be_summed_is_refused() -> None:
    with pytest.raises(IncompatiblePlan, match="does not commute with the sum"):
        SymbolSum(Uncompressed(), PUBLIC, FIXED)
    with pytest.raises(IncompatiblePlan, match="32-bit symbols can overflow"):
        SymbolSum(CountSketch(), PUBLIC, FixedPoint(0, 1.0, 2**32))


def test_a_refused_upload_leaves_the_sum_alone() -> None:
    made = Quantize(8, clip=4.0)
    sums = SymbolSum(made, PUBLIC, FIXED)
    update = RNG.standard_normal(SPEC.size).astype(np.float32)
    symbols, _ = made.compress(update, None, PUBLIC, RNG)
    sums.add(symbols, 60)
    before = sums.result()
    with pytest.raises(InvalidUpdate, match="weight 41 on top of 60"):
        sums.add(symbols, 41)
    with pytest.raises(InvalidUpdate, match="expected 1230"):
        sums.add((symbols[0][:-1],), 1)
    assert (sums.result() == before).all()


@pytest.mark.parametrize("made", [CountSketch(seed=1), CountSketch(rows=3, seed=0), Quantize()])
def test_fetchsgd_takes_its_own_sketch_and_no_other(made: Compressor[Any]) -> None:
    strategy = from_config({"id": "fetchsgd"})
    assert strategy.symbol_aggregator is not None
    strategy.symbol_aggregator(CountSketch(seed=0), PUBLIC, FIXED)
    with pytest.raises(IncompatiblePlan, match="fetchsgd takes count_sketch with rows 5"):
        strategy.symbol_aggregator(made, PUBLIC, FIXED)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"learning_rate": 0}, "learning_rate must be positive"),
        ({"momentum": 1.0}, r"momentum must lie in \[0, 1\)"),
        ({"fraction": 0.0}, r"fraction must lie in \(0, 1\]"),
    ],
)
def test_a_configuration_that_cannot_work_says_why(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        from_config({"id": "fetchsgd", **config})
