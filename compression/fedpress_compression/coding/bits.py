"""Bits in bytes, least significant first: bit i of a string is bit i % 8 of its byte i // 8."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from fedpress_compression import kernels
from fedpress_compression.errors import DecodingError
from fedpress_compression.kernels.buffer_pool import pooled
from fedpress_compression.kernels.wire import GUARD, Ints, Octets

__all__ = ["UVARINT_BOUND", "Ints", "Octets", "Reader", "bit_string", "pack", "uvarint"]

UVARINT_BOUND = 2**32


class Reader:
    """A cursor over the bits of a body. Reading past the end raises DecodingError.

    `octets` is the body as uint8 with 8 zero bytes after it, so that a 64-bit window may start at
    any of its bytes; `at` and `end` count bits.
    """

    __slots__ = ("_data", "at", "end", "octets")

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = data
        self.octets: Octets = pooled(len(data) + GUARD, np.uint8)
        self.octets[: len(data)] = np.frombuffer(data, np.uint8)
        self.octets[len(data) :] = 0
        self.at = 0
        self.end = 8 * len(data)

    @property
    def left(self) -> int:
        """Bits not yet read."""
        return self.end - self.at

    def skip(self, num_bits: int) -> int:
        """Skip `num_bits` and return their offset."""
        if num_bits > self.left:
            raise DecodingError(f"{self.left} bits left, expected {num_bits} more")
        start = self.at
        self.at += num_bits
        return start

    def read(self, num_bits: int) -> int:
        """The next `num_bits` (at most 32) as a number."""
        start = self.skip(num_bits)
        window = int.from_bytes(self._data[start >> 3 : (start >> 3) + 8], "little")
        return window >> (start & 7) & ((1 << num_bits) - 1)

    def peek(self) -> int:
        """The next byte without consuming it; 0 at the end."""
        return int(self.octets[self.at >> 3])

    def uvarint(self) -> int:
        """Unsigned LEB128 below 2**32, in its shortest form."""
        value = 0
        for shift in range(0, 35, 7):
            byte = self.read(8)
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if (shift and not byte) or value >= UVARINT_BOUND:
                    break
                return value
        raise DecodingError("a number that is not the shortest LEB128 form of 32 bits")

    def align(self) -> None:
        """Advance to the next byte; the skipped bits must be zero."""
        if self.read(-self.at % 8):
            raise DecodingError(f"padding before byte {self.at >> 3} is not zero")

    def fields(self, num: int, width: int) -> Ints:
        """The next `num` numbers of `width` bits each, 0 <= width <= 32."""
        return kernels.read_fields(self.octets, self.skip(num * width), num, width)


def uvarint(value: int) -> bytes:
    """Unsigned LEB128 of 0 <= value < 2**32."""
    groups = []
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*groups, value))


def pack(values: npt.ArrayLike, widths: npt.ArrayLike) -> bytes:
    """Concatenate one or more `values` with the given widths in bits, at most 63."""
    return kernels.pack(np.asarray(values, np.uint64), np.asarray(widths, np.int64))


def bit_string(fields: Iterable[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Pack (value, width) pairs."""
    pairs = list(fields)
    return [value for value, _ in pairs], [width for _, width in pairs]
