"""The effects of a batch that is on the disk: on memory, metrics, the log, files, and whoever waits
for news."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

from fedpress_server.aggregation.masked import Sums
from fedpress_server.coordination.attempts import Attempt
from fedpress_server.coordination.figures import Phases
from fedpress_server.coordination.file_cleanup import FileCleanup
from fedpress_server.coordination.live import LiveTask
from fedpress_server.coordination.steps import AppliedEvent, Step
from fedpress_server.metrics import Metrics
from fedpress_server.rounds import (
    Assign,
    CohortChosen,
    DeadlinePassed,
    Effect,
    Extend,
    Keep,
    Queue,
    Stage,
)
from fedpress_server.storage.files import artefact_name

_QUIET = Assign | Stage | Queue | Keep
"""Effects that are news for nobody else."""

_log = logging.getLogger(__name__)


class JobSignal:
    """Wakes the job runner when a task may have come to a job."""

    def __init__(self) -> None:
        self.event = asyncio.Event()

    def notify(self, task: LiveTask) -> None:
        if task.attempt is not None and task.attempt.round.phase == "folding":
            self.event.set()


class Publisher:
    """Makes a task in memory what its steps have made of it on the disk, and tells of it."""

    def __init__(
        self, metrics: Metrics, cleanup: FileCleanup, sums: Sums, signal: JobSignal
    ) -> None:
        self._metrics = metrics
        self._cleanup = cleanup
        self._sums = sums
        self._signal = signal
        self._phases = Phases(metrics)

    def publish(
        self, task: LiveTask, steps: Sequence[Step], now: float, *, version: int, keeps: bool
    ) -> None:
        """`version` is the task's by now; whether a backup `keeps` the files that are left."""
        before, files, name = task.attempt, task.files, task.record.task
        last = steps[-1]
        task.record = replace(last.record, version=version)
        task.config, task.attempt = last.config, last.attempt
        for step in steps:
            if step.applied is None:
                continue
            self._phases.record(name, step.applied.before, step.applied.after, now)
            if step.applied.result is not None:
                files |= set(map(artefact_name, step.applied.result.artefacts))
            self._tell_moved(step.applied)
            if isinstance(step.applied.event, CohortChosen):
                task.candidates.chosen([each.client_id for each in step.applied.event.chosen])
        self._phases.observe(name, task.attempt, now, began=True)
        self._cleanup.drop(task, files - task.files, keeps=keeps)
        if last.applied is not None and last.ends_attempt:
            self._cleanup.end(last.applied.after, last.opened, keeps=keeps)
            self._end_attempt(task, last.applied.after, last.opened)
        is_other = any(step.applied is None for step in steps)
        self._tell(task, before, [each for step in steps for each in step.effects], is_other)

    def caught_up(
        self,
        task: LiveTask,
        before: Attempt | None,
        effects: Sequence[Effect],
        now: float,
        *,
        anew: bool,
    ) -> None:
        """The task in memory was read from the disk; `effects` are of events that others wrote."""
        name = task.record.task
        self._metrics.round_number.labels(name).set(task.record.round)
        self._phases.observe(name, task.attempt, now, began=before is not None and not anew)
        if before is not None and (task.attempt is None or task.attempt.key != before.key):
            self._sums.drop(before.key)
        placed = [each.client_id for each in effects if isinstance(each, Assign)]
        if placed:
            task.candidates.chosen(placed)
        self._tell(task, before, effects)

    def _tell(
        self,
        task: LiveTask,
        before: Attempt | None,
        effects: Sequence[Effect],
        is_other: bool = False,
    ) -> None:
        """Wake whoever waits for what changed since `before`."""
        self._signal.notify(task)
        after = task.attempt
        is_other |= before is None or after is None or before.key != after.key
        is_news = is_other or any(not isinstance(each, _QUIET) for each in effects)
        if before is not None and after is not None and not is_other:
            is_news |= after.session_phase != before.session_phase
            is_news |= before.round.places_left <= 0 < after.round.places_left
        if is_news:
            task.notify()

    def _tell_moved(self, applied: AppliedEvent) -> None:
        event, after = applied.event, applied.after
        was_away = isinstance(event, DeadlinePassed) and event.store_was_away
        if was_away and any(isinstance(each, Extend) for each in applied.effects):
            text = "task %s round %d.%d: the store did not answer, so its deadline moves on"
            _log.warning(text, *after.key)

    def _end_attempt(self, task: LiveTask, previous: Attempt, follows: Attempt | None) -> None:
        name, number, attempt = previous.key
        if follows is not None and follows.course is not None:
            self._metrics.follow(name, follows.course)
            for warning in follows.course.warnings:
                _log.warning("task %s round %d: %s", name, follows.round.number, warning)
        self._metrics.rounds.labels(name, previous.round.phase).inc()
        self._metrics.round_number.labels(name).set(task.record.round)
        why = f": {previous.round.reason}" if previous.round.reason else ""
        _log.info("task %s round %d.%d %s%s", name, number, attempt, previous.round.phase, why)
        if task.record.state != "running":
            _log.info("task %s is %s", name, task.record.state)
        self._sums.drop(previous.key)
        for part in previous.round.parts.values():
            if previous.round.is_asynchronous and part.reason == "included":
                self._metrics.staleness.labels(name).observe(previous.round.staleness(part))
        self._end_session(previous)

    def _end_session(self, previous: Attempt) -> None:
        if previous.session is None:
            return
        name, status = previous.key[0], previous.session.status
        for step, num_silent in previous.session.silent.items():
            self._metrics.dropped_out.labels(name, step).inc(num_silent)
        self._metrics.session_seconds.labels(name).observe(status.seconds or 0.0)
        self._metrics.session_failures.labels(name).inc(len(status.failures))
        self._metrics.session_suspects.labels(name).inc(len(status.suspects))
        if status.suspects:
            _log.warning(
                "task %s round %d.%d: disturbed by %s, left out of the next sessions",
                *previous.key,
                ", ".join(status.suspects),
            )
        elif status.failures:
            _log.warning(
                "task %s round %d.%d: shares could not be opened, either may be at fault: %s",
                *previous.key,
                ", ".join(f"{one} of {other}" for one, other in status.failures),
            )
