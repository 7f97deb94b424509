"""The integer grid of a private sum: clipping, rounding that keeps the norm, and the noise's size.

    numbers [n] → clip to L2 norm C → steps of C / c → round, norm at most `sensitivity` → + noise

with c = 2 sqrt(n) + 32. The step is fine enough for rounding to cost little of the noise, and
coarse enough for few bits. Everything here follows from public terms, by arithmetic that is exact
or correctly rounded, so both ends have the same integers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from fedpress_compression.linear import Numbers
from fedpress_protocols.errors import InvalidUpdate
from fedpress_protocols.masking.keystream import MATERIAL_BYTES, add_keystream
from fedpress_protocols.masking.ring import Bounded
from fedpress_protocols.privacy import discrete_gaussian, gaussian, skellam
from fedpress_protocols.privacy.accounting import LEAST_SENSITIVITY, SharedNoise
from fedpress_protocols.privacy.tables import check_variance

Ints = npt.NDArray[np.int64]

SECRET_BYTES = MATERIAL_BYTES
_TRIES = 256
"""Each succeeds with a probability of 0.39 at least: all fail once in 2**180."""

SUM_TAIL = 40
"""A number of a sum exceeds its room with a probability of 2 exp(-40) = 8.5e-18."""


@dataclass(frozen=True)
class Grid:
    """`size` numbers of L2 norm `clip` at most, noised by `shares` parties among whom nobody is
    corrupt, so that the sum has `noise_multiplier` times the sensitivity.

    The noise is Skellam, which adds up, or of one party and Gaussian, whose size has no bound to
    make room for.
    """

    size: int
    clip: float
    noise_multiplier: float
    shares: int
    is_gaussian: bool = False

    @cached_property
    def _radius(self) -> float:
        """The clip in steps."""
        return 2 * math.sqrt(self.size) + LEAST_SENSITIVITY

    @cached_property
    def step(self) -> float:
        """The number that one step stands for."""
        return self.clip / self._radius

    @cached_property
    def squared_sensitivity(self) -> int:
        """The largest squared L2 norm of rounded values, in steps.

        Rounding at random is kept if the norm is within it, which it is with a probability of
        1 - exp(-1/2) at least (Kairouz, Liu and Steinke 2021, arXiv:2102.06387, Proposition 22).
        """
        radius, root = self._radius, math.sqrt(self.size)
        return math.ceil(radius * radius + self.size / 4 + radius + root / 2)

    @cached_property
    def variance(self) -> int:
        """Of each party's noise, in squared steps: Skellam."""
        total = self.noise_multiplier * self.noise_multiplier * self.squared_sensitivity
        variance = max(1, math.ceil(total / self.shares))
        check_variance(variance)
        return variance

    @cached_property
    def largest(self) -> int:
        """The largest magnitude of a value before noise. Within it, wider values would cost bits
        that the noise does not take anyway."""
        if self.is_gaussian:
            return math.ceil(self._radius)
        return min(math.ceil(self._radius), skellam.reach(self.variance))

    @property
    def bound(self) -> int:
        """The largest magnitude of a value with Skellam noise; it is never exceeded."""
        return self.largest + skellam.reach(self.variance)

    def sum_bound(self, parties: int) -> int:
        """The largest magnitude of a sum of so many parties' values with noise."""
        return parties * self.bound

    def vector(self, name: str, cohort: int) -> Bounded:
        """One party's values under this name, for sums of up to `cohort` parties."""
        return Bounded(name, self.size, -(-self.sum_bound(cohort) // cohort), self.bound)

    def rounded(self, numbers: Numbers, secret: bytes) -> Ints:
        """`numbers` [size] on the grid: clipped, rounded at random, without noise.

        `secret` is SECRET_BYTES known to nobody else and used once. Raises InvalidUpdate for NaN or
        infinity.
        """
        scaled, words = self._scaled(numbers), np.zeros(-(-self.size // 2), np.uint64)
        for attempt in range(_TRIES):
            values = self._rounded(scaled, words, secret, attempt)
            if int(values @ values) <= self.squared_sensitivity:
                return values
        raise InvalidUpdate("no rounding of the update keeps its norm; this does not happen")

    def _scaled(self, numbers: Numbers) -> Numbers:
        """`numbers` in steps, of the clip's norm and each of `largest` at most."""
        norm = float(np.linalg.norm(numbers))
        if not math.isfinite(norm):
            raise InvalidUpdate("the update's norm is not finite, nothing of it can be sent")
        scaled = numbers * (min(1.0, self.clip / norm if norm else 1.0) / self.step)
        return np.clip(scaled, -self.largest, self.largest)

    def _rounded(
        self, scaled: Numbers, words: npt.NDArray[np.uint64], secret: bytes, attempt: int
    ) -> Ints:
        """To the integer below or above, by random bits that no other attempt has."""
        below = np.floor(scaled)
        words[:] = 0
        add_keystream(words, secret, "chacha20", offset=attempt * words.size)
        values = below.astype(np.int64)
        values += words.view(np.uint32)[: self.size] < (scaled - below) * 2.0**32
        return values

    def noise(self, secret: bytes) -> Ints:
        """One party's noise [size]; `secret` as in `rounded`, and another one."""
        if self.is_gaussian:
            deviation = self.noise_multiplier * math.sqrt(self.squared_sensitivity / self.shares)
            return gaussian.sample(self.size, deviation, secret)
        return skellam.sample(self.size, self.variance, secret)


@dataclass(frozen=True)
class NarrowGrid(Grid):
    """A grid of few bits, for sums of up to `cohort` parties' values with discrete Gaussian noise.

        clip = sqrt(S) steps, S = max(9 n / 4, 8 h / z**2, 64) rounded up, h parties sharing noise z

    The squared sensitivity is S itself: values whose rounding is beyond it are scaled down, and
    rounding costs numbers that are shorter than the clip nothing. No party's noise is smaller than
    the law of sums of discrete Gaussian noise needs. The sum has room for what the noise of a whole
    cohort comes to, not for what each party's might: it exceeds `sum_bound` with a probability of
    2 exp(-SUM_TAIL) a number at most.
    """

    cohort: int = field(kw_only=True)

    @cached_property
    def squared_sensitivity(self) -> int:
        of_noise = discrete_gaussian.MIN_VARIANCE * self.shares
        least = of_noise / (self.noise_multiplier * self.noise_multiplier)
        return math.ceil(max(9 * self.size / 4, least, 64.0))

    @cached_property
    def _radius(self) -> float:
        return math.sqrt(self.squared_sensitivity)

    @cached_property
    def variance(self) -> int:
        """Of each party's noise, in squared steps: discrete Gaussian."""
        total = self.noise_multiplier * self.noise_multiplier * self.squared_sensitivity
        each = math.ceil((total + discrete_gaussian.SMOOTHING) / self.shares)
        variance = max(discrete_gaussian.MIN_VARIANCE, each)
        check_variance(variance)
        return variance

    @cached_property
    def largest(self) -> int:
        """The largest magnitude of a value before noise: four times the root mean square of the
        clip or, where that is more, what the noise leaves room for at half a bit."""
        usual = math.ceil(4 * math.sqrt(self.squared_sensitivity / self.size))
        of_noise = self._reach(self.cohort) // (2 * self.cohort)
        return min(math.ceil(self._radius), max(usual, of_noise))

    @property
    def bound(self) -> int:
        """The largest magnitude of one party's value with noise; it is never exceeded."""
        return self.largest + discrete_gaussian.reach(self.variance)

    def sum_bound(self, parties: int) -> int:
        return parties * self.largest + self._reach(parties)

    def _reach(self, parties: int) -> int:
        return discrete_gaussian.reach(parties * self.variance, SUM_TAIL)

    def rounded(self, numbers: Numbers, secret: bytes) -> Ints:
        scaled, words = self._scaled(numbers), np.zeros(-(-self.size // 2), np.uint64)
        for attempt in range(_TRIES):
            values = self._rounded(scaled, words, secret, attempt)
            squared = int(values @ values)
            if squared <= self.squared_sensitivity:
                return values
            scaled = scaled * (0.999 * math.sqrt(self.squared_sensitivity / squared))
        raise InvalidUpdate("no rounding of the update keeps its norm; this does not happen")

    def noise(self, secret: bytes) -> Ints:
        return discrete_gaussian.sample(self.size, self.variance, secret)


class _Terms(Protocol):
    """Of `PrivacyTerms`, what a grid follows from."""

    @property
    def clip(self) -> float: ...
    @property
    def noise_multiplier(self) -> float: ...
    @property
    def noise(self) -> SharedNoise: ...


def grid_of(terms: _Terms, size: int, shares: int, cohort: int) -> Grid:
    """The grid of `size` numbers in the distributed lane, whose noise so many honest survivors of
    a cohort of `cohort` share."""
    if terms.noise == "skellam":
        return Grid(size, terms.clip, terms.noise_multiplier, shares)
    return NarrowGrid(size, terms.clip, terms.noise_multiplier, shares, cohort=cohort)
