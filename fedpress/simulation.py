"""Simulated federations with real bytes, on one machine or a Ray cluster."""

from fedpress.simulate.history import History
from fedpress.simulate.run import simulate, sweep
from fedpress.simulate.settings import Settings

__all__ = [
    "History",
    "Settings",
    "simulate",
    "sweep",
]
