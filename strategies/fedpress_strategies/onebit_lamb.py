"""1-bit LAMB (Li et al. 2021, arXiv:2104.06069, Algorithm 1)."""

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

_COEFFICIENTS = (0.01, 10.0)
_FACTORS = (0.5, 4.0)
"""Bounds of the layers' coefficients and of the factors of frozen coefficients."""


@strategy("onebit_lamb")
def onebit_lamb(
    learning_rate: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.99,
    beta3: float = 0.9,
    tau: float = 0.001,
    factor_change: float = 0.1,
    both_ways: bool = True,
    chunk: int = 256,
) -> Strategy:
    """LAMB (You et al. 2020, arXiv:1904.00962) during the warm-up; then the second moment and
    every layer's coefficient, averaged by `beta3`, are frozen, and clients upload 1 bit per value.
    State: as `onebit_adam`'s, a third moment [size] and three numbers a tensor; linear.

    A layer is a tensor. Its frozen coefficient is multiplied by the largest ratio of the frozen
    root to that of a second moment that continues beside it, within [0.5, 4] and changing by at
    most the share `factor_change` per round; 0 keeps the coefficient constant. In the paper every
    worker computes these squares from two compressed momentums; here the server has the mean update
    itself. Momentums are not scaled to one size before compression, since every chunk has its own
    scale. State and schedule are as for `onebit_adam`.
    """
    moments = FrozenMoments(beta1, beta2, tau, both_ways, chunk)
    optimizer = OneBitLamb(moments, learning_rate, beta3, factor_change)
    keeps = "three moments, error [d]" if both_ways else "three moments [d]"
    about = Properties(keeps, source="Li et al. 2021, Algorithm 1")
    return Strategy(WeightedMean, optimizer, needs_warm_up=True, properties=about)


@dataclass(frozen=True, slots=True)
class OneBitLamb:
    """parameters += learning_rate * coefficient * momentum / (sqrt(second) + tau), by layers.

    During the warm-up, a layer's coefficient is the norm of its parameters over that of its
    direction, within [0.01, 10]; 1 if either is zero.
    """

    moments: FrozenMoments
    learning_rate: float
    beta3: float
    factor_change: float

    def __post_init__(self) -> None:
        if not self.learning_rate > 0:
            raise ConfigurationError(f"learning_rate must be positive, not {self.learning_rate}")
        if not 0 <= self.beta3 < 1:
            raise ConfigurationError(f"beta3 must lie in [0, 1), not {self.beta3}")
        if not 0 <= self.factor_change < 1:
            raise ConfigurationError(f"factor_change must lie in [0, 1), not {self.factor_change}")

    def init(self, parameters: Vector) -> OptimizerState:
        return {**self.moments.init(parameters.size), "fresh": np.zeros(parameters.size)}

    def apply(
        self, parameters: Vector, delta: Delta, state: OptimizerState, tally: Tally = ALONE
    ) -> tuple[Vector, OptimizerState]:
        after = dict(self.moments.after(delta, state, tally))
        beta2 = self.moments.beta2
        after["fresh"] = beta2 * state["fresh"] + (1 - beta2) * np.square(delta)
        whole = slice(0, parameters.size)
        layers = [whole] if tally.spec is None else list(tally.spec.slices.values())
        mean = state.get("coefficient", np.zeros(len(layers)))
        direction, before = self.moments.direction(after), parameters.astype(np.float64)
        if self.moments.is_frozen(after):
            factor = self._factors(after, layers)
            after["factor"] = factor
            applied = factor * mean / (1 - self.beta3 ** int(after["settled"][0]))
        else:
            applied = np.array([_coefficient(before[each], direction[each]) for each in layers])
            after["coefficient"] = self.beta3 * mean + (1 - self.beta3) * applied
        for each, coefficient in zip(layers, applied, strict=True):
            before[each] += self.learning_rate * coefficient * direction[each]
        return before.astype(np.float32), after

    def _factors(self, state: OptimizerState, layers: list[slice]) -> Delta:
        """The factors of the layers' frozen coefficients."""
        last = state.get("factor", np.ones(len(layers)))
        if not self.factor_change:
            return last
        corrected = state["fresh"] / (1 - self.moments.beta2 ** int(state["rounds"][0]))
        ratio = self.moments.root(state) / (np.sqrt(corrected) + self.moments.tau)
        factors = np.clip([ratio[each].max(initial=0) for each in layers], *_FACTORS)
        least, most = (1 - self.factor_change) * last, (1 + self.factor_change) * last
        return np.asarray(np.clip(factors, least, most))


def _coefficient(parameters: Delta, direction: Delta) -> float:
    size, length = float(np.linalg.norm(parameters)), float(np.linalg.norm(direction))
    return float(np.clip(size / length, *_COEFFICIENTS)) if size and length else 1.0
