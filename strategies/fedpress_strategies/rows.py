"""The updates of one round as rows of a matrix: stored on disk, processed in ranges of
coordinates."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from fedpress_compression.tensors import Vector
from fedpress_strategies.strategy import AggregationSpace, Delta

Block = npt.NDArray[np.float32]
"""[rows, columns]"""

_COLUMNS = 1024
"""Alignment of ranges. Sums over coordinates always use ranges of this width, so that their bits do
not depend on the available memory."""

_MOST_COLUMNS = 16 * _COLUMNS
"""Bytes beyond which more memory does not increase speed."""

_BYTES = 32
"""Maximum bytes per value of a block, with copies and float64 intermediates; also per pair of rows
in pairwise rules."""


def memory_for(rows: int, *, pairwise: bool = False) -> int:
    """The least bytes of memory needed to process this number of rows."""
    return _BYTES * rows * max(_COLUMNS, rows if pairwise else 0)


class Rows:
    """float32 rows of `width` values each, in the order in which they were added.

    They are in an unnamed file in `space.folder` (if the system has none, a *.tmp file that is
    unlinked at once), which disappears however this process ends. The file takes 4 bytes per value.
    Memory: `space.memory`, or `memory_for` if that is more, plus the returned arrays.
    """

    def __init__(self, width: int, space: AggregationSpace) -> None:
        self.width = width
        self.number = 0
        self._memory = space.memory
        self._file = tempfile.TemporaryFile(  # noqa: SIM115 - closed with this object
            dir=space.folder, suffix=".tmp", buffering=0
        )
        weakref.finalize(self, self._file.close)

    def add(self, values: Vector) -> None:
        """Add a row [width]; raises OSError, and the row is not added."""
        self._file.seek(4 * self.width * self.number)
        rest = np.ascontiguousarray(values).view(np.uint8).data
        while rest:
            rest = rest[self._file.write(rest) :]
        self.number += 1

    def blocks(self, chosen: Sequence[int] | None = None) -> Iterator[tuple[slice, Block]]:
        """Iterate over ranges of coordinates with the values of all rows, or of the `chosen`."""
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
        """Like `blocks`, with the values of each coordinate sorted."""
        for where, block in self.blocks(chosen):
            columns = np.ascontiguousarray(block.T)
            columns.sort(axis=1)
            yield where, np.ascontiguousarray(columns.T)

    def combination(self, coefficients: npt.NDArray[np.float64]) -> Delta:
        """The linear combination of the rows with `coefficients` [number]; rows with 0 are not
        read."""
        chosen = np.flatnonzero(coefficients).tolist()
        total = np.zeros(self.width)
        for where, block in self.blocks(chosen):
            for row, values in zip(chosen, block, strict=True):
                total[where] += coefficients[row] * values.astype(np.float64)
        return total

    def products(self) -> npt.NDArray[np.float64]:
        """The inner product of every row with every other [number, number]."""
        gram = np.zeros((self.number, self.number))
        for _, block in self.blocks():
            for start in range(0, block.shape[1], _COLUMNS):
                wide = block[:, start : start + _COLUMNS].astype(np.float64)
                gram += wide @ wide.T
        return gram

    def squared_distances(self) -> npt.NDArray[np.float64]:
        """Squared distances between all rows [number, number]: symmetric, zero on the diagonal.

        Error about 1e-15 of the two rows' squared norms, which are subtracted.
        """
        distances = self.products()
        squares = distances.diagonal().copy()
        distances *= -2
        distances += squares
        distances += squares[:, np.newaxis]
        upper = np.triu(np.maximum(distances, 0, out=distances), 1)
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
