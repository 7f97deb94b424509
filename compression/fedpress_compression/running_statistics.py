"""Running statistics of normalisation layers, which are means over batches and no weights.

A device adds nothing to them, as it does to weights: it measures them anew. So its update counts
from the model that it had, and not from parameters that the server keeps besides: those would go
past what is measured for as long as the published ones lag.

A server's momentum carries a variance below zero when it falls, and a model with a negative
variance gives NaN. So momentum leaves them alone, and no variance falls to less than a tenth in a
round, whatever compression adds to it. They are known by the names that PyTorch and Keras give
them (Ioffe and Szegedy 2015, arXiv:1502.03167, Algorithm 2, has what they are).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np

from fedpress_compression.tensors import ModelSpec, TensorSpec, Vector

_VARIANCE_OF = {"running_mean": "running_var", "moving_mean": "moving_variance"}
_VARIANCES = frozenset(_VARIANCE_OF.values())
_STATISTICS = _VARIANCES | _VARIANCE_OF.keys()
_LEAST_KEPT = np.float32(0.1)


def has_statistics(spec: ModelSpec) -> bool:
    return any(True for _ in _places(spec, _STATISTICS))


def statistics(spec: ModelSpec | None, start: int, size: int) -> Iterator[slice]:
    """The places of running statistics in the block of `size` values that begins at `start` of the
    flat vector."""
    for where in () if spec is None else _places(spec, _STATISTICS):
        first, last = max(where.start - start, 0), min(where.stop - start, size)
        if first < last:
            yield slice(first, last)


def with_statistics(spec: ModelSpec, values: Vector, source: Vector) -> Vector:
    """`values` [size] with the running statistics of `source`."""
    return _with(values, [(where, source[where]) for where in _places(spec, _STATISTICS)])


def with_variances(spec: ModelSpec, before: Vector, after: Vector) -> Vector:
    """`after` [size] with no variance of less than a tenth of what it was `before`."""
    places = _places(spec, _VARIANCES)
    least = ((where, _LEAST_KEPT * before[where]) for where in places)
    return _with(after, [(where, np.maximum(after[where], values)) for where, values in least])


def normalisations(spec: ModelSpec) -> Iterator[tuple[TensorSpec, TensorSpec | None]]:
    """The variances of each layer, and their means where it has as many."""
    tensors = {tensor.name: tensor for tensor in spec.trained}
    for name, tensor in tensors.items():
        prefix, last = _split(name)
        if last in _VARIANCES:
            mean = next(each for each, variance in _VARIANCE_OF.items() if variance == last)
            means = tensors.get(prefix + mean)
            yield tensor, means if means is not None and means.size == tensor.size else None


def _with(values: Vector, parts: Sequence[tuple[slice, Vector]]) -> Vector:
    """`values` with these parts; the very same without any."""
    if parts:
        values = values.copy()
    for where, part in parts:
        values[where] = part
    return values


def _places(spec: ModelSpec, names: frozenset[str]) -> Iterator[slice]:
    for tensor in spec.trained:
        if _split(tensor.name)[1] in names:
            yield spec.slices[tensor.name]


def _split(name: str) -> tuple[str, str]:
    """A tensor's name up to its last dot or slash, and the rest."""
    last = re.split(r"[./]", name)[-1]
    return name[: len(name) - len(last)], last
