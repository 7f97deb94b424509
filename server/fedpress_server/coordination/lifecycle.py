"""The lifecycle of tasks, as operators have it: create, continue, pause, resume, finish, cancel."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from fedpress_compression.tensors import ModelSpec
from fedpress_protocols.errors import AlreadyExists, ConfigurationError, Conflict
from fedpress_protocols.messages import Continuation, TaskConfig, TaskSummary
from fedpress_server.aggregation.aggregate import first_model, first_state
from fedpress_server.aggregation.masked import Host
from fedpress_server.coordination.attempts import Attempt
from fedpress_server.coordination.background import Background
from fedpress_server.coordination.checking import checked_task
from fedpress_server.coordination.commands import (
    AuditEntry,
    Command,
    Continue,
    Create,
    Finish,
    Happen,
    Pause,
    Resume,
)
from fedpress_server.coordination.journal import without_excluded
from fedpress_server.coordination.live import LiveTask
from fedpress_server.coordination.models import Models
from fedpress_server.coordination.opening import (
    RoundCarryover,
    check_warm_up,
    opened,
)
from fedpress_server.coordination.task_store import TaskStore
from fedpress_server.identity import audit
from fedpress_server.rounds import Aborted, Cancelled, Event
from fedpress_server.settings import Settings
from fedpress_server.storage import privacy, records
from fedpress_server.storage.database import Database
from fedpress_server.storage.payloads import Payloads
from fedpress_server.storage.records import ModelRecord, TaskRecord
from fedpress_strategies import Strategy, from_config
from fedpress_strategies.policies.sizes import expected_bytes

_log = logging.getLogger(__name__)


class Prospect(NamedTuple):
    """What a task is going to send, in bytes."""

    max_body_bytes: int
    """Of the largest upload of any round."""
    expected: Mapping[str, int]
    """Of an upload by each profile, a guess: see `sizes.expected_bytes`."""
    model_bytes: int
    """Of the model's file, which a first download is at most."""


