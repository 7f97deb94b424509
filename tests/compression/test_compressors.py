"""What every registered compressor promises, and what each one is."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from fedpress_compression import compressor as registry
from fedpress_compression.coding import decode, encode
from fedpress_compression.coding.fields import Positions, Reals, Symbols, check_symbols
from fedpress_compression.compressor import (
    Compressor,
    Properties,
    Public,
    compressor,
    compressors,
    from_config,
    members,
    properties,
    to_config,
)
from fedpress_compression.compressors.bernoulli import Bernoulli
from fedpress_compression.compressors.cafe import Cafe
from fedpress_compression.compressors.clip import Clip
from fedpress_compression.compressors.coded import Coded
from fedpress_compression.compressors.count_sketch import CountSketch
from fedpress_compression.compressors.dgc import Dgc
from fedpress_compression.compressors.ecsq import Ecsq
from fedpress_compression.compressors.eden import Eden
from fedpress_compression.compressors.error_feedback import ErrorFeedback, check_feedback
from fedpress_compression.compressors.lowrank import LowRank
from fedpress_compression.compressors.none import Uncompressed
from fedpress_compression.compressors.per_tensor import KINDS, PerTensor, kinds_of
from fedpress_compression.compressors.powersgd import PowerSGD
from fedpress_compression.compressors.qsgd import Qsgd
from fedpress_compression.compressors.quantize import Quantize
from fedpress_compression.compressors.randomk import RandomK
from fedpress_compression.compressors.shared_support import SharedSupport
from fedpress_compression.compressors.sign import Sign
from fedpress_compression.compressors.simhash import SimHash
from fedpress_compression.compressors.structured import Structured
from fedpress_compression.compressors.successive_refinement import SuccessiveRefinement
from fedpress_compression.compressors.terngrad import TernGrad
from fedpress_compression.compressors.threshold import Threshold
from fedpress_compression.compressors.topk import TopK
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.tensors import ModelSpec, TensorSpec, Vector
from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan, InvalidUpdate
from fedpress_protocols.model import Model

SPEC = ModelSpec(
    (
        TensorSpec("embed.weight", (40, 30)),
        TensorSpec("embed.bias", (30,)),
        TensorSpec("steps", (), "int64"),
        TensorSpec("head.weight", (7, 3), "float16"),
        TensorSpec("gain", ()),
    )
)


def public(spec: ModelSpec, seed: int = 0) -> Public:
    """What both ends know of `spec`; of `previous` every other value is zero."""
    rng = np.random.default_rng(seed)
    known = rng.standard_normal((3, spec.size)).astype(np.float32) * 1e-3
    known[0, ::2] = 0
    randomness = PublicRandomness(seed.to_bytes(32, "little"))
    return Public(spec, randomness, {"previous": known[0], "drift": known[1], "own": known[2]})


PUBLIC = public(SPEC)


def by_default(name: str) -> Compressor[Any]:
    """The compressor `name` with its defaults, around top-k if it must be around something."""
    fields = {field.name: field for field in dataclasses.fields(compressors()[name])}
    bare = fields.get("inner")
    needs_inner = bare is not None and bare.default_factory is dataclasses.MISSING
    return from_config({"id": name, **({"inner": {"id": "topk"}} if needs_inner else {})})


EVERY: list[Compressor[Any]] = [
    *(by_default(name) for name in compressors()),
    *(Quantize(bits, rounding) for bits in (1, 2, 3) for rounding in ("nearest", "stochastic")),
    Quantize(8, "stochastic"),
    *(
        Quantize(bits, rounding, "affine")
        for bits in (1, 4)
        for rounding in ("nearest", "stochastic")
    ),
    Quantize(4, "nearest", clip=0.1),
    Quantize(8, "stochastic", clip=0.1),
    *(TopK(0.05, None, bits, scope) for bits in (0, 1, 4) for scope in ("model", "tensor")),
    TopK(count=3),
    TopK(fraction=1.0),
    TopK(0.05, chunk=100),
    TopK(0.05, scope="tensor", chunk=64),
    RandomK(0.05, unbiased=True),
    RandomK(count=40, unbiased=True, shared=False),
    RandomK(0.05, bits=8),
    RandomK(0.3, unbiased=True, bits=4, rounding="stochastic"),
    RandomK(0.3, unbiased=True, shared=False, bits=4, rounding="stochastic"),
    RandomK(0.6, unbiased=True),
    Bernoulli(0.3),
    Bernoulli(0.8),
    Threshold(0.5, magnitude_bits=0),
    Threshold(1e-6, at_most=0.02),
    SharedSupport(0.3, explore=1.0, bits=4, rounding="stochastic"),
    Structured(None),
    Structured(4, "stochastic"),
    Qsgd(1, 64),
    Qsgd(16),
    CountSketch(recover="median"),
    Sign(100),
    TernGrad(2.5),
    *(Eden(bits, "unbiased") for bits in (0.3, 2, 4)),
    *(Eden(bits, "mmse", 10) for bits in (0.3, 1, 3)),
    SimHash(1.0),
    Ecsq("nmse", 0.05, 0.5, 8),
    Ecsq("step", 0.01),
    Ecsq("bits", 3.0),
    Ecsq("nmse", 0.3, rdo=0.14),
    Ecsq("bits", 0.3, rdo=1.0),
    SuccessiveRefinement(TopK(0.02, scope="tensor"), Quantize(2)),
    SuccessiveRefinement(LowRank(rest=Qsgd()), Ecsq("nmse", 0.5)),
    SuccessiveRefinement(LowRank(3, 5), Ecsq("nmse", 0.2, rdo=0.14), "whole"),
    SuccessiveRefinement(LowRank(2, 8), Ecsq("bits", 2.0), "whole"),
    Clip(Quantize(8, clip=0.1), 0.2),
    Clip(Qsgd()),
    Coded(Qsgd()),
    Cafe(guard=1.0),
    Cafe(Bernoulli()),
    LowRank(rest=Qsgd()),
    PowerSGD(rest=Qsgd()),
    PerTensor(TopK(0.1), rules=(("*.bias", Uncompressed()), ("gain", Quantize(2)))),
    PerTensor(SharedSupport(), Quantize(8, clip=0.1)),
    PerTensor(Eden(2), Quantize(8, "stochastic")),
    ErrorFeedback(PerTensor(TopK(0.02, magnitude_bits=1, scope="tensor"), spare_1d=False)),
    ErrorFeedback(Clip(Eden(1, "mmse"))),
]
SUMMABLE = [made for made in EVERY if made.commutes_with_sum]
UNBIASED = [made for made in EVERY if properties(made).unbiased]
CONTRACTIVE = [made for made in EVERY if properties(made).contractive]
INSIDE = [made for made in EVERY if not getattr(made, "keeps_residual", False)]
SUITED = [made for made in INSIDE if properties(made).suits_feedback]
UNSUITED = [made for made in INSIDE if not properties(made).suits_feedback]
THEMSELVES = [
    made for made in UNSUITED if all(properties(part).suits_feedback for part in members(made))
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


@pytest.mark.parametrize("made", SUMMABLE, ids=by_config)
def test_symbols_summed_in_integers_decompress_to_the_sum(made: Compressor[Any]) -> None:
    updates = [heavy_tailed(seed) * np.float32(0.01) for seed in range(3)]
    sent = [
        made.compress(update, made.init(SPEC), PUBLIC, np.random.default_rng(seed))[0]
        for seed, update in enumerate(updates)
    ]
    alone = sum(made.decompress(symbols, PUBLIC).dense().astype(np.float64) for symbols in sent)
    together = made.decompress(summed(made, sent), PUBLIC, num_summands=3).dense()
    assert together == pytest.approx(alone, rel=1e-5, abs=1e-6 * float(np.abs(alone).max()))
    assert np.count_nonzero(alone), "nothing was sent, so nothing is proved"


def summed(made: Compressor[Any], sent: list[Symbols]) -> Symbols:
    """Whole numbers added up; whatever else the layout has must be the same in every upload."""
    fields = []
    for field, arrays in zip(made.layout(SPEC), zip(*sent, strict=True), strict=True):
        whole = all((array == np.rint(array)).all() for array in arrays)
        if whole and not isinstance(field, Positions):
            fields.append(sum(array.astype(np.int64) for array in arrays))
        else:
            assert all(np.array_equal(arrays[0], other) for other in arrays[1:])
            fields.append(arrays[0])
    return tuple(fields)


@pytest.mark.slow(short=True)
@pytest.mark.parametrize("made", UNBIASED, ids=by_config)
def test_the_mean_over_seeds_is_the_update(made: Compressor[Any], slow: bool) -> None:
    """Over n draws, n |mean - x|^2 has the variance of one draw for its mean, and a deviation of
    at most sqrt(2) times that, whatever the covariance; four of them are allowed. The projection
    on x, which a wrong scale would move, is held to four standard errors.
    """
    spec = ModelSpec((TensorSpec("w", (12, 9)), TensorSpec("b", (11,)), TensorSpec("s", ())))
    update = heavy_tailed(3, spec.size)
    update *= np.float32(0.09) / np.abs(update).max()  # within every clip above
    rng, draws = np.random.default_rng(5), 2000 if slow else 250
    total, squares, along = np.zeros(spec.size), 0.0, np.zeros(draws)
    known = public(spec)
    for seed in range(draws):
        round_ = dataclasses.replace(known, randomness=PublicRandomness(seed.to_bytes(32, "big")))
        symbols, _ = made.compress(update, made.init(spec), round_, rng)
        received = made.decompress(symbols, round_).dense().astype(np.float64)
        total += received
        squares += float(((received - update) ** 2).sum())
        along[seed] = received @ update
    error, energy = total / draws - update, float(update.astype(np.float64) @ update)
    slack = 1e-12 * energy  # of those that lose next to nothing
    assert draws * float(error @ error) <= (1 + 4 * math.sqrt(2)) * squares / draws + draws * slack
    off = abs(along.mean() - energy)
    assert off <= 4 * along.std() / math.sqrt(draws) + 1e-6 * energy


@pytest.mark.slow(short=True)
@pytest.mark.parametrize("made", CONTRACTIVE, ids=by_config)
def test_what_is_lost_is_shorter_than_the_update(made: Compressor[Any], slow: bool) -> None:
    special = special_updates()
    names = ("constant", "tied", "one value", "wide", "heavy tail")
    few, many = (20, 1000) if slow else (3, 300)
    draws = many if isinstance(made, RandomK) else few
    updates = (*(special[name] for name in names), heavy_tailed(21), heavy_tailed(22))
    for update in updates:
        exact, lost = update.astype(np.float64), 0.0
        for seed in range(draws):
            randomness = PublicRandomness(seed.to_bytes(32, "little"))
            known = dataclasses.replace(PUBLIC, randomness=randomness)
            rng = np.random.default_rng(seed)
            symbols, _ = made.compress(update, made.init(SPEC), known, rng)
            rest = exact - made.decompress(symbols, known).dense()
            lost += float(rest @ rest)
        assert lost / draws < float(exact @ exact) * (1 - 1e-4)


SMALL = ModelSpec((TensorSpec("w", (16, 24)), TensorSpec("b", (16,))))


def residual_norms(made: Compressor[Any], update: Vector, rounds: int) -> list[float]:
    """The residual's norm in units of the update's, as `rounds` of the same update leave it.

    A model of one client: its last upload is the model's last step."""
    state, residual = made.init(SMALL), np.zeros(SMALL.size, np.float32)
    last, rng, norms = np.zeros(SMALL.size, np.float32), np.random.default_rng(0), list[float]()
    for number in range(1, rounds + 1):
        randomness = PublicRandomness(number.to_bytes(32, "little"))
        known = Public(
            SMALL,
            randomness,
            {"previous": last, "drift": last, "activity": np.abs(last), "own": last},
            round=number,
        )
        corrected = update + residual
        symbols, state = made.compress(corrected, state, known, rng)
        last = made.decompress(symbols, known).dense()
        residual = corrected - last
        norms.append(float(np.linalg.norm(residual) / np.linalg.norm(update)))
        if norms[-1] > 1e9:
            break
    return norms


