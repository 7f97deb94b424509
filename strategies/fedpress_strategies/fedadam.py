"""FedAdam (Reddi et al. 2021, arXiv:2003.00295, Algorithm 2)."""

from __future__ import annotations

from fedpress_strategies.adaptive import Adaptive, Variant
from fedpress_strategies.strategy import Delta, Properties, Strategy, WeightedMean, strategy


@strategy("fedadam")
def fedadam(
    learning_rate: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 0.001,
    bias_correction: bool = False,
    variant: Variant = "paper",
) -> Strategy:
    """Adam on the rounds' mean updates; `tau` bounds the scaling of small updates. State:
    two moments [size]; linear. The `variant` "flwr" is Flower's update rule."""
    optimizer = Adaptive(
        _second_moment, learning_rate, beta1, beta2, tau, bias_correction, variant, scales_rate=True
    )
    about = Properties("two moments [d]", source="Reddi et al. 2021, Algorithm 2")
    return Strategy(WeightedMean, optimizer, properties=about)


def _second_moment(before: Delta, squares: Delta, beta2: float) -> Delta:
    return beta2 * before + (1 - beta2) * squares
