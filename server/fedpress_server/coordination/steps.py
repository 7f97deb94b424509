"""The step that writes: an event, all that follows from it, and then the memory that it changes.

Each event is written in one transaction with all that follows from it, before anybody is told; the
attempt in memory is a value that is replaced after the commit. A restart replays the events, so
there is nothing to save when the server stops, and nothing to lose when it is killed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TypeVar

from sqlalchemy.engine import Connection

from fedpress_compression.tensors import ModelSpec
from fedpress_protocols.errors import FedpressError, Unavailable, UnknownTask
from fedpress_protocols.messages import TaskConfig
from fedpress_protocols.model import Model
from fedpress_server.coordination.attempts import Attempt
from fedpress_server.coordination.background import Background
from fedpress_server.coordination.batches import jobs_of
from fedpress_server.coordination.figures import Phases
from fedpress_server.coordination.journal import (
    continued,
    kept_out,
    reopened,
    write_opening,
    write_step,
)
from fedpress_server.coordination.live import LiveTask
from fedpress_server.coordination.opening import Legacy, Told, opened, told_before
from fedpress_server.coordination.turns import (
    TOGETHER,
    Received,
    Wish,
    may_wait,
    note_delivered,
    turn_of,
)
from fedpress_server.folds.folding import FoldResult
from fedpress_server.folds.masked import Host, Message, Sums
from fedpress_server.identity import audit
from fedpress_server.metrics import Metrics
from fedpress_server.registry import restores
from fedpress_server.registry import versions as registry
from fedpress_server.registry.sweeping import sweep_bases
from fedpress_server.rounds import (
    Assign,
    Cancelled,
    DeadlinePassed,
    Effect,
    EndTask,
    Event,
    Folded,
    Keep,
    OpenRound,
    Queue,
    Stage,
    StageFirst,
)
from fedpress_server.storage import leases, records
from fedpress_server.storage.database import Database
from fedpress_server.storage.files import artefact_name, model_name
from fedpress_server.storage.leases import LeaseLost
from fedpress_server.storage.payloads import Payloads
from fedpress_server.storage.records import ModelRecord, RoundKey, TaskRecord
from fedpress_strategies import Strategy

T = TypeVar("T")
Clock = Callable[[], float]
Also = Callable[[Connection, float], None]
_QUIET = Assign | Stage | StageFirst | Queue | Keep
"""Effects that are news for nobody else."""

_log = logging.getLogger(__name__)


class Moved(Exception):
    """Another server has written to the task since memory was like the disk."""


class Steps:
    """The tasks in memory, and the one way to change them.

    Memory is a copy. What the disk has is told apart by one number, the task's version: every write
    claims the version that memory has, and where the disk is ahead nothing is written, the newer
    events are replayed, and the event is tried again or found to have no place.
    """

    def __init__(
        self,
        database: Database,
        payloads: Payloads,
        host: Host,
        metrics: Metrics,
        background: Background,
        clock: Clock,
        lease_time: Callable[[Connection], float],
        *,
        is_shared: bool,
    ) -> None:
        """`lease_time` is the one clock of all workers' leases; `is_shared`: whether other servers
        may write to the same database."""
        self.tasks: dict[str, LiveTask] = {}
        self.left_files_at: float | None = None
        """When the first of the files were left that wait for the sweeper."""
        self.sums = Sums()
        self.phases = Phases(metrics)
        self.is_shared = is_shared
        self.lease_time = lease_time
        self.epoch: str | None = None
        """Of the last restore that the records have been through."""
        self.live: Callable[[TaskRecord], LiveTask]
        self.look_for_work: Callable[[LiveTask], None] = lambda task: None
        """Told of every task that may have come to a fold or a basis."""
        self._database = database
        self._payloads = payloads
        self._host = host
        self._metrics = metrics
        self._background = background
        self._clock = clock

    def get(self, name: str) -> LiveTask:
        """The task as memory has it; raises UnknownTask."""
        try:
            return self.tasks[name]
        except KeyError:
            raise UnknownTask(f"no task {name[:64]!r}") from None

    async def fresh(self, name: str) -> LiveTask:
        """The task as the disk has it now; raises UnknownTask."""
        if not self.is_shared:
            return self.get(name)
        version = await self._database.read(lambda c: records.task_version(c, name))
        if version is None:
            raise UnknownTask(f"no task {name[:64]!r}")
        return await self._at_least(name, version)

    async def follow(self) -> None:
        """Catch up with whatever other servers have written."""
        for name, version in (await self._database.read(records.task_versions)).items():
            try:
                await self._at_least(name, version)
            except Unavailable:
                raise
            except Exception:  # one task that cannot be read keeps nobody from the others
                _log.exception("task %s cannot be followed", name)

    async def _at_least(self, name: str, version: int) -> LiveTask:
        if name not in self.tasks:
            record = await self._database.read(lambda c: records.task_record(c, name))
            found = self.live(record)
            await self._catch_up(found)  # nobody sees it before it is whole
            self.tasks.setdefault(name, found)
        task = self.tasks[name]
        if task.record.version < version:
            async with task.lock:
                if task.record.version < version:  # or whoever had the lock before has caught up
                    await self._catch_up(task)
        return task

    async def alone(self, task: LiveTask, work: Callable[[], Awaitable[T]]) -> T:
        """What `work` comes to under the task's lock; begun again with what is on the disk each
        time that another server has written in between."""
        async with task.lock:
            while True:
                try:
                    return await work()
                except Moved:
                    await self._catch_up(task)

    async def write(self, task: LiveTask, work: Callable[[Connection], None]) -> int:
        """Let `work` write what changes the task, and return the version that this makes.

        Raises Moved if the disk is ahead of memory, and then nothing was written; after any other
        failure memory is what the disk says. `work` may be run more than once.
        """
        name, version = task.record.task, task.record.version

        def claimed(connection: Connection) -> None:
            if not records.claim_task(connection, name, version):
                raise Moved(name)
            work(connection)
            self._database.notify(connection, name)

        try:
            await self._database.write(claimed)
        except (Moved, LeaseLost):
            raise
        except BaseException:
            # Whether it is on the disk or not: what the disk says, goes.
            await self.reload(task)
            raise
        return version + 1

    async def apply(
        self,
        task: str,
        event: Event,
        key: RoundKey,
        also: Also | None = None,
        said: Message | None = None,
    ) -> tuple[Effect, ...]:
        """Let `event` happen to the attempt `key`, and write `also` in the same transaction.

        `said` is the message of the event `Said`. No effects: nothing happened, and nothing was
        written. Raises what the session has against the message.
        """
        return await self.happen(self.get(task), event, key=key, also=also, said=said)

    async def happen(
        self,
        task: LiveTask,
        event: Event,
        *,
        key: RoundKey | None = None,
        also: Also | None = None,
        result: FoldResult | None = None,
        said: Message | None = None,
    ) -> tuple[Effect, ...]:
        """As `apply`, to whatever attempt is open if there is no `key`."""

        if may_wait(event) and said is None and result is None:
            wish = Wish(event, key, also, asyncio.get_running_loop().create_future())
            task.wishes.append(wish)
            if not task.is_granting:
                task.is_granting = True
                self._background.finish(self._grant_all(task), on_behalf_of_all=True)
            return await wish.outcome

        async def now() -> tuple[Effect, ...]:
            attempt = task.attempt
            if attempt and attempt.is_due(self._clock()) and not isinstance(event, DeadlinePassed):
                await self.step(task, attempt, DeadlinePassed())
            if task.attempt is None or not task.attempt.concerns(event, key):
                return await self._no_place(task)
            try:
                effects = await self.step(task, task.attempt, event, also, result, said)
            except FedpressError:
                await self._no_place(task)
                raise
            return effects or await self._no_place(task)

        return await self._background.shielded(self.alone(task, now))

    async def _grant_all(self, task: LiveTask) -> None:
        """Grant the wishes of a task as long as there are any, those that wait together."""
        try:
            while task.wishes:
                wishes = list(islice(task.wishes, TOGETHER))
                try:
                    granted = await self.alone(task, partial(self._grant, task, wishes))
                except Exception as exc:
                    granted = wishes
                    for wish in wishes:
                        wish.fail(exc)
                for _ in granted:
                    task.wishes.popleft()
        finally:
            task.is_granting = False

    async def _grant(self, task: LiveTask, wishes: Sequence[Wish]) -> Sequence[Wish]:
        """Grant the first of `wishes`, and return which; to be called under `alone`."""
        now, attempt = self._clock(), task.attempt
        if attempt is not None and attempt.is_due(now):
            await self.step(task, attempt, DeadlinePassed())
            attempt = task.attempt
        turn = turn_of(attempt, wishes, now)
        if attempt is not None and not turn.outcomes:
            return await self._grant_alone(task, wishes[:1])
        if len(turn.taken) < len(turn.outcomes):
            await self._no_place(task)
        granted = [wish for wish, _, _ in turn.outcomes]
        if attempt is not None and turn.taken:
            try:
                version = await self.write(task, lambda connection: turn.write(connection, now))
            except FedpressError as exc:
                if exc.status >= 500 or len(granted) == 1:
                    raise
                return await self._grant_alone(task, granted)  # it concerns one of them
            task.record = replace(task.record, version=version)
            task.attempt = turn.after
            self._tell(task, attempt, tuple(e for _, _, each in turn.taken for e in each))
        for wish, _, effects in turn.outcomes:
            wish.grant(effects)
        return granted

    async def _grant_alone(self, task: LiveTask, wishes: Sequence[Wish]) -> Sequence[Wish]:
        """Grant `wishes` each by itself."""
        for wish in wishes:
            if wish.outcome.done():
                continue  # before another server's write came in between
            attempt = task.attempt
            try:
                wish.grant(await self._alone_of(task, attempt, wish))
            except FedpressError as exc:
                wish.fail(exc)
        return wishes

    async def _alone_of(
        self, task: LiveTask, attempt: Attempt | None, wish: Wish
    ) -> tuple[Effect, ...]:
        if attempt is None or not attempt.concerns(wish.event, wish.key):
            return await self._no_place(task)
        try:
            effects = await self.step(task, attempt, wish.event, wish.also)
        except FedpressError:
            await self._no_place(task)
            raise
        return effects or await self._no_place(task)

    async def _no_place(self, task: LiveTask) -> tuple[Effect, ...]:
        """What has no place in the attempt that memory has may have one in the newest."""
        if self.is_shared:
            name, version = task.record.task, task.record.version
            if await self._database.read(lambda c: records.task_version(c, name)) != version:
                raise Moved(name)
        return ()

    async def step(
        self,
        task: LiveTask,
        attempt: Attempt,
        event: Event,
        also: Also | None = None,
        result: FoldResult | None = None,
        said: Message | None = None,
    ) -> tuple[Effect, ...]:
        """To be called under `alone`, which repeats it where it raises Moved."""
        now = self._clock()
        if attempt.round.is_masked and attempt.session is None:
            # A session may begin with it.
            await self._background.in_thread(lambda: attempt.terms.payload)
        if said is not None and not attempt.admits(event, said, now):
            return ()
        after, effects = attempt.after(event, now, said.message if said is not None else None)
        if not effects:
            return ()
        told = await self._told(task, attempt, event, effects)
        record, follows = self._consequences(task, attempt, effects, now, result, told)
        if isinstance(event, Folded):
            record = replace(record, best=event.best)
        if record.state != "running":
            record = replace(record, reason=after.round.reason)
        begun: tuple[Effect, ...] = ()
        opening = next((each.opening for each in effects if isinstance(each, OpenRound)), None)
        if follows is not None and opening is not None:
            follows, begun = follows.taking_over(attempt, opening, now)

        if follows is not None and follows.round.is_masked:
            ended, begins = after.session, follows
            follows = await self._database.read(
                lambda c: kept_out(c, begins, None if ended is None else ended.status)
            )
        is_held = False

        def write(connection: Connection) -> None:
            nonlocal is_held
            gives_up = after.round.is_over or record is not task.record
            is_held = gives_up and restores.is_held(connection, now)
            key = self._host.keys.current
            if result is not None:
                made = {result.model: result.num_bytes, **dict(result.published.values())}
                for digest, num_bytes in made.items():
                    records.add_model(connection, ModelRecord(digest, result.spec, num_bytes, now))
                registry.keep_again(connection, self._payloads, made)
                self._add_version(connection, record, after, result, now)
            written = partial(write_step, connection, key=key, epoch=self.epoch)
            written(after, event, effects, now, result=result)
            if also is not None:
                also(connection, now)
            if isinstance(also, Received) and after.round.chooses:
                note_delivered(connection, [also], now)
            self._write_jobs(connection, task.strategy, attempt, after)
            if record is not task.record:
                records.set_task(connection, record)
            if record.state != task.record.state and not isinstance(event, Cancelled):
                told = {"state": record.state, "reason": record.reason or ""}
                audit.add(connection, now, audit.SERVER, "task.ended", record.task, **told)
            self._note_disturbed(connection, after, now)
            if after.round.is_over and follows is None:
                records.drop_bases(connection, record.task)
            if follows is not None:
                write_opening(connection, follows, now)
                if opening is not None:
                    written(follows, opening, begun, now, result=None)
                self._write_jobs(connection, task.strategy, None, follows)

        version = await self.write(task, write)
        files = task.files
        if result is not None:
            files |= {artefact_name(digest) for digest in result.artefacts}
        task.record = replace(record, version=version)
        task.attempt = follows if after.round.is_over else after
        self.phases.wrote(task.record.task, attempt, after, now)
        self.phases.saw(task.record.task, task.attempt, now, began=True)
        self.drop_files(task, files - task.files, is_held=is_held)
        if after.round.is_over and "own" in after.terms.plan.needs:
            if is_held or not self._drops_at_once:
                self._leave_files()
            else:
                # Nor is this left to a thread: the next fold may be writing there.
                bases = follows.terms.bases if follows is not None else {}
                sweep_bases(self._payloads, task.record.task, bases)
        if after.round.is_over:
            self._end_attempt(task, after, follows, keeps_files=is_held)
        self._tell(task, attempt, effects)
        return effects

    @staticmethod
    def _add_version(
        connection: Connection, record: TaskRecord, after: Attempt, result: FoldResult, now: float
    ) -> None:
        parts = after.round.parts.values()
        registry.add_version(
            connection,
            record,
            version=after.round.number,
            attempt=after.key[2],
            model=result.model,
            parent=after.terms.plan.model,
            published={name: digest for name, (digest, _) in result.published.items()},
            updates=[part.upload for part in parts if part.reason == "included" and part.upload],
            now=now,
        )

    @staticmethod
    def _note_disturbed(connection: Connection, after: Attempt, now: float) -> None:
        """In the audit log: whom the attempt's session named, once it is over."""
        if not after.round.is_over or after.session is None:
            return
        if suspects := after.session.status.suspects:
            audit.add(
                connection,
                now,
                audit.SERVER,
                "session.disturbed",
                after.key[0],
                round=after.round.number,
                attempt=after.round.attempt,
                clients=list(suspects),
            )

    def _write_jobs(
        self, connection: Connection, strategy: Strategy, before: Attempt | None, after: Attempt
    ) -> None:
        """The jobs that an attempt has come to, or none once it is past them."""
        due = jobs_of(after, strategy)
        if before is not None and jobs_of(before, strategy) and not due:
            leases.drop(connection, after.key)
        elif due and (before is None or before.round.phase != after.round.phase):
            leases.add(connection, due, self.lease_time(connection))

    def _tell(self, task: LiveTask, before: Attempt | None, effects: tuple[Effect, ...]) -> None:
        """Wake whoever waits for what changed since `before`."""
        self.look_for_work(task)
        after = task.attempt
        is_other = before is None or after is None or before.key != after.key
        is_news = is_other or any(not isinstance(each, _QUIET) for each in effects)
        if before is not None and after is not None and not is_other:
            is_news |= after.session_phase != before.session_phase
            is_news |= before.round.places_left <= 0 < after.round.places_left
        if is_news:
            task.tell()

    async def _told(
        self, task: LiveTask, attempt: Attempt, event: Event, effects: tuple[Effect, ...]
    ) -> Told:
        """See `opening.told_before`, of the round that opens, if one does."""
        opens = next((each for each in effects if isinstance(each, OpenRound)), None)
        if opens is None:
            return Told()
        config, spec, board = task.config, attempt.terms.spec, task.scoreboard
        return await self._database.read(
            lambda c: told_before(c, config, spec, board, opens, event)
        )

    def _consequences(
        self,
        task: LiveTask,
        attempt: Attempt,
        effects: tuple[Effect, ...],
        now: float,
        result: FoldResult | None,
        told: Told,
    ) -> tuple[TaskRecord, Attempt | None]:
        """The task after an attempt's step, and the attempt that follows if it was the last."""
        record, follows = task.record, None
        if result is not None:
            record = replace(
                record,
                model=result.model,
                optimizer_state=result.optimizer_state,
                published={name: digest for name, (digest, _) in result.published.items()},
                round=attempt.round.number,
            )
        for effect in effects:
            match effect:
                case EndTask(state):
                    record = replace(record, state=state, ended_at=now)
                case OpenRound(number, again):
                    follows = opened(
                        task.config,
                        task.strategy,
                        self._payloads,
                        self._host,
                        left=Legacy.after(attempt.terms, result, told),
                        number=number,
                        attempt=again,
                        now=now,
                    )
                case _:
                    pass
        return record, follows

    def _end_attempt(
        self, task: LiveTask, ended: Attempt, follows: Attempt | None, *, keeps_files: bool
    ) -> None:
        name, number, attempt = ended.key
        if follows is not None and follows.course is not None:
            self._metrics.follow(name, follows.course)
            for warning in follows.course.warnings:
                _log.warning("task %s round %d: %s", name, follows.round.number, warning)
        self._metrics.rounds.labels(name, ended.round.phase).inc()
        self._metrics.round_number.labels(name).set(task.record.round)
        why = f": {ended.round.reason}" if ended.round.reason else ""
        _log.info("task %s round %d.%d %s%s", name, number, attempt, ended.round.phase, why)
        if task.record.state != "running":
            _log.info("task %s is %s", name, task.record.state)
        self.sums.drop(ended.key)
        for part in ended.round.parts.values():
            if ended.round.is_asynchronous and part.reason == "included":
                self._metrics.staleness.labels(name).observe(ended.round.staleness(part))
        if ended.session is not None:
            for step, lost in ended.session.silent.items():
                self._metrics.dropped_out.labels(name, step).inc(lost)
            status = ended.session.status
            self._metrics.session_seconds.labels(name).observe(status.seconds or 0.0)
            self._metrics.session_failures.labels(name).inc(len(status.failures))
            self._metrics.session_suspects.labels(name).inc(len(status.suspects))
            if status.suspects:
                _log.warning(
                    "task %s round %d.%d: disturbed by %s, left out of the next sessions",
                    *ended.key,
                    ", ".join(status.suspects),
                )
            elif status.failures:
                _log.warning(
                    "task %s round %d.%d: shares could not be opened, either may be at fault: %s",
                    *ended.key,
                    ", ".join(f"{one} of {other}" for one, other in status.failures),
                )
        # The rows stay, and with them the answers to repeated requests; the bytes have done
        # their work.
        if keeps_files:
            self._leave_files()
        for spent in () if keeps_files else ended.spent(follows):
            self._background.finish(self._background.in_thread(self._payloads.drop, spent))

    def _leave_files(self) -> None:
        """To the sweeper."""
        if self.left_files_at is None:
            self.left_files_at = self._clock()

    @property
    def _drops_at_once(self) -> bool:
        """Where other servers write, their tasks may come to lead to the very same file; and no
        step waits for a network. There it is left to the sweeper."""
        return not self.is_shared and self._payloads.is_local

    def drop_files(self, task: LiveTask, files: set[str], *, is_held: bool) -> None:
        """Remove what `task` led to and has replaced, unless another may lead to it; left to the
        sweeper if it is held by a backup under way, see restores.py.

        A fold that is under way may be making the very same; what stays for it, the next start
        sweeps. Nothing else may come in between, so this is not left to a thread.
        """
        if is_held or not self._drops_at_once:
            if files:
                self._leave_files()
            return
        others = [other for other in self.tasks.values() if other is not task]
        if any(each.attempt and each.attempt.round.phase == "folding" for each in others):
            return
        for name in files.difference(*(other.files for other in others)):
            try:
                self._payloads.drop(name)
            except OSError:  # the step is on the disk already
                _log.exception("%s could not be removed", name)

    async def recover_jobs(self, task: LiveTask) -> None:
        """See to it that what the task has come to is among the jobs: an earlier release had
        none."""

        async def now() -> None:
            attempt = task.attempt
            due = [] if attempt is None else jobs_of(attempt, task.strategy)

            def is_there(connection: Connection) -> bool:
                return leases.are_there(connection, due)

            if due and not await self._database.read(is_there):
                version = await self.write(task, lambda c: leases.add(c, due, self.lease_time(c)))
                task.record = replace(task.record, version=version)

        await self._background.shielded(self.alone(task, now))

    async def reload(self, task: LiveTask) -> None:
        """Make memory what the disk says, whatever memory says. To be called under the lock."""
        await self._catch_up(task, anew=True)

    async def _catch_up(self, task: LiveTask, *, anew: bool = False) -> None:
        """Take up what the disk has and memory has not: the newer events, or another attempt; or
        all, `anew`."""
        name, held = task.record.task, task.attempt
        spec = held.terms.spec if held is not None else await self.spec(task.record.model)
        known = None if anew else held
        found = await self._database.read(partial(self._newest, name, known, spec))
        task.record, task.attempt, effects = found
        task.config = TaskConfig.model_validate_json(task.record.config)
        self._metrics.round_number.labels(name).set(task.record.round)
        self.phases.saw(name, task.attempt, self._clock(), began=held is not None and not anew)
        if held is not None and (task.attempt is None or task.attempt.key != held.key):
            self.sums.drop(held.key)
        self._tell(task, held, effects)

    def _newest(
        self, name: str, held: Attempt | None, spec: ModelSpec, connection: Connection
    ) -> tuple[TaskRecord, Attempt | None, tuple[Effect, ...]]:
        """Of one version of the task, also where every statement has a view of its own."""
        while True:
            record = records.task_record(connection, name)
            self._host.keys.read(connection)
            config = TaskConfig.model_validate_json(record.config)
            attempt, effects = None, tuple[Effect, ...]()
            try:
                if record.state == "running":
                    newest = records.newest_round(connection, name)
                    if held is not None and held.key[1:] == (newest.round, newest.attempt):
                        attempt, effects = continued(connection, held)
                    else:
                        attempt = reopened(connection, config, spec, self._payloads, self._host)
            except KeyError:
                if records.task_version(connection, name) == record.version:
                    raise
                continue
            if records.task_version(connection, name) == record.version:
                return record, attempt, effects

    async def spec(self, digest: str) -> ModelSpec:
        def load() -> ModelSpec:
            return Model.from_bytes(self._payloads.get(model_name(digest))).spec

        return await self._background.in_thread(load)

    async def pass_deadline(self, task: LiveTask) -> None:
        """Let the deadline pass if it has, which ends the attempt or moves the deadline."""
        if task.is_due(self._clock()):
            await self.happen(task, DeadlinePassed())
