"""Device check-ins: task news, assignments and receipts, and the choice of who is assigned."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar, get_args

from sqlalchemy.engine import Connection

from fedpress_protocols.errors import Conflict, Unavailable
from fedpress_protocols.messages import (
    Assignment,
    Attributes,
    CheckInRequest,
    CheckInResponse,
    DeclineReason,
    SignedRecall,
    SignedReceipt,
)
from fedpress_protocols.plan import agreed_version
from fedpress_server.coordination.adaptive import said_uplink
from fedpress_server.coordination.attempts import Attempt
from fedpress_server.coordination.background import Background
from fedpress_server.coordination.commands import GivePlace, GivePlaces, Happen
from fedpress_server.coordination.journal import signed_receipt
from fedpress_server.coordination.live import LiveTask
from fedpress_server.coordination.load import Load
from fedpress_server.coordination.pace import Outcome, Pace, Window
from fedpress_server.coordination.placement import Placement, check_in_of
from fedpress_server.coordination.queries import Queries
from fedpress_server.coordination.resources import Resources
from fedpress_server.coordination.task_store import TaskStore
from fedpress_server.registry import restores
from fedpress_server.rounds import Declined
from fedpress_server.rounds.selection import is_eligible
from fedpress_server.storage import records
from fedpress_server.storage.records import RoundKey

_REASONS = frozenset(get_args(DeclineReason))

T = TypeVar("T")
_log = logging.getLogger(__name__)


class CheckIns:
    """Answers to check-ins, and the assignment of places to devices."""

    def __init__(
        self,
        resources: Resources,
        store: TaskStore,
        queries: Queries,
        placement: Placement,
        background: Background,
    ) -> None:
        settings = resources.settings
        self._keys = resources.server_keys
        self._restore = resources.restore
        self._database = resources.database
        self._metrics = resources.metrics
        self._clock = resources.clock
        self._store = store
        self._queries = queries
        self._placement = placement
        self._background = background
        self._pace = Pace(settings.check_ins_per_second, settings.poll_seconds)
        self._slow: dict[str, RoundKey] = {}
        """By task: the attempt of which it was logged that a device is too slow for it."""
        self.load = Load()
        """A check-in that waits to be begun takes as long as one that is worked on: fewer are to
        come in either case."""

    async def check_in(
        self,
        client_id: str,
        name: str,
        request: CheckInRequest,
        spend: Callable[[], Awaitable[None]],
    ) -> CheckInResponse | None:
        """News for the device, or None after `request.wait` seconds without any.

        `spend` is called once, before the check-in changes anything; most change nothing.
        """
        agreed_version(request.wire_versions)
        is_spent = False

        async def spend_once() -> None:
            nonlocal is_spent
            if not is_spent:
                is_spent = True
                await spend()

        async def look() -> CheckInResponse | None:
            start = time.monotonic()
            answer = await self._look(name, client_id, request, spend_once)
            self._pace = self._pace.heard(self._clock(), time.monotonic() - start + self.load.late)
            return answer

        return await self.wait_for(name, look, request.wait)

    def window(self, client_id: str, name: str, request: CheckInRequest) -> Window:
        """Return the time window in which a device without an assignment checks in again."""
        task = self._store.get(name)
        attempt, members = task.attempt, task.config.members
        is_member = not members or client_id in members
        if not is_member or not is_eligible(task.config.eligible, request.attributes):
            return self._window("rejected")
        if attempt is None or task.record.held_at is not None:
            return self._window("none")
        return self._window("full", attempt.round.next_deadline)

    async def wait_for(
        self, name: str, look: Callable[[], Awaitable[T | None]], seconds: float
    ) -> T | None:
        """Return the first result of `look` that is not None, calling it now and at each news of
        the task; None after `seconds` without one.

        Raises Unavailable, even while it waits, where the server is about to stop.
        """
        with self._background.until_stopping(self._stopping):
            # Good enough to wait for its news: each look brings it up to date.
            task = self._store.tasks.get(name) or await self._store.fresh(name)
            loop = asyncio.get_running_loop()
            until = loop.time() + seconds
            while True:
                news = task.news
                answer = await look()
                if answer is not None:
                    return answer
                remaining_seconds = until - loop.time()
                if remaining_seconds <= 0:
                    return None
                try:
                    with self._metrics.waiting.track_inprogress():
                        async with asyncio.timeout(remaining_seconds):
                            await news.wait()
                except TimeoutError:
                    return None

    def _stopping(self) -> Unavailable:
        """Many are refused at one moment, and come back one after the other."""
        return Unavailable(
            "this server is about to stop", retry_after=max(1.0, self._window("none").least)
        )

    async def _look(
        self,
        name: str,
        client_id: str,
        request: CheckInRequest,
        spend: Callable[[], Awaitable[None]],
    ) -> CheckInResponse | None:
        task = await self._store.fresh(name)
        assignment = await self._assignment_for(task, client_id, request.attributes, spend)
        receipts, strange, backup_at = await self._receipts(client_id, request)
        recall = await self._recall(client_id, name, request, receipts, strange, spend)
        if receipts:
            # They are on the disk a moment before the task in memory has moved on with them.
            await self._store.fresh(name)
            async with task.lock:
                pass
        is_over = task.record.state not in ("running", "paused")
        if assignment is None and not receipts and not is_over and recall is None:
            return None
        return CheckInResponse(
            task=task.summary,
            receipts=receipts,
            assignment=assignment,
            retry_after=self._window("accepted").least,
            server_time=self._clock(),
            recall=recall,
            backup_at=backup_at,
        )

    def _window(self, outcome: Outcome, opens_at: float | None = None) -> Window:
        self._pace, window = self._pace.window(self._clock(), outcome, opens_at)
        return window

    async def _assignment_for(
        self,
        task: LiveTask,
        client_id: str,
        attributes: Attributes,
        spend: Callable[[], Awaitable[None]],
    ) -> Assignment | None:
        await self._store.pass_deadline(task)
        attempt = task.attempt
        is_held = task.record.held_at is not None
        if attempt is not None and not is_held and attempt.has_place_for(client_id):
            eligible = is_eligible(task.config.eligible, attributes)
            if eligible or attempt.round.chooses:
                await spend()
            uplink = said_uplink(attributes)
            if attempt.round.chooses:
                await self._waits(task, attempt, client_id, eligible, uplink)
            elif eligible and attempt.course is not None:
                await self._store.apply(task, GivePlace(client_id, uplink))
            elif eligible:
                await self._store.apply(task, Happen(check_in_of(client_id)))
        assignment = task.attempt.assignment_of(client_id) if task.attempt else None
        return assignment

    async def _waits(
        self,
        task: LiveTask,
        attempt: Attempt,
        client_id: str,
        eligible: bool,
        uplink: float | None,
    ) -> None:
        """The client waits for a place, or no longer. Where several servers see devices, the next
        tick of one that chooses reads from the disk who waits. Read at each check-in, the list
        would cost the square of its length."""
        name, now = task.record.task, self._clock()
        if self._store.is_shared:
            await self._database.write(
                lambda c: records.set_waiting(c, name, client_id, eligible, uplink, now)
            )
        elif eligible:
            task.candidates.add(client_id, attempt.key, now, uplink=uplink)
            await self.choose(task)
        else:
            task.candidates.remove(client_id)

    async def choose(self, task: LiveTask) -> None:
        """Let the task's policy give the places that are left, if it is time to."""
        if self._store.is_shared:
            await self._read_waiting(task)
        if self._placement.is_due(task, self._clock()):
            await self._store.apply(task, GivePlaces())

    async def _read_waiting(self, task: LiveTask) -> None:
        attempt, name = task.attempt, task.record.task
        if attempt is None or not attempt.round.chooses:
            return
        since = self._clock() - task.candidates.patience
        for each in await self._database.read(lambda c: records.waiting_since(c, name, since)):
            if not each.is_eligible or not attempt.round.admits(each.client_id):
                task.candidates.remove(each.client_id)
            elif each.looks != task.candidates.looks(each.client_id):
                task.candidates.add(
                    each.client_id, attempt.key, each.seen_at, each.looks, each.uplink
                )

    async def _receipts(
        self, client_id: str, request: CheckInRequest
    ) -> tuple[tuple[SignedReceipt, ...], tuple[str, ...], int | None]:
        """The receipts there are, oldest first; the ids that are nobody's; where a backup goes back
        to, see `restores.goes_back_to`.

        An id that is not this device's is passed over: a receipt for it would say what nobody
        knows. To ask for that very receipt, and to be told 404, settles it; and where the server
        was restored, a recall does, if it is nobody's.
        """
        names = (*request.pending, *(fate.assignment for fate in request.fates))
        if not names:
            return (), (), None

        def read(
            connection: Connection,
        ) -> tuple[list[str], set[str], tuple[str, ...], int | None]:
            texts, existing = records.receipts(connection, client_id, names)
            others = [name for name in names if name not in existing]
            nobodys = restores.unknown(connection, others) if others else ()
            backup_at = restores.goes_back_to(connection) if texts else None
            return texts, existing, nobodys, backup_at

        texts, existing, nobodys, backup_at = await self._database.read(read)
        strange = set(names) - existing
        if strange and (self._restore is None or strange != set(nobodys)):
            _log.warning("a client asks for %d assignments not its own", len(strange))
        receipts = tuple(map(self._signed_anew, texts))
        return receipts, nobodys, backup_at

    async def _recall(
        self,
        client_id: str,
        task: str,
        request: CheckInRequest,
        receipts: tuple[SignedReceipt, ...],
        strange: tuple[str, ...],
        spend: Callable[[], Awaitable[None]],
    ) -> SignedRecall | None:
        """The word that the server was restored, and what it does not know because of that; None
        for a device that has taken account of it. What the device says was included after the
        backup is kept, for operators to see."""
        restore, now = self._restore, self._clock()
        if restore is None or (request.epoch == restore.epoch and not strange):
            return None
        included = {each.receipt.assignment for each in receipts if each.receipt.model is not None}
        undone = [fate for fate in request.fates if fate.assignment not in included]
        if undone:
            await spend()
            await self._database.write(
                lambda c: restores.add_undone(c, restore, client_id, task, undone, now)
            )
        return restores.signed(self._keys.current, restore, client_id, task, strange, now)

    async def receipt(self, client_id: str, assignment: str) -> SignedReceipt | None:
        """None while the assignment is open. Raises UnknownAssignment or Forbidden."""
        record = await self._queries.assignment(client_id, assignment)
        return self._signed_anew(record.receipt) if record.receipt else None

    def _signed_anew(self, text: str) -> SignedReceipt:
        """A receipt, with the signature of the key that signs by now: a device that has followed
        it, or was given it after a leak, may not believe the one before any more."""
        stored = SignedReceipt.model_validate_json(text)
        if not self._keys.is_outdated(stored.key_id):
            return stored
        return signed_receipt(stored.receipt, self._keys.current)

    async def decline(
        self,
        client_id: str,
        assignment: str,
        reason: str | None = None,
        needed_seconds: float | None = None,
    ) -> SignedReceipt:
        """Give an assignment back; the receipt it had already if it was settled.

        `reason` is the device's own word. Raises Conflict once there is an upload.
        """
        record = await self._queries.assignment(client_id, assignment)
        if record.receipt is None:
            why = "unstated" if reason is None else reason if reason in _REASONS else "other"
            task = await self._store.fresh(record.task)
            event = Declined(assignment, why, needed_seconds)
            if await self._store.apply(task, Happen(event, record.key)):
                self._metrics.declined.labels(record.task, why).inc()
                if needed_seconds is not None and self._slow.get(record.task) != record.key:
                    self._slow[record.task] = record.key
                    _log.warning(
                        "task %s round %d.%d: a device declines, as it needs %.0f s and has less "
                        "until the deadline (round_seconds %g); `fedpress round show` suggests "
                        "what would do",
                        *record.key,
                        needed_seconds,
                        task.config.round_seconds,
                    )
        receipt = await self.receipt(client_id, assignment)
        if receipt is None:
            raise Conflict(
                "the assignment has an upload already", hint="wait for its receipt instead"
            )
        return receipt
