"""The body of an upload: a short header, then the coded fields of the plan's layout.

offset  size  field
0       1     wire version (1)
1       1     index of the profile among the plan's
2       1-5   num_examples, unsigned LEB128
...     4 r   the r numbers that the plan has reported, float32
...     n     the sketch of the update, where the plan asks for one; see `compression.sketches`
...           coded fields, to the last byte
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from fedpress_compression import coding, sketches
from fedpress_compression.coding.fields import (
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
"""Wire versions that this release supports, newest first."""

MAX_EXAMPLES = 2**32 - 1
MAX_REPORTS = 16
REPORT_BYTES = 4
WITHIN_CLIP = "within-clip"
"""1 where the update is within the clip of adaptive privacy terms without being scaled, else 0."""
REPORT_BOUNDS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"steps": (1.0, 2.0**24), "loss": (0.0, 2.0**24), WITHIN_CLIP: (0.0, 1.0)}
)
"""Bounds of reported numbers: the optimizer's steps, the mean loss of the round's model over
the device's examples, `WITHIN_CLIP`. A number with another name lies in [-2**24, 2**24]."""

_HEADER_AT_MOST = 7
_MODE_AT_MOST = 8


@dataclass(frozen=True, slots=True)
class Upload:
    """The content of an upload: the number of examples, the compressed update, the numbers that the
    plan asks clients to report, in the plan's order, and the sketch of the update before it was
    compressed, as `sketches.to_bytes` gives it; empty where the plan asks for none."""

    profile: int
    num_examples: int
    symbols: Symbols
    report: tuple[float, ...] = ()
    sketch: bytes = b""

    def to_bytes(self, layout: Layout, contexts: Contexts = ()) -> bytes:
        """Encode the body; raises InvalidUpdate if the symbols do not match `layout`.

        `contexts` are those of `layout`, see `compression.contexts`.
        """
        return b"".join(self.sections(layout, contexts))

    def sections(self, layout: Layout, contexts: Contexts = ()) -> Iterator[bytes]:
        """Yield the sections of the body as they are encoded: the header, then the fields."""
        if not 1 <= self.num_examples <= MAX_EXAMPLES:
            raise InvalidUpdate(f"num_examples of {self.num_examples} outside [1, {MAX_EXAMPLES}]")
        head = bytes((WIRE_VERSION, self.profile)) + _uvarint(self.num_examples)
        yield head + struct.pack(f"<{len(self.report)}f", *self.report) + self.sketch
        yield from coding.encode_fields(self.symbols, layout, contexts)

    @classmethod
    def from_bytes(
        cls,
        data: bytes,
        layouts: tuple[Layout, ...],
        profile: int,
        contexts: Contexts = (),
        report: tuple[str, ...] = (),
        sketch: int = 0,
    ) -> Upload:
        """Parse a body under the plan's `layouts`, one for each profile.

        `profile` is the assigned one, `contexts` those of its layout, `report` and `sketch` the
        plan's.
        Raises WireVersionMismatch or DecodingError; the work and the memory are bounded by the
        layout, whatever the bytes.
        """
        num_examples, reported, start, stop = _read_head(data, profile, report, sketch)
        symbols = coding.decode(memoryview(data)[stop:], layouts[profile], contexts)
        return cls(profile, num_examples, symbols, reported, data[start:stop])

    @staticmethod
    def find(
        data: bytes,
        layouts: tuple[Layout, ...],
        profile: int,
        contexts: Contexts = (),
        report: tuple[str, ...] = (),
        sketch: int = 0,
    ) -> tuple[int, tuple[float, ...], coding.Found]:
        """Like `from_bytes`, but locate the coded symbols without decoding them: the number of
        examples, the report, and an argument for `decode_add`."""
        num_examples, reported, _, stop = _read_head(data, profile, report, sketch)
        symbols = coding.find(memoryview(data)[stop:], layouts[profile], contexts)
        return num_examples, reported, symbols


def check_report(values: tuple[float, ...], names: tuple[str, ...]) -> None:
    """Raise InvalidUpdate if a value (one for each of `names`) is out of bounds or not finite."""
    for name, value in zip(names, values, strict=True):
        least, most = REPORT_BOUNDS.get(name, (-(2.0**24), 2.0**24))
        if not least <= value <= most:  # NaN among them
            raise InvalidUpdate(f"{name} of {value:g} outside [{least:g}, {most:g}]")


def max_body_bytes(layout: Layout) -> int:
    """An upper bound on a valid body: every field has a stored mode no larger than this."""
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


def _read_head(
    data: bytes, profile: int, report: tuple[str, ...], sketch: int
) -> tuple[int, tuple[float, ...], int, int]:
    """Return the number of examples, the report, and the offsets of the sketch, which was checked,
    and of the fields."""
    if len(data) < 3:
        raise DecodingError(f"{len(data)} bytes; an upload has at least 3")
    if data[0] != WIRE_VERSION:
        raise WireVersionMismatch(f"wire version {data[0]}, expected {WIRE_VERSION}")
    if data[1] != profile:
        raise DecodingError(f"profile {data[1]}, but {profile} was assigned")
    num_examples, start = _read_uvarint(data, 2)
    if not num_examples:
        raise DecodingError("num_examples must be at least 1, not 0")
    stop = start + REPORT_BYTES * len(report)
    if len(data) < stop:
        raise DecodingError(f"the body ends within the {len(report)} reported numbers")
    reported = struct.unpack(f"<{len(report)}f", data[start:stop])
    try:
        check_report(reported, report)
    except InvalidUpdate as exc:
        raise DecodingError(exc.detail) from exc
    if not sketch:
        return num_examples, reported, stop, stop
    fields = stop + sketches.num_bytes(sketch)
    if len(data) < fields:
        raise DecodingError(f"the body ends within the sketch of {sketch} cells")
    sketches.from_bytes(data[stop:fields], sketch)
    return num_examples, reported, stop, fields


def _uvarint(value: int) -> bytes:
    groups = []
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*groups, value))


def _read_uvarint(data: bytes, start: int) -> tuple[int, int]:
    """The value at `start` and its end; DecodingError beyond 32 bits or for a longer form."""
    value = 0
    for index, byte in enumerate(data[start : start + 5]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            if (index and not byte) or value > MAX_EXAMPLES:
                break
            return value, start + index + 1
    raise DecodingError("num_examples is not the shortest LEB128 form of a 32-bit number")
