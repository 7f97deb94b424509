"""Contexts of coordinates for the range coder, from data that both ends know before an upload.

Where the last step or the total drift was large, the next update is likely to be large too; and
after a positive step, a correction is negative. Ranks are used instead of values, since they need
no scale.
"""

from __future__ import annotations

import math

import numpy as np

from fedpress_compression.coding.fields import (
    Alphabet,
    Contexts,
    Grid,
    Integers,
    Known,
    Layout,
    Positions,
)
from fedpress_compression.compressor import Public
from fedpress_compression.kernels.wire import Octets
from fedpress_compression.tensors import ModelSpec, TensorSpec, Vector

CLASSES = 10
_POSITIVE, _NEGATIVE = 16, 32


def grid_of(spec: ModelSpec, known: Known | None = None) -> Grid:
    """The grid of all coordinates of the trained tensors, with contexts from `known`."""
    names = tuple(tensor.name for tensor in spec.trained)
    return Grid(names, tuple(_matrix(tensor) for tensor in spec.trained), known)


def _matrix(tensor: TensorSpec) -> tuple[int, int]:
    """Rows and columns of a tensor: one row per index of the first axis, one row for a vector."""
    if len(tensor.shape) < 2:
        return 1, tensor.size
    return tensor.shape[0], math.prod(tensor.shape[1:])


def contexts_of(layout: Layout, public: Public) -> Contexts:
    """The contexts of each field of `layout`, whose compressor works on the tensors of `public`."""
    return tuple(
        _signed(public.part(field.grid.names).known(field.grid.known))
        if isinstance(field, Positions | Alphabet | Integers)
        and field.grid is not None
        and field.grid.known is not None
        else None
        for field in layout
    )


def _signed(vector: Vector) -> Octets:
    """Each value's context: its rank, plus 16 if it is positive, plus 32 if it is negative."""
    contexts = ranks(vector)
    contexts += np.uint8(_POSITIVE) * (vector > 0)
    contexts += np.uint8(_NEGATIVE) * (vector < 0)
    return contexts


def ranks(vector: Vector) -> Octets:
    """Each value's c, the largest of 1 .. CLASSES for which the value is among the size >> c
    largest in magnitude, ties among them; 0 for those among none, and for zero.

    Magnitudes are compared by their bits.
    """
    bits = np.abs(vector).view(np.uint32)
    counts = [count for c in range(1, CLASSES + 1) if (count := vector.size >> c)]
    ranks = np.array([vector.size - count for count in counts], np.intp)
    thresholds = np.partition(bits, ranks)
    result = np.zeros(vector.size, np.uint8)
    for count in counts:
        result += bits >= max(thresholds[vector.size - count], 1)
    return result
