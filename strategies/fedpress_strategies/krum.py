"""Krum and Multi-Krum (Blanchard et al. 2017, "Machine Learning with Adversaries: Byzantine
Tolerant Gradient Descent", NIPS)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedpress_strategies.robust import Weights, check_enough, check_share, part_of, side_by_side
from fedpress_strategies.rows import Rows
from fedpress_strategies.strategy import Delta, Strategy, strategy

_SOURCE = "Blanchard et al. 2017"


@strategy("krum")
def krum(byzantine: float = 0.2, learning_rate: float = 1.0, momentum: float = 0.0) -> Strategy:
    """The one update that is closest to its neighbours. Examples do not count. Not linear.

    `byzantine` is the share of a round's updates that may be forged: f, rounded up to whole
    updates. An update's score is the sum of the squared distances to the number - f - 2 nearest
    others; the least wins, ties go to the earlier assignment.

    Breakdown: with at most f forged of 2 f + 3 or more the winner is an honest update or one about
    as close to the honest ones as they are to each other. In many dimensions that leaves room for
    a few coordinates to be far off, which `bulyan` closes; and one client's update is a noisy
    step, which `multi_krum` calms.

    State: none, one velocity [size] with momentum. Memory: a few vectors of the model's size and
    fold_memory_bytes, 32 bytes for each pair of updates among them; disk: 4 bytes a value and
    update.
    """
    return side_by_side(Krum(byzantine, several=False), learning_rate, momentum, _SOURCE)


@strategy("multi_krum")
def multi_krum(
    byzantine: float = 0.2, learning_rate: float = 1.0, momentum: float = 0.0
) -> Strategy:
    """The mean of the number - f updates with the lowest Krum scores. Examples do not count; all
    else is as in `krum`. Not linear.

    Breakdown: as for `krum`; an update whose score is among the number - f least counts for as
    much as any honest one.
    """
    return side_by_side(Krum(byzantine, several=True), learning_rate, momentum, _SOURCE)


@dataclass(frozen=True, slots=True)
class Krum:
    """The mean of the updates with the number - f lowest scores, or without `several` the
    lowest."""

    byzantine: float = 0.2
    several: bool = True
    coordinatewise = False
    pairwise = True

    def __post_init__(self) -> None:
        check_share("byzantine", self.byzantine)

    def check(self, number: int) -> None:
        forged = part_of(self.byzantine, number)
        check_enough(f"krum with {forged} forged", number, 2 * forged + 3)

    def combine(self, rows: Rows, weights: Weights) -> Delta:
        forged = part_of(self.byzantine, rows.number)
        krum_scores = scores(rows.squared_distances(), rows.number - forged - 2)
        num_kept = rows.number - forged if self.several else 1
        coefficients = np.zeros(rows.number)
        coefficients[np.argsort(krum_scores, kind="stable")[:num_kept]] = 1 / num_kept
        return rows.combination(coefficients)


def scores(distances: npt.NDArray[np.float64], neighbours: int) -> npt.NDArray[np.float64]:
    """Krum scores: the sum of squared distances [number, number] to the nearest others."""
    others = np.sort(distances, axis=1)[:, 1 : 1 + neighbours]
    return np.asarray(others.sum(axis=1))
