"""Averages of low-rank adapters that are averages of the products.

LoRA's update of a layer is the product B A of two factors (Hu et al. 2021, arXiv:2106.09685). The
mean of the devices' products is not the product of the mean factors: the difference is the
covariance mean(dB_i dA_i) - mean(dB_i) mean(dA_i) of their updates. FedEx-LoRA (Singhal et al.
2024, arXiv:2410.09432) adds it to the frozen base. Here it goes to ranks of the adapter that the
devices do not train, so the base stays as it is, a device needs the model alone, and the result is
a plain adapter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from fedpress_compression.compressor import Public
from fedpress_compression.fixed_point import FixedPoint
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Update
from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan
from fedpress_protocols.plan import RoundPlan
from fedpress_strategies.strategy import (
    ALONE,
    NO_REPORT,
    AggregationSpace,
    Aggregator,
    Delta,
    OptimizerState,
    Properties,
    Report,
    Strategy,
    Tally,
    WeightedMean,
    strategy,
)

Matrix = npt.NDArray[np.floating]
Averages = Literal["exact", "plain"]
AVERAGING_ERROR = "averaging_error"
_FACTORS = {"lora_A": "lora_B", "lora_embedding_A": "lora_embedding_B"}
_REST = "rest."
_OVERSAMPLED = 8
_POWER_STEPS = 2


@strategy("lora", rank=4)
def lora(averages: Averages = "exact", rank: int | None = None, every: int = 1) -> Strategy:
    """The mean update of LoRA's factors, and its error against the mean of their products B A,
    which the server reports for each round (`fedpress_averaging_error`, and its log).

    With `exact` averages the error is added to the ranks from `rank` up, which the devices do not
    train, every so many rounds (`every`). These ranks hold its best approximation; what they cannot
    hold is kept for the next time. `plain` averages take the error as it is. Not linear.

    State and memory: with `exact` averages one float32 matrix of each adapted layer's shape, in
    aggregation another one in float64.
    """
    if averages not in get_args(Averages):
        raise ConfigurationError(f"averages is exact or plain, not {averages!r}")
    if averages == "exact" and (not isinstance(rank, int) or rank < 1):
        raise ConfigurationError(
            f"exact averages need `rank`, how many ranks the devices train, at least 1, not {rank}",
            hint="set it to the trained_rank of the devices' PeftTrainer",
        )
    if averages == "plain" and rank is not None:
        raise ConfigurationError("plain averages take no rank: nothing is added to any")
    if not isinstance(every, int) or every < 1:
        raise ConfigurationError(f"every must be a whole number of at least 1, not {every}")

    def planned(plan: RoundPlan, public: Public, space: AggregationSpace) -> Aggregator:
        if plan.lane != "clear":
            raise IncompatiblePlan(
                f"products of factors need every update, but the server of the {plan.lane} lane "
                "sees the sum alone",
                hint="train one factor at a time, with PeftTrainer(averages='ffa') and the "
                "strategy fedavg, whose average is exact under masks; or choose the clear lane",
            )
        layers = layers_of(public.spec)
        for layer in layers:
            layer.check(rank)
        if not layers:
            raise IncompatiblePlan(
                "the model has no trained factors lora_A and lora_B",
                hint="choose fedavg for models without LoRA, and for LoRA with a frozen factor",
            )
        return FactorMean(layers, public.spec.size, plan.sum_bounds())

    is_exact = averages == "exact"
    return Strategy(
        partial(FactorMean, ()),
        FoldedProducts(rank, every),
        planned_aggregator=planned,
        properties=Properties(
            server_state="a matrix [out, in] a layer" if is_exact else "none",
            memory="8 bytes for each weight of the adapted layers",
            source="Singhal et al. 2024, Section 4",
        ),
    )


class Layer(NamedTuple):
    """The slices of the flat vector that hold a layer's factors, A [rank, in] and B [out, rank]."""

    name: str
    where_a: slice
    where_b: slice
    shape_a: tuple[int, ...]
    shape_b: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of values of the product [out, in]."""
        return self.shape_b[0] * self.shape_a[1]

    def check(self, rank: int | None) -> None:
        """Raise IncompatiblePlan unless the factors have a product, and ranks above `rank`."""
        if len(self.shape_a) != 2 or len(self.shape_b) != 2 or self.shape_a[0] != self.shape_b[1]:
            raise IncompatiblePlan(
                f"the factors of {self.name!r} are {list(self.shape_a)} and {list(self.shape_b)}, "
                "expected [rank, in] and [out, rank]",
                hint="adapters of convolutions are averaged by fedavg",
            )
        if rank is not None and self.shape_a[0] <= rank:
            raise IncompatiblePlan(
                f"the adapter of {self.name!r} has rank {self.shape_a[0]}, and the devices train "
                f"{rank} of it, which leaves none for the error of the averages",
                hint="build the adapter with a higher rank, such as "
                f"LoraConfig(r={2 * rank}), and the devices with trained_rank={rank}",
            )

    def factors(self, vector: npt.NDArray[np.floating]) -> tuple[Matrix, Matrix]:
        """Views of B and A in a flat vector."""
        b = vector[self.where_b].reshape(self.shape_b)
        return b, vector[self.where_a].reshape(self.shape_a)


def layers_of(spec: ModelSpec) -> tuple[Layer, ...]:
    """The layers of which both factors are trained, by PEFT's names."""
    shapes = {tensor.name: tensor.shape for tensor in spec.trained}
    layers = []
    for name, shape in shapes.items():
        parts = name.split(".")
        other = ".".join(_FACTORS.get(part, part) for part in parts)
        if other != name and other in shapes:
            where = spec.slices[name], spec.slices[other]
            layers.append(Layer(name, *where, shape, shapes[other]))
    return tuple(layers)