@pytest.mark.slow(short=True)
@pytest.mark.parametrize("made", SUITED, ids=by_config)
def test_a_residual_around_what_suits_feedback_never_outgrows_the_updates(
    made: Compressor[Any], slow: bool
) -> None:
    """Where nothing were ever sent it would be as long as all updates so far."""
    for update in (heavy_tailed(21, SMALL.size), np.full(SMALL.size, 0.25, np.float32)):
        norms = residual_norms(made, update * np.float32(0.01), 100 if slow else 30)
        assert all(norm <= 10 + 1.01 * number for number, norm in enumerate(norms, 1))


def unkind_updates(spec: ModelSpec) -> list[Vector]:
    """One value that sets the scale, and many that are small beside it; flat ones; ordinary ones;
    zeros between two ends."""
    small = [1e-3, 2e-3, 5e-2, 0.3, 1.0]
    updates = [np.full(spec.size, value, np.float32) for value in small]
    updates += [heavy_tailed(21, spec.size), np.zeros(spec.size, np.float32)]
    for update in updates:
        update[0] = 1
    updates[-1][1] = -1
    return updates


@pytest.mark.parametrize("made", THEMSELVES, ids=by_config)
def test_what_does_not_suit_feedback_loses_more_than_there_was(made: Compressor[Any]) -> None:
    """So that nothing is refused for want of a claim: in one round, or by feedback itself."""
    if made.needs:  # what it reads is what the server made of its uploads
        update = heavy_tailed(21, SMALL.size) * np.float32(0.01)
        assert residual_norms(made, update, 400)[-1] > 1e3
        return
    spec = ModelSpec((TensorSpec("w", (512, 512)),))
    known = public(spec)

    def lost(update: Vector) -> float:
        symbols, _ = made.compress(update, made.init(spec), known, np.random.default_rng(0))
        rest = update - made.decompress(symbols, known).dense().astype(np.float64)
        return float(rest @ rest) / float(np.square(update, dtype=np.float64).sum())

    assert any(lost(update) > 1 for update in unkind_updates(spec))