class Lifecycle:
    """The commands of operators, checked and applied."""

    def __init__(
        self,
        settings: Settings,
        store: TaskStore,
        models: Models,
        database: Database,
        payloads: Payloads,
        host: Host,
        background: Background,
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._store = store
        self._models = models
        self._database = database
        self._payloads = payloads
        self._host = host
        self._background = background
        self._clock = clock
        self._creating = asyncio.Lock()

    async def create(self, config: TaskConfig, *, by: str = audit.SERVER) -> TaskSummary:
        """Check all that can be checked and open round 1; `by` is who asks, for the audit log.

        Raises AlreadyExists, UnknownModel, or ConfigurationError with the reason.
        """
        if config.seed is None:
            config = config.model_copy(update={"seed": secrets.randbelow(2**63)})
        return await self._background.shielded(self._create(config, by))

    async def check(self, config: TaskConfig) -> Prospect:
        """What a task that `create` would accept would send.

        Nothing is written; raises as `create` does.
        """
        strategy, model, spec = await self._begun(config)
        seeded = config if config.seed is not None else config.model_copy(update={"seed": 0})
        _, bound = await self._checked(seeded, strategy, spec, self._clock())
        profiles = {each.name: each.compressor for each in config.every_profile}
        expected = await self._background.in_thread(
            lambda: {name: expected_bytes(each, spec) for name, each in profiles.items()}
        )
        return Prospect(bound, expected, model.num_bytes)

    async def _begun(self, config: TaskConfig) -> tuple[Strategy, ModelRecord, ModelSpec]:
        """The strategy and the model of a task that is to begin."""
        version = await self._database.read(lambda c: records.task_version(c, config.task))
        if version is not None:
            raise AlreadyExists(f"there is a task {config.task!r} already")
        config.check_new()
        strategy = from_config(config.strategy, config.training)
        await self._check_members(config)
        model = await self._models.get(config.model)
        return strategy, model, await self._store.spec(model.digest)

    async def _create(self, config: TaskConfig, by: str) -> TaskSummary:
        async with self._creating:
            name = config.task
            strategy, source_model, spec = await self._begun(config)
            now = self._clock()
            model = await self._on_grid(source_model, config, now)
            config = config.model_copy(update={"model": model.digest})
            attempt, bound = await self._checked(config, strategy, spec, now)
            record = TaskRecord(
                task=name,
                config=config.model_dump_json(),
                state="running",
                model=model.digest,
                spec=model.spec,
                optimizer_state=await self._first_state(source_model, config, attempt),
                published={},
                round=0,
                rounds=config.rounds,
                max_body_bytes=bound,
                created_at=now,
                ended_at=None,
            )
            task = self._store.memory.task_of(record)
            await self._store.apply(task, Create(by, model, attempt))
        _log.info("task %s begins: %d rounds", name, config.rounds)
        return self._store.get(name).summary

    async def _checked(
        self, config: TaskConfig, strategy: Strategy, spec: ModelSpec, now: float
    ) -> tuple[Attempt, int]:
        """The first attempt, and the bytes of the largest upload of any round."""
        most, memory = self._settings.max_body_bytes, self._settings.fold_memory_bytes
        begin = partial(
            opened,
            strategy=strategy,
            payloads=self._payloads,
            host=self._host,
            carryover=RoundCarryover.beginning(config.model, spec),
            number=1,
            attempt=1,
            now=now,
        )
        check = partial(checked_task, config, strategy, begin, spec, most=most, memory=memory)
        return await self._background.in_thread(check)

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
        source_model: ModelRecord,
        config: TaskConfig,
        attempt: Attempt,
        last: str | None = None,
    ) -> str | None:
        if config.downlink is None:
            return None
        shared = attempt.terms.shared
        return await self._background.in_thread(
            first_state, source_model.digest, shared, self._payloads, last
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

    async def continue_(
        self, name: str, more: Continuation, *, by: str = audit.SERVER
    ) -> TaskSummary:
        """More rounds for a task that has stopped; once it has them, the same call changes nothing.

        Its optimizer begins anew. Raises Conflict if the task is running or is not where `more`
        takes it to be, ConfigurationError if it cannot go on from the model: with control variates
        or delta from none, with ef21 only from its own.
        """
        return await self._background.shielded(self._continue(name, more, by))

    async def _continue(self, name: str, more: Continuation, by: str) -> TaskSummary:
        source_model = await self._models.get(more.model)
        while True:
            task = await self._store.fresh(name)
            async with task.lock:  # or its memory is ahead of what is made here
                command = await self._continuation(task, more, source_model, by)
            if command is None:
                return task.summary
            if await self._store.apply(task, command):
                _log.info("task %s goes on for %d rounds", name, more.rounds)
                return task.summary

    async def _continuation(
        self, task: LiveTask, more: Continuation, source_model: ModelRecord, by: str
    ) -> Continue | None:
        """The command by which the task goes on as it is now; None if it does already."""
        record, name, last = task.record, task.record.task, more.after_round + more.rounds
        if source_model.spec != record.spec:
            raise ConfigurationError(f"model {more.model[:12]} has other tensors than the task")
        model = await self._on_grid(source_model, task.config, self._clock())
        last_round = await self._database.read(
            lambda c: records.newest_attempt(c, name, more.after_round + 1)
        )
        is_same = record.rounds == last and record.state != "cancelled"
        if is_same and last_round is not None and last_round.base_model == model.digest:
            return None
        _check_can_continue(task, more)
        task.config.check_phases()
        num_attempts = 0 if last_round is None else last_round.attempt
        changes = {
            "rounds": last,
            "schedule_after": more.after_round,
            "max_attempts": task.config.max_attempts + num_attempts,  # those before do not count
        }
        config = task.config.model_copy(update=changes)
        carryover = RoundCarryover.beginning(
            model.digest,
            await self._store.spec(model.digest),
            previous=await self._previous(task, more, model.digest),
            clip=await self._database.read(lambda c: privacy.last_clip(c, name)),
        )
        follows = opened(
            config,
            task.strategy,
            self._payloads,
            self._host,
            carryover=carryover,
            number=more.after_round + 1,
            attempt=num_attempts + 1,
            now=self._clock(),
        )
        check_warm_up(follows.terms, task.strategy)
        attempt = follows
        follows = await self._database.read(lambda c: without_excluded(c, attempt))
        optimizer_state = record.optimizer_state if model.digest == record.model else None
        state = await self._first_state(source_model, config, follows, optimizer_state)
        return Continue(by, model, config, follows, state, record.version)

    async def _previous(self, task: LiveTask, more: Continuation, model: str) -> str | None:
        """The model before `model`, for compressors whose clients keep estimates with a mean equal
        to the last step (ef21); None without one, or before the first round.

        Raises ConfigurationError where that step is not known: the mean would begin at zero, and
        the estimates where they are.
        """
        if not more.after_round or not task.config.needs_plain_mean:
            return None
        last = await self._database.read(
            lambda c: records.newest_attempt(c, task.record.task, more.after_round)
        )
        if last is None or last.model != model:
            raise ConfigurationError(
                "a compressor that follows the model's last step (ef21) cannot continue from "
                "another model: the mean of its devices' estimates is the task's own last step",
                hint="continue from the task's model, or begin a new task from this one",
            )
        return last.base_model  # which retention keeps: it is in the newest attempt's plan

    async def pause(self, name: str, *, by: str = audit.SERVER) -> TaskSummary:
        """Give no device work from now on; what was given is taken, and may end the round.

        Done again, it changes nothing. Raises Conflict unless the task is running.
        """
        return await self._apply(name, Pause(by))

    async def resume(self, name: str, *, by: str = audit.SERVER) -> TaskSummary:
        """Give devices work again, where the task was paused. Raises Conflict as `pause`."""
        return await self._apply(name, Resume(by))

    async def finish(self, name: str, *, by: str = audit.SERVER) -> TaskSummary:
        """End a paused task for good. Raises Conflict unless it is paused or finished."""
        return await self._apply(name, Finish(by))

    async def _apply(self, name: str, command: Command) -> TaskSummary:
        task = await self._store.fresh(name)
        await self._store.apply(task, command)
        return task.summary

    async def cancel(self, name: str, detail: str, *, by: str = audit.SERVER) -> TaskSummary:
        return await self._end(name, Cancelled(detail), AuditEntry(by, "task.cancelled", detail))

    async def abort_round(self, name: str, detail: str, *, by: str = audit.SERVER) -> TaskSummary:
        return await self._end(name, Aborted(detail), AuditEntry(by, "round.aborted", detail))

    async def _end(self, name: str, event: Event, entry: AuditEntry) -> TaskSummary:
        task = await self._store.fresh(name)
        if not await self._store.apply(task, Happen(event, payload=entry)):
            raise Conflict(f"task {name!r} is {task.record.state}", task=name)
        return task.summary


def _check_can_continue(task: LiveTask, more: Continuation) -> None:
    record, name = task.record, task.record.task
    if record.state == "running" or record.round != more.after_round:
        raise Conflict(
            f"task {name!r} is {record.state} after {record.round} rounds; to go on after "
            f"{more.after_round} it must have stopped there",
            task=name,
        )
    needs = [profile.compressor.needs for profile in task.config.every_profile]
    if task.strategy.client_terms.control is not None or any("own" in each for each in needs):
        raise ConfigurationError(
            "control variates, and uploads that differences are taken to, belong to the models "
            "they were made on",
            hint="begin a new task from the model",
        )
