"""Participations of clients in private tasks, counted by the bodies received; the secrets of the
server's own noise."""

from __future__ import annotations

import secrets
from collections import Counter
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
    is_before = sa.tuple_(assignments.c.round, assignments.c.attempt) < sa.tuple_(
        *map(sa.literal, here)
    )
    number = sa.func.count()
    by_client = (
        sa.select(assignments.c.client_id, number)
        .join(uploads, uploads.c.assignment == assignments.c.assignment)
        .where(assignments.c.task == task, is_before)
        .group_by(assignments.c.client_id)
    )
    counts = {client_id: count for client_id, count in connection.execute(by_client)}
    refused = connection.scalars(
        sa.select(assignments.c.client_id)
        .join(declines, declines.c.assignment == assignments.c.assignment)
        .where(declines.c.task == task, declines.c.reason == "privacy-budget", is_before)
    )
    spent = {client_id for client_id, count in counts.items() if count >= most}
    return frozenset(spent.union(refused)), max(counts.values(), default=0)


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
    sent = connection.execute(
        sa.select(assignments.c.round, assignments.c.attempt, assignments.c.client_id)
        .join(uploads, uploads.c.assignment == assignments.c.assignment)
        .where(assignments.c.task == task, assignments.c.round <= max(numbers))
        .order_by(assignments.c.round, assignments.c.attempt)
    ).all()
    counts, most, position = Counter[str](), 0, 0
    spent: dict[tuple[int, int], int] = {}
    for key in sorted(keys):
        while position < len(sent) and (sent[position].round, sent[position].attempt) <= key:
            client_id = sent[position].client_id
            counts[client_id] += 1
            most, position = max(most, counts[client_id]), position + 1
        spent[key] = most
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
