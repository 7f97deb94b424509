"""Symbols to bytes and back, without loss. The layout is the schema; protocols/SPEC.md the format.

A body is its layout's fields in their order and nothing else. Every field takes the shortest of its
forms. Decoding is bounded by the layout and total: it yields symbols that fill the layout, or
raises DecodingError.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedpress_protocols.coding.alphabets import plan_alphabet, read_alphabet
from fedpress_protocols.coding.bits import UVARINT_BOUND, Reader
from fedpress_protocols.coding.fields import (
    Alphabet,
    Field,
    Layout,
    Positions,
    Reals,
    Symbols,
    check_symbols,
)
from fedpress_protocols.coding.positions import plan_positions, read_positions
from fedpress_protocols.errors import ConfigurationError, DecodingError


def encode(symbols: Symbols, layout: Layout) -> bytes:
    """Code `symbols` under `layout`; the same symbols give the same bytes, on every machine.

    Raises InvalidUpdate unless the symbols fill the layout.
    """
    check_layout(layout)
    check_symbols(symbols, layout)
    return b"".join(
        _encode_field(field, array) for field, array in zip(layout, symbols, strict=True)
    )


def decode(data: bytes, layout: Layout) -> Symbols:
    """The symbols that `encode` was given.

    Raises DecodingError for bytes that it cannot have written. Memory is a small multiple of what
    the layout admits; work is bounded by the bytes and by what the layout asks for in any case.
    """
    check_layout(layout)
    reader = Reader(data)
    symbols: list[npt.NDArray[np.generic]] = []
    num_positions = 0
    for index, field in enumerate(layout):
        try:
            array = _decode_field(reader, field, num_positions)
        except DecodingError as exc:
            kind = type(field).__name__.lower()
            raise DecodingError(f"field {index} ({kind}): {exc.detail}") from exc
        if isinstance(field, Positions):
            num_positions = array.size
        symbols.append(array)
    if reader.left:
        raise DecodingError(f"{reader.left // 8} bytes after the last field")
    return tuple(symbols)


def check_layout(layout: Layout) -> None:
    """Raise ConfigurationError for a layout beyond what the format can carry."""
    for index, field in enumerate(layout):
        match field:
            case Positions(size, at_most):
                carried = 0 <= size <= UVARINT_BOUND and at_most >= 0
            case Alphabet(size, count):
                carried = 1 <= size <= 256 and (count is None or count >= 0)
            case Reals(count, width):
                carried = count >= 0 and width in (2, 4)
        if not carried:
            raise ConfigurationError(f"field {index} of a layout cannot be coded: {field}")


def _encode_field(field: Field, array: npt.NDArray[np.generic]) -> bytes:
    match field:
        case Positions(size):
            return plan_positions(array.astype(np.int64, copy=False), size).write()
        case Alphabet(size):
            return plan_alphabet(array.astype(np.uint8, copy=False), size).write()
        case Reals():
            return array.tobytes()


def _decode_field(reader: Reader, field: Field, num_positions: int) -> npt.NDArray[np.generic]:
    match field:
        case Positions(size, at_most):
            return read_positions(reader, size, at_most)
        case Alphabet(size, count):
            return read_alphabet(reader, size, num_positions if count is None else count)
        case Reals(count, width):
            start = reader.skip(8 * count * width) >> 3
            reals = np.frombuffer(reader.octets, field.dtype, count, start).copy()
            if not np.isfinite(reals).all():
                raise DecodingError("NaN or infinity")
            return reals
