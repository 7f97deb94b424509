"""What devices measured of a task's models, in memory: read once, and then no more than what has
changed.

A step that commits a round asks which model is the best, whether it is time to stop and how the
losses went. The answer hangs on every report of the task's history; what hangs on a report that
came since the last time is one model's mean. Each report notes its model as changed under the
task's next number, in its own transaction, so that whoever asks sees by one index what to read
again.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Lock

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fedpress_protocols.messages import EvaluationTerms
from fedpress_server.policies.facts import Tally
from fedpress_server.storage import evaluation
from fedpress_server.storage.evaluation import Place, Score
from fedpress_server.storage.tables import measured_models

_TOGETHER = 500
"""Models that one statement reads."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What a model came to: by metric, how many devices have measured it and their mean; by class
    the examples and how many it was right of, and how many devices have counted."""

    means: dict[str, tuple[int, float]]
    classes: dict[str, Tally]
    counted_by: int


class Scoreboard:
    """Of the models of `task` that were measured, by `metrics`. To be asked from any thread."""

    def __init__(self, task: str, metrics: Sequence[str], *, has_classes: bool) -> None:
        self._task = task
        self._metrics = tuple(dict.fromkeys(metrics))
        self._has_classes = has_classes
        self._lock = Lock()
        self._seen = 0
        """The number of the last change that was taken account of."""
        self._figures: dict[str, Figures] = {}
        self._order: list[tuple[Place, str]] = []

    def scores(self, connection: Connection, metric: str, least: int) -> list[Score]:
        """Of the models that `least` devices or more have measured, in the order of the rounds."""
        with self._lock:
            self._look(connection)
            return [
                Score(place.number, model, mean)
                for place, model in self._order
                for num, mean in self._of(model, metric)
                if num >= least
            ]

    def rated(self, connection: Connection, terms: EvaluationTerms) -> list[Score]:
        """The same for what a task goes by."""
        return self.scores(connection, terms.metric, terms.least_clients)

    def counted(self, connection: Connection, least: int) -> dict[int, dict[str, Tally]]:
        """By the round that made the model, of models that `least` devices or more counted: by
        class the examples, and how many the model was right of."""
        with self._lock:
            self._look(connection)
            return {
                place.number: figures.classes
                for place, model in self._order
                if (figures := self._figures[model]).counted_by >= least
            }

    def _of(self, model: str, metric: str) -> Iterator[tuple[int, float]]:
        found = self._figures[model].means.get(metric)
        if found is not None:
            yield found

    def _look(self, connection: Connection) -> None:
        """Read what has changed. Nothing is taken over before all of it is read: a transaction that
        is undone is asked again."""
        row = measured_models.c
        query = sa.select(row.model, row.change).where(
            row.task == self._task, row.change > self._seen
        )
        changed = {model: change for model, change in connection.execute(query)}
        models = list(changed)
        figures: dict[str, Figures] = {}
        for start in range(0, len(models), _TOGETHER):
            figures |= self._read(connection, models[start : start + _TOGETHER])
        places = [
            (place, model)
            for model in models
            if model not in self._figures
            and (place := evaluation.place_of(connection, self._task, model)) is not None
        ]
        new = {model for _, model in places}
        for model, each in figures.items():
            if model in new or model in self._figures:
                self._figures[model] = each
        for placed in places:
            insort(self._order, placed)
        self._seen = max(changed.values(), default=self._seen)

    def _read(self, connection: Connection, models: Sequence[str]) -> dict[str, Figures]:
        means = evaluation.counted_means(connection, self._task, models, self._metrics)
        classes = {}
        if self._has_classes:
            classes = evaluation.counted_classes(connection, self._task, models)
        return {
            model: Figures(means.get(model, {}), *classes.get(model, ({}, 0))) for model in models
        }
