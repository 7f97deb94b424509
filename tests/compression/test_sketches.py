"""Sketches of updates: their products are those of the updates, within the error that they state,
also once they are of four levels, and whatever the updates are like."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpress_compression.errors import DecodingError
from fedpress_compression.randomness import PublicRandomness, PublicStream
from fedpress_compression.sketches import (
    LABEL,
    LEAST_CELLS,
    MOST_CELLS,
    Cells,
    Places,
    from_bytes,
    num_bytes,
    sketch,
    to_bytes,
)
from fedpress_compression.tensors import Vector
from fedpress_compression.update import Piece, Update

TAILS = ("normal", "heavy", "few", "one")
NUMBERS = [2**power for power in range(6, 17)]
SEEDS = st.integers(0, 2**32)


def stream(seed: int = 0) -> PublicStream:
    """Of the round `seed`."""
    return PublicRandomness(seed.to_bytes(32, "big")).stream(LABEL)


def made(values: Vector, num_cells: int, seed: int = 0) -> Cells:
    """The sketch in that round."""
    return sketch(values, num_cells, stream(seed))


def drawn(tail: str, size: int, rng: np.random.Generator) -> Vector:
    """An update of norm 1, all of which is in one or in a few of its values if its tail is so."""
    values = np.zeros(size)
    if tail == "one":
        values[rng.integers(size)] = rng.choice([-1.0, 1.0])
    elif tail == "few":
        values[rng.choice(size, min(size, 8), replace=False)] = rng.standard_normal(min(size, 8))
    else:
        values += rng.standard_cauchy(size) if tail == "heavy" else rng.standard_normal(size)
    return (values / np.linalg.norm(values)).astype(np.float32)


def sent(cells: Cells) -> Cells:
    return from_bytes(to_bytes(cells), cells.size)


def between(rows: Cells, others: Cells) -> float:
    """The mean product of different clients' rows."""
    products = rows @ others.T
    return float((products.sum() - np.trace(products)) / (len(rows) * (len(rows) - 1)))


# Before they are sent


@given(SEEDS, st.sampled_from(TAILS), st.sampled_from([1, 63, 64, 65, 1000]), st.booleans())
def test_products_of_sketches_are_those_of_updates_with_the_error_that_is_stated(
    seed: int, tail: str, size: int, same: bool
) -> None:
    rng, num_cells = np.random.default_rng(seed), LEAST_CELLS
    one = drawn(tail, size, rng)
    other = one if same else drawn(tail, size, rng)
    products = [
        made(one, num_cells, round_) @ made(other, num_cells, round_)
        for round_ in range(seed, seed + 100)
    ]
    errors = np.array(products) - float(one.astype(np.float64) @ other)
    stated = 1 / math.sqrt(num_cells)
    # Where few values are all, few of the rounds have all of the error.
    assert np.sqrt((errors**2).mean()) < (1.7 if tail == "normal" else 4) * stated
    assert abs(errors.mean()) < 5 * math.sqrt(2 / len(errors)) * stated


@given(SEEDS, st.sampled_from(TAILS), st.sampled_from([64, 256, 1024]))
def test_more_cells_have_a_smaller_error(seed: int, tail: str, num_cells: int) -> None:
    one = drawn(tail, 3000, np.random.default_rng(seed))
    sketches = [made(one, num_cells, round_) for round_ in range(seed, seed + 40)]
    errors = [cells @ cells - 1 for cells in sketches]
    assert np.sqrt(np.square(errors).mean()) < 6 / math.sqrt(num_cells)


@given(SEEDS, st.floats(-4, 4), st.sampled_from([10, 64, 700]))
def test_the_sketch_of_a_sum_is_the_sum_of_the_sketches(
    seed: int, factor: float, size: int
) -> None:
    rng = np.random.default_rng(seed)
    one, other = (drawn("normal", size, rng).astype(np.float64) for _ in range(2))
    whole, first, second = (
        made(each.astype(np.float32), 128, seed) for each in (one + factor * other, one, other)
    )
    np.testing.assert_allclose(whole, first + factor * second, atol=1e-5)


def test_of_a_model_of_several_blocks_every_value_counts() -> None:
    size = 2**18 + 5
    places = Places(size, 64, stream())
    for place in (0, 2**18 - 1, 2**18, size - 1):
        spike = np.zeros(size, np.float32)
        spike[place] = 3.0
        cells = made(spike, 64)
        assert cells @ cells == pytest.approx(9.0, rel=1e-5)
        np.testing.assert_array_equal(places.sketch(Update.from_dense(spike)), cells)


