"""SQL statements about enrolment tokens, device approval and former keys.

The queries of every request are in `records`; each function runs in its caller's transaction.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fedpress_protocols.enrolment import DeviceState
from fedpress_server.storage.prepared import Prepared, each_of
from fedpress_server.storage.records import Approval, Device, EnrolmentToken
from fedpress_server.storage.tables import (
    assignments,
    clients,
    enrolment_tokens,
    former_keys,
    uploads,
)


@dataclass(frozen=True, slots=True)
class FormerKey:
    """A key that its device has replaced, which is never valid again."""

    key_id: str
    client_id: str
    public_key: bytes
    next_key_id: str
    retired_at: float
    rotation: dict[str, Any]
    """The rotation that replaced it."""


# Tokens


def token(connection: Connection, token_id: str) -> EnrolmentToken | None:
    query = sa.select(enrolment_tokens).where(enrolment_tokens.c.token_id == token_id)
    row = connection.execute(query).one_or_none()
    return EnrolmentToken(*row) if row else None


def tokens(
    connection: Connection, before: EnrolmentToken | None, limit: int
) -> list[EnrolmentToken]:
    """The newest tokens, optionally created before `before`; newest first."""
    row = enrolment_tokens.c
    query = sa.select(enrolment_tokens)
    if before is not None:
        at = sa.tuple_(before.created_at, before.token_id)
        query = query.where(sa.tuple_(row.created_at, row.token_id) < at)
    query = query.order_by(row.created_at.desc(), row.token_id.desc()).limit(limit)
    return [EnrolmentToken(*each) for each in connection.execute(query)]


def live_tokens(connection: Connection, now: float, most: int) -> list[str]:
    """The hashes of usable tokens among the `most` newest."""
    row = enrolment_tokens.c
    query = (
        sa.select(row.token_hash)
        .where(row.revoked_at.is_(None), row.expires_at > now, row.used < row.uses)
        .order_by(row.created_at.desc())
        .limit(most)
    )
    return list(connection.scalars(query))


def revoke_token(connection: Connection, token_id: str, at: float) -> None:
    row = enrolment_tokens.c
    connection.execute(
        sa.update(enrolment_tokens)
        .where(row.token_id == token_id, row.revoked_at.is_(None))
        .values(revoked_at=at)
    )


# Devices


def device(connection: Connection, client_id: str) -> Device | None:
    query = sa.select(clients).where(clients.c.client_id == client_id)
    row = connection.execute(query).one_or_none()
    return Device(*row) if row else None


def devices(
    connection: Connection, state: DeviceState | None, after: Device | None, limit: int
) -> list[Device]:
    """Devices in order of enrolment after `after`; optionally of one state."""
    row = clients.c
    query = sa.select(clients)
    if state == "revoked":
        query = query.where(row.revoked_at.is_not(None))
    elif state is not None:
        query = query.where(row.revoked_at.is_(None), row.approval == state)
    if after is not None:
        at = sa.tuple_(after.enrolled_at, after.client_id)
        query = query.where(sa.tuple_(row.enrolled_at, row.client_id) > at)
    query = query.order_by(row.enrolled_at, row.client_id).limit(limit)
    return [Device(*each) for each in connection.execute(query)]


def decide(connection: Connection, client_id: str, approval: Approval, at: float) -> None:
    connection.execute(
        sa.update(clients)
        .where(clients.c.client_id == client_id)
        .values(approval=approval, decided_at=at)
    )


def revoke(connection: Connection, client_id: str, at: float) -> None:
    connection.execute(
        sa.update(clients).where(clients.c.client_id == client_id).values(revoked_at=at)
    )


@dataclass(frozen=True, slots=True)
class Sighting:
    """What a device's request tells of the device."""

    client_id: str
    at: float
    agent: str
    clock_ahead: float


def note_sightings(connection: Connection, sightings: Collection[Sighting]) -> None:
    """Note when devices were seen; of two sightings of a device the later one stays."""
    row = clients.c
    update = (
        sa.update(clients)
        .where(
            row.client_id == sa.bindparam("of_client"),
            sa.or_(row.seen_at.is_(None), row.seen_at < sa.bindparam("at")),
        )
        .values(
            seen_at=sa.bindparam("at"),
            agent=sa.bindparam("by_agent"),
            clock_ahead=sa.bindparam("ahead"),
        )
    )
    rows = [
        {
            "of_client": each.client_id,
            "at": each.at,
            "by_agent": each.agent,
            "ahead": each.clock_ahead,
        }
        for each in sorted(sightings, key=lambda each: each.client_id)  # servers lock in one order
    ]
    connection.execute(update, rows)


