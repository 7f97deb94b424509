"""Uploads by parts: what was acknowledged is never sent again, and only the whole counts.

    begin → append, part by part → complete → the acceptance of every upload, see uploads.py

A part is a file of its own that never changes, so that any store will do; the parts are joined when
the device has signed for the whole. Before that nothing of them is an upload: they are bounded in
number and in bytes, expire, and go with the assignment that they are of.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fedpress_protocols.errors import (
    BodyTooLarge,
    Conflict,
    DigestMismatch,
    InvalidUpdate,
    MalformedRequest,
    NotFound,
    OffsetConflict,
    RequestTimeout,
    Unavailable,
    UnknownPartial,
)
from fedpress_protocols.messages import (
    PartialCompletion,
    PartialIntent,
    PartialUpload,
    UploadAck,
    UploadFigures,
)
from fedpress_server.intake.uploads import Intake, UploadSlot
from fedpress_server.metrics import Metrics
from fedpress_server.observing import outages
from fedpress_server.storage import partials, records
from fedpress_server.storage.database import Database
from fedpress_server.storage.files import part_name, parts_folder
from fedpress_server.storage.partials import PartialRecord, PartRecord
from fedpress_server.storage.payloads import Payloads

_log = logging.getLogger(__name__)

MAX_PARTS = 2**15
"""Of one upload: 2 GiB in parts of 64 KiB, than which a device makes none shorter."""
MAX_PER_DEVICE = 4
_SWEEP_SECONDS = 60.0
_TOGETHER = 100
"""Uploads that a sweep drops in one transaction, during which none of them takes a part."""
_REMEMBERED = 64


@dataclass(frozen=True, slots=True)
class PartLimits:
    """Limits on uploads by parts: bytes of one part, bytes promised to all of them together,
    seconds that one is kept after its last part."""

    part_bytes: int
    promised_bytes: int
    seconds: float


class Turn:
    """One request's time with an upload, which ends early once a newer one comes for it."""

    def __init__(self) -> None:
        self._overtaken = asyncio.Event()

    def overtake(self) -> None:
        self._overtaken.set()

    def check(self) -> None:
        """Raises RequestTimeout if a newer request has come."""
        if self._overtaken.is_set():
            raise RequestTimeout("a newer request took this upload over")

    async def read(self, reading: Coroutine[Any, Any, bytes]) -> bytes:
        """Return the result of `reading`; raise as `check` does if a newer request comes first."""
        read = asyncio.ensure_future(reading)
        overtaken = asyncio.ensure_future(self._overtaken.wait())
        try:
            await asyncio.wait((read, overtaken), return_when=asyncio.FIRST_COMPLETED)
            if not read.done():
                self.check()
            return await read
        finally:
            for waiting in (read, overtaken):
                waiting.cancel()
            await asyncio.gather(read, overtaken, return_exceptions=True)


