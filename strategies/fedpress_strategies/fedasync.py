"""FedAsync: asynchronous federated optimization (Xie et al. 2019, arXiv:1903.03934, Algorithm
1)."""

from __future__ import annotations

from functools import partial
from typing import Literal

from fedpress_protocols.errors import ConfigurationError
from fedpress_strategies.staleness import Discount, DiscountedMean, Hinge, Polynomial
from fedpress_strategies.strategy import Properties, ServerSGD, Strategy, strategy


@strategy("fedasync")
def fedasync(
    mixing: float = 0.6,
    staleness: Literal["polynomial", "hinge", "constant"] = "polynomial",
    exponent: float = 0.5,
    slope: float = 10.0,
    free: int = 4,
) -> Strategy:
    """Asynchronous tasks with `cohort.size` 1: every upload moves the newest model towards the
    client's by `mixing` times a staleness discount. No state; not linear, since no client knows its
    staleness.

    The discount is (1 + staleness) ** -`exponent` (polynomial), 1 up to `free` models and then
    1 / (1 + `slope` * (staleness - `free`)) (hinge), or none (constant). The changes
    that a stale client's model lacks are also reverted by that share. The paper's clients stay near
    their model by a proximal term: {"id": "fedprox", "mu": 0.01, "inner": {"id": "fedasync"}}.
    """
    if not 0 < mixing <= 1:
        raise ConfigurationError(f"mixing must lie in (0, 1], not {mixing}")
    discounts: dict[str, Discount] = {
        "polynomial": Polynomial(exponent),
        "hinge": Hinge(slope, free),
        "constant": Polynomial(0.0),
    }
    if staleness not in discounts:
        raise ConfigurationError(
            f"staleness must be one of {', '.join(discounts)}, not {staleness!r}"
        )
    aggregator = partial(DiscountedMean, discount=discounts[staleness], mixes=True)
    about = Properties(source="Xie et al. 2019, Algorithm 1")
    return Strategy(aggregator, ServerSGD(mixing), properties=about)
