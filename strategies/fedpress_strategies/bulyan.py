"""Bulyan of Krum (El Mhamdi et al. 2018, "The Hidden Vulnerability of Distributed Learning in
Byzantium", arXiv:1802.07927)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedpress_strategies.krum import scores
from fedpress_strategies.median import middle
from fedpress_strategies.robust import Weights, check_enough, check_share, part_of, side_by_side
from fedpress_strategies.rows import Rows
from fedpress_strategies.strategy import Delta, Strategy, strategy


@strategy("bulyan")
def bulyan(byzantine: float = 0.1, learning_rate: float = 1.0, momentum: float = 0.0) -> Strategy:
    """Select updates by repeated Krum, then average near the median of each coordinate. Examples do
    not count. Not linear.

    `byzantine` is the share of a round's updates that may be forged: f, rounded up to whole
    updates. Of the number - 2 f updates that are chosen, each coordinate takes the mean of the
    number - 4 f values closest to their median.

    Breakdown: with at most f forged of 4 f + 3 or more the median of every coordinate is between
    values of honest updates, and no averaged value is farther from it than some honest value. It
    discards the most updates and needs the most clients.

    State: none, one velocity [size] with momentum. Memory: a few vectors of the model's size and
    fold_memory_bytes, 32 bytes for each pair of updates among them; disk: 4 bytes a value and
    update.
    """
    return side_by_side(Bulyan(byzantine), learning_rate, momentum, "El Mhamdi et al. 2018")


@dataclass(frozen=True, slots=True)
class Bulyan:
    """The rule of Bulyan. In the last selections, with 2 f + 1 updates left, Krum would sum f - 1
    neighbours; here at least two, since with one the closest pair has equal scores."""

    byzantine: float = 0.1
    coordinatewise = True
    pairwise = True

    def __post_init__(self) -> None:
        check_share("byzantine", self.byzantine)

    def check(self, number: int) -> None:
        forged = part_of(self.byzantine, number)
        check_enough(f"bulyan with {forged} forged", number, 4 * forged + 3)

    def combine(self, rows: Rows, weights: Weights) -> Delta:
        forged = part_of(self.byzantine, rows.number)
        chosen = self._chosen(rows, forged)
        num_kept = len(chosen) - 2 * forged
        mean = np.zeros(rows.width)
        for where, ordered in rows.ordered(chosen):
            wide = ordered.astype(np.float64)
            # The values closest to the median are adjacent: the window with the closest ends.
            centre = middle(wide)
            first = np.zeros(centre.size, np.int64)
            nearest = np.full(centre.size, np.inf)
            for start in range(2 * forged + 1):
                reach = np.maximum(centre - wide[start], wide[start + num_kept - 1] - centre)
                closer = reach < nearest
                first[closer], nearest[closer] = start, reach[closer]
            columns = np.arange(centre.size)
            for offset in range(num_kept):
                mean[where] += wide[first + offset, columns]
        return mean / num_kept

    def _chosen(self, rows: Rows, forged: int) -> list[int]:
        """The successive winners of Krum, each removed before the next, in the order of the
        rows."""
        distances = rows.squared_distances()
        remaining = list(range(rows.number))
        for _ in range(rows.number - 2 * forged):
            krum_scores = scores(
                distances[np.ix_(remaining, remaining)], max(2, len(remaining) - forged - 2)
            )
            del remaining[int(krum_scores.argmin())]
        return [row for row in range(rows.number) if row not in remaining]
