"""The parts that a server opens before all others, and closes after them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fedpress_protocols.messages import Restore
from fedpress_server.identity.membership import Authority
from fedpress_server.identity.signing import SigningKeys
from fedpress_server.metrics import Metrics
from fedpress_server.settings import Settings
from fedpress_server.storage.database import Database
from fedpress_server.storage.payloads import Payloads

Clock = Callable[[], float]
"""Unix seconds."""


@dataclass(frozen=True)
class Resources:
    """The ground that the parts of a server stand on."""

    settings: Settings
    metrics: Metrics
    clock: Clock
    database: Database
    payloads: Payloads
    server_keys: SigningKeys
    authority: Authority
    restore: Restore | None = None
    """The last that the records have been through."""
    session_clock: Clock | None = None
    """By which browsers' sessions end, where `clock` is a simulation's."""
