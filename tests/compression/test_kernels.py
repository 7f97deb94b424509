"""The compiled kernels give what the numpy ones give, bit for bit, and keep within their arrays.

Corrupted blocks: 50,000 by default, FEDPRESS_SOAK=1 makes it 1,000,000.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpress_compression import coding, kernels
from fedpress_compression.coding import Alphabet, Positions
from fedpress_compression.compressor import Compressor, Public
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.none import Uncompressed
from fedpress_compression.compressors.per_tensor import PerTensor
from fedpress_compression.compressors.quantize import Quantize
from fedpress_compression.compressors.topk import TopK
from fedpress_compression.decode_add import decode_add
from fedpress_compression.fixed_point import Accumulator, FixedPoint
from fedpress_compression.kernels import buffer_pool, huffman_reference, reference, workers
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.tensors import ModelSpec, TensorSpec
from fedpress_protocols.errors import (
    ConfigurationError,
    DecodingError,
    InvalidUpdate,
    MissingExtra,
)

if kernels.CHOSEN != "prebuilt":
    pytest.importorskip("numba", reason="compares the compiled kernels of fedpress[fast]")
from fedpress_compression.kernels import (
    compiled,
    huffman_compiled,
    intrinsics,
    numbers_compiled,
    tables_compiled,
    vectors_compiled,
)
from tests.lengths import examples

BOTH = [reference, compiled]
VECTORS = Path(__file__).parents[2] / "protocols" / "vectors" / "coding"
ROOT = Path(__file__).parents[2]
SEED = 50_000
needs_numba = pytest.mark.skipif(kernels.CHOSEN == "prebuilt", reason="of numba, not of a library")
CANARY = 64
few = settings(max_examples=examples(12, 30))

seeds = st.integers(0, 2**32 - 1)
sizes = st.one_of(st.integers(1, 40), st.integers(1, 5000), st.sampled_from([2049, 8192, 20_003]))


@contextmanager
def using(module: ModuleType) -> Iterator[None]:
    """Let coding and compression run on these kernels."""
    with pytest.MonkeyPatch.context() as patch:
        for name in reference.__all__:
            patch.setattr(kernels, name, getattr(module, name))
        yield


def same(first: Any, second: Any) -> bool:
    """Equal to the bit, arrays and tuples of them included; histograms may be of any width."""
    if isinstance(first, tuple):
        return all(same(a, b) for a, b in zip(first, second, strict=True))
    if isinstance(first, np.ndarray):
        equal = first.dtype.kind == second.dtype.kind and first.shape == second.shape
        wide = second.astype(first.dtype)
        return equal and np.ascontiguousarray(first).tobytes() == wide.tobytes()
    return bool(first == second) or (first != first and second != second)


def outcome(call: Any, *args: Any) -> Any:
    """What a call gives, or the type of its error."""
    try:
        return call(*args)
    except DecodingError as error:
        return type(error).__name__


def symbols_of(rng: np.random.Generator, num: int, size: int) -> np.ndarray:
    """Skewed, with stretches of unlike statistics."""
    scale = np.where(np.arange(num) // 3000 % 2, 0.3, 0.05) * rng.choice([0.1, 1.0, 5.0])
    return np.minimum(rng.geometric(np.minimum(scale, 1.0)) - 1, size - 1).astype(np.uint8)


def numbers_of(rng: np.random.Generator, num: int) -> np.ndarray:
    return rng.geometric(float(rng.choice([0.9, 0.5, 0.05, 0.001])), num) - 1


def vector_of(rng: np.random.Generator, num: int) -> np.ndarray:
    """Heavy-tailed; with ties, mostly zero, large at one end, or with values that are none."""
    drawn = rng.standard_t(3, num).astype(np.float32)
    match int(rng.integers(0, 6)):
        case 0:
            drawn = np.rint(drawn)
        case 1:
            drawn[rng.random(num) < 0.995] = 0
        case 2:
            drawn[: num // 100 + 1] *= 1000
        case 3:
            drawn[rng.integers(0, num, 3)] = [np.inf, -np.inf, np.nan]
        case 4:
            drawn *= 1e-42
    return drawn


# Codes, tables and streams.


@given(seeds, st.integers(1, 256), st.integers(8, 12))
def test_codes_and_their_tables_are_the_same(seed: int, size: int, limit: int) -> None:
    rng = np.random.default_rng(seed)
    histogram = rng.integers(0, 10 ** int(rng.integers(1, 7)), size) * (rng.random(size) < 0.7)
    if rng.random() < 0.5:  # codes that would be long
        histogram = histogram.astype(np.int64) << rng.integers(0, 20, size)
    lengths = reference.code_lengths(histogram, limit)
    assert same(lengths, compiled.code_lengths(histogram, limit))
    if lengths.any():
        pairs = huffman_reference.table(lengths)
        values, widths = (np.array(column) for column in zip(*pairs, strict=True))
        data = reference.pack(values.astype(np.uint64), widths.astype(np.int64))
        octets = np.array([*data, *bytes(8)], np.uint8)
        for stop in (8 * len(data), 4 * len(data)):
            read = [outcome(each.read_table, octets, 0, stop, size) for each in BOTH]
            assert same(*read)
        for each in BOTH:
            assert each.table_bits(lengths[np.newaxis]) == widths.sum()


@given(st.binary(max_size=80), st.integers(1, 256), st.integers(0, 7))
def test_tables_of_any_bits_are_the_same_or_refused(data: bytes, size: int, at: int) -> None:
    octets = np.array([*data, *bytes(8)], np.uint8)
    read = [outcome(each.read_table, octets, at, 8 * len(data), size) for each in BOTH]
    assert same(*read)


@few
@given(seeds, sizes, st.sampled_from([1, 2, 5, 16, 225, 256]), st.integers(1, 4))
def test_blocks_are_the_same(seed: int, num: int, size: int, at_most: int) -> None:
    symbols = symbols_of(np.random.default_rng(seed), num, size)
    histograms = reference.count_streams(symbols, size)
    assert same(histograms, compiled.count_streams(symbols, size))
    assert same(reference.count(symbols, size), compiled.count(symbols, size))
    assert same(reference.others(symbols, 0), compiled.others(symbols, 0))
    lengths, of_block = reference.choose_tables(histograms, at_most)
    assert same((lengths, of_block), compiled.choose_tables(histograms, at_most))
    assert reference.table_bits(lengths) == compiled.table_bits(lengths)
    assert reference.write_tables(lengths) == compiled.write_tables(lengths)
    num_bytes = reference.stream_bytes(histograms, lengths, of_block)
    assert same(num_bytes, compiled.stream_bytes(histograms, lengths, of_block))
    streams = reference.write_streams(symbols, lengths, of_block, num_bytes)
    assert same(streams, compiled.write_streams(symbols, lengths, of_block, num_bytes))
    octets = np.concatenate([np.zeros(3, np.uint8), streams, np.zeros(8, np.uint8)])
    for each in BOTH:
        assert same(each.read_streams(octets, 3, num, num_bytes, of_block, lengths), symbols)
        if len(lengths) == 1 and num < 500:
            string, _ = each.read_string(octets, 24, 8 * octets.size - 64, num // 4, lengths[0])
            assert same(string, symbols[: num // 4])


def test_streams_are_followed_alike_side_by_side_and_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(0)
    scales = np.repeat(np.exp(rng.normal(2.5, 1, 17)), 8192)
    drawn = np.clip(np.rint(rng.normal(0, scales)), -127, 127) + 127
    symbols = (drawn[:-5].astype(np.uint8),)
    layout = (Alphabet(255, symbols[0].size),)
    with using(reference):
        body = coding.encode(symbols, layout)
        assert same(coding.decode(body, layout), symbols)
        monkeypatch.setattr(huffman_reference, "_FEWEST_LANES", 10**9)
        assert same(coding.decode(body, layout), symbols)


# Numbers.


@few
@given(seeds, sizes, st.integers(0, 3))
def test_numbers_are_the_same(seed: int, num: int, mantissa: int) -> None:
    rng = np.random.default_rng(seed)
    gaps = numbers_of(rng, num)
    buckets, raw = reference.split(gaps, mantissa)
    assert same((buckets, raw), compiled.split(gaps, mantissa))
    size = int(buckets.max()) + 1
    counted = [each.count_buckets(gaps, mantissa, size) for each in BOTH]
    assert same(*counted)
    assert same(counted[0], reference.count_streams(buckets, size))
    widths = np.arange(256, dtype=np.int64) >> mantissa
    data = reference.write_raw(buckets, raw, widths)
    assert data == compiled.write_raw(buckets, raw, widths)
    octets = np.array([*data, *bytes(8)], np.uint8)
    for each in BOTH:
        assert same(each.join(buckets, raw, mantissa), gaps)
        found, end = each.read_raw(octets, 0, 8 * len(data), buckets, widths)
        assert same(found, raw)
        assert 0 <= 8 * len(data) - end < 8
        assert raw[-1] == 0 or each.read_raw(octets, 0, end // 2, buckets, widths)[1] > end // 2
    positions = reference.positions_of(gaps)
    assert same(positions, compiled.positions_of(gaps))
    for each in BOTH:
        assert same(each.gaps_of(positions), gaps)
        assert same(each.gaps_of(positions[:0]), positions[:0])


@few
@given(seeds, sizes, st.integers(0, 20))
def test_rice_codes_are_the_same(seed: int, num: int, parameter: int) -> None:
    gaps = np.minimum(numbers_of(np.random.default_rng(seed), num), 2000)
    assert same(reference.rice_sums(gaps, 0, 5), compiled.rice_sums(gaps, 0, 5))
    data = reference.write_rice(gaps, parameter)
    assert data == compiled.write_rice(gaps, parameter)
    octets = np.array([*data, *bytes(8)], np.uint8)
    low = reference.read_fields(octets, 0, num, parameter)
    assert same(low, compiled.read_fields(octets, 0, num, parameter))
    for stop in (8 * len(data), num * parameter + 5):
        args = (octets, 0, stop, num, parameter)
        assert same(reference.read_rice(*args), compiled.read_rice(*args))


@few
@given(seeds, sizes, st.sampled_from([2, 3, 5, 15, 16, 255, 256]))
def test_groups_and_few_bits_are_the_same(seed: int, num: int, size: int) -> None:
    symbols = symbols_of(np.random.default_rng(seed), num, size)
    width = (size - 1).bit_length()
    data = reference.write_octets(symbols, width)
    assert data == compiled.write_octets(symbols, width)
    octets = np.array([*data, *bytes(8)], np.uint8)
    for each in BOTH:
        assert same(each.read_octets(octets, 0, num, width), symbols)
    for per_group in range(1, 9):
        if size**per_group <= 256:
            groups = reference.group(symbols, size, per_group)
            assert same(groups, compiled.group(symbols, size, per_group))
            for each in BOTH:
                assert same(each.ungroup(groups, size, per_group, num), symbols)
                if per_group > 1 and symbols[-1]:
                    with pytest.raises(DecodingError):
                        each.ungroup(groups, size, per_group, num - 1)


@given(st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 63)), min_size=1))
def test_packed_bits_are_the_same(pairs: list[tuple[int, int]]) -> None:
    values = np.array([value & ((1 << width) - 1) for value, width in pairs], np.uint64)
    widths = np.array([width for _, width in pairs], np.int64)
    assert reference.pack(values, widths) == compiled.pack(values, widths)


@given(seeds, st.integers(0, 200), st.integers(8, 32), st.sampled_from([np.int32, np.int64]))
def test_lanes_are_the_same_and_sums_of_words_are_sums_of_lanes(
    seed: int, num: int, bits: int, kind: type
) -> None:
    rng = np.random.default_rng(seed)
    most = 2 ** (bits - 1)
    drawn: np.ndarray = rng.integers(-most // 4, most // 4, (4, num)).astype(kind)
    drawn[:, ::3] = rng.choice([-most // 4, -1, 0, most // 4 - 1])
    packed = [reference.pack_lanes(row, bits) for row in drawn]
    assert same(packed[1], compiled.pack_lanes(drawn[1], bits))
    assert packed[0].size == -(-num // (64 // bits))
    words = np.sum(packed, axis=0, dtype=np.uint64)
    sums = drawn.astype(np.int64).sum(axis=0)
    masks = rng.integers(0, 2**64, words.size, np.uint64)
    for each in BOTH:
        assert same(each.unpack_lanes(words, bits, num), sums)
    assert same(*(each.unpack_lanes(words + masks, bits, num) for each in BOTH))


# Vectors.


@few
@given(seeds, st.sampled_from([1, 2, 63, 64, 1000, 70_000, 200_000]), st.integers(0, 3))
def test_the_largest_are_the_same(seed: int, num: int, part: int) -> None:
    rng = np.random.default_rng(seed)
    vector, other = vector_of(rng, num), vector_of(rng, num)
    k = (0, num // 100 + 1, num // 2, num)[part]
    assert same(reference.largest(vector, k), compiled.largest(vector, k))
    for scale in (1.0, 0.25):
        with np.errstate(invalid="ignore", over="ignore"):
            totals = [np.empty_like(vector) for _ in BOTH]
            found = [
                each.add_largest(vector, other, k, total, scale)
                for each, total in zip(BOTH, totals, strict=True)
            ]
        if not np.isnan(totals[0]).any():  # the bits of a sum that is no number are anyone's
            assert same(*found)
            assert same(*totals)
    assert same(reference.peak(vector), compiled.peak(vector))


def test_a_layout_that_the_sample_misses_is_searched_again() -> None:
    """All that is large lies where the sample does not look, or all of the sample is large."""
    num, k = 1 << 20, 5000
    drawn = np.zeros(num, np.uint32)
    ramp = np.arange(num, dtype=np.uint32)
    huffman = np.empty(1 << 14, np.uint32)
    vectors_compiled._sample(ramp, huffman)
    looked_at = huffman.astype(np.int64)
    vector = np.full(num, 1e-3, np.float32)
    vector[looked_at[:3000]] = 5.0
    for misled in (vector, np.where(vector == 5, 0, 1 + ramp / num).astype(np.float32)):
        found = compiled.largest(misled, k)
        assert same(reference.largest(misled, k), found)
        total = np.empty_like(misled)
        assert same(found, compiled.add_largest(misled, drawn.view(np.float32), k, total))


@few
@given(seeds, st.integers(1, 3000), st.sampled_from([1, 7, 127]))
def test_rounded_values_and_sums_are_the_same(seed: int, num: int, levels: int) -> None:
    rng = np.random.default_rng(seed)
    vector = np.nan_to_num(vector_of(rng, num), posinf=1, neginf=-1)
    for step in (0.0, float(np.float32(np.abs(vector).max() / levels))):
        for noise in (None, rng.random(num)):
            args = (vector, step, levels, noise)
            assert same(reference.quantise(*args), compiled.quantise(*args))
    middles = np.sort(rng.random(15)).astype(np.float32)
    magnitudes = np.abs(vector)
    levelled = [each.nearest_levels(magnitudes, middles) for each in BOTH]
    assert same(*levelled)
    where = np.flatnonzero(rng.random(num) < 0.3)
    table = rng.integers(-(2**40), 2**40, 16)
    totals = [rng.integers(-(2**50), 2**50, num)] * 2
    totals = [total.copy() for total in totals]
    flats = [vector.copy(), vector.copy()]
    for each, total, flat in zip(BOTH, totals, flats, strict=True):
        each.add_scaled(total, vector, 2.0**30, 5)
        each.add_scaled_at(total, where, vector[where], 2.0**30, 3)
        each.add_table_at(total, where, levelled[0][where], table)
        each.add_at(flat, where, vector[where], -1.0)
    assert same(*totals)
    assert same(*flats)


# Whole messages.


KINDS = {
    "positions": Positions,
    "alphabet": Alphabet,
    "reals": coding.Reals,
    "integers": coding.Integers,
}


def golden() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every vector of static codes; those under the range coder have a test of their own."""
    for path in sorted(VECTORS.glob("*.json")):
        vector = json.loads(path.read_text())
        for case in vector if isinstance(vector, list) else [vector]:
            given = [fields for field in case["layout"] for fields in field.values()]
            if "contexts" not in case and not any("coder" in fields for fields in given):
                yield f"{path.stem} {case.get('reason', '')}".strip(), case


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in golden()])
def test_golden_bodies_are_the_same_under_both(case: dict[str, Any]) -> None:
    layout = tuple(KINDS[kind](**given) for f in case["layout"] for kind, given in f.items())
    body = bytes.fromhex(case["body"])
    found = []
    for each in BOTH:
        with using(each):
            found.append(outcome(coding.decode, body, layout))
            if "symbols" in case:
                assert coding.encode(found[-1], layout) == body
    assert same(*found)


