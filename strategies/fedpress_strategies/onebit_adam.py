"""1-bit Adam (Tang et al. 2021, arXiv:2102.02888, Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedpress_compression.tensors import Vector
from fedpress_protocols.errors import ConfigurationError
from fedpress_strategies.frozen import FrozenMoments
from fedpress_strategies.strategy import (
    ALONE,
    Delta,
    OptimizerState,
    Properties,
    Strategy,
    Tally,
    WeightedMean,
    strategy,
)


@strategy("onebit_adam")
def onebit_adam(
    learning_rate: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 0.001,
    both_ways: bool = True,
    chunk: int = 256,
) -> Strategy:
    """Adam during the warm-up; then its second moment is frozen, and clients upload 1 bit per
    value. State: two moments [size] and, with `both_ways`, an error [size]; linear.

    The task's schedule sets the warm-up: a period that `warms_up`, in float32 or 8 bits with error
    feedback, then `error_feedback` around `sign`. In the paper each device compresses its momentum
    beta1 * m + (1 - beta1) * g, m the momentum of all. m depends only on what the server
    receives, so here it stays on the server, and a device sends g: its update, with feedback. The
    mean is the same, a device keeps no moment that could become stale while it does not
    participate, and compression loses parts of the update rather than of m, which is public.
    `both_ways` also rounds the download, as in the paper: the step is then a sign for each
    coordinate, a scale for each `chunk` and the frozen root.
    """
    optimizer = OneBitAdam(FrozenMoments(beta1, beta2, tau, both_ways, chunk), learning_rate)
    keeps = "two moments, error [d]" if both_ways else "two moments [d]"
    about = Properties(keeps, source="Tang et al. 2021, Algorithm 1")
    return Strategy(WeightedMean, optimizer, needs_warm_up=True, properties=about)


@dataclass(frozen=True, slots=True)
class OneBitAdam:
    """parameters += learning_rate * momentum / (sqrt(second) + tau)."""

    moments: FrozenMoments
    learning_rate: float

    def __post_init__(self) -> None:
        if not self.learning_rate > 0:
            raise ConfigurationError(f"learning_rate must be positive, not {self.learning_rate}")

    def init(self, parameters: Vector) -> OptimizerState:
        return self.moments.init(parameters.size)

    def apply(
        self, parameters: Vector, delta: Delta, state: OptimizerState, tally: Tally = ALONE
    ) -> tuple[Vector, OptimizerState]:
        after = self.moments.after(delta, state, tally)
        step = self.learning_rate * self.moments.direction(after)
        return (parameters.astype(np.float64) + step).astype(np.float32), after
