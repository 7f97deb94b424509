"""From updates to the next model."""

from fedpress_strategies.strategy import (
    Aggregator,
    ServerOptimizer,
    Strategy,
    from_config,
    strategies,
    strategy,
)

__all__ = [
    "Aggregator",
    "ServerOptimizer",
    "Strategy",
    "from_config",
    "strategies",
    "strategy",
]
