"""Strategies: aggregation of updates and the server optimizer."""

from fedpress_strategies.strategy import (
    Aggregator,
    ServerOptimizer,
    Strategy,
    from_config,
    strategies,
)

__all__ = [
    "Aggregator",
    "ServerOptimizer",
    "Strategy",
    "from_config",
    "strategies",
]