SPEC = ModelSpec(
    (TensorSpec("w", (300, 211)), TensorSpec("b", (7,)), TensorSpec("v", (64, 100, 1)))
)
METHODS: list[Compressor[Any]] = [
    TopK(fraction=0.1),
    TopK(fraction=0.2, magnitude_bits=4),
    TopK(fraction=0.05, magnitude_bits=0),
    TopK(fraction=0.1, scope="tensor"),
    Quantize(bits=4),
    Quantize(bits=2, rounding="stochastic"),
    Quantize(bits=8),
    Quantize(bits=4, clip=0.5),
    Quantize(bits=4, grid="affine"),
    Uncompressed(),
    PerTensor(),
    ErrorFeedback(TopK(fraction=0.1, magnitude_bits=4)),
]


def pressed(method: Compressor[Any], each: ModuleType) -> tuple[bytes, Any, Accumulator]:
    """The body of an update, the state after it, and the sum it was added to."""
    rng = np.random.default_rng(3)
    update = rng.laplace(0, 0.1, SPEC.size).astype(np.float32)
    public = Public(SPEC, PublicRandomness(bytes(32)))
    accumulator = Accumulator(SPEC.size, FixedPoint(30, 100.0, 1000))
    with using(each):
        state = method.init(SPEC)
        symbols, after = method.compress(update, state, public, rng)
        body = coding.encode(symbols, method.layout(SPEC))
        found = coding.decode(body, method.layout(SPEC))
        accumulator.add(method.decompress(found, public), 7)
    return body, after, accumulator


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_messages_and_sums_are_the_same(method: Compressor[Any]) -> None:
    body, state, summed = pressed(method, reference)
    other_body, other_state, other = pressed(method, compiled)
    assert body == other_body
    assert same(summed.total, other.total)
    if isinstance(method, ErrorFeedback):
        assert same(state.residual, other_state.residual)
    public = Public(SPEC, PublicRandomness(bytes(32)))
    for each in BOTH:
        straight = Accumulator(SPEC.size, FixedPoint(30, 100.0, 1000))
        with using(each):
            found = coding.find(body, method.layout(SPEC))
            decode_add(found, method, public, straight, 7)
            with pytest.raises(InvalidUpdate):
                decode_add(found, method, public, straight, 994)
        assert same(straight.total, summed.total)
        assert straight.weight == 7


