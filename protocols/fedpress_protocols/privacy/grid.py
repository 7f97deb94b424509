"""The integer grid of a private sum: clipping, rounding that keeps the norm, and the noise's size.

    numbers [n] → clip to L2 norm C → steps of C / c → round, norm at most `sensitivity` → + noise

with c = 2 sqrt(n) + 32. The step is fine enough for rounding to cost little of the noise, and
coarse enough for few bits. Everything here follows from public terms, by arithmetic that is exact
or correctly rounded, so both ends have the same integers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fedpress_compression.linear import Numbers
from fedpress_protocols.errors import InvalidUpdate
from fedpress_protocols.masking.keystream import MATERIAL_BYTES, add_keystream
from fedpress_protocols.privacy import gaussian, skellam
from fedpress_protocols.privacy.accounting import LEAST_SENSITIVITY

Ints = npt.NDArray[np.int64]

SECRET_BYTES = MATERIAL_BYTES
_TRIES = 256
"""Each succeeds with a probability of 0.39 at least: all fail once in 2**180."""


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
        skellam.check_variance(variance)
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

    def rounded(self, numbers: Numbers, secret: bytes) -> Ints:
        """`numbers` [size] on the grid: clipped, rounded at random, without noise.

        `secret` is SECRET_BYTES known to nobody else and used once. Raises InvalidUpdate for NaN or
        infinity.
        """
        norm = float(np.linalg.norm(numbers))
        if not math.isfinite(norm):
            raise InvalidUpdate("the update's norm is not finite, nothing of it can be sent")
        scaled = numbers * (min(1.0, self.clip / norm if norm else 1.0) / self.step)
        scaled = np.clip(scaled, -self.largest, self.largest)
        below = np.floor(scaled)
        fraction = (scaled - below) * 2.0**32
        words = np.zeros(-(-self.size // 2), np.uint64)
        for attempt in range(_TRIES):
            words[:] = 0
            add_keystream(words, secret, "chacha20", offset=attempt * words.size)
            values = below.astype(np.int64)
            values += words.view(np.uint32)[: self.size] < fraction
            if int(values @ values) <= self.squared_sensitivity:
                return values
        raise InvalidUpdate("no rounding of the update keeps its norm; this does not happen")

    def noise(self, secret: bytes) -> Ints:
        """One party's noise [size]; `secret` as in `rounded`, and another one."""
        if self.is_gaussian:
            deviation = self.noise_multiplier * math.sqrt(self.squared_sensitivity / self.shares)
            return gaussian.sample(self.size, deviation, secret)
        return skellam.sample(self.size, self.variance, secret)
