"""Synthetic updates for predictions, uneven over layers, rows and columns, half of them zero.

What a body costs hangs on how uneven an update is: where a few layers have the large values, their
positions are cheap, and what does not move at all quantises to zero. The constants were chosen so
that the profiles' bodies come near those of the digits task, means over 100 rounds;
docs/planning.md has both side by side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedpress.update_file import Updates
from fedpress_compression.tensors import ModelSpec, Vector

_LAYERS = 0.4
_BIASES = 1.3
_ROUGH = 0.3
_GRAIN = 0.1
_STILL = 0.45
_SHARED = 0.85
_SCALE = 1e-3
_LAST_STEP = 1 / 3


@dataclass(frozen=True)
class Drawn:
    """Updates of one device, round by round, and the model's last step [spec.size]."""

    spec: ModelSpec
    updates: tuple[Vector, ...]
    previous: Vector

    @classmethod
    def real(cls, recorded: Updates) -> Drawn:
        """Those of a file, one client's after the other as if they were one's; the first twice,
        since what a device uploads first is not measured."""
        updates = tuple(recorded.updates)
        known = recorded.public.knowledge.get("previous")
        previous = np.zeros(recorded.spec.size, np.float32) if known is None else known
        return cls(recorded.spec, (updates[0], *updates), previous)

    @classmethod
    def of(cls, spec: ModelSpec, num: int, seed: int = 0) -> Drawn:
        """`num` updates of normal values, times scales that all of them have in common.

        A matrix of n values is at n**-_LAYERS, biases at _BIASES times the matrix before; rows and
        columns of matrices stand still, the part _STILL of them, or have a log-normal factor
        (_ROUGH), as has every value (_GRAIN). An update has the part _SHARED of its values from
        what makes the last step, the rest is its own.
        """
        rng = np.random.default_rng(seed)
        scales = _scales(spec, rng)
        common = scales * rng.standard_normal(spec.size)
        own = math.sqrt(1 - _SHARED**2)
        updates = tuple(
            (_SHARED * common + own * scales * rng.standard_normal(spec.size)).astype(np.float32)
            for _ in range(num)
        )
        return cls(spec, updates, (_LAST_STEP * common).astype(np.float32))


def _scales(spec: ModelSpec, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    scales = np.empty(spec.size)
    layer = 1.0
    for tensor in spec.trained:
        is_matrix = len(tensor.shape) > 1
        rows = tensor.shape[0] if is_matrix else 1
        columns = tensor.size // max(1, rows)
        if is_matrix:
            layer = max(1, tensor.size) ** -_LAYERS
        matrix = np.full((rows, columns), layer if is_matrix else _BIASES * layer)
        matrix *= _along((rows, 1), is_matrix, rng) * _along((1, columns), is_matrix, rng)
        matrix *= np.exp(_GRAIN * rng.standard_normal(matrix.shape))
        scales[spec.slices[tensor.name]] = matrix.ravel()
    largest = scales.max()
    return scales * (_SCALE / largest) if largest else np.full(spec.size, _SCALE)


def _along(
    shape: tuple[int, int], can_be_still: bool, rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    factors: npt.NDArray[np.float64] = np.exp(_ROUGH * rng.standard_normal(shape))
    if not can_be_still:
        return factors
    moves = np.arange(factors.size) >= round(_STILL * factors.size)
    factors *= rng.permutation(moves).reshape(shape)
    return factors
