"""A task in memory: what the disk says of it, and who waits for news of it."""

from __future__ import annotations

import asyncio
from collections import deque
from contextvars import Context, copy_context
from dataclasses import dataclass, field

from fedpress_protocols.messages import TaskConfig, TaskSummary
from fedpress_protocols.policies import divergence_guard
from fedpress_server.coordination.attempts import Attempt
from fedpress_server.coordination.commands import Command, Outcome
from fedpress_server.registry.sweeping import files_of
from fedpress_server.rounds.selection import Candidates
from fedpress_server.storage.records import TaskRecord
from fedpress_server.storage.scoreboard import Scoreboard
from fedpress_strategies import Strategy, from_config

LONGEST_WAIT = 30.0
"""Seconds that a check-in may be held."""
HELD = "held by the operator"
"""The reason that a running task gives for not going on."""


@dataclass(slots=True, eq=False)
class PendingCommand:
    """A command in a task's queue; without an `outcome` nobody waits for it."""

    command: Command
    outcome: asyncio.Future[Outcome] | None
    context: Context = field(default_factory=copy_context)
    """Of whoever gave the command: what its log lines are about."""

    def succeed(self, outcome: Outcome) -> None:
        if self.outcome is not None and not self.outcome.done():
            self.outcome.set_result(outcome)

    def fail(self, reason: BaseException) -> None:
        if self.outcome is not None and not self.outcome.done():
            self.outcome.set_exception(reason)


@dataclass
class LiveTask:
    """A task in memory. What changes is replaced under `lock`, after it is on the disk."""

    record: TaskRecord
    config: TaskConfig
    strategy: Strategy
    candidates: Candidates
    attempt: Attempt | None = None
    """None once the task has ended."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    queue: deque[PendingCommand] = field(default_factory=deque)
    """Commands that wait to be applied."""
    is_draining: bool = False
    """Whether somebody sees to the queue."""
    scoreboard: Scoreboard = field(init=False)

    def __post_init__(self) -> None:
        metrics = (self.config.evaluation.metric, "loss")
        guards = divergence_guard(self.config.policies) is not None
        self.scoreboard = Scoreboard(self.record.task, metrics, has_classes=guards)

    def notify(self) -> None:
        """Wake everybody who waits for news; the next news is another event."""
        self.news.set()
        self.news = asyncio.Event()

    def is_due(self, now: float) -> bool:
        return self.attempt is not None and self.attempt.is_due(now)

    @property
    def files(self) -> set[str]:
        return files_of(self.record, self.attempt.plans if self.attempt else ())

    @property
    def _excluded(self) -> str:
        """The numbers of devices that may not take part by the privacy terms, in words; empty for
        none."""
        round_ = None if self.attempt is None else self.attempt.round
        if round_ is None:
            return ""
        numbers = (
            ("that take no further part, their privacy budget spent", round_.num_spent),
            ("that took part too recently for privacy.separation", round_.num_resting),
        )
        return "; ".join(f"devices {whose}: {number}" for whose, number in numbers if number)

    @property
    def summary(self) -> TaskSummary:
        record = self.record
        return TaskSummary(
            task=record.task,
            state=record.state,
            model=record.model,
            published=record.published or {},
            best=record.best,
            spec=record.spec,
            round=record.round,
            rounds=record.rounds,
            reason=record.reason or (HELD if record.held_at is not None else self._excluded),
            lane=self.config.lane,
            downlink=self.config.downlink is not None,
        )


@dataclass(frozen=True)
class Memory:
    """The tasks that this process holds, by name; `patience`: see `Candidates`."""

    patience: float
    tasks: dict[str, LiveTask] = field(default_factory=dict)

    def task_of(self, record: TaskRecord) -> LiveTask:
        """A task of this row, without its attempt, and not yet among the others."""
        config = TaskConfig.model_validate_json(record.config)
        strategy = from_config(config.strategy, config.training)
        return LiveTask(record, config, strategy, Candidates(self.patience))
