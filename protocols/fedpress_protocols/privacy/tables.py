"""Integer noise from a table of its distribution function, exact to 2**-240, by a key stream.

The distribution function is computed in whole numbers, and a value is drawn by comparing uniform
bits with it. What lies beyond a table's reach is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.masking.keystream import MATERIAL_BYTES, add_keystream

Ints = npt.NDArray[np.int64]

SECRET_BYTES = MATERIAL_BYTES
TAIL = 100
"""The tails left out weigh 2 exp(-100) = 7.4e-44 at most."""
MAX_VARIANCE = 2**30
"""Maximum variance: the table of its distribution has 900,000 entries."""

_WORD, _FINE = 64, 256
"""Bits compared first, and in all where those are equal."""
_CHUNK = 2**18


def check_variance(variance: int) -> None:
    """Raise ConfigurationError for a variance that no table is made for."""
    if not 1 <= variance <= MAX_VARIANCE:
        raise ConfigurationError(
            f"noise of variance {variance} for a device, expected 1 to {MAX_VARIANCE}",
            hint="send a smaller support, raise epsilon, or raise cohort.minimum",
        )


@dataclass(frozen=True, slots=True)
class Table:
    """The distribution function at -reach, ..., reach - 1, in units of 2**-256: its `fine` values,
    and the 64 leading bits of each."""

    reach: int
    leading: npt.NDArray[np.uint64]
    fine: tuple[int, ...]

    @classmethod
    def of(cls, weights: Sequence[int]) -> Table:
        """Of a symmetric distribution, by the weights of 0, 1, ..., reach in any unit."""
        limit = len(weights) - 1
        total = 2 * sum(weights) - weights[0]
        fine, mass = [], 0
        for k in range(-limit, limit):
            mass += weights[abs(k)]
            fine.append((mass << _FINE) // total)
        shift = _FINE - _WORD
        leading = np.array([each >> shift for each in fine], np.uint64)
        return cls(limit, leading, tuple(fine))

    def values(self, uniform: npt.NDArray[np.uint64], secret: bytes, start: int, size: int) -> Ints:
        """The values for `uniform` bits, by bisection; where the leading bits are equal to an
        entry's, further ones decide: those behind the `size` words of all values."""
        first = np.searchsorted(self.leading, uniform, side="left")
        last = np.searchsorted(self.leading, uniform, side="right")
        for index in np.flatnonzero(first != last).tolist():
            more = np.zeros(_FINE // _WORD - 1, np.uint64)
            add_keystream(more, secret, "chacha20", offset=size + more.size * (start + index))
            exact = int(uniform[index])
            for word in more.tolist():
                exact = exact << _WORD | word
            last[index] = next(
                (k for k in range(first[index], last[index]) if exact < self.fine[k]), last[index]
            )
        return last.astype(np.int64) - self.reach


def sample(size: int, variance: int, secret: bytes, table_of: Callable[[int], Table]) -> Ints:
    """`size` values of the `variance`, each within the reach of its table.

    `secret` is SECRET_BYTES known to nobody else and used once. Raises ConfigurationError for a
    variance outside [1, MAX_VARIANCE].
    """
    check_variance(variance)
    table = table_of(variance)
    values = np.empty(size, np.int64)
    words = np.zeros(min(size, _CHUNK), np.uint64)
    for start in range(0, size, _CHUNK):
        uniform = words[: min(_CHUNK, size - start)]
        uniform[:] = 0
        add_keystream(uniform, secret, "chacha20", offset=start)
        values[start : start + uniform.size] = table.values(uniform, secret, start, size)
    return values
