"""FedNova: normalised averaging for unequal local work (Wang et al. 2020, arXiv:2007.07481,
Section 4)."""

from __future__ import annotations

from dataclasses import dataclass

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
    """Clients that take more steps pull no harder: each divides its update by its steps, and the
    mean of that is multiplied by the mean of the steps. State: with momentum one velocity [size];
    linear.

    Made for local SGD without momentum, where every step counts the same. What error feedback keeps
    is in units of a step. A client that overstates its steps lengthens the whole round's.
    """
    made = PerStep(ServerSGD(learning_rate, momentum))
    about = Properties("velocity [d]" if momentum else "none", source="Wang et al. 2020, Section 4")
    terms = ClientTerms(normalise=True)
    return Strategy(WeightedMean, made, terms, ("steps",), properties=about)


@dataclass(frozen=True, slots=True)
class PerStep:
    """`inner` on the round's mean update per step, times the mean number of steps."""

    inner: ServerSGD

    def init(self, parameters: Vector) -> OptimizerState:
        return self.inner.init(parameters)

    def apply(
        self, parameters: Vector, delta: Delta, state: OptimizerState, tally: Tally = ALONE
    ) -> tuple[Vector, OptimizerState]:
        return self.inner.apply(parameters, delta * tally.report["steps"], state, tally)
