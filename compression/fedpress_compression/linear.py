"""The linear half of a compressor that commutes with the sum, before anything is rounded.

Where updates are masked, what compression leaves has to become small integers whose sum over the
cohort is bounded exactly. The payload of the masked lane does that for every method alike; the
method says which numbers stand for an update, and how large each is to be expected.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from fedpress_compression.compressor import Public, check_finite, members
from fedpress_compression.errors import IncompatiblePlan
from fedpress_compression.matrices import root_mean_square
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Indices, Piece, Update

Numbers = npt.NDArray[np.float64]


class LinearMap(Protocol):
    """An update to n numbers, and numbers to an update; sums to sums. n, `spread` and `lift` are
    the same bits at both ends."""

    @property
    def spread(self) -> Numbers:
        """[n]: the root mean square to expect of each number by `previous`; 0 if it tells none."""
        ...

    def project(self, update: Vector) -> Numbers:
        """The numbers [n] that stand for `update` [spec.size]; raises InvalidUpdate on NaN."""
        ...

    def lift(self, numbers: Numbers) -> Update:
        """The update that `numbers` [n] stand for."""
        ...


@runtime_checkable
class Linear(Protocol):
    """A compressor whose symbols are numbers of a linear map, rounded."""

    def linear_map(self, public: Public) -> LinearMap:
        """The map of this round."""
        ...


@dataclass(frozen=True)
class Coordinates:
    """The map to an update's own values, at a support or everywhere; `gain` times them, lifted.

    The spread of each is the root mean square of `previous` over those of its tensor's coordinates
    that are of the support and have moved; if none has, over those of all tensors.
    """

    public: Public
    support: Indices | None = None
    gain: float = 1.0

    @cached_property
    def spread(self) -> Numbers:
        previous = self.public.known("previous")
        values = previous if self.support is None else previous[self.support]
        overall = _of_moved(values)
        spread = np.empty(values.size)
        for tensor in self.public.spec.slices.values():
            part = tensor
            if self.support is not None:
                first, last = np.searchsorted(self.support, [tensor.start, tensor.stop])
                part = slice(int(first), int(last))
            spread[part] = _of_moved(values[part]) or overall
        return spread

    def project(self, update: Vector) -> Numbers:
        check_finite(update, self.public.spec)
        values = update if self.support is None else update[self.support]
        return values.astype(np.float64)

    def lift(self, numbers: Numbers) -> Update:
        size = self.public.spec.size
        where = slice(0, size) if self.support is None else self.support
        return Update(size, (Piece(where, (numbers * self.gain).astype(np.float32)),))


def _of_moved(values: Vector) -> float:
    return root_mean_square(values.astype(np.float64), int(np.count_nonzero(values)))


@dataclass(frozen=True)
class SideBySide:
    """The maps of several groups of tensors, by their names, one after the other."""

    spec: ModelSpec
    groups: tuple[tuple[LinearMap, tuple[str, ...]], ...]

    @cached_property
    def spread(self) -> Numbers:
        return np.concatenate([np.empty(0), *(inner.spread for inner, _ in self.groups)])

    def project(self, update: Vector) -> Numbers:
        projections = [
            inner.project(np.concatenate([update[self.spec.slices[name]] for name in names]))
            for inner, names in self.groups
        ]
        return np.concatenate([np.empty(0), *projections])

    def lift(self, numbers: Numbers) -> Update:
        pieces: list[Piece] = []
        start = 0
        for inner, names in self.groups:
            stop = start + inner.spread.size
            slices = tuple(self.spec.slices[name] for name in names)
            pieces.extend(inner.lift(numbers[start:stop]).placed(slices, self.spec.size).pieces)
            start = stop
        return Update(self.spec.size, tuple(pieces))


def as_linear(made: Any) -> Linear:
    """`made`, or what is in it if that is error feedback; raises IncompatiblePlan where it cannot
    be summed under masks."""
    inner = made.lossy
    if not inner.commutes_with_sum:
        raise IncompatiblePlan(
            f"{inner} does not commute with the sum: under masks nothing adds up but whole numbers "
            "at coordinates that the cohort has in common",
            hint="use shared_support, powersgd_onesided or count_sketch, randomk with bits or "
            "quantize with a clip; or the clear lane",
        )
    if not isinstance(inner, Linear):
        raise IncompatiblePlan(
            f"{inner} makes symbols of its own, and the masked lane rounds to a grid of its own",
            hint="use shared_support, randomk, quantize, powersgd_onesided or count_sketch; clip, "
            "per_tensor and error_feedback may go around them",
        )
    for member in members(inner):
        as_linear(member)
    return inner


def restricts(made: Any) -> bool:
    """Whether updates under `made` have a support that the whole cohort knows before training: a
    compressor that has says so by an attribute `restricts`, and has a method `support(public)`."""
    return bool(getattr(made.lossy, "restricts", False))


def has_public_support(made: Any) -> bool:
    """Whether an update's data has no say in which coordinates are sent, as under compressors that
    send all (by an attribute `sends_all`), that restrict the support, or that are linear."""
    inner = made.lossy
    inside = list(members(inner))
    if inside:
        return all(map(has_public_support, inside))
    is_linear = inner.commutes_with_sum and isinstance(inner, Linear)
    return is_linear or restricts(inner) or bool(getattr(inner, "sends_all", False))


def support_of(made: Any, public: Public) -> Indices | None:
    """The only coordinates that updates under `made` can move, rising; None: any."""
    return made.lossy.support(public) if restricts(made) else None
