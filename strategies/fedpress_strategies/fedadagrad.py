"""FedAdagrad (Reddi et al. 2021, arXiv:2003.00295, Algorithm 2)."""

from __future__ import annotations

from fedpress_strategies.adaptive import Adaptive, Variant
from fedpress_strategies.strategy import Delta, Properties, Strategy, WeightedMean, strategy


@strategy("fedadagrad")
def fedadagrad(
    learning_rate: float = 0.1, beta1: float = 0.0, tau: float = 0.001, variant: Variant = "paper"
) -> Strategy:
    """Decrease every coordinate's rate with the sum of its squared updates. State: a moment and a
    sum [size]; linear. The `variant` "flwr" is Flower's update rule."""
    optimizer = Adaptive(_second_moment, learning_rate, beta1, 0.0, tau, variant=variant)
    about = Properties("a moment and a sum [d]", source="Reddi et al. 2021, Algorithm 2")
    return Strategy(WeightedMean, optimizer, properties=about)


def _second_moment(before: Delta, squares: Delta, beta2: float) -> Delta:
    return before + squares
