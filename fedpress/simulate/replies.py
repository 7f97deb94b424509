"""The record of a run: every reply as it came, so that a run that was stopped goes on from there.

An app is run again from its beginning, and asks the same of the same clients; what was answered
before is answered from the record, and the strategy comes to the very state that it was in,
whatever it keeps. Clients are asked again only from the first that had not answered.

A file of entries: length (4 bytes, little-endian), CRC-32 (4), kind (1), payload. A torn entry at
the end is cut off. Kinds: T says when the run began, JSON {"at": Unix seconds}; B begins a call,
JSON {"asked": [[node, type], ...]}; R is a reply, after its node (8); E ends the call, JSON with
what was measured of it, and `at`.
"""

from __future__ import annotations

import json
import struct
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fedpress_protocols.errors import ConfigurationError, StateCorrupt

_HEAD = struct.Struct("<IIc")


@dataclass
class Call:
    """One sending of messages: who was asked what, the places of replies in the file by node, and,
    once it is over, its figures."""

    asked: list[list[Any]]
    places: dict[int, tuple[int, int]] = field(default_factory=dict)
    figures: dict[str, Any] | None = None


class Record:
    """The record of one run in the file `path`, which goes on where it ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.calls: list[Call] = []
        self._times: list[float] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = 0
        if path.exists():
            whole = self._read()
        self._file = path.open("r+b" if path.exists() else "w+b")
        self._file.truncate(whole)
        self._file.seek(whole)
        self._next = 0
        self._is_new = not self._times
        if self._is_new:
            self._times.append(time.time())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def clock(self) -> float:
        """Between two calls: Unix seconds when the last one had ended, or the run had begun; the
        same at the same place of a run that goes on from its record."""
        return self._times[min(self._next, len(self._times) - 1)]

    def begin(self, asked: list[list[Any]]) -> Call:
        """The next call: one that the record has, or a new one. Raises ConfigurationError if the
        record has another here."""
        number, self._next = self._next, self._next + 1
        if number < len(self.calls):
            call = self.calls[number]
            if call.asked != asked:
                raise ConfigurationError(
                    f"call {number + 1} goes to other clients than before the run was stopped, so "
                    "the app does not repeat itself and cannot be resumed",
                    hint="start again with --fresh, and draw clients by a seed",
                )
            return call
        if self._is_new:
            self._append(b"T", json.dumps({"at": self._times[0]}).encode())
            self._is_new = False
        self._append(b"B", json.dumps({"asked": asked}).encode())
        self.calls.append(Call(asked))
        return self.calls[-1]

    def replied(self, call: Call, node: int, data: bytes) -> None:
        """Keep a reply of the newest call."""
        start = self._append(b"R", struct.pack("<Q", node) + data)
        call.places[node] = (start + 8, len(data))

    def end(self, call: Call, figures: dict[str, Any]) -> None:
        call.figures = figures
        self._times.append(time.time())
        self._append(b"E", json.dumps({**figures, "at": self._times[-1]}).encode())

    def reply(self, call: Call, node: int) -> bytes:
        """As it was kept."""
        start, length = call.places[node]
        with self._path.open("rb") as file:
            file.seek(start)
            return file.read(length)

    def _append(self, kind: bytes, payload: bytes) -> int:
        head = _HEAD.pack(len(payload), zlib.crc32(kind + payload), kind)
        start = self._file.tell() + len(head)
        self._file.write(head + payload)
        self._file.flush()
        return start

    def _read(self) -> int:
        """Take in what is whole; where that ends."""
        whole = 0
        for kind, start, payload in self._entries():
            if kind == b"T":
                self._times.append(json.loads(payload)["at"])
            elif kind == b"B":
                self.calls.append(Call(json.loads(payload)["asked"]))
            elif not self.calls:
                raise StateCorrupt(f"{self._path} does not begin with a call")
            elif kind == b"R":
                node = struct.unpack_from("<Q", payload)[0]
                self.calls[-1].places[node] = (start + 8, len(payload) - 8)
            else:
                figures = json.loads(payload)
                self._times.append(figures.pop("at"))
                self.calls[-1].figures = figures
            whole = start + len(payload)
        return whole

    def _entries(self) -> Iterator[tuple[bytes, int, bytes]]:
        with self._path.open("rb") as file:
            while len(head := file.read(_HEAD.size)) == _HEAD.size:
                length, checksum, kind = _HEAD.unpack(head)
                start, payload = file.tell(), file.read(length)
                if len(payload) < length or zlib.crc32(kind + payload) != checksum:
                    return
                yield kind, start, payload