@pytest.mark.parametrize("made", EVERY, ids=by_config)
def test_feedback_is_refused_around_what_does_not_suit_it(made: Compressor[Any]) -> None:
    if made in SUITED:
        check_feedback(ErrorFeedback(made))
        check_feedback(Dgc(made))
    elif made in UNSUITED:
        for around in (ErrorFeedback(made), Dgc(made)):
            with pytest.raises(IncompatiblePlan, match=r"does not contract.*without.*topk, ecsq"):
                check_feedback(around)
    check_feedback(made)


@pytest.mark.parametrize(
    ("inner", "says"),
    [
        ({"id": "qsgd"}, "qsgd without error_feedback.*bucket of less than 4"),
        ({"id": "randomk", "unbiased": True}, "randomk contracts with unbiased false"),
        ({"id": "eden", "bits": 0.5}, "eden contracts with scale mmse"),
        ({"id": "per_tensor", "large": {"id": "coded", "inner": {"id": "qsgd"}}}, "around qsgd"),
        ({"id": "quantize", "rounding": "stochastic"}, "quantize contracts with nearest rounding"),
    ],
)
def test_the_refusal_names_the_method_and_what_to_use(inner: dict[str, Any], says: str) -> None:
    with pytest.raises(IncompatiblePlan, match=says):
        check_feedback(from_config({"id": "error_feedback", "inner": inner}))


