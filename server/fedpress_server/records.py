"""Every SQL statement of the server, by what it means; each runs in its caller's transaction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from fedpress_protocols.messages import RoundStatus, TaskState
from fedpress_server.database import (
    assignments,
    clients,
    enrolment_tokens,
    evaluations,
    models,
    round_events,
    rounds,
    tasks,
    uploads,
)

RoundKey = tuple[str, int, int]
"""Task, round, attempt."""
MAX_METRIC = 1e15
"""Larger metrics are refused, and left out of means: no sum of weighted ones overflows."""


# Devices


@dataclass(frozen=True, slots=True)
class Device:
    """An enrolled device and the key that signs its requests."""

    client_id: str
    key_id: str
    public_key: bytes
    name: str
    token_id: str
    enrolled_at: float
    revoked_at: float | None


@dataclass(frozen=True, slots=True)
class EnrolmentToken:
    token_id: str
    token_hash: str
    uses: int
    used: int
    created_at: float
    expires_at: float
    note: str


def devices(connection: Connection) -> list[Device]:
    return [Device(*row) for row in connection.execute(sa.select(clients))]


def device_by_key(connection: Connection, key_id: str) -> Device | None:
    found = connection.execute(sa.select(clients).where(clients.c.key_id == key_id)).one_or_none()
    return Device(*found) if found else None


def add_device(connection: Connection, device: Device) -> None:
    """Add it and count one use of its token."""
    token = enrolment_tokens.c
    connection.execute(
        sa.update(enrolment_tokens)
        .where(token.token_id == device.token_id)
        .values(used=token.used + 1)
    )
    connection.execute(sa.insert(clients), _fields(device))


def revoke_device(connection: Connection, client_id: str, at: float) -> None:
    connection.execute(
        sa.update(clients)
        .where(clients.c.client_id == client_id, clients.c.revoked_at.is_(None))
        .values(revoked_at=at)
    )


def add_token(connection: Connection, token: EnrolmentToken) -> None:
    connection.execute(sa.insert(enrolment_tokens), _fields(token))


def token_by_hash(connection: Connection, token_hash: str) -> EnrolmentToken | None:
    found = connection.execute(
        sa.select(enrolment_tokens).where(enrolment_tokens.c.token_hash == token_hash)
    ).one_or_none()
    return EnrolmentToken(*found) if found else None


# Models and tasks


@dataclass(frozen=True, slots=True)
class ModelRecord:
    digest: str
    spec: str
    num_bytes: int
    created_at: float


@dataclass(frozen=True, slots=True)
class TaskRecord:
    task: str
    config: str
    state: TaskState
    model: str
    spec: str
    optimizer_state: str | None
    round: int
    rounds: int
    max_body_bytes: int
    created_at: float
    ended_at: float | None


def model(connection: Connection, digest: str) -> ModelRecord | None:
    found = connection.execute(sa.select(models).where(models.c.digest == digest)).one_or_none()
    return ModelRecord(*found) if found else None


def add_model(connection: Connection, record: ModelRecord) -> bool:
    """False if it was there: the same digest is the same model."""
    if model(connection, record.digest):
        return False
    connection.execute(sa.insert(models), _fields(record))
    return True


def task_records(connection: Connection) -> list[TaskRecord]:
    return [TaskRecord(*row) for row in connection.execute(sa.select(tasks))]


def task_record(connection: Connection, task: str) -> TaskRecord:
    return TaskRecord(*connection.execute(sa.select(tasks).where(tasks.c.task == task)).one())


def add_task(connection: Connection, record: TaskRecord) -> None:
    connection.execute(sa.insert(tasks), _fields(record))


def set_task(connection: Connection, record: TaskRecord) -> None:
    connection.execute(
        sa.update(tasks).where(tasks.c.task == record.task).values(**_fields(record))
    )


# Rounds


def open_round(
    connection: Connection,
    key: RoundKey,
    *,
    plan: str,
    base_model: str,
    size: int,
    minimum: int,
    opened_at: float,
    deadline: float,
) -> None:
    task, number, attempt = key
    connection.execute(
        sa.insert(rounds).values(
            task=task,
            round=number,
            attempt=attempt,
            plan=plan,
            state="collecting",
            reason="",
            base_model=base_model,
            size=size,
            minimum=minimum,
            assigned=0,
            received=0,
            included=0,
            num_examples=0,
            upload_bytes=0,
            wire_upload_bytes=0,
            download_bytes=0,
            opened_at=opened_at,
            deadline=deadline,
        )
    )


def update_round(connection: Connection, key: RoundKey, **values: Any) -> None:
    connection.execute(sa.update(rounds).where(*_is_round(rounds, key)).values(**values))


def count(connection: Connection, key: RoundKey, **amounts: int) -> None:
    """Add `amounts` to the round's counters of those names."""
    values = {name: rounds.c[name] + amount for name, amount in amounts.items()}
    connection.execute(sa.update(rounds).where(*_is_round(rounds, key)).values(**values))


