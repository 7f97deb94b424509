"""The rows of uploads by parts: how far each has come, which parts count, how long it is kept.

A part's file is durable before its row, and the row before the answer. A file to which no row leads
does not count; so of two parts sent at once for one place, that one does whose row came first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fedpress_protocols.messages import Trip
from fedpress_server.storage.tables import assignments, partial_parts, partial_uploads, uploads

NOTHING = hashlib.sha256().hexdigest()
"""The SHA-256 of no bytes."""


@dataclass(frozen=True, slots=True)
class PartialRecord:
    """An upload by parts that is not complete. `digest` is the SHA-256 of the `num_bytes` that
    are held."""

    partial: str
    assignment: str
    trip: Trip
    max_bytes: int
    num_bytes: int
    digest: str
    num_parts: int
    expires_at: float


@dataclass(frozen=True, slots=True)
class PartRecord:
    start: int
    num_bytes: int
    digest: str


def find(connection: Connection, partial: str) -> PartialRecord | None:
    return _one(connection, partial_uploads.c.partial == partial)


def find_of(connection: Connection, assignment: str, trip: Trip) -> PartialRecord | None:
    of_trip = (partial_uploads.c.assignment == assignment, partial_uploads.c.trip == trip)
    return _one(connection, sa.and_(*of_trip))


def _one(connection: Connection, where: sa.ColumnElement[bool]) -> PartialRecord | None:
    row = connection.execute(sa.select(partial_uploads).where(where)).one_or_none()
    return None if row is None else PartialRecord(*row)


def parts(connection: Connection, partial: str) -> list[PartRecord]:
    """In the order of the body."""
    found = connection.execute(
        sa.select(partial_parts.c.start, partial_parts.c.num_bytes, partial_parts.c.digest)
        .where(partial_parts.c.partial == partial)
        .order_by(partial_parts.c.start)
    )
    return [PartRecord(*row) for row in found]


def promised(connection: Connection, now: float) -> int:
    """The bytes that all uploads by parts under way may come to."""
    return _over_all(connection, sa.func.sum(partial_uploads.c.max_bytes), now)


def count_of(connection: Connection, client_id: str, now: float) -> int:
    """How many uploads by parts a device has under way."""
    mine = assignments.c.client_id == client_id
    return _over_all(connection, sa.func.count(), now, mine)


def _over_all(
    connection: Connection, what: sa.ColumnElement[Any], now: float, *where: sa.ColumnElement[bool]
) -> int:
    is_open = (partial_uploads.c.expires_at > now, assignments.c.receipt.is_(None))
    query = (
        sa.select(sa.func.coalesce(what, 0))
        .select_from(partial_uploads.join(assignments))
        .where(*is_open, *where)
    )
    return int(connection.execute(query).scalar_one())


def add(connection: Connection, record: PartialRecord) -> None:
    fields = {name: getattr(record, name) for name in record.__slots__}
    connection.execute(sa.insert(partial_uploads).values(fields))


def add_part(
    connection: Connection, before: PartialRecord, part: PartRecord, digest: str, expires_at: float
) -> bool:
    """Append `part` to `before`, which then has SHA-256 `digest`; False if it has moved since."""
    partial = before.partial
    moved = connection.execute(
        sa.update(partial_uploads)
        .where(
            partial_uploads.c.partial == partial, partial_uploads.c.num_bytes == before.num_bytes
        )
        .values(
            num_bytes=before.num_bytes + part.num_bytes,
            digest=digest,
            num_parts=before.num_parts + 1,
            expires_at=expires_at,
        )
    )
    if moved.rowcount != 1:
        return False
    row = {"partial": partial, "start": part.start, "num_bytes": part.num_bytes}
    connection.execute(sa.insert(partial_parts).values(row | {"digest": part.digest}))
    return True


def drop(connection: Connection, partials: Sequence[str]) -> None:
    """Forget them; the files are for the caller to remove, after this is committed."""
    for table in (partial_parts, partial_uploads):
        connection.execute(sa.delete(table).where(table.c.partial.in_(partials)))


def drop_spent(connection: Connection, partial: str, now: float) -> bool:
    """As `drop`, if it is one of `spent` still."""
    if partial not in spent(connection, now):
        return False
    drop(connection, [partial])
    return True


def names(connection: Connection) -> set[str]:
    return set(connection.execute(sa.select(partial_uploads.c.partial)).scalars())


def spent(connection: Connection, now: float) -> list[str]:
    """Those that have expired, and those of assignments that are over or have their upload."""
    is_over = sa.or_(
        partial_uploads.c.expires_at <= now,
        assignments.c.receipt.is_not(None),
        sa.and_(partial_uploads.c.trip == "update", uploads.c.assignment.is_not(None)),
    )
    joined = partial_uploads.join(assignments).outerjoin(
        uploads, uploads.c.assignment == assignments.c.assignment
    )
    query = sa.select(partial_uploads.c.partial).select_from(joined).where(is_over)
    return list(connection.execute(query).scalars())
