"""Federated SGD (McMahan et al. 2017, arXiv:1602.05629, Section 2)."""

from __future__ import annotations

from fedpress_protocols.plan import ClientTerms
from fedpress_strategies.strategy import Properties, ServerSGD, Strategy, WeightedMean, strategy


@strategy("fedsgd")
def fedsgd(learning_rate: float = 1.0, momentum: float = 0.0) -> Strategy:
    """One step per client along the gradient over all its examples, at the learning rate of the
    training terms; their weighted mean is the gradient over all examples. State: with momentum one
    velocity [size]; linear."""
    about = Properties(
        "velocity [d]" if momentum else "none", source="McMahan et al. 2017, Section 2"
    )
    terms = ClientTerms(full_batch=True)
    return Strategy(WeightedMean, ServerSGD(learning_rate, momentum), terms, properties=about)
