"""FedNova: normalised averaging for unequal local work (Wang et al. 2020, arXiv:2007.07481,
Section 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedpress_compression.tensors import Vector
from fedpress_protocols.plan import ClientTerms
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


@strategy("fednova")
def fednova(learning_rate: float = 1.0, momentum: float = 0.0) -> Strategy:
    """Normalize updates by local work: each client divides its update by its steps, and the mean of
    that is multiplied by the mean number of steps. State: with momentum one velocity [size];
    linear.

    Designed for local SGD without momentum, where all steps weigh the same. The residual of error
    feedback is in units of a step. A client that overstates its steps enlarges the whole round's
    step.
    """
    optimizer = PerStep(ServerSGD(learning_rate, momentum))
    about = Properties("velocity [d]" if momentum else "none", source="Wang et al. 2020, Section 4")
    terms = ClientTerms(normalise=True)
    return Strategy(WeightedMean, optimizer, terms, ("steps",), properties=about)


@dataclass(frozen=True, slots=True)
class PerStep:
    """`inner` on the round's mean update per step, times the mean number of steps."""

    inner: ServerSGD
    is_by_coordinate: ClassVar[bool] = True

    def init(self, parameters: Vector) -> OptimizerState:
        return self.inner.init(parameters)

    def apply(
        self, parameters: Vector, delta: Delta, state: OptimizerState, tally: Tally = ALONE
    ) -> tuple[Vector, OptimizerState]:
        return self.inner.apply(parameters, delta * tally.report["steps"], state, tally)
