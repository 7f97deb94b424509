"""A decoded update: what one upload adds to the model, kept as sparse as it came."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedpress_compression import kernels
from fedpress_compression.coding.alphabets import Grouped
from fedpress_compression.errors import InvalidUpdate
from fedpress_compression.tensors import Vector

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Piece:
    """float32 `values` at a range of coordinates, or at rising int64 indices of the same length."""

    where: slice | Indices
    values: Vector

    def indices(self) -> Indices:
        """The coordinates one by one."""
        if isinstance(self.where, slice):
            return np.arange(self.where.start, self.where.stop, dtype=np.int64)
        return self.where


@dataclass(frozen=True, slots=True)
class Update:
    """A vector of `size` coordinates; no coordinate is in two pieces, those in none are zero."""

    size: int
    pieces: tuple[Piece, ...]

    @classmethod
    def from_dense(cls, values: Vector) -> Update:
        return cls(values.size, (Piece(slice(0, values.size), values),))

    def dense(self) -> Vector:
        """The whole vector [size]; O(size) memory."""
        flat = np.zeros(self.size, np.float32)
        for piece in self.pieces:
            flat[piece.where] = piece.values
        return flat

    def add_to(self, flat: Vector, sign: float = 1.0) -> None:
        """flat += sign * self, in place."""
        for piece in self.pieces:
            if isinstance(piece.where, slice):
                flat[piece.where] += np.float32(sign) * piece.values
            else:
                kernels.add_at(flat, piece.where, piece.values, sign)

    def check(self, max_abs: float) -> None:
        """Raise InvalidUpdate on NaN, infinity or any |value| > `max_abs`."""
        for piece in self.pieces:
            largest = kernels.peak(piece.values)
            if not largest < np.inf:
                raise InvalidUpdate("the update holds NaN or infinity")
            if largest > max_abs:
                raise InvalidUpdate(
                    f"the update holds {largest:g}, larger than the plan's {max_abs:g}",
                    hint="lower the learning rate, or raise the task's max_abs",
                )

    def placed(self, slices: tuple[slice, ...], size: int) -> Update:
        """This update, whose coordinates are those of `slices` end to end, in a larger vector."""
        return Update(size, tuple(p for piece in self.pieces for p in _placed(piece, slices)))

    @property
    def norm(self) -> float:
        """The L2 norm, summed in float64."""
        return float(self.norms((self.size,))[0])

    def norms(self, sizes: Sequence[int]) -> npt.NDArray[np.float64]:
        """The L2 norms [n] of n parts of such `sizes`, one behind the other, summed in float64."""
        ends = np.cumsum(np.asarray(sizes, np.int64))
        total = np.zeros(ends.size)
        for piece in self.pieces:
            squares = np.square(piece.values, dtype=np.float64)
            start = 0
            for part, stop in _stops(piece.where, ends):
                total[part] += squares[start:stop].sum()
                start = stop
        return np.sqrt(total)

    @property
    def num_values(self) -> int:
        return sum(piece.values.size for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Tabled:
    """An update whose values are few: symbols, and the float32 that each one stands for.

    `tables` [tensors, symbols] are those of the tensors that end before `ends` [tensors], for
    symbols of all coordinates, yet unread; or, for symbols in an array, there is one table, and
    their coordinates rise in `where`.
    """

    size: int
    symbols: npt.NDArray[np.uint8] | Grouped
    where: Indices
    ends: Indices
    tables: npt.NDArray[np.float32]


def _stops(where: slice | Indices, ends: Indices) -> Iterator[tuple[int, int]]:
    """By part with values of a piece: its number, and where these end among the piece's values."""
    if isinstance(where, slice):
        first, last = where.start, where.stop - 1
    elif where.size:
        first, last = int(where[0]), int(where[-1])
    else:
        return
    begin, end = np.searchsorted(ends, [first, last], side="right").tolist()
    if isinstance(where, slice):
        stops = np.minimum(ends[begin : end + 1], where.stop) - where.start
    else:
        stops = np.searchsorted(where, ends[begin : end + 1])
    yield from enumerate(stops.tolist(), begin)


def _placed(piece: Piece, slices: tuple[slice, ...]) -> Iterator[Piece]:
    lengths = np.array([s.stop - s.start for s in slices], np.int64)
    begins = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    if not isinstance(piece.where, slice):
        starts = np.array([s.start for s in slices], np.int64)
        owner = np.searchsorted(begins, piece.where, side="right") - 1
        yield Piece(piece.where - begins[owner] + starts[owner], piece.values)
        return
    for target, begin, end in zip(slices, begins[:-1], begins[1:], strict=True):
        first, last = max(piece.where.start, int(begin)), min(piece.where.stop, int(end))
        if first < last:
            shift = target.start - int(begin)
            values = piece.values[first - piece.where.start : last - piece.where.start]
            yield Piece(slice(first + shift, last + shift), values)
