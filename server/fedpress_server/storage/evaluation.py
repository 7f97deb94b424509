"""Evaluation reports of devices: storage, aggregation in SQL, best model and early stopping.

All numbers are reported by devices about their private data, weighted by their examples.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fedpress_protocols.messages import (
    MAX_CLASSES,
    Attribute,
    EvaluationReport,
    EvaluationTerms,
    Measured,
)
from fedpress_server.storage import participants
from fedpress_server.storage.tables import (
    STOPPED,
    assignments,
    class_counts,
    evaluations,
    measured_models,
    measures,
    rounds,
)
from fedpress_strategies.policies.facts import Tally

MAX_METRIC = 1e15
"""Larger metrics are refused, and left out of means: no sum of weighted ones overflows."""
_NEWEST = 8
"""Attempts whose other models may be measured."""
MAX_GROUPS = 64
"""Maximum listed classes, those with the most examples."""

# Reports


def is_assigned(connection: Connection, task: str, client_id: str) -> bool:
    """Whether a round of the task is or was assigned to the device."""
    row = assignments.c
    query = sa.select(row.assignment).where(row.client_id == client_id, row.task == task)
    return connection.execute(query.limit(1)).one_or_none() is not None


def keep(
    connection: Connection, task: str, client_id: str, report: EvaluationReport, by: str, at: float
) -> None:
    """Store a client's report on a model, replacing an earlier one, in the group of its attribute
    `by`. Marks the model as changed, see `Scoreboard`."""
    mine = {"task": task, "model": report.model, "client_id": client_id}
    for table in (measures, class_counts, evaluations):
        is_mine = (table.c[name] == value for name, value in mine.items())
        connection.execute(sa.delete(table).where(*is_mine))
    row = {"num_examples": report.num_examples, "reported_at": at}
    group = _group(report.attributes.get(by))
    connection.execute(sa.insert(evaluations), {**mine, **row, "group_name": group})
    values = [{**mine, "metric": name, "value": v} for name, v in report.metrics.items()]
    if values:
        connection.execute(sa.insert(measures), values)
    counts = [{**mine, "label": label, **n.model_dump()} for label, n in report.classes.items()]
    if counts:
        connection.execute(sa.insert(class_counts), counts)
    _note_change(connection, task, report.model)


def _note_change(connection: Connection, task: str, model: str) -> None:
    row = measured_models.c
    newest = sa.select(sa.func.max(row.change)).where(row.task == task)
    change = (connection.execute(newest).scalar_one() or 0) + 1
    mine = (row.task == task, row.model == model)
    result = connection.execute(sa.update(measured_models).where(*mine).values(change=change))
    if not result.rowcount:
        values = {"task": task, "model": model, "change": change}
        connection.execute(sa.insert(measured_models), values)


def note_loss(
    connection: Connection, task: str, client_id: str, report: EvaluationReport, at: float
) -> None:
    """Update the client's newest loss after `report`, for client selection."""
    loss = report.metrics.get("loss")
    previous = participants.measured_model(connection, task, client_id)
    is_counted = loss is not None and -MAX_METRIC <= loss <= MAX_METRIC
    if loss is not None and is_counted and (previous is None or previous[1] <= at):
        participants.measured(connection, task, client_id, (report.model, loss, at))
        return
    if previous is not None and previous[0] == report.model:
        losses = _losses(task, client_id).order_by(evaluations.c.reported_at.desc()).limit(1)
        row = connection.execute(losses).one_or_none()
        newest = None if row is None else (row.model, row.value, row.reported_at)
        participants.measured(connection, task, client_id, newest)


def _losses(task: str, client_id: str) -> sa.Select[Any]:
    """The query for all current loss reports of a client."""
    return (
        sa.select(measures.c.model, measures.c.value, evaluations.c.reported_at)
        .join(evaluations, _SAME)
        .where(
            measures.c.task == task,
            measures.c.client_id == client_id,
            measures.c.metric == "loss",
            _IS_COUNTED,
        )
    )


def _group(value: Attribute | None) -> str | None:
    return value if value is None or isinstance(value, str) else f"{value:g}"


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """The first place of a model in a task's history: an attempt, as its base or its result."""

    round: int
    attempt: int
    is_made: bool

    @property
    def number(self) -> int:
        """The round that made it, 0 for the task's first model."""
        return self.round if self.is_made else self.round - 1