class FactorMean(WeightedMean):
    """The mean update, followed by the mean of each layer's dB dA [out * in]."""

    linear = False

    def __init__(self, layers: tuple[Layer, ...], size: int, fixed_point: FixedPoint) -> None:
        super().__init__(size, fixed_point)
        self._layers = layers
        self._products = [np.zeros((layer.shape_b[0], layer.shape_a[1])) for layer in layers]

    def add(self, update: Update, weight: int, report: Report = NO_REPORT) -> None:
        super().add(update, weight, report)
        dense = update.dense().astype(np.float64)
        for layer, total in zip(self._layers, self._products, strict=True):
            b, a = layer.factors(dense)
            total += weight * (b @ a)

    def result(self) -> Delta:
        weight = max(self.sums.weight, 1)
        return np.concatenate(
            [super().result(), *(total.ravel() / weight for total in self._products)]
        )


@dataclass(frozen=True, slots=True)
class FoldedProducts:
    """parameters += mean update; the error of the products goes to the ranks from `rank` up.

    These ranks hold F = B_F A_F. After every `every` rounds, F + the errors since + the rest of
    before is approximated in them (Halko et al. 2011, arXiv:0909.4061, Algorithm 4.4: seeded, so
    that it gives the same again), and the difference is the next rest. So
    B A + rest = all means of products, up to float32.
    """

    rank: int | None
    every: int = 1

    @property
    def is_plain(self) -> bool:
        """Whether the step equals the update."""
        return self.rank is None

    def init(self, parameters: Vector) -> OptimizerState:
        return {AVERAGING_ERROR: np.zeros(1), "rounds": np.zeros(1, np.int64)}

    def apply(
        self, parameters: Vector, delta: Delta, state: OptimizerState, tally: Tally = ALONE
    ) -> tuple[Vector, OptimizerState]:
        layers = layers_of(tally.spec) if tally.spec is not None else ()
        rounds = state["rounds"] + 1
        change = delta[: parameters.size]
        before = parameters.astype(np.float64)
        moved = (before + change).astype(np.float32)
        after: dict[str, npt.NDArray[np.generic]] = {"rounds": rounds}
        error = norm = 0.0
        start = parameters.size
        for layer in layers if delta.size > start else ():
            (b, a), (db, da) = layer.factors(before), layer.factors(change)
            mean = delta[start : start + layer.size].reshape(len(b), -1)
            start += layer.size
            covariance = mean - db @ da
            error += float(np.square(covariance).sum())
            norm += float(np.square(covariance + (b + db) @ (a + da)).sum())
            if self.rank is not None:
                rest: Matrix = covariance + state.get(_REST + layer.name, 0.0)
                if int(rounds[0]) % self.every == 0:
                    rest = self._fold(layer, moved, rest)
                after[_REST + layer.name] = rest.astype(np.float32)
        after[AVERAGING_ERROR] = np.array([math.sqrt(error / norm) if norm else 0.0])
        return moved, after

    def figures(self, state: OptimizerState) -> Mapping[str, float]:
        return {AVERAGING_ERROR: float(state[AVERAGING_ERROR][0])}

    def _fold(self, layer: Layer, parameters: Vector, rest: Matrix) -> Matrix:
        """Add `rest` to the layer's ranks from `rank` up, in place; return what they cannot
        hold."""
        b, a = layer.factors(parameters)
        b, a = b[:, self.rank :], a[self.rank :]
        target = b.astype(np.float64) @ a.astype(np.float64) + rest
        if rest.any():
            b[...], a[...] = _approximation(target, len(a))
        return np.asarray(target - b.astype(np.float64) @ a.astype(np.float64))


def _approximation(matrix: Matrix, rank: int) -> tuple[Matrix, Matrix]:
    """Balanced factors [m, rank] and [rank, n] of the best approximation of this rank, nearly."""
    width = min(rank + _OVERSAMPLED, *matrix.shape)
    basis = matrix @ np.random.default_rng(0).standard_normal((matrix.shape[1], width))
    for _ in range(_POWER_STEPS):
        basis = matrix @ (matrix.T @ np.linalg.qr(basis)[0])
    basis = np.linalg.qr(basis)[0]
    left, values, right = np.linalg.svd(basis.T @ matrix, full_matrices=False)
    kept = min(rank, values.size)
    roots = np.sqrt(values[:kept])
    b, a = np.zeros((matrix.shape[0], rank)), np.zeros((rank, matrix.shape[1]))
    b[:, :kept] = (basis @ left[:, :kept]) * roots
    a[:kept] = roots[:, np.newaxis] * right[:kept]
    return b, a
