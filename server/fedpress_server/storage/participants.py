"""Participation statistics of clients in tasks with a selection policy: one row per client, updated
continuously, so that a selection among n candidates reads n rows.

Tasks with the policy "first" have no rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fedpress_server.rounds.selection import Candidate
from fedpress_server.storage.tables import participants

_TOGETHER = 1000
"""Clients per statement."""


def add_assignment(connection: Connection, task: str, client_id: str) -> None:
    """Count an assignment."""
    _add(connection, task, client_id, {"given": participants.c.given + 1}, {"given": 1})


def add_upload(
    connection: Connection,
    task: str,
    client_id: str,
    *,
    num_examples: int,
    loss: float | None,
    at: float,
) -> None:
    """Record an upload accepted `at` with its examples and, if the plan reports it, its loss. The
    later value by the clock wins."""
    row = participants.c
    changes: dict[str, Any] = {"delivered": row.delivered + 1}
    first: dict[str, Any] = {"given": 1, "delivered": 1}
    values: dict[str, float] = {"num_examples": num_examples} if num_examples > 0 else {}
    values |= {"loss": loss} if loss is not None else {}
    for name, value in values.items():
        told_at = row["examples_at" if name == "num_examples" else "loss_at"]
        is_newest = sa.or_(told_at.is_(None), told_at <= at)
        changes[name] = sa.case((is_newest, value), else_=row[name])
        changes[told_at.name] = sa.case((is_newest, at), else_=told_at)
        first |= {name: value, told_at.name: at}
    _add(connection, task, client_id, changes, first)


def measured(
    connection: Connection, task: str, client_id: str, newest: tuple[str, float, float] | None
) -> None:
    """Set the `newest` loss reported by the client: model digest, loss and time; None for none."""
    model, loss, at = newest if newest is not None else (None, None, None)
    values = {"measured_model": model, "measured_loss": loss, "measured_at": at}
    _add(connection, task, client_id, values, values)


def measured_model(connection: Connection, task: str, client_id: str) -> tuple[str, float] | None:
    """The model and time of the client's newest loss."""
    row = participants.c
    query = sa.select(row.measured_model, row.measured_at).where(
        row.task == task, row.client_id == client_id, row.measured_model.is_not(None)
    )
    stored = connection.execute(query).one_or_none()
    return None if stored is None else (stored.measured_model, stored.measured_at)


def candidates(connection: Connection, task: str, client_ids: Iterable[str]) -> list[Candidate]:
    """The statistics of `client_ids`, in order; see Candidate."""
    client_ids = list(client_ids)
    stored: dict[str, Candidate] = {}
    for start in range(0, len(client_ids), _TOGETHER):
        stored |= _known(connection, task, client_ids[start : start + _TOGETHER])
    return [stored.get(client_id, Candidate(client_id)) for client_id in client_ids]


def _known(connection: Connection, task: str, client_ids: Sequence[str]) -> dict[str, Candidate]:
    row = participants.c
    query = sa.select(participants).where(row.task == task, row.client_id.in_(client_ids))
    stored = {}
    for each in connection.execute(query):
        losses = [
            (at, loss)
            for at, loss in ((each.loss_at, each.loss), (each.measured_at, each.measured_loss))
            if at is not None
        ]
        loss = max(losses)[1] if losses else None
        counts = (each.given, each.delivered)
        stored[each.client_id] = Candidate(each.client_id, each.num_examples, loss, *counts)
    return stored


def _add(
    connection: Connection,
    task: str,
    client_id: str,
    changes: dict[str, Any],
    first: dict[str, Any],
) -> None:
    mine = (participants.c.task == task, participants.c.client_id == client_id)
    changed = connection.execute(sa.update(participants).where(*mine).values(**changes))
    if not changed.rowcount:
        row = {"task": task, "client_id": client_id, "given": 0, "delivered": 0, **first}
        connection.execute(sa.insert(participants), row)
