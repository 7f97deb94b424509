"""The audit log on the disk: what was done to this server and by whom, as a chain of hashes.

An entry is written in the transaction that does what it tells of: neither is there without the
other. Writes that do so are alone (`Database.write` without `locks`), in all servers of a database,
so entries follow one another without a fork; two that took the same place would fail by its key.
Nothing here changes or removes an entry. An entry holds no secret: tokens are named by their ids.
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
from fedpress_server.storage.database import Database
from fedpress_server.storage.tables import audit_log

SERVER = "server"
"""The actor of what a server does of itself."""
COMMAND = "command-line"
"""The actor of what is done on the server's machine, without a token."""

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
"""docs/audit.md says what each of them means, and what its details are."""

_AT_A_TIME = 500
_BEFORE_ALL = -(2**63)
"""So that a row which somebody has put before the first is read too."""
_TO_MILLISECONDS = 1000


def add(
    connection: Connection,
    now: float,
    by: str,
    action: Action,
    subject: str,
    **details: Any,
) -> Head:
    """Write what is done in this very transaction; where the log ends then.

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
    made = Head(seq=last.seq + 1, hash=digest_of(fields))
    row = {**fields, "details": canonical_json(details).decode(), "hash": made.hash}
    connection.execute(_ADD, row)
    return made


def by_device(client_id: str) -> str:
    """The actor of what a device does."""
    return f"device:{client_id}"


def head(connection: Connection) -> Head:
    """Where the log ends."""
    found = connection.execute(_HEAD).one_or_none()
    return NOTHING if found is None else Head(seq=found.seq, hash=found.hash)


def page(connection: Connection, after: int, limit: int) -> AuditPage:
    """The first `limit` entries later than `after`; raises BrokenChain for a row that is none."""
    rows = connection.execute(_PAGE, {"after_seq": after, "most": limit})
    return AuditPage(entries=tuple(map(_entry, rows)), head=head(connection))


async def verified(database_url: str, heads: Sequence[Head]) -> Head:
    """Check the whole log of a server's database, whether the server runs or not, and that it has
    all of `heads`; where it ends. Raises BrokenChain, or ConfigurationError without a database."""
    url = sa.make_url(database_url)
    if url.get_backend_name() == "sqlite" and not await asyncio.to_thread(
        Path(url.database or "").is_file
    ):
        raise ConfigurationError(
            f"there is no server's database {url.database}", hint="name its folder as --data-dir"
        )
    database = await asyncio.to_thread(Database, database_url, migrates=False)
    try:
        return await database.read(lambda c: end_of(checked(entries(c), heads=heads)))
    finally:
        await asyncio.to_thread(database.close)


def entries(connection: Connection) -> Iterator[AuditEntry]:
    """All of them in their order, read a few at a time; raises BrokenChain for a row that is
    none."""
    last = _BEFORE_ALL
    while found := connection.execute(_PAGE, {"after_seq": last, "most": _AT_A_TIME}).all():
        for row in found:
            yield _entry(row)
        last = found[-1].seq


def _entry(row: Row[Any]) -> AuditEntry:
    fields = dict(row._mapping)
    try:
        details = json.loads(fields["details"])
        if canonical_json(details).decode() != fields["details"]:
            raise MalformedRequest("details that are not spelled as RFC 8785 has it")
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
