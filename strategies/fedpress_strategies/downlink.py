"""Models published by a task with a downlink: on a grid, each a few bits from the previous one.

The strategy goes on with its own parameters, in float32, as if nothing were rounded. Published is
what a device has that follows the coded steps, and whatever a step leaves out is in the difference
of the two, from which the next step is taken: error feedback on the server's side (DoubleSqueeze,
Tang et al. 2019, arXiv:1905.05957, Algorithm 1), with the parameters kept in place of the error.
Tensors of float16 and bfloat16 are published in these; what the rounding leaves out is part of it.

Running statistics are another matter: they are measured anew in each round, and have no remainder.
They are published as soon as they are a 64th off, variances by their size and means by their
deviation, since that may be far less than a step of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedpress_compression.running_statistics import normalisations
from fedpress_compression.tensors import ModelSpec, TensorSpec, Vector
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

_DROPPED = 16
"""Low bits of a threshold that are zero: it has seven bits of fraction."""
_STATISTIC_BITS = 20
"""Of the grid of a layer's running statistics, which differ by orders of magnitude."""
_OFF = 1 / 64
"""The part of its scale by which a published statistic may be off."""
_LEAST_SCALE = 2.0**-40
_BITS_OF_A_MOVE = 40
"""An upper bound on the bits of the position and length of one coordinate."""


def rounded(model: Model, terms: DownlinkTerms) -> Model:
    """The first model of a task: every tensor on the finest grid of `terms.bits` bits; a model
    that such a task has published stays as it is. Raises ConfigurationError."""
    values, settled = np.empty_like(model.parameters), _settled(model.spec)
    for tensor, where in zip(model.spec.trained, model.spec.slices.values(), strict=True):
        bits = max(terms.bits, _STATISTIC_BITS) if tensor.name in settled else terms.bits
        values[where] = on_grid(tensor, model.parameters[where], bits)
    return model.with_parameters(values)


def stepped(base: Model, target: Vector, terms: DownlinkTerms) -> Model:
    """The model to publish after `base`: as near to `target` [size] as `terms.rate` allows, or
    MIN_BYTES of a difference; running statistics come besides.

    Of the others only coordinates at least a threshold away from their target move, in all tensors
    by multiples of one step, so that the remainder costs the same everywhere. The step is eleven
    eighths of the threshold, rounded to eighths of a power of two: about the mean of the distances
    beyond it. The threshold is the lowest, of 128 per octave, whose coded difference fits; the
    farthest coordinates always move. Computed from integers and exact sums alone: the same bits on
    every machine.
    """
    if not np.isfinite(target).all():
        raise ConfigurationError("the model holds NaN or infinity")
    budget = max(int(terms.rate * base.spec.size / 8), MIN_BYTES)
    begun = _with_statistics(base, target)
    parts = _parts(base, target, terms)
    least, most = _thresholds(parts, 8 * budget)
    if begun is not base:
        budget += len(encode_difference(base, begun, terms.coder))
    best = _moved(begun, parts, most)
    while least < most:  # invariant: `most` fits, anything below `least` does not
        middle = (least + most) // 2
        candidate = _moved(begun, parts, middle)
        if len(encode_difference(base, candidate, terms.coder)) <= budget:
            best, most = candidate, middle
        else:
            least = middle + 1
    return best


def _settled(spec: ModelSpec) -> set[str]:
    """The names of tensors that `_with_statistics` deals with."""
    return {each.name for pair in normalisations(spec) for each in pair if each is not None}


def _with_statistics(base: Model, target: Vector) -> Model:
    """`base` with the running statistics that are to be published next; the very same where they
    stay. No variance falls to less than a tenth."""
    before, after = base.parameters, base.parameters.copy()
    for variances, means in normalisations(base.spec):
        where = base.spec.slices[variances.name]
        due = np.maximum(target[where], before[where].astype(np.float64) / 10)
        after[where] = _near(variances, before[where], due, due, np.ceil)
        if means is not None:
            there = base.spec.slices[means.name]
            deviations = np.sqrt(np.maximum(after[where].astype(np.float64), 0.0))
            after[there] = _near(means, before[there], target[there], deviations, np.rint)
    return base if np.array_equal(after, before) else base.with_parameters(after)


def _near(
    tensor: TensorSpec,
    before: Vector,
    due: npt.NDArray[np.floating[Any]],
    scale: npt.NDArray[np.float64],
    rounded: Callable[..., npt.NDArray[np.float64]],
) -> Vector:
    """The statistics of a tensor: those that are off `rounded` to powers of two of their `scale`,
    and all on a grid."""
    allowed = _OFF * np.maximum(scale, _LEAST_SCALE)
    _, powers = np.frexp(allowed)
    steps = np.ldexp(1.0, powers - 1)  # at most what is allowed
    is_off = np.abs(due - before.astype(np.float64)) > allowed
    values = np.where(is_off, rounded(due / steps) * steps, before)
    largest = np.abs(values).max(initial=0.0)
    exponent = finest(np.array([largest], np.float32), _STATISTIC_BITS)
    if exponent is None:
        return np.zeros_like(before)
    whole = rounded(np.ldexp(values, exponent)).astype(np.int64)
    return rounded_to_stored(tensor, valued(whole, exponent))


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
    parts, settled = [], _settled(base.spec)
    for tensor, where in zip(base.spec.trained, base.spec.slices.values(), strict=True):
        if tensor.name in settled:
            continue
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


def _moved(begun: Model, parts: Sequence[_Part], threshold: int) -> Model:
    bits = np.uint32(threshold << _DROPPED)
    fraction, power = np.frexp(bits.view(np.float32))
    eighths = round(11 * float(fraction))  # 6 to 11; the product is exact
    parameters = begun.parameters.copy()
    for part in parts:
        parameters[part.where] = part.moved(bits, eighths, 3 - int(power))
    return begun.with_parameters(parameters)


__all__ = ["rounded", "stepped"]