@dataclass(frozen=True, slots=True)
class OpenRoundRecord:
    """What a restart needs of the newest attempt of a task."""

    round: int
    attempt: int
    plan: str
    opened_at: float


def newest_round(connection: Connection, task: str) -> OpenRoundRecord:
    found = connection.execute(
        sa.select(rounds.c.round, rounds.c.attempt, rounds.c.plan, rounds.c.opened_at)
        .where(rounds.c.task == task)
        .order_by(rounds.c.round.desc(), rounds.c.attempt.desc())
        .limit(1)
    ).one()
    return OpenRoundRecord(*found)


def add_event(
    connection: Connection, key: RoundKey, seq: int, at: float, event: dict[str, str]
) -> None:
    task, number, attempt = key
    connection.execute(
        sa.insert(round_events).values(
            task=task, round=number, attempt=attempt, seq=seq, at=at, event=event
        )
    )


def events(connection: Connection, key: RoundKey) -> list[tuple[float, dict[str, str]]]:
    """Every event of the attempt and its time, in the order they came."""
    found = connection.execute(
        sa.select(round_events.c.at, round_events.c.event)
        .where(*_is_round(round_events, key))
        .order_by(round_events.c.seq)
    )
    return [(at, event) for at, event in found]


def unfinished_rounds(connection: Connection) -> set[RoundKey]:
    found = connection.execute(
        sa.select(rounds.c.task, rounds.c.round, rounds.c.attempt).where(
            rounds.c.state.in_(["collecting", "folding"])
        )
    )
    return {(task, number, attempt) for task, number, attempt in found}


def round_history(
    connection: Connection, task: str, number: int | None = None
) -> list[RoundStatus]:
    """Every attempt at every round, or at round `number`, oldest first."""
    query = sa.select(rounds).where(rounds.c.task == task)
    if number is not None:
        query = query.where(rounds.c.round == number)
    rows = connection.execute(query.order_by(rounds.c.round, rounds.c.attempt)).all()
    measured = _metrics(connection, task, {row.model for row in rows if row.model})
    return [_status(row, measured.get(row.model, {})) for row in rows]


def _status(row: Row[Any], metrics: dict[str, float]) -> RoundStatus:
    fields = {name: getattr(row, name) for name in RoundStatus.model_fields if name != "metrics"}
    return RoundStatus(**fields, metrics=metrics)


# Assignments and uploads


@dataclass(frozen=True, slots=True)
class UploadRecord:
    assignment: str
    digest: str
    num_bytes: int
    num_examples: int
    received_at: float


@dataclass(frozen=True, slots=True)
class AssignmentRecord:
    assignment: str
    task: str
    round: int
    attempt: int
    client_id: str
    position: int
    profile: str
    assigned_at: float
    receipt: str | None

    @property
    def key(self) -> RoundKey:
        return self.task, self.round, self.attempt


