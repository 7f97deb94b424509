"""Adam's moments with the second one frozen after a warm-up: the rest is linear, and compatible
with error feedback (Tang et al. 2021, arXiv:2102.02888, Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedpress_protocols.errors import ConfigurationError
from fedpress_strategies.strategy import Delta, OptimizerState, Tally


@dataclass(frozen=True, slots=True)
class FrozenMoments:
    """first = beta1 * first + (1 - beta1) * delta; second likewise, of squares, while it warms up.

    Both are divided by 1 - beta**n, n the number of rounds so far, since a warm-up on a budget may
    be short. The paper's Algorithm 1 has no such correction.

    With `both_ways` the momentum is rounded to one bit too, once the second moment is frozen: the
    sign of first + error, times the mean magnitude of each `chunk` of coordinates. That replaces
    the momentum, and the rounding error is the next error.
    """

    beta1: float
    beta2: float
    tau: float
    both_ways: bool
    chunk: int

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigurationError(f"{name} must lie in [0, 1), not {getattr(self, name)}")
        if not self.tau > 0:
            raise ConfigurationError(f"tau must be positive, not {self.tau}")
        if self.chunk < 1:
            raise ConfigurationError(f"chunk must be at least 1, not {self.chunk}")

    def init(self, size: int) -> OptimizerState:
        names = ("first", "second", *(("error",) if self.both_ways else ()))
        counts = {name: np.zeros(1, np.int64) for name in ("rounds", "settled")}
        return {name: np.zeros(size) for name in names} | counts

    def after(self, delta: Delta, state: OptimizerState, tally: Tally) -> OptimizerState:
        """The moments after a round; raises ConfigurationError if there was no warm-up."""
        rounds, settled = state["rounds"], state["settled"]
        first = self.beta1 * state["first"] + (1 - self.beta1) * delta
        if tally.warming and rounds == settled:
            second = self.beta2 * state["second"] + (1 - self.beta2) * np.square(delta)
            moved = {"first": first, "second": second, "settled": settled + 1}
        elif not settled:
            raise ConfigurationError(
                "the second moment cannot be frozen: the task had no warm-up",
                hint="start the task's schedule with a period that warms_up",
            )
        elif self.both_ways:
            whole = first + state["error"]
            rounded = self._one_bit(whole)
            moved = {"first": rounded, "error": whole - rounded}
        else:
            moved = {"first": first}
        return {**state, **moved, "rounds": rounds + 1}

    def is_frozen(self, state: OptimizerState) -> bool:
        return int(state["rounds"][0]) > int(state["settled"][0])

    def direction(self, state: OptimizerState) -> Delta:
        """The direction of the next step [size]: momentum over the root of the second moment."""
        return np.asarray(self.momentum(state) / self.root(state))

    def momentum(self, state: OptimizerState) -> Delta:
        return np.asarray(state["first"] / (1 - self.beta1 ** int(state["rounds"][0])))

    def root(self, state: OptimizerState) -> Delta:
        """The root of the second moment, with tau added."""
        settled = int(state["settled"][0])
        return np.asarray(np.sqrt(state["second"] / (1 - self.beta2**settled)) + self.tau)

    def _one_bit(self, vector: Delta) -> Delta:
        starts = np.arange(0, vector.size, self.chunk)
        sizes = np.minimum(self.chunk, vector.size - starts)
        scales = np.repeat(np.add.reduceat(np.abs(vector), starts) / sizes, sizes)
        return np.where(vector < 0, -scales, scales)
