"""The messages of masked sessions: devices get ready, post theirs, and poll for the server's."""

from __future__ import annotations

import asyncio
import hashlib

from fedpress_protocols.errors import Conflict, Forbidden, RoundClosed
from fedpress_server.aggregation.masked import Message, message_bound, read_message
from fedpress_server.coordination.attempts import Attempt
from fedpress_server.coordination.check_ins import CheckIns
from fedpress_server.coordination.commands import Happen, ReceivedMessage
from fedpress_server.coordination.queries import Queries
from fedpress_server.coordination.task_store import TaskStore
from fedpress_server.rounds import ClientReady, Said, Step
from fedpress_server.rounds.session import Answer, Session
from fedpress_server.storage.records import AssignmentRecord, Device


class SessionMessages:
    """Takes and gives the messages of every task."""

    def __init__(self, store: TaskStore, queries: Queries, check_ins: CheckIns) -> None:
        self._store = store
        self._queries = queries
        self._check_ins = check_ins

    async def ready(self, client_id: str, assignment: str) -> None:
        """The device has trained, and waits for the session; to say it again changes nothing.

        Raises UnknownAssignment, Forbidden, Conflict in the clear lane, RoundClosed if the place
        is lost.
        """
        record = await self._queries.assignment(client_id, assignment)
        attempt = await self._attempt(record)
        if not attempt.round.is_masked:
            raise Conflict("the clear lane has no session", hint="upload the update")
        task = self._store.get(record.task)
        await self._store.apply(task, Happen(ClientReady(assignment), record.key))
        attempt = await self._attempt(record)
        if assignment not in attempt.queue:
            raise _lost(record)

    async def bound(self, client_id: str, assignment: str, step: Step) -> int:
        """The largest message that may be read; raises as `post` does."""
        record = await self._queries.assignment(client_id, assignment)
        attempt = await self._attempt(record)
        self._session(attempt, record)
        return message_bound(step, attempt.terms.plan)

    async def post(self, device: Device, assignment: str, step: Step, body: bytes) -> None:
        """Take what a client says; it is on the disk when this returns.

        The same bytes may come again. Raises UnknownAssignment; Forbidden for a device that is not
        in the session; RoundClosed once the step or the attempt is over; UpdateConflict for other
        bytes than before; and what the session has against the message.
        """
        record = await self._queries.assignment(device.client_id, assignment)
        self._session(await self._attempt(record), record)
        message = Message(read_message(step, body), device.public_key)
        digest = hashlib.sha256(body).hexdigest()

        event, payload = Said(assignment, step, digest), ReceivedMessage(message, body)
        task = self._store.get(record.task)
        if not await self._store.apply(task, Happen(event, record.key, payload)):
            # Said before, or needed no more; unless the device was let go just now.
            self._session(await self._attempt(record), record)

    async def poll(
        self, device: Device, assignment: str, step: Answer, wait: float
    ) -> bytes | None:
        """Return the server's message after `step`, or None after `wait` seconds without it.

        Raises as `post` does, and RoundClosed once the attempt is over: the receipt tells the rest.
        """
        record = await self._queries.assignment(device.client_id, assignment)

        async def look() -> bytes | None:
            attempt = await self._attempt(record)
            if attempt.session is None and assignment in attempt.queue:
                return None
            session = self._session(attempt, record)
            # Of a large cohort, all that was sealed for one client takes a while to write.
            return await asyncio.to_thread(session.answer, step, device.public_key)

        return await self._check_ins.wait_for(record.task, look, wait)

    async def _attempt(self, record: AssignmentRecord) -> Attempt:
        attempt = await self._queries.attempt_of(record)
        if attempt is None:
            raise _lost(record)
        return attempt

    def _session(self, attempt: Attempt, record: AssignmentRecord) -> Session:
        """The session that the assignment is in."""
        part = attempt.round.parts[record.assignment]
        if attempt.session is None and part.reason is None:
            raise Conflict("the session has not begun", hint="be ready, and wait for its offer")
        if attempt.session is None or record.assignment not in attempt.queue:
            raise Forbidden(
                "this assignment is not in the session", hint="its receipt says what became of it"
            )
        return attempt.session


def _lost(record: AssignmentRecord) -> RoundClosed:
    return RoundClosed(
        f"round {record.round}, attempt {record.attempt} of task {record.task!r} has no place for "
        "this assignment any more",
        task=record.task,
        round=record.round,
        attempt=record.attempt,
    )
