"""FetchSGD: momentum and error feedback on the server, inside the sketch (Rothchild et al. 2020,
arXiv:2007.07682, Algorithm 1)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedpress_compression.compressor import Compressor, Public
from fedpress_compression.compressors.count_sketch import CountSketch
from fedpress_compression.compressors.topk import largest
from fedpress_compression.fixed_point import FixedPoint
from fedpress_compression.tensors import Vector
from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan
from fedpress_strategies.strategy import (
    ALONE,
    Delta,
    OptimizerState,
    Properties,
    Strategy,
    SymbolSum,
    Tally,
    WeightedMean,
    strategy,
)


@strategy("fetchsgd")
def fetchsgd(
    learning_rate: float = 1.0,
    momentum: float = 0.9,
    fraction: float = 0.01,
    rows: int = 5,
    sketch_fraction: float = 0.1,
    scale_bits: int = 16,
    seed: int = 0,
) -> Strategy:
    """Sum the clients' sketches, keep momentum and error as sketches, and apply the `fraction` of
    the coordinates that are largest. State: two sketches; clients keep nothing.

    Clients compress with count_sketch, with these `rows`, `scale_bits` and `seed`, and
    `sketch_fraction` for its fraction. Designed for one local step and large cohorts: the noise of
    a sketch grows with its whole update.
    """
    sketch = CountSketch(
        rows=rows,
        fraction=sketch_fraction,
        scale_bits=scale_bits,
        recover="median",
        seed=seed,
    )

    def sums(compressor: Compressor[Any], public: Public, fixed_point: FixedPoint) -> SymbolSum:
        return SketchSum(sketch, compressor, public, fixed_point)

    return Strategy(
        WeightedMean,
        Unsketch(sketch, learning_rate, momentum, fraction),
        symbol_aggregator=sums,
        properties=Properties(
            "two sketches of the update", source="Rothchild et al. 2020, Algorithm 1"
        ),
    )


class SketchSum(SymbolSum):
    """The cohort's mean update as a sketch: cells by row, in the units of the update."""

    def __init__(
        self,
        sketch: CountSketch,
        compressor: Compressor[Any],
        public: Public,
        fixed_point: FixedPoint,
    ) -> None:
        expected = (sketch.rows, sketch.fraction, sketch.scale_bits, sketch.seed)
        if not isinstance(compressor, CountSketch) or expected != (
            compressor.rows,
            compressor.fraction,
            compressor.scale_bits,
            compressor.seed,
        ):
            raise IncompatiblePlan(
                f"the strategy fetchsgd takes count_sketch with rows {sketch.rows}, fraction "
                f"{sketch.fraction}, scale_bits {sketch.scale_bits} and seed {sketch.seed}, not "
                f"{compressor}"
            )
        super().__init__(compressor, public, fixed_point)
        self._step = 2.0**-sketch.scale_bits

    def result(self) -> Delta:
        cells, weight = self.total[0], max(self.weight, 1)
        return np.asarray(cells / weight * self._step)


@dataclass(frozen=True, slots=True)
class Unsketch:
    """error += learning_rate * (velocity = momentum * velocity + cells); apply the top of error.

    The cells of the applied coordinates are set to zero in both sketches. Subtracting their sketch
    instead would leave the other content of these cells, with a wrong sign for the coordinates just
    applied, and diverges; for the velocity this is momentum factor masking (Lin et al. 2018,
    arXiv:1712.01887, Section 3).
    """

    sketch: CountSketch
    learning_rate: float = 1.0
    momentum: float = 0.9
    fraction: float = 0.01

    def __post_init__(self) -> None:
        if not self.learning_rate > 0:
            raise ConfigurationError(f"learning_rate must be positive, not {self.learning_rate}")
        if not 0 <= self.momentum < 1:
            raise ConfigurationError(f"momentum must lie in [0, 1), not {self.momentum}")
        if not 0 < self.fraction <= 1:
            raise ConfigurationError(f"fraction must lie in (0, 1], not {self.fraction}")

    def init(self, parameters: Vector) -> OptimizerState:
        shape = (self.sketch.rows, self.sketch.columns(parameters.size))
        return {"velocity": np.zeros(shape), "error": np.zeros(shape)}

    def apply(
        self, parameters: Vector, delta: Delta, state: OptimizerState, tally: Tally = ALONE
    ) -> tuple[Vector, OptimizerState]:
        velocity = self.momentum * state["velocity"] + delta.reshape(state["velocity"].shape)
        error = state["error"] + self.learning_rate * velocity
        randomness = self.sketch.randomness()
        estimates = self.sketch.estimates(error, parameters.size, randomness)
        k = math.ceil(self.fraction * parameters.size)
        where = largest(np.abs(estimates).astype(np.float32), k)
        moved = parameters.astype(np.float64)
        moved[where] += estimates[where]
        applied = np.zeros(parameters.size, bool)
        applied[where] = True
        untouched = ~self.sketch.touched(applied, randomness)
        after = {"velocity": velocity * untouched, "error": error * untouched}
        return moved.astype(np.float32), after