@pytest.mark.parametrize("made", EVERY, ids=by_config)
def test_a_frozen_tensor_is_changed_by_no_compressor(made: Compressor[Any]) -> None:
    """Whatever the update, and EDEN, which gives zeros a value, with it."""
    rng = np.random.default_rng(5)
    dtypes = {"embed.weight": "float32", "head.weight": "float16", "gain": "bfloat16"}
    frozen = {
        name: rng.standard_normal(shape).astype(np.float16).astype(np.float32)
        for name, shape in (("embed.weight", (40, 30)), ("head.weight", (7, 3)), ("gain", ()))
    }
    frozen["gain"] = np.array(0.75, np.float32)
    spec = ModelSpec(
        (
            *(
                TensorSpec(name, array.shape, dtypes[name], frozen=True)
                for name, array in frozen.items()
            ),
            TensorSpec("adapter.down", (6, 30)),
            TensorSpec("adapter.up", (30, 6)),
        )
    )
    trained = rng.standard_normal(spec.size).astype(np.float32)
    model = Model(spec, trained, frozen)
    known = public(spec)
    update = heavy_tailed(2, spec.size)
    symbols, _ = made.compress(update, made.init(spec), known, np.random.default_rng(0))
    received = made.decompress(symbols, known).dense()
    after = Model.from_bytes(model.with_parameters(trained + received).to_bytes()).tensors()
    for name, array in frozen.items():
        np.testing.assert_array_equal(after[name], array)
    assert any((after[t.name] != model.tensors()[t.name]).any() for t in spec.trained)


