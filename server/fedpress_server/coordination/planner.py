"""The step that a command makes of a task, decided in memory and from what is on the disk.

Nothing is written here. The store asks for the step of each command of a batch, writes all of them
in one transaction, and asks again where another server was first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fedpress_protocols.errors import Conflict
from fedpress_server.aggregation.masked import Host
from fedpress_server.coordination.attempts import Attempt
from fedpress_server.coordination.background import Background
from fedpress_server.coordination.commands import (
    Command,
    Continue,
    Create,
    Finish,
    GivePlace,
    GivePlaces,
    Happen,
    Pause,
    Rate,
    ReceivedMessage,
    RecoverJobs,
    Resume,
)
from fedpress_server.coordination.jobs import jobs_of
from fedpress_server.coordination.journal import without_excluded
from fedpress_server.coordination.live import HELD, LiveTask, PendingCommand
from fedpress_server.coordination.opening import (
    RoundCarryover,
    history_before,
    opened,
)
from fedpress_server.coordination.placement import Placement
from fedpress_server.coordination.steps import AppliedEvent, Batch, Draft, Entry, Step
from fedpress_server.identity import audit
from fedpress_server.rounds import (
    Aggregated,
    Cancelled,
    CarriedOver,
    Effect,
    EndTask,
    OpenRound,
    Said,
)
from fedpress_server.storage import evaluation, leases
from fedpress_server.storage.database import Database
from fedpress_server.storage.payloads import Payloads
from fedpress_server.storage.records import TaskRecord


class BeginsBatch(Exception):
    """The step reads rows that steps before it in the batch have yet to write."""


class Planner:
    """Decides what commands come to."""

    def __init__(
        self,
        database: Database,
        payloads: Payloads,
        host: Host,
        background: Background,
        placement: Placement,
    ) -> None:
        self._database = database
        self._payloads = payloads
        self._host = host
        self._background = background
        self._placement = placement

    async def plan(self, task: LiveTask, commands: Sequence[PendingCommand], now: float) -> Batch:
        """Steps for the first of `commands`, from the task as memory has it; what the task has
        against one of them (Conflict, MalformedRequest, ...) concerns that one alone."""
        draft = Draft(task)
        batch = Batch(draft, now)
        for pending in commands:
            command = pending.command
            try:
                if isinstance(command, Happen):
                    step = await self._happen(draft, command, now)
                else:
                    step = await self._other(draft, command, now)
            except BeginsBatch:
                break
            except Exception as exc:
                if pending.outcome is None:
                    raise
                batch.refused.append((pending, exc))
                continue
            batch.decided.append((pending, step))
            if step is not None:
                draft.steps.append(step)
                if step.ends_attempt or step.opened is not None:
                    break
        return batch

    async def _other(self, draft: Draft, command: Command, now: float) -> Step | None:
        match command:
            case GivePlace() | GivePlaces():
                _check_first(draft)
                placed = await self._placement.resolve(draft.task, command, now)
                return None if placed is None else await self._happen(draft, placed, now)
            case Create():
                return self._create(draft, command)
            case Continue():
                return self._continue(draft, command)
            case Pause(by):
                return _paused(draft, command, by, now)
            case Resume(by):
                return _paused(draft, command, by, None)
            case Finish(by):
                return _finished(draft, command, by)
            case Rate():
                return await self._rate(draft, command)
            case RecoverJobs():
                return await self._recover_jobs(draft, command)
            case _:
                raise TypeError(f"no command: {command!r}")

    # Rounds

    async def _happen(self, draft: Draft, command: Happen, now: float) -> Step | None:
        attempt, event, result = draft.attempt, command.event, command.result
        if attempt is None or not attempt.concerns(event, command.key):
            return None
        if attempt.round.is_masked and attempt.session is None:
            # A session may begin with it.
            await self._background.in_thread(lambda: attempt.terms.payload)
        if isinstance(event, Said) and isinstance(command.payload, ReceivedMessage):
            message = command.payload.message
            event = replace(event, message=message.message)
            if not attempt.admits(event, message.identity, now):
                return None
        after, effects = attempt.after(event, now)
        if not effects:
            return None
        applied = AppliedEvent(event, attempt, after, effects, result)
        record = _after_event(draft.record, applied, now)
        follows, carry_over = None, None
        if any(isinstance(each, OpenRound | EndTask) for each in effects):
            _check_first(draft)  # the round that opens goes by what uploads came
            follows, carry_over = await self._follow(draft, applied, now)
        is_over = after.round.is_over
        return Step(
            command=command,
            record=record,
            config=draft.config,
            attempt=follows if is_over else after,
            applied=applied,
            opened=follows,
            carried=carry_over,
            entries=_entries(draft.record, record, command, after),
        )

    async def _follow(
        self, draft: Draft, applied: AppliedEvent, now: float
    ) -> tuple[Attempt | None, tuple[CarriedOver, tuple[Effect, ...]] | None]:
        """The attempt that follows the one that is over, and what it takes over from it."""
        opens = next((each for each in applied.effects if isinstance(each, OpenRound)), None)
        if opens is None:
            return None, None
        task, config, previous, event = draft.task, draft.config, applied.before, applied.event
        spec, board = previous.terms.spec, task.scoreboard
        history = await self._database.read(
            lambda c: history_before(c, config, spec, board, opens, event)
        )
        follows = opened(
            config,
            task.strategy,
            self._payloads,
            self._host,
            carryover=RoundCarryover.after(previous.terms, applied.result, history),
            number=opens.number,
            attempt=opens.attempt,
            now=now,
        )
        carry_over = None
        if opens.opening is not None:
            follows, effects = follows.taking_over(previous, opens.opening, now)
            carry_over = opens.opening, effects
        if follows.round.is_masked or config.privacy is not None:
            attempt, session = follows, applied.after.session
            status = None if session is None else session.status
            follows = await self._database.read(lambda c: without_excluded(c, attempt, status))
        return follows, carry_over

    # Operators

    def _create(self, draft: Draft, command: Create) -> Step:
        record = draft.record
        details = {"model": command.model.digest, "rounds": record.rounds}
        return Step(
            command=command,
            record=record,
            config=draft.config,
            attempt=command.attempt,
            opened=command.attempt,
            model=command.model,
            entries=(Entry(command.by, "task.created", details),),
        )

    def _continue(self, draft: Draft, command: Continue) -> Step | None:
        if draft.steps or draft.record.version != command.seen:
            return None
        model, rounds = command.model.digest, command.config.rounds
        record = replace(
            draft.record,
            config=command.config.model_dump_json(),
            state="running",
            model=model,
            optimizer_state=command.optimizer_state,
            published={},
            rounds=rounds,
            ended_at=None,
            reason=None,
            held_at=None,
        )
        return Step(
            command=command,
            record=record,
            config=command.config,
            attempt=command.attempt,
            opened=command.attempt,
            model=command.model,
            entries=(Entry(command.by, "task.continued", {"model": model, "rounds": rounds}),),
        )

    async def _rate(self, draft: Draft, command: Rate) -> Step | None:
        _check_first(draft)
        task, terms = draft.task, draft.config.evaluation
        rated = await self._database.read(lambda c: task.scoreboard.rated(c, terms))
        best = evaluation.best(rated, terms)
        if draft.attempt is not None or best == draft.record.best:
            return None
        return _with_record(draft, command, replace(draft.record, best=best))

    async def _recover_jobs(self, draft: Draft, command: RecoverJobs) -> Step | None:
        _check_first(draft)
        attempt = draft.attempt
        due = () if attempt is None else tuple(jobs_of(attempt, draft.task.strategy))
        if not due or await self._database.read(lambda c: leases.has_outputs(c, due)):
            return None
        return _with_record(draft, command, draft.record, jobs=due)


def _check_first(draft: Draft) -> None:
    if draft.steps:
        raise BeginsBatch


def _with_record(draft: Draft, command: Command, record: TaskRecord, **more: Any) -> Step:
    """A step that leaves the attempt as it is."""
    return Step(command=command, record=record, config=draft.config, attempt=draft.attempt, **more)


def _after_event(record: TaskRecord, applied: AppliedEvent, now: float) -> TaskRecord:
    """The task's row after an event; the very same row where nothing of it changes."""
    result = applied.result
    if result is not None:
        record = replace(
            record,
            model=result.model,
            optimizer_state=result.optimizer_state,
            published={name: digest for name, (digest, _) in result.published.items()},
            round=applied.after.round.number,
        )
    if isinstance(applied.event, Aggregated):
        record = replace(record, best=applied.event.best)
    for effect in applied.effects:
        if isinstance(effect, EndTask):
            reason = applied.after.round.reason if effect.state != "running" else record.reason
            record = replace(record, state=effect.state, ended_at=now, reason=reason)
    return record


