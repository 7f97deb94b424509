"""A region as one client of an upper server: hierarchical federation out of two ordinary ones.

The upper server sees a device. Its training is a task of the region's own server: for each
assignment the task goes on for `rounds` rounds from the upper model and pauses, and what the region
has come to is the one update that goes up. The upper plan's compressor and error feedback compress
it, the region's profiles say what travels inside. (Hierarchical federated averaging, Liu et al.
2020, arXiv:1905.06641, Algorithm 1.)
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from fedpress.operator import Operator
from fedpress_client.trainer import Evaluation, Trained, TrainingRequest
from fedpress_protocols.errors import (
    ConfigurationError,
    StateCorrupt,
    TransportError,
    Unavailable,
    UnknownTask,
)
from fedpress_protocols.local_files import replace_file
from fedpress_protocols.messages import Continuation, TaskConfig, TaskSummary
from fedpress_protocols.model import Model
from fedpress_protocols.validation import format_validation_errors

T = TypeVar("T")
_log = logging.getLogger(__name__)
_ANY_MODEL = "0" * 64


class RegionalTrainer:
    """Trains by having a region train: `rounds` rounds of a task at the server behind `region`, or
    fewer if the task's evaluation stops it early.

    `template` is the region's task without `model`, `rounds` and `at_end`, which are the relay's to
    set. `folder` holds which of the upper server's assignments is under way, so that a relay that
    is killed goes on with it, and never brings one leg up twice. The update counts for the mean
    number of examples of the leg's rounds.
    """

    def __init__(
        self,
        region: Operator,
        template: dict[str, Any],
        rounds: int,
        folder: Path,
        *,
        poll_seconds: float = 1.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if rounds < 1:
            raise ConfigurationError(f"rounds must be at least 1, not {rounds}")
        strange = sorted({"model", "rounds", "at_end"} & set(template))
        if strange or "task" not in template:
            raise ConfigurationError(
                f"the region's task sets {', '.join(strange)}" if strange else "it has no name",
                hint="give it a task's name, profiles and cohort; the relay sets the rest",
            )
        if template.get("downlink") is not None:
            raise ConfigurationError(
                "the region's task has a downlink, and what that has not sent down yet would be "
                "lost with every leg, which begins at another model",
                hint="leave it out: the upper task may have one, which its regions' models come by",
            )
        self._region, self._template, self._rounds = region, template, rounds
        if self._config(_ANY_MODEL).needs_plain_mean:
            raise ConfigurationError(
                "the region's task has a compressor that follows the model's last step (ef21), and "
                "every leg begins at another model",
                hint="use error_feedback, whose residual serves every model; the upper task may "
                "have ef21",
            )
        self._task = str(template["task"])
        self._file = folder / f"relay-{self._task}.json"
        self._poll, self._sleep = poll_seconds, sleep
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def train(self, model: Model, work: TrainingRequest) -> Trained:
        """One leg of the region's task from `model`; waits as long as it takes."""
        leg = f"{work.task} {work.round}.{work.attempt} {model.digest}"
        start = self._start_of(leg)
        _log.info("upper round %d.%d: after round %d here", work.round, work.attempt, start)
        self._patiently(lambda: self._begin(model, start))
        summary = self._until_it_stops()
        if summary.state == "cancelled" or summary.round <= start:
            raise ConfigurationError(
                f"the region's task {self._task!r} is {summary.state} after {summary.round} rounds "
                f"where more than {start} are due",
                hint="see the region's rounds for the reason",
            )
        trained = self._patiently(lambda: self._region.model(summary.model))
        done = self._patiently(lambda: self._region.rounds(self._task))
        counts = [
            status.num_examples
            for status in done
            if status.state == "committed" and start < status.round <= start + self._rounds
        ]
        return Trained(trained.parameters, max(1, round(sum(counts) / len(counts))))

    def evaluate(self, model: Model) -> Evaluation | None:
        """None: the region's devices report to the region."""
        return None

    def finish(self) -> None:
        """Let the region's devices go: no leg follows. Nothing if there was none."""
        try:
            self._patiently(lambda: self._region.finish_task(self._task))
        except UnknownTask:
            _log.info("the region has no task %s", self._task)

    def _start_of(self, leg: str) -> int:
        """After which of the region's rounds `leg` begins: as noted, or after its last."""
        noted = self._noted()
        if noted is not None and noted[0] == leg:
            return noted[1]
        try:
            start = self._until_it_stops().round
        except UnknownTask:
            start = 0
        temporary = self._file.with_suffix(".tmp")
        with temporary.open("w", encoding="utf-8") as file:
            json.dump({"leg": leg, "start": start}, file)
            file.flush()
            os.fsync(file.fileno())
        replace_file(temporary, self._file)
        return start

    def _noted(self) -> tuple[str, int] | None:
        try:
            note = json.loads(self._file.read_text(encoding="utf-8"))
            return str(note["leg"]), int(note["start"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as exc:
            raise StateCorrupt(
                f"{self._file} is not a relay's note: {exc}", hint="remove it"
            ) from exc

    def _begin(self, model: Model, start: int) -> None:
        """Repeating it changes nothing."""
        digest = self._region.register_model(model)
        try:
            self._region.task(self._task)
        except UnknownTask:
            self._region.create_task(self._config(digest))
        else:
            more = Continuation(after_round=start, rounds=self._rounds, model=digest)
            self._region.continue_task(self._task, more)

    def _config(self, model: str) -> TaskConfig:
        """The region's task from a model; raises ConfigurationError."""
        set_here = {"model": model, "rounds": self._rounds, "at_end": "paused"}
        try:
            return TaskConfig.model_validate({**self._template, **set_here})
        except ValidationError as exc:
            raise ConfigurationError(f"the region's task: {format_validation_errors(exc)}") from exc

    def _until_it_stops(self) -> TaskSummary:
        while True:
            summary = self._patiently(lambda: self._region.task(self._task))
            if summary.state != "running":
                return summary
            self._sleep(self._poll)

    def _patiently(self, ask: Callable[[], T]) -> T:
        """Call the region's server until it answers, however long it is unreachable."""
        pause = self._poll
        while True:
            try:
                return ask()
            except (TransportError, Unavailable) as exc:
                _log.warning("the region: %s; again in %g s", exc, pause)
                self._sleep(pause)
                pause = min(2 * pause, 60.0)
