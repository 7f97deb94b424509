"""Lossless coding of symbols: the layout is the schema, SPEC-coding.md the format.

A body has exactly the fields of its layout, in order. Every field is encoded in its shortest form.
Decoding is bounded by the layout and total: it returns symbols that match the layout, or raises
DecodingError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast, get_args

import numpy as np
import numpy.typing as npt

from fedpress_compression.coding import ranged
from fedpress_compression.coding.alphabets import (
    Grouped,
    find_alphabet,
    plan_alphabet,
    read_alphabet,
)
from fedpress_compression.coding.bits import UVARINT_BOUND, Ints, Octets, Reader
from fedpress_compression.coding.fields import (
    Alphabet,
    Coder,
    Contexts,
    Field,
    Grid,
    Integers,
    Layout,
    Positions,
    Reals,
    Symbols,
    check_symbols,
)
from fedpress_compression.coding.integers import plan_integers, read_integers
from fedpress_compression.coding.positions import plan_positions, read_positions
from fedpress_compression.coding.sequences import Candidate
from fedpress_compression.errors import ConfigurationError, DecodingError

Found = tuple[npt.NDArray[np.generic] | Grouped, ...]
"""The symbols of a body, some of which may not be read yet."""

_SPARE = 8
"""Bytes beyond the stored form up to which the range coder tries a field before the static
forms."""
_PIECE = 2**20


def encode(symbols: Symbols, layout: Layout, contexts: Contexts = ()) -> bytes:
    """Encode `symbols` under `layout`; the same symbols give the same bytes on every machine.

    `contexts` may be left out if no grid of the layout has any. Raises InvalidUpdate unless the
    symbols match the layout.
    """
    return b"".join(encode_fields(symbols, layout, contexts))


def encode_fields(symbols: Symbols, layout: Layout, contexts: Contexts = ()) -> Iterator[bytes]:
    """Yield the parts of `encode` as fields are encoded; plain numbers in pieces of a megabyte."""
    places = _Places(layout, contexts)
    check_symbols(symbols, layout)
    for index, (field, array) in enumerate(zip(layout, symbols, strict=True)):
        if isinstance(field, Reals):
            yield from _pieces(array)
        else:
            yield _encode_field(field, array, places.of(index))
        places.passed(index, array)


def decode(data: bytes | memoryview, layout: Layout, contexts: Contexts = ()) -> Symbols:
    """Decode the bytes of `encode`.

    Raises DecodingError for bytes that it cannot have written. Memory is a small multiple of the
    layout's maximum; work is bounded by the bytes and the layout.
    """
    return cast(Symbols, _decode(data, layout, contexts, read_alphabet))


def find(data: bytes | memoryview, layout: Layout, contexts: Contexts = ()) -> Found:
    """Like `decode`, but leave long alphabets unread if they can be summed directly; reading them
    later may raise, too."""
    return _decode(data, layout, contexts, find_alphabet)


def _decode(
    data: bytes | memoryview,
    layout: Layout,
    contexts: Contexts,
    alphabet: Callable[[Reader, int, int], Octets | Grouped],
) -> Found:
    places = _Places(layout, contexts)
    reader = Reader(data)
    symbols: list[npt.NDArray[np.generic] | Grouped] = []
    for index, field in enumerate(layout):
        place = places.of(index)
        try:
            array = _decode_field(reader, field, place, alphabet)
        except DecodingError as exc:
            kind = type(field).__name__.lower()
            raise DecodingError(f"field {index} ({kind}): {exc.detail}") from exc
        if not isinstance(array, Grouped):
            places.passed(index, array)
        symbols.append(array)
    if reader.left:
        raise DecodingError(f"{reader.left // 8} bytes after the last field")
    return tuple(symbols)


def check_layout(layout: Layout) -> None:
    """Raise ConfigurationError for a layout beyond what the format can carry."""
    for index, field in enumerate(layout):
        match field:
            case Positions(size, at_most, coder, grid):
                if size > UVARINT_BOUND:
                    raise ConfigurationError(
                        f"field {index} of a layout cannot be coded: coordinates among {size:,} "
                        "values, at most 2**32",
                        hint="freeze the tensors that need no training, or choose a compressor "
                        "that sends no coordinates, such as quantize or sign",
                    )
                carried = 0 <= size <= UVARINT_BOUND and at_most >= 0
                carried = carried and _is_coded(coder, grid, size)
            case Alphabet(size, count, coder, grid):
                carried = 1 <= size <= 256 and (count is None or count >= 0)
                carried = carried and _is_coded(coder, grid, count)
            case Integers(bound, count, coder, grid):
                carried = 1 <= bound < 2**31 and (count is None or count >= 0)
                carried = carried and _is_coded(coder, grid, count)
            case Reals(count, width):
                carried = count >= 0 and width in (2, 4)
        if not carried:
            raise ConfigurationError(f"field {index} of a layout cannot be coded: {field}")


def _is_coded(coder: Coder, grid: Grid | None, size: int | None) -> bool:
    return coder in get_args(Coder) and (grid is None or grid.size == size)


@dataclass(frozen=True, slots=True)
class _Place:
    """The context of a field's form: `num` values at the coordinates `where` of `plane`, or at all
    of them; no plane if only static codes are allowed."""

    num: int
    where: Ints | None
    plane: ranged.Plane | None


class _Places:
    """Tracks the place of each field of a layout while the previous fields are processed."""

    def __init__(self, layout: Layout, contexts: Contexts) -> None:
        check_layout(layout)
        if len(contexts) not in (0, len(layout)):
            raise ConfigurationError(f"{len(contexts)} contexts for {len(layout)} fields")
        self._layout = layout
        self._contexts = contexts or (None,) * len(layout)
        self._where = np.zeros(0, np.int64)
        self._below: tuple[Grid | None, int, Octets | None] = (None, 0, None)

    def of(self, index: int) -> _Place:
        field, contexts = self._layout[index], self._contexts[index]
        match field:
            case Positions(size, _, coder, grid):
                return _Place(0, None, _plane(coder, grid, size, contexts))
            case Alphabet(_, None, coder) | Integers(_, None, coder):
                return _Place(self._where.size, self._where, _plane(coder, *self._below))
            case Alphabet(_, int(count), coder, grid) | Integers(_, int(count), coder, grid):
                return _Place(count, None, _plane(coder, grid, count, contexts))
        return _Place(0, None, None)

    def passed(self, index: int, array: npt.NDArray[np.generic]) -> None:
        """Record that the field at `index` is `array`."""
        field = self._layout[index]
        if isinstance(field, Positions):
            self._where = np.ascontiguousarray(array, np.int64)
            self._below = field.grid, field.size, self._contexts[index]


def _plane(
    coder: Coder, grid: Grid | None, size: int, contexts: Octets | None
) -> ranged.Plane | None:
    if coder == "huffman":
        return None
    matrices = np.array([[1, size]] if grid is None else grid.matrices, np.int64).reshape(-1, 2)
    if grid is None or grid.known is None:
        return ranged.Plane(matrices, np.zeros(0, np.uint8), coder == "lanes")
    if contexts is None or contexts.size != size:
        raise ConfigurationError(
            f"a field of {size} coordinates needs the contexts {grid.known}, but has "
            f"{'none' if contexts is None else contexts.size} of its contexts"
        )
    return ranged.Plane(matrices, contexts)


def _encode_field(
    field: Positions | Alphabet | Integers, array: npt.NDArray[np.generic], place: _Place
) -> bytes:
    match field:
        case Positions(size, _, coder):
            positions = array.astype(np.int64, copy=False)
            stored = positions.size * (size.bit_length() + 7) // 8
            return _shortest(
                coder if positions.size else "huffman",
                lambda: plan_positions(positions, size),
                lambda plane, most: ranged.plan_positions(positions, plane, most),
                (place.plane, stored),
            )
        case Alphabet(size, _, coder):
            symbols = array.astype(np.uint8, copy=False)
            return _shortest(
                coder if symbols.size and size > 1 else "huffman",
                lambda: plan_alphabet(symbols, size),
                lambda plane, most: ranged.plan_symbols(symbols, size, place.where, plane, most),
                (place.plane, symbols.size),
            )
        case Integers(bound, _, coder):
            values = array.astype(np.int64)
            return _shortest(
                coder if values.size else "huffman",
                lambda: plan_integers(values, bound),
                lambda plane, most: ranged.plan_integers(values, bound, place.where, plane, most),
                (place.plane, 4 * values.size),
            )


def _pieces(array: npt.NDArray[np.generic]) -> Iterator[bytes]:
    step = _PIECE // array.itemsize
    for start in range(0, array.size, step):
        yield array[start : start + step].tobytes()


def _shortest(
    coder: Coder,
    static: Callable[[], Candidate],
    under_range: Callable[[ranged.Plane, int], Candidate | None],
    where: tuple[ranged.Plane | None, int],
) -> bytes:
    """The shortest form that `coder` allows; on ties a static one."""
    plane, stored = where
    if plane is None or coder == "huffman":
        return static().write()
    if coder == "range":
        return (under_range(plane, stored + _SPARE) or static()).write()
    best = static()
    return (under_range(plane, best.size - 1) or best).write()


def _decode_field(
    reader: Reader,
    field: Field,
    place: _Place,
    alphabet: Callable[[Reader, int, int], Octets | Grouped],
) -> npt.NDArray[np.generic] | Grouped:
    plane, num, where = place.plane, place.num, place.where
    match field:
        case Positions(size, at_most):
            if plane is not None and reader.peek() & 3 == ranged.POSITIONS:
                return ranged.read_positions(reader, at_most, plane)
            return read_positions(reader, size, at_most)
        case Alphabet(size):
            if plane is not None and num and size > 1 and reader.peek() & 7 in ranged.ALPHABETS:
                return ranged.read_symbols(reader, size, num, where, plane)
            return alphabet(reader, size, num)
        case Integers(bound):
            if plane is not None and num and reader.peek() & 7 >= ranged.INTEGERS:
                values = ranged.read_integers(reader, bound, num, where, plane)
            else:
                values = read_integers(reader, bound, num)
            return values.astype(np.int32)
        case Reals(count, width):
            start = reader.skip(8 * count * width) >> 3
            reals = np.frombuffer(reader.octets, field.dtype, count, start).copy()
            if not np.isfinite(reals).all():
                raise DecodingError("NaN or infinity")
            return reals
