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
