"""The coordinate-wise median (Yin et al. 2018, arXiv:1803.01498, Definition 1 and Option I)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedpress_strategies.robust import Weights, side_by_side
from fedpress_strategies.rows import Rows
from fedpress_strategies.strategy import Delta, Strategy, strategy


@strategy("median")
def median(learning_rate: float = 1.0, momentum: float = 0.0) -> Strategy:
    """The median of the updates in each coordinate. Examples do not count. Not linear.

    Breakdown: while fewer than half of the updates are forged, every coordinate stays between the
    least and the greatest of the honest. Uneven clients cost accuracy even without attack, since
    the median of skewed values is not their mean.

    State: none, one velocity [size] with momentum. Memory: a few vectors of the model's size and
    fold_memory_bytes; disk: 4 bytes a value and update.
    """
    return side_by_side(Median(), learning_rate, momentum, "Yin et al. 2018, Option I")


@dataclass(frozen=True, slots=True)
class Median:
    """The rule of the median; of an even number, the mean of the two in the middle."""

    coordinatewise = True
    pairwise = False

    def check(self, number: int) -> None:
        return None

    def combine(self, rows: Rows, weights: Weights) -> Delta:
        medians = np.empty(rows.width)
        for where, ordered in rows.ordered():
            medians[where] = middle(ordered)
        return medians


def middle(ordered: npt.NDArray[np.floating[Any]]) -> Delta:
    """The median [columns] of sorted columns [number, columns]."""
    low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return np.asarray((low.astype(np.float64) + high) / 2)
