"""From updates to the next model."""

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
