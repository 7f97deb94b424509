"""The tasks of a server, and the only way to change them: `apply(task, command)`.

    outcome = await store.apply(task, Happen(UploadStaged(...), key, ReceivedUpload(...)))

Commands of a task that wait together are one batch. Theory of operation:

1. `apply` puts the command into the task's queue, and awaits its outcome. Whoever finds the queue
   idle starts to drain it.
2. Under the task's lock the planner makes one step of each command in turn, each from the task as
   the steps before it leave it. Nothing is written. A command without a place has no step; one that
   the task refuses fails alone. A batch ends early behind a step that ends an attempt, and before a
   command that reads rows which the batch has yet to write.
3. One transaction claims the task's version and writes all the steps (`Journal.write`): a commit
   costs the same for one as for many. If another server was first, StaleVersion: nothing was
   written, memory catches up by replay, and the same commands are planned again.
4. Memory is replaced, whoever waits is told, and each command has its outcome.

Memory is a copy. There is nothing to save when the server stops, and nothing to lose when it is
killed; a restart replays the events.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice

from sqlalchemy.engine import Connection

from fedpress_compression.tensors import ModelSpec
from fedpress_protocols.errors import AlreadyExists, FedpressError, Unavailable, UnknownTask
from fedpress_protocols.messages import TaskConfig
from fedpress_server.coordination.background import Background
from fedpress_server.coordination.commands import Command, Create, Happen, Outcome
from fedpress_server.coordination.journal import Journal
from fedpress_server.coordination.live import LiveTask, Memory, PendingCommand
from fedpress_server.coordination.planner import Planner
from fedpress_server.coordination.publisher import Publisher
from fedpress_server.coordination.steps import Batch
from fedpress_server.rounds import DeadlinePassed, Restored
from fedpress_server.storage import records
from fedpress_server.storage.batched import Batched
from fedpress_server.storage.database import Database
from fedpress_server.storage.leases import LeaseLost
from fedpress_server.storage.payloads import Payloads
from fedpress_server.storage.records import TaskRecord

BATCH = 64
"""Commands that one transaction takes at most."""

_log = logging.getLogger(__name__)


def _unknown(name: str) -> UnknownTask:
    return UnknownTask(f"no task {name[:64]!r}", hint="fedpress task list shows the tasks")


class StaleVersion(Exception):
    """Another server has written to the task since memory was like the disk."""


class TaskStore:
    """The tasks of this process, and the way to change one."""

    def __init__(
        self,
        memory: Memory,
        database: Database,
        payloads: Payloads,
        journal: Journal,
        planner: Planner,
        publisher: Publisher,
        background: Background,
        clock: Callable[[], float],
        *,
        is_shared: bool,
    ) -> None:
        """`is_shared`: whether other servers may write to the same database."""
        self.is_shared = is_shared
        self.memory = memory
        self._database = database
        self._payloads = payloads
        self._journal = journal
        self._planner = planner
        self._publisher = publisher
        self._background = background
        self._clock = clock
        self._version = Batched(self._versions_of)

    # Reading

    @property
    def tasks(self) -> dict[str, LiveTask]:
        """Every task in memory, by name."""
        return self.memory.tasks

    def get(self, name: str) -> LiveTask:
        """The task as memory has it; raises UnknownTask."""
        try:
            return self.tasks[name]
        except KeyError:
            raise _unknown(name) from None

    async def fresh(self, name: str) -> LiveTask:
        """The task as the disk has it now; raises UnknownTask."""
        if not self.is_shared:
            return self.get(name)
        version = await self._version(name)
        if version is None:
            raise _unknown(name)
        return await self._at_least(name, version)

    async def _versions_of(self, names: Sequence[str]) -> list[int | None]:
        """On the disk, of each of these tasks; None for one that is not there."""
        distinct = set(names)

        def read(connection: Connection) -> dict[str, int]:
            if len(distinct) > 1:
                return records.task_versions(connection)
            (name,) = distinct
            version = records.task_version(connection, name)
            return {} if version is None else {name: version}

        versions = await self._database.read(read, snapshot=False)
        return [versions.get(name) for name in names]

    async def follow(self) -> None:
        """Catch up with whatever other servers have written."""
        versions = await self._database.read(records.task_versions, snapshot=False)
        for name, version in versions.items():
            try:
                await self._at_least(name, version)
            except Unavailable:
                raise
            except Exception:  # one task that cannot be read keeps nobody from the others
                _log.exception("task %s cannot be followed", name)

    async def load(self, record: TaskRecord) -> LiveTask:
        """Take up the task of this row where the disk says it stands."""
        self.tasks[record.task] = task = self.memory.task_of(record)
        async with task.lock:
            await self._catch_up(task, anew=True)
        return task

    async def _at_least(self, name: str, version: int) -> LiveTask:
        if name not in self.tasks:
            record = await self._database.read(lambda c: records.task_record(c, name))
            task = self.memory.task_of(record)
            await self._catch_up(task)  # nobody sees it before it is whole
            self.tasks.setdefault(name, task)
        task = self.tasks[name]
        if task.record.version < version:
            async with task.lock:
                if task.record.version < version:  # or whoever had the lock before has caught up
                    await self._catch_up(task)
        return task

    # Writing

    async def apply(self, task: LiveTask, command: Command) -> Outcome:
        """Let `command` happen; it is on the disk when this returns, also if nobody waits for it.

        Raises what the task has against it, Unavailable if the database does not answer.
        """
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        task.queue.append(PendingCommand(command, outcome))
        if not task.is_draining:
            task.is_draining = True
            self._background.finish(self._drain(task), on_behalf_of_all=True)
        return await outcome

    async def pass_deadline(self, task: LiveTask) -> None:
        """Let the deadline pass if it has, which ends the attempt or moves the deadline."""
        if task.is_due(self._clock()):
            await self.apply(task, Happen(self._deadline_passed()))

    def _deadline_passed(self) -> DeadlinePassed:
        return DeadlinePassed(store_was_away=self._payloads.was_away)

    async def _drain(self, task: LiveTask) -> None:
        """Apply the commands of a task as long as there are any, those that wait together."""
        try:
            while task.queue:
                commands = list(islice(task.queue, BATCH))
                async with task.lock:
                    try:
                        num_done = (await self._committed(task, commands)).conclude()
                    except Exception as exc:
                        num_done = await self._apply_apart(task, commands, exc)
                for _ in range(num_done):
                    task.queue.popleft()
        finally:
            task.is_draining = False

    async def _apply_apart(
        self, task: LiveTask, commands: Sequence[PendingCommand], failure: Exception
    ) -> int:
        """Apply commands each by itself whose batch has failed, if that may concern one of them
        alone; else they fail together."""
        is_apart = len(commands) > 1 and _concerns_one(failure)
        for each in commands:
            is_done = not is_apart
            if is_done:
                each.fail(failure)
            while not is_done:  # a deadline that has passed makes a batch before it
                try:
                    is_done = (await self._committed(task, [each])).conclude() > 0
                except Exception as exc:
                    each.fail(exc)
                    is_done = True
        return len(commands)

    async def _committed(self, task: LiveTask, commands: Sequence[PendingCommand]) -> Batch:
        """The batch of the first of `commands`, on the disk and in memory."""
        while True:
            now = self._clock()
            is_due = task.is_due(now) and not _is_restored(commands[0])
            before = [PendingCommand(Happen(self._deadline_passed()), None)] if is_due else []
            try:
                batch = await self._planner.plan(task, [*before, *commands], now)
                if not batch.is_complete:
                    await self._check_version(task)
                if batch.draft.steps:
                    await self._write(task, batch)
                return batch
            except StaleVersion:
                await self._catch_up(task)

    async def _check_version(self, task: LiveTask) -> None:
        """Raise StaleVersion if the disk is ahead: what has no place in the attempt that memory
        has may have one in the newest."""
        if self.is_shared:
            name, version = task.record.task, task.record.version
            if await self._version(name) != version:
                raise StaleVersion(name)

    async def _write(self, task: LiveTask, batch: Batch) -> None:
        """Claim the task's version and write the steps of the batch; then memory is theirs.

        Raises StaleVersion if the disk is ahead of memory, and then nothing was written; after any
        other failure memory is what the disk says.
        """
        name, version, steps = task.record.task, task.record.version, batch.draft.steps
        is_new = isinstance(steps[0].command, Create)

        def write(connection: Connection) -> bool:
            if is_new and records.task_version(connection, name) is not None:
                raise AlreadyExists(f"there is a task {name!r} already")
            if not is_new and not records.claim_task(connection, name, version):
                raise StaleVersion(name)
            is_held = self._journal.write(connection, task, steps, batch.now)
            self._database.notify(connection, name)
            return is_held

        try:
            is_held = await self._database.write(write)
        except StaleVersion:
            raise
        except BaseException as exc:
            if not _concerns_one(exc):
                # Whether it is on the disk or not: what the disk says, goes.
                await self._recover(task, is_new=is_new)
            raise
        if is_new:
            self.tasks.setdefault(name, task)  # or another server's news has brought it already
        publish = partial(self._publisher.publish, task, steps, batch.now)
        batch.context.run(publish, version=version + (not is_new), keeps=is_held)

    async def _recover(self, task: LiveTask, *, is_new: bool) -> None:
        name = task.record.task
        if is_new:
            if await self._database.read(lambda c: records.task_version(c, name)) is None:
                return
            self.tasks.setdefault(name, task)
        await self._catch_up(task, anew=True)

    async def _catch_up(self, task: LiveTask, *, anew: bool = False) -> None:
        """Take up what the disk has and memory has not: the newer events, or another attempt; or
        all, `anew`. To be called under the lock."""
        name, before = task.record.task, task.attempt
        spec = before.terms.spec if before is not None else await self.spec(task.record.model)
        read = partial(self._journal.newest, name=name, cached=None if anew else before, spec=spec)
        record, attempt, effects = await self._database.read(read)
        task.record, task.attempt = record, attempt
        task.config = TaskConfig.model_validate_json(record.config)
        self._publisher.caught_up(task, before, effects, self._clock(), anew=anew)

    async def spec(self, digest: str) -> ModelSpec:
        """Of a model's tensors; raises NotFound if its file is not there."""
        return await self._background.in_thread(self._journal.spec, digest)


def _is_restored(pending: PendingCommand) -> bool:
    """Whether an attempt of a backup is given up: its deadline, by now in the past, is no failure
    of its devices."""
    return isinstance(pending.command, Happen) and isinstance(pending.command.event, Restored)


def _concerns_one(exc: BaseException) -> bool:
    """Whether a failure is of one command among others, whose transaction was undone."""
    return isinstance(exc, LeaseLost) or (isinstance(exc, FedpressError) and exc.status < 500)
