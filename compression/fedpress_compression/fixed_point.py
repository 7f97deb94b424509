"""Order-independent sums: int64 fixed point with a scale declared by the plan.

A float sum depends on the order of its terms, so a restart or a second replica would give another
model. Integers do not: weight * rint(value * 2**scale_bits) is added exactly, and the plan's bounds
exclude overflow before the round starts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedpress_compression import kernels
from fedpress_compression.coding.alphabets import Grouped
from fedpress_compression.errors import IncompatiblePlan, InvalidUpdate
from fedpress_compression.update import Tabled, Update

MAX_SCALE_BITS = 52
FINEST_BITS = 32
"""Fractional bits of sums, at most, unless more are asked for."""
_BLOCK = 2**18
"""Values that are divided at a time."""


@dataclass(frozen=True, slots=True)
class FixedPoint:
    """Values up to `max_abs` in steps of 2**-scale_bits, weights that sum to `max_weight`."""

    scale_bits: int
    max_abs: float
    max_weight: int

    def __post_init__(self) -> None:
        if not 0 <= self.scale_bits <= MAX_SCALE_BITS:
            raise IncompatiblePlan(f"scale_bits of {self.scale_bits} outside [0, {MAX_SCALE_BITS}]")
        if not 0 < self.max_abs < 2**52:
            raise IncompatiblePlan(f"max_abs of {self.max_abs:g} outside (0, 2**52)")
        if self.max_weight < 1:
            raise IncompatiblePlan(f"max_weight of {self.max_weight}, which must be at least 1")
        if (int(self.max_abs * 2.0**self.scale_bits) + 1) * self.max_weight >= 2**63:
            raise IncompatiblePlan(
                f"weights of {self.max_weight} in all times values up to {self.max_abs:g} in steps "
                f"of 2**-{self.scale_bits} can overflow 63 bits",
                hint="lower max_examples, max_abs, the cohort or scale_bits",
            )

    @classmethod
    def widest(
        cls, *, max_abs: float, max_weight: int, scale_bits: int = FINEST_BITS
    ) -> FixedPoint:
        """The finest scale up to `scale_bits` that cannot overflow; IncompatiblePlan if none."""
        for bits in range(scale_bits, 0, -1):
            if (int(max_abs * 2.0**bits) + 1) * max_weight < 2**63:
                return cls(bits, max_abs, max_weight)
        return cls(1, max_abs, max_weight)


class Accumulator:
    """The weighted sum of updates over `size` coordinates; 8 bytes each, whatever their number.

    `total` [size]: zeros that hold the sum, if it is to lie elsewhere than in memory.
    """

    def __init__(
        self, size: int, fixed_point: FixedPoint, total: npt.NDArray[np.int64] | None = None
    ) -> None:
        self.fixed_point = fixed_point
        self.total: npt.NDArray[np.int64] = np.zeros(size, np.int64) if total is None else total
        self.weight = 0

    def add(self, update: Update, weight: int) -> None:
        """Add `weight` times `update`; raises InvalidUpdate without adding anything."""
        self._check(update.size, weight)
        update.check(self.fixed_point.max_abs)
        scale = 2.0**self.fixed_point.scale_bits
        for piece in update.pieces:
            if isinstance(piece.where, slice):
                kernels.add_scaled(self.total[piece.where], piece.values, scale, weight)
            else:
                kernels.add_scaled_at(self.total, piece.where, piece.values, scale, weight)
        self.weight += weight

    def add_tabled(self, tabled: Tabled, weight: int) -> bool:
        """Add the update that `tabled` represents, with the same sum to the last bit, without
        materializing its values. Returns False and does nothing if values might exceed the bounds.

        Raises InvalidUpdate or DecodingError without adding anything.
        """
        if not float(np.abs(tabled.tables).max(initial=0.0)) <= self.fixed_point.max_abs:
            return False
        self._check(tabled.size, weight)
        scaled = np.rint(tabled.tables.astype(np.float64) * 2.0**self.fixed_point.scale_bits)
        steps = scaled.astype(np.int64) * np.int64(weight)
        if isinstance(tabled.symbols, Grouped):
            tabled.symbols.add_to(self.total, tabled.ends, steps)
        else:
            kernels.add_table_at(self.total, tabled.where, tabled.symbols, steps[0])
        self.weight += weight
        return True

    def add_sums(self, total: npt.NDArray[np.int64], weight: int) -> None:
        """Add the sums of another accumulator with these bounds; raises InvalidUpdate without
        adding anything."""
        if weight or total.any():
            self._check(total.size, weight)
            self.total += total
            self.weight += weight

    def _check(self, size: int, weight: int) -> None:
        if size != self.total.size:
            raise InvalidUpdate(f"an update of {size} values, expected {self.total.size}")
        if not 1 <= weight <= self.fixed_point.max_weight - self.weight:
            raise InvalidUpdate(
                f"weight {weight} on top of {self.weight}, where the plan allows "
                f"{self.fixed_point.max_weight} in all"
            )

    def mean(self) -> npt.NDArray[np.float64]:
        """The weighted mean [size]; zeros if nothing was added."""
        return self.total / self._divisor

    def into_mean(self) -> npt.NDArray[np.float64]:
        """The weighted mean [size] in the memory of `total`, which is empty afterwards."""
        total, self.total = self.total, np.zeros(0, np.int64)
        mean = total.view(np.float64)
        for start in range(0, total.size, _BLOCK):
            here = slice(start, start + _BLOCK)
            mean[here] = total[here] / self._divisor
        return mean

    @property
    def _divisor(self) -> float:
        return max(self.weight, 1) * 2.0**self.fixed_point.scale_bits