def test_a_table_row_for_every_method() -> None:
    for name in compressors():
        claimed = properties(by_default(name))
        assert claimed.source, f"{name} names no source"
        assert claimed.rate, f"{name} names no rate"
    assert properties(object()) == Properties()


@pytest.mark.parametrize("name", compressors())
def test_unknown_settings_are_refused(name: str) -> None:
    config = to_config(by_default(name))
    with pytest.raises(IncompatiblePlan, match="not nonsense"):
        from_config({**config, "nonsense": 1})


@pytest.mark.soak(only=True)
@pytest.mark.parametrize(
    "made",
    [made for made in EVERY[: len(compressors())] if "powersgd" not in by_config(made).lower()],
    ids=by_config,
)
def test_ten_million_values(made: Compressor[Any]) -> None:
    spec = ModelSpec((TensorSpec("w", (10_000, 1000)), TensorSpec("b", (1000,))))
    known = public(spec)
    update = heavy_tailed(1, spec.size)
    symbols, _ = made.compress(update, made.init(spec), known, np.random.default_rng(0))
    layout = made.layout(spec)
    decoded = decode(encode(symbols, layout), layout)
    sent, received = made.decompress(symbols, known), made.decompress(decoded, known)
    assert sent.dense().tobytes() == received.dense().tobytes()


