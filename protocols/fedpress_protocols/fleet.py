"""What a server tells its operators of the devices that come to it, and of what it sends them."""

from __future__ import annotations

from typing import Literal

from fedpress_protocols.plan import Term

LogLevel = Literal["debug", "info", "warning", "error"]


class LogLevelStatus(Term):
    """The least severe message that one server logs."""

    level: LogLevel
    server: str = ""
    """Which server it is, of several; only in answers."""


class Spread(Term):
    """About where observations lie: a tenth, a half and nine tenths of them are at most so much.
    None before the first."""

    num: int
    tenth: float | None = None
    median: float | None = None
    nine_tenths: float | None = None


class FleetStatus(Term):
    """What one server has seen since it was started; of several servers each has seen a part."""

    server: str
    since: float
    """Unix seconds."""
    uplink_bits_per_second: Spread
    """Of bodies that took 10 ms or longer to come."""
    uplink_unmeasured: int
    """Bodies that came faster."""
    clocks_ahead_seconds: Spread
    clocks_behind_seconds: Spread
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
