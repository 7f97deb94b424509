"""Sums of packed words are packed sums, exactly, and a body has few bits that carry nothing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan, InvalidUpdate
from fedpress_protocols.masking.ring import (
    MAX_SUM,
    Bounded,
    Packing,
    Segment,
    lane_bits_for,
)
from tests.lengths import examples

Ints = npt.NDArray[np.int64]

bounds = st.one_of(
    st.integers(1, 40),
    st.integers(1, 2**20),
    st.integers(1, MAX_SUM),
    st.builds(lambda bits, off: max(1, 2**bits + off), st.integers(0, 61), st.integers(-2, 2)),
)


def segments(length: int = 50) -> st.SearchStrategy[tuple[Segment, int]]:
    def build(bound: int, n: int, length: int) -> tuple[Segment, int]:
        n = max(1, min(n, MAX_SUM // bound))
        return Segment.of(Bounded("x", length, min(bound, MAX_SUM)), n), n

    return st.builds(build, bounds, st.integers(1, 10_000), st.integers(1, length))


def draw(rng: np.random.Generator, segment: Segment) -> Ints:
    """One client's integers, many of them as large as may be."""
    bound, length = segment.vector.bound, segment.vector.length
    drawn = rng.integers(-bound, bound, length, endpoint=True)
    return np.where(rng.random(length) < 0.5, drawn, rng.choice([-bound, bound], length))


def slow_word(segment: Segment, values: list[int]) -> int:
    return sum(value * segment.base**place for place, value in enumerate(values)) % 2**64


# Exactness.


@given(segments(), st.integers(0, 2**32 - 1), st.integers(1, 12))
def test_sums_of_words_are_sums_of_integers(
    made: tuple[Segment, int], seed: int, clients: int
) -> None:
    """Any number of clients up to n, any values in range, masked, sent as bytes and unmasked."""
    segment, n = made
    rng = np.random.default_rng(seed)
    inputs = [draw(rng, segment) for _ in range(min(clients, n))]
    total = np.zeros(segment.num_words, np.uint64)
    masks = np.zeros(segment.num_words, np.uint64)
    for values in inputs:
        mask = rng.integers(0, 2**64, segment.num_words, np.uint64)
        masks += mask
        body = segment.to_bytes(segment.pack(values) + mask)
        assert len(body) == segment.num_bytes
        total += segment.from_bytes(body)
    assert (segment.unpack(total - masks) == np.sum(inputs, axis=0)).all()


@given(segments())
def test_the_largest_sums_fit(made: tuple[Segment, int]) -> None:
    segment, n = made
    for signs in (1, -1, np.where(np.arange(segment.vector.length) % 2, 1, -1)):
        one = np.full(segment.vector.length, segment.vector.bound, np.int64) * signs
        words = segment.pack(one) * np.uint64(n)  # n clients send the same
        assert (segment.unpack(words) == one * n).all()


@given(segments(), st.integers(0, 2**32 - 1))
def test_words_are_what_the_definition_says(made: tuple[Segment, int], seed: int) -> None:
    segment, _ = made
    values = draw(np.random.default_rng(seed), segment)
    filled = values.tolist() + [0] * (segment.num_words * segment.digits - values.size)
    groups = [filled[at : at + segment.digits] for at in range(0, len(filled), segment.digits)]
    words = segment.pack(values)
    assert words.tolist() == [slow_word(segment, group) for group in groups]
    bits = sum(
        (word % 2**segment.word_bits) << segment.word_bits * place
        for place, word in enumerate(words.tolist())
    )
    assert segment.to_bytes(words) == bits.to_bytes(segment.num_bytes, "little")


