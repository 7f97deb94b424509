"""FedPer: personal layers (Arivazhagan et al. 2019, arXiv:1912.00818, Algorithms
1 and 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedpress_strategies.fedavg import FEDAVG
from fedpress_strategies.strategy import Strategy, strategy


@strategy("fedper", personal=["head.*"], inner={"id": "fedavg"})
def fedper(personal: Sequence[str], inner: Strategy = FEDAVG) -> Strategy:
    """Keep tensors whose names match one of the patterns `personal` on each device, out of all
    uploads; `inner` works on the others. The server's model keeps their initial values, from which
    every device starts. State: on the device, these tensors; linear as `inner`.
    """
    state = inner.properties.client_state
    keeps = "personal tensors" if state == "none" else f"{state}, personal tensors"
    about = replace(
        inner.properties, client_state=keeps, source="Arivazhagan et al. 2019, Algorithm 1"
    )
    patterns = (personal,) if isinstance(personal, str) else tuple(personal)
    return inner.asking(personal=patterns)._replace(properties=about)
