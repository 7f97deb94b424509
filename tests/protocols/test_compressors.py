"""What every registered compressor promises, and what each one is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedpress_protocols.coding import decode, encode
from fedpress_protocols.coding.fields import check_symbols
from fedpress_protocols.compression.compressor import (
    Compressor,
    Public,
    compressor,
    compressors,
    from_config,
    to_config,
)
from fedpress_protocols.compression.error_feedback import ErrorFeedback
from fedpress_protocols.compression.none import Uncompressed
from fedpress_protocols.compression.per_tensor import PerTensor
from fedpress_protocols.compression.quantize import Quantize
from fedpress_protocols.compression.topk import TopK
from fedpress_protocols.errors import IncompatiblePlan, InvalidUpdate
from fedpress_protocols.model import ModelSpec, TensorSpec, Vector
from fedpress_protocols.randomness import PublicRandomness

SPEC = ModelSpec(
    (
        TensorSpec("embed.weight", (40, 30)),
        TensorSpec("embed.bias", (30,)),
        TensorSpec("steps", (), "int64"),
        TensorSpec("head.weight", (7, 3), "float16"),
        TensorSpec("gain", ()),
    )
)
PUBLIC = Public(SPEC, PublicRandomness(bytes(32)))
EVERY: list[Compressor[Any]] = [
    *(
        from_config({"id": name, **({"inner": {"id": "topk"}} if name == "error_feedback" else {})})
        for name in compressors()
    ),
    *(Quantize(bits, rounding) for bits in (2, 3, 8) for rounding in ("nearest", "stochastic")),
    *(TopK(0.05, None, bits, scope) for bits in (0, 1, 4) for scope in ("model", "tensor")),
    TopK(count=3),
    TopK(fraction=1.0),
    PerTensor(TopK(0.1), rules=(("*.bias", Uncompressed()), ("gain", Quantize(2)))),
    ErrorFeedback(PerTensor(TopK(0.02, magnitude_bits=1, scope="tensor"), spare_1d=False)),
]


def by_config(made: Compressor[Any]) -> str:
    return repr(made).replace(" ", "")


def heavy_tailed(seed: int, size: int = SPEC.size) -> Vector:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(size) ** 3 * (rng.random(size) > 0.3)).astype(np.float32)


def special_updates() -> dict[str, Vector]:
    size = SPEC.size
    tiny = np.float32(1e-45)
    largest = np.finfo(np.float32).max / np.float32(2)
    one = np.zeros(size, np.float32)
    one[-1] = -3
    return {
        "zero": np.zeros(size, np.float32),
        "negative zero": np.full(size, -0.0, np.float32),
        "constant": np.full(size, 0.25, np.float32),
        "tied": np.tile(np.array([1, -1], np.float32), size)[:size],
        "denormal": np.full(size, tiny),
        "huge": np.where(np.arange(size) % 2, largest, -largest).astype(np.float32),
        "one value": one,
        "wide": np.geomspace(1e-38, 1e38, size).astype(np.float32),
        "heavy tail": heavy_tailed(1),
    }


@pytest.mark.parametrize("made", EVERY, ids=by_config)
def test_configuration_survives_json(made: Compressor[Any]) -> None:
    assert from_config(to_config(made)) == made


@pytest.mark.parametrize("made", EVERY, ids=by_config)
@pytest.mark.parametrize("update", special_updates().values(), ids=special_updates().keys())
def test_symbols_fill_the_layout_and_survive_bytes(made: Compressor[Any], update: Vector) -> None:
    before = update.copy()
    symbols, _ = made.compress(update, made.init(SPEC), PUBLIC, np.random.default_rng(0))
    layout = made.layout(SPEC)
    check_symbols(symbols, layout)
    decoded = decode(encode(symbols, layout), layout)
    sent, received = made.decompress(symbols, PUBLIC), made.decompress(decoded, PUBLIC)
    assert sent.dense().tobytes() == received.dense().tobytes()
    assert sent.size == SPEC.size
    assert np.isfinite(sent.dense()).all()
    assert (update == before).all(), "the caller's update was changed"


@pytest.mark.parametrize("made", EVERY, ids=by_config)
@pytest.mark.parametrize("fault", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused(made: Compressor[Any], fault: float) -> None:
    update = heavy_tailed(0)
    update[5] = fault
    with pytest.raises(InvalidUpdate, match="NaN or infinity"):
        made.compress(update, made.init(SPEC), PUBLIC, np.random.default_rng(0))


@pytest.mark.parametrize("made", EVERY, ids=by_config)
def test_an_update_of_another_size_is_refused(made: Compressor[Any]) -> None:
    if isinstance(made, ErrorFeedback | PerTensor):
        return  # their parts are cut from the vector before anyone can look at it
    with pytest.raises(InvalidUpdate, match="is due"):
        made.compress(
            np.zeros(SPEC.size + 1, np.float32),
            made.init(SPEC),
            PUBLIC,
            np.random.default_rng(0),
        )


@pytest.mark.parametrize("made", EVERY, ids=by_config)
def test_commuting_with_the_sum_is_claimed_only_where_it_holds(made: Compressor[Any]) -> None:
    assert made.commutes_with_sum is False, "prove the claim here: sum three updates' symbols"


@pytest.mark.parametrize("made", EVERY, ids=by_config)
def test_one_tensor_of_one_value_works(made: Compressor[Any]) -> None:
    spec = ModelSpec((TensorSpec("only", (1,)),))
    public = Public(spec, PUBLIC.randomness)
    value = np.array([0.5], np.float32)
    symbols, _ = made.compress(value, made.init(spec), public, np.random.default_rng(0))
    assert made.decompress(symbols, public).dense() == pytest.approx([0.5], rel=1e-3)


@given(hnp.arrays(np.float32, SPEC.size, elements=st.floats(-100, 100, width=32)))
def test_topk_keeps_the_largest_and_loses_no_more_than_it_must(update: Vector) -> None:
    made = TopK(count=50, magnitude_bits=4)
    symbols, _ = made.compress(update, None, PUBLIC, np.random.default_rng(0))
    kept = symbols[0]
    assert kept.size == min(50, np.count_nonzero(update))
    others = np.delete(np.abs(update), kept.astype(np.int64))
    assert np.abs(update[kept]).min(initial=np.inf) >= others.max(initial=0)
    lost = update - made.decompress(symbols, PUBLIC).dense()
    assert np.linalg.norm(lost.astype(np.float64)) <= np.linalg.norm(update.astype(np.float64))


def test_topk_breaks_ties_by_the_lower_index() -> None:
    update = np.ones(SPEC.size, np.float32)
    symbols, _ = TopK(count=4).compress(update, None, PUBLIC, np.random.default_rng(0))
    assert symbols[0].tolist() == [0, 1, 2, 3]


def test_topk_counts_from_the_model_or_from_each_tensor() -> None:
    update = heavy_tailed(3)
    update[SPEC.slices["embed.weight"]] *= 1000
    rng = np.random.default_rng(0)
    over_model, _ = TopK(0.01).compress(update, None, PUBLIC, rng)
    per_tensor, _ = TopK(0.01, scope="tensor").compress(update, None, PUBLIC, rng)
    assert over_model[0].max() < SPEC.slices["embed.weight"].stop
    assert {
        int(np.searchsorted([1200, 1230, 1251, 1252], p, side="right")) for p in per_tensor[0]
    } >= {0, 1, 2}


def test_topk_levels_begin_at_the_threshold() -> None:
    update = heavy_tailed(4)
    symbols, _ = TopK(0.05, magnitude_bits=2).compress(
        update, None, PUBLIC, np.random.default_rng(0)
    )
    threshold = np.abs(update[symbols[0]]).min()
    values = np.abs(TopK(0.05, magnitude_bits=2).decompress(symbols, PUBLIC).pieces[0].values)
    assert values.min() >= threshold * (1 - 1e-3)


def test_topk_without_magnitude_bits_sends_the_mean_of_what_it_kept() -> None:
    update = heavy_tailed(5)
    made = TopK(0.05, magnitude_bits=0)
    symbols, _ = made.compress(update, None, PUBLIC, np.random.default_rng(0))
    values = made.decompress(symbols, PUBLIC).pieces[0].values
    mean = np.abs(update[symbols[0]]).mean()
    assert np.abs(values) == pytest.approx(np.full(values.size, mean), rel=1e-3)
    assert (np.sign(values) == np.sign(update[symbols[0]])).all()


@pytest.mark.parametrize("bits", range(2, 9))
def test_nearest_rounding_errs_by_half_a_step(bits: int) -> None:
    update = heavy_tailed(6)
    made = Quantize(bits)
    symbols, _ = made.compress(update, None, PUBLIC, np.random.default_rng(0))
    received = made.decompress(symbols, PUBLIC).dense()
    for part in SPEC.slices.values():
        step = np.abs(update[part]).max() / made.levels
        assert np.abs(update[part] - received[part]).max() <= step * 0.5001


def test_stochastic_rounding_is_unbiased() -> None:
    """The mean of 2,000 roundings lies within Bernstein's bound, coordinate by coordinate."""
    spec = ModelSpec((TensorSpec("x", (64,)),))
    public = Public(spec, PUBLIC.randomness)
    update = heavy_tailed(7, 64)
    made = Quantize(3, "stochastic")
    rng = np.random.default_rng(8)
    total = np.zeros(64)
    for _ in range(2000):
        symbols, _ = made.compress(update, None, public, rng)
        total += made.decompress(symbols, public).dense()
    step = np.abs(update).max() / made.levels
    share = update / step - np.floor(update / step)
    bound = step * (5 * np.sqrt(share * (1 - share) / 2000) + 12 / 2000)
    assert (np.abs(total / 2000 - update) <= bound).all()


