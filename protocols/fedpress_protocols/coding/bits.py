"""Bits in bytes, least significant first: bit i of a string is bit i % 8 of its byte i // 8."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedpress_protocols.errors import DecodingError

Ints = npt.NDArray[np.int64]
Octets = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]

UVARINT_BOUND = 2**32
_GUARD = 8
_ONE = np.uint64(1)
_SIX, _SIXTY_THREE = np.uint64(6), np.uint64(63)


class Reader:
    """A cursor over the bits of a body. Whatever would run past the end raises DecodingError.

    `octets` is the body as uint8 with 8 zero bytes after it, so that a 64-bit window may begin at
    any of its bytes; `at` and `end` count bits.
    """

    __slots__ = ("_data", "at", "end", "octets")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.octets = np.zeros(len(data) + _GUARD, np.uint8)
        self.octets[: len(data)] = np.frombuffer(data, np.uint8)
        self.at = 0
        self.end = 8 * len(data)

    @property
    def left(self) -> int:
        """Bits not yet read."""
        return self.end - self.at

    def skip(self, num_bits: int) -> int:
        """Step over `num_bits` and return where they began."""
        if num_bits > self.left:
            raise DecodingError(f"{self.left} bits left where {num_bits} more are due")
        start = self.at
        self.at += num_bits
        return start

    def read(self, num_bits: int) -> int:
        """The next `num_bits` (at most 32) as a number."""
        start = self.skip(num_bits)
        window = int.from_bytes(self._data[start >> 3 : (start >> 3) + 8], "little")
        return window >> (start & 7) & ((1 << num_bits) - 1)

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
        """Step to the next byte; the bits between must be zero."""
        if self.read(-self.at % 8):
            raise DecodingError(f"padding before byte {self.at >> 3} is not zero")

    def fields(self, num: int, width: int) -> Words:
        """The next `num` numbers of `width` bits each, 0 <= width <= 32."""
        start = self.skip(num * width)
        return gather(self.octets, start + width * np.arange(num, dtype=np.int64), width)


def uvarint(value: int) -> bytes:
    """Unsigned LEB128 of 0 <= value < 2**32."""
    groups = []
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*groups, value))


def gather(octets: Octets, starts: Ints, widths: Ints | int) -> Words:
    """Read `widths` bits, 57 at most, at each of the bit offsets `starts`.

    A window of 64 bits begins at the byte of each offset, so `octets` goes on for 8 bytes after it.
    """
    windows = np.ndarray((octets.size - 7,), "<u8", octets, 0, (1,))
    found: Words = windows[starts >> 3].astype(np.uint64, copy=False)
    found >>= (starts & 7).astype(np.uint64)
    found &= (_ONE << np.asarray(widths, np.uint64)) - _ONE
    return found


def pack(values: npt.ArrayLike, widths: npt.ArrayLike) -> bytes:
    """Concatenate one or more `values`, each in as many bits as its width says, 63 at most.

    Neighbours are first joined in pairs for as long as every pair fits into 63 bits, which leaves
    few items to place.
    """
    items = np.asarray(values, np.uint64)
    sizes = np.asarray(widths, np.uint64)
    while items.size > 1:
        even = items.size & ~1
        joined = sizes[0:even:2] + sizes[1:even:2]
        if int(joined.max()) > 63:
            break
        pairs = items[0:even:2] | (items[1:even:2] << sizes[0:even:2])
        items, sizes = np.append(pairs, items[even:]), np.append(joined, sizes[even:])
    ends = np.cumsum(sizes, dtype=np.uint64)
    starts = ends - sizes
    places = (starts >> _SIX).astype(np.int64)
    shifts = starts & _SIXTY_THREE
    first = np.flatnonzero(np.diff(places, prepend=-1))  # of the items that begin in each word
    last = np.append(first[1:], items.size) - 1
    words = np.zeros(int(places[-1]) + 2, "<u8")
    words[places[first]] = np.bitwise_or.reduceat(items << shifts, first)
    words[places[last] + 1] |= (items[last] >> _ONE) >> (_SIXTY_THREE - shifts[last])
    return words.tobytes()[: (int(ends[-1]) + 7) >> 3]


def bit_string(fields: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Split (value, width) pairs into what `pack` takes."""
    return [value for value, _ in fields], [width for _, width in fields]
