"""The updates of one round side by side: on the disk whole, in memory a range of coordinates at a
time."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from fedpress_compression.tensors import Vector
from fedpress_strategies.strategy import Delta, FoldSpace

Block = npt.NDArray[np.float32]
"""[rows, columns]"""

_COLUMNS = 1024
"""Ranges begin at multiples of it. Sums over coordinates are taken range by range of this width
whatever the memory, so that it leaves no trace in their bits."""

_MOST_COLUMNS = 16 * _COLUMNS
"""Beyond this more memory makes nothing faster."""

_BYTES = 32
"""What a value of a block takes at most, with all copies and float64 intermediates; also what a
pair of rows takes where rows are compared pair by pair."""


def memory_for(rows: int, *, pairwise: bool = False) -> int:
    """The least bytes of memory in which so many rows can be worked on."""
    return _BYTES * rows * max(_COLUMNS, rows if pairwise else 0)


class Rows:
    """float32 rows of `width` values each, in the order in which they were added.

    They lie in a file of `space.folder` without a name (where the system cannot make one, it loses
    its name, which ends in .tmp, at once): however this process ends, nothing of it stays. The file
    takes 4 bytes a value. Memory: `space.memory`, or `memory_for` if that is more, and what is
    returned.
    """

    def __init__(self, width: int, space: FoldSpace) -> None:
        self.width = width
        self.number = 0
        self._memory = space.memory
        self._file = tempfile.TemporaryFile(  # noqa: SIM115 - closed with this object
            dir=space.folder, suffix=".tmp", buffering=0
        )
        weakref.finalize(self, self._file.close)

    def add(self, values: Vector) -> None:
        """One more row [width]; raises OSError, and then it was not added."""
        self._file.seek(4 * self.width * self.number)
        left = np.ascontiguousarray(values).view(np.uint8).data
        while left:
            left = left[self._file.write(left) :]
        self.number += 1

    def blocks(self, chosen: Sequence[int] | None = None) -> Iterator[tuple[slice, Block]]:
        """Range by range of the coordinates: where it is, and all rows there, or the `chosen`."""
        rows = range(self.number) if chosen is None else chosen
        fits = self._memory // (_BYTES * max(1, len(rows))) // _COLUMNS * _COLUMNS
        step = max(_COLUMNS, min(_MOST_COLUMNS, fits))
        for start in range(0, self.width, step):
            where = slice(start, min(start + step, self.width))
            block = np.empty((len(rows), where.stop - start), np.float32)
            for values, row in zip(block, rows, strict=True):
                self._file.seek(4 * (self.width * row + start))
                self._file.readinto(values.view(np.uint8).data)
            yield where, block

    def ordered(self, chosen: Sequence[int] | None = None) -> Iterator[tuple[slice, Block]]:
        """As `blocks`, the values of each coordinate ascending."""
        for where, block in self.blocks(chosen):
            columns = np.ascontiguousarray(block.T)
            columns.sort(axis=1)
            yield where, np.ascontiguousarray(columns.T)

    def combination(self, coefficients: npt.NDArray[np.float64]) -> Delta:
        """The sum of the rows, each times its coefficient [number]; rows of 0 are not read."""
        chosen = np.flatnonzero(coefficients).tolist()
        total = np.zeros(self.width)
        for where, block in self.blocks(chosen):
            for row, values in zip(chosen, block, strict=True):
                total[where] += coefficients[row] * values.astype(np.float64)
        return total

    def products(self) -> npt.NDArray[np.float64]:
        """The inner product of every row with every other [number, number]."""
        found = np.zeros((self.number, self.number))
        for _, block in self.blocks():
            for start in range(0, block.shape[1], _COLUMNS):
                wide = block[:, start : start + _COLUMNS].astype(np.float64)
                found += wide @ wide.T
        return found

    def squared_distances(self) -> npt.NDArray[np.float64]:
        """From every row to every other [number, number]: symmetric, zero on the diagonal.

        Off by some 1e-15 of the two rows' squared norms, which are subtracted.
        """
        found = self.products()
        squares = found.diagonal().copy()
        found *= -2
        found += squares
        found += squares[:, np.newaxis]
        upper = np.triu(np.maximum(found, 0, out=found), 1)
        upper += upper.T
        return upper

    def norms(self) -> npt.NDArray[np.float64]:
        """The L2 norm of every row [number]."""
        squares = np.zeros(self.number)
        for _, block in self.blocks():
            for start in range(0, block.shape[1], _COLUMNS):
                wide = block[:, start : start + _COLUMNS].astype(np.float64)
                squares += np.square(wide).sum(axis=1)
        return np.sqrt(squares)
