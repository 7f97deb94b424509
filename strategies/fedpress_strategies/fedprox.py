"""FedProx (Li et al. 2020, arXiv:1812.06127, Algorithm 2)."""

from __future__ import annotations

from dataclasses import replace

from fedpress_protocols.errors import ConfigurationError
from fedpress_strategies.fedavg import FEDAVG
from fedpress_strategies.strategy import Strategy, strategy


@strategy("fedprox", inner={"id": "fedavg"})
def fedprox(mu: float = 0.01, inner: Strategy = FEDAVG) -> Strategy:
    """Add a proximal term to `inner`: clients minimise their loss plus mu / 2 times the squared
    distance to the round's model; with mu = 0 it is `inner`, bit for bit. No state of its own;
    linear as `inner`.
    """
    if inner.client_terms.proximal:
        raise ConfigurationError(
            "the inner strategy already has a proximal term; set mu in one of them only"
        )
    about = replace(inner.properties, source="Li et al. 2020, Algorithm 2")
    return inner.asking(proximal=mu)._replace(properties=about)
