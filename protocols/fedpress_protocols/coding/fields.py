"""What a coded update is made of: a layout that the plan implies, and the symbols that fill it.

The plan is the schema. A compressor's `layout(spec)` names its fields in order; both ends derive it
from the plan, so an upload carries no shapes, no dtypes and no names, and the decoder knows the
largest thing that it may allocate before it reads a byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedpress_protocols.errors import InvalidUpdate


@dataclass(frozen=True, slots=True)
class Positions:
    """Strictly increasing coordinates in [0, size), at most `at_most` of them; int64."""

    size: int
    at_most: int


@dataclass(frozen=True, slots=True)
class Alphabet:
    """Symbols in [0, size), 1 <= size <= 256; uint8.

    `count` says how many; None stands for one per coordinate of the last `Positions` before.
    """

    size: int
    count: int | None = None


@dataclass(frozen=True, slots=True)
class Reals:
    """`count` finite numbers, sent as they are: `width` 4 is float32, 2 is float16."""

    count: int
    width: int = 4

    @property
    def dtype(self) -> np.dtype[np.floating]:
        """Little-endian, on every machine."""
        return np.dtype(f"<f{self.width}")


Field = Positions | Alphabet | Reals
Layout = tuple[Field, ...]
Symbols = tuple[npt.NDArray[np.generic], ...]
"""One array for each field of the layout, in its order, with the dtype that the field names."""


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
                _expect(array.dtype == np.int64, f"{what}: {array.dtype} where int64 is due")
                _expect(array.size <= at_most, f"{what}: {array.size} entries, at most {at_most}")
                if array.size:
                    rising = bool(np.greater(array[1:], array[:-1]).all())
                    _expect(rising, f"{what}: coordinates do not rise")
                    inside = bool(array[0] >= 0) and bool(array[-1] < size)
                    _expect(inside, f"{what}: a coordinate outside [0, {size})")
            case Alphabet(size, count):
                due = num_positions if count is None else count
                _expect(array.dtype == np.uint8, f"{what}: {array.dtype} where uint8 is due")
                _expect(array.size == due, f"{what}: {array.size} symbols where {due} are due")
                inside = not array.size or int(array.max()) < size
                _expect(inside, f"{what}: a symbol outside [0, {size})")
            case Reals(count):
                _expect(array.dtype == field.dtype, f"{what}: {array.dtype}, not {field.dtype}")
                _expect(array.size == count, f"{what}: {array.size} numbers where {count} are due")
                _expect(bool(np.isfinite(array).all()), f"{what}: NaN or infinity")


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise InvalidUpdate(otherwise)