@given(SEEDS, st.sampled_from([1, 70, 900]), st.sampled_from([64, 2**16]))
def test_an_update_in_pieces_has_the_sketch_of_the_whole(
    seed: int, size: int, num_cells: int
) -> None:
    rng = np.random.default_rng(seed)
    values, split = drawn("normal", size, rng), int(rng.integers(size))
    some = np.flatnonzero(rng.random(size - split) < 0.3) + split
    sparse = Update(
        size, (Piece(slice(0, split), values[:split]), Piece(some, values[split:][some - split]))
    )
    places = Places(size, num_cells, stream(seed))
    for update in (sparse, Update.from_dense(values), Update(size, ()), sparse):
        expected = made(update.dense(), num_cells, seed)
        np.testing.assert_allclose(places.sketch(update), expected, atol=1e-6)


@given(SEEDS, st.sampled_from(TAILS))
def test_the_cells_are_nearly_normal_whatever_the_update(seed: int, tail: str) -> None:
    """So that four levels lose the same of each: kurtosis 3, to within what 1024 values tell."""
    cells = made(drawn(tail, 5000, np.random.default_rng(seed)), 1024, seed)
    assert (cells**4).mean() / (cells**2).mean() ** 2 == pytest.approx(3, abs=1)


# As they are sent


@given(SEEDS, st.sampled_from(TAILS), st.sampled_from([64, 2048]), st.floats(-30, 10))
def test_the_product_with_what_is_sent_is_the_squared_norm(
    seed: int, tail: str, num_cells: int, power: float
) -> None:
    update = drawn(tail, 1500, np.random.default_rng(seed)) * np.float32(10**power)
    cells = made(update, num_cells, seed)
    assert sent(cells) @ cells == pytest.approx(cells @ cells, rel=1e-6)
    assert len(np.unique(sent(cells))) <= 4


@given(SEEDS, st.sampled_from(TAILS))
def test_four_levels_keep_seven_eighths_of_the_squared_norm(seed: int, tail: str) -> None:
    cells = made(drawn(tail, 5000, np.random.default_rng(seed)), 2048, seed)
    assert cells @ cells / (sent(cells) @ sent(cells)) == pytest.approx(0.88, abs=0.03)


@given(SEEDS, st.sampled_from(TAILS), st.floats(0.1, 0.5), st.floats(0.1, 1))
def test_what_four_levels_take_off_cancels_between_clients(
    seed: int, tail: str, common: float, kept: float
) -> None:
    """Updates whose products are `common` of their squared norms, of which `kept` arrives: both the
    products and their ratio, which a probe forms, are as they would be of whole sketches."""
    rng, clients, num_cells = np.random.default_rng(seed), 20, 1024
    shared = drawn(tail, 3000, rng)
    own = [drawn(tail, 3000, rng) for _ in range(clients)]
    updates = [math.sqrt(common) * shared + math.sqrt(1 - common) * each for each in own]
    whole = np.array([made(each, num_cells, seed) for each in updates])
    levels = np.array([sent(each) for each in whole])
    assert between(levels, levels) == pytest.approx(between(whole, whole), rel=0.1)
    assert between(kept * whole, levels) / between(levels, levels) == pytest.approx(kept, rel=0.1)


@pytest.mark.parametrize("size", [1, 64, 100])
def test_an_update_of_zeros_is_sent_as_zeros(size: int) -> None:
    cells = made(np.zeros(size, np.float32), 64)
    assert to_bytes(cells)[:4] == bytes(4)
    assert not sent(cells).any()


@pytest.mark.parametrize("num_cells", NUMBERS)
def test_as_many_bytes_are_sent_as_are_said_to_be(num_cells: int) -> None:
    cells = made(drawn("normal", 500, np.random.default_rng(0)), num_cells)
    assert len(to_bytes(cells)) == num_bytes(num_cells) == 4 + num_cells / 4
    assert sent(cells).size == num_cells
    assert (NUMBERS[0], NUMBERS[-1]) == (LEAST_CELLS, MOST_CELLS)


@given(st.binary(min_size=16, max_size=16), st.floats(0, 2.0**100, width=32))
def test_any_bytes_after_a_scale_are_cells_two_bits_each_from_the_lowest_up(
    packed: bytes, scale: float
) -> None:
    found = from_bytes(struct.pack("<f", scale) + packed, 64)
    digits = [packed[place // 4] >> 2 * (place % 4) & 3 for place in range(64)]
    assert found.tolist() == [(digit - 1.5) * scale for digit in digits]


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, -1e-30])
def test_a_scale_that_is_no_length_is_refused(scale: float) -> None:
    with pytest.raises(DecodingError, match=r"a sketch with a scale of .*, expected 0 or more"):
        from_bytes(struct.pack("<f", scale) + bytes(16), 64)


@given(st.binary(max_size=60).filter(lambda data: len(data) != 20))
def test_a_sketch_of_another_length_is_refused(data: bytes) -> None:
    with pytest.raises(DecodingError, match=f"a sketch of {len(data)} bytes, expected 20"):
        from_bytes(data, 64)
