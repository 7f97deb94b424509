"""A body that begins to travel while the rest of it is still being encoded.

Two rules make this safe whatever crashes. A part leaves once its bytes are synced to the outgoing
file and a record beside it names the server's upload. And its completion is signed by nobody but
`Transport.upload`, of a body that the account holds; so until the account is saved, with the whole
body and what it stands for, the server cannot count what it has been sent.

A crash before leaves a record without an account of it: the upload is dropped, here and there.
After, the account has the body, and it is resumed like any other.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Protocol, runtime_checkable

from fedpress_client.settings import Stopped
from fedpress_client.state import TaskFiles
from fedpress_protocols.errors import FedpressError

_log = logging.getLogger(__name__)


@runtime_checkable
class SendsAhead(Protocol):
    """A transport that can send parts of a body before the body is complete."""

    parts_above: int
    """Bytes of a body beyond which it goes by parts."""

    def ahead(
        self,
        assignment: str,
        max_bytes: int,
        source: Callable[[int, int], bytes],
        on_begin: Callable[[str], None],
    ) -> None:
        """Send parts of a body that is not whole yet, see `parts.Delivery.ahead`. Raises a
        FedpressError at the first thing that goes wrong."""
        ...

    def drop_parts(self, assignment: str, partial: str) -> None: ...


class Outgoing:
    """The parts of one assignment's body that are sent before it is complete, in their own thread.

    A context: what was not `finish`ed in it is abandoned. Whatever goes wrong with the link in here
    is of no consequence: `Transport.upload` sends what is missing.
    """

    def __init__(self, files: TaskFiles, transport: object, assignment: str) -> None:
        self._files, self._assignment = files, assignment
        self._transport = transport if isinstance(transport, SendsAhead) else None
        self._max_bytes = 0
        self._file: int | None = None
        self._waiting: list[bytes] = []
        """Not written yet, since the body may turn out to be small."""
        self._written = 0
        self._partial: str | None = None
        self._stopped = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Outgoing:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abandon()

    def abandon(self) -> None:
        """Nothing comes of the body: stop, and have the server forget what it has of it."""
        self._stop()
        self._max_bytes = 0
        if self._transport is not None and self._partial is not None:
            with suppress(FedpressError):
                self._transport.drop_parts(self._assignment, self._partial)
        self._partial = None
        self._forget()

    def expect(self, max_bytes: int) -> None:
        """The body will have at most `max_bytes`; one that may not be large stays until whole."""
        if self._transport is not None and max_bytes > self._transport.parts_above:
            self._max_bytes = max_bytes

    def add(self, section: bytes) -> None:
        """Append `section`. From the size on from which bodies go by parts, they begin to leave."""
        if self._transport is None or not self._max_bytes:
            return
        self._waiting.append(section)
        num_bytes = sum(map(len, self._waiting))
        if self._file is None and num_bytes <= self._transport.parts_above:
            return
        try:
            self._write()
        except OSError as exc:
            _log.warning("the body leaves once it is whole: %s", exc)
            self._stop()
            self._max_bytes = 0
            return
        with self._changed:
            self._written += num_bytes
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fedpress-ahead", daemon=True)
            self._thread.start()

    def _write(self) -> None:
        if self._file is None:
            self._file = self._files.begin_outgoing()
        for section in self._waiting:
            remaining = memoryview(section)
            while remaining:
                remaining = remaining[os.write(self._file, remaining) :]
        self._waiting.clear()

    def finish(self) -> None:
        """The account holds the body: no part is begun here any more."""
        self._stop()
        self._partial = None
        self._forget()

    def _run(self) -> None:
        if self._transport is None:
            return
        try:
            self._transport.ahead(self._assignment, self._max_bytes, self._source, self._begun)
        except Stopped:
            _log.info("stopped while %s left; the rest follows", self._assignment)
        except (FedpressError, OSError) as exc:
            _log.info("nothing more of %s leaves before it is whole: %s", self._assignment, exc)

    def _begun(self, partial: str) -> None:
        self._partial = partial
        self._files.name_outgoing(self._assignment, partial)

    def _source(self, offset: int, most: int) -> bytes:
        """The next `most` bytes, once they are on the disk; none once this has been stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._written >= offset + most)
            if self._stopped or self._file is None:
                return b""
        os.fsync(self._file)
        return self._files.outgoing_part(offset, most)

    def _stop(self) -> None:
        """Wait for the part in flight, and send no other."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _forget(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
            self._files.end_outgoing()


def abandon_unfinished(files: TaskFiles, transport: object, pending: frozenset[str]) -> None:
    """After a crash: drop the upload of a body that the account does not hold, here and there."""
    assignment, partial = files.outgoing() or ("", "")
    if partial and assignment not in pending and isinstance(transport, SendsAhead):
        try:
            transport.drop_parts(assignment, partial)
        except FedpressError as exc:  # it expires there by itself
            _log.info("the upload %s is left to expire: %s", partial, exc.detail)
    files.end_outgoing()
