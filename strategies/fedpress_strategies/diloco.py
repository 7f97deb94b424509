"""Federated averaging with an outer Nesterov momentum (Douillard et al. 2023, arXiv:2311.08105,
Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedpress_compression.running_statistics import statistics
from fedpress_compression.tensors import Vector
from fedpress_strategies.strategy import (
    ALONE,
    Delta,
    OptimizerState,
    Properties,
    ServerSGD,
    Strategy,
    Tally,
    WeightedMean,
    strategy,
)


@strategy("diloco")
def diloco(learning_rate: float = 0.7, momentum: float = 0.9) -> Strategy:
    """Nesterov momentum over the rounds' mean updates, for few rounds of many local steps. State:
    one velocity [size]; linear."""
    about = Properties(server_state="velocity [d]", source="Douillard et al. 2023, Algorithm 1")
    return Strategy(WeightedMean, Nesterov(learning_rate, momentum), properties=about)


@dataclass(frozen=True, slots=True)
class Nesterov:
    """velocity = momentum * velocity + delta; parameters += learning_rate * (delta + momentum *
    velocity), which is torch.optim.SGD's `nesterov` (Sutskever et al. 2013)."""

    learning_rate: float
    momentum: float
    is_by_coordinate: ClassVar[bool] = True

    def __post_init__(self) -> None:
        ServerSGD(self.learning_rate, self.momentum)

    def init(self, parameters: Vector) -> OptimizerState:
        return ServerSGD(1.0, self.momentum).init(parameters)

    def apply(
        self, parameters: Vector, delta: Delta, state: OptimizerState, tally: Tally = ALONE
    ) -> tuple[Vector, OptimizerState]:
        after = {name: self.momentum * each + delta for name, each in state.items()}
        ahead = delta + self.momentum * after["velocity"] if after else delta
        for where in statistics(tally.spec, tally.start, parameters.size):
            ahead[where] = delta[where]
        return ServerSGD(self.learning_rate).apply(parameters, ahead, {})[0], after
