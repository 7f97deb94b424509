"""Adasum: add what is orthogonal, average what is parallel (Maleki et al. 2021, arXiv:2006.02924,
Section 3)."""

from __future__ import annotations

import numpy as np

from fedpress_compression.fixed_point import FixedPoint
from fedpress_compression.update import Update
from fedpress_protocols.errors import InvalidUpdate
from fedpress_strategies.strategy import (
    NO_REPORT,
    Delta,
    Properties,
    Report,
    ServerSGD,
    Strategy,
    strategy,
)


@strategy("adasum")
def adasum(learning_rate: float = 1.0) -> Strategy:
    """Combine updates in pairs, in the order of their assignments, then the results in pairs. No
    state; not linear. Examples do not count.

    The memory is one vector [size] for each level of the tree: at most log2(n) + 1 for n uploads.
    """
    about = Properties(
        memory="8 d (log2 n + 1) bytes for n uploads", source="Maleki et al. 2021, Section 3"
    )
    return Strategy(Tree, ServerSGD(learning_rate), properties=about)


class Tree:
    """Updates combined in pairs, in the order in which they come."""

    linear = False

    def __init__(self, size: int, fixed_point: FixedPoint) -> None:
        self._size, self._max_abs = size, fixed_point.max_abs
        self._pairs = Pairs()

    def add(self, update: Update, weight: int, report: Report = NO_REPORT) -> None:
        update.check(self._max_abs)
        if update.size != self._size:
            raise InvalidUpdate(f"an update of {update.size} values, expected {self._size}")
        self._pairs.add(update.dense().astype(np.float64))

    def result(self) -> Delta:
        total = self._pairs.result()
        return np.zeros(self._size) if total is None else total


class Pairs:
    """A binary counter: at most one vector per level, combined with the next that reaches it."""

    def __init__(self) -> None:
        self._levels: list[Delta | None] = []

    def add(self, carried: Delta) -> None:
        for level, partial in enumerate(self._levels):
            if partial is None:
                self._levels[level] = carried
                return
            carried, self._levels[level] = combined(partial, carried), None
        self._levels.append(carried)

    def result(self) -> Delta | None:
        """The combination of all; None of none."""
        total: Delta | None = None
        for partial in self._levels:
            if partial is not None:
                total = partial if total is None else combined(partial, total)
        return total


def combined(a: Delta, b: Delta) -> Delta:
    """(1 - ab / 2 aa) a + (1 - ab / 2 bb) b: the sum if orthogonal, the mean if equal."""
    along = float((a * b).sum())
    lengths = float(np.square(a).sum()), float(np.square(b).sum())
    if not along:
        return a + b
    return (1 - along / (2 * lengths[0])) * a + (1 - along / (2 * lengths[1])) * b
