"""Federated averaging with server momentum (Hsu et al. 2019, arXiv:1909.06335, Section 4.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedpress_compression.tensors import Vector
from fedpress_protocols.errors import ConfigurationError
from fedpress_strategies.strategy import (
    ALONE,
    Delta,
    OptimizerState,
    Properties,
    ServerOptimizer,
    ServerSGD,
    Strategy,
    Tally,
    WeightedMean,
    strategy,
)


@strategy("fedavgm")
def fedavgm(
    learning_rate: float = 1.0,
    momentum: float = 0.9,
    constant_rounds: int = 0,
    decay_rounds: int = 0,
    final: float = 1.0,
) -> Strategy:
    """Heavy-ball momentum over the rounds' mean updates. With `decay_rounds`, the learning rate is
    constant for `constant_rounds`, then falls in a straight line to `final` of it over
    `decay_rounds`, and stays there (Haegele et al. 2024, arXiv:2405.18392). State: one velocity
    [size], and with a decay the number of rounds; linear."""
    about = Properties(server_state="velocity [d]", source="Hsu et al. 2019, Section 4.3")
    optimizer: ServerOptimizer = ServerSGD(learning_rate, momentum)
    if decay_rounds or constant_rounds or final != 1:
        optimizer = DecayingSGD(learning_rate, momentum, constant_rounds, decay_rounds, final)
    return Strategy(WeightedMean, optimizer, properties=about)


@dataclass(frozen=True, slots=True)
class DecayingSGD:
    """`ServerSGD` at a learning rate that falls after `constant_rounds`."""

    learning_rate: float
    momentum: float
    constant_rounds: int
    decay_rounds: int
    final: float
    is_by_coordinate: ClassVar[bool] = True

    def __post_init__(self) -> None:
        ServerSGD(self.learning_rate, self.momentum)
        if self.constant_rounds < 0 or self.decay_rounds < 1:
            raise ConfigurationError(
                "a learning rate that falls needs decay_rounds of 1 or more and constant_rounds "
                f"of 0 or more, not {self.decay_rounds} and {self.constant_rounds}",
                hint="leave constant_rounds, decay_rounds and final out for a constant rate",
            )
        if not 0 < self.final <= 1:
            raise ConfigurationError(f"final must lie in (0, 1], not {self.final}")

    def init(self, parameters: Vector) -> OptimizerState:
        return {"rounds": np.zeros(1, np.int64), **ServerSGD(1.0, self.momentum).init(parameters)}

    def apply(
        self, parameters: Vector, delta: Delta, state: OptimizerState, tally: Tally = ALONE
    ) -> tuple[Vector, OptimizerState]:
        rounds = state["rounds"] + 1
        step = ServerSGD(self.learning_rate * self.factor(int(rounds[0])), self.momentum)
        moved, inner = step.apply(parameters, delta, state, tally)
        return moved, {**inner, "rounds": rounds}

    def factor(self, number: int) -> float:
        """Return the factor of the learning rate in the round of this number, from 1."""
        share = min(max((number - self.constant_rounds) / self.decay_rounds, 0.0), 1.0)
        return 1 - (1 - self.final) * share
