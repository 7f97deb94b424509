"""The coordinate-wise trimmed mean (Yin et al. 2018, arXiv:1803.01498, Definition 2 and Option
II)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedpress_strategies.robust import Weights, check_enough, check_share, part_of, side_by_side
from fedpress_strategies.rows import Rows
from fedpress_strategies.strategy import Delta, Strategy, strategy


@strategy("trimmed_mean")
def trimmed_mean(trim: float = 0.2, learning_rate: float = 1.0, momentum: float = 0.0) -> Strategy:
    """The mean of the updates in each coordinate without the share `trim` (rounded up to whole
    updates) at either end. Examples do not count. Not linear.

    Breakdown: while at most as many updates are forged as are cut at one end, every coordinate
    stays between the least and the greatest of the honest.

    State: none, one velocity [size] with momentum. Memory: a few vectors of the model's size and
    fold_memory_bytes; disk: 4 bytes a value and update.
    """
    return side_by_side(TrimmedMean(trim), learning_rate, momentum, "Yin et al. 2018, Option II")


@dataclass(frozen=True, slots=True)
class TrimmedMean:
    """The mean without the ceil(trim * number) least and greatest values of each coordinate."""

    trim: float = 0.2
    coordinatewise = True
    pairwise = False

    def __post_init__(self) -> None:
        check_share("trim", self.trim)

    def check(self, number: int) -> None:
        cut = part_of(self.trim, number)
        check_enough(f"trimmed_mean without {cut} updates at either end", number, 2 * cut + 1)

    def combine(self, rows: Rows, weights: Weights) -> Delta:
        cut = part_of(self.trim, rows.number)
        mean = np.zeros(rows.width)
        for where, ordered in rows.ordered():
            for values in ordered[cut : rows.number - cut]:
                mean[where] += values
        return mean / (rows.number - 2 * cut)
