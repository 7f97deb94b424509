"""Running statistics of normalisation layers, which are means over batches and no weights.

A server's momentum carries a variance below zero when it falls, and a model with a negative
variance gives NaN. So momentum leaves them alone, and no variance falls to less than a tenth in a
round, whatever compression adds to it. They are known by the names that PyTorch and Keras give
them (Ioffe and Szegedy 2015, arXiv:1502.03167, Algorithm 2, has what they are).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from fedpress_compression.tensors import ModelSpec, Vector

_STATISTICS = frozenset({"running_mean", "running_var", "moving_mean", "moving_variance"})
_VARIANCES = frozenset({"running_var", "moving_variance"})
_LEAST_KEPT = np.float32(0.1)


def statistics(spec: ModelSpec | None, start: int, size: int) -> Iterator[slice]:
    """The places of running statistics in the block of `size` values that begins at `start` of the
    flat vector."""
    for where in () if spec is None else _places(spec, _STATISTICS):
        first, last = max(where.start - start, 0), min(where.stop - start, size)
        if first < last:
            yield slice(first, last)


def with_variances(spec: ModelSpec, before: Vector, after: Vector) -> Vector:
    """`after` [size] with no variance of less than a tenth of what it was `before`."""
    return _kept(spec, before, after, _LEAST_KEPT)


def without_falls_of_variances(spec: ModelSpec, before: Vector, after: Vector) -> Vector:
    """`after` [size] with the variances of `before` in place of those of less than a tenth: both
    are on the grid of a downlink, which a tenth is not."""
    return _kept(spec, before, after, np.float32(1))


def _kept(spec: ModelSpec, before: Vector, after: Vector, share: np.float32) -> Vector:
    places = list(_places(spec, _VARIANCES))
    if not places:
        return after
    after = after.copy()
    for where in places:
        was, now = before[where], after[where]
        after[where] = np.where(now < _LEAST_KEPT * was, share * was, now)
    return after


def _places(spec: ModelSpec, names: frozenset[str]) -> Iterator[slice]:
    for tensor in spec.trained:
        if re.split(r"[./]", tensor.name)[-1] in names:
            yield spec.slices[tensor.name]
