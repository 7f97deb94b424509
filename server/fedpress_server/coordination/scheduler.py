"""The services of a server beside requests: deadlines, choices, other servers' writes, jobs."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from sqlalchemy.engine import Connection

from fedpress_protocols.errors import ConfigurationError, NotFound
from fedpress_protocols.messages import Restore
from fedpress_protocols.plan import TWO_PHASES
from fedpress_server.coordination.background import Background
from fedpress_server.coordination.check_ins import CheckIns
from fedpress_server.coordination.commands import AuditEntry, Happen, RecoverJobs
from fedpress_server.coordination.file_cleanup import FileCleanup
from fedpress_server.coordination.job_runner import JobRunner
from fedpress_server.coordination.live import LiveTask
from fedpress_server.coordination.resources import Resources
from fedpress_server.coordination.task_store import TaskStore
from fedpress_server.identity import audit
from fedpress_server.observing import outages
from fedpress_server.registry import restores
from fedpress_server.registry.retention import Retention
from fedpress_server.registry.sweeping import sweep
from fedpress_server.rounds import Cancelled, Restored
from fedpress_server.storage import records

_FORGET_EVERY = 60.0
_FOLLOW_KEYS_EVERY = 2.0
_CLOCKS_APART = 300.0
"""Seconds by which another server's clock may be behind, which may still take what expired here."""

_log = logging.getLogger(__name__)


class Scheduler:
    """`start()` takes up every task where the disk says it stands, and begins the services of this
    server's role; `stop()` ends them."""

    def __init__(
        self,
        resources: Resources,
        store: TaskStore,
        check_ins: CheckIns,
        runner: JobRunner,
        cleanup: FileCleanup,
        retention: Retention,
        background: Background,
    ) -> None:
        self._settings = resources.settings
        self._database = resources.database
        self._payloads = resources.payloads
        self._keys = resources.server_keys
        self._restore = resources.restore
        self._clock = resources.clock
        self._store = store
        self._check_ins = check_ins
        self._runner = runner
        self._cleanup = cleanup
        self._retention = retention
        self._background = background
        self._heard = asyncio.Event()
        self._forgot_at = 0.0

    async def start(self) -> None:
        """Begin with the services of this server's role."""
        role = self._settings.role
        if not self._store.is_shared:
            await sweep(self._database, self._payloads, self._clock())
        await self._load()
        if self._restore is not None:
            await self._give_up_restored(self._restore)
        for task in list(self._store.tasks.values()):
            await self._end_retired(task)
        if self._store.is_shared:
            self._listen()
            self._background.serve(self._follow_forever())
        self._background.serve(self._follow_keys_forever())
        if role in ("all", "api"):
            self._background.serve(self._check_ins.load.watch())
        if role in ("all", "scheduler"):
            self._background.serve(self._tick_forever())
        if role in ("all", "worker"):
            for task in list(self._store.tasks.values()):
                await self._store.apply(task, RecoverJobs())
            self._background.serve(self._runner.serve())

    async def _load(self) -> None:
        for record in await self._database.read(records.task_records):
            try:
                await self._store.load(record)
            except NotFound as exc:
                raise ConfigurationError(
                    f"task {record.task} cannot go on: {exc.detail}",
                    hint="bring it back into the store, or restore a backup; fedpress doctor tells "
                    "of every task whose model is not there",
                ) from exc

    async def _give_up_restored(self, restore: Restore) -> None:
        """Give up what was open in the backup: devices may know another end of it."""
        why = f"given up by restore {restore.number}: open in the backup"
        for key in await self._database.read(restores.open_rounds):
            await self._store.apply(self._store.get(key[0]), Happen(Restored(why), key))

    def _listen(self) -> None:
        """Hear of what other servers write."""
        loop = asyncio.get_running_loop()

        def heard(topic: str | None) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._heard.set)

        self._database.listen(heard)

    def release(self) -> None:
        """Refuse every check-in from now on, those that wait among them: the server is about to
        stop."""
        self._background.release()

    async def stop(self) -> None:
        """Leave everything as it is on the disk; a later `start` goes on from there."""
        self.release()
        await self._background.stop()
        await self._runner.give_back()

    def late(self) -> float:
        """Seconds since the earliest deadline that has not been passed yet; 0 without one."""
        now = self._clock()
        due = (task.attempt.due for task in self._store.tasks.values() if task.attempt is not None)
        return max((now - each for each in due if each is not None and each < now), default=0.0)

    async def tick(self) -> None:
        """Let every deadline pass that the clock has passed, and choose where it is time to."""
        if self._store.is_shared:
            await self._store.follow()
        for task in list(self._store.tasks.values()):
            try:
                await self._store.pass_deadline(task)
                await self._end_retired(task)
                await self._check_ins.choose(task)
            except Exception as exc:  # the next tick tries again
                outages.tell(_log, exc, "task %s: its deadline could not pass", task.record.task)
        if self._retention.is_due():
            self._background.serve(self._collect())

    async def _end_retired(self, task: LiveTask) -> None:
        """Cancel a task that an earlier release has begun and no round protocol runs any more: its
        devices have receipts, and take their updates back."""
        if task.attempt is None or task.attempt.terms.plan.first_trip is None:
            return
        entry = AuditEntry(audit.SERVER, "task.cancelled", TWO_PHASES)
        if await self._store.apply(task, Happen(Cancelled(TWO_PHASES), payload=entry)):
            _log.warning("task %s is cancelled: %s", task.record.task, TWO_PHASES)

    async def _collect(self) -> None:
        try:
            await self._retention.collect()
        except Exception as exc:  # what is left over is removed the next time
            outages.tell(_log, exc, "retention could not give up models")

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(self._settings.tick_seconds)
            try:
                await self.tick()
                await self.forget()
            except Exception as exc:  # the database is away for a while
                outages.tell(_log, exc, "deadlines could not be looked at")

    async def forget(self) -> None:
        """Drop the rows and the files that have done their work, now and then."""
        now = self._clock()
        if now < self._forgot_at + _FORGET_EVERY:
            return
        self._forgot_at = now
        if self._store.is_shared:

            def write(connection: Connection) -> None:
                records.forget_waiting(connection, now - self._store.memory.patience)
                records.forget_nonces(connection, now - _CLOCKS_APART)

            await self._database.write(write)
        await self._cleanup.sweep_if_due()

    async def _follow_keys_forever(self) -> None:
        """Take in a change of the key soon also where no task changes."""
        while True:
            await asyncio.sleep(_FOLLOW_KEYS_EVERY)
            try:
                await self._database.read(self._keys.read)
            except Exception as exc:  # the database is away for a while
                outages.tell(_log, exc, "the server's keys could not be looked at")

    async def _follow_forever(self) -> None:
        """Catch up with other servers as soon as they are heard of, and in any case soon."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._settings.follow_seconds):
                    await self._heard.wait()
            self._heard.clear()
            try:
                await self._store.follow()
            except Exception as exc:  # the database is away: a moment later, again
                outages.tell(_log, exc, "could not catch up with other servers")