def place_of(connection: Connection, task: str, digest: str) -> Place | None:
    """None for a model that no round of the task began with or made; models that the newest rounds
    published besides count as made by them."""
    row, places = rounds.c, []
    for column, is_made in ((row.base_model, False), (row.model, True)):
        query = sa.select(row.round, row.attempt).where(row.task == task, column == digest)
        first = connection.execute(query.order_by(row.round, row.attempt).limit(1)).one_or_none()
        if first is not None:
            places.append(Place(*first, is_made))
    return min(places, default=None) or _published_at(connection, task, digest)


def _published_at(connection: Connection, task: str, digest: str) -> Place | None:
    row = rounds.c
    query = sa.select(row.round, row.attempt, row.published).where(row.task == task)
    newest = query.order_by(row.round.desc(), row.attempt.desc()).limit(_NEWEST)
    for number, attempt, published in connection.execute(newest):
        if digest in (published or {}).values():
            return Place(number, attempt, is_made=True)
    return None


# Aggregates

_KEY = ("task", "model", "client_id")
_SAME = sa.and_(*(evaluations.c[name] == measures.c[name] for name in _KEY))
_WEIGHT = sa.func.sum(evaluations.c.num_examples)
_MEAN = sa.func.sum(evaluations.c.num_examples * measures.c.value) / _WEIGHT
_IS_COUNTED = measures.c.value.between(-MAX_METRIC, MAX_METRIC)


def means(connection: Connection, task: str, digests: Iterable[str]) -> dict[str, dict[str, float]]:
    """By model: each metric's mean over the reports that have it, weighted by examples."""
    rows = connection.execute(
        sa.select(measures.c.model, measures.c.metric, _MEAN)
        .join(evaluations, _SAME)
        .where(measures.c.task == task, measures.c.model.in_(list(digests)), _IS_COUNTED)
        .group_by(measures.c.model, measures.c.metric)
        .order_by(measures.c.model, measures.c.metric)
    )
    by_model: dict[str, dict[str, float]] = {}
    for model, metric, mean in rows:
        by_model.setdefault(model, {})[metric] = mean
    return by_model


def counted_means(
    connection: Connection, task: str, models: Sequence[str], metrics: Sequence[str]
) -> dict[str, dict[str, tuple[int, float]]]:
    """By model and metric: the number of reports, and the mean as in `means`."""
    rows = connection.execute(
        sa.select(measures.c.model, measures.c.metric, sa.func.count(), _MEAN)
        .join(evaluations, _SAME)
        .where(
            measures.c.task == task,
            measures.c.model.in_(models),
            measures.c.metric.in_(metrics),
            _IS_COUNTED,
        )
        .group_by(measures.c.model, measures.c.metric)
    )
    by_model: dict[str, dict[str, tuple[int, float]]] = {}
    for model, metric, num, mean in rows:
        by_model.setdefault(model, {})[metric] = num, mean
    return by_model


def counted_classes(
    connection: Connection, task: str, models: Sequence[str]
) -> dict[str, tuple[dict[str, Tally], int]]:
    """By model: examples and correct predictions by class, for the MAX_CLASSES with the most
    examples, since devices choose the labels; and the number of devices that counted."""
    row = class_counts.c
    is_asked = (row.task == task, row.model.in_(models))
    devices = sa.select(row.model, sa.func.count(sa.distinct(row.client_id)))
    counted_by = dict(
        (model, num)
        for model, num in connection.execute(devices.where(*is_asked).group_by(row.model))
    )
    total = sa.func.sum(row.num_examples)
    order = sa.func.row_number().over(partition_by=row.model, order_by=(total.desc(), row.label))
    sums = sa.select(
        row.model,
        row.label,
        total.label("examples"),
        sa.func.sum(row.correct).label("correct"),
        order.label("place"),
    )
    ranked = sums.where(*is_asked).group_by(row.model, row.label).subquery()
    selected = sa.select(ranked.c.model, ranked.c.label, ranked.c.examples, ranked.c.correct)
    by_model: dict[str, tuple[dict[str, Tally], int]] = {}
    rows = connection.execute(selected.where(ranked.c.place <= MAX_CLASSES))
    for model, label, num_examples, correct in rows:
        classes, _ = by_model.setdefault(model, ({}, counted_by[model]))
        classes[label] = Tally(int(num_examples), int(correct))
    return by_model