@given(
    st.lists(st.tuples(bounds, st.integers(1, 30)), min_size=1, max_size=5),
    st.integers(1, 1000),
    st.integers(0, 2**32 - 1),
)
def test_vectors_of_different_bounds_share_a_body(
    shapes: list[tuple[int, int]], n: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    vectors = [
        Bounded(str(i), length, min(bound, MAX_SUM // n))
        for i, (bound, length) in enumerate(shapes)
    ]
    packing = Packing.of(vectors, n)
    assert packing == Packing.of(vectors, n)
    inputs = [
        {segment.vector.name: draw(rng, segment) for segment in packing.segments}
        for _ in range(min(n, 4))
    ]
    total = np.zeros(packing.num_words, np.uint64)
    for values in inputs:
        body = packing.to_bytes(packing.pack(values))
        assert len(body) == packing.num_bytes
        total += packing.from_bytes(body)
    found = packing.unpack(total)
    assert list(found) == [vector.name for vector in vectors]
    for name, sums in found.items():
        assert sums.dtype == np.int64
        assert (sums == np.sum([values[name] for values in inputs], axis=0)).all()


# Waste.


@pytest.mark.parametrize(
    ("n", "bound", "lane_bits", "digits", "word_bits"),
    [
        (10, 3276, 16, 4, 64),
        (100, 327, 16, 4, 64),
        (100, 10_485, 21, 3, 64),
        (1000, 1048, 21, 3, 64),
        (10_000, 104, 21, 3, 64),
        (10_000, 214_748, 32, 2, 64),
        (100, 40, 13, 4, 52),
        (1000, 65, 17, 3, 51),
        (10, 3, None, 10, 60),
        (1000, 1, 11, 5, 55),
        (3, 1, None, 22, 62),
        (1, 2**40, None, 1, 42),
    ],
)
def test_words_are_filled(
    n: int, bound: int, lane_bits: int | None, digits: int, word_bits: int
) -> None:
    segment = Segment.of(Bounded("x", 1_000_000, bound), n)
    assert (segment.lane_bits, segment.digits, segment.word_bits) == (lane_bits, digits, word_bits)


@settings(max_examples=examples(40, 200))
@given(st.integers(1, 10_000), st.integers(1, 2**31))
def test_little_is_wasted_whatever_the_range(n: int, bound: int) -> None:
    """Against log2 of how many sums there are: the part of a bit that is left over in a word, and
    one bit of the word for simplicity."""
    segment = Segment.of(Bounded("x", 1_000_000, bound), n)
    least = math.log2(2 * n * bound + 1)
    most = 64 / 63 * (least + 1 / (64 // least))
    assert 8 * segment.num_bytes / 1_000_000 <= most + 1e-3


def test_a_lane_holds_what_its_width_says() -> None:
    for bits, n, due in ((12, 10, 204), (16, 10, 3276), (16, 100, 327), (21, 100, 10_485),
                         (16, 1000, 32), (21, 1000, 1048), (16, 10_000, 3), (21, 10_000, 104),
                         (32, 10_000, 214_748)):  # fmt: skip
        assert lane_bits_for(due, n) <= bits < lane_bits_for(due + 1, n)


# What is refused.


def test_integers_beyond_the_bound_are_not_packed() -> None:
    segment = Segment.of(Bounded("x", 3, 10), 5)
    for values in ([11, 0, 0], [0, -11, 0]):
        with pytest.raises(InvalidUpdate, match="an integer beyond 10"):
            segment.pack(np.array(values))
    wrong: Any
    for wrong in (np.zeros(4, np.int64), np.zeros(3), np.zeros(3, np.uint8)):
        with pytest.raises(InvalidUpdate, match="expected 3 signed integers"):
            segment.pack(wrong)
    assert segment.unpack(segment.pack(np.array([10, -10, 0], np.int8))).tolist() == [10, -10, 0]


@pytest.mark.parametrize("bound", [3, 40, 60, 1048, 2**40])
def test_words_with_a_mask_left_in_them_are_no_sum(bound: int) -> None:
    segment = Segment.of(Bounded("x", 1001, bound), 10)
    mask = np.random.default_rng(1).integers(0, 2**64, segment.num_words, np.uint64)
    with pytest.raises(InvalidUpdate, match=f"a sum beyond {10 * bound}"):
        segment.unpack(mask)


def test_a_body_of_another_length_is_refused() -> None:
    packing = Packing.of([Bounded("x", 100, 40), Bounded("y", 7, 3)], 100)
    body = packing.to_bytes(packing.pack({"x": np.ones(100, int), "y": np.ones(7, int)}))
    for wrong in (body[:-1], body + b"\0", b""):
        with pytest.raises(InvalidUpdate, match=f"a body of {len(wrong)} bytes"):
            packing.from_bytes(wrong)
    with pytest.raises(InvalidUpdate, match="x: 1 bytes, expected"):
        packing.segments[0].from_bytes(b"\0")


def test_a_bit_after_the_last_word_is_refused() -> None:
    segment = Segment.of(Bounded("x", 1001, 40), 100)
    assert (segment.num_words, segment.word_bits, segment.num_bytes) == (251, 52, 1632)
    good = bytes(1631) + b"\x0f"
    assert segment.from_bytes(good)[-1] == 0xF << 48
    with pytest.raises(InvalidUpdate, match="a bit set after the last word"):
        segment.from_bytes(bytes(1631) + b"\x10")


def test_other_vectors_and_words_than_the_plan_s_are_refused() -> None:
    packing = Packing.of([Bounded("x", 2, 5)], 3)
    with pytest.raises(InvalidUpdate, match=r"vectors \['y'\]"):
        packing.pack({"y": np.zeros(2, int)})
    wrong: Any
    for wrong in (np.zeros(2, np.uint64), np.zeros(1, np.int64)):
        with pytest.raises(InvalidUpdate, match="expected 1 uint64"):
            packing.unpack(wrong)
        with pytest.raises(InvalidUpdate, match="expected 1 uint64"):
            packing.to_bytes(wrong)


def test_plans_that_cannot_work_are_refused() -> None:
    with pytest.raises(IncompatiblePlan, match="sums of 10 integers"):
        Segment.of(Bounded("x", 1, MAX_SUM // 10 + 1), 10)
    with pytest.raises(IncompatiblePlan, match="sums of 0 integers"):
        Segment.of(Bounded("x", 1, 1), 0)
    for length, bound in ((0, 1), (1, 0)):
        with pytest.raises(ConfigurationError, match="must be positive"):
            Bounded("x", length, bound)
    with pytest.raises(ConfigurationError, match="2 vectors with 1 distinct names"):
        Packing.of([Bounded("x", 1, 1)] * 2, 3)
    with pytest.raises(ConfigurationError, match="0 vectors"):
        Packing.of([], 3)
