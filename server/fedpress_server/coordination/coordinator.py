"""The server's parts around the tasks, made and joined once; and what is asked of all of them.

`steps` holds the tasks and writes, `check_ins` gives devices work, `life` is the operators', `work`
makes the models. What is here is reading: models, rounds, assignments, and what devices measured.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import replace
from typing import Literal

from sqlalchemy.engine import Connection

from fedpress_protocols.errors import (
    ConfigurationError,
    Forbidden,
    NotFound,
    UnknownAssignment,
    UnknownModel,
    UnknownRound,
)
from fedpress_protocols.messages import (
    EvaluationReport,
    Restore,
    RoundStatus,
    TaskConfig,
    TaskSummary,
)
from fedpress_protocols.model import Model
from fedpress_server.coordination.attempts import Attempt
from fedpress_server.coordination.background import Background
from fedpress_server.coordination.check_ins import CheckIns
from fedpress_server.coordination.coded_models import CodedFile, CodedModels
from fedpress_server.coordination.life import TaskLife
from fedpress_server.coordination.live import LiveTask
from fedpress_server.coordination.steps import Also, Clock, Steps
from fedpress_server.coordination.work import Work
from fedpress_server.folds.masked import Host, Message
from fedpress_server.folds.terms import RoundTerms
from fedpress_server.identity import audit
from fedpress_server.identity.membership import Authority
from fedpress_server.identity.signing import SigningKeys
from fedpress_server.metrics import Metrics
from fedpress_server.observing import outages
from fedpress_server.registry import restores
from fedpress_server.registry import versions as registry
from fedpress_server.registry.retention import Retention
from fedpress_server.registry.sweeping import sweep
from fedpress_server.rounds import Effect, Event, Restored
from fedpress_server.settings import Settings
from fedpress_server.storage import declines, evaluation, leases, records
from fedpress_server.storage.database import Database
from fedpress_server.storage.files import artefact_name, base_name, model_name
from fedpress_server.storage.payloads import Payloads
from fedpress_server.storage.records import AssignmentRecord, ModelRecord, RoundKey, TaskRecord
from fedpress_strategies import from_config

Form = Literal["plain", "coded", "difference"]
"""How a model is sent: as its file, or coded whole, or coded as a difference."""
_FORGET_EVERY = 60.0
_SWEEP_EVERY = 3600.0
_FOLLOW_KEYS_EVERY = 2.0
_CLOCKS_APART = 300.0
"""Seconds by which another server's clock may be behind, which may still take what expired here."""

_log = logging.getLogger(__name__)


