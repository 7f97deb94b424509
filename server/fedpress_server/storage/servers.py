"""The SQL of the servers that run: what each logs and has seen, and what it is to log.

Each function runs in its caller's transaction. Times are seconds of the database's clock, one for
all servers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fedpress_server.storage.tables import servers


@dataclass(frozen=True, slots=True)
class ServerRecord:
    """A server as its last sign has it."""

    server_id: str
    name: str
    role: str
    seen_at: float
    log_level: str
    fleet: Mapping[str, Any]
    """What it has seen of devices since it was started; see `FleetCounts`."""


def sign(connection: Connection, server: ServerRecord) -> str | None:
    """Write a server's sign of life; the log level that was asked of it since its last one."""
    row = servers.c.server_id == server.server_id
    asked = sa.select(servers.c.next_log_level).where(row).with_for_update()
    found = connection.execute(asked).one_or_none()
    if found is None:
        connection.execute(sa.insert(servers).values(**asdict(server)))
        return None
    level: str | None = found.next_log_level
    connection.execute(sa.update(servers).where(row).values(**asdict(server), next_log_level=None))
    return level


def remove(connection: Connection, server_id: str) -> None:
    connection.execute(sa.delete(servers).where(servers.c.server_id == server_id))


def remove_silent(connection: Connection, since: float) -> None:
    """Those that have given no sign since then: they were killed."""
    connection.execute(sa.delete(servers).where(servers.c.seen_at < since))


def ask_log_level(connection: Connection, level: str) -> None:
    """Of every server, with its next sign."""
    connection.execute(sa.update(servers).values(next_log_level=level))


def running(connection: Connection, since: float) -> list[ServerRecord]:
    """Those that have given a sign since then, by role and name."""
    columns = [servers.c[name] for name in ServerRecord.__dataclass_fields__]
    query = sa.select(*columns).where(servers.c.seen_at >= since)
    found = connection.execute(query.order_by(servers.c.role, servers.c.name))
    return [ServerRecord(*row) for row in found]
