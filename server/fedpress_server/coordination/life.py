"""The life of tasks, as operators have it: created, gone on with, finished, cancelled."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

from sqlalchemy.engine import Connection

from fedpress_protocols.errors import AlreadyExists, ConfigurationError, Conflict
from fedpress_protocols.messages import Continuation, TaskConfig, TaskSummary
from fedpress_server.coordination.attempts import Attempt
from fedpress_server.coordination.background import Background
from fedpress_server.coordination.checking import check_ladder, check_plan
from fedpress_server.coordination.journal import write_opening
from fedpress_server.coordination.live import LiveTask
from fedpress_server.coordination.opening import Legacy, check_warm_up, later_periods, opened
from fedpress_server.coordination.steps import Clock, Steps
from fedpress_server.folds.folding import first_model, first_state
from fedpress_server.folds.masked import Host
from fedpress_server.identity import audit
from fedpress_server.registry import restores
from fedpress_server.registry import versions as registry
from fedpress_server.rounds import Aborted, Cancelled
from fedpress_server.settings import Settings
from fedpress_server.storage import records
from fedpress_server.storage.database import Database
from fedpress_server.storage.payloads import Payloads
from fedpress_server.storage.records import ModelRecord, TaskRecord
from fedpress_strategies import from_config

_log = logging.getLogger(__name__)


class TaskLife:
    """What operators do with tasks."""

    def __init__(
        self,
        settings: Settings,
        steps: Steps,
        database: Database,
        payloads: Payloads,
        host: Host,
        background: Background,
        clock: Clock,
        live: Callable[[TaskRecord], LiveTask],
        model: Callable[[str], Awaitable[ModelRecord]],
    ) -> None:
        """`live` makes a task in memory of its record; `model` finds one or raises UnknownModel."""
        self._settings = settings
        self._steps = steps
        self._database = database
        self._payloads = payloads
        self._host = host
        self._background = background
        self._clock = clock
        self._live = live
        self._model = model
        self._creating = asyncio.Lock()

    async def create(self, config: TaskConfig, *, by: str = audit.SERVER) -> TaskSummary:
        """Check all that can be checked and open round 1; `by` is who asks, for the audit log.

        Raises AlreadyExists, UnknownModel, or ConfigurationError with the reason.
        """
        if config.seed is None:
            config = config.model_copy(update={"seed": secrets.randbelow(2**63)})
        return await self._background.shielded(self._create(config, by))

    async def _create(self, config: TaskConfig, by: str) -> TaskSummary:
        async with self._creating:
            if (
                await self._database.read(lambda c: records.task_version(c, config.task))
                is not None
            ):
                raise AlreadyExists(f"there is a task {config.task!r} already")
            config.check_new()
            strategy = from_config(config.strategy, config.training)
            await self._check_members(config)
            brought = await self._model(config.model)
            spec = await self._steps.spec(brought.digest)
            now = self._clock()
            model = await self._on_grid(brought, config, now)
            config = config.model_copy(update={"model": model.digest})
            record = TaskRecord(
                task=config.task,
                config=config.model_dump_json(),
                state="running",
                model=model.digest,
                spec=model.spec,
                optimizer_state=None,
                published={},
                round=0,
                rounds=config.rounds,
                max_body_bytes=0,
                created_at=now,
                ended_at=None,
            )
            task = self._live(record)

            def begun(config: TaskConfig) -> Attempt:
                left = Legacy.beginning(model.digest, spec)
                return opened(
                    config,
                    strategy,
                    self._payloads,
                    self._host,
                    left=left,
                    number=1,
                    attempt=1,
                    now=now,
                )

            attempt, bound = begun(config), 0
            check_warm_up(attempt.terms, strategy)
            await self._background.in_thread(check_ladder, config, spec)
            most, memory = self._settings.max_body_bytes, self._settings.fold_memory_bytes
            for each in (attempt, *map(begun, later_periods(config))):
                check = partial(check_plan, each.terms, config, strategy, most=most, memory=memory)
                bound = max(bound, await self._background.in_thread(check))
            state = await self._first_state(brought, config, attempt)
            task.record = replace(record, max_body_bytes=bound, optimizer_state=state)

            def write(connection: Connection) -> None:
                self._host.keys.read(connection)  # of which the new task's version cannot tell
                if records.task_version(connection, config.task) is not None:
                    raise AlreadyExists(f"there is a task {config.task!r} already")
                records.add_model(connection, model)
                registry.keep_again(connection, self._payloads, {model.digest})
                records.add_task(connection, task.record)
                registry.add_first_version(connection, task.record, now)
                write_opening(connection, attempt, now)
                told = {"model": model.digest, "rounds": config.rounds}
                audit.add(connection, now, by, "task.created", config.task, **told)

            try:
                await self._database.write(write)
            except AlreadyExists:
                raise
            except BaseException:
                written = await self._database.read(records.task_records)
                if any(record.task == config.task for record in written):
                    task = self._steps.tasks.setdefault(config.task, task)
                    async with task.lock:
                        await self._steps.reload(task)
                raise
            task.attempt = attempt
            self._steps.phases.saw(config.task, attempt, now, began=True)
            # A server of several may have seen its own row already.
            task = self._steps.tasks.setdefault(config.task, task)
        _log.info("task %s begins: %d rounds", config.task, config.rounds)
        return task.summary

    async def _on_grid(self, model: ModelRecord, config: TaskConfig, now: float) -> ModelRecord:
        """The model that is published where a task is to begin with `model`."""
        if config.downlink is None:
            return model
        digest, num_bytes = await self._background.in_thread(
            first_model, model.digest, config.downlink, self._payloads
        )
        return ModelRecord(digest, model.spec, num_bytes, now)

    async def _first_state(
        self,
        brought: ModelRecord,
        config: TaskConfig,
        attempt: Attempt,
        last: str | None = None,
    ) -> str | None:
        if config.downlink is None:
            return None
        shared = attempt.terms.shared
        return await self._background.in_thread(
            first_state, brought.digest, shared, self._payloads, last
        )

    async def _check_members(self, config: TaskConfig) -> None:
        members = config.members
        if not members:
            return
        if len(set(members)) < max(len(members), config.cohort.size):
            raise ConfigurationError(
                f"{len(set(members))} different members for cohorts of {config.cohort.size}",
                hint="name each member once, and at least cohort.size of them",
            )
        strange = await self._database.read(lambda c: records.unenrolled(c, members))
        if strange:
            raise ConfigurationError(
                f"no device is enrolled as {', '.join(strange[:5])}", hint="enrol members first"
            )

    async def go_on(self, name: str, more: Continuation, *, by: str = audit.SERVER) -> TaskSummary:
        """More rounds for a task that has stopped; once it has them, the same call changes nothing.

        Its optimizer begins anew. Raises Conflict if the task is running or is not where `more`
        takes it to be, ConfigurationError if it cannot go on from the model.
        """
        return await self._background.shielded(self._go_on(await self._steps.fresh(name), more, by))

    async def _go_on(self, task: LiveTask, more: Continuation, by: str) -> TaskSummary:
        name, last = task.record.task, more.after_round + more.rounds
        brought = await self._model(more.model)

        async def now() -> TaskSummary:
            record = task.record
            if brought.spec != record.spec:
                raise ConfigurationError(f"model {more.model[:12]} has other tensors than the task")
            model = await self._on_grid(brought, task.config, self._clock())
            begun = await self._database.read(
                lambda c: records.newest_attempt(c, name, more.after_round + 1)
            )
            is_same = record.rounds == last and record.state != "cancelled"
            if is_same and begun is not None and begun.base_model == model.digest:
                return task.summary
            if record.state == "running" or record.round != more.after_round:
                raise Conflict(
                    f"task {name!r} is {record.state} after {record.round} rounds; to go on after "
                    f"{more.after_round} it must have stopped there",
                    task=name,
                )
            needs = [profile.compressor.needs for profile in task.config.every_profile]
            if task.strategy.client_terms.control is not None or any("own" in n for n in needs):
                raise ConfigurationError(
                    "control variates, and uploads that differences are taken to, belong to the "
                    "models they were made on",
                    hint="begin a new task from the model",
                )
            tried = 0 if begun is None else begun.attempt
            changes = {
                "rounds": last,
                "schedule_after": more.after_round,
                "max_attempts": task.config.max_attempts + tried,  # those before do not count
            }
            config = task.config.model_copy(update=changes)
            at = self._clock()
            follows = opened(
                config,
                task.strategy,
                self._payloads,
                self._host,
                left=Legacy.beginning(model.digest, await self._steps.spec(model.digest)),
                number=more.after_round + 1,
                attempt=tried + 1,
                now=at,
            )
            check_warm_up(follows.terms, task.strategy)
            after = replace(
                record,
                config=config.model_dump_json(),
                state="running",
                model=model.digest,
                optimizer_state=await self._first_state(
                    brought,
                    config,
                    follows,
                    record.optimizer_state if model.digest == record.model else None,
                ),
                published={},
                rounds=last,
                ended_at=None,
                reason=None,
                held_at=None,
            )

            is_held = False

            def write(connection: Connection) -> None:
                nonlocal is_held
                is_held = restores.is_held(connection, at)
                records.add_model(connection, model)
                registry.keep_again(connection, self._payloads, {model.digest})
                records.set_task(connection, after)
                write_opening(connection, follows, at)
                told = {"model": model.digest, "rounds": last}
                audit.add(connection, at, by, "task.continued", name, **told)

            files = task.files
            version = await self._steps.write(task, write)
            task.record = replace(after, version=version)
            task.config, task.attempt = config, follows
            self._steps.phases.saw(name, follows, self._clock(), began=True)
            self._steps.drop_files(task, files - task.files, is_held=is_held)
            task.tell()
            _log.info("task %s goes on for %d rounds", name, more.rounds)
            return task.summary

        return await self._steps.alone(task, now)

    async def hold(self, name: str, *, by: str = audit.SERVER) -> TaskSummary:
        """Give no device work from now on; what was given is taken, and may end the round.

        Done again, it changes nothing. Raises Conflict unless the task is running.
        """
        return await self._background.shielded(
            self._hold(await self._steps.fresh(name), self._clock(), by)
        )

    async def release(self, name: str, *, by: str = audit.SERVER) -> TaskSummary:
        """Give devices work again, where the task was held. Raises Conflict as `hold`."""
        return await self._background.shielded(self._hold(await self._steps.fresh(name), None, by))

    async def _hold(self, task: LiveTask, since: float | None, by: str) -> TaskSummary:
        action: audit.Action = "task.resumed" if since is None else "task.paused"

        async def now() -> TaskSummary:
            record = task.record
            if record.state != "running":
                raise Conflict(
                    f"task {record.task!r} is {record.state}; only a running one is paused and "
                    "resumed",
                    hint="fedpress task continue gives one that has stopped more rounds",
                    task=record.task,
                )
            if (record.held_at is None) != (since is None):
                after = replace(record, held_at=since)
                version = await self._write(task, after, by, action)
                task.record = replace(after, version=version)
                task.tell()
            return task.summary

        return await self._steps.alone(task, now)

    async def finish(self, name: str, *, by: str = audit.SERVER) -> TaskSummary:
        """End a paused task for good. Raises Conflict unless it is paused or finished."""
        return await self._background.shielded(self._finish(await self._steps.fresh(name), by))

    async def _finish(self, task: LiveTask, by: str) -> TaskSummary:
        async def now() -> TaskSummary:
            state, name = task.record.state, task.record.task
            if state not in ("paused", "finished"):
                raise Conflict(f"task {name!r} is {state}; finish a paused one", task=name)
            if state == "paused":
                after = replace(task.record, state="finished")
                version = await self._write(task, after, by, "task.finished")
                task.record = replace(after, version=version)
                task.tell()
            return task.summary

        return await self._steps.alone(task, now)

    async def _write(self, task: LiveTask, after: TaskRecord, by: str, action: audit.Action) -> int:
        at = self._clock()

        def write(connection: Connection) -> None:
            records.set_task(connection, after)
            audit.add(connection, at, by, action, after.task)

        return await self._steps.write(task, write)

    async def cancel(self, name: str, detail: str, *, by: str = audit.SERVER) -> TaskSummary:
        task = await self._steps.fresh(name)
        also = partial(_audited, by, "task.cancelled", name, detail)
        if not await self._steps.happen(task, Cancelled(detail), also=also):
            raise Conflict(f"task {name!r} is {task.record.state}", task=name)
        return task.summary

    async def abort_round(self, name: str, detail: str, *, by: str = audit.SERVER) -> TaskSummary:
        task = await self._steps.fresh(name)
        also = partial(_audited, by, "round.aborted", name, detail)
        if not await self._steps.happen(task, Aborted(detail), also=also):
            raise Conflict(f"task {name!r} is {task.record.state}", task=name)
        return task.summary


def _audited(
    by: str, action: audit.Action, task: str, detail: str, connection: Connection, now: float
) -> None:
    audit.add(connection, now, by, action, task, reason=detail)
