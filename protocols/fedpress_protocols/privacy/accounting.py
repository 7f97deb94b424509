"""The privacy that a plan's terms spend: exactly for Gaussian noise, by Rényi differential privacy
for Skellam noise.

Whoever has the terms can compute the cost, so a device checks the server's claim by itself. The
unit is one device, all of whose contribution to a round is replaced by nothing. Who takes part is
not hidden, so nothing is gained by sampling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.privacy.correlated import Correlation

Curve = npt.NDArray[np.float64]
PrivacyLane = Literal["distributed", "central", "local"]
"""Whose noise it is: the cohort's under masks, the server's, or each device's own."""
SharedNoise = Literal["skellam", "discrete_gaussian"]
"""The distribution of the noise that a cohort shares."""

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


def gaussian(noise_multiplier: float) -> Curve:
    """The curve of Gaussian noise (Mironov 2017)."""
    return np.array(ORDERS, np.float64) / (2 * noise_multiplier**2)


@dataclass(frozen=True, eq=False)
class Cost:
    """The privacy cost of a sequence of mechanisms, each chosen in view of those before.

    `mu` is that of the Gaussian ones, which together are one Gaussian mechanism of sensitivity over
    deviation `mu`; `skellam` is the Rényi curve of the others, None without any.
    """

    mu: float = 0.0
    skellam: Curve | None = None

    def times(self, count: int) -> Cost:
        """The cost of `count` repetitions."""
        curve = None if self.skellam is None else count * self.skellam
        return Cost(math.sqrt(count) * self.mu, curve)

    def epsilon(self, delta: float) -> float:
        """The least epsilon at `delta` that the cost implies: for Gaussian noise alone the exact
        one. Raises ConfigurationError for a delta outside [1e-11, 1)."""
        if self.skellam is None:
            return gaussian_epsilon(self.mu, delta)
        return epsilon_of(self.skellam + self.mu**2 * gaussian(1.0), delta)


def together(costs: Iterable[Cost]) -> Cost:
    """The cost of all `costs`, one after the other."""
    each = list(costs)
    curves = [cost.skellam for cost in each if cost.skellam is not None]
    curve = np.sum(curves, axis=0) if curves else None
    return Cost(math.sqrt(math.fsum(cost.mu**2 for cost in each)), curve)


def skellam_participation(noise_multiplier: float) -> Cost:
    """The cost of one participation under Skellam noise, whatever the model's size: an upper bound.

    Its curve is `skellam` at the least sensitivity of any grid, where the correction is largest,
    and with the L1 norm of an integer vector bounded by its squared L2 norm.
    """
    return Cost(skellam=skellam(noise_multiplier, LEAST_SENSITIVITY, LEAST_SENSITIVITY**2))


def gaussian_participation(noise_multiplier: float) -> Cost:
    """The cost of one participation under Gaussian noise."""
    return Cost(mu=1 / noise_multiplier)


def participation(
    lane: PrivacyLane, correlation: Correlation | None = None, noise: SharedNoise = "skellam"
) -> Callable[[float], Cost]:
    """By noise multiplier, the cost of one participation in this lane. `correlation` is of the
    central lane, None for noise that each round draws for itself. `noise` is of the distributed
    lane; discrete Gaussian noise costs what Gaussian noise does, see `discrete_gaussian`."""
    if lane == "distributed" and noise == "skellam":
        return skellam_participation
    if correlation is None:
        return gaussian_participation
    sensitivity = correlation.sensitivity
    return lambda noise_multiplier: gaussian_participation(noise_multiplier / sensitivity)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The least epsilon at `delta` of the Gaussian mechanism of sensitivity over deviation `mu`, to
    1e-12: by its exact curve, rounded up.

    Balle and Wang 2018, arXiv:1805.06530, Theorem 8; for the composition of several, Dong, Roth and
    Su 2019, arXiv:1905.02383, Corollary 3.3. Raises ConfigurationError for a delta outside
    [1e-11, 1).
    """
    check_delta(delta)
    due = delta - _SLACK
    if _gaussian_delta(0.0, mu) <= due:
        return 0.0
    low, high = 0.0, mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / due))
    while high - low > 1e-12 * (1 + high):
        middle = (low + high) / 2
        low, high = (low, middle) if _gaussian_delta(middle, mu) <= due else (middle, high)
    return high


def _gaussian_delta(epsilon: float, mu: float) -> float:
    """Phi(mu/2 - epsilon/mu) - exp(epsilon) Phi(-mu/2 - epsilon/mu), where the second term is the
    normal density at the first argument times Mills' ratio at the second: nothing overflows."""
    if mu <= 0:
        return 0.0
    first, second = epsilon / mu - mu / 2, epsilon / mu + mu / 2
    density = math.exp(-first * first / 2) / math.sqrt(2 * math.pi)
    return 0.5 * math.erfc(first / math.sqrt(2)) - density * _mills(second)


def _mills(x: float) -> float:
    """(1 - Phi(x)) / phi(x) for x >= 0; beyond 30 by its asymptotic series, to 1e-13."""
    if x < 30:
        return math.sqrt(math.pi / 2) * math.exp(x * x / 2) * math.erfc(x / math.sqrt(2))
    term = total = 1 / x
    for k in range(1, 8):
        term *= -(2 * k - 1) / (x * x)
        total += term
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
    epsilon: float,
    delta: float,
    participations: int,
    participation: Callable[[float], Cost] = skellam_participation,
) -> float:
    """The least noise multiplier, to 0.01 %, by which so many participations cost `epsilon` at
    most; `participation` gives the cost of one. Raises ConfigurationError if there is none."""

    def cost(noise_multiplier: float) -> float:
        return participation(noise_multiplier).times(participations).epsilon(delta)

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
