"""FedDyn: dynamic regularisation (Acar et al. 2021, arXiv:2111.04263, Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedpress_compression.tensors import Vector
from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.plan import ClientTerms, ControlTerms
from fedpress_strategies.strategy import (
    ALONE,
    Delta,
    OptimizerState,
    Properties,
    Strategy,
    Tally,
    UniformMean,
    check_clients,
    strategy,
)


@strategy("feddyn", clients=100)
def feddyn(clients: int, alpha: float = 0.1) -> Strategy:
    """Regularize each client's loss so that the common optimum is also a minimum for each: its
    gradient minus h_i, plus `alpha` times the distance to the round's model. `clients` is the
    number of clients in the task. State: h [size], and h_i [size] on every device; linear.

    h_i moves by -alpha times the update as decoded, so h is the mean of all h_i. The update itself
    goes to zero, and compression errors stay in the error of h_i; error feedback is refused.
    Every trained tensor takes part: give the statistics of BatchNorm to `fedper`.
    """
    if not alpha > 0:
        raise ConfigurationError(f"alpha must be positive, not {alpha}")
    check_clients(clients)
    terms = ClientTerms(proximal=alpha, control=ControlTerms(scale=-alpha))
    about = Properties(
        "gradient estimate [d]", "gradient estimate [d]", source="Acar et al. 2021, Algorithm 1"
    )
    return Strategy(UniformMean, Dynamic(clients, alpha), terms, properties=about)


@dataclass(frozen=True, slots=True)
class Dynamic:
    """h -= alpha * delta * (share of clients); parameters += delta - h / alpha."""

    clients: int
    alpha: float
    is_by_coordinate: ClassVar[bool] = True

    def init(self, parameters: Vector) -> OptimizerState:
        return {"gradient": np.zeros(parameters.size)}

    def apply(
        self, parameters: Vector, delta: Delta, state: OptimizerState, tally: Tally = ALONE
    ) -> tuple[Vector, OptimizerState]:
        share = min(1.0, tally.count / self.clients)
        gradient = state["gradient"] - self.alpha * share * delta
        moved = parameters.astype(np.float64) + delta - gradient / self.alpha
        return moved.astype(np.float32), {"gradient": gradient}
