"""Updates of more values than 32 bits can count, on storage that holds almost nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedpress_compression import kernels
from fedpress_compression.coding import decode, encode
from fedpress_compression.coding.fields import Alphabet, Positions
from fedpress_compression.compressors.topk import TopK
from fedpress_compression.errors import ConfigurationError
from fedpress_compression.tensors import ModelSpec, TensorSpec

WIDE = 3_000_000_000


def coordinates(number: int, size: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    drawn = np.random.default_rng(0).integers(0, size, number)
    return np.unique(np.append(drawn, [0, 2**31 - 1, 2**31, size - 1]))


@pytest.mark.parametrize("size", [WIDE, 2**32])
def test_coordinates_beyond_31_bits_come_back(size: int) -> None:
    where = coordinates(2000, size)
    signs = (where % 2).astype(np.uint8)
    layout = (Positions(size, where.size), Alphabet(2))
    body = encode((where, signs), layout)
    back = decode(body, layout)
    assert np.array_equal(back[0], where)
    assert np.array_equal(back[1], signs)


def test_more_coordinates_than_can_be_coded_are_refused_in_words() -> None:
    spec = ModelSpec((TensorSpec("weight", (2**16, 2**16)), TensorSpec("bias", (1,))))
    layout = TopK(fraction=1e-6).layout(spec)
    with pytest.raises(ConfigurationError, match=r"among 4,294,967,297 values, at most 2\*\*32"):
        encode((np.array([2**32], np.int64),), layout[:1])


@pytest.mark.slow
def test_the_largest_of_3e9_values_are_found_and_added_where_they_are(tmp_path: Path) -> None:
    """Of 12 GB that are holes in a file but for some pages; the chunk is near the end."""
    file = tmp_path / "update"
    values = np.memmap(file, np.float32, "w+", shape=(WIDE,))
    where = coordinates(50, WIDE)
    values[where] = np.arange(1, where.size + 1)
    chunk = slice(WIDE - 2**24, WIDE)
    inside = where[where >= chunk.start]
    found, largest = kernels.largest(values[chunk], inside.size)
    assert np.array_equal(found + chunk.start, inside)
    assert np.array_equal(largest, values[inside])
    total = np.memmap(tmp_path / "total", np.int64, "w+", shape=(WIDE,))
    kernels.add_scaled_at(total, where, np.asarray(values[where]), 2.0**16, 3)
    expected = np.arange(1, where.size + 1) * 2**16 * 3
    assert np.array_equal(total[where], expected)
    assert not total[np.setdiff1d(where[:-1] + 1, where)].any()
    assert file.stat().st_blocks * 512 < 2**24