@dataclass(frozen=True, slots=True)
class Contribution:
    """What a device has done for a task."""

    task: str
    assigned: int
    uploads: int
    num_bytes: int
    """Of the bodies of its uploads."""
    num_examples: int
    seconds: float | None
    """That the bodies of `measured_bytes` took to arrive; None if no duration is known."""
    measured_bytes: int


@dataclass(frozen=True, slots=True)
class Participation:
    """One assignment of a device, and its upload if there is one."""

    task: str
    round: int
    attempt: int
    profile: str
    assigned_at: float
    receipt: str | None
    num_bytes: int | None
    num_examples: int | None


def contributions(connection: Connection, client_id: str) -> list[Contribution]:
    """Of a device, by task."""
    row, upload = assignments.c, uploads.c
    query = (
        sa.select(
            row.task,
            sa.func.count(),
            sa.func.count(upload.assignment),
            sa.func.coalesce(sa.func.sum(upload.num_bytes), 0),
            sa.func.coalesce(sa.func.sum(upload.num_examples), 0),
            sa.func.sum(upload.seconds),
            sa.func.coalesce(
                sa.func.sum(sa.case((upload.seconds.is_not(None), upload.num_bytes), else_=0)), 0
            ),
        )
        .outerjoin(uploads, upload.assignment == row.assignment)
        .where(row.client_id == client_id)
        .group_by(row.task)
        .order_by(row.task)
    )
    return [
        Contribution(task, assigned, num, int(size), int(examples), seconds, int(measured))
        for task, assigned, num, size, examples, seconds, measured in connection.execute(query)
    ]


def participations(connection: Connection, client_id: str, limit: int) -> list[Participation]:
    """The newest assignments of a device, the newest first."""
    row, upload = assignments.c, uploads.c
    query = (
        sa.select(
            row.task,
            row.round,
            row.attempt,
            row.profile,
            row.assigned_at,
            row.receipt,
            upload.num_bytes,
            upload.num_examples,
        )
        .outerjoin(uploads, upload.assignment == row.assignment)
        .where(row.client_id == client_id)
        .order_by(row.assigned_at.desc(), row.assignment)
        .limit(limit)
    )
    return [Participation(*each) for each in connection.execute(query)]


# Keys


def devices_by_key(connection: Connection, key_ids: Collection[str]) -> dict[str, Device]:
    """The devices with these current keys, by key id."""
    rows = _BY_KEY.run(connection, key_ids=json.dumps(list(key_ids)))
    return {row.key_id: Device(*tuple(row)) for row in rows}


def former_by_key(connection: Connection, key_ids: Collection[str]) -> dict[str, FormerKey]:
    """The devices with these former keys, by key id."""
    query = sa.select(former_keys).where(former_keys.c.key_id.in_(list(key_ids)))
    return {each.key_id: each for each in (FormerKey(*row) for row in connection.execute(query))}


def former_key_ids(connection: Connection) -> list[str]:
    return list(connection.scalars(sa.select(former_keys.c.key_id)))


def former_of(connection: Connection, client_id: str) -> list[FormerKey]:
    """The former keys of a device, oldest first."""
    row = former_keys.c
    query = sa.select(former_keys).where(row.client_id == client_id)
    return [FormerKey(*each) for each in connection.execute(query.order_by(row.retired_at))]


def retire_keys(connection: Connection, keys: Collection[FormerKey]) -> None:
    fields = FormerKey.__slots__
    rows = [{name: getattr(each, name) for name in fields} for each in keys]
    connection.execute(sa.insert(former_keys), rows)


def set_key(
    connection: Connection, client_id: str, key_id: str, public_key: bytes, at: float
) -> None:
    connection.execute(
        sa.update(clients)
        .where(clients.c.client_id == client_id)
        .values(key_id=key_id, public_key=public_key, rotated_at=at)
    )


def strangers_among(connection: Connection, key_ids: Collection[str]) -> set[str]:
    """The invalid keys among `key_ids`: unknown, replaced, or of a device that is revoked or not
    approved."""
    welcome = _WELCOME.run(connection, key_ids=json.dumps(list(key_ids))).scalars()
    return set(key_ids) - set(welcome)


_BY_KEY = Prepared(
    lambda dialect: sa.select(clients).where(clients.c.key_id.in_(each_of(dialect, "key_ids")))
)
_WELCOME = Prepared(
    lambda dialect: sa.select(clients.c.key_id).where(
        clients.c.key_id.in_(each_of(dialect, "key_ids")),
        clients.c.revoked_at.is_(None),
        clients.c.approval == "approved",
    )
)
