"""A moving average of the server's weights, published beside them (Polyak and Juditsky 1992,
doi:10.1137/0330046; exponential as in Izmailov et al. 2018, arXiv:1803.05407, Section 3.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from fedpress_compression.tensors import Vector
from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.messages import AVERAGE
from fedpress_strategies.fedavg import FEDAVG
from fedpress_strategies.strategy import (
    ALONE,
    Delta,
    OptimizerState,
    Strategy,
    Tally,
    published,
    strategy,
)
from fedpress_strategies.wrapped import Wrapped


@strategy("ema", inner={"id": "fedavg"})
def ema(decay: float = 0.9, inner: Strategy = FEDAVG) -> Strategy:
    """Run `inner`, and publish the average of the model over the rounds under the name `average`.
    State: `inner`'s and one average [size]; linear as `inner`."""
    state = inner.properties.server_state
    keeps = "average [d]" if state == "none" else f"{state}, average [d]"
    about = replace(inner.properties, server_state=keeps, source="Polyak and Juditsky 1992")
    return inner._replace(optimizer=Averaged(inner.optimizer, decay), properties=about)


@dataclass(frozen=True, slots=True)
class Averaged(Wrapped):
    """average += max(1 - decay, 1 / rounds) * (parameters - average): a plain mean at first, so
    that the initial model has no weight."""

    decay: float

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ConfigurationError(f"decay must lie in [0, 1), not {self.decay}")

    @property
    def is_plain(self) -> bool:
        return bool(getattr(self.inner, "is_plain", False))

    def init(self, parameters: Vector) -> OptimizerState:
        own = {AVERAGE: np.zeros(parameters.size), "rounds": np.zeros(1, np.int64)}
        return self.with_inner(own, self.inner.init(parameters))

    def apply(
        self, parameters: Vector, delta: Delta, state: OptimizerState, tally: Tally = ALONE
    ) -> tuple[Vector, OptimizerState]:
        moved, inner = self.inner.apply(parameters, delta, self.of_inner(state), tally)
        rounds = state["rounds"] + 1
        step = max(1 - self.decay, 1 / int(rounds[0]))
        average = state[AVERAGE] + step * (moved - state[AVERAGE])
        after = {AVERAGE: average, "rounds": rounds}
        return moved, self.with_inner(after, inner)

    def published(self, state: OptimizerState) -> Mapping[str, Vector]:
        average = {AVERAGE: state[AVERAGE].astype(np.float32)}
        return {**published(self.inner, self.of_inner(state)), **average}