@pytest.mark.parametrize("made", EVERY, ids=by_config)
def test_one_tensor_of_one_value_works(made: Compressor[Any]) -> None:
    spec = ModelSpec((TensorSpec("only", (1,)),))
    value = np.array([0.05], np.float32)
    known = public(spec)
    symbols, _ = made.compress(value, made.init(spec), known, np.random.default_rng(0))
    layout = made.layout(spec)
    received = made.decompress(decode(encode(symbols, layout), layout), known).dense()
    assert received.shape == (1,)
    claimed = properties(made)
    if claimed.contractive and not claimed.unbiased and not isinstance(made, RandomK):
        assert abs(received[0] - 0.05) < 0.05


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "no compressor has the id None; known are"),
        ({"id": "nonsense"}, "no compressor has the id 'nonsense'"),
        ({"id": "topk", "k": 3}, "takes fraction, count, magnitude_bits, scope, chunk, not k"),
        ({"id": "topk", "fraction": 0}, r"fraction must lie in \(0, 1\]"),
        ({"id": "topk", "fraction": "many"}, "a setting is of the wrong kind"),
        ({"id": "topk", "fraction": True}, r"fraction must lie in \(0, 1\]"),
        ({"id": "topk", "count": 0}, "count must be a whole number from 1"),
        ({"id": "topk", "count": True}, "count must be a whole number from 1"),
        ({"id": "topk", "magnitude_bits": 5}, "magnitude_bits must be a whole number from 0 to 4"),
        ({"id": "topk", "magnitude_bits": True}, "magnitude_bits must be a whole number from 0"),
        ({"id": "topk", "scope": "layer"}, "scope is model or tensor"),
        ({"id": "quantize", "bits": 0}, "bits must be a whole number from 1 to 8"),
        ({"id": "quantize", "bits": 2.5}, "bits must be a whole number from 1 to 8"),
        ({"id": "quantize", "rounding": "up"}, "rounding is nearest or stochastic"),
        ({"id": "quantize", "grid": "log"}, "grid is symmetric or affine"),
        ({"id": "quantize", "clip": 0}, "clip must lie between"),
        ({"id": "quantize", "clip": True}, "clip must lie between"),
        ({"id": "quantize", "clip": 1.0, "grid": "affine"}, "clip takes the symmetric grid"),
        ({"id": "topk", "chunk": 0}, "chunk must be a whole number from 1"),
        ({"id": "randomk", "count": True}, "count must be a whole number from 1"),
        ({"id": "randomk", "bits": 9}, "bits must be a whole number from 2 to 8"),
        ({"id": "randomk", "bits": 4, "unbiased": True}, "unbiased with bits takes stochastic"),
        ({"id": "randomk", "shared": 1}, "unbiased and shared are true or false"),
        ({"id": "bernoulli", "probability": 0}, r"probability must lie in \(0, 1\]"),
        ({"id": "threshold", "value": 0}, "value must lie between"),
        ({"id": "threshold", "at_most": 2}, r"at_most must lie in \(0, 1\]"),
        ({"id": "threshold", "magnitude_bits": 5}, "magnitude_bits must be a whole number from 0"),
        ({"id": "stc", "fraction": 1.5}, r"fraction must lie in \(0, 1\]"),
        ({"id": "shared_support", "explore": 0}, r"explore must lie in \(0, 1\]"),
        ({"id": "shared_support", "rounding": "up"}, "rounding is nearest or stochastic"),
        ({"id": "structured", "bits": 1}, "bits must be a whole number from 2 to 8"),
        ({"id": "qsgd", "levels": 0}, "levels must be a whole number from 1 to 127"),
        ({"id": "qsgd", "bucket": 0}, "bucket must be a whole number from 1"),
        ({"id": "sign", "chunk": 0}, "chunk must be a whole number from 1"),
        ({"id": "terngrad", "clip_deviations": -1}, "clip_deviations must lie between"),
        ({"id": "eden", "bits": 1.5}, "bits is 1, 2, 3, 4 or between 0 and 1"),
        ({"id": "eden", "bits": True}, "bits must be a number, not True"),
        ({"id": "eden", "scale": "none"}, "scale is unbiased or mmse"),
        ({"id": "eden", "log2_block": 9}, "log2_block must be a whole number from 10 to 14"),
        ({"id": "simhash", "bits": 2}, r"bits must lie in \(0, 1\]"),
        ({"id": "ecsq", "control": "psnr"}, "control is bits, nmse or step"),
        ({"id": "ecsq", "target": 0}, "target must lie between"),
        ({"id": "ecsq", "control": "nmse", "target": 1}, "an nmse must lie below 1"),
        ({"id": "ecsq", "theta": 0.6}, r"theta must lie in \[0, 0.5\]"),
        ({"id": "ecsq", "centroids": 9}, "centroids must be a whole number from 1 to 8"),
        ({"id": "clip", "max_norm": 0}, "max_norm must lie between"),
        ({"id": "clip", "max_norm": 10**400}, "max_norm must lie between"),
        ({"id": "clip", "inner": 3}, "3 is not a compressor"),
        (
            {"id": "clip", "inner": {"id": "error_feedback", "inner": {"id": "none"}}},
            "error feedback goes around clip",
        ),
        ({"id": "error_feedback", "inner": 3}, "inner must be a compressor"),
        (
            {"id": "error_feedback", "inner": {"id": "error_feedback", "inner": {"id": "none"}}},
            "other than this",
        ),
        ({"id": "per_tensor", "large": 3}, "3 is not a compressor"),
        ({"id": "per_tensor", "min_size": -1}, "min_size must be 0 or more"),
        ({"id": "per_tensor", "min_size": True}, "min_size must be 0 or more"),
        ({"id": "per_tensor", "spare_1d": "false"}, "spare_1d is true or false, not 'false'"),
        ({"id": "per_tensor", "spare_1d": 1}, "spare_1d is true or false"),
        ({"id": "error_feedback", "decay": True}, "decay must be a number, not True"),
        ({"id": "error_feedback", "max_ratio": False}, "max_ratio must be a number, not False"),
        ({"id": "per_tensor", "rules": [["*"]]}, "rules are pairs"),
        ({"id": "per_tensor", "rules": [[3, {"id": "none"}]]}, "rules are pairs"),
        ({"id": "per_tensor", "rules": [["kind:conv", {"id": "none"}]]}, "no tensor is of kind"),
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
        compressor("topk")(type("Other", (), {"__module__": "fedpress_compression.other"}))


