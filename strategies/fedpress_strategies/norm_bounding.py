"""Norm bounding on the server: every update is clipped to a norm (Sun et al. 2019, "Can You
Really Backdoor Federated Learning?", arXiv:1911.07963); by the median of the round's own norms,
Nguyen et al. 2022, "FLAME", arXiv:2101.02281, adaptive clipping."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from fedpress_compression.compressor import Public
from fedpress_compression.fixed_point import Accumulator, FixedPoint
from fedpress_compression.update import Piece, Update
from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.plan import RoundPlan
from fedpress_strategies.robust import Weights, check_lane, side_by_side
from fedpress_strategies.rows import Rows
from fedpress_strategies.strategy import (
    NO_REPORT,
    AggregationSpace,
    Aggregator,
    Delta,
    Properties,
    Report,
    ServerSGD,
    Strategy,
    strategy,
)


@strategy("norm_bounding")
def norm_bounding(
    max_norm: float | None = None,
    weighted: bool = True,
    learning_rate: float = 1.0,
    momentum: float = 0.0,
) -> Strategy:
    """The mean of the updates, each scaled to an L2 norm of `max_norm` if it is longer, weighted by
    its examples or, not `weighted`, alike. Without a `max_norm` it is the median of the round's own
    norms. Not linear, since the server clips; in the masked lane let the devices clip, with the
    compressor `clip` under fedavg, which does not bound forged updates.

    Breakdown: one forged update moves the mean by at most its share of the weight times the norm,
    but each of them does: it bounds the damage, and does not exclude a direction. The median is
    valid while fewer than half of the updates are forged. Example counts are reported by clients,
    up to the plan's max_examples: use `weighted` only if that is a tight bound.

    State: none, one velocity [size] with momentum. Memory: with a `max_norm` it streams, like
    fedavg; without, a few vectors of the model's size and fold_memory_bytes, and on the
    disk 4 bytes a value and update.
    """
    if not isinstance(weighted, bool):
        raise ConfigurationError(f"weighted must be true or false, not {weighted!r}")
    if max_norm is None:
        source = "Nguyen et al. 2022"
        return side_by_side(MedianNorm(weighted), learning_rate, momentum, source)
    if not 0 < max_norm < np.inf:
        raise ConfigurationError(f"max_norm must be positive, not {max_norm}")
    clipped = partial(ClippedMean, max_norm, weighted)

    def planned(plan: RoundPlan, public: Public, space: AggregationSpace) -> Aggregator:
        check_lane(plan)
        return clipped(public.spec.size, plan.sum_bounds())

    return Strategy(
        clipped,
        ServerSGD(learning_rate, momentum),
        planned_aggregator=planned,
        properties=Properties(
            server_state="velocity [d]" if momentum else "none", source="Sun et al. 2019"
        ),
    )


class ClippedMean:
    """The mean of updates scaled to `max_norm` if they are longer; exact in fixed point."""

    linear = False

    def __init__(self, max_norm: float, weighted: bool, size: int, fixed_point: FixedPoint) -> None:
        self._max_norm, self._weighted = max_norm, weighted
        self._sum = Accumulator(size, fixed_point)

    def add(self, update: Update, weight: int, report: Report = NO_REPORT) -> None:
        """Add one update; raises InvalidUpdate without adding anything."""
        update.check(self._sum.fixed_point.max_abs)
        norm = update.norm
        if norm > self._max_norm:
            factor = self._max_norm / norm
            pieces = (
                Piece(piece.where, (piece.values * factor).astype(np.float32))
                for piece in update.pieces
            )
            update = Update(update.size, tuple(pieces))
        self._sum.add(update, weight if self._weighted else 1)

    def result(self) -> Delta:
        return self._sum.mean()


@dataclass(frozen=True, slots=True)
class MedianNorm:
    """The mean of updates scaled to the median of their norms if they are longer."""

    weighted: bool = True
    coordinatewise = False
    pairwise = False

    def check(self, number: int) -> None:
        return None

    def combine(self, rows: Rows, weights: Weights) -> Delta:
        norms = rows.norms()
        shares = weights if self.weighted else np.ones(rows.number)
        bound = np.median(norms)
        factors = np.divide(bound, norms, out=np.ones(rows.number), where=norms > bound)
        return rows.combination(factors * shares / shares.sum())