def test_values_beyond_the_plan_are_refused_on_the_straight_way_too() -> None:
    public = Public(SPEC, PublicRandomness(bytes(32)))
    for method in (TopK(fraction=0.2, magnitude_bits=4), Quantize(bits=4)):
        body = pressed(method, compiled)[0]
        accumulator = Accumulator(SPEC.size, FixedPoint(30, 0.01, 1000))
        with pytest.raises(InvalidUpdate, match="larger than the plan's"):
            decode_add(coding.find(body, method.layout(SPEC)), method, public, accumulator, 1)
        assert not accumulator.total.any()


@pytest.mark.parametrize("per_group", [1, 2, 5])
def test_a_sum_that_fails_half_way_leaves_no_trace(per_group: int) -> None:
    rng = np.random.default_rng(per_group)
    size = 3
    num = per_group * 20_000 - 1
    symbols = rng.integers(0, size, num).astype(np.uint8)
    groups = reference.group(symbols, size, per_group)
    histograms = reference.count_streams(groups, size**per_group)
    lengths, of_block = reference.choose_tables(histograms)
    num_bytes = reference.stream_bytes(histograms, lengths, of_block)
    streams = reference.write_streams(groups, lengths, of_block, num_bytes)
    octets = np.concatenate([streams, np.zeros(8, np.uint8)])
    ends = np.array([5, 5, num // 2, num])
    tables = rng.integers(-(2**40), 2**40, (4, size))
    due = np.zeros(num, np.int64)
    args = (0, groups.size, num_bytes, of_block, lengths, per_group)
    reference.add_streams(octets, *args, due, ends, tables)
    for each in BOTH:
        total = np.zeros(num, np.int64)
        each.add_streams(octets, *args, total, ends, tables)
        assert same(total, due)
        for at in (10, streams.size - 10):
            bad = octets.copy()
            bad[at : at + 4] ^= 255
            total = np.arange(num)
            if outcome(each.add_streams, bad, *args, total, ends, tables):
                assert same(total, np.arange(num))
        if symbols[-1]:
            total, short = np.zeros(num - 1, np.int64), np.array([5, 5, num // 2, num - 1])
            if (num - 1) % per_group:
                with pytest.raises(DecodingError, match="after the last"):
                    each.add_streams(octets, *args, total, short, tables)
                assert not total.any()


# Damage.


def guarded(num: int, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """An array within a larger one, whose ends are to stay as they are."""
    whole = np.full(num + 2 * CANARY, 0x5A, dtype)
    return whole, whole[CANARY : CANARY + num]


def untouched(whole: np.ndarray) -> bool:
    return bool((whole[:CANARY] == 0x5A).all() and (whole[-CANARY:] == 0x5A).all())


def damaged(rng: np.random.Generator, octets: np.ndarray) -> np.ndarray:
    """`octets`, less the guard, with bytes, bits or a stretch changed."""
    changed = octets.copy()
    body = changed[:-8]
    at = int(rng.integers(0, body.size))
    match int(rng.integers(0, 4)):
        case 0:
            body[at] ^= np.uint8(1 << int(rng.integers(0, 8)))
        case 1:
            body[at : at + 16] = rng.integers(0, 256, body[at : at + 16].size)
        case 2:
            body[at:] = rng.integers(0, 256, body[at:].size)
        case _:
            body[at:] = int(rng.choice([0, 255]))
    return changed


@pytest.mark.soak
@pytest.mark.slow(short=True)
def test_damaged_blocks_are_refused_or_decoded_within_their_arrays(soak: bool, slow: bool) -> None:
    """Straight to the compiled kernels, with lengths in the directory that are wrong as well."""
    rng = np.random.default_rng(SEED)
    cases = 1_000_000 if soak else 50_000 if slow else 20_000
    samples = []
    for size, num in ((225, 600), (5, 900), (256, 2049), (2, 300), (225, 16_400)):
        symbols = symbols_of(rng, num, size)
        histograms = reference.count_streams(symbols, size)
        lengths, of_block = reference.choose_tables(histograms)
        num_bytes = reference.stream_bytes(histograms, lengths, of_block)
        streams = reference.write_streams(symbols, lengths, of_block, num_bytes)
        lookup = np.empty((len(lengths), 4096), np.uint16)
        huffman_compiled._lookups(lengths, lookup)
        octets = np.concatenate([streams, np.zeros(8, np.uint8)])
        samples.append((octets, num_bytes, of_block, lookup, num, lengths, size))
    widths = np.arange(256, dtype=np.int64) >> 2
    steps = np.arange(15)[np.newaxis]
    refused = 0
    picks = rng.choice(len(samples), cases, p=[0.4, 0.3, 0.02, 0.275, 0.005])
    for case, pick in enumerate(picks.tolist()):
        octets, num_bytes, of_block, lookup, num, lengths, alphabet = samples[pick]
        bad = damaged(rng, octets)
        if case % 3 == 0:
            num_bytes = num_bytes.copy()
            moved = int(rng.integers(0, 1 + int(num_bytes[0, 1])))
            num_bytes[0, 0] += moved
            num_bytes[0, 1] -= moved
        whole, symbols = guarded(num, np.uint8)
        starts = huffman_compiled._starts(0, num_bytes)
        args: tuple[Any, ...] = (bad, starts, num_bytes, of_block, lookup, symbols)
        refused += huffman_compiled._read_streams(*args) > 0
        assert untouched(whole)
        if case % 4 == 1 and alphabet == 225:
            whole_total, total = guarded(2 * num - 1, np.int64)
            args = (bad, starts, num, num_bytes, of_block, lookup, 2)
            huffman_compiled._add_streams(*args, total, np.array([total.size]), steps)
            assert untouched(whole_total)
        if case % 4 == 0:
            whole_raw, raw = guarded(num, np.int64)
            stop = int(rng.integers(0, 8 * (bad.size - 8)))
            end = numbers_compiled._read_raw(bad, 0, stop, symbols, widths, raw)
            assert end <= stop + 64
            assert untouched(whole_raw)
            width = int(rng.integers(0, 1 + min(12, stop // num)))
            unary = min(stop, (width + 3) * num)
            count, end = numbers_compiled._read_rice(bad, 0, width * num, unary, width, raw)
            assert count <= num
            assert width * num <= end <= stop
            assert untouched(whole_raw)
        if case % 500 == 0:
            args = (bad, 0, num, num_bytes, of_block, lengths)
            assert same(*(outcome(each.read_streams, *args) for each in BOTH))
    assert cases / 4 < refused


# The choice, and what it costs.


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter; in it, everything of this checkout can be imported."""
    given = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env}
    return subprocess.run(
        [sys.executable, "-c", code], env=given, capture_output=True, text=True, check=False
    )


@needs_numba
def test_importing_the_device_imports_no_numba() -> None:
    code = """
import sys, fedpress_client, fedpress_compression.coding
assert "numba" not in sys.modules
from fedpress_compression import kernels
assert kernels.CHOSEN == "numba" and "numba" not in sys.modules
kernels.peak(__import__("numpy").zeros(3, "f4"))
assert "numba" in sys.modules
"""
    done = run(code, FEDPRESS_KERNELS="")
    assert done.returncode == 0, done.stderr


def test_numpy_can_be_forced() -> None:
    code = """
import sys, numpy as np
from fedpress_compression import kernels
assert kernels.CHOSEN == "numpy"
kernels.peak(np.zeros(3, "f4")); kernels.warm_up()
assert "numba" not in sys.modules
"""
    done = run(code, FEDPRESS_KERNELS="numpy")
    assert done.returncode == 0, done.stderr


def test_the_choice_follows_the_setting_and_what_is_there() -> None:
    both, library = ("numba", "triton"), ("numba", "prebuilt")
    assert kernels.choose("", both, byte_order="little") == "numba"
    assert kernels.choose("", both, byte_order="big") == "numpy"
    assert kernels.choose("", ("triton",)) == "numpy"
    assert kernels.choose("", library, byte_order="little") == "prebuilt"
    assert kernels.choose("", library, byte_order="big") == "numpy"
    assert kernels.choose("numba", library) == "numba"
    for asked in ("numpy", *both):
        assert kernels.choose(asked, both) == asked
    with pytest.raises(ConfigurationError, match="but no FEDPRESS_PREBUILT_KERNELS"):
        kernels.choose("prebuilt", both)
    with pytest.raises(MissingExtra, match=r"fedpress\[fast\]"):
        kernels.choose("numba", ())
    with pytest.raises(MissingExtra, match=r"fedpress\[gpu\]"):
        kernels.choose("triton", ("numba",))
    with pytest.raises(ConfigurationError, match=r"FEDPRESS_KERNELS must be .* not 'cuda'"):
        kernels.choose("cuda", both)
    with pytest.raises(AttributeError):
        _ = kernels.no_such_kernel


def test_both_implementations_have_every_kernel() -> None:
    assert reference.__all__ == compiled.__all__
    assert {*reference.__all__, "CHOSEN", "build_library", "limit_threads", "warm_up"} >= set(
        kernels.__all__
    )
    assert set(kernels.__all__) >= set(reference.__all__)


@pytest.fixture
def three_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every call is cut into three, however short its arrays."""
    for module, limits in (
        (huffman_compiled, {"_BLOCKS": 1}),
        (tables_compiled, {"_LONG": 1, "_BLOCKS": 1}),
        (numbers_compiled, {"_LONG": 1}),
        (vectors_compiled, {"_LONG": 1, "_MANY": 1}),
    ):
        for name, limit in limits.items():
            monkeypatch.setattr(module, name, limit)
    before = kernels.limit_threads(3)
    yield
    kernels.limit_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_threads_change_nothing() -> None:
    rng = np.random.default_rng(6)
    num, k = 200_003, 3000
    vector, other = vector_of(rng, num), rng.standard_t(3, num).astype(np.float32)
    vector = np.nan_to_num(vector, posinf=1, neginf=-1)
    symbols = symbols_of(rng, num, 225)
    histograms = reference.count_streams(symbols, 225)
    lengths, of_block = reference.choose_tables(histograms)
    num_bytes = reference.stream_bytes(histograms, lengths, of_block)
    streams = reference.write_streams(symbols, lengths, of_block, num_bytes)
    octets = np.concatenate([streams, np.zeros(8, np.uint8)])
    where = np.flatnonzero(rng.random(num) < 0.3)
    table = rng.integers(-(2**40), 2**40, (2, 15))
    lanes = rng.integers(-500, 500, num)
    assert same(compiled.write_streams(symbols, lengths, of_block, num_bytes), streams)
    groups = reference.group(symbols % 15, 15, 2)
    counted = reference.count_streams(groups, 225)
    codes, of_groups = reference.choose_tables(counted)
    group_bytes = reference.stream_bytes(counted, codes, of_groups)
    written = reference.write_streams(groups, codes, of_groups, group_bytes)
    grouped = np.concatenate([written, np.zeros(8, np.uint8)])
    found = []
    for each in BOTH:
        total, sums = np.empty_like(vector), np.zeros((4, num), np.int64)
        each.add_scaled(sums[0], vector, 2.0**20, 3)
        each.add_scaled_at(sums[1], where, vector[where], 2.0**20, 3)
        each.add_table_at(sums[2], where, symbols[where] % 15, table[0])
        args = (grouped, 0, groups.size, group_bytes, of_groups, codes, 2)
        each.add_streams(*args, sums[3], np.array([70_001, num]), table)
        bad = grouped.copy()
        bad[-9] ^= 255
        with pytest.raises(DecodingError):
            each.add_streams(bad, *args[1:], sums[3], np.array([70_001, num]), table)
        each.add_at(other, where, vector[where], -1.0)
        each.add_at(other, where, vector[where], 1.0)
        found.append(
            (
                each.largest(vector, k),
                each.add_largest(vector, other, k, total),
                total,
                sums,
                each.peak(vector),
                each.quantise(vector, 0.1, 7, None),
                each.quantise(vector, 0.1, 7, np.linspace(0, 0.99, num)),
                each.nearest_levels(np.abs(vector), np.array([0.1, 0.2], np.float32)),
                each.count(symbols, 225),
                each.count_streams(symbols, 225),
                each.count_buckets(lanes + 500, 2, 60),
                each.read_streams(octets, 0, num, num_bytes, of_block, lengths),
                each.pack_lanes(lanes, 21),
                each.unpack_lanes(each.pack_lanes(lanes, 10), 10, num),
            )
        )
    assert same(*found)


@pytest.mark.usefixtures("three_threads")
def test_a_part_that_fails_fails_the_call_once_all_are_done() -> None:
    ended = []

    def call(begin: int, end: int) -> int:
        if begin == 0:
            raise DecodingError("bad")
        ended.append(end)
        return end

    among = workers.parts(10, 1, 2)
    assert among == [(0, 2), (2, 6), (6, 10)]
    with pytest.raises(DecodingError, match="bad"):
        workers.each(call, among)
    assert sorted(ended) == [6, 10]
    assert workers.parts(10, 100) == [(0, 10)]
    assert workers.each(lambda begin, end: end - begin, workers.parts(0, 1)) == [0]


def test_the_setting_limits_threads() -> None:
    assert workers.threads_of("", 64) == 4
    assert workers.threads_of("", 1) == 1
    assert workers.threads_of("12", 1) == 12
    for asked in ("0", "-1", "many", "65"):
        with pytest.raises(ConfigurationError, match="FEDPRESS_THREADS is"):
            workers.threads_of(asked, 4)
    code = "from fedpress_compression import kernels; print(kernels.limit_threads(1))"
    assert run(code, FEDPRESS_THREADS="3").stdout == "3\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
@pytest.mark.usefixtures("three_threads")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_process_starts_threads_of_its_own() -> None:
    assert compiled.peak(np.full(9, 3, np.float32)) == 3
    child = os.fork()
    if not child:
        os._exit(compiled.peak(np.full(9, 5, np.float32)) != 5)
    assert os.waitpid(child, 0)[1] == 0
    first = workers._workers.pool()
    workers._workers.forget()
    assert workers._workers.pool() is not first
    first.shutdown()


LOADS = "from fedpress_compression import kernels; kernels.peak(__import__('numpy').zeros(3, 'f4'))"


def test_a_folder_without_a_library_is_refused(tmp_path: Path) -> None:
    done = run(LOADS, FEDPRESS_KERNELS="", FEDPRESS_PREBUILT_KERNELS=str(tmp_path))
    assert f"FEDPRESS_PREBUILT_KERNELS is '{tmp_path}', which has no kernels" in done.stderr
    done = run(LOADS, FEDPRESS_KERNELS="prebuilt", FEDPRESS_PREBUILT_KERNELS="")
    assert "FEDPRESS_KERNELS=prebuilt, but no FEDPRESS_PREBUILT_KERNELS" in done.stderr


@needs_numba
def test_a_library_is_built_of_numbas_kernels_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match="no linker: ld is not on the PATH"):
        kernels.build_library(tmp_path)
    monkeypatch.setattr(kernels, "CHOSEN", "numpy")
    with pytest.raises(ConfigurationError, match="those in use are numpy's"):
        kernels.build_library(tmp_path)


def test_memory_is_lent_again_once_nothing_holds_it() -> None:
    size = 1 << 20
    first = buffer_pool.pooled(size, np.float32)
    first[:] = 1
    address, part = first.ctypes.data, first[10:20].view(np.uint32)
    del first
    second = buffer_pool.pooled(size, np.float32)
    assert second.ctypes.data != address
    second[:] = 2
    assert (part.view(np.float32) == 1).all()
    del part
    again = buffer_pool.pooled(size - 5, np.float32)
    assert again.ctypes.data == address
    assert again.size == size - 5
    many = [buffer_pool.pooled(32 << 20, np.uint8) for _ in range(8)]
    del many
    held = sum(room * len(those) for room, those in buffer_pool._free.items())
    assert held <= buffer_pool._MAX_POOL_BYTES


def test_warming_up_runs_every_kernel() -> None:
    kernels.warm_up()


@needs_numba
def test_kernels_work_where_nothing_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only install without a home: numba has no place for its cache, and says so."""

    def njit(*, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: function

    monkeypatch.setattr("numba.njit", njit)
    assert intrinsics.kernel(abs)(-3) == 3
