"""Recent activity of coordinates: an average on the server, and a small published map of it, as
contexts of uploads.

The map has each coordinate's rank in octaves, not its value. It is one coded field, so its length
and the work of decoding it are bounded by the model's spec.
"""

from __future__ import annotations

import numpy as np

from fedpress_compression import coding
from fedpress_compression.coding.fields import Alphabet, Layout
from fedpress_compression.contexts import CLASSES, grid_of, ranks
from fedpress_compression.tensors import ModelSpec, Vector

DECAY = 0.8
"""Decay of the average per round."""
_LOWEST = 3
"""The map only distinguishes the size >> 3 largest: sparse uploads rarely use the others, and their
octaves would be half of the map."""


def averaged(average: Vector | None, step: Vector) -> Vector:
    """The average [size] after the model moved by `step`; `None` before the first. In float32, each
    operation rounded separately: the same bits on every machine."""
    if average is None:
        average = np.zeros_like(step)
    decayed: Vector = np.float32(DECAY) * average
    decayed += np.float32(1 - DECAY) * np.abs(step)
    return decayed


def to_bytes(average: Vector, spec: ModelSpec) -> bytes:
    """Encode the map of `average` [spec.size]."""
    classes = np.maximum(ranks(average), _LOWEST - 1) - np.uint8(_LOWEST - 1)
    return coding.encode((classes,), _layout(spec))


def from_bytes(data: bytes, spec: ModelSpec) -> Vector:
    """Decode a map into classes [spec.size], numbers with the order of the average; 0 is the
    lowest.

    Raises DecodingError.
    """
    (classes,) = coding.decode(data, _layout(spec))
    return classes.astype(np.float32)


def max_bytes(spec: ModelSpec) -> int:
    """The maximum length of a map for such a model."""
    return spec.size + 8


def _layout(spec: ModelSpec) -> Layout:
    return (Alphabet(CLASSES - _LOWEST + 2, spec.size, "auto", grid_of(spec)),)