@dataclass(slots=True)
class _Place:
    """Those who want one upload: one has it, at most one waits, the others have been overtaken."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    newest: Turn | None = None
    wanted: int = 0


class Resumable:
    """The uploads by parts of every task."""

    def __init__(
        self,
        intake: Intake,
        database: Database,
        payloads: Payloads,
        metrics: Metrics,
        clock: Callable[[], float],
        limits: PartLimits,
    ) -> None:
        self._intake = intake
        self._database = database
        self._payloads = payloads
        self._metrics = metrics
        self._clock = clock
        self.limits = limits
        self._places: dict[str, _Place] = {}
        self._digests: dict[str, Any] = {}
        """By upload: hashlib's state after its bytes. What is lost is read again."""
        self._sweeper: asyncio.Task[None] | None = None

    # Life

    async def start(self) -> None:
        await self.sweep()
        self._sweeper = asyncio.create_task(self._sweep_for_ever())

    async def stop(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
            with suppress(asyncio.CancelledError):
                await self._sweeper

    async def sweep(self) -> None:
        """Drop what has expired, what no assignment awaits any more, and files without a row.

        An upload has its row before its first file, so a file that was there before the rows were
        read, and has none, is nobody's; also where other replicas are at work.
        """
        now = self._clock()
        folders = await asyncio.to_thread(lambda: list(self._payloads.names(parts_folder())))
        in_use = {parts_folder(name) for name in await self._database.read(partials.names)}
        for folder in set(folders) - in_use:
            await asyncio.to_thread(self._payloads.drop, folder)
        spent = await self._database.read(lambda c: partials.spent(c, now))
        for start in range(0, len(spent), _TOGETHER):
            await self._drop_spent(spent[start : start + _TOGETHER], now)

    async def _sweep_for_ever(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            try:
                await self.sweep()
            except Exception as exc:  # the next time is soon
                outages.tell(_log, exc, "uploads by parts could not be swept")

    # The verbs

    @asynccontextmanager
    async def turn(self, slot: UploadSlot, partial: str) -> AsyncIterator[Turn]:
        """The upload for this request alone. Whoever reads a part of it at this moment is made to
        let go, since the other end has given that connection up; whoever writes one is waited for.

        Raises UnknownPartial, or RequestTimeout if a newer request comes before this one's turn.
        """
        await self._record(slot, partial)
        async with self._turn(partial) as turn:
            yield turn

    @asynccontextmanager
    async def _turn(self, partial: str) -> AsyncIterator[Turn]:
        place, mine = self._places.setdefault(partial, _Place()), Turn()
        if place.newest is not None:
            place.newest.overtake()
        place.newest = mine
        place.wanted += 1
        try:
            async with place.lock:
                mine.check()
                yield mine
        finally:
            place.wanted -= 1
            if not place.wanted:
                del self._places[partial]

    async def begin(self, slot: UploadSlot, intent: PartialIntent) -> tuple[PartialUpload, bool]:
        """An upload by parts of the assignment's body, and whether it is new.

        Raises BodyTooLarge, RoundClosed, UpdateConflict; Unavailable where there is room for no
        more.
        """
        if intent.upload is not None:
            ack = await self._intake.acknowledged(slot, intent.upload)
            if ack is not None:
                return self._told(None, ack), False
        await self._intake.check_awaited(slot)
        if intent.trip != "update":
            raise await self._intake.closed(slot)
        if intent.max_bytes > slot.max_body_bytes:
            raise BodyTooLarge(
                f"a body of up to {intent.max_bytes} bytes where the plan allows "
                f"{slot.max_body_bytes}",
                limit=slot.max_body_bytes,
            )
        try:
            record, old = await self._database.write(lambda c: self._begun(c, slot, intent))
        except sa.exc.IntegrityError:  # another replica was first
            record, old = await self._database.write(lambda c: self._begun(c, slot, intent))
        if old is not None:
            await self._remove(old)
        return self._told(record), record.num_bytes == 0

    def _begun(
        self, connection: Connection, slot: UploadSlot, intent: PartialIntent
    ) -> tuple[PartialRecord, str | None]:
        """The row of the upload, and the name of the one whose place it took, if it did."""
        name, now = slot.record.assignment, self._clock()
        old = partials.find_of(connection, name, intent.trip)
        if old is not None and old.expires_at > now and old.max_bytes >= intent.max_bytes:
            return old, None
        if old is not None:
            partials.drop(connection, [old.partial])
        if partials.count_of(connection, slot.record.client_id, now) >= MAX_PER_DEVICE:
            raise Unavailable(
                f"{MAX_PER_DEVICE} uploads by parts of this device are under way",
                hint="complete or drop one of them",
                retry_after=60,
            )
        promised = partials.promised(connection, now)
        if promised and promised + intent.max_bytes > self.limits.promised_bytes:
            raise Unavailable(
                f"uploads by parts of {promised} bytes in all are under way, and "
                f"{self.limits.promised_bytes} are allowed",
                retry_after=30,
            )
        new = PartialRecord(
            partial=secrets.token_urlsafe(12),
            assignment=name,
            trip=intent.trip,
            max_bytes=intent.max_bytes,
            num_bytes=0,
            digest=partials.NOTHING,
            num_parts=0,
            expires_at=now + self.limits.seconds,
        )
        partials.add(connection, new)
        return new, None if old is None else old.partial

    async def held(self, slot: UploadSlot, partial: str) -> PartialUpload:
        """Return the progress of the upload; raises UnknownPartial."""
        return self._told(await self._record(slot, partial))

    async def check_part(self, slot: UploadSlot, partial: str, offset: int, length: int) -> None:
        """Raises unless a part of `length` bytes from `offset` on would be taken now."""
        record = await self._record(slot, partial)
        await self._intake.check_awaited(slot)
        if offset != record.num_bytes:
            raise _moved(record, offset)
        if not length:
            raise MalformedRequest("a part of no bytes")
        if length > self.limits.part_bytes:
            most = self.limits.part_bytes
            raise BodyTooLarge(f"a part of {length} bytes where {most} are allowed", limit=most)
        if offset + length > record.max_bytes:
            raise BodyTooLarge(
                f"a part up to byte {offset + length} of an upload of at most {record.max_bytes}",
                limit=record.max_bytes,
            )
        if record.num_parts >= MAX_PARTS:
            raise BodyTooLarge(
                f"more than {MAX_PARTS} parts", hint="send longer ones", limit=MAX_PARTS
            )

    async def append(
        self,
        slot: UploadSlot,
        partial: str,
        offset: int,
        data: bytes,
        digest: str,
        wire_bytes: int,
    ) -> PartialUpload:
        """Keep a part of SHA-256 `digest` that begins at `offset`; it is on the disk when this
        returns.

        To be called in the upload's turn. Raises OffsetConflict if the upload has come to another
        place, by another replica's doing.
        """
        before = await self._record(slot, partial)
        if offset != before.num_bytes:
            raise _moved(before, offset)
        part = PartRecord(offset, len(data), digest)
        so_far = await self._digest_of(before)
        await asyncio.to_thread(so_far.update, data)
        where = part_name(partial, offset, digest)
        await asyncio.to_thread(self._payloads.put, where, data)
        expires_at = self._clock() + self.limits.seconds
        key, of = slot.record.key, so_far.hexdigest()

        def write(connection: Connection) -> bool:
            records.count(connection, key, upload_bytes=len(data), wire_upload_bytes=wire_bytes)
            return partials.add_part(connection, before, part, of, expires_at)

        if not await self._database.write(write):
            raise _moved(await self._record(slot, partial), offset)
        self._remember(partial, so_far)
        return await self.held(slot, partial)

    async def complete(
        self,
        slot: UploadSlot,
        partial: str,
        completion: PartialCompletion,
        wire_bytes: int,
        figures: UploadFigures | None = None,
    ) -> tuple[UploadAck, bool]:
        """Make an upload of the parts, by the acceptance of every upload; True if it is new.

        To be called in the upload's turn. A refused body's parts are dropped: the same bytes would
        be refused again.
        """
        record = await self._record(slot, partial)
        if completion.num_bytes != record.num_bytes:
            raise _moved(record, completion.num_bytes)
        if completion.upload != record.digest:
            raise DigestMismatch(
                f"parts of SHA-256 {record.digest}, and a completion of {completion.upload}",
                hint="drop the upload and begin it again",
            )
        try:
            body = await asyncio.to_thread(self._joined, await self._parts(partial), record)
            ack, is_new = await self._intake.stage(
                slot, body, record.digest, wire_bytes, len(body), figures=figures
            )
        except (Conflict, InvalidUpdate, UnknownPartial):
            await self._drop(partial)
            raise
        await self._drop(partial)
        return ack, is_new

    async def completed(self, slot: UploadSlot, digest: str) -> UploadAck:
        """The answer to a completion that is repeated; raises UnknownPartial if there was none."""
        ack = await self._intake.acknowledged(slot, digest)
        if ack is None:
            raise UnknownPartial(f"no such upload of assignment {slot.record.assignment}")
        return ack

    async def drop(self, partial: str) -> None:
        """Forget an upload; to be called in its turn."""
        await self._drop(partial)

    # What is kept

    async def _record(self, slot: UploadSlot, partial: str) -> PartialRecord:
        record = await self._database.read(lambda c: partials.find(c, partial))
        if record is None or record.assignment != slot.record.assignment:
            raise UnknownPartial(f"no upload {partial[:64]!r} of this assignment")
        if record.expires_at <= self._clock():
            raise UnknownPartial(f"the upload {partial} has expired")
        return record

    async def _parts(self, partial: str) -> list[str]:
        rows = await self._database.read(lambda c: partials.parts(c, partial))
        return [part_name(partial, part.start, part.digest) for part in rows]

    def _joined(self, names: list[str], record: PartialRecord) -> bytes:
        """The whole body; raises UnknownPartial if the store does not have it any more."""
        body = bytearray()
        for data in self._read(names):
            body += data
        digest = hashlib.sha256(body).hexdigest()
        if digest != record.digest:
            raise UnknownPartial(f"the upload {record.partial} has changed in the store")
        return bytes(body)

    def _read(self, names: list[str]) -> Iterator[bytes]:
        try:
            yield from map(self._payloads.get, names)
        except NotFound as exc:
            raise UnknownPartial("a part of the upload is lost from the store") from exc

    async def _digest_of(self, record: PartialRecord) -> Any:
        """hashlib's state after the bytes held, for the caller to change."""
        state = self._digests.get(record.partial)
        if state is not None and state.hexdigest() == record.digest:
            return state.copy()
        names = await self._parts(record.partial)

        def read() -> Any:
            digest = hashlib.sha256()
            for data in self._read(names):
                digest.update(data)
            return digest

        return await asyncio.to_thread(read)

    def _remember(self, partial: str, state: Any) -> None:
        self._digests.pop(partial, None)
        self._digests[partial] = state
        if len(self._digests) > _REMEMBERED:
            del self._digests[next(iter(self._digests))]

    async def _drop_spent(self, names: list[str], now: float) -> None:
        """Drop their rows, unless another replica has taken a part in the meantime, and the files.

        The names are in order, as for every sweep: two that wait for each other's would not end.
        """
        async with AsyncExitStack() as turns:
            mine = list[str]()
            for name in names:
                with suppress(RequestTimeout):  # a newer request's; the next sweep sees to it
                    await turns.enter_async_context(self._turn(name))
                    mine.append(name)
            for name in await self._database.write(lambda c: partials.drop_spent(c, mine, now)):
                await self._remove(name)

    async def _drop(self, partial: str) -> None:
        await self._database.write(lambda c: partials.drop(c, [partial]))
        await self._remove(partial)

    async def _remove(self, partial: str) -> None:
        """The files of an upload whose row is gone."""
        self._digests.pop(partial, None)
        await asyncio.to_thread(self._payloads.drop, parts_folder(partial))

    def _told(self, record: PartialRecord | None, ack: UploadAck | None = None) -> PartialUpload:
        return PartialUpload(
            partial=None if record is None else record.partial,
            offset=0 if record is None else record.num_bytes,
            digest=partials.NOTHING if record is None else record.digest,
            part_bytes=self.limits.part_bytes,
            expires_at=self._clock() if record is None else record.expires_at,
            ack=ack,
        )


def _moved(record: PartialRecord, offset: int) -> OffsetConflict:
    return OffsetConflict(
        f"byte {offset} where the upload has come to {record.num_bytes}", offset=record.num_bytes
    )