def test_an_id_outside_the_package_names_its_package() -> None:
    with pytest.raises(ValueError, match=r"has the form package\.name, and 'other' has not"):
        compressor("other")(type("Other", (), {"__module__": "acme"}))


class _Entry(NamedTuple):
    """An entry point as importlib.metadata gives it."""

    name: str
    made: Any
    dist: Any = SimpleNamespace(name="Acme-Tools")
    module: str = "acme"

    def load(self) -> Any:
        if isinstance(self.made, Exception):
            raise self.made
        return self.made


def install(monkeypatch: pytest.MonkeyPatch, *entries: _Entry) -> None:
    def installed(group: str) -> list[_Entry]:
        return list(entries) if group == "fedpress.compressors" else []

    monkeypatch.setattr("fedpress_compression.plugins.entry_points", installed)


def test_a_plug_in_that_is_not_what_it_says_is_refused_by_its_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "_load", registry._load.__wrapped__)
    theirs = SimpleNamespace(wire_id="acme_tools.theirs")
    install(monkeypatch, _Entry("acme_tools.theirs", theirs))
    assert "topk" in compressors()
    for entry, says in (
        (_Entry("theirs", theirs), r"its name should be acme_tools\.NAME"),
        (_Entry("other.theirs", theirs), r"its name should be acme_tools\.NAME"),
        (_Entry("acme_tools.other", theirs), r"points to 'acme_tools\.theirs'"),
        (_Entry("acme_tools.theirs", ImportError("no numpy 9")), "no numpy 9"),
        (_Entry("acme_tools.theirs", object(), None), r"should be acme\.NAME"),
    ):
        install(monkeypatch, entry)
        with pytest.raises(ConfigurationError, match=f"of the package .* {says}"):
            compressors()


@pytest.mark.parametrize("identifier", ["acme_tools.theirs", "zip", 3, None, "a.b.c", {}])
def test_an_unknown_id_names_the_package_that_has_it(identifier: object) -> None:
    with pytest.raises(IncompatiblePlan) as caught:
        from_config({"id": identifier})
    if identifier == "acme_tools.theirs":
        assert "is of the package acme-tools, which is not installed here" in str(caught.value)
        assert "pip install acme-tools" in str(caught.value)
    else:
        assert f"no compressor has the id {identifier!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [
        ("fc.bias", (8,), "bias"),
        ("rnn.bias_ih_l0", (8,), "bias"),
        ("attention.in_proj_bias", (8,), "bias"),
        ("bn.weight", (8,), "norm"),
        ("gain", (), "norm"),
        ("transformer.wte.weight", (50, 8), "embedding"),
        ("Embedding.weight", (50, 8), "embedding"),
        ("patch_embed.weight", (8, 3, 4, 4), "matrix"),
        ("patch_embed.weight", (8, 3, 4, 4), "convolution"),
        ("conv1d.weight", (8, 3, 4), "convolution"),
        ("fc.weight", (8, 4), "matrix"),
        ("fc.weight", (8, 4), "linear"),
    ],
)
def test_a_rule_may_name_a_kind(name: str, shape: tuple[int, ...], kind: str) -> None:
    tensor = TensorSpec(name, shape)
    assert kind in kinds_of(tensor)
    spec = ModelSpec((tensor,))
    made = PerTensor(rules=((f"kind:{kind}", Uncompressed()),))
    assert made.layout(spec) == (Reals(spec.size),)
    for other in set(KINDS).difference(kinds_of(tensor)):
        other_rule = PerTensor(rules=((f"kind:{other}", Uncompressed()),))
        assert other_rule.layout(spec) != (Reals(spec.size),)


def test_a_tensor_of_min_size_is_large() -> None:
    spec = ModelSpec((TensorSpec("at", (2, 8)), TensorSpec("below", (3, 5))))
    made = PerTensor(TopK(0.1), Uncompressed(), min_size=16)
    assert [names for _, names in made._groups(spec)] == [["below"], ["at"]]
