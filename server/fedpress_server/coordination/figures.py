"""Gauges computed when metrics are scraped, and the durations of rounds' phases."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress

from fedpress_server.coordination.attempts import Attempt
from fedpress_server.coordination.live import LiveTask
from fedpress_server.metrics import Metrics
from fedpress_server.observing import traces
from fedpress_server.rounds import Part
from fedpress_server.settings import Settings
from fedpress_server.storage.database import Database
from fedpress_server.storage.records import RoundKey


class Figures:
    """Sets the gauges that nobody keeps up to date, from memory and from the operating system."""

    def __init__(
        self,
        metrics: Metrics,
        settings: Settings,
        database: Database,
        tasks: Mapping[str, LiveTask],
        version: str,
    ) -> None:
        self._metrics, self._database, self._tasks = metrics, database, tasks
        self._folders = settings.watched
        metrics.build.labels(version, settings.role).set(1)
        metrics.bytes_in_flight_limit.set(settings.max_bytes_in_flight)

    def set(self) -> None:
        """To be called in the event loop's thread; with 10,000 clients in a round 2 ms."""
        self._of_tasks()
        self._of_storage()

    def _of_tasks(self) -> None:
        metrics = self._metrics
        for gauge in (
            metrics.model_version,
            metrics.round_state,
            metrics.round_deadline,
            metrics.participants,
            metrics.tasks,
        ):
            gauge.clear()
        states: Counter[str] = Counter()
        for name, task in self._tasks.items():
            states[task.record.state] += 1
            metrics.model_version.labels(name).set(task.record.round)
            if task.attempt is None:
                continue
            round_, privacy = task.attempt.round, task.config.privacy
            if privacy is not None:
                spent = privacy.spent(round_.participations)
                metrics.privacy_epsilon.labels(name).set(spent)
            metrics.round_state.labels(name, round_.phase).set(1)
            if round_.phase == "collecting" and math.isfinite(round_.deadline):
                metrics.round_deadline.labels(name).set(round_.deadline)
            for state, number in Counter(map(_state, round_.parts.values())).items():
                metrics.participants.labels(name, state).set(number)
        for state, number in states.items():
            metrics.tasks.labels(state).set(number)

    def _of_storage(self) -> None:
        metrics, load = self._metrics, self._database.load()
        metrics.connections.labels("used").set(load.used)
        metrics.connections.labels("idle").set(load.idle)
        metrics.waiting_writes.set(load.waiting_writes)
        metrics.wal_bytes.set(load.wal_bytes)
        for folder in self._folders:
            with suppress(OSError):
                disk = shutil.disk_usage(folder)
                metrics.disk_free.labels(str(folder)).set(disk.free)
                metrics.disk_size.labels(str(folder)).set(disk.total)


def _state(part: Part) -> str:
    if part.reason is not None:
        return part.reason
    if part.upload is not None:
        return "staged"
    return "ready" if part.is_ready else "assigned"


class Phases:
    """Time of each attempt in its phase, for phases that this process saw begin.

    Of several servers the one that ends a phase records its duration. A phase that began before
    this process did is not recorded.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._seen: dict[str, tuple[RoundKey, str, float | None, float | None]] = {}
        """By task: the attempt, its phase, since when, and when the attempt was opened."""

    def observe(self, task: str, attempt: Attempt | None, now: float, *, began: bool) -> None:
        """The task is at this attempt now; whether what it is at `began` just now."""
        if attempt is None:
            self._seen.pop(task, None)
            return
        key, phase = attempt.key, attempt.round.phase
        before = self._seen.get(task)
        since = now if began else None
        if before is None or before[0] != key:
            self._seen[task] = key, phase, since, since
        elif before[1] != phase:
            self._seen[task] = key, phase, since, before[3]

    def record(self, task: str, before: Attempt, after: Attempt, now: float) -> None:
        """This process has moved the attempt on."""
        if before.round.phase == after.round.phase:
            return
        timing = self._seen.get(task)
        if timing is not None and timing[:2] == (before.key, before.round.phase):
            if timing[2] is not None:
                self._tell(task, before.round.phase, now - timing[2])
                traces.phase(before.key, before.round.phase, timing[2], now)
            if after.round.is_over and timing[3] is not None:
                self._tell(task, "total", now - timing[3])
                traces.whole(before.key, after.round.phase, timing[3], now)

    def _tell(self, task: str, phase: str, seconds: float) -> None:
        self._metrics.round_seconds.labels(task, phase).observe(max(0.0, seconds))
