"""A cache of the evaluation results of a task's models, updated incrementally.

The commit of a round needs the best model, the check for early stopping and the history of losses.
These depend on all reports of the task, but a new report changes only one model's means. Each
report marks its model as changed with the task's next number, in its own transaction, so that one
index lists the models to read again.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Lock

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fedpress_protocols.messages import EvaluationTerms
from fedpress_server.storage import evaluation
from fedpress_server.storage.evaluation import Place, Score
from fedpress_server.storage.tables import measured_models
from fedpress_strategies.policies.facts import Tally

_TOGETHER = 500
"""Models per statement."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The results of a model: by metric the number of devices and the mean; by class the examples
    and correct predictions, and the number of devices that counted."""

    means: dict[str, tuple[int, float]]
    classes: dict[str, Tally]
    counted_by: int


class Scoreboard:
    """The results of the measured models of `task` by `metrics`. Thread-safe."""

    def __init__(self, task: str, metrics: Sequence[str], *, has_classes: bool) -> None:
        self._task = task
        self._metrics = tuple(dict.fromkeys(metrics))
        self._has_classes = has_classes
        self._lock = Lock()
        self._seen = 0
        """The number of the last processed change."""
        self._figures: dict[str, Figures] = {}
        self._order: list[tuple[Place, str]] = []

    def scores(self, connection: Connection, metric: str, least: int) -> list[Score]:
        """Scores of the models measured by at least `least` devices, in order of rounds."""
        with self._lock:
            self._look(connection)
            return [
                Score(place.number, model, mean)
                for place, model in self._order
                for num, mean in self._of(model, metric)
                if num >= least
            ]

    def rated(self, connection: Connection, terms: EvaluationTerms) -> list[Score]:
        """Scores by the metric in the task's evaluation terms."""
        return self.scores(connection, terms.metric, terms.least_clients)

    def counted(self, connection: Connection, least: int) -> dict[int, dict[str, Tally]]:
        """By round of the model, for models counted by at least `least` devices: examples and
        correct predictions by class."""
        with self._lock:
            self._look(connection)
            return {
                place.number: figures.classes
                for place, model in self._order
                if (figures := self._figures[model]).counted_by >= least
            }

    def _of(self, model: str, metric: str) -> Iterator[tuple[int, float]]:
        figure = self._figures[model].means.get(metric)
        if figure is not None:
            yield figure

    def _look(self, connection: Connection) -> None:
        """Read the changes. The cache is only updated after all are read, since a transaction that
        is rolled back runs again."""
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
