"""q-FedAvg: more even accuracy across clients (Li et al. 2020,
arXiv:1905.10497, Algorithm 2)."""

from __future__ import annotations

from functools import partial

import numpy as np

from fedpress_compression.fixed_point import FixedPoint
from fedpress_compression.update import Update
from fedpress_protocols.errors import ConfigurationError, InvalidUpdate
from fedpress_protocols.plan import TrainingTerms
from fedpress_strategies.strategy import (
    NO_REPORT,
    Delta,
    Properties,
    Report,
    ServerSGD,
    Strategy,
    strategy,
)

_LEAST_LOSS = 1e-10


@strategy("qfedavg")
def qfedavg(q: float = 1.0, *, training: TrainingTerms) -> Strategy:
    """Weight clients by the q-th power of their reported loss at the round's model; q = 0 is the
    plain mean. No state; not linear: each weight depends on its update's length.

    The step is bounded by an estimate of the loss's smoothness, 1 / (local learning rate).
    """
    if training.learning_rate is None:
        raise ConfigurationError(
            "qfedavg estimates the smoothness of the loss from the local learning rate",
            hint="set training.learning_rate",
        )
    if not 0 <= q <= 10:
        raise ConfigurationError(f"q must lie in [0, 10], not {q}")
    aggregator = partial(FairMean, q=q, smoothness=1 / training.learning_rate)
    about = Properties(source="Li et al. 2020 (fair), Algorithm 2")
    return Strategy(aggregator, ServerSGD(), report=("loss",), properties=about)


class FairMean:
    """sum F^q u / sum (F^q + q F^(q-1) L |u|^2), in float64, over updates u at losses F."""

    linear = False

    def __init__(self, size: int, fixed_point: FixedPoint, *, q: float, smoothness: float) -> None:
        self._total, self._normaliser = np.zeros(size), 0.0
        self._max_abs, self._q, self._smoothness = fixed_point.max_abs, q, smoothness

    def add(self, update: Update, weight: int, report: Report = NO_REPORT) -> None:
        update.check(self._max_abs)
        if update.size != self._total.size:
            raise InvalidUpdate(f"an update of {update.size} values, expected {self._total.size}")
        loss = max(report["loss"], _LEAST_LOSS)
        values = [piece.values.astype(np.float64) for piece in update.pieces]
        squares = sum(float(np.square(part).sum()) for part in values)
        power = loss**self._q
        for piece, part in zip(update.pieces, values, strict=True):
            self._total[piece.where] += power * part
        self._normaliser += power + self._q * power / loss * self._smoothness * squares

    def result(self) -> Delta:
        return self._total / (self._normaliser or 1.0)
