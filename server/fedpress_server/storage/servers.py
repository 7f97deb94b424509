"""SQL statements about running servers: heartbeats, log levels and device statistics.

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

GONE_SECONDS = 15.0
"""Seconds without a heartbeat after which a server is no longer counted: three are missing."""


@dataclass(frozen=True, slots=True)
class ServerRecord:
    """A server according to its last heartbeat."""

    server_id: str
    name: str
    role: str
    seen_at: float
    log_level: str
    fleet: Mapping[str, Any]
    """Its statistics about devices since its start; see `FleetCounts`."""
    host: str
    version: str
    holder: str
    """The holder of its leases, see `leases.holder_of`; "" if its role takes no jobs."""
    started_at: float
    lag: float
    """Seconds by which its own work is late; jobs of workers are not its own, see `leases`."""


def heartbeat(connection: Connection, server: ServerRecord) -> str | None:
    """Write a server's heartbeat; returns the log level requested since its last one."""
    row = servers.c.server_id == server.server_id
    query = sa.select(servers.c.next_log_level).where(row).with_for_update()
    stored = connection.execute(query).one_or_none()
    if stored is None:
        connection.execute(sa.insert(servers).values(**asdict(server)))
        return None
    level: str | None = stored.next_log_level
    connection.execute(sa.update(servers).where(row).values(**asdict(server), next_log_level=None))
    return level


def remove(connection: Connection, server_id: str) -> None:
    connection.execute(sa.delete(servers).where(servers.c.server_id == server_id))


def remove_silent(connection: Connection, since: float) -> None:
    """Remove servers without a heartbeat since then: they were killed."""
    connection.execute(sa.delete(servers).where(servers.c.seen_at < since))


def ask_log_level(connection: Connection, level: str) -> None:
    """Request a log level of every server, applied with its next heartbeat."""
    connection.execute(sa.update(servers).values(next_log_level=level))


def listed(connection: Connection, since: float) -> list[ServerRecord]:
    """The servers with a heartbeat since then."""
    columns = [servers.c[name] for name in ServerRecord.__dataclass_fields__]
    query = sa.select(*columns).where(servers.c.seen_at >= since)
    return [ServerRecord(*row) for row in connection.execute(query)]
