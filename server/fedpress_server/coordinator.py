"""The rounds of every task: the pure machine in the middle, the disk on one side, devices around.

Each event is written in one transaction with all that follows from it, before anybody is told; the
round in memory is a value that is replaced after the commit. A restart replays the events, so there
is nothing to save when the server stops, and nothing to lose when it is killed.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from sqlalchemy.engine import Connection

from fedpress_protocols.errors import (
    AlreadyExists,
    Conflict,
    Forbidden,
    Unavailable,
    UnknownAssignment,
    UnknownModel,
    UnknownRound,
    UnknownTask,
)
from fedpress_protocols.messages import (
    Assignment,
    CheckInRequest,
    CheckInResponse,
    EvaluationReport,
    RoundStatus,
    SignedReceipt,
    TaskConfig,
    TaskSummary,
)
from fedpress_protocols.model import Model, ModelSpec
from fedpress_protocols.plan import agreed_version
from fedpress_protocols.signatures import DeviceKey
from fedpress_server import records
from fedpress_server.attempts import (
    Attempt,
    checked_bound,
    opened,
    reopened,
    sweep,
    uploads_folder,
    write_opening,
    write_step,
)
from fedpress_server.database import Database
from fedpress_server.folding import (
    FoldJob,
    FoldResult,
    RoundTerms,
    check_strategy,
    fold,
    model_name,
    optimizer_name,
)
from fedpress_server.metrics import Metrics
from fedpress_server.payloads import Payloads
from fedpress_server.records import AssignmentRecord, ModelRecord, RoundKey, TaskRecord
from fedpress_server.rounds import (
    Aborted,
    Assign,
    Cancelled,
    ClientCheckedIn,
    DeadlinePassed,
    Declined,
    Effect,
    EndTask,
    Event,
    Folded,
    FoldFailed,
    OpenRound,
    Stage,
    StartFold,
)
from fedpress_server.settings import Settings
from fedpress_strategies import Strategy, from_config

_RETRY_FOLD_AT_MOST = 60.0

T = TypeVar("T")
Clock = Callable[[], float]
Also = Callable[[Connection, float], None]
_log = logging.getLogger(__name__)


@dataclass
class _Task:
    """A task in memory. What changes is replaced under `lock`, after it is on the disk."""

    record: TaskRecord
    config: TaskConfig
    strategy: Strategy
    attempt: Attempt | None = None
    """None once the task has ended."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    folding: RoundKey | None = None
    """The attempt that is being folded, or was the last to be."""

    def tell(self) -> None:
        """Wake everybody who waits for news; the next news is another event."""
        self.news.set()
        self.news = asyncio.Event()

    def is_due(self, now: float) -> bool:
        return self.attempt is not None and self.attempt.is_due(now)

    @property
    def summary(self) -> TaskSummary:
        record = self.record
        return TaskSummary(
            task=record.task,
            state=record.state,
            model=record.model,
            spec=record.spec,
            round=record.round,
            rounds=record.rounds,
        )


