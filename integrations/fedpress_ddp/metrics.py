"""Metrics of a hook: what a step lost to compression, what waits, bytes and seconds."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from fedpress_compression.tensors import Vector

if TYPE_CHECKING:
    import torch


class DivergenceWarning(UserWarning):
    """Training with this compressor does not converge, by what the hook measures."""


class BiasWarning(UserWarning):
    """This compressor never sends the most of a gradient, and has no error feedback."""


@dataclass(slots=True)
class Sent:
    """Bytes that this process sent in collectives: `num_bytes` compressed (between sites, if there
    are any), `whole_bytes` inside its site; float32 would have been `plain_bytes`."""

    num_bytes: int = 0
    whole_bytes: int = 0
    plain_bytes: int = 0

    def add(self, other: Sent) -> None:
        self.num_bytes += other.num_bytes
        self.whole_bytes += other.whole_bytes
        self.plain_bytes += other.plain_bytes


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One backward pass of one process, all buckets together.

    `nmse` is the squared norm of what compression lost over that of what it was given, gradient and
    residual together; 1 is what sending nothing loses. `residual_ratio` is the norm of what waits
    over that of the gradient. Both are None where nothing was compressed: in plain steps, in a
    process that is not its site's first, and where a gradient is NaN or infinity. Seconds are wall
    time, summed over buckets, which may overlap: `compress_seconds` of this process alone,
    `exchange_seconds` in collectives, waiting for others included. `exposed_seconds` is how long
    the end of the backward pass, or without overlap the backward pass, waited for the exchange.
    """

    step: int
    num_bytes: int
    whole_bytes: int
    plain_bytes: int
    nmse: float | None
    residual_ratio: float | None
    gradient_norm: float | None
    compress_seconds: float
    exchange_seconds: float
    exposed_seconds: float


@dataclass(slots=True)
class Measured:
    """Totals of the exchanges of a step, or of one bucket; squares are of L2 norms."""

    sent: Sent = field(default_factory=Sent)
    gradient: float = 0.0
    brought: float = 0.0
    lost: float = 0.0
    waiting: float = 0.0
    compress_seconds: float = 0.0
    exchange_seconds: float = 0.0
    is_compressed: bool = False
    is_finite: bool = True

    def add(self, other: Measured) -> None:
        self.sent.add(other.sent)
        self.gradient += other.gradient
        self.brought += other.brought
        self.lost += other.lost
        self.waiting += other.waiting
        self.compress_seconds += other.compress_seconds
        self.exchange_seconds += other.exchange_seconds
        self.is_compressed |= other.is_compressed
        self.is_finite &= other.is_finite

    def metrics(self, step: int, exposed_seconds: float) -> StepMetrics:
        has_norms = self.is_compressed and self.is_finite
        return StepMetrics(
            step,
            self.sent.num_bytes,
            self.sent.whole_bytes,
            self.sent.plain_bytes,
            _ratio(self.lost, self.brought) if has_norms else None,
            _ratio(self.waiting, self.gradient) ** 0.5 if has_norms else None,
            self.gradient**0.5 if has_norms else None,
            self.compress_seconds,
            self.exchange_seconds,
            exposed_seconds,
        )


def _ratio(part: float, whole: float) -> float:
    if whole:
        return part / whole
    return 0.0 if not part else float("inf")


def square(vector: Vector | torch.Tensor) -> float:
    """The squared L2 norm, where `vector` lies, and in float64 where float32 would overflow."""
    with np.errstate(over="ignore", invalid="ignore"):
        total = float(vector @ vector)
        if np.isfinite(total):
            return total
        wide = vector.astype(np.float64) if isinstance(vector, np.ndarray) else vector.double()
        return float(wide @ wide)


class DivergenceWatch:
    """Warn, once for each cause, if the steps of a hook do not converge.

    Over windows of `WINDOW` steps: if compression loses more than `LOSS` times the square of what
    it is given, residuals grow by themselves (1 would do, but PowerSGD's residual is of the group's
    approximation, and its share may pass 1 a little); and if gradients are `GROWTH` times longer
    than in the best window, and longer than in the first, the steps are too long. Top-k of .2 %
    grows fivefold while it warms up, on digits, and learns.
    """

    WINDOW = 25
    LOSS = 1.25
    GROWTH = 10.0

    def __init__(self) -> None:
        self._steps = 0
        self._lost = self._waiting = self._brought = self._gradient = 0.0
        self._first = self._best = float("inf")
        self._warned: set[str] = set()

    def saw(self, measured: Measured, name: str) -> None:
        """Count a step of the compressor `name`."""
        if not measured.is_compressed or not measured.is_finite:
            return
        self._steps += 1
        self._lost += measured.lost
        self._waiting += measured.waiting
        self._brought += measured.brought
        self._gradient += measured.gradient
        if self._steps < self.WINDOW:
            return
        length = (self._gradient / self._steps) ** 0.5
        if self._waiting and self._lost > self.LOSS * self._brought:
            self._warn(
                "loss",
                f"in {self._steps} steps {name} lost {self._lost / self._brought:.3g} times the "
                "square of what it was given, so that residuals grow and training diverges: send "
                "more (a larger fraction or rank, more bits), or use topk",
            )
        if self._best < float("inf") and length > max(self.GROWTH * self._best, self._first):
            self._warn(
                "growth",
                f"gradients under {name} have grown to {length / self._best:.3g} times their "
                "smallest mean: training may diverge. Lower the learning rate; with dgc, whose "
                "momentum is its own, set the optimizer's to 0; or send more values a step",
            )
        self._first = length if self._first == float("inf") else self._first
        self._best = min(self._best, length)
        self._steps = 0
        self._lost = self._waiting = self._brought = self._gradient = 0.0

    def _warn(self, cause: str, says: str) -> None:
        if cause not in self._warned:
            self._warned.add(cause)
            warnings.warn(says, DivergenceWarning, stacklevel=2)
