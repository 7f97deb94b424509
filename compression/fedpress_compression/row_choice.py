"""Which rows of an update a budget of bits is spent on, and at which step of a uniform quantiser.

Where rows are either sent nearly whole or not at all, next to no bits tell which values are sent: a
code that learns each row's share takes about one for a value, where it takes log2(n) or more for
one of n that may be anywhere. Error feedback keeps the other rows, whose values grow meanwhile
until they are worth the most. Rows are chosen as by Lagrange's rule: those that save the most
squared error for each bit (Shoham and Gersho 1988, IEEE Trans. ASSP 36(9)).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]
Units = npt.NDArray[np.int64]

_RATIO = 0.8
"""Of a step to the one tried before."""
_WORSE = 3
"""Steps that use up the bits and save less than the best so far: then no finer one is tried."""
_PART = 8
"""A row that would take more than the budget over this is cut in pieces."""
_EMPTY = 0.1
"""Bits that a row takes which sends nothing."""


@dataclass(frozen=True, slots=True)
class RowChoice:
    """A step, in units of the update, and the coordinates [size] that it is to send."""

    step: float
    saved: float
    """Squared error, an estimate."""
    is_sent: npt.NDArray[np.bool_]


def choose_rows(
    magnitudes: Numbers,
    matrices: Sequence[tuple[int, int]],
    bits: float,
    theta: float,
    steps: tuple[float, float],
    levels: int,
) -> RowChoice | None:
    """The rows, and the step, that save the most squared error in about `bits`; None if none fits.

    `magnitudes` [size] are those of the tensors' values one after another, `matrices` the rows and
    columns of each. A magnitude is sent if it is a whole number of steps after rounding by `theta`,
    as in `Ecsq`, of `levels` at most; `steps` are the coarsest and the finest that may be tried.
    """
    units, widths, is_cut = _units(matrices, max(1, int(bits / _PART)))
    order = np.argsort(-magnitudes, kind="stable")
    sorted_down, unit_of = magnitudes[order], units[order]
    best, most, num_worse, step = None, 0.0, 0, steps[0]
    while num_worse < _WORSE and step >= steps[1]:
        count = int(np.searchsorted(-sorted_down, -(1 - theta) * step, side="right"))
        exact, unit = sorted_down[:count] / step, unit_of[:count]
        saved, cost = _by_unit(exact, unit, widths, is_cut, theta, levels)
        ranked = np.argsort(-saved / cost, kind="stable")
        num = int(np.searchsorted(np.cumsum(cost[ranked]), bits, side="right"))
        gain = float(saved[ranked[:num]].sum()) * step * step
        if gain > most:
            best, most, num_worse = (step, ranked[:num]), gain, 0
        elif num < np.count_nonzero(saved):
            num_worse += 1
        step *= _RATIO
    if best is None:
        return None
    is_chosen = np.zeros(widths.size, np.bool_)
    is_chosen[best[1]] = True
    return RowChoice(best[0], most, is_chosen[units])


def _units(
    matrices: Sequence[tuple[int, int]], longest: int
) -> tuple[Units, Numbers, npt.NDArray[np.bool_]]:
    """The unit of each coordinate, a row or a piece of one of at most `longest` values; the width
    of each unit, and whether it is a piece."""
    parts, cut, start = list[Units](), list[npt.NDArray[np.bool_]](), 0
    for rows, columns in matrices:
        pieces = -(-columns // longest)
        column = np.arange(columns, dtype=np.int64) * pieces // max(1, columns)
        row = np.arange(rows, dtype=np.int64)[:, None] * pieces
        parts.append((start + row + column).ravel())
        cut.append(np.full(rows * pieces, pieces > 1))
        start += rows * pieces
    units = np.concatenate(parts)
    return units, np.bincount(units, minlength=start).astype(np.float64), np.concatenate(cut)


def _by_unit(
    exact: Numbers,
    unit: Units,
    widths: Numbers,
    is_cut: npt.NDArray[np.bool_],
    theta: float,
    levels: int,
) -> tuple[Numbers, Numbers]:
    """By unit: the squared error saved, in squared steps, and the bits that it takes."""
    whole = np.minimum(np.floor(exact + theta), levels)
    is_one = whole == 1
    received = whole.copy()
    for each in (is_one, ~is_one):
        if each.any():
            received[each] += (exact[each] - whole[each]).mean()
    saved: Numbers = np.bincount(
        unit, received * (2 * exact - received), minlength=widths.size
    ).astype(np.float64)
    sent = np.bincount(unit, minlength=widths.size).astype(np.float64)
    counts = np.bincount(whole.astype(np.int64))
    counts = counts[counts > 0]
    number = float((counts * np.log2(exact.size / counts)).sum()) / max(1, exact.size)
    share = np.clip(sent / np.maximum(widths, 1), 1e-12, 1 - 1e-12)
    flags = -widths * (share * np.log2(share) + (1 - share) * np.log2(1 - share))
    # a code that learns whole rows knows nothing of a piece: static ones take a bit for each value
    flags = np.where(is_cut, np.maximum(flags, sent), flags)
    learning = 1 + np.log2(1 + widths) / 2
    cost = np.where(sent > 0, sent * (1 + number) + flags + learning, _EMPTY)
    return saved, cost
