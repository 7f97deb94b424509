"""Data frames of R's .rda files: columns of numbers, and factors as their codes from 0 on.

R's own XDR serialisation, versions 2 and 3, as far as data frames of packages such as mlbench need
it (R Internals, Section 1.8). Installed packages hold theirs in a database beside an index, which
`installed_frame` and `installed_strings` read. For files that one trusts.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.float64]
_OPENERS = {b"\x1f\x8b": gzip.decompress, b"BZ": bz2.decompress, b"\xfd7": lzma.decompress}
_NULL, _SYMBOL, _PAIRS, _CHARACTERS, _REFERENCE = 254, 1, 2, 9, 255
_LOGICAL, _INTEGER, _REAL, _STRINGS, _LIST = 10, 13, 14, 16, 19
_HAS_ATTRIBUTES, _HAS_TAG, _IS_UTF8 = 512, 1024, 1 << 15


def frame(path: Path) -> dict[str, Column]:
    """The columns of the one data frame in the file, by name."""
    raw = path.read_bytes()
    data = _OPENERS[raw[:2]](raw)
    if data[:4] not in (b"RDX2", b"RDX3"):
        raise ValueError(f"{path} begins with {data[:4]!r}, where RDX2 or RDX3 is expected")
    (saved,) = _unserialized(data[5:]).values()
    return _columns(saved)


def installed_frame(folder: Path, name: str) -> dict[str, Column]:
    """The columns of a data frame of an installed package, without those of strings; `folder` has
    its Rdata.rdb and Rdata.rdx."""
    return _columns(_installed(folder, name))


def installed_strings(folder: Path, name: str, column: str | None = None) -> list[str]:
    """The strings of a character vector of an installed package, or of a data frame's column, see
    `installed_frame`."""
    values, attributes = _installed(folder, name)
    if column is not None:
        values, _ = values[attributes["names"][0].index(column)]
    strings: list[str] = values
    return strings


def _installed(folder: Path, name: str) -> Any:
    index, _ = _unserialized(gzip.decompress((folder / "Rdata.rdx").read_bytes()))
    places, attributes = index[0]
    names = attributes["names"][0]
    if name not in names:
        raise ValueError(f"{folder} has no {name!r}; it has {', '.join(names)}")
    start, length = places[names.index(name)][0]
    with (folder / "Rdata.rdb").open("rb") as file:
        file.seek(start)
        packed = file.read(length)
    return _unserialized(zlib.decompress(packed[4:]))


def _unserialized(data: bytes) -> Any:
    """The value after the mark of a serialisation, `X` and a line's end."""
    reader = _Reader(data[2:])
    version = reader.integer()
    reader.take(8)
    if version == 3:
        reader.take(reader.integer())
    return reader.item()


def _columns(saved: Any) -> dict[str, Column]:
    columns, attributes = saved
    named = zip(attributes["names"][0], columns, strict=True)
    return {name: _column(*column) for name, column in named if not isinstance(column[0], list)}


def _column(values: Any, attributes: dict[str, Any]) -> Column:
    column = np.asarray(values, np.float64)
    return column - 1 if "levels" in attributes else column


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0
        self._symbols: list[str] = []

    def take(self, count: int) -> bytes:
        self._at += count
        return self._data[self._at - count : self._at]

    def integer(self) -> int:
        return int(struct.unpack(">i", self.take(4))[0])

    def item(self) -> Any:
        """A value; of vectors with their attributes."""
        flags = self.integer()
        kind = flags & 255
        if kind == _NULL:
            return None
        if kind == _REFERENCE:
            return self._symbols[(flags >> 8) - 1]
        if kind == _SYMBOL:
            self._symbols.append(self.item())
            return self._symbols[-1]
        if kind == _PAIRS:
            return self._pairs(flags)
        count = self.integer()
        if kind == _CHARACTERS:
            encoding = "utf-8" if flags & _IS_UTF8 else "latin-1"
            return None if count < 0 else self.take(count).decode(encoding)
        values: Any
        if kind in (_LOGICAL, _INTEGER):
            values = np.frombuffer(self.take(4 * count), ">i4")
        elif kind == _REAL:
            values = np.frombuffer(self.take(8 * count), ">f8")
        elif kind in (_STRINGS, _LIST):
            values = [self.item() for _ in range(count)]
        else:
            raise ValueError(f"an R object of type {kind}, which no data frame here holds")
        return values, self._pairs(self.integer()) if flags & _HAS_ATTRIBUTES else {}

    def _pairs(self, flags: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while flags & 255 == _PAIRS:
            if flags & _HAS_ATTRIBUTES:
                self.item()
            tag = self.item() if flags & _HAS_TAG else ""
            found[tag] = self.item()
            flags = self.integer()
        return found
