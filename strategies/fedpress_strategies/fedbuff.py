"""FedBuff: buffered asynchronous aggregation (Nguyen et al. 2022, arXiv:2106.06639, Algorithm
1)."""

from __future__ import annotations

from functools import partial

from fedpress_strategies.staleness import DiscountedMean, Polynomial
from fedpress_strategies.strategy import Properties, ServerSGD, Strategy, strategy


@strategy("fedbuff")
def fedbuff(
    learning_rate: float = 1.0,
    momentum: float = 0.0,
    exponent: float = 0.5,
    weighted: bool = True,
) -> Strategy:
    """Asynchronous tasks: every `cohort.size` uploads make a model, each weighted by
    (1 + staleness) ** -`exponent`, without waiting for stragglers. State: with momentum one
    velocity [size]; not linear, since no client knows its staleness.

    With `weighted` uploads are also weighted by examples; in the paper all weigh the same.
    """
    about = Properties(
        "velocity [d]" if momentum else "none", source="Nguyen et al. 2022, Algorithm 1"
    )
    aggregator = partial(DiscountedMean, discount=Polynomial(exponent), weighted=weighted)
    return Strategy(aggregator, ServerSGD(learning_rate, momentum), properties=about)
