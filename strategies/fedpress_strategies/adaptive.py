"""Adaptive server optimizers (Reddi et al. 2021, arXiv:2003.00295, Algorithm 2), which differ in
the update of the second moment."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fedpress_compression.running_statistics import statistics
from fedpress_compression.tensors import Vector
from fedpress_protocols.errors import ConfigurationError
from fedpress_strategies.strategy import ALONE, Delta, OptimizerState, Tally

SecondMoment = Callable[[Delta, Delta, float], Delta]
"""The next second moment [size] from the previous one, the squared update and beta2."""

Variant = Literal["paper", "flwr"]


@dataclass(frozen=True, slots=True)
class Adaptive:
    """parameters += learning_rate * m / (sqrt(v) + tau), m = beta1 * m + (1 - beta1) * delta;
    running statistics += delta.

    v starts at tau**2, the least that Algorithm 2 allows. With `bias_correction` (Kingma and Ba
    2015, arXiv:1412.6980, Algorithm 1) v starts at 0, and m and v are divided by 1 - beta**rounds.

    The `variant` "flwr" is the rule of Flower's strategy of the same name: v starts at 0, and
    FedAdam's learning rate (`scales_rate`) is multiplied in round t by
    sqrt(1 - beta2**(t + 1)) / (1 - beta1**(t + 1)).
    """

    second_moment: SecondMoment
    learning_rate: float
    beta1: float
    beta2: float
    tau: float
    bias_correction: bool = False
    variant: Variant = "paper"
    scales_rate: bool = False
    is_by_coordinate: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.learning_rate > 0:
            raise ConfigurationError(f"learning_rate must be positive, not {self.learning_rate}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigurationError(f"{name} must lie in [0, 1), not {getattr(self, name)}")
        if not self.tau > 0:
            raise ConfigurationError(f"tau must be positive, not {self.tau}")
        if self.variant not in ("paper", "flwr"):
            raise ConfigurationError(f"variant must be paper or flwr, not {self.variant!r}")
        if self.bias_correction and self.variant == "flwr":
            raise ConfigurationError(
                "bias_correction cannot be combined with variant flwr, which has its own; drop one"
            )

    def init(self, parameters: Vector) -> OptimizerState:
        from_zero = self.bias_correction or self.variant == "flwr"
        start = 0.0 if from_zero else self.tau**2
        state = {"first": np.zeros(parameters.size), "second": np.full(parameters.size, start)}
        return state | ({"rounds": np.zeros(1, np.int64)} if self._counts else {})

    @property
    def _counts(self) -> bool:
        return self.bias_correction or (self.scales_rate and self.variant == "flwr")

    def apply(
        self, parameters: Vector, delta: Delta, state: OptimizerState, tally: Tally = ALONE
    ) -> tuple[Vector, OptimizerState]:
        first = self.beta1 * state["first"] + (1 - self.beta1) * delta
        second = self.second_moment(state["second"], np.square(delta), self.beta2)
        after, rate = {"first": first, "second": second}, self.learning_rate
        if self._counts:
            after["rounds"] = state["rounds"] + 1
            rounds = int(after["rounds"][0])
            if self.bias_correction:
                first = first / (1 - self.beta1**rounds)
                second = second / (1 - self.beta2**rounds)
            else:
                rate *= math.sqrt(1 - self.beta2 ** (rounds + 1)) / (1 - self.beta1 ** (rounds + 1))
        step = rate * first / (np.sqrt(second) + self.tau)
        for where in statistics(tally.spec, tally.start, parameters.size):
            step[where] = delta[where]
        return (parameters.astype(np.float64) + step).astype(np.float32), after