def _entries(
    before: TaskRecord, record: TaskRecord, command: Happen, after: Attempt
) -> tuple[Entry, ...]:
    """Lines of the audit log: that the task has ended of itself, and whom a session has named."""
    entries = []
    if record.state != before.state and not isinstance(command.event, Cancelled):
        details = {"state": record.state, "reason": record.reason or ""}
        entries.append(Entry(audit.SERVER, "task.ended", details))
    suspects = after.session.status.suspects if after.session is not None else ()
    if after.round.is_over and suspects:
        where = {"round": after.round.number, "attempt": after.round.attempt}
        fields = {**where, "clients": list(suspects)}
        entries.append(Entry(audit.SERVER, "session.disturbed", fields))
    return tuple(entries)


def _paused(draft: Draft, command: Command, by: str, since: float | None) -> Step | None:
    record = draft.record
    if record.state != "running":
        raise Conflict(
            f"{_described(record)}; only a running one is paused and resumed",
            hint="fedpress task continue gives one that has stopped more rounds",
            task=record.task,
        )
    if (record.held_at is None) == (since is None):
        return None
    entry = Entry(by, "task.resumed" if since is None else "task.paused")
    return _with_record(draft, command, replace(record, held_at=since), entries=(entry,))


def _finished(draft: Draft, command: Command, by: str) -> Step | None:
    record = draft.record
    if record.state == "finished":
        return None
    if record.state != "paused":
        raise Conflict(
            f"{_described(record)}; only one that paused after its last round is finished",
            hint="fedpress task resume lets a held one go on, fedpress task cancel ends it",
            task=record.task,
        )
    after = replace(record, state="finished")
    return _with_record(draft, command, after, entries=(Entry(by, "task.finished"),))


def _described(record: TaskRecord) -> str:
    """The task and its state, which tells the two kinds of pause apart."""
    more = " after its last round" if record.state == "paused" else ""
    if record.state == "running" and record.held_at is not None:
        more = f", {HELD}"
    return f"task {record.task!r} is {record.state}{more}"
