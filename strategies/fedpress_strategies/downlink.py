"""Models published by a task with a downlink: on a grid, each a few bits from the previous one.

The strategy goes on with its own parameters, in float32, as if nothing were rounded. Published is
what a device has that follows the coded steps, and whatever a step leaves out is in the difference
of the two, from which the next step is taken: error feedback on the server's side (DoubleSqueeze,
Tang et al. 2019, arXiv:1905.05957, Algorithm 1), with the parameters kept in place of the error.
Tensors of float16 and bfloat16 are published in these; what the rounding leaves out is part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedpress_compression.tensors import TensorSpec, Vector
from fedpress_protocols.defaults import MIN_BYTES
from fedpress_protocols.downlink import (
    encode_difference,
    finest,
    multiples,
    on_grid,
    valued,
)
from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.messages import DownlinkTerms
from fedpress_protocols.model import Model, rounded_to_stored
from fedpress_strategies.running_statistics import without_falls_of_variances

_DROPPED = 16
"""Low bits of a threshold that are zero: it has seven bits of fraction."""
_BITS_OF_A_MOVE = 40
"""An upper bound on the bits of the position and length of one coordinate."""


def rounded(model: Model, terms: DownlinkTerms) -> Model:
    """The first model of a task: every tensor on the finest grid of `terms.bits` bits; a model
    that such a task has published stays as it is. Raises ConfigurationError."""
    values = np.empty_like(model.parameters)
    for tensor, where in zip(model.spec.trained, model.spec.slices.values(), strict=True):
        values[where] = on_grid(tensor, model.parameters[where], terms.bits)
    return model.with_parameters(values)


def stepped(base: Model, target: Vector, terms: DownlinkTerms) -> Model:
    """The model to publish after `base`: as near to `target` [size] as `terms.rate` allows, or
    MIN_BYTES of a difference.

    Only coordinates at least a threshold away from their target move, in all tensors by multiples
    of one step, so that the remainder costs the same everywhere. The step is eleven eighths of the
    threshold, rounded to eighths of a power of two: about the mean of the distances beyond it. The
    threshold is the lowest, of 128 per octave, whose coded difference fits; the farthest
    coordinates always move, but no variance by a step that takes it below a tenth. Computed from
    integers and exact sums alone: the same bits on every machine.
    """
    if not np.isfinite(target).all():
        raise ConfigurationError("the model holds NaN or infinity")
    budget = max(int(terms.rate * base.spec.size / 8), MIN_BYTES)
    parts = _parts(base, target, terms)
    least, most = _thresholds(parts, 8 * budget)
    best = _moved(base, parts, most)
    while least < most:  # invariant: `most` fits, anything below `least` does not
        middle = (least + most) // 2
        candidate = _moved(base, parts, middle)
        if len(encode_difference(base, candidate, terms.coder)) <= budget:
            best, most = candidate, middle
        else:
            least = middle + 1
    kept = without_falls_of_variances(base.spec, base.parameters, best.parameters)
    return best if kept is best.parameters else best.with_parameters(kept)


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor with a nonzero value before or after: the published values in steps of the grid of
    2**-exponent, and the distance of the target in these steps."""

    tensor: TensorSpec
    where: slice
    exponent: int
    whole: npt.NDArray[np.int64]
    gap: npt.NDArray[np.float64]

    @property
    def distances(self) -> npt.NDArray[np.uint32]:
        """The magnitudes of the gaps as bits of float32, which have the same order."""
        far = np.abs(self.gap) * 2.0**-self.exponent
        return far.astype(np.float32).view(np.uint32)

    def moved(self, threshold: np.uint32, factor: int, exponent: int) -> Vector:
        """The values after moving all that are `threshold` or more away, in steps of `factor`
        2**-exponent, or near it where the grid is coarser."""
        finer = self.exponent - exponent
        step = factor << finer if finer >= 0 else max(1, (factor + (1 << -finer >> 1)) >> -finer)
        moves = np.where(self.distances >= threshold, self.gap, 0.0) / step
        values = valued(self.whole + np.rint(moves).astype(np.int64) * step, self.exponent)
        return rounded_to_stored(self.tensor, values)


def _parts(base: Model, target: Vector, terms: DownlinkTerms) -> list[_Part]:
    parts = []
    for tensor, where in zip(base.spec.trained, base.spec.slices.values(), strict=True):
        before, after = base.parameters[where], target[where]
        largest = np.maximum(np.abs(before), np.abs(after)).max(initial=np.float32(0))
        exponent = finest(np.array([largest], np.float32), terms.bits)
        if exponent is None:
            continue
        whole = multiples(before, exponent)
        gap = (after.astype(np.float64) - valued(whole, exponent)) * 2.0**exponent
        parts.append(_Part(tensor, where, exponent, whole, gap))
    return parts


def _thresholds(parts: Sequence[_Part], num_bits: int) -> tuple[int, int]:
    """The range of thresholds, as upper halves of float32: at the low end at most `num_bits`
    coordinates move, since each costs at least a bit; at the high end so few that they fit in any
    code, or the farthest alone."""
    counts = np.zeros(1 << (32 - _DROPPED), np.int64)
    for part in parts:
        counts += np.bincount(part.distances >> np.uint32(_DROPPED), minlength=counts.size)
    at_least = np.cumsum(counts[::-1])[::-1]
    finest_move = min((2.0 ** -(part.exponent + 1) for part in parts), default=1.0)
    floor = int(np.float32(finest_move).view(np.uint32)) >> _DROPPED
    farthest = int(np.flatnonzero(counts).max(initial=0))
    least = int(np.argmax(at_least <= num_bits))
    most = int(np.argmax(at_least <= num_bits // _BITS_OF_A_MOVE))
    most = max(floor, min(most, farthest))
    return min(max(least, floor), most), most


def _moved(base: Model, parts: Sequence[_Part], threshold: int) -> Model:
    bits = np.uint32(threshold << _DROPPED)
    fraction, power = np.frexp(bits.view(np.float32))
    eighths = round(11 * float(fraction))  # 6 to 11; the product is exact
    parameters = np.zeros_like(base.parameters)
    for part in parts:
        parameters[part.where] = part.moved(bits, eighths, 3 - int(power))
    return base.with_parameters(parameters)


__all__ = ["rounded", "stepped"]
