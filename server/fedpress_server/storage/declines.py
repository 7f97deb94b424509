"""Declined assignments with their reasons, and the durations of devices' work."""

from __future__ import annotations

import math
from collections.abc import Collection
from statistics import median

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fedpress_protocols.messages import Durations
from fedpress_server.storage.records import RoundKey
from fedpress_server.storage.tables import assignments, declines, uploads

_SHARE, _MARGIN = 0.9, 1.25
"""The quantile of durations for a suggested deadline, and its safety factor."""
_MOST = 10_000
"""Maximum uploads and declines whose times are read."""


def add(
    connection: Connection,
    assignment: str,
    key: RoundKey,
    reason: str,
    needed_seconds: float | None,
) -> None:
    """Record that `assignment` of the attempt `key` was declined."""
    task, number, attempt = key
    row = {"assignment": assignment, "task": task, "round": number, "attempt": attempt}
    connection.execute(
        sa.insert(declines), row | {"reason": reason, "needed_seconds": needed_seconds}
    )


def counts(
    connection: Connection, task: str, rounds: Collection[int]
) -> dict[tuple[int, int], dict[str, int]]:
    """By (round, attempt): the number of declined assignments by reason."""
    row = declines.c
    query = (
        sa.select(row.round, row.attempt, row.reason, sa.func.count())
        .where(row.task == task, row.round.between(min(rounds), max(rounds)))
        .group_by(row.round, row.attempt, row.reason)
        .order_by(row.reason)
    )
    reasons: dict[tuple[int, int], dict[str, int]] = {}
    for number, attempt, reason, count in connection.execute(query):
        reasons.setdefault((number, attempt), {})[reason] = count
    return reasons


def durations(connection: Connection, key: RoundKey, round_seconds: float) -> Durations | None:
    """See `Durations`, of a task with these `round_seconds`; None without an upload or estimate."""
    task, number, attempt = key
    completed = connection.scalars(
        sa.select(uploads.c.received_at - assignments.c.assigned_at)
        .join(assignments, assignments.c.assignment == uploads.c.assignment)
        .where(
            assignments.c.task == task,
            assignments.c.round == number,
            assignments.c.attempt == attempt,
        )
        .limit(_MOST)
    ).all()
    predicted = connection.scalars(
        sa.select(declines.c.needed_seconds)
        .where(
            declines.c.task == task,
            declines.c.round == number,
            declines.c.attempt == attempt,
            declines.c.needed_seconds.is_not(None),
        )
        .limit(_MOST)
    ).all()
    seconds = sorted(max(0.0, each) for each in (*completed, *predicted) if each is not None)
    if not seconds:
        return None
    enough = _MARGIN * seconds[math.ceil(_SHARE * len(seconds)) - 1]
    if predicted:  # they came late, with less than all of the round before them
        enough = max(enough, round_seconds + max(each for each in predicted if each is not None))
    return Durations(
        num_uploads=len(completed),
        num_too_slow=len(predicted),
        median=median(seconds),
        longest=seconds[-1],
        suggested_round_seconds=max(1.0, math.ceil(enough)),
    )
