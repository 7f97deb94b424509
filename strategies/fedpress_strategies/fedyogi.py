"""FedYogi (Reddi et al. 2021, arXiv:2003.00295, Algorithm 2)."""

from __future__ import annotations

import numpy as np

from fedpress_strategies.adaptive import Adaptive, Variant
from fedpress_strategies.strategy import Delta, Properties, Strategy, WeightedMean, strategy


@strategy("fedyogi")
def fedyogi(
    learning_rate: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 0.001,
    bias_correction: bool = False,
    variant: Variant = "paper",
) -> Strategy:
    """FedAdam with a second moment that changes by at most the squared update, so that one small
    update does not raise the rate at once. State: two moments [size]; linear.
    The `variant` "flwr" is Flower's update rule."""
    optimizer = Adaptive(_second_moment, learning_rate, beta1, beta2, tau, bias_correction, variant)
    about = Properties("two moments [d]", source="Reddi et al. 2021, Algorithm 2")
    return Strategy(WeightedMean, optimizer, properties=about)


def _second_moment(before: Delta, squares: Delta, beta2: float) -> Delta:
    moved: Delta = before - (1 - beta2) * squares * np.sign(before - squares)
    return moved
