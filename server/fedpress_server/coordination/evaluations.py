"""Evaluation reports: the metrics of models that devices measure on their own data."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy.engine import Connection

from fedpress_protocols.errors import Conflict, Forbidden, UnknownModel
from fedpress_protocols.messages import ClassCount, EvaluationReport
from fedpress_server.coordination.commands import Rate
from fedpress_server.coordination.task_store import TaskStore
from fedpress_server.metrics import Metrics
from fedpress_server.storage import evaluation
from fedpress_server.storage.database import Database


class Evaluations:
    """Takes the devices' reports."""

    def __init__(
        self, store: TaskStore, database: Database, metrics: Metrics, clock: Callable[[], float]
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._database = database
        self._clock = clock

    async def keep(self, client_id: str, name: str, report: EvaluationReport) -> None:
        """Keep a device's report, of at most the task's `max_examples`, as an upload counts.

        Raises UnknownModel if the model is none of the task's, Forbidden if the device is not one
        of the task's members, and Conflict if no round of the task was assigned to it.
        """
        task = await self._store.fresh(name)
        report = _bounded(report, task.config.max_examples)
        by, now = task.config.evaluation.group_by or "", self._clock()
        members = task.config.members

        def write(connection: Connection) -> None:
            if members and client_id not in members:
                raise Forbidden(f"task {name!r} is for its members alone, to measure too")
            if not evaluation.is_assigned(connection, name, client_id):
                raise Conflict(
                    f"task {name!r} has assigned no round to this device",
                    hint="only devices that take part measure its models",
                )
            if evaluation.place_of(connection, name, report.model) is None:
                raise UnknownModel(f"task {name!r} has no model {report.model[:12]}")
            evaluation.keep(connection, name, client_id, report, by, now)
            if task.config.selection.policy != "first":
                evaluation.note_loss(connection, name, client_id, report, now)

        await self._database.write(write)
        self._metrics.evaluated(name, report)
        if task.attempt is None:
            await self._store.apply(task, Rate())


def _bounded(report: EvaluationReport, most: int) -> EvaluationReport:
    """The report as of `most` examples at most, its classes in proportion."""
    total = report.num_examples
    if total <= most:
        return report
    classes = {
        name: ClassCount(
            num_examples=each.num_examples * most // total, correct=each.correct * most // total
        )
        for name, each in report.classes.items()
        if each.num_examples * most >= total
    }
    return report.model_copy(update={"num_examples": most, "classes": classes})
