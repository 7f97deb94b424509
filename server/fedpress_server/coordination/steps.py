"""A task as the commands of a batch leave it, command by command, before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any

from fedpress_protocols.messages import TaskConfig
from fedpress_server.aggregation.aggregate import AggregationResult
from fedpress_server.coordination.attempts import Attempt
from fedpress_server.coordination.commands import Command, Outcome
from fedpress_server.coordination.live import LiveTask, PendingCommand
from fedpress_server.identity import audit
from fedpress_server.rounds import CarriedOver, Effect, Event
from fedpress_server.storage.leases import Job
from fedpress_server.storage.records import ModelRecord, TaskRecord


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the audit log about the task."""

    by: str
    action: audit.Action
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AppliedEvent:
    """An event that has happened to an attempt."""

    event: Event
    before: Attempt
    after: Attempt
    effects: tuple[Effect, ...]
    result: AggregationResult | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The effect of one command on a task: the task after it, and all that is written besides."""

    command: Command
    record: TaskRecord
    config: TaskConfig
    attempt: Attempt | None
    """The one that is open after the step."""
    applied: AppliedEvent | None = None
    opened: Attempt | None = None
    """An attempt that begins with the step."""
    carried: tuple[CarriedOver, tuple[Effect, ...]] | None = None
    """The first event of `opened`, if it takes over assignments of the one before."""
    model: ModelRecord | None = None
    """With which the task begins, or goes on."""
    entries: tuple[Entry, ...] = ()
    jobs: tuple[Job, ...] = ()
    """Jobs to insert."""

    @property
    def effects(self) -> tuple[Effect, ...]:
        return () if self.applied is None else self.applied.effects

    @property
    def ends_attempt(self) -> bool:
        return self.applied is not None and self.applied.after.round.is_over


@dataclass
class Draft:
    """A task in memory, and what the steps so far have made of it."""

    task: LiveTask
    steps: list[Step] = field(default_factory=list)

    @property
    def record(self) -> TaskRecord:
        return self.steps[-1].record if self.steps else self.task.record

    @property
    def config(self) -> TaskConfig:
        return self.steps[-1].config if self.steps else self.task.config

    @property
    def attempt(self) -> Attempt | None:
        return self.steps[-1].attempt if self.steps else self.task.attempt


@dataclass
class Batch:
    """Commands that were decided together: those with a step or without a place, in their order,
    and those that the task refuses."""

    draft: Draft
    now: float
    decided: list[tuple[PendingCommand, Step | None]] = field(default_factory=list)
    refused: list[tuple[PendingCommand, Exception]] = field(default_factory=list)

    @property
    def context(self) -> Context:
        """Of the last command with a step, the only one that can end an attempt."""
        return next(each.context for each, step in reversed(self.decided) if step is not None)

    @property
    def is_complete(self) -> bool:
        """Whether every command of it has a step."""
        return not self.refused and all(step is not None for _, step in self.decided)

    def conclude(self) -> int:
        """Tell everybody who waits; the number of commands that somebody waits for."""
        for pending, step in self.decided:
            effects = () if step is None else step.effects
            pending.succeed(Outcome(self.now, step is not None, effects))
        for pending, reason in self.refused:
            pending.fail(reason)
        commands = [pending for pending, _ in (*self.decided, *self.refused)]
        return sum(pending.outcome is not None for pending in commands)