def add_assignment(connection: Connection, record: AssignmentRecord) -> None:
    connection.execute(sa.insert(assignments), _fields(record))


def assignment(connection: Connection, name: str) -> AssignmentRecord | None:
    found = connection.execute(
        sa.select(assignments).where(assignments.c.assignment == name)
    ).one_or_none()
    return AssignmentRecord(*found) if found else None


def add_upload(connection: Connection, record: UploadRecord) -> None:
    connection.execute(sa.insert(uploads), _fields(record))


def upload(connection: Connection, name: str) -> UploadRecord | None:
    found = connection.execute(sa.select(uploads).where(uploads.c.assignment == name)).one_or_none()
    return UploadRecord(*found) if found else None


def set_receipt(connection: Connection, name: str, receipt: str) -> None:
    """Once and for all: a second receipt for one assignment is a bug, and raises."""
    changed = connection.execute(
        sa.update(assignments)
        .where(assignments.c.assignment == name, assignments.c.receipt.is_(None))
        .values(receipt=receipt)
    )
    if changed.rowcount != 1:
        raise AssertionError(f"assignment {name} has a receipt, or does not exist")


def receipts(
    connection: Connection, client_id: str, names: Sequence[str]
) -> tuple[list[str], set[str]]:
    """The client's receipts among the assignments `names`, and which of these are the client's."""
    found = connection.execute(
        sa.select(assignments.c.assignment, assignments.c.receipt)
        .where(assignments.c.assignment.in_(names), assignments.c.client_id == client_id)
        .order_by(assignments.c.assigned_at, assignments.c.assignment)
    ).all()
    return [receipt for _, receipt in found if receipt], {name for name, _ in found}


# Evaluations


def set_evaluation(
    connection: Connection,
    *,
    task: str,
    model: str,
    client_id: str,
    num_examples: int,
    metrics: dict[str, float],
    at: float,
) -> None:
    """One report for each client and model: the last one counts."""
    mine = (
        evaluations.c.task == task,
        evaluations.c.model == model,
        evaluations.c.client_id == client_id,
    )
    connection.execute(sa.delete(evaluations).where(*mine))
    connection.execute(
        sa.insert(evaluations).values(
            task=task,
            model=model,
            client_id=client_id,
            num_examples=num_examples,
            metrics=metrics,
            reported_at=at,
        )
    )


def has_model(connection: Connection, task: str, digest: str) -> bool:
    """Whether the task began with this model, or made it."""
    query = sa.select(sa.literal(1)).where(
        rounds.c.task == task, sa.or_(rounds.c.base_model == digest, rounds.c.model == digest)
    )
    return connection.execute(query.limit(1)).first() is not None


def _metrics(connection: Connection, task: str, digests: set[str]) -> dict[str, dict[str, float]]:
    """By model, each metric's mean over the reports that have it, weighted by their examples."""
    found = connection.execute(
        sa.select(evaluations.c.model, evaluations.c.num_examples, evaluations.c.metrics)
        .where(evaluations.c.task == task, evaluations.c.model.in_(digests))
        .order_by(evaluations.c.model, evaluations.c.client_id)
    )
    sums: dict[str, dict[str, tuple[float, int]]] = {}
    for digest, weight, metrics in found:
        of_model = sums.setdefault(digest, {})
        for name, value in metrics.items():
            if not abs(value) <= MAX_METRIC:
                continue
            total, weights = of_model.get(name, (0.0, 0))
            of_model[name] = (total + weight * value, weights + weight)
    return {
        digest: {name: total / weights for name, (total, weights) in sorted(of_model.items())}
        for digest, of_model in sums.items()
    }


def _is_round(table: sa.Table, key: RoundKey) -> Iterable[sa.ColumnElement[bool]]:
    return [table.c[name] == value for name, value in zip(_KEY, key, strict=True)]


_KEY = ("task", "round", "attempt")


def _fields(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__slots__}
