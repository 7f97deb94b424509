"""How much each coordinate has moved of late: an average that the server keeps, and a small map
of it that it publishes, as contexts of uploads.

The map says of each coordinate among how many it ranks, in octaves, and no value. It is one coded
field, so its bytes are bounded by the model's spec, and so is the work of reading them.
"""

from __future__ import annotations

import numpy as np

from fedpress_compression import coding
from fedpress_compression.coding.fields import Alphabet, Layout
from fedpress_compression.contexts import CLASSES, grid_of, ranks
from fedpress_compression.tensors import ModelSpec, Vector

DECAY = 0.8
"""What a round leaves of the average before it."""
_LOWEST = 3
"""The map tells the size >> 3 largest apart, and nothing of the others: what a sparse upload takes
is seldom among them, and their octaves would be half of the map."""


def averaged(average: Vector | None, step: Vector) -> Vector:
    """The average [size] after the model moved by `step`; None before the first. In float32, each
    operation rounded by itself: the same bits on every machine."""
    if average is None:
        average = np.zeros_like(step)
    kept: Vector = np.float32(DECAY) * average
    kept += np.float32(1 - DECAY) * np.abs(step)
    return kept


def to_bytes(average: Vector, spec: ModelSpec) -> bytes:
    """The map of `average` [spec.size]."""
    classes = np.maximum(ranks(average), _LOWEST - 1) - np.uint8(_LOWEST - 1)
    return coding.encode((classes,), _layout(spec))


def from_bytes(data: bytes, spec: ModelSpec) -> Vector:
    """The classes [spec.size] of a map, as numbers that rank as the average did; 0 is the lowest.

    Raises DecodingError.
    """
    (classes,) = coding.decode(data, _layout(spec))
    return classes.astype(np.float32)


def max_bytes(spec: ModelSpec) -> int:
    """No map of such a model is longer."""
    return spec.size + 8


def _layout(spec: ModelSpec) -> Layout:
    return (Alphabet(CLASSES - _LOWEST + 2, spec.size, "auto", grid_of(spec)),)
