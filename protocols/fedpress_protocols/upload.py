"""The body of an upload: three small numbers, then the coded fields that the plan lays out.

offset  size  field
0       1     wire version (1)
1       1     index of the profile among the plan's
2       1-5   num_examples, unsigned LEB128
...           coded fields, to the last byte
"""

from __future__ import annotations

from dataclasses import dataclass

from fedpress_protocols import coding
from fedpress_protocols.coding.fields import (
    Alphabet,
    Contexts,
    Integers,
    Layout,
    Positions,
    Reals,
    Symbols,
)
from fedpress_protocols.errors import DecodingError, InvalidUpdate, WireVersionMismatch

WIRE_VERSION = 1
WIRE_VERSIONS = (1,)
"""The wire versions this release speaks, the newest first."""

MAX_EXAMPLES = 2**32 - 1
_HEADER_AT_MOST = 7
_MODE_AT_MOST = 8


@dataclass(frozen=True, slots=True)
class Upload:
    """What one client sends: how many examples it learnt from, and its compressed update."""

    profile: int
    num_examples: int
    symbols: Symbols

    def to_bytes(self, layout: Layout, contexts: Contexts = ()) -> bytes:
        """The body; raises InvalidUpdate if the symbols do not fill `layout`.

        `contexts` are those of `layout`, see `compression.contexts`.
        """
        if not 1 <= self.num_examples <= MAX_EXAMPLES:
            raise InvalidUpdate(f"num_examples of {self.num_examples} outside [1, {MAX_EXAMPLES}]")
        head = bytes((WIRE_VERSION, self.profile))
        return head + _uvarint(self.num_examples) + coding.encode(self.symbols, layout, contexts)

    @classmethod
    def from_bytes(
        cls, data: bytes, layouts: tuple[Layout, ...], profile: int, contexts: Contexts = ()
    ) -> Upload:
        """Parse a body under the plan's `layouts`, one for each profile.

        `profile` is the one assigned, `contexts` are those of its layout. Raises
        WireVersionMismatch or DecodingError; the work and the memory are bounded by the layout,
        whatever the bytes.
        """
        if len(data) < 3:
            raise DecodingError(f"{len(data)} bytes where an upload has at least 3")
        if data[0] != WIRE_VERSION:
            raise WireVersionMismatch(f"wire version {data[0]} where {WIRE_VERSION} is due")
        if data[1] != profile:
            raise DecodingError(f"profile {data[1]} where {profile} was assigned")
        num_examples, start = _read_uvarint(data, 2)
        if not num_examples:
            raise DecodingError("num_examples of 0 where at least 1 is due")
        symbols = coding.decode(data[start:], layouts[profile], contexts)
        return cls(profile, num_examples, symbols)


def max_body_bytes(layout: Layout) -> int:
    """An upper bound on an honest body: every field has a stored mode no larger than this."""
    total, positions = _HEADER_AT_MOST, 0
    for field in layout:
        total += _MODE_AT_MOST
        match field:
            case Positions(size, at_most):
                positions = at_most
                total += -(-at_most * max(1, (size - 1).bit_length()) // 8)
            case Alphabet(_, count):
                total += positions if count is None else count
            case Integers(_, count):
                total += 4 * (positions if count is None else count)
            case Reals(count, width):
                total += count * width
    return total


def _uvarint(value: int) -> bytes:
    groups = []
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*groups, value))


def _read_uvarint(data: bytes, start: int) -> tuple[int, int]:
    """The value at `start` and where it ends; DecodingError past 32 bits or the shortest form."""
    value = 0
    for index, byte in enumerate(data[start : start + 5]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            if (index and not byte) or value > MAX_EXAMPLES:
                break
            return value, start + index + 1
    raise DecodingError("num_examples is not the shortest LEB128 form of a 32-bit number")
