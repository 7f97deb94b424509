"""What servers tell their operators of the devices that come to them, and of what they log."""

from __future__ import annotations

from typing import Literal

from fedpress_protocols.plan import Term

LogLevel = Literal["debug", "info", "warning", "error"]


class ServerLogLevel(Term):
    """The least severe message that one server logs."""

    server: str
    level: LogLevel


class LogLevelStatus(Term):
    """The least severe message that servers log."""

    level: LogLevel
    """Of the server that answers."""
    server: str = ""
    """Which server answers, of several; only in answers."""
    servers: tuple[ServerLogLevel, ...] = ()
    """All that run; only in answers."""


class ServerSince(Term):
    """A server that runs, and when it was started, in Unix seconds."""

    server: str
    since: float


class Quantiles(Term):
    """About where observations lie: a tenth, a half and nine tenths of them are at most so much.
    None before the first."""

    num: int
    tenth: float | None = None
    median: float | None = None
    nine_tenths: float | None = None


class FleetStatus(Term):
    """What all servers that run have seen, each since it was started."""

    server: str
    """Which server answers, of several. Its own part is of this moment, those of others are a few
    seconds old."""
    since: float
    """Unix seconds: when the first of them was started."""
    uplink_bits_per_second: Quantiles
    """Of bodies that took 10 ms or longer to come."""
    uplink_unmeasured: int
    """Bodies that came faster."""
    clocks_ahead_seconds: Quantiles
    clocks_behind_seconds: Quantiles
    """Of requests, their way included."""
    download_bytes: int
    answer_bytes: int
    """Bytes sent, headers among them."""
    egress_cost: float
    """Of both, at the price of the settings."""
    egress_currency: str
    staged_bytes: int
    staged_float32_bytes: int
    """Body bytes of staged uploads, and what their updates would have come to in float32."""
    servers: tuple[ServerSince, ...] = ()
    """Those that this is of."""
