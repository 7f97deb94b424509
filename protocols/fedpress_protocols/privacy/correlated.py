"""Noise correlated over rounds: matrix factorisation with a banded inverse.

    round t's noise  v_t = z_t + d_1 z_(t-1) + ... + d_(bands-1) z_(t-bands+1)

The z_t are independent Gaussian vectors, drawn anew from their seeds whenever they are needed, so
nothing but seeds is kept. The d_i are the leading coefficients of (1 - x)^(1/2), negative from d_1
on: what one round adds later rounds take away again, and the noise in a model, the sum over rounds,
grows slowly.

With D the lower-triangular Toeplitz matrix of the d_i and C its inverse, sums x with noise are
D (C x + z): a Gaussian mechanism whose sensitivity is that of C, also where x is chosen in view of
earlier results (Denisov et al. 2022, arXiv:2202.08312). The entries c_0 = 1 >= c_1 >= ... >= 0 of C
fall, so that the worst devices take part as early and as closely as they may, with equal updates.
Rounds that begin the noise anew set entries of C to zero, which lowers the sensitivity.

The square root: Fichtenberger, Henzinger and Upadhyay 2022, arXiv:2202.11205; its banded inverse:
Kalinin, McKenna, Upadhyay and Lampert 2025, arXiv:2505.12128.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

MAX_BANDS = 512
"""Maximum number of rounds whose draws are in one round's noise."""
MAX_SEPARATION = 2**20
_SLACK = 1e-9
"""Relative, for the tail of C that is left out and for the arithmetic of float64."""
_REACH = 64
"""The entries of C further down than this times the bands are below 1e-20."""
_ENOUGH = 1.005
"""Noise over the least, for which fewer bands are taken: each costs a draw in each round."""


def coefficients(bands: int) -> Floats:
    """The d_i [bands]; d_0 is 1."""
    steps = np.arange(1, bands)
    return np.concatenate([[1.0], np.cumprod((steps - 1.5) / steps)])


def gain(bands: int) -> float:
    """The sum of all entries of a column of C: the most that it makes of a bounded sequence."""
    return float(1 / coefficients(bands).sum())


def sensitivity(bands: int, separation: int, participations: int) -> float:
    """The L2 sensitivity of C to a device that takes part so many times with updates of norm 1,
    in rounds that are `separation` or more apart, of a task of any length.

    A device whose columns are j_1, j_2, ... moves C x by the root of the sum of <C_i, C_j> over all
    pairs at most, and such a product falls with the distance of i and j.
    """
    products = _products(bands)[::separation][:participations]
    pairs = 2.0 * (participations - np.arange(products.size))
    pairs[0] = participations
    return math.sqrt(float(pairs @ products)) * (1 + _SLACK)


def prefix_error(bands: int, rounds: int) -> float:
    """The root mean square, over `rounds` rounds, of the noise in the sum of all rounds up to one,
    by the deviation of z."""
    each = np.cumsum(coefficients(bands)[:rounds]) ** 2
    later = rounds - each.size
    total = float(each @ (rounds - np.arange(each.size))) + each[-1] * later * (later + 1) / 2
    return math.sqrt(total / rounds)


@lru_cache(maxsize=64)
def best_bands(
    separation: int, participations: int, rounds: int, max_bands: int = MAX_BANDS
) -> int:
    """The least number of bands by which models of a task have the least noise at a given epsilon,
    to half a percent, of up to `max_bands`.

    The noise falls with the bands and then rises. Where devices take part once, the least is within
    1 % of that of any Toeplitz matrix for up to 2,000 rounds.
    """

    def noise(bands: int) -> float:
        return sensitivity(bands, separation, participations) * prefix_error(bands, rounds)

    numbers = range(1, min(max_bands, MAX_BANDS, rounds) + 1)
    best = numbers[bisect_left(numbers[:-1], True, key=lambda n: noise(n) <= noise(n + 1))]
    enough = _ENOUGH * noise(best)
    return 1 + bisect_left(numbers[:best], True, key=lambda n: noise(n) <= enough)


@lru_cache(maxsize=32)
def _products(bands: int) -> Floats:
    """The product of two columns of C, by their distance, until it is negligible: the coefficients
    of 1 / |d|^2 on the unit circle, where d is the polynomial of the d_i."""
    length = 1 << (2 * _REACH * bands).bit_length()
    spectrum = np.abs(np.fft.rfft(coefficients(bands), length)) ** 2
    products = np.fft.irfft(1 / spectrum, length)[: _REACH * bands]
    return np.maximum.accumulate(np.maximum(products, 0)[::-1])[::-1]
