"""Reports of servers to their operators: statistics about devices, and log levels."""

from __future__ import annotations

from typing import Literal

from fedpress_protocols.plan import Term

LogLevel = Literal["debug", "info", "warning", "error"]


class ServerLogLevel(Term):
    """The lowest severity that one server logs."""

    server: str
    level: LogLevel


class LogLevelStatus(Term):
    """The lowest severity that servers log."""

    level: LogLevel
    """The level of the server that answers."""
    server: str = ""
    """The name of the server that answers; only in answers."""
    servers: tuple[ServerLogLevel, ...] = ()
    """All running servers; only in answers."""


class ServerStatus(Term):
    """One server as of its last heartbeat. Times are Unix seconds."""

    server: str
    """Its role, host and process."""
    role: str
    version: str
    host: str
    started_at: float
    seen_at: float
    """Time of the last heartbeat, by the database's clock."""
    is_stale: bool
    """Whether heartbeats are missing: it was killed, paused or cut off from the database."""
    leases: int
    """Jobs that it does at present."""
    lag_seconds: float
    """How late its work is. Worker: how long the oldest job that nobody does has waited. Scheduler:
    how long the earliest deadline that it has not acted on is over. Api: how long a request waits
    before it is begun. One server for all: the longest of them."""
    log_level: LogLevel


class ServerList(Term):
    """The servers of one database, by role and name."""

    servers: tuple[ServerStatus, ...]


class ServerSince(Term):
    """A running server and its start time in Unix seconds."""

    server: str
    since: float


class Quantiles(Term):
    """Approximate quantiles (10%, 50%, 90%) of `num` observations; None before the first."""

    num: int
    tenth: float | None = None
    median: float | None = None
    nine_tenths: float | None = None


class FleetStatus(Term):
    """Statistics of all running servers, each since its start."""

    server: str
    """The server that answers. Its own figures are current, those of others a few seconds old."""
    since: float
    """Unix seconds at which the first of them was started."""
    uplink_bits_per_second: Quantiles
    """Rates of bodies that took 10 ms or longer to receive."""
    uplink_unmeasured: int
    """Number of bodies that arrived faster."""
    clocks_ahead_seconds: Quantiles
    clocks_behind_seconds: Quantiles
    """Difference of request timestamps to the server's clock, transit time included."""
    download_bytes: int
    answer_bytes: int
    """Bytes sent, headers among them."""
    egress_cost: float
    """The cost of both at the configured price."""
    egress_currency: str
    staged_bytes: int
    staged_float32_bytes: int
    """Body bytes of staged uploads, and the bytes of their updates in float32."""
    servers: tuple[ServerSince, ...] = ()
    """The servers that are included."""
