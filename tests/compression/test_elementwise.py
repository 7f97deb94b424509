"""What each elementwise method is, beyond what every compressor promises."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedpress_compression.coding import encode
from fedpress_compression.compressor import Compressor, Public
from fedpress_compression.compressors.bernoulli import Bernoulli
from fedpress_compression.compressors.clip import Clip
from fedpress_compression.compressors.ecsq import Ecsq
from fedpress_compression.compressors.eden import LEVELS, Eden
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.none import Uncompressed
from fedpress_compression.compressors.per_tensor import PerTensor
from fedpress_compression.compressors.quantize import Quantize
from fedpress_compression.compressors.randomk import RandomK
from fedpress_compression.compressors.shared_support import SharedSupport
from fedpress_compression.compressors.sign import Sign
from fedpress_compression.compressors.simhash import SimHash
from fedpress_compression.compressors.stc import SparseTernary
from fedpress_compression.compressors.structured import Structured
from fedpress_compression.compressors.terngrad import TernGrad
from fedpress_compression.compressors.threshold import Threshold
from fedpress_compression.compressors.topk import TopK, fit_levels
from fedpress_compression.hadamard import blocks, transform
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.tensors import ModelSpec, TensorSpec, Vector
from fedpress_compression.update import Update
from fedpress_protocols.errors import ConfigurationError

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


def heavy_tailed(seed: int, size: int = SPEC.size) -> Vector:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(size) ** 3 * (rng.random(size) > 0.3)).astype(np.float32)


def flat(size: int) -> ModelSpec:
    return ModelSpec((TensorSpec("x", (size,)),))


def through(
    made: Compressor[Any], update: Vector, known: Public = PUBLIC, seed: int = 0
) -> tuple[Any, Vector]:
    """The symbols and what is received."""
    state, rng = made.init(known.spec), np.random.default_rng(seed)
    symbols, _ = made.compress(update, state, known, rng)
    return symbols, made.decompress(symbols, known).dense()


def nmse(update: Vector, received: Vector) -> float:
    exact = update.astype(np.float64)
    lost = exact - received
    return float(lost @ lost) / float(exact @ exact)


def num_bytes(made: Compressor[Any], symbols: Any, spec: ModelSpec) -> int:
    return len(encode(symbols, made.layout(spec)))


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
    known = Public(spec, PUBLIC.randomness)
    update = heavy_tailed(7, 64)
    made = Quantize(3, "stochastic")
    rng = np.random.default_rng(8)
    total = np.zeros(64)
    for _ in range(2000):
        symbols, _ = made.compress(update, None, known, rng)
        total += made.decompress(symbols, known).dense()
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
            state = made.roll_back(after, sent)
    assert state.residual is not None
    assert received + state.residual == pytest.approx(computed, abs=1e-3)


def test_topk_in_chunks_keeps_k_of_each() -> None:
    update = heavy_tailed(12)
    symbols, _ = through(TopK(0.1, chunk=100), update)
    for start in range(0, SPEC.size, 100):
        part = np.abs(update[start : start + 100])
        inside = symbols[0][(symbols[0] >= start) & (symbols[0] < start + 100)] - start
        assert inside.size == min(math.ceil(0.1 * part.size), np.count_nonzero(part))
        assert part[inside].min() >= np.delete(part, inside).max()


def test_chunks_end_with_their_tensor() -> None:
    made = TopK(count=1, scope="tensor", chunk=1000)
    symbols, _ = through(made, np.ones(SPEC.size, np.float32))
    assert symbols[0].tolist() == [0, 1000, 1200, 1230, 1251]


@pytest.mark.parametrize("bits", range(1, 9))
def test_the_affine_grid_reaches_from_the_least_to_the_largest(bits: int) -> None:
    update = heavy_tailed(13) + np.float32(2)
    _, received = through(Quantize(bits, grid="affine"), update)
    for part in SPEC.slices.values():
        low, high = update[part].min(), update[part].max()
        assert (received[part].min(), received[part].max()) == (low, high)
        half = (high - low) / (2**bits - 1) / 2
        assert np.abs(received[part] - update[part]).max() <= half * 1.0001 + 1e-6


def test_one_bit_sends_the_mean_magnitude_and_does_not_favour_a_sign_of_zeros() -> None:
    spec = flat(4000)
    update = np.zeros(4000, np.float32)
    update[:1000] = heavy_tailed(14, 1000)
    for made in (Quantize(1), Sign(4000)):
        _, received = through(made, update, Public(spec, PUBLIC.randomness))
        assert np.abs(received) == pytest.approx(np.full(4000, np.abs(update).mean()), rel=1e-3)
        assert 1350 < np.count_nonzero(received[1000:] > 0) < 1650


def test_a_grid_that_the_plan_fixes_clips() -> None:
    _, received = through(Quantize(4, clip=0.7), heavy_tailed(15))
    assert received.max() == np.float32(0.7)
    assert np.abs(received / np.float32(0.1) - np.rint(received / np.float32(0.1))).max() < 1e-5


def test_a_cohort_shares_its_random_support_unless_it_is_told_not_to() -> None:
    update = heavy_tailed(16)
    for shared in (True, False):
        made = RandomK(0.1, shared=shared)
        (one, two) = (
            made.decompress(
                made.compress(update, None, PUBLIC, np.random.default_rng(seed))[0], PUBLIC
            ).pieces[0]
            for seed in range(2)
        )
        assert np.array_equal(one.indices(), two.indices()) == shared
        assert one.indices().size == 126
        assert (one.values == update[one.where]).all()


def test_randomk_scales_only_where_it_is_to_be_unbiased() -> None:
    update = heavy_tailed(17)
    for bits in (None, 8):
        made = RandomK(0.25, unbiased=True, bits=bits, clip=50.0, rounding="stochastic")
        sent = made.decompress(through(made, update)[0], PUBLIC).pieces[0]
        expected = update[sent.where] * (SPEC.size / 313)
        assert sent.values == pytest.approx(expected, rel=1e-5, abs=0 if bits is None else 1.6)


def test_a_draw_too_large_for_the_plan_is_drawn_again() -> None:
    class Unlucky:
        """Keeps everything at first, a tenth after that."""

        draws = 0

        def random(self, size: int) -> Any:
            self.draws += 1
            return np.linspace(0, 0.01 if self.draws == 1 else 1, size)

    rng: Any = Unlucky()
    made = Bernoulli(0.1)
    symbols, _ = made.compress(np.ones(SPEC.size, np.float32), None, PUBLIC, rng)
    assert rng.draws == 2
    assert symbols[0].size == 126
    assert (made.decompress(symbols, PUBLIC).pieces[0].values == np.float32(10)).all()


def test_a_threshold_keeps_what_reaches_it_and_never_more_than_the_plan_allows() -> None:
    update = heavy_tailed(18)
    symbols, _ = through(Threshold(1.0, at_most=1.0), update)
    assert symbols[0].tolist() == np.flatnonzero(np.abs(update) >= 1).tolist()
    symbols, _ = through(Threshold(1e-6, at_most=0.01), update)
    assert symbols[0].tolist() == through(TopK(0.01), update)[0][0].tolist()


def test_stc_is_topk_without_magnitudes() -> None:
    update = heavy_tailed(19)
    _, ternary = through(SparseTernary(0.05), update)
    _, topk = through(TopK(0.05, magnitude_bits=0), update)
    assert ternary == pytest.approx(topk, rel=1e-3)


def test_the_shared_support_is_half_what_was_large_and_half_by_chance() -> None:
    previous = heavy_tailed(20)
    known = dataclasses.replace(PUBLIC, knowledge={**PUBLIC.knowledge, "previous": previous})
    made = SharedSupport(0.1, bits=8, clip=50.0)
    support = made.support(known)
    assert support.size == np.unique(support).size == 126
    largest = np.argsort(-np.abs(previous), kind="stable")[:63]
    assert set(largest.tolist()) <= set(support.tolist())
    update = heavy_tailed(21)
    _, received = through(made, update, known)
    step = 50 / 127
    assert np.abs(received - update)[support].max() <= step * 0.5001
    assert not np.delete(received, support).any()


def test_the_first_support_is_random_and_the_next_round_draws_another() -> None:
    known = dataclasses.replace(
        PUBLIC, knowledge={**PUBLIC.knowledge, "previous": np.zeros(SPEC.size, np.float32)}
    )
    other = dataclasses.replace(known, randomness=PublicRandomness(bytes([1] * 32)))
    made = SharedSupport(0.1)
    first, second = made.support(known), made.support(other)
    assert first.size == second.size == 126
    assert len(set(first.tolist()) & set(second.tolist())) < 40
    with pytest.raises(ConfigurationError, match="reads previous, which it was not given"):
        made.support(PUBLIC)


@pytest.mark.parametrize("bits", [None, 8])
def test_rows_that_were_not_touched_cost_next_to_nothing(bits: int | None) -> None:
    spec = ModelSpec((TensorSpec("tokens", (5000, 50)), TensorSpec("bias", (20,))))
    known = Public(spec, PUBLIC.randomness)
    update = np.zeros(spec.size, np.float32)
    rows = np.array([3, 4, 700, 4999])
    for row in rows:
        update[50 * row : 50 * row + 50] = heavy_tailed(int(row), 50)
    made = Structured(bits)
    symbols, received = through(made, update, known)
    if bits is None:
        assert (received == update).all()
    else:
        assert nmse(update, received) < 1e-3
    assert num_bytes(made, symbols, spec) < 4 * 50 * (4 if bits is None else 1) * 1.5 + 60
    touched = made.decompress(symbols, known).pieces[0].indices()
    assert set((touched[touched < 250_000] // 50).tolist()) <= set(rows.tolist())


def test_an_expert_is_a_row_of_its_own() -> None:
    spec = ModelSpec((TensorSpec("experts", (8, 30, 20)), TensorSpec("router", (8,))))
    update = np.zeros(spec.size, np.float32)
    update[600:1200] = heavy_tailed(23, 600)
    update[-8:] = 1
    symbols, received = through(Structured(None), update, Public(spec, PUBLIC.randomness))
    assert (received == update).all()
    assert symbols[0].size <= 38 + 1


def test_terngrad_clips_what_stands_out_only_when_asked() -> None:
    update = heavy_tailed(24)
    update[7] = 1000
    spec = flat(SPEC.size)
    known = Public(spec, PUBLIC.randomness)
    assert through(TernGrad(), update, known)[1].max() == 1000
    deviation = update.astype(np.float64).std()
    assert through(TernGrad(2.5), update, known)[1].max() == pytest.approx(2.5 * deviation)
    constant = np.full(SPEC.size, 0.5, np.float32)
    assert (through(TernGrad(2.5), constant, known)[1] == 0.5).all()


def test_edens_levels_are_the_best_for_a_normal_value() -> None:
    """Lloyd's conditions: a level is the mean of its cell, an edge halfway between two levels."""

    def density(x: float) -> float:
        return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    def above(x: float) -> float:
        return math.erfc(x / math.sqrt(2)) / 2

    for bits, levels in LEVELS.items():
        assert levels.size == 2**bits
        assert (levels == -levels[::-1]).all()
        positive = levels[levels.size // 2 :].astype(float)
        edges = [0.0, *((positive[1:] + positive[:-1]) / 2).tolist(), math.inf]
        for level, low, high in zip(positive, edges[:-1], edges[1:], strict=True):
            mean = (density(low) - density(high)) / (above(low) - above(high))
            assert level == pytest.approx(mean, abs=2e-6)


def test_the_fast_transform_is_the_hadamard_matrix() -> None:
    for length in (1, 2, 8, 64):
        index = np.arange(length)
        ones = np.array([[bin(i & j).count("1") for j in index] for i in index])
        matrix = np.where(ones % 2, -1, 1)
        rows = np.random.default_rng(0).integers(-9, 9, (3, length)).astype(np.float32)
        assert (transform(rows) == rows @ matrix).all()


@pytest.mark.parametrize("size", [0, 64, 960, 1024, 4096 + 64, 3 * 1024 + 192])
def test_blocks_cover_every_coordinate_once(size: int) -> None:
    found = list(blocks(size, 10))
    assert [i for where, _ in found for i in range(where.start, where.stop)] == list(range(size))
    for where, length in found:
        assert length in (64, 128, 256, 512, 1024)
        assert (where.stop - where.start) % length == 0


def test_edens_clients_err_by_themselves_so_that_errors_average_out() -> None:
    spec = flat(4096)
    known = Public(spec, PUBLIC.randomness)
    update = heavy_tailed(25, 4096)
    received = [through(Eden(1), update, known, seed)[1].astype(np.float64) for seed in range(10)]
    assert nmse(update, received[0].astype(np.float32)) == pytest.approx(0.57, rel=0.1)
    mean = np.mean(received, axis=0).astype(np.float32)
    assert nmse(update, mean) == pytest.approx(0.057, rel=0.1)


@pytest.mark.parametrize("bits", [0.5, 1, 2])
def test_the_mmse_scale_loses_least(bits: float) -> None:
    update = heavy_tailed(26)
    losses = {}
    for scale in ("unbiased", "mmse"):
        _, received = through(Eden(bits, scale), update)
        losses[scale] = nmse(update, received)
    omega = {0.5: 1 / (0.5 * 2 / math.pi) - 1, 1: math.pi / 2 - 1, 2: 0.1331}[bits]
    assert losses["unbiased"] == pytest.approx(omega, rel=0.15)
    assert losses["mmse"] == pytest.approx(omega / (1 + omega), rel=0.15)


@pytest.mark.parametrize("angle", [0.0, 0.3, 1.0, 2.0, math.pi])
def test_hashes_tell_the_angle_between_two_updates(angle: float) -> None:
    spec = flat(5000)
    known = Public(spec, PUBLIC.randomness)
    one = heavy_tailed(27, 5000)
    other = heavy_tailed(28, 5000)
    other -= one * np.float32(one @ other / (one @ one))
    other *= np.float32(np.linalg.norm(one) / np.linalg.norm(other))
    turned = np.float32(math.cos(angle)) * one + np.float32(math.sin(angle)) * other
    made = SimHash(1.0)
    signs, others = (through(made, each, known)[0][0] for each in (one, turned))
    assert math.cos(math.pi * np.mean(signs != others)) == pytest.approx(math.cos(angle), abs=0.07)


def test_what_a_hash_stands_for_is_a_rough_update() -> None:
    update = heavy_tailed(29)
    assert nmse(update, through(SimHash(1.0), update)[1]) < 0.55
    assert nmse(update, through(SimHash(0.125), update)[1]) < 0.95


@pytest.mark.parametrize("bits", [0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 6.0])
def test_ecsq_keeps_to_its_bytes_and_uses_them(bits: float) -> None:
    spec = flat(20_000)
    made = Ecsq("bits", bits)
    update = heavy_tailed(30, 20_000)
    symbols, _ = through(made, update, Public(spec, PUBLIC.randomness))
    size, budget = num_bytes(made, symbols, spec), bits * 20_000 / 8
    if bits == 0.005:
        assert symbols[0].size >= 1
        assert size <= 24
    else:
        assert size <= budget
        if bits < 5:  # beyond that the step is as fine as it gets
            assert size >= 0.9 * budget


@pytest.mark.parametrize("bits", [0.05, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("steps", [1, 3])
def test_ecsq_uses_its_bytes_where_magnitudes_are_alike(bits: float, steps: int) -> None:
    """As those of few steps of Adam are: one step of the quantiser sends none of them, and the next
    all. Whole pieces of the vector go instead, for half the bytes of as many values anywhere."""
    spec, rng = flat(20_000), np.random.default_rng(35)
    update = np.sign(rng.normal(size=(steps, 20_000))).sum(0).astype(np.float32)
    made, known = Ecsq("bits", bits), Public(spec, PUBLIC.randomness)
    symbols, received = through(made, update, known)
    budget = bits * 20_000 / 8
    size = num_bytes(made, symbols, spec)
    assert 0.7 * budget <= size <= budget
    is_sent = received != 0
    assert received[is_sent] == pytest.approx(update[is_sent], abs=1.1)
    anywhere = np.where(rng.permutation(is_sent), update, 0)
    as_many = made.layout(spec), Ecsq("step", 1.0).compress(anywhere, None, known, rng)[0]
    if bits <= 0.2:
        assert size < 0.6 * len(encode(as_many[1], as_many[0]))


@pytest.mark.parametrize("target", [0.7, 0.3, 0.1, 0.02])
def test_ecsq_keeps_to_its_error_and_uses_it(target: float) -> None:
    spec = flat(20_000)
    made = Ecsq("nmse", target)
    update = heavy_tailed(31, 20_000)
    _, received = through(made, update, Public(spec, PUBLIC.randomness))
    assert 0.9 * target <= nmse(update, received) <= target * 1.001


def test_ecsq_receives_the_mean_of_each_cell() -> None:
    spec = flat(20_000)
    update = heavy_tailed(32, 20_000)
    made = Ecsq("step", 0.5, centroids=3)
    symbols, received = through(made, update, Public(spec, PUBLIC.randomness))
    assert symbols[4] == np.float32(0.5)
    number = np.floor(np.abs(update) / np.float32(0.5) + 0.3)
    for which in (number == 1, number == 2, number >= 3):
        mean = np.abs(update[which]).mean()
        assert np.abs(received[which]).mean() == pytest.approx(mean, rel=1e-3)
    assert not received[number == 0].any()
    coarse = through(Ecsq("step", 1e6), update, Public(spec, PUBLIC.randomness))[0]
    assert coarse[0].size == 0


def test_ecsq_spends_bits_where_the_update_is_loud() -> None:
    spec = ModelSpec((TensorSpec("loud", (5000,)), TensorSpec("quiet", (5000,))))
    update = heavy_tailed(33, 10_000)
    update[5000:] *= np.float32(1e-3)
    symbols, _ = through(Ecsq("bits", 0.5), update, Public(spec, PUBLIC.randomness))
    assert symbols[0].max() < 5000


def test_clipping_bounds_what_is_compressed_and_feedback_keeps_the_rest() -> None:
    update = heavy_tailed(34)
    norm = float(np.linalg.norm(update))
    clipped = Clip(Uncompressed(), norm / 4)
    assert through(clipped, update)[1] == pytest.approx(update / 4, rel=1e-5)
    assert (through(Clip(Uncompressed(), norm * 2), update)[1] == update).all()
    made = ErrorFeedback(clipped)
    state = made.init(SPEC)
    _, after = made.compress(update, state, PUBLIC, np.random.default_rng(0))
    assert after.residual == pytest.approx(update * 0.75, rel=1e-5)


def test_a_forged_byte_that_makes_nan_is_refused_with_the_update() -> None:
    made = Bernoulli(0.5)
    symbols, _ = through(made, heavy_tailed(35))
    forged = tuple(np.full_like(field, 255) if i else field for i, field in enumerate(symbols))
    with pytest.raises(Exception, match="NaN or infinity"):
        made.decompress(forged, PUBLIC).check(1e6)
    assert isinstance(made.decompress(symbols, PUBLIC), Update)


def fewest_squares(values: Vector, num_levels: int) -> float:
    """The least squared error of `values` at so many levels, by dynamic programming (Wang and Song
    2011, The R Journal 3(2))."""
    rising = np.sort(values.astype(np.float64))
    sums, size = np.concatenate([[0.0], np.cumsum(rising)]), rising.size
    best = np.full(size + 1, -np.inf)
    best[0] = 0
    for _ in range(num_levels):
        after = best.copy()
        for stop in range(1, size + 1):
            groups = (sums[stop] - sums[:stop]) ** 2 / (stop - np.arange(stop))
            after[stop] = max(best[stop], (best[:stop] + groups).max())
        best = after
    return float(np.square(rising).sum() - best[size])


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("outlier", [0.0, 20.0, 200.0, 1000.0])
def test_levels_are_nearly_the_best_there_are(bits: int, outlier: float) -> None:
    rng = np.random.default_rng(5)
    for draws in (rng.standard_normal(40_000), rng.lognormal(0, 2, 40_000)):
        values = np.sort(np.abs(draws)).astype(np.float32)[-400:]
        values[-1] = max(values[-1], outlier)
        symbols, ratios, scale = fit_levels(values, 2**bits)
        levels = ratios.astype(np.float32) * np.float32(scale)
        error = float(np.square(values - levels[symbols], dtype=np.float64).sum())
        rounding = 1e-6 * float(np.square(values, dtype=np.float64).sum())  # of float16
        assert error <= 1.5 * fewest_squares(values, 2**bits) + rounding


@pytest.mark.parametrize(("outlier", "bits"), [(200.0, 2), (1000.0, 1)])
def test_one_outlier_does_not_take_all_others_with_it(outlier: float, bits: int) -> None:
    spec = ModelSpec((TensorSpec("w", (3_000_000,)),))
    update = np.random.default_rng(0).standard_normal(spec.size).astype(np.float32)
    update[17] = outlier
    known = Public(spec, PublicRandomness(bytes(32)))
    made = TopK(magnitude_bits=bits)
    symbols, _ = made.compress(update, None, known, np.random.default_rng(0))
    rest = update - made.decompress(symbols, known).dense()
    sent_raw = np.sort(np.square(update, dtype=np.float64))[:-30_000].sum()
    assert float(np.square(rest, dtype=np.float64).sum()) < 1.005 * sent_raw
