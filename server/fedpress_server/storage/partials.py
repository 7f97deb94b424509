"""SQL statements about uploads in parts: progress, parts and expiry.

A part's file is durable before its row, and the row before the answer. A file without a row does
not count; so of two concurrent parts for one offset, the one with the first row counts.
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
"""The SHA-256 of the empty string."""


@dataclass(frozen=True, slots=True)
class PartialRecord:
    """An incomplete upload in parts. `digest` is the SHA-256 of its `num_bytes` received bytes."""

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
    """The parts in the order of the body."""
    rows = connection.execute(
        sa.select(partial_parts.c.start, partial_parts.c.num_bytes, partial_parts.c.digest)
        .where(partial_parts.c.partial == partial)
        .order_by(partial_parts.c.start)
    )
    return [PartRecord(*row) for row in rows]


def promised(connection: Connection, now: float) -> int:
    """The maximum total bytes of all open uploads in parts."""
    return _over_all(connection, sa.func.sum(partial_uploads.c.max_bytes), now)


def count_of(connection: Connection, client_id: str, now: float) -> int:
    """The number of open uploads in parts of a device."""
    mine = assignments.c.client_id == client_id
    return _over_all(connection, sa.func.count(), now, mine)


def _over_all(
    connection: Connection,
    aggregate: sa.ColumnElement[Any],
    now: float,
    *where: sa.ColumnElement[bool],
) -> int:
    is_open = (partial_uploads.c.expires_at > now, assignments.c.receipt.is_(None))
    query = (
        sa.select(sa.func.coalesce(aggregate, 0))
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
    """Append `part` to `before`, which then has SHA-256 `digest`; False if it changed since."""
    partial = before.partial
    result = connection.execute(
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
    if result.rowcount != 1:
        return False
    row = {"partial": partial, "start": part.start, "num_bytes": part.num_bytes}
    connection.execute(sa.insert(partial_parts).values(row | {"digest": part.digest}))
    return True


def drop(connection: Connection, partials: Sequence[str]) -> None:
    """Delete the records; the caller removes the files after the commit."""
    for table in (partial_parts, partial_uploads):
        connection.execute(sa.delete(table).where(table.c.partial.in_(partials)))


def drop_spent(connection: Connection, partials: Sequence[str], now: float) -> list[str]:
    """Like `drop`, of those that are still among `spent`; returns them."""
    query = _spent(now).where(partial_uploads.c.partial.in_(partials))
    still = list(connection.execute(query).scalars())
    drop(connection, still)
    return still


def names(connection: Connection) -> set[str]:
    return set(connection.execute(sa.select(partial_uploads.c.partial)).scalars())


def spent(connection: Connection, now: float) -> list[str]:
    """Uploads in parts that have expired, or whose assignment has ended or has its upload; in
    order."""
    query = _spent(now).order_by(partial_uploads.c.partial)
    return list(connection.execute(query).scalars())


def _spent(now: float) -> sa.Select[Any]:
    is_over = sa.or_(
        partial_uploads.c.expires_at <= now,
        assignments.c.receipt.is_not(None),
        sa.and_(partial_uploads.c.trip == "update", uploads.c.assignment.is_not(None)),
    )
    joined = partial_uploads.join(assignments).outerjoin(
        uploads, uploads.c.assignment == assignments.c.assignment
    )
    return sa.select(partial_uploads.c.partial).select_from(joined).where(is_over)
