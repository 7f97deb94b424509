"""Skellam noise: integers, exact to 2**-240, from a key stream.

Skellam noise of variance v is the difference of two Poisson variables of mean v / 2. Sums of it
are Skellam again, so the noise of any set of devices has the variance of its members' together.

Beyond `reach` there is nothing: the missing tails weigh 2 exp(-TAIL) at most.
"""

from __future__ import annotations

import math
from functools import lru_cache

from fedpress_protocols.privacy import tables
from fedpress_protocols.privacy.tables import TAIL, Ints, Table

_SCALE = 1 << 384
_START = 400
"""The recurrence begins where the tail weighs exp(-400)."""


def reach(variance: int, tail: int = TAIL) -> int:
    """A magnitude that Skellam noise exceeds with a probability of 2 exp(-`tail`) at most.

    Bernstein's inequality for jumps of 1: P[|X| >= t] <= 2 exp(-t**2 / (2 (v + t / 3))).
    """
    return math.ceil(tail / 3 + math.sqrt(tail * tail / 9 + 2 * tail * variance))


def sample(size: int, variance: int, secret: bytes) -> Ints:
    """`size` values of the `variance`, each of magnitude `reach` at most; see `tables.sample`."""
    return tables.sample(size, variance, secret, _table)


@lru_cache(maxsize=4)
def _table(variance: int) -> Table:
    """P[X = k] is proportional to I_k(v), the modified Bessel function of the first kind, and
    I_{k-1}(v) = I_{k+1}(v) + (2 k / v) I_k(v), which is stable downwards (Miller's algorithm)."""
    limit = reach(variance)
    above, here = 0, _SCALE
    weights = [0] * (limit + 1)
    for k in range(reach(variance, _START), 0, -1):
        above, here = here, above + 2 * k * here // variance
        if k - 1 <= limit:
            weights[k - 1] = here
    return Table.of(weights)
