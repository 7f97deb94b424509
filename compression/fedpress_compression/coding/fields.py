"""Layouts and their fields: the schema of a coded update.

The plan is the schema. A compressor's `layout(spec)` lists its fields in order; both ends derive it
from the plan, so an upload carries no shapes, dtypes or names, and the decoder knows its maximum
allocation before it reads a byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedpress_compression.errors import InvalidUpdate

Coder = Literal["huffman", "range", "auto", "lanes"]
"""The allowed codes of a field: static ones, the range coder's, or the shorter of both; or the
shorter of static ones and interleaved lanes."""
Known = Literal["previous", "drift", "activity"]
"""The vectors whose ranks can be contexts, see `compression.compressor.Public`."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The coordinates of a field as known to both ends, for the range coder.

    They are the values of the tensors `names`, concatenated, each a matrix of rows and columns.
    `known` is the vector whose ranks are the coordinates' contexts, see `compression.contexts`;
    None for no contexts.
    """

    names: tuple[str, ...]
    matrices: tuple[tuple[int, int], ...]
    known: Known | None = None

    @property
    def size(self) -> int:
        return sum(height * width for height, width in self.matrices)


@dataclass(frozen=True, slots=True)
class Positions:
    """Strictly increasing coordinates in [0, size), at most `at_most` of them; int64.

    Without a `grid` the coordinates are one row.
    """

    size: int
    at_most: int
    coder: Coder = "huffman"
    grid: Grid | None = None


@dataclass(frozen=True, slots=True)
class Alphabet:
    """Symbols in [0, size), 1 <= size <= 256; uint8.

    `count` is their number; None means one per coordinate of the last previous `Positions`, on its
    grid. A separate `grid` is for symbols at all of its coordinates.
    """

    size: int
    count: int | None = None
    coder: Coder = "huffman"
    grid: Grid | None = None


@dataclass(frozen=True, slots=True)
class Integers:
    """Whole numbers in [-bound, bound], 1 <= bound < 2**31; int32. Else like `Alphabet`."""

    bound: int
    count: int | None = None
    coder: Coder = "huffman"
    grid: Grid | None = None


@dataclass(frozen=True, slots=True)
class Reals:
    """`count` finite numbers, sent uncompressed: `width` 4 is float32, 2 is float16."""

    count: int
    width: int = 4

    @property
    def dtype(self) -> np.dtype[np.floating]:
        """Little-endian, on every machine."""
        return np.dtype(f"<f{self.width}")


Field = Positions | Alphabet | Integers | Reals
Layout = tuple[Field, ...]
Symbols = tuple[npt.NDArray[np.generic], ...]
"""One array for each field of the layout, in order, with the field's dtype."""

Contexts = Sequence[npt.NDArray[np.uint8] | None]
"""One entry for each field of a layout: for a grid with `known`, the context of each coordinate,
below 64 [grid.size]; otherwise None."""


def check_symbols(symbols: Sequence[npt.NDArray[np.generic]], layout: Layout) -> None:
    """Raise InvalidUpdate unless `symbols` match `layout`; O(symbols)."""
    if len(symbols) != len(layout):
        raise InvalidUpdate(f"{len(symbols)} fields, expected {len(layout)}")
    num_positions = 0
    for index, (field, array) in enumerate(zip(layout, symbols, strict=True)):
        what = f"field {index} ({type(field).__name__.lower()})"
        match field:
            case Positions(size, at_most):
                num_positions = array.size
                _expect(array.dtype == np.int64, f"{what}: {array.dtype}, expected int64")
                _expect(array.size <= at_most, f"{what}: {array.size} entries, at most {at_most}")
                if array.size:
                    rising = bool(np.greater(array[1:], array[:-1]).all())
                    _expect(rising, f"{what}: coordinates are not strictly increasing")
                    inside = bool(array[0] >= 0) and bool(array[-1] < size)
                    _expect(inside, f"{what}: a coordinate outside [0, {size})")
            case Alphabet(size, count):
                due = num_positions if count is None else count
                _expect(array.dtype == np.uint8, f"{what}: {array.dtype}, expected uint8")
                _expect(array.size == due, f"{what}: {array.size} symbols, expected {due}")
                inside = not array.size or int(array.max()) < size
                _expect(inside, f"{what}: a symbol outside [0, {size})")
            case Integers(bound, count):
                due = num_positions if count is None else count
                _expect(array.dtype == np.int32, f"{what}: {array.dtype}, expected int32")
                _expect(array.size == due, f"{what}: {array.size} integers, expected {due}")
                largest = int(np.abs(array.astype(np.int64)).max(initial=0))
                _expect(largest <= bound, f"{what}: an integer beyond {bound} in magnitude")
            case Reals(count):
                _expect(
                    array.dtype == field.dtype, f"{what}: {array.dtype}, expected {field.dtype}"
                )
                _expect(array.size == count, f"{what}: {array.size} numbers, expected {count}")
                _expect(bool(np.isfinite(array).all()), f"{what}: NaN or infinity")


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise InvalidUpdate(otherwise)
