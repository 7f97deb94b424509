"""Simulated federations with real bytes, on one machine or a Ray cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedpress.lazy import exports

if TYPE_CHECKING:
    from fedpress.simulate.history import History
    from fedpress.simulate.run import simulate, sweep
    from fedpress.simulate.settings import Settings

__all__ = [
    "History",
    "Settings",
    "simulate",
    "sweep",
]

__getattr__, __dir__ = exports(
    __name__,
    {
        "History": "fedpress.simulate.history",
        "Settings": "fedpress.simulate.settings",
        "simulate": "fedpress.simulate.run",
        "sweep": "fedpress.simulate.run",
    },
    extra="flower,demo",
)
