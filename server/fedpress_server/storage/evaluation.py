"""What devices measure of a task's models: kept, aggregated in SQL, and what follows from it.

Every number is a device's own word about data that nobody else sees, weighted by its examples.
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
from fedpress_protocols.policies.course import Tally
from fedpress_server.storage.tables import class_counts, evaluations, measures, rounds

MAX_METRIC = 1e15
"""Larger metrics are refused, and left out of means: no sum of weighted ones overflows."""
MAX_GROUPS = 64
"""Of more, those with the most examples are shown."""

# Reports


def keep(
    connection: Connection, task: str, client_id: str, report: EvaluationReport, by: str, at: float
) -> None:
    """One report for each client and model: the last one counts, in the group of its attribute
    `by`."""
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


def _group(value: Attribute | None) -> str | None:
    return value if value is None or isinstance(value, str) else f"{value:g}"


def has_model(connection: Connection, task: str, digest: str) -> bool:
    """Whether the task began with this model, or made it."""
    query = sa.select(sa.literal(1)).where(
        rounds.c.task == task, sa.or_(rounds.c.base_model == digest, rounds.c.model == digest)
    )
    return connection.execute(query.limit(1)).first() is not None


# Aggregates

_KEY = ("task", "model", "client_id")
_SAME = sa.and_(*(evaluations.c[name] == measures.c[name] for name in _KEY))
_WEIGHT = sa.func.sum(evaluations.c.num_examples)
_MEAN = sa.func.sum(evaluations.c.num_examples * measures.c.value) / _WEIGHT
_IS_COUNTED = measures.c.value.between(-MAX_METRIC, MAX_METRIC)


def means(connection: Connection, task: str, digests: Iterable[str]) -> dict[str, dict[str, float]]:
    """By model, each metric's mean over the reports that have it, weighted by their examples."""
    found = connection.execute(
        sa.select(measures.c.model, measures.c.metric, _MEAN)
        .join(evaluations, _SAME)
        .where(measures.c.task == task, measures.c.model.in_(list(digests)), _IS_COUNTED)
        .group_by(measures.c.model, measures.c.metric)
        .order_by(measures.c.model, measures.c.metric)
    )
    by_model: dict[str, dict[str, float]] = {}
    for model, metric, mean in found:
        by_model.setdefault(model, {})[metric] = mean
    return by_model


def groups(connection: Connection, task: str, model: str, least: int) -> dict[str, Measured]:
    """By the attribute's value, for groups of `least` devices or more: as `means`."""
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
    found = connection.execute(
        sa.select(whose, measures.c.metric, _MEAN)
        .join(evaluations, _SAME)
        .where(of_model, _IS_COUNTED)
        .group_by(whose, measures.c.metric)
        .order_by(measures.c.metric)
    )
    metrics: dict[str, dict[str, float]] = {}
    for group, metric, mean in found:
        metrics.setdefault(group, {})[metric] = mean
    return {
        group: Measured(num_clients=clients, num_examples=num, metrics=metrics.get(group, {}))
        for group, clients, num in sorted(sizes)
    }


def classes(connection: Connection, task: str, model: str, least: int) -> dict[str, Measured]:
    """By class, for those that `least` devices or more have examples of: its accuracy."""
    total = sa.func.sum(class_counts.c.num_examples)
    found = connection.execute(
        sa.select(class_counts.c.label, sa.func.count(), total, sa.func.sum(class_counts.c.correct))
        .where(class_counts.c.task == task, class_counts.c.model == model)
        .group_by(class_counts.c.label)
        .having(sa.func.count() >= least)
        .order_by(total.desc(), class_counts.c.label)
        .limit(MAX_CLASSES)
    ).all()
    return {
        label: Measured(num_clients=n, num_examples=num, metrics={"accuracy": correct / num})
        for label, n, num, correct in sorted(found, key=lambda row: _in_order(row.label))
    }


def counted(connection: Connection, task: str, least: int) -> dict[str, dict[str, Tally]]:
    """By model and class, for models that `least` devices or more counted: the examples, and how
    many the model was right of."""
    enough = (
        sa.select(class_counts.c.model)
        .where(class_counts.c.task == task)
        .group_by(class_counts.c.model)
        .having(sa.func.count(sa.distinct(class_counts.c.client_id)) >= least)
    )
    n, right = sa.func.sum(class_counts.c.num_examples), sa.func.sum(class_counts.c.correct)
    found = connection.execute(
        sa.select(class_counts.c.model, class_counts.c.label, n, right)
        .where(class_counts.c.task == task, class_counts.c.model.in_(enough))
        .group_by(class_counts.c.model, class_counts.c.label)
    )
    by_model: dict[str, dict[str, Tally]] = {}
    for model, label, num_examples, correct in found:
        by_model.setdefault(model, {})[label] = Tally(int(num_examples), int(correct))
    return by_model


def _in_order(label: str) -> tuple[int, str]:
    """2 before 10."""
    return len(label) if label.isdecimal() else 0, label


def losses(task: str) -> sa.Select[Any]:
    """The query of every loss that was measured: client_id, at, value."""
    return (
        sa.select(measures.c.client_id, evaluations.c.reported_at.label("at"), measures.c.value)
        .join(evaluations, _SAME)
        .where(measures.c.task == task, measures.c.metric == "loss", _IS_COUNTED)
    )


# What follows


@dataclass(frozen=True, slots=True)
class Score:
    """What the task's metric came to for the model that `round` made, 0 the first one; None: too
    few devices have measured it."""

    round: int
    model: str
    value: float | None


def scores(connection: Connection, task: str, terms: EvaluationTerms) -> list[Score]:
    """Of every model that a round of the task began with or made, in the order of the rounds."""
    found = connection.execute(
        sa.select(measures.c.model, _MEAN)
        .join(evaluations, _SAME)
        .where(measures.c.task == task, measures.c.metric == terms.metric, _IS_COUNTED)
        .group_by(measures.c.model)
        .having(sa.func.count() >= terms.least_clients)
    )
    values = {model: mean for model, mean in found}
    history = connection.execute(
        sa.select(rounds.c.round, rounds.c.base_model, rounds.c.model)
        .where(rounds.c.task == task)
        .order_by(rounds.c.round, rounds.c.attempt)
    ).all()
    models: dict[str, int] = {}
    for row in history:
        models.setdefault(row.base_model, row.round - 1)
        if row.model is not None:
            models.setdefault(row.model, row.round)
    return [Score(number, model, values.get(model)) for model, number in models.items()]


def last_stop(connection: Connection, task: str) -> int:
    """The last round after which the task was stopped before its time, 0 if it never was."""
    query = sa.select(sa.func.max(rounds.c.round)).where(
        rounds.c.task == task, rounds.c.state == "committed", rounds.c.reason != ""
    )
    return connection.execute(query).scalar_one() or 0


def best(scores: Sequence[Score], terms: EvaluationTerms) -> str | None:
    """The model with the best score, of several the first; None if none has any."""
    measured = [(terms.cost(s.value), s.round, s.model) for s in scores if s.value is not None]
    return min(measured)[2] if measured else None


def reason_to_stop(scores: Sequence[Score], terms: EvaluationTerms) -> str:
    """Why the task should stop after these scores, in the order of their rounds; "" if it should
    not.

    Stop once `patience` scores in a row are not better by more than `min_delta` than the best
    before them. Models without a score are passed over.
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
