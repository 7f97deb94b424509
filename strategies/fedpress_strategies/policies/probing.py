"""Result of a probe: the compressed updates of a round beside those of the reference."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from fedpress_compression.update import Update
from fedpress_protocols.policies import LEAST_COMPARED, Comparison

_NOISE = 0.1
"""The product of two clients' updates that have nothing in common, relative to an update's squared
norm: the standard deviation in a hundred dimensions."""


class _Group:
    """Updates of one kind, as far as their mean and the products of different ones go."""

    def __init__(self, size: int) -> None:
        self.total: npt.NDArray[np.float64] = np.zeros(size)
        self.weight = self.squares = self.norms = self.weighted_norms = 0.0
        self.count = self.num_bytes = 0

    def add(self, update: npt.NDArray[np.float64], weight: int, num_bytes: int) -> None:
        norm = float(update @ update)
        self.total += weight * update
        self.weight += weight
        self.squares += float(weight) ** 2
        self.norms += norm
        self.weighted_norms += float(weight) ** 2 * norm
        self.count += 1
        self.num_bytes += num_bytes

    @property
    def norm(self) -> float:
        """An unbiased estimate of the squared norm of what the mean tends to: that of the products
        of different clients' updates, in which what is each one's own cancels."""
        pairs = self.weight**2 - self.squares
        return (float(self.total @ self.total) - self.weighted_norms) / pairs

    def along(self, other: _Group) -> float:
        return float(self.total @ other.total) / (self.weight * other.weight)


class Probe:
    """The updates of a probe's round, over `size` values; the memory is that of three models in
    float64. Add them in an order that does not depend on when they came."""

    def __init__(self, size: int) -> None:
        self._reference, self._compressed = _Group(size), _Group(size)

    def add(self, update: Update, num_examples: int, num_bytes: int, *, is_reference: bool) -> None:
        group = self._reference if is_reference else self._compressed
        group.add(update.dense().astype(np.float64), num_examples, num_bytes)

    def comparison(self) -> Comparison | None:
        """None with fewer than two of either kind, or if the reference moves nothing."""
        reference, compressed = self._reference, self._compressed
        if min(reference.count, compressed.count) < LEAST_COMPARED or not reference.norms:
            return None
        inner, norm, other = compressed.along(reference), reference.norm, compressed.norm
        floor = _noise(reference.count) * reference.norms / reference.count
        cosine, is_known = None, norm > floor
        if is_known and other > floor:
            cosine = max(-1.0, min(1.0, inner / math.sqrt(norm * other)))
        return Comparison(
            progress=inner / norm if is_known else None,
            cosine=cosine,
            nmse=max(0.0, (other - 2 * inner + norm) / norm) if is_known else None,
            energy=(compressed.norms / compressed.count) / (reference.norms / reference.count),
            inner=inner,
            norm=norm,
            compressed=compressed.count,
            reference=reference.count,
            extra_bytes=round(
                reference.num_bytes - reference.count * compressed.num_bytes / compressed.count
            ),
        )


def _noise(count: int) -> float:
    """Return the part of an update's squared norm that the mean of `count` updates must have to be
    told from noise, which falls with the root of the number of pairs."""
    return _NOISE / math.sqrt(count * (count - 1) / 2)
