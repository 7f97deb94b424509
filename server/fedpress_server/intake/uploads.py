"""From a body to an acknowledgement: check, keep, count once.

The body is on the disk before its row, and both are before the answer. Whatever happens between,
the same bytes may come again, and are then either new or known.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedpress_protocols.errors import (
    FedpressError,
    Forbidden,
    RoundClosed,
    UnknownAssignment,
    UpdateConflict,
)
from fedpress_protocols.messages import UploadAck, UploadFigures
from fedpress_protocols.signatures import Content
from fedpress_server import failpoints
from fedpress_server.aggregation.masked import Sums
from fedpress_server.aggregation.terms import RoundTerms
from fedpress_server.coordination.attempts import Attempt
from fedpress_server.coordination.commands import Happen, ReceivedUpload
from fedpress_server.coordination.queries import Queries
from fedpress_server.coordination.resources import Resources
from fedpress_server.coordination.task_store import TaskStore
from fedpress_server.intake.body_writer import BodyWriter
from fedpress_server.observing import traces
from fedpress_server.rounds import UploadStaged
from fedpress_server.rounds.session import Session, Words
from fedpress_server.storage import records
from fedpress_server.storage.files import upload_name
from fedpress_server.storage.records import AssignmentRecord, UploadRecord

_ARRIVALS = 65536
"""Assignments whose bodies are remembered to be on their way."""


@dataclass(frozen=True, slots=True)
class UploadSlot:
    """Destination of an upload: an assignment of the requesting device."""

    record: AssignmentRecord
    max_body_bytes: int
    key_id: str | None = None
    """Of the key that signs what comes; it is looked at again when that is written."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """Transfer of an assignment's body so far: `num_bytes`, the first at `began_at`, in `seconds`
    of transfer without the pauses between parts."""

    num_bytes: int
    began_at: float
    seconds: float


@dataclass(frozen=True, slots=True)
class _Written:
    """A body whose file is durable, and the command by which it counts."""

    where: str
    command: Happen
    num_bytes: int
    num_values: int
    """Of the model."""
    words: Words | None
    """Of a masked body."""
    figures: UploadFigures | None
    """None where the round may have none."""


class Intake:
    """Takes the uploads of every task; threads check them beside the event loop."""

    def __init__(
        self, resources: Resources, store: TaskStore, queries: Queries, sums: Sums | None
    ) -> None:
        """`sums` takes in masked bodies as they come; None where no job of this server asks."""
        self._store = store
        self._queries = queries
        self._sums = sums
        self._database = resources.database
        self._payloads = resources.payloads
        self._metrics = resources.metrics
        self._writer = BodyWriter(resources.payloads, resources.settings.worker_threads)
        self._arrivals: dict[str, Arrival] = {}
        """By assignment; lost in a restart, after which that upload tells nothing of a link."""

    def stop(self) -> None:
        self._writer.stop()

    async def slot(self, client_id: str, assignment: str, key_id: str | None = None) -> UploadSlot:
        """Raises UnknownAssignment or Forbidden."""
        current = self._queries.held(assignment)
        if current is not None:
            task, attempt = current
            record = attempt.record_of(assignment)
            if record.client_id != client_id:
                raise Forbidden("the assignment is another device's")
            return UploadSlot(record, task.record.max_body_bytes, key_id)
        record = await self._queries.assignment(client_id, assignment)
        most = await self._queries.max_body_bytes(record.task)
        return UploadSlot(record, most, key_id)

    def arrived(self, assignment: str, num_bytes: int, began_at: float, seconds: float) -> None:
        """Bytes of the assignment's body have come, its last ones or a part."""
        self._metrics.arrived(num_bytes, seconds)
        before = self._arrivals.pop(assignment, Arrival(0, began_at, 0.0))
        while len(self._arrivals) >= _ARRIVALS:
            del self._arrivals[next(iter(self._arrivals))]
        self._arrivals[assignment] = Arrival(
            before.num_bytes + num_bytes, before.began_at, before.seconds + max(0.0, seconds)
        )

    def _travelled(self, assignment: str, num_bytes: int) -> tuple[float | None, float | None]:
        """Return the arrival time of a body's first byte and the seconds of the whole transfer,
        (None, None) if nothing arrived here.

        Bytes that another process received count at the speed of those that came here.
        """
        arrival = self._arrivals.pop(assignment, None)
        if arrival is None or not arrival.num_bytes:
            return None, None
        return arrival.began_at, arrival.seconds * num_bytes / arrival.num_bytes

    async def admit(self, slot: UploadSlot, digest: str) -> None:
        """Raises RoundClosed or UpdateConflict if an upload of this SHA-256 need not be read."""
        try:
            await self._refuse(slot, digest)
        except FedpressError as exc:
            self._metrics.uploads.labels(slot.record.task, exc.slug).inc()
            raise

    async def _refuse(self, slot: UploadSlot, digest: str) -> None:
        if self._awaited(slot) is not None:
            return  # another server may know better; what is written asks the disk
        # In this order: one that is not awaited because it has just been staged is found then.
        is_awaited = await self._queries.takes_upload(slot.record) is not None
        if self._awaited(slot) is not None:
            return
        staged = await self._staged(slot)
        if staged is not None and staged.digest != digest:
            raise UpdateConflict(
                f"an upload of SHA-256 {staged.digest} came under this assignment before",
                upload=staged.digest,
            )
        if staged is None and not is_awaited:
            raise await self.closed(slot)

    def _awaited(self, slot: UploadSlot) -> Attempt | None:
        """The attempt in which memory has the upload still awaited."""
        current = self._queries.held(slot.record.assignment)
        if current is None or not current[1].holds(slot.record.assignment, slot.record.key):
            return None
        return current[1]

    async def closed(self, slot: UploadSlot) -> RoundClosed:
        """The error that says that the round takes no upload of the assignment any more."""
        task, number, attempt = slot.record.key
        summary = await self._queries.task(task)
        return RoundClosed(
            f"round {number}, attempt {attempt} of task {task!r} takes no update under this "
            "assignment any more",
            task=task,
            round=number,
            attempt=attempt,
            task_state=summary.state,
            rounds_committed=summary.round,
        )

    async def check_awaited(self, slot: UploadSlot) -> None:
        """Raises RoundClosed or UpdateConflict unless a body is still awaited."""
        if await self._queries.takes_upload(slot.record) is None:
            staged = await self._staged(slot)
            if staged is not None:
                raise UpdateConflict("an upload came before", upload=staged.digest)
            raise await self.closed(slot)

    async def acknowledged(self, slot: UploadSlot, digest: str) -> UploadAck | None:
        """The acknowledgement of a body of this SHA-256, if it is staged."""
        name, staged = slot.record.assignment, await self._staged(slot)
        if staged is None or staged.digest != digest:
            return None
        return UploadAck(assignment=name, upload=digest, received_at=staged.received_at)

    async def stage(
        self,
        slot: UploadSlot,
        body: bytes,
        digest: str,
        wire_bytes: int,
        num_counted: int = 0,
        due: Content | None = None,
        figures: UploadFigures | None = None,
    ) -> tuple[UploadAck, bool]:
        """Check an upload and store it durably; True if it is new.

        Raises InvalidUpdate, RoundClosed or UpdateConflict; DigestMismatch if it is not the
        content that is `due`. Its bytes are counted, less `num_counted` that were counted as parts
        of it; a refused upload's too. They are not counted after DigestMismatch, since anybody may
        have sent what the device has not signed, nor if the server could not store the upload.
        `figures` are counted where they are complete and the round may have any.
        """
        task, outcome = slot.record.task, None
        amounts = {"upload_bytes": len(body) - num_counted, "wire_upload_bytes": wire_bytes}
        self._metrics.upload_size.labels(task).observe(len(body))
        try:
            written = await self._write(slot, body, digest, amounts, due, figures)
            if written is not None:
                with traces.span("commit"):
                    outcome = await self._store.apply(self._store.get(task), written.command)
                failpoints.reach("upload-committed")
                await self._written(slot, written, digest, is_new=bool(outcome))
            if not outcome:
                await self._writer.run(_check_content, body, due)
                await self._count(slot, amounts)
                await self._refuse(slot, digest)
        except FedpressError as exc:
            self._metrics.uploads.labels(task, exc.slug).inc()
            raise
        self._metrics.uploads.labels(task, "staged" if outcome else "repeated").inc()
        if outcome:
            name = slot.record.assignment
            return UploadAck(assignment=name, upload=digest, received_at=outcome.at), True
        ack = await self.acknowledged(slot, digest)
        if ack is None:
            raise UnknownAssignment(f"assignment {slot.record.assignment} has no upload")
        return ack, False

    async def _write(
        self,
        slot: UploadSlot,
        body: bytes,
        digest: str,
        amounts: dict[str, int],
        due: Content | None,
        figures: UploadFigures | None,
    ) -> _Written | None:
        """Check the body and make its file durable; None if it is not awaited."""
        key, name = slot.record.key, slot.record.assignment
        attempt = self._awaited(slot)
        if attempt is None:
            if await self._queries.takes_upload(slot.record) is None:
                return None
            attempt = await self._queries.attempt_of(slot.record)
        if attempt is None or (attempt.round.is_masked and attempt.session is None):
            return None
        terms, session = attempt.terms_of(name), attempt.session
        where = upload_name(key, name, digest)

        def checked() -> tuple[int, float | None, Words | None] | FedpressError:
            _check_content(body, due)
            try:
                return self._checked(slot.record, terms, session, body, digest)
            except FedpressError as exc:
                return exc

        with traces.span("stage"):
            result = await self._writer.write(where, body, checked)
        if isinstance(result, FedpressError):
            await self._count(slot, amounts)
            try:
                raise result
            finally:
                del result  # or the error, this frame and the body would be a cycle
        failpoints.reach("upload-kept")
        num_examples, loss, words = result
        travelled = self._travelled(name, len(body))
        upload = UploadRecord(name, digest, len(body), num_examples, 0.0, loss, *travelled)
        sender = (slot.record.client_id, slot.key_id)
        if session is not None or terms.plan.privacy is not None:
            figures = None
        counted = {"received": 1, **amounts, **_counted(figures)}
        received = ReceivedUpload(key, upload, counted, sender)
        command = Happen(UploadStaged(name, digest), key, received)
        return _Written(where, command, len(body), terms.spec.size, words, figures)

    async def _written(
        self, slot: UploadSlot, written: _Written, digest: str, *, is_new: bool
    ) -> None:
        """Add up a masked body that counts; drop the file of one that does not."""
        key = slot.record.key
        if is_new:
            self._metrics.staged(key[0], written.num_bytes, written.num_values)
            if written.figures is not None:
                self._metrics.measured(key[0], written.figures)
            if self._sums is not None and written.words is not None:
                await self._writer.run(self._sums.add, key, written.where, written.words)
                if await self._queries.attempt_of(slot.record) is None:
                    self._sums.drop(key)  # it was over before this was added
            return
        staged = await self._staged(slot)
        if staged is None or staged.digest != digest:
            # The round closed while the body was checked: nothing leads to the file.
            await self._drop(written.where)

    def _checked(
        self,
        record: AssignmentRecord,
        terms: RoundTerms,
        session: Session | None,
        body: bytes,
        digest: str,
    ) -> tuple[int, float | None, Words | None]:
        """The number of examples in an upload and the loss that it reports, if it does; or the
        words of a masked one, which tells neither."""
        if session is not None:
            return 0, None, session.words(record.assignment, body, digest)
        _, num_examples, report = terms.decoded(body, record.profile, record.client_id)
        return num_examples, report.get("loss"), None

    async def _drop(self, where: str) -> None:
        """Remove a body that came to nothing. Where another server may be about to write the row
        of the same bytes, it goes with the attempt's folder instead, or is swept."""
        if not self._store.is_shared:
            await self._writer.run(self._payloads.drop, where)

    async def _count(self, slot: UploadSlot, amounts: dict[str, int]) -> None:
        await self._database.write(lambda c: records.count(c, slot.record.key, **amounts))

    async def _staged(self, slot: UploadSlot) -> UploadRecord | None:
        return await self._database.read(lambda c: records.upload(c, slot.record.assignment))


def _counted(figures: UploadFigures | None) -> dict[str, float]:
    """What a round adds up of the figures of an upload, by the columns' names."""
    if figures is None:
        return {}
    counted: dict[str, float] = {f"{name}_sum": mean for name, mean in figures.means.items()}
    if counted:
        counted["num_figures"] = 1
    if figures.is_flat:
        counted["num_flat"] = 1
    return counted


def _check_content(body: bytes, due: Content | None) -> None:
    """Raises DigestMismatch unless the body is what is `due`, if that is known."""
    if due is not None:
        due.check(Content.of(body))
