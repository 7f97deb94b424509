"""The privacy that a plan's terms spend, by Rényi differential privacy.

Whoever has the terms can compute the cost, so a device checks the server's claim by itself. The
curve is that of Skellam noise on integers; the unit is one device, all of whose contribution to a
round is replaced by nothing. Who takes part is not hidden, so nothing is gained by sampling.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from fedpress_protocols.errors import ConfigurationError

Curve = npt.NDArray[np.float64]

ORDERS: tuple[int, ...] = (*range(2, 65), *range(68, 129, 4), *range(144, 513, 16), 1024, 4096)
"""The orders of a curve: whole numbers, for which the bound is proven."""
LEAST_SENSITIVITY = 32
"""Least L2 sensitivity in steps of the grid that noise is added on."""
_SLACK = 1e-12
"""Of delta, for the tails that the samplers leave out, see docs/privacy.md."""
_MOST = 2.0**20


def skellam(noise_multiplier: float, sensitivity: float, l1: float) -> Curve:
    """The curve of Skellam noise of the standard deviation `noise_multiplier` * `sensitivity` on
    integer vectors of L2 sensitivity `sensitivity` and L1 sensitivity `l1`.

    Agarwal, Kairouz and Liu 2021, arXiv:2110.04995, Theorem 3.5.
    """
    order = np.array(ORDERS, np.float64)
    squared, variance = sensitivity**2, (noise_multiplier * sensitivity) ** 2
    correction = np.minimum(
        ((2 * order - 1) * squared + 6 * l1) / (4 * variance**2), 3 * l1 / (2 * variance)
    )
    return order * squared / (2 * variance) + correction


def participation(noise_multiplier: float) -> Curve:
    """The curve of one participation, whatever the model's size: an upper bound.

    It is `skellam` at the least sensitivity of any grid, where the correction is largest, and with
    the L1 norm of an integer vector bounded by its squared L2 norm.
    """
    return skellam(noise_multiplier, LEAST_SENSITIVITY, LEAST_SENSITIVITY**2)


def gaussian(noise_multiplier: float) -> Curve:
    """The curve of Gaussian noise (Mironov 2017), to compare with."""
    return np.array(ORDERS, np.float64) / (2 * noise_multiplier**2)


def composed(curves: Iterable[tuple[int, Curve]]) -> Curve:
    """The curve of `count` uses of each."""
    total = np.zeros(len(ORDERS))
    for count, curve in curves:
        total = total + count * curve
    return total


def epsilon_of(curve: Curve, delta: float) -> float:
    """The least epsilon at `delta` that the curve implies; 0 for a curve of zeros.

    Canonne, Kamath and Steinke 2020, arXiv:2004.00010, Proposition 12. Raises ConfigurationError
    for a delta outside [1e-11, 1).
    """
    check_delta(delta)
    if not curve.any():
        return 0.0
    order = np.array(ORDERS, np.float64)
    logs = np.log(delta - _SLACK) + np.log(order)
    each = curve + np.log1p(-1 / order) - logs / (order - 1)
    return max(0.0, float(each.min()))


def check_delta(delta: float) -> None:
    if not 1e-11 <= delta < 1:
        raise ConfigurationError(f"delta must lie in [1e-11, 1), not {delta:g}")


def noise_multiplier_for(
    epsilon: float, delta: float, participations: int, spent: Sequence[tuple[int, Curve]] = ()
) -> float:
    """The least noise multiplier, to 0.01 %, by which so many participations cost `epsilon` at
    most; `spent` is added to them. Raises ConfigurationError if there is none."""

    def cost(noise_multiplier: float) -> float:
        curve = composed([(participations, participation(noise_multiplier)), *spent])
        return epsilon_of(curve, delta)

    low, high = 0.0, _MOST
    if cost(high) > epsilon:
        raise ConfigurationError(
            f"no noise makes {participations} participations cost epsilon {epsilon:g} at delta "
            f"{delta:g}",
            hint="raise epsilon or delta, or lower participations",
        )
    while high - low > 1e-4 * high:
        middle = math.sqrt(low * high) if low > 0 else high / 2
        low, high = (low, middle) if cost(middle) <= epsilon else (middle, high)
    return math.ceil(high * 1e5) / 1e5
