"""The codes are optimal under their limit, complete, canonical, and their tables come back."""

from __future__ import annotations

import heapq
import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpress_compression.coding import huffman
from fedpress_compression.coding.bits import Reader, bit_string, pack
from fedpress_protocols.errors import DecodingError

histograms = st.lists(st.integers(0, 10**6), min_size=1, max_size=256).map(np.array)


def kraft_sum(lengths: huffman.Lengths) -> Fraction:
    return sum((Fraction(1, 2 ** int(n)) for n in lengths[lengths > 0]), Fraction(0))


def cost(counts: list[int], lengths: list[int]) -> int:
    return sum(c * n for c, n in zip(counts, lengths, strict=True))


def unlimited_cost(counts: list[int]) -> int:
    """Huffman 1952: the sum of all merged weights."""
    heap, total = sorted(counts), 0
    while len(heap) > 1:
        merged = heapq.heappop(heap) + heapq.heappop(heap)
        total += merged
        heapq.heappush(heap, merged)
    return total


def best_cost(counts: list[int], limit: int) -> int:
    """Over all complete codes within the limit: the heaviest gets the shortest."""
    heaviest_first = sorted(counts, reverse=True)
    return min(
        cost(heaviest_first, list(lengths))
        for lengths in itertools.combinations_with_replacement(range(1, limit + 1), len(counts))
        if sum(2 ** (limit - n) for n in lengths) == 2**limit
    )


@given(
    counts=st.lists(st.integers(1, 1000), min_size=2, max_size=8),
    limit=st.integers(3, 5),
)
def test_codes_are_the_best_within_the_limit(counts: list[int], limit: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huffman, "MAX_LENGTH", limit)
        lengths = huffman.code_lengths(np.array(counts))
    assert lengths.max() <= limit
    assert cost(counts, lengths.tolist()) == best_cost(counts, limit)


@given(st.lists(st.integers(90, 110), min_size=2, max_size=256))
def test_where_the_limit_does_not_bind_codes_are_huffmans(counts: list[int]) -> None:
    lengths = huffman.code_lengths(np.array(counts))
    assert cost(counts, lengths.tolist()) == unlimited_cost(counts)


def test_the_limit_holds_where_huffman_would_go_deeper() -> None:
    fibonacci = [1, 1]
    while len(fibonacci) < 40:
        fibonacci.append(fibonacci[-1] + fibonacci[-2])
    lengths = huffman.code_lengths(np.array(fibonacci))
    assert lengths.max() == huffman.MAX_LENGTH
    assert kraft_sum(lengths) == 1


@given(histograms)
def test_codes_are_complete_and_prefix_free(histogram: np.ndarray) -> None:
    lengths = huffman.code_lengths(histogram)
    assert ((lengths > 0) == (histogram > 0)).all()
    if np.count_nonzero(histogram) > 1:
        assert kraft_sum(lengths) == 1
        codes = huffman.codes(lengths)
        words = [f"{int(codes[s]):0{lengths[s]}b}"[::-1] for s in np.flatnonzero(lengths).tolist()]
        assert len(set(words)) == len(words)
        words.sort()
        assert not any(b.startswith(a) for a, b in itertools.pairwise(words))


def test_codes_count_upwards_by_length_then_symbol() -> None:
    codes = huffman.codes(np.array([2, 0, 1, 3, 3], np.uint8))
    words = [f"{int(code):0{n}b}"[::-1] for code, n in zip(codes, [2, 1, 1, 3, 3], strict=True)]
    assert words == ["10", "0", "0", "110", "111"]


@given(histograms)
def test_a_window_finds_the_code_that_it_begins_with(histogram: np.ndarray) -> None:
    lengths = huffman.code_lengths(histogram)
    symbols, bits = huffman.lookup(lengths)
    codes, widths = huffman.codes(lengths), huffman.code_bits(lengths)
    for symbol in np.flatnonzero(lengths).tolist():
        for ahead in (0, 2**huffman.MAX_LENGTH - 1):
            window = (int(codes[symbol]) | ahead << int(widths[symbol])) & 0xFFF
            assert (symbols[window], bits[window]) == (symbol, widths[symbol])


@given(histograms)
def test_a_table_comes_back_and_takes_all_its_bits(histogram: np.ndarray) -> None:
    if not histogram.any():
        histogram[0] = 1
    lengths = huffman.code_lengths(histogram)
    pairs = huffman.table(lengths)
    reader = Reader(pack(*bit_string(pairs)))
    assert (huffman.read_table(reader, lengths.size) == lengths).all()
    assert reader.at == sum(width for _, width in pairs)


@given(st.binary(max_size=80), st.integers(1, 256))
def test_any_bits_are_a_complete_table_or_refused(data: bytes, alphabet: int) -> None:
    try:
        lengths = huffman.read_table(Reader(data), alphabet)
    except DecodingError:
        return
    alone = lengths == huffman.ALONE
    assert lengths.size == alphabet
    assert alone.sum() == 1 if alone.any() else kraft_sum(lengths) == 1


def test_bits_are_packed_least_significant_first() -> None:
    assert pack([1, 0b10, 0x1FF], [1, 2, 9]) == bytes([0b11111101, 0b00001111])
    widths = np.random.default_rng(0).integers(0, 64, 1000)
    values = [(0x9E3779B97F4A7C15 * i) % 2 ** int(w) for i, w in enumerate(widths)]
    whole = 0
    for value, width in zip(reversed(values), reversed(widths.tolist()), strict=True):
        whole = whole << width | value
    assert pack(values, widths) == whole.to_bytes((int(widths.sum()) + 7) // 8, "little")
