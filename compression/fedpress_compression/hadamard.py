"""Random rotations in O(n log n): random signs and a Hadamard matrix, applied twice."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedpress_compression.randomness import PublicStream
from fedpress_compression.tensors import Vector

SHORTEST = 64
"""The shortest useful row: below it too few sums of signs are possible to be nearly normal."""


class Rotation:
    """x -> H D2 H D1 x in each row, D1 and D2 signs from `stream` for `size` coordinates each.

    One application is not enough: a single H D turns an update with one large value into values of
    nearly equal magnitude, and their quantization loses everything else. The mean over all signs is
    then off by half of that update, or a quarter of a heavy-tailed one; after the second H D by
    less than can be measured. The norm of a row of n grows by a factor of n, and again in `back`.
    """

    def __init__(self, stream: PublicStream, size: int) -> None:
        self._first, self._second = _signs(stream, size), _signs(stream, size)

    def forward(self, rows: Vector, where: slice) -> Vector:
        """`rows` [.., n], the coordinates `where`, rotated."""
        first, second = (signs[where].reshape(rows.shape) for signs in (self._first, self._second))
        return transform(transform(rows * first) * second)

    def back(self, rows: Vector, where: slice) -> Vector:
        """The transpose of `forward`; exact in its order of float32 operations."""
        first, second = (signs[where].reshape(rows.shape) for signs in (self._first, self._second))
        return transform(transform(rows) * second) * first


def transform(rows: Vector) -> Vector:
    """Each row [n, a power of two] times the Hadamard matrix H[i, j] = (-1)^popcount(i & j).

    The same bits everywhere: for h = 1, 2, 4 .. n / 2 in turn, every pair (i, i + h) with bit h of
    i clear becomes (a + b, a - b), in float32. H is its own inverse up to a factor of n.
    """
    for _ in range(rows.shape[1].bit_length() - 1):
        # The pair is the lowest bit of the index; sum and difference go to the two halves, so
        # that the next bit is lowest, and after all of them each is back in its place.
        even, odd = rows[:, 0::2], rows[:, 1::2]
        rows = np.concatenate([even + odd, even - odd], axis=1)
    return rows


def blocks(size: int, log2_block: int) -> Iterator[tuple[slice, int]]:
    """Split `size` coordinates, a multiple of 64, into rows of a power of two: offsets and lengths.

    All rows of 2**log2_block together; then one row for each bit of the rest, larger first.
    """
    length, start = 2**log2_block, 0
    if size >= length:
        start = size // length * length
        yield slice(0, start), length
    while start < size:
        row = 1 << (size - start).bit_length() - 1
        yield slice(start, start + row), row
        start += row


def padded(values: Vector, size: int) -> Vector:
    """`values` padded with zeros, float32 [size]."""
    whole = np.zeros(size, np.float32)
    whole[: values.size] = values
    return whole


def _signs(stream: PublicStream, size: int) -> Vector:
    """-1 where the stream's next bit is set, else 1; float32 [size]."""
    signs: Vector = np.float32(1) - np.float32(2) * stream.bits(size).astype(np.float32)
    return signs
