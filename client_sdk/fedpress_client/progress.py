"""Progress within the steps of a round, for a bar on a screen; see `Client(on_progress=...)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fedpress_client.events import EventLog

Step: TypeAlias = Literal["download", "train", "compress", "upload"]
Report: TypeAlias = Callable[[float, float | None], None]
"""Called with what is done, and the whole, None if that is not known."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a step is: `done` of `total`, which is None where the whole is not known.

    "download" and "upload" count bytes, of each file and body anew, and again from less after a
    connection that broke; "train" counts what the trainer does, such as optimizer steps; "compress"
    is 0 or 1 of 1. `round` is 0 where a download belongs to none.
    """

    step: Step
    done: float
    total: float | None
    task: str = ""
    round: int = 0

    @property
    def is_done(self) -> bool:
        return self.total is not None and self.done >= self.total


@dataclass(slots=True)
class ProgressLog:
    """Completes progress with its task and round, and passes it on."""

    on_progress: Callable[[Progress], None] | None
    events: EventLog
    round: int = 0
    _last: Progress | None = None

    def report(self, step: Step, done: float, total: float | None) -> None:
        if self.on_progress is None:
            return
        self._last = Progress(step, done, total, self.events.task, self.round)
        self.on_progress(self._last)

    def of(self, step: Step) -> Report:
        """What reports on one step alone."""
        return lambda done, total: self.report(step, done, total)

    def finish(self, step: Step) -> None:
        """The step is over, whatever was reported on it."""
        last = self._last
        if last is None or last.step != step or not last.is_done:
            total = last.total if last is not None and last.step == step else None
            self.report(step, total or 1, total or 1)


def unreported(done: float, total: float | None) -> None:
    """Report to nobody."""
