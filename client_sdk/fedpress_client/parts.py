"""A body that goes by parts, and goes on where the server's disk says that it stands.

    begin or ask → part, part, part → completion

What was acknowledged is not sent again, whoever went away in between: a cut costs the part in
flight. A part's place and bytes are signed, and the completion names the whole; before it, nothing
of what the server holds is an upload.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from fedpress_protocols.errors import NotFound, OffsetConflict, TransportError, UnknownPartial
from fedpress_protocols.messages import (
    PartialCompletion,
    PartialIntent,
    PartialUpload,
    UploadAck,
)

PARTS_ABOVE = 8 * 2**20
"""Bytes of a body beyond which it goes by parts."""
FIRST_PART = 2**20
LEAST_PART = 2**16
PART_SECONDS = 4.0
WHOLE_SECONDS = 30.0
"""Seconds for which a body may travel in one piece where the device limits its bandwidth."""
_DETOURS = 16


class PartVerbs(Protocol):
    """The verbs of uploads by parts; each is one request, tried once."""

    def begin_parts(self, assignment: str, intent: PartialIntent) -> PartialUpload:
        """Raises PartsNotOffered where the server has no such uploads."""
        ...

    def held_parts(self, assignment: str, partial: str) -> PartialUpload: ...

    def send_part(
        self, assignment: str, partial: str, offset: int, part: bytes
    ) -> PartialUpload: ...

    def complete_parts(
        self, assignment: str, partial: str, completion: PartialCompletion, query: str
    ) -> UploadAck: ...

    def drop_parts(self, assignment: str, partial: str) -> None: ...


class PartsNotOffered(Exception):
    """The server has no uploads by parts, or of parts too small: the body is to go in one."""


@dataclass(slots=True)
class PartSizes:
    """The length of the next part: about what the link carries in `seconds`.

    Longer parts cost more when they are cut, shorter ones more waiting for answers. A part is at
    most twice and at least half as long as the one before; after a cut it is half as long.
    """

    seconds: float = PART_SECONDS
    num_bytes: int = FIRST_PART

    def next(self, most: int) -> int:
        """At least 1 byte, and `most`, which is the server's word, at most."""
        self.num_bytes = max(1, min(self.num_bytes, most))
        return self.num_bytes

    def arrived(self, num_bytes: int, seconds: float) -> None:
        """A part of `num_bytes` was acknowledged after `seconds`."""
        affordable: float = 2 * self.num_bytes
        if seconds > 0:
            affordable = min(affordable, num_bytes * self.seconds / seconds)
        self.num_bytes = max(LEAST_PART, self.num_bytes // 2, int(affordable))

    def cut(self) -> None:
        self.num_bytes = max(LEAST_PART, self.num_bytes // 2)


def largest_in(seconds: float, rate: float, most: int) -> int:
    """Bytes that a link of `rate` bytes a second carries in `seconds`, within LEAST_PART and
    `most`."""
    return max(LEAST_PART, min(most, int(seconds * rate)))


class Delivery:
    """One body on its way; after an error, calling again goes on."""

    def __init__(
        self,
        verbs: PartVerbs,
        assignment: str,
        sizes: PartSizes,
        clock: Callable[[], float],
        on_offset: Callable[[int], None] = lambda offset: None,
        query: str = "",
    ) -> None:
        self._verbs, self._assignment = verbs, assignment
        self._on_offset, self._query = on_offset, query
        self._sizes, self._clock = sizes, clock
        self._partial: str | None = None
        self._part_bytes = 1
        self.offset = 0
        """Bytes known to be on the server's disk."""

    def whole(self, body: bytes) -> UploadAck:
        """Send what is missing of `body`, and say that it is whole."""
        digest = hashlib.sha256(body).hexdigest()
        for _ in range(_DETOURS):
            try:
                ack = self._find(body, digest)
                if ack is not None:
                    return ack
                while self.offset < len(body):
                    self._send(body[self.offset : self.offset + self._next])
                completion = PartialCompletion(num_bytes=len(body), upload=digest)
                return self._verbs.complete_parts(
                    self._assignment, self._name, completion, self._query
                )
            except OffsetConflict:
                pass  # a part was kept, and its answer lost: ask where it stands
            except UnknownPartial:
                self._partial = None
        raise TransportError(
            f"the parts for {self._assignment} are where the server says they are not",
            hint="does more than one device use this key?",
        )

    def ahead(
        self, source: Callable[[int, int], bytes], max_bytes: int, on_begin: Callable[[str], None]
    ) -> None:
        """Send the parts of a body of at most `max_bytes` that are ready while it is being made.

        `source(offset, most)` waits for that many bytes; an empty result is the end.
        `on_begin(name)` is called with the upload's name before the first part is sent. This does
        not complete the upload.
        """
        intent = PartialIntent(max_bytes=max_bytes)
        status = self._verbs.begin_parts(self._assignment, intent)
        if status.offset and status.partial is not None:
            # Left by a process that ended before its account was saved: nobody knows that body.
            self._verbs.drop_parts(self._assignment, status.partial)
            status = self._verbs.begin_parts(self._assignment, intent)
        self._at(status)
        on_begin(self._name)
        while part := source(self.offset, self._next):
            self._send(part)

    def cut(self) -> None:
        """The link broke: the next part is a shorter one."""
        self._sizes.cut()

    def _find(self, body: bytes, digest: str) -> UploadAck | None:
        """Be where the server is; the acknowledgement, if it has the whole."""
        status = None
        if self._partial is not None:
            try:
                status = self._verbs.held_parts(self._assignment, self._partial)
            except NotFound:
                status = None
        if status is None:
            status = self._begin(body, digest)
        if status.ack is not None:
            return status.ack
        is_ours = status.offset <= len(body)
        is_ours &= hashlib.sha256(memoryview(body)[: status.offset]).hexdigest() == status.digest
        if not is_ours and status.partial is not None:
            self._verbs.drop_parts(self._assignment, status.partial)
            status = self._begin(body, digest)
        self._at(status)
        return status.ack

    def _begin(self, body: bytes, digest: str) -> PartialUpload:
        intent = PartialIntent(max_bytes=len(body), upload=digest)
        return self._verbs.begin_parts(self._assignment, intent)

    def _send(self, part: bytes) -> None:
        start = self._clock()
        status = self._verbs.send_part(self._assignment, self._name, self.offset, part)
        self._sizes.arrived(len(part), self._clock() - start)
        if status.offset != self.offset + len(part):
            raise OffsetConflict(f"{status.offset} after a part of {len(part)} at {self.offset}")
        self._at(status)

    def _at(self, status: PartialUpload) -> None:
        self._partial, self.offset = status.partial, status.offset
        self._on_offset(self.offset)
        self._part_bytes = status.part_bytes

    @property
    def _name(self) -> str:
        if self._partial is None:
            raise UnknownPartial("the server has named no upload")
        return self._partial

    @property
    def _next(self) -> int:
        return self._sizes.next(self._part_bytes)