def measured(connection: Connection, task: str, model: str) -> Measured | None:
    """Means over all reports on the model; None without reports."""
    of_model = (evaluations.c.task == task, evaluations.c.model == model)
    query = sa.select(sa.func.count(), _WEIGHT).where(*of_model)
    num_clients, num_examples = connection.execute(query).one()
    if not num_clients:
        return None
    metrics = means(connection, task, [model]).get(model, {})
    return Measured(num_clients=num_clients, num_examples=int(num_examples), metrics=metrics)


def groups(connection: Connection, task: str, model: str, least: int) -> dict[str, Measured]:
    """Means by the attribute's value, for groups of at least `least` devices."""
    whose, of_model = evaluations.c.group_name, (evaluations.c.task == task)
    of_model &= (evaluations.c.model == model) & whose.is_not(None)
    sizes = connection.execute(
        sa.select(whose, sa.func.count(), _WEIGHT)
        .where(of_model)
        .group_by(whose)
        .having(sa.func.count() >= least)
        .order_by(_WEIGHT.desc(), whose)
        .limit(MAX_GROUPS)
    ).all()
    rows = connection.execute(
        sa.select(whose, measures.c.metric, _MEAN)
        .join(evaluations, _SAME)
        .where(of_model, _IS_COUNTED)
        .group_by(whose, measures.c.metric)
        .order_by(measures.c.metric)
    )
    metrics: dict[str, dict[str, float]] = {}
    for group, metric, mean in rows:
        metrics.setdefault(group, {})[metric] = mean
    return {
        group: Measured(num_clients=clients, num_examples=num, metrics=metrics.get(group, {}))
        for group, clients, num in sorted(sizes)
    }


def classes(connection: Connection, task: str, model: str, least: int) -> dict[str, Measured]:
    """Accuracy by class, for classes with examples on at least `least` devices."""
    total = sa.func.sum(class_counts.c.num_examples)
    rows = connection.execute(
        sa.select(class_counts.c.label, sa.func.count(), total, sa.func.sum(class_counts.c.correct))
        .where(class_counts.c.task == task, class_counts.c.model == model)
        .group_by(class_counts.c.label)
        .having(sa.func.count() >= least)
        .order_by(total.desc(), class_counts.c.label)
        .limit(MAX_CLASSES)
    ).all()
    return {
        label: Measured(num_clients=n, num_examples=num, metrics={"accuracy": correct / num})
        for label, n, num, correct in sorted(rows, key=lambda row: _in_order(row.label))
    }


def _in_order(label: str) -> tuple[int, str]:
    """Natural sort order: 2 before 10."""
    return len(label) if label.isdecimal() else 0, label


# Decisions


@dataclass(frozen=True, slots=True)
class Score:
    """A metric of the model made by `round` (0: the first model); None if too few devices measured
    it."""

    round: int
    model: str
    value: float | None


def last_stop(connection: Connection, task: str) -> int:
    """The last round after which the task was stopped early, 0 if never."""
    query = sa.select(sa.func.max(rounds.c.round)).where(rounds.c.task == task, STOPPED)
    return connection.execute(query).scalar_one() or 0


def best(scores: Sequence[Score], terms: EvaluationTerms) -> str | None:
    """The model with the best score, the first of equal ones; None without scores."""
    measured = [(terms.cost(s.value), s.round, s.model) for s in scores if s.value is not None]
    return min(measured)[2] if measured else None


def reason_to_stop(scores: Sequence[Score], terms: EvaluationTerms) -> str:
    """The reason to stop the task early after these scores, in order of rounds; "" to continue.

    Stop once `patience` scores in a row are not better by more than `min_delta` than the best
    before them. Models without a score are skipped.
    """
    if terms.patience is None:
        return ""
    top: Score | None = None
    waited = 0
    for score in scores:
        if score.value is None:
            continue
        if top is None or top.value is None or _is_better(score.value, top.value, terms):
            top, waited = score, 0
        else:
            waited += 1
    if top is None or waited < terms.patience:
        return ""
    return (
        f"{terms.metric} was {top.value:g} after round {top.round}, and no better by more than "
        f"{terms.min_delta:g} in {waited} models since"
    )


def _is_better(value: float, than: float, terms: EvaluationTerms) -> bool:
    return terms.cost(value) < terms.cost(than) - terms.min_delta
