"""The geometric median, by the smoothed Weiszfeld algorithm (Pillutla et al. 2022, "Robust
Aggregation for Federated Learning", arXiv:1912.13445)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedpress_protocols.errors import ConfigurationError
from fedpress_strategies.robust import Weights, side_by_side
from fedpress_strategies.rows import Rows
from fedpress_strategies.strategy import Delta, Strategy, strategy

_STILL = 1e-12


@strategy("geometric_median")
def geometric_median(
    weighted: bool = True,
    smoothing: float = 1e-6,
    iterations: int = 100,
    learning_rate: float = 1.0,
    momentum: float = 0.0,
) -> Strategy:
    """The vector with the least sum of distances to the updates, each weighted by its examples or,
    not `weighted`, alike. Not linear.

    `smoothing` is a lower bound on distances. At most `iterations` steps from the mean; stops when
    no weight changes by 1e-12.

    Breakdown: while the forged updates have less than half of the weight, the result is bounded by
    the distances between the honest ones, however far the forged ones are. Example counts are
    reported by clients, up to the plan's max_examples: use `weighted` only if that is a tight
    bound.

    State: none, one velocity [size] with momentum. Memory: a few vectors of the model's size and
    fold_memory_bytes, 32 bytes for each pair of updates among them; disk: 4 bytes a value and
    update, read twice for any number of iterations.
    """
    rule = GeometricMedian(weighted, smoothing, iterations)
    return side_by_side(rule, learning_rate, momentum, "Pillutla et al. 2022")


@dataclass(frozen=True, slots=True)
class GeometricMedian:
    """The rule of the geometric median. Every Weiszfeld step is a mean of the updates, and its
    distances follow from those between updates: the updates themselves are only read for the last
    mean."""

    weighted: bool = True
    smoothing: float = 1e-6
    iterations: int = 100
    coordinatewise = False
    pairwise = True

    def __post_init__(self) -> None:
        if not isinstance(self.weighted, bool):
            raise ConfigurationError(f"weighted must be true or false, not {self.weighted!r}")
        if not 0 < self.smoothing < np.inf:
            raise ConfigurationError(f"smoothing must be positive, not {self.smoothing}")
        if not isinstance(self.iterations, int) or self.iterations < 1:
            raise ConfigurationError(f"iterations must be at least 1, not {self.iterations}")

    def check(self, number: int) -> None:
        return None

    def combine(self, rows: Rows, weights: Weights) -> Delta:
        distances = rows.squared_distances()
        shares = weights if self.weighted else np.ones(rows.number)
        parts = shares / shares.sum()
        for _ in range(self.iterations):
            towards = distances @ parts
            squares = towards - (parts @ towards) / 2
            moved = shares / np.maximum(self.smoothing, np.sqrt(np.maximum(squares, 0)))
            moved /= moved.sum()
            change = np.abs(moved - parts).max()
            parts = moved
            if change < _STILL:
                break
        return rows.combination(parts)
