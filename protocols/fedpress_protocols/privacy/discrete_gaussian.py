"""Discrete Gaussian noise: integers k with probability proportional to exp(-k**2 / (2 v)).

It is all but exactly the rounded noise of a Gaussian mechanism, however many devices share it:

- A sum of independent noise of variance v each has, at every integer, the probability of discrete
  Gaussian noise of their variance together, to a factor of exp(20 exp(-pi**2 v)) (Kairouz, Liu and
  Steinke 2021, arXiv:2102.06387, Section 3).
- Gaussian noise of variance w - r about an integer x, followed by discrete Gaussian noise of
  variance r about the real number that comes of it, is discrete Gaussian noise of variance w about
  x, to a factor of exp(5 exp(-2 pi**2 r)): by Poisson's summation formula the weights of the second
  add up to the same about every number, to that factor. So a sum with noise of variance w tells of
  x what one with Gaussian noise of variance w - r tells, at most.

At v of MIN_VARIANCE and r of SMOOTHING both are within exp(1e-32), for each number.
"""

from __future__ import annotations

import math
from decimal import Context, Decimal, localcontext
from functools import lru_cache

from fedpress_protocols.privacy import tables
from fedpress_protocols.privacy.tables import TAIL, Ints, Table

MIN_VARIANCE = 8
"""Of one device's noise."""
SMOOTHING = 4
"""Of the variance of a sum's noise: what is not counted."""

_BITS = 512
_DIGITS = Context(prec=170)


def reach(variance: int, tail: int = TAIL) -> int:
    """A magnitude that the noise, and a sum of it of this variance, exceeds with a probability of
    2 exp(-`tail`) at most: it is sub-Gaussian (Canonne, Kamath and Steinke 2020,
    arXiv:2004.00010)."""
    return math.ceil(math.sqrt(2 * tail * variance))


def sample(size: int, variance: int, secret: bytes) -> Ints:
    """`size` values of the `variance`, each of magnitude `reach` at most; see `tables.sample`."""
    return tables.sample(size, variance, secret, _table)


@lru_cache(maxsize=4)
def _table(variance: int) -> Table:
    """Each weight is the one before times exp(-(2 k - 1) / (2 v)), in whole numbers."""
    with localcontext(_DIGITS):
        factor = int((Decimal(-1) / (2 * variance)).exp() * (1 << _BITS))
    squared = factor * factor >> _BITS
    weight, weights = 1 << _BITS, [1 << _BITS]
    for _ in range(reach(variance)):
        weight = weight * factor >> _BITS
        factor = factor * squared >> _BITS
        weights.append(weight)
    return Table.of(weights)
