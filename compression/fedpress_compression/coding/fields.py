"""What a coded update is made of: a layout that the plan implies, and the symbols that fill it.

The plan is the schema. A compressor's `layout(spec)` names its fields in order; both ends derive it
from the plan, so an upload carries no shapes, no dtypes and no names, and the decoder knows the
largest thing that it may allocate before it reads a byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedpress_compression.errors import InvalidUpdate

Coder = Literal["huffman", "range", "auto"]
"""Which codes a field may have: static ones, those of the range coder, or whichever are shorter."""
Known = Literal["previous", "drift", "activity"]
"""The vectors whose ranks may be contexts, see `compression.compressor.Public`."""


@dataclass(frozen=True, slots=True)
class Grid:
    """What both ends know of the coordinates that a field runs over, for the range coder.

    They are the values of the tensors `names`, end to end, each a matrix of so many rows and
    columns. `known` is the vector whose ranks are the coordinates' contexts, see
    `compression.contexts`; None for no contexts.
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

    `count` says how many; None stands for one per coordinate of the last `Positions` before, on
    whose grid they lie. A `grid` of its own is for symbols that fill it.
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
    """`count` finite numbers, sent as they are: `width` 4 is float32, 2 is float16."""

    count: int
    width: int = 4

    @property
    def dtype(self) -> np.dtype[np.floating]:
        """Little-endian, on every machine."""
        return np.dtype(f"<f{self.width}")


Field = Positions | Alphabet | Integers | Reals
Layout = tuple[Field, ...]
Symbols = tuple[npt.NDArray[np.generic], ...]
"""One array for each field of the layout, in its order, with the dtype that the field names."""

Contexts = Sequence[npt.NDArray[np.uint8] | None]
"""One entry for each field of a layout: for a grid with a `known`, what is known of each of its
coordinates, below 64 [grid.size]; else None."""


def check_symbols(symbols: Sequence[npt.NDArray[np.generic]], layout: Layout) -> None:
    """Raise InvalidUpdate unless `symbols` fill `layout`; O(symbols)."""
    if len(symbols) != len(layout):
        raise InvalidUpdate(f"{len(symbols)} fields where the layout has {len(layout)}")
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
                    _expect(rising, f"{what}: coordinates do not rise")
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
                _expect(array.dtype == field.dtype, f"{what}: {array.dtype}, not {field.dtype}")
                _expect(array.size == count, f"{what}: {array.size} numbers, expected {count}")
                _expect(bool(np.isfinite(array).all()), f"{what}: NaN or infinity")


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise InvalidUpdate(otherwise)
