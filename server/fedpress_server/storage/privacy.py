"""Participations of clients in private tasks, counted by the bodies received; the secrets of the
server's own noise."""

from __future__ import annotations

import secrets
from collections import Counter, deque
from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fedpress_protocols.messages import PrivacyStatus, RoundStatus
from fedpress_protocols.plan import RoundPlan
from fedpress_server.storage.records import RoundKey, newest_round
from fedpress_server.storage.tables import assignments, declines, noise_secrets, rounds, uploads

_SECRET_BYTES = 32


def participations(connection: Connection, key: RoundKey, most: int) -> tuple[frozenset[str], int]:
    """The clients that have sent `most` bodies before the attempt `key`, or have said that their
    budget is spent; and the most bodies of any client.

    The attempt's own count for nothing: its events are replayed, and whoever it has assigned was
    free to be.
    """
    task, *here = key
    sent = _sent_before(task, here)
    spent, largest = _chosen(connection, sent, sent.c.number >= most)
    refused = connection.scalars(
        sa.select(assignments.c.client_id)
        .join(declines, declines.c.assignment == assignments.c.assignment)
        .where(declines.c.task == task, declines.c.reason == "privacy-budget", _is_before(here))
    )
    return frozenset(spent).union(refused), largest


def noise_secret(connection: Connection, task: str) -> bytes:
    """The secret that the noise of the task's sums is derived from, drawn where there is none; in a
    transaction that is exclusive, since two secrets would give two noises."""
    query = sa.select(noise_secrets.c.secret).where(noise_secrets.c.task == task)
    secret = connection.execute(query).scalar_one_or_none()
    if secret is None:
        secret = secrets.token_bytes(_SECRET_BYTES)
        connection.execute(sa.insert(noise_secrets), {"task": task, "secret": secret})
    return bytes(secret)


def resting(connection: Connection, key: RoundKey, separation: int) -> frozenset[str]:
    """The clients that have sent a body in one of the `separation` - 1 rounds before `key`.

    Another attempt at this very round does not count: only one has a sum.
    """
    task, number, _ = key
    recent = assignments.c.round.between(number - separation + 1, number - 1)
    query = (
        sa.select(assignments.c.client_id)
        .join(uploads, uploads.c.assignment == assignments.c.assignment)
        .where(assignments.c.task == task, recent)
        .distinct()
    )
    return frozenset(connection.scalars(query)) if separation > 1 else frozenset()


def last_clip(connection: Connection, task: str) -> float | None:
    """The clip of the task's newest attempt; None without privacy terms."""
    terms = RoundPlan.from_json(newest_round(connection, task).plan).privacy
    return None if terms is None else terms.clip


def with_privacy(
    connection: Connection, task: str, found: Sequence[RoundStatus]
) -> list[RoundStatus]:
    """`found`, attempts at rounds of one task, with what was spent up to each."""
    if not found:
        return []
    row = rounds.c
    keys = {(each.round, each.attempt) for each in found}
    numbers = [number for number, _ in keys]
    plans = {
        (number, attempt): RoundPlan.from_json(plan)
        for number, attempt, plan in connection.execute(
            sa.select(row.round, row.attempt, row.plan).where(
                row.task == task,
                row.round.between(min(numbers), max(numbers)),
                row.plan.contains('"privacy":'),
            )
        )
        if (number, attempt) in keys
    }
    if not plans:
        return list(found)
    spent = _spent(connection, task, sorted(plans))
    return [
        each
        if (each.round, each.attempt) not in plans
        else each.model_copy(
            update={
                "privacy": PrivacyStatus.of(
                    plans[each.round, each.attempt], spent[each.round, each.attempt]
                )
            }
        )
        for each in found
    ]


def _spent(
    connection: Connection, task: str, keys: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], int]:
    """The most bodies of any client up to each of the attempts `keys`, which are in order.

    Those before the first are counted by the database; the others are read.
    """
    row, first, (number, attempt) = assignments.c, keys[0], keys[-1]
    bodies = (
        sa.select(row.round, row.attempt, row.client_id)
        .join(uploads, uploads.c.assignment == row.assignment)
        .where(row.task == task, ~_is_before(first), _is_before((number, attempt + 1)))
    )
    sent = _sent_before(task, first)
    is_here = sent.c.client_id.in_(bodies.with_only_columns(row.client_id))
    before, most = _chosen(connection, sent, is_here)
    counts = Counter(before)
    rows = deque(connection.execute(bodies.order_by(row.round, row.attempt)).all())
    spent = {}
    for key in keys:
        while rows and (rows[0].round, rows[0].attempt) <= key:
            client_id = rows.popleft().client_id
            counts[client_id] += 1
            most = max(most, counts[client_id])
        spent[key] = most
    return spent


def _sent_before(task: str, here: Sequence[int]) -> sa.CTE:
    """By client: the `number` of bodies sent in attempts before `here`."""
    return (
        sa.select(assignments.c.client_id, sa.func.count().label("number"))
        .join(uploads, uploads.c.assignment == assignments.c.assignment)
        .where(assignments.c.task == task, _is_before(here))
        .group_by(assignments.c.client_id)
        .cte("sent")
    )


def _chosen(
    connection: Connection, sent: sa.CTE, is_chosen: sa.ColumnElement[bool]
) -> tuple[dict[str, int], int]:
    """The rows of `sent` that are chosen, and the largest number of all of them."""
    rows = sa.select(sent.c.client_id, sent.c.number).where(is_chosen)
    largest = sa.select(sa.null(), sa.func.max(sent.c.number))
    found = {client_id: number for client_id, number in connection.execute(rows.union_all(largest))}
    return found, found.pop(None) or 0


def _is_before(here: Sequence[int]) -> sa.ColumnElement[bool]:
    attempt = sa.tuple_(assignments.c.round, assignments.c.attempt)
    return attempt < sa.tuple_(*map(sa.literal, here))