def test_small_and_flat_tensors_are_spared_from_sparsification() -> None:
    update = heavy_tailed(9)
    made = PerTensor(TopK(0.01))
    symbols, _ = made.compress(update, made.init(SPEC), PUBLIC, np.random.default_rng(0))
    received = SPEC.unflatten(made.decompress(symbols, PUBLIC).dense())
    sent = SPEC.unflatten(update)
    for name in ("embed.bias", "head.weight", "gain"):
        step = np.abs(sent[name]).max() / 127
        assert np.abs(received[name] - sent[name]).max() <= step
    assert np.count_nonzero(received["embed.weight"]) == 12


def test_the_first_rule_that_matches_a_name_decides() -> None:
    made = PerTensor(rules=(("*.bias", Uncompressed()), ("embed.*", Quantize(2))))
    update = heavy_tailed(10)
    symbols, _ = made.compress(update, made.init(SPEC), PUBLIC, np.random.default_rng(0))
    received = SPEC.unflatten(made.decompress(symbols, PUBLIC).dense())
    sent = SPEC.unflatten(update)
    assert (received["embed.bias"] == sent["embed.bias"]).all()
    assert len(np.unique(received["embed.weight"])) == 3


def test_feedback_conserves_what_was_computed() -> None:
    made = ErrorFeedback(PerTensor(TopK(0.02)))
    state = made.init(SPEC)
    rng = np.random.default_rng(11)
    computed, received = np.zeros(SPEC.size), np.zeros(SPEC.size)
    for number in range(30):
        update = heavy_tailed(number)
        symbols, after = made.compress(update, state, PUBLIC, rng)
        sent = made.decompress(symbols, PUBLIC)
        computed += update
        if number % 3:
            received += sent.dense()
            state = after
        else:
            state = after.take_back(sent)
    assert received + state.residual == pytest.approx(computed, abs=1e-3)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "no compressor has the id None; known are"),
        ({"id": "nonsense"}, "no compressor has the id 'nonsense'"),
        ({"id": "topk", "k": 3}, "takes fraction, count, magnitude_bits, scope, not k"),
        ({"id": "topk", "fraction": 0}, r"fraction must lie in \(0, 1\]"),
        ({"id": "topk", "fraction": "many"}, "not supported between"),
        ({"id": "topk", "count": 0}, "count must be at least 1"),
        ({"id": "topk", "magnitude_bits": 5}, "magnitude_bits must be 0 to 4"),
        ({"id": "topk", "scope": "layer"}, "scope is model or tensor"),
        ({"id": "quantize", "bits": 1}, "bits must be a whole number from 2 to 8"),
        ({"id": "quantize", "bits": 2.5}, "bits must be a whole number from 2 to 8"),
        ({"id": "quantize", "rounding": "up"}, "rounding is nearest or stochastic"),
        ({"id": "error_feedback"}, "missing 1 required positional argument: 'inner'"),
        ({"id": "error_feedback", "inner": 3}, "inner must be a compressor"),
        (
            {"id": "error_feedback", "inner": {"id": "error_feedback", "inner": {"id": "none"}}},
            "other than this",
        ),
        ({"id": "per_tensor", "large": 3}, "3 is not a compressor"),
        ({"id": "per_tensor", "min_size": -1}, "min_size must be 0 or more"),
        ({"id": "per_tensor", "rules": [["*"]]}, "rules are pairs"),
        (
            {"id": "per_tensor", "small": {"id": "error_feedback", "inner": {"id": "none"}}},
            "error feedback goes around per_tensor",
        ),
    ],
)
def test_a_configuration_that_cannot_work_says_why(config: dict[str, Any], says: str) -> None:
    with pytest.raises(IncompatiblePlan, match=says):
        from_config(config)


def test_a_wire_id_belongs_to_one_class() -> None:
    with pytest.raises(ValueError, match="wire id 'topk' is TopK's"):
        compressor("topk")(type("Other", (), {}))


def test_installed_packages_bring_compressors_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded: list[str] = []

    class Entry:
        def load(self) -> None:
            loaded.append("theirs")

    def installed(group: str) -> list[Entry]:
        return [Entry()] if group == "fedpress.compressors" else []

    monkeypatch.setattr("fedpress_protocols.compression.compressor.entry_points", installed)
    assert "topk" in compressors()
    assert loaded == ["theirs"]
