"""Conditions under which a device takes part, for `Client(should_participate=...)`."""

from fedpress_client.participation import (
    Battery,
    Condition,
    Hours,
    Interface,
    Load,
    Refusal,
)

__all__ = [
    "Battery",
    "Condition",
    "Hours",
    "Interface",
    "Load",
    "Refusal",
]
