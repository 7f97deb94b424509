"""The stored audit log: actions on this server and their actors, as a chain of hashes.

An entry is written in the transaction of its action, so neither exists without the other. These
writes are exclusive among all servers of a database (`Database.write` without `locks`), so the
chain cannot fork; two entries with the same number would violate the primary key. No code changes
or removes an entry. Entries hold no secrets: tokens appear by id.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import sqlalchemy as sa
from pydantic import ValidationError
from sqlalchemy.engine import Connection, Row

from fedpress_protocols.audit import (
    NOTHING,
    AuditEntry,
    AuditPage,
    Head,
    checked,
    digest_of,
    end_of,
)
from fedpress_protocols.errors import BrokenChain, ConfigurationError, MalformedRequest
from fedpress_protocols.signatures import canonical_json
from fedpress_protocols.validation import format_validation_errors
from fedpress_server.storage.database import Database, damage_refused
from fedpress_server.storage.tables import audit_log

SERVER = "server"
"""The actor of a server's own actions."""
COMMAND = "command-line"
"""The actor of commands on the server's machine, without a token."""

Action = Literal[
    "server.started",
    "server.backed-up",
    "server.restored",
    "server-key.announced",
    "server-key.activated",
    "server-key.retired",
    "operator.created",
    "operator.revoked",
    "operator.refused",
    "token.created",
    "token.revoked",
    "device.enrolled",
    "device.approved",
    "device.rejected",
    "device.revoked",
    "device.key-rotated",
    "model.brought",
    "models.collected",
    "rounds.collected",
    "task.created",
    "task.continued",
    "task.paused",
    "task.resumed",
    "task.finished",
    "task.cancelled",
    "task.ended",
    "round.aborted",
    "session.disturbed",
    "alias.promoted",
    "alias.rolled-back",
    "log-level.changed",
]
"""The actions; docs/audit.md has their meanings and details."""

_AT_A_TIME = 500
_BEFORE_ALL = -(2**63)
"""Below the first number, so that a row inserted before the first is read too."""
_TO_MILLISECONDS = 1000


def add(
    connection: Connection,
    now: float,
    by: str,
    action: Action,
    subject: str,
    **details: Any,
) -> Head:
    """Append an entry about an action of this transaction; returns the new head.

    `now`: Unix seconds. `by`: `SERVER`, `COMMAND`, or what `operator_route`'s `By` or `by_device`
    gives. `details` are JSON without fractions, and never a secret.
    """
    last = head(connection)
    fields = {
        "seq": last.seq + 1,
        "at": int(now * _TO_MILLISECONDS),
        "actor": by,
        "action": action,
        "subject": subject,
        "details": details,
        "previous": last.hash,
    }
    new = Head(seq=last.seq + 1, hash=digest_of(fields))
    row = {**fields, "details": canonical_json(details).decode(), "hash": new.hash}
    connection.execute(_ADD, row)
    return new


def by_device(client_id: str) -> str:
    """The actor of a device's actions."""
    return f"device:{client_id}"


def head(connection: Connection) -> Head:
    """The head of the log."""
    row = connection.execute(_HEAD).one_or_none()
    return NOTHING if row is None else Head(seq=row.seq, hash=row.hash)


def page(connection: Connection, after: int, limit: int) -> AuditPage:
    """The first `limit` entries after `after`; raises BrokenChain for an invalid row."""
    rows = connection.execute(_PAGE, {"after_seq": after, "most": limit})
    return AuditPage(entries=tuple(map(_entry, rows)), head=head(connection))


async def verified(database_url: str, heads: Sequence[Head]) -> Head:
    """Verify the whole log of a server's database, whether the server runs or not, and that it has
    all of `heads`; returns the head. Raises BrokenChain, or ConfigurationError without a
    database."""
    url = sa.make_url(database_url)
    if url.get_backend_name() == "sqlite" and not await asyncio.to_thread(
        Path(url.database or "").is_file
    ):
        raise ConfigurationError(
            f"there is no server's database {url.database}", hint="name its folder as --data-dir"
        )
    database = await asyncio.to_thread(Database, database_url, migrates=False)
    try:
        with damage_refused():
            return await database.read(lambda c: end_of(checked(entries(c), heads=heads)))
    finally:
        await asyncio.to_thread(database.close)


def entries(connection: Connection) -> Iterator[AuditEntry]:
    """Iterate over all entries in order, read in batches; raises BrokenChain for an invalid row."""
    last = _BEFORE_ALL
    while rows := connection.execute(_PAGE, {"after_seq": last, "most": _AT_A_TIME}).all():
        for row in rows:
            yield _entry(row)
        last = rows[-1].seq


def _entry(row: Row[Any]) -> AuditEntry:
    fields = dict(row._mapping)
    try:
        details = json.loads(fields["details"])
        if canonical_json(details).decode() != fields["details"]:
            raise MalformedRequest("details that are not canonical JSON (RFC 8785)")
        return AuditEntry.model_validate({**fields, "details": details}, strict=True)
    except ValidationError as exc:
        raise BrokenChain(f"entry {row.seq}: {format_validation_errors(exc)}", seq=row.seq) from exc
    except (ValueError, TypeError, RecursionError, MalformedRequest) as exc:
        raise BrokenChain(f"entry {row.seq}: {exc}", seq=row.seq) from exc


_ADD = sa.insert(audit_log)
_HEAD = sa.select(audit_log.c.seq, audit_log.c.hash).order_by(audit_log.c.seq.desc()).limit(1)
_PAGE = (
    sa.select(audit_log)
    .where(audit_log.c.seq > sa.bindparam("after_seq"))
    .order_by(audit_log.c.seq)
    .limit(sa.bindparam("most"))
)