class Coordinator:
    """One for a process. `start()` takes up every task where the disk says it stands."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        payloads: Payloads,
        keys: SigningKeys,
        authority: Authority,
        metrics: Metrics,
        clock: Clock,
        *,
        is_shared: bool | None = None,
    ) -> None:
        """`is_shared`: whether other servers may write to the database; None: as it says itself.
        Leases go by the database's clock, unless a test turns `clock`."""
        self._settings = settings
        self._database = database
        self._payloads = payloads
        self._metrics = metrics
        self._clock = clock
        self._background = background = Background(settings.worker_threads)
        self._keys = keys
        host = Host(keys, authority)
        lease_time = leases.now_of if clock is time.time else lambda connection: clock()
        self.is_shared = database.is_shared if is_shared is None else is_shared
        self.steps = steps = Steps(
            database,
            payloads,
            host,
            metrics,
            background,
            clock,
            lease_time,
            is_shared=self.is_shared,
        )
        steps.live = self._live
        self.check_ins = CheckIns(
            settings, steps, database, metrics, background, clock, self.assignment, keys
        )
        self.life = TaskLife(
            settings, steps, database, payloads, host, background, clock, self._live, self.model
        )
        self._coded = CodedModels(database, payloads, background)
        self.retention = Retention(
            database,
            payloads,
            clock,
            grace=settings.retention_grace,
            every=settings.retention_seconds,
        )
        self.work = Work(steps, database, payloads, metrics, background, settings)
        steps.look_for_work = self.work.look
        self._heard = asyncio.Event()
        self._forgot_at = 0.0
        self._swept_at = clock()

    # Life

    async def start(self) -> None:
        """Begin with what this server's role is."""
        role = self._settings.role
        if not self.is_shared:
            await sweep(self._database, self._payloads, self._clock())
        restore = self.check_ins.restore = await self._database.read(restores.newest)
        self.steps.epoch = None if restore is None else restore.epoch
        for record in await self._database.read(records.task_records):
            self.steps.tasks[record.task] = task = self._live(record)
            try:
                async with task.lock:
                    await self.steps.reload(task)
            except NotFound as exc:
                raise ConfigurationError(
                    f"task {record.task} cannot go on: {exc.detail}",
                    hint="bring it back into the store, or restore a backup; fedpress doctor tells "
                    "of every task whose model is not there",
                ) from exc
        if restore is not None:
            await self._begin_anew(restore)
        if self.is_shared:
            loop = asyncio.get_running_loop()

            def heard(topic: str | None) -> None:
                with suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(self._heard.set)

            self._database.listen(heard)
            self._background.serve(self._follow_forever())
        self._background.serve(self._follow_keys_forever())
        if role in ("all", "api"):
            self._background.serve(self.check_ins.load.watch())
        if role in ("all", "scheduler"):
            self._background.serve(self._tick_forever())
        if role in ("all", "worker"):
            for task in list(self.steps.tasks.values()):
                await self.steps.recover_jobs(task)
            self._background.serve(self.work.serve())

    async def _begin_anew(self, restore: Restore) -> None:
        """Give up what was open in the backup: devices may know another end of it."""
        why = f"given up by restore {restore.number}: open in the backup"
        for key in await self._database.read(restores.open_rounds):
            await self.steps.happen(self.steps.get(key[0]), Restored(why), key=key)

    def _live(self, record: TaskRecord) -> LiveTask:
        config = TaskConfig.model_validate_json(record.config)
        strategy = from_config(config.strategy, config.training)
        return LiveTask(record, config, strategy, self.check_ins.no_candidates())

    def release(self) -> None:
        """Refuse every check-in from now on, those that wait among them: the server is about to
        stop."""
        self._background.release()

    async def stop(self) -> None:
        """Leave everything as it is on the disk; a later `start` goes on from there."""
        self.release()
        await self._background.stop()
        await self.work.give_back()

    async def tick(self) -> None:
        """Let every deadline pass that the clock has passed, and choose where it is time to."""
        if self.is_shared:
            await self.steps.follow()
        for task in list(self.steps.tasks.values()):
            try:
                await self.steps.pass_deadline(task)
                await self.check_ins.choose(task)
            except Exception as exc:  # the next tick tries again
                outages.tell(_log, exc, "task %s: its deadline could not pass", task.record.task)
        if self.retention.is_due():
            self._background.serve(self._collect())

    async def _collect(self) -> None:
        try:
            await self.retention.collect()
        except Exception as exc:  # what is left over is removed the next time
            outages.tell(_log, exc, "retention could not give up models")

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(self._settings.tick_seconds)
            try:
                await self.tick()
                await self._forget()
            except Exception as exc:  # the database is away for a while
                outages.tell(_log, exc, "deadlines could not be looked at")

    async def _forget(self) -> None:
        """Drop the rows and the files that have done their work, now and then."""
        now = self._clock()
        if now < self._forgot_at + _FORGET_EVERY:
            return
        self._forgot_at = now
        if not self.is_shared:
            left_at = self.steps.left_files_at
            if left_at is not None and now > left_at + _SWEEP_EVERY:
                self.steps.left_files_at = None
                if not await self._sweep_later():
                    self.steps.left_files_at = now
            return

        def write(connection: Connection) -> None:
            records.forget_waiting(connection, now - self.check_ins.no_candidates().patience)
            records.forget_nonces(connection, now - _CLOCKS_APART)

        await self._database.write(write)
        if now >= self._swept_at + _SWEEP_EVERY:
            self._swept_at = now
            await self._sweep_later()

    async def _sweep_later(self) -> bool:
        """Sweep beside what is being written, see `sweep`."""
        return await sweep(self._database, self._payloads, self._clock(), _SWEEP_EVERY)

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
                await self.steps.follow()
            except Exception as exc:  # the database is away: a moment later, again
                outages.tell(_log, exc, "could not catch up with other servers")

    # Tasks

    async def task(self, name: str) -> TaskSummary:
        """Raises UnknownTask."""
        return (await self.steps.fresh(name)).summary

    async def configuration(self, name: str) -> TaskConfig:
        """Raises UnknownTask."""
        return (await self.steps.fresh(name)).config

    async def tasks(self, after: str | None = None, limit: int = 1000) -> list[TaskSummary]:
        """The first `limit` of those whose names come after `after`, in their order."""
        if self.is_shared:
            await self.steps.follow()
        names = sorted(name for name in self.steps.tasks if after is None or name > after)
        return [self.steps.tasks[name].summary for name in names[:limit]]

    async def history(
        self, name: str, before: tuple[int, int] | None = None, limit: int = 1000
    ) -> list[RoundStatus]:
        """See `records.round_history`; raises UnknownTask."""
        await self.steps.fresh(name)

        def read(connection: Connection) -> list[RoundStatus]:
            found = records.round_history(connection, name, before, limit)
            if not found:
                return found
            counted = declines.counts(connection, name, [each.round for each in found])
            return [
                each.model_copy(update={"declined": counted.get((each.round, each.attempt), {})})
                for each in found
            ]

        return await self._database.read(read)

    async def round_status(self, name: str, number: int) -> RoundStatus:
        """The latest attempt at the round; raises UnknownRound."""
        least = (await self.steps.fresh(name)).config.evaluation.least_clients

        def read(connection: Connection) -> RoundStatus | None:
            found = records.measured_attempt(connection, name, number, least)
            if found is None:
                return None
            counted = declines.counts(connection, name, [number])
            seconds = declines.durations(connection, (name, number, found.attempt))
            why = counted.get((number, found.attempt), {})
            return found.model_copy(update={"declined": why, "durations": seconds})

        found = await self._database.read(read)
        if found is None:
            raise UnknownRound(f"task {name!r} has no round {number}", task=name)
        return found

    async def evaluate(self, client_id: str, name: str, report: EvaluationReport) -> None:
        """Keep a device's report; raises UnknownModel if the model is none of the task's, Forbidden
        if the device is not one of the task's members."""
        task = await self.steps.fresh(name)
        by, now = task.config.evaluation.group_by or "", self._clock()
        members = task.config.members

        def write(connection: Connection) -> None:
            if members and client_id not in members:
                raise Forbidden(f"task {name!r} is for its members alone, to measure too")
            if evaluation.place_of(connection, name, report.model) is None:
                raise UnknownModel(f"task {name!r} has no model {report.model[:12]}")
            evaluation.keep(connection, name, client_id, report, by, now)
            if task.config.selection.policy != "first":
                evaluation.note_loss(connection, name, client_id, report, now)

        await self._database.write(write)
        if task.attempt is None:
            await self._background.shielded(self._rate(task))

    async def _rate(self, task: LiveTask) -> None:
        """Name the best model anew: devices measure the last one after the task's end."""

        async def now() -> None:
            record, terms = task.record, task.config.evaluation
            rated = await self._database.read(lambda c: task.scoreboard.rated(c, terms))
            after = replace(record, best=evaluation.best(rated, terms))
            if task.attempt is None and after != record:
                version = await self.steps.write(task, lambda c: records.set_task(c, after))
                task.record = replace(after, version=version)

        await self.steps.alone(task, now)

    # Models

    async def model(self, digest: str) -> ModelRecord:
        """Raises UnknownModel."""
        found, is_collected = await self._database.read(
            lambda c: (records.model(c, digest), registry.is_collected(c, digest))
        )
        if is_collected:
            raise UnknownModel(
                f"model {digest[:12]} was given up by the retention of its task",
                hint="fetch the task's newest model, or one that an alias points to",
            )
        if found is None:
            raise UnknownModel(f"no model {digest[:12]} is on this server")
        return found

    async def add_model(
        self, data: bytes, digest: str, *, by: str = audit.SERVER
    ) -> tuple[ModelRecord, bool]:
        """Keep a model that an operator brings; True if it is new. Raises ConfigurationError."""

        def store() -> str:
            spec = Model.from_bytes(data).spec.digest
            self._payloads.put(model_name(digest), data)
            return spec

        spec = await self._background.in_thread(store)
        now = self._clock()
        record = ModelRecord(digest, spec, len(data), now)

        def write(connection: Connection) -> bool:
            is_new = records.add_model(connection, record)
            registry.keep_again(connection, self._payloads, {digest})
            registry.was_brought(connection, digest, now)
            if is_new:
                audit.add(connection, now, by, "model.brought", digest, bytes=len(data))
            return is_new

        return record, await self._database.write(write)

    async def coded(self, task: str, model: str, base: str | None) -> CodedFile:
        """The coded form of a model of the task, see `CodedModels.find`; raises NotFound."""
        return await self._coded.find((await self.steps.fresh(task)).config, model, base)

    async def artefact_bytes(self, digest: str) -> int:
        """The size of what an open plan names besides models; raises NotFound."""
        if self.is_shared:
            await self.steps.follow()
        for task in self.steps.tasks.values():
            plans = task.attempt.plans if task.attempt is not None else ()
            if any(digest in plan.artefacts for plan in plans):
                return await asyncio.to_thread(self._payloads.size, artefact_name(digest))
        raise NotFound(f"no open round names {digest[:12]}")

    def count_download(
        self, client_id: str, task: str, num_bytes: int, form: Form = "plain"
    ) -> asyncio.Task[None]:
        """Book bytes sent under the attempt for which the device fetched them, if there is one.

        Booked once the task is done, awaited or not.
        """
        self._metrics.download_bytes.inc(num_bytes)
        self._metrics.downloaded.labels(form).inc(num_bytes)
        amounts = {"download_bytes": num_bytes}
        if form != "plain":
            amounts[f"{form}_download_bytes"] = num_bytes
        return self._background.finish(self._book(self._downloader(client_id, task), amounts))

    async def _book(self, key: RoundKey | None, amounts: dict[str, int]) -> None:
        num_bytes = amounts["download_bytes"]
        if key is None or not num_bytes:
            return
        try:
            await self._database.write(lambda c: records.count(c, key, **amounts))
        except Exception as exc:  # the device has its model all the same
            outages.tell(_log, exc, "%d bytes sent could not be booked", num_bytes)

    def _downloader(self, client_id: str, task: str) -> RoundKey | None:
        found = self.steps.tasks.get(task)
        if found is None or found.attempt is None:
            return None
        part = found.attempt.round.part_of(client_id)
        return found.attempt.key if part is not None and part[1].is_open else None

    # Assignments

    async def assignment(self, client_id: str, name: str) -> AssignmentRecord:
        """Raises UnknownAssignment, or Forbidden for another device's."""
        record = await self._database.read(lambda c: records.assignment(c, name))
        if record is None:
            raise UnknownAssignment(f"no assignment {name[:64]!r}")
        if record.client_id != client_id:
            raise Forbidden("the assignment is another device's")
        return record

    def held(self, assignment: str) -> tuple[LiveTask, Attempt] | None:
        """The task in memory, and its attempt, in which the assignment awaits its upload.

        Another server may be ahead. Whoever goes by this finds out when it writes.
        """
        for task in self.steps.tasks.values():
            attempt = task.attempt
            if attempt is not None and attempt.takes_upload(assignment, self._clock()):
                return task, attempt
        return None

    async def takes_upload(self, assignment: AssignmentRecord) -> RoundTerms | None:
        """The terms of the upload that this assignment still awaits."""
        task = await self.steps.fresh(assignment.task)
        await self.steps.pass_deadline(task)
        attempt, name = task.attempt, assignment.assignment
        if attempt is None or not attempt.holds(name, assignment.key):
            return None
        return attempt.terms_of(name) if attempt.takes_upload(name, self._clock()) else None

    async def attempt_of(self, assignment: AssignmentRecord) -> Attempt | None:
        """The attempt that the assignment is a part of; None if it is over."""
        task = await self.steps.fresh(assignment.task)
        await self.steps.pass_deadline(task)
        attempt = task.attempt
        if attempt is None or not attempt.holds(assignment.assignment, assignment.key):
            return None
        return attempt

    async def own_name(self, client_id: str, assignment: str) -> tuple[str, str]:
        """The file of what the client's last included upload stood for, and its digest, while the
        assignment is open. Raises UnknownAssignment, Forbidden or NotFound."""
        record = await self.assignment(client_id, assignment)
        attempt = (await self.steps.fresh(record.task)).attempt
        if attempt is not None and attempt.key == record.key:
            digest = attempt.terms.bases.get(client_id)
            if digest is not None:
                return base_name(record.task, client_id, digest), digest
        raise NotFound("the assignment names no upload before it, or is over")

    async def basis_name(self, client_id: str, assignment: str) -> tuple[str, str]:
        """The file of the basis that the assignment's first trips came to, and its digest, in the
        second trip. Raises UnknownAssignment, Forbidden or NotFound."""
        attempt = await self.attempt_of(await self.assignment(client_id, assignment))
        if attempt is None or attempt.round.basis is None or attempt.terms.basis is None:
            raise NotFound("the assignment's round has no basis yet, or is over")
        return attempt.terms.basis, attempt.round.basis

    @property
    def now(self) -> float:
        return self._clock()

    async def max_body_bytes(self, task: str) -> int:
        """The largest upload of any of the task's rounds."""
        return (await self.steps.fresh(task)).record.max_body_bytes

    async def apply(
        self,
        task: str,
        event: Event,
        key: RoundKey,
        also: Also | None = None,
        said: Message | None = None,
    ) -> tuple[Effect, ...]:
        """As `Steps.apply`."""
        return await self.steps.apply(task, event, key, also, said)