class Coordinator:
    """One for a process. `start()` takes up every task where the disk says it stands."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        payloads: Payloads,
        key: DeviceKey,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._database = database
        self._payloads = payloads
        self._key = key
        self._metrics = metrics
        self._clock = clock
        self._tasks: dict[str, _Task] = {}
        self._creating = asyncio.Lock()
        self._threads = ThreadPoolExecutor(settings.worker_threads, "fedpress-fold")
        self._services: set[asyncio.Task[Any]] = set()
        """The ticker and the folds, which may be broken off."""
        self._running: set[asyncio.Task[Any]] = set()
        """What must come to its end, since disk and memory change in it together."""
        self._stopping = False

    # Life

    async def start(self) -> None:
        await self._database.read(lambda c: sweep(c, self._payloads))
        for record in await self._database.read(records.task_records):
            config = TaskConfig.model_validate_json(record.config)
            task = _Task(record, config, from_config(config.strategy))
            self._tasks[record.task] = task
            async with task.lock:
                await self._reload(task)
        self._spawn(self._tick_forever(), self._services)

    def release(self) -> None:
        """Answer every waiting check-in now: the server is about to stop."""
        self._stopping = True
        for task in self._tasks.values():
            task.tell()

    async def stop(self) -> None:
        """Leave everything as it is on the disk; a later `start` goes on from there."""
        self.release()
        for service in self._services:
            service.cancel()
        while left := self._services | self._running:
            await asyncio.gather(*left, return_exceptions=True)
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    async def tick(self) -> None:
        """Let every deadline pass that the clock has passed."""
        for task in list(self._tasks.values()):
            if task.is_due(self._clock()):
                try:
                    await self._apply(task, DeadlinePassed())
                except Exception:  # the next tick tries again
                    _log.exception("task %s: its deadline could not pass", task.record.task)

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(self._settings.tick_seconds)
            await self.tick()

    def _spawn(
        self, work: Coroutine[Any, Any, T], among: set[asyncio.Task[Any]] | None = None
    ) -> asyncio.Task[T]:
        group = self._running if among is None else among
        task = asyncio.create_task(work)
        group.add(task)
        task.add_done_callback(group.discard)
        return task

    async def _in_thread(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    # Tasks

    def task(self, name: str) -> TaskSummary:
        return self._task(name).summary

    def tasks(self) -> list[TaskSummary]:
        return [self._tasks[name].summary for name in sorted(self._tasks)]

    async def create_task(self, config: TaskConfig) -> TaskSummary:
        """Check all that can be checked and open round 1.

        Raises AlreadyExists, UnknownModel, or ConfigurationError with the reason.
        """
        if config.seed is None:
            config = config.model_copy(update={"seed": secrets.randbelow(2**63)})
        return await self._shielded(self._create_task(config))

    async def _create_task(self, config: TaskConfig) -> TaskSummary:
        async with self._creating:
            if config.task in self._tasks:
                raise AlreadyExists(f"there is a task {config.task!r} already")
            strategy = from_config(config.strategy)
            model = await self.model(config.model)
            spec = await self._spec(model.digest)
            now = self._clock()
            record = TaskRecord(
                task=config.task,
                config=config.model_dump_json(),
                state="running",
                model=model.digest,
                spec=model.spec,
                optimizer_state=None,
                round=0,
                rounds=config.rounds,
                max_body_bytes=0,
                created_at=now,
                ended_at=None,
            )
            task = _Task(record, config, strategy)
            attempt = opened(
                config,
                spec,
                self._payloads,
                model=model.digest,
                previous=model.digest,
                number=1,
                attempt=1,
                now=now,
            )
            bound = checked_bound(attempt.terms, self._settings.max_body_bytes)
            await self._in_thread(check_strategy, attempt.terms, strategy)
            task.record = replace(record, max_body_bytes=bound)

            def write(connection: Connection) -> None:
                records.add_task(connection, task.record)
                write_opening(connection, attempt, now)

            try:
                await self._database.write(write)
            except BaseException:
                written = await self._database.read(records.task_records)
                if any(record.task == config.task for record in written):
                    self._tasks[config.task] = task
                    await self._reload(task)
                raise
            task.attempt = attempt
            self._tasks[config.task] = task
        _log.info("task %s begins: %d rounds", config.task, config.rounds)
        return task.summary

    async def cancel(self, name: str, detail: str) -> TaskSummary:
        task = self._task(name)
        if not await self._apply(task, Cancelled(detail)):
            raise Conflict(f"task {name!r} is {task.record.state}", task=name)
        return task.summary

    async def abort_round(self, name: str, detail: str) -> TaskSummary:
        task = self._task(name)
        if not await self._apply(task, Aborted(detail)):
            raise Conflict(f"task {name!r} is {task.record.state}", task=name)
        return task.summary

    async def history(self, name: str) -> list[RoundStatus]:
        """Every attempt at every round, oldest first."""
        self._task(name)
        return await self._database.read(lambda c: records.round_history(c, name))

    async def round_status(self, name: str, number: int) -> RoundStatus:
        """The latest attempt at the round; raises UnknownRound."""
        self._task(name)
        found = await self._database.read(lambda c: records.round_history(c, name, number))
        if not found:
            raise UnknownRound(f"task {name!r} has no round {number}", task=name)
        return found[-1]

    async def evaluate(self, client_id: str, name: str, report: EvaluationReport) -> None:
        self._task(name)
        now = self._clock()

        def write(connection: Connection) -> None:
            if not records.has_model(connection, name, report.model):
                raise UnknownModel(f"task {name!r} has no model {report.model[:12]}")
            records.set_evaluation(
                connection,
                task=name,
                model=report.model,
                client_id=client_id,
                num_examples=report.num_examples,
                metrics=report.metrics,
                at=now,
            )

        await self._database.write(write)

    # Models

    async def model(self, digest: str) -> ModelRecord:
        """Raises UnknownModel."""
        found = await self._database.read(lambda c: records.model(c, digest))
        if found is None:
            raise UnknownModel(f"no model {digest[:12]} is on this server")
        return found

    async def add_model(self, data: bytes, digest: str) -> tuple[ModelRecord, bool]:
        """Keep a model that an operator brings; True if it is new. Raises ConfigurationError."""

        def store() -> str:
            spec = Model.from_bytes(data).spec.digest
            self._payloads.put(model_name(digest), data)
            return spec

        spec = await self._in_thread(store)
        record = ModelRecord(digest, spec, len(data), self._clock())
        is_new = await self._database.write(lambda c: records.add_model(c, record))
        return record, is_new

    def count_download(self, client_id: str, task: str, num_bytes: int) -> asyncio.Task[None]:
        """Book model bytes under the attempt for which the device fetched them, if there is one.

        Booked once the task is done, awaited or not.
        """
        self._metrics.download_bytes.inc(num_bytes)
        return self._spawn(self._book(self._downloader(client_id, task), num_bytes))

    async def _book(self, key: RoundKey | None, num_bytes: int) -> None:
        if key is None or not num_bytes:
            return
        try:
            await self._database.write(lambda c: records.count(c, key, download_bytes=num_bytes))
        except Exception:  # the device has its model all the same
            _log.exception("%d bytes sent could not be booked", num_bytes)

    def _downloader(self, client_id: str, task: str) -> RoundKey | None:
        found = self._tasks.get(task)
        if found is None or found.attempt is None:
            return None
        part = found.attempt.round.part_of(client_id)
        return found.attempt.key if part is not None and part[1].is_open else None

    # Devices

    async def check_in(
        self, client_id: str, name: str, request: CheckInRequest
    ) -> CheckInResponse | None:
        """News for the device, or None after `request.wait` seconds without any."""
        agreed_version(request.wire_versions)
        task = self._task(name)
        loop = asyncio.get_running_loop()
        until = loop.time() + request.wait
        while True:
            news = task.news
            answer = await self._look(task, client_id, request.pending)
            if answer is not None:
                return answer
            left = until - loop.time()
            if left <= 0 or self._stopping:
                return None
            try:
                with self._metrics.waiting.track_inprogress():
                    async with asyncio.timeout(left):
                        await news.wait()
            except TimeoutError:
                return None

    async def _look(
        self, task: _Task, client_id: str, pending: tuple[str, ...]
    ) -> CheckInResponse | None:
        assignment = await self._assignment_for(task, client_id)
        receipts = await self._receipts(client_id, pending)
        if receipts:
            # They are on the disk a moment before the task in memory has moved on with them.
            async with task.lock:
                pass
        if assignment is None and not receipts and task.record.state == "running":
            return None
        return CheckInResponse(
            task=task.summary,
            receipts=receipts,
            assignment=assignment,
            retry_after=self._settings.poll_seconds,
            server_time=self._clock(),
        )

    async def _assignment_for(self, task: _Task, client_id: str) -> Assignment | None:
        await self._pass_deadline(task)
        if task.attempt is not None and task.attempt.has_place_for(client_id):
            await self._apply(task, ClientCheckedIn(client_id, secrets.token_urlsafe(16)))
        found = task.attempt.assignment_of(client_id) if task.attempt else None
        return found

    async def _pass_deadline(self, task: _Task) -> None:
        """Let the deadline pass if it has, which ends the attempt or moves the deadline."""
        if task.is_due(self._clock()):
            await self._apply(task, DeadlinePassed())

    async def _receipts(
        self, client_id: str, pending: tuple[str, ...]
    ) -> tuple[SignedReceipt, ...]:
        """The receipts there are, oldest first.

        An id that is not this device's is passed over: a receipt for it would say what nobody
        knows. To ask for that very receipt, and to be told 404, settles it.
        """
        if not pending:
            return ()
        found, known = await self._database.read(lambda c: records.receipts(c, client_id, pending))
        strange = set(pending) - known
        if strange:
            _log.warning("client %s asks for %d assignments not its own", client_id, len(strange))
        return tuple(SignedReceipt.model_validate_json(text) for text in found)

    async def receipt(self, client_id: str, assignment: str) -> SignedReceipt | None:
        """None while the assignment is open. Raises UnknownAssignment or Forbidden."""
        record = await self.assignment(client_id, assignment)
        return SignedReceipt.model_validate_json(record.receipt) if record.receipt else None

    async def decline(self, client_id: str, assignment: str) -> SignedReceipt:
        """Give an assignment back; the receipt it had already if it was settled.

        Raises Conflict once there is an upload.
        """
        record = await self.assignment(client_id, assignment)
        if record.receipt is None:
            await self._apply(self._task(record.task), Declined(assignment), key=record.key)
        receipt = await self.receipt(client_id, assignment)
        if receipt is None:
            raise Conflict(
                "the assignment has an upload already", hint="wait for its receipt instead"
            )
        return receipt

    async def assignment(self, client_id: str, name: str) -> AssignmentRecord:
        """Raises UnknownAssignment, or Forbidden for another device's."""
        record = await self._database.read(lambda c: records.assignment(c, name))
        if record is None:
            raise UnknownAssignment(f"no assignment {name[:64]!r}")
        if record.client_id != client_id:
            raise Forbidden("the assignment is another device's")
        return record

    async def takes_upload(self, assignment: AssignmentRecord) -> RoundTerms | None:
        """The terms of the upload that this assignment still awaits."""
        task = self._task(assignment.task)
        await self._pass_deadline(task)
        attempt = task.attempt
        if attempt is None or attempt.key != assignment.key:
            return None
        is_awaited = attempt.takes_upload(assignment.assignment, self._clock())
        return attempt.terms if is_awaited else None

    def max_body_bytes(self, task: str) -> int:
        """The largest upload of any of the task's rounds."""
        return self._task(task).record.max_body_bytes

    # Events

    def _task(self, name: str) -> _Task:
        try:
            return self._tasks[name]
        except KeyError:
            raise UnknownTask(f"no task {name[:64]!r}") from None

    async def _shielded(self, work: Coroutine[Any, Any, T]) -> T:
        """Memory and disk change together even if whoever asked goes away."""
        return await asyncio.shield(self._spawn(work))

    async def apply(
        self, task: str, event: Event, key: RoundKey, also: Also | None = None
    ) -> tuple[Effect, ...]:
        """Let `event` happen to the attempt `key`, and write `also` in the same transaction.

        No effects: nothing happened, and nothing was written.
        """
        return await self._apply(self._task(task), event, key=key, also=also)

    async def _apply(
        self,
        task: _Task,
        event: Event,
        *,
        key: RoundKey | None = None,
        also: Also | None = None,
        result: FoldResult | None = None,
    ) -> tuple[Effect, ...]:
        """As `apply`, to whatever attempt is open if there is no `key`."""
        return await self._shielded(self._apply_now(task, event, key, also, result))

    async def _apply_now(
        self,
        task: _Task,
        event: Event,
        key: RoundKey | None,
        also: Also | None,
        result: FoldResult | None,
    ) -> tuple[Effect, ...]:
        async with task.lock:
            if (
                task.attempt
                and task.attempt.is_due(self._clock())
                and not isinstance(event, DeadlinePassed)
            ):
                await self._step(task, task.attempt, DeadlinePassed())
            if task.attempt is None or key not in (None, task.attempt.key):
                return ()
            return await self._step(task, task.attempt, event, also, result)

    async def _step(
        self,
        task: _Task,
        attempt: Attempt,
        event: Event,
        also: Also | None = None,
        result: FoldResult | None = None,
    ) -> tuple[Effect, ...]:
        now = self._clock()
        after, effects = attempt.after(event, now)
        if not effects:
            return ()
        record, follows = self._consequences(task, attempt, effects, now, result)

        def write(connection: Connection) -> None:
            if result is not None:
                made = ModelRecord(result.model, result.spec, result.num_bytes, now)
                records.add_model(connection, made)
            write_step(connection, after, event, effects, now, key=self._key, result=result)
            if also is not None:
                also(connection, now)
            if record is not task.record:
                records.set_task(connection, record)
            if follows is not None:
                write_opening(connection, follows, now)

        try:
            await self._database.write(write)
        except BaseException:
            # Whether it is on the disk or not: what the disk says, goes.
            await self._reload(task)
            raise
        replaced, task.record = task.record.optimizer_state, record
        if replaced != record.optimizer_state:
            self._drop_state(task, replaced)
        if after.round.is_over:
            task.attempt = follows
            self._end_attempt(task, after)
        else:
            task.attempt = after
        if StartFold() in effects:
            self._start_fold(task, after)
        if any(not isinstance(effect, Assign | Stage) for effect in effects):
            task.tell()
        return effects

    def _consequences(
        self,
        task: _Task,
        attempt: Attempt,
        effects: tuple[Effect, ...],
        now: float,
        result: FoldResult | None,
    ) -> tuple[TaskRecord, Attempt | None]:
        """The task after an attempt's step, and the attempt that follows if it was the last."""
        record, follows = task.record, None
        if result is not None:
            record = replace(
                record,
                model=result.model,
                optimizer_state=result.optimizer_state,
                round=attempt.round.number,
            )
        for effect in effects:
            match effect:
                case EndTask(state):
                    record = replace(record, state=state, ended_at=now)
                case OpenRound(number, again):
                    plan = attempt.terms.plan
                    follows = opened(
                        task.config,
                        attempt.terms.spec,
                        self._payloads,
                        model=record.model,
                        previous=plan.previous_model if result is None else plan.model,
                        number=number,
                        attempt=again,
                        now=now,
                    )
                case _:
                    pass
        return record, follows

    def _end_attempt(self, task: _Task, ended: Attempt) -> None:
        name, number, attempt = ended.key
        self._metrics.rounds.labels(name, ended.round.phase).inc()
        self._metrics.round_number.labels(name).set(task.record.round)
        why = f": {ended.round.reason}" if ended.round.reason else ""
        _log.info("task %s round %d.%d %s%s", name, number, attempt, ended.round.phase, why)
        if task.record.state != "running":
            _log.info("task %s is %s", name, task.record.state)
        # The rows stay, and with them the answers to repeated requests; the bytes have done
        # their work.
        self._spawn(self._in_thread(self._payloads.drop, uploads_folder(ended.key)))

    def _drop_state(self, task: _Task, digest: str | None) -> None:
        """Remove an optimizer state that `task` has replaced, unless another may lead to it.

        A fold that is under way may be making the very same; what stays for it, the next start
        sweeps. Nothing else may come in between, so this is not left to a thread.
        """
        others = [other for other in self._tasks.values() if other is not task]
        if digest is None or any(
            other.record.optimizer_state == digest
            or (other.attempt is not None and other.attempt.round.phase == "folding")
            for other in others
        ):
            return
        try:
            self._payloads.drop(optimizer_name(digest))
        except OSError:  # the step is on the disk already
            _log.exception("the optimizer state %s could not be removed", digest)

    async def _reload(self, task: _Task) -> None:
        """Make memory what the disk says."""
        name = task.record.task
        task.record = await self._database.read(lambda c: records.task_record(c, name))
        if task.record.state != "running":
            task.attempt = None
            return
        spec = task.attempt.terms.spec if task.attempt else await self._spec(task.record.model)
        task.attempt = await self._database.read(
            lambda c: reopened(c, task.config, spec, self._payloads)
        )
        self._metrics.round_number.labels(name).set(task.record.round)
        if task.attempt.round.phase == "folding":
            self._start_fold(task, task.attempt)

    async def _spec(self, digest: str) -> ModelSpec:
        def load() -> ModelSpec:
            return Model.from_bytes(self._payloads.get(model_name(digest))).spec

        return await self._in_thread(load)

    # The fold

    def _start_fold(self, task: _Task, attempt: Attempt) -> None:
        if task.folding != attempt.key and not self._stopping:
            task.folding = attempt.key
            self._spawn(self._fold(task, attempt), self._services)

    async def _fold(self, task: _Task, attempt: Attempt) -> None:
        key = attempt.key
        job = FoldJob(attempt.terms, task.strategy, task.record.optimizer_state, attempt.staged)
        pause = 1.0
        while task.attempt is not None and task.attempt.key == key:
            try:
                await self._fold_once(task, key, job)
                return
            except Exception:
                # The disk may be full or away for a while: the uploads are safe, so try again.
                _log.exception("task %s round %d.%d could not be folded yet", *key)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _RETRY_FOLD_AT_MOST)

    async def _fold_once(self, task: _Task, key: RoundKey, job: FoldJob) -> None:
        event: Event
        result: FoldResult | None = None
        with self._metrics.fold_seconds.labels(key[0]).time():
            try:
                result = await self._in_thread(fold, job, self._payloads)
                event = Folded(result.model)
            except (Unavailable, OSError, MemoryError):
                raise
            except Exception as exc:
                _log.exception("task %s round %d.%d cannot be folded", *key)
                event = FoldFailed(f"the fold failed: {exc}")
        await self._apply(task, event, key=key, result=result)
