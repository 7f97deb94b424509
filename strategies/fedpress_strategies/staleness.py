"""The mean of updates trained from different models, discounted by staleness.

The staleness of an update is the number of models published since its own. It is only known when
the update is added: no client can weight its upload by it, so such sums cannot be masked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fedpress_compression.fixed_point import Accumulator, FixedPoint
from fedpress_compression.update import Update
from fedpress_protocols.errors import ConfigurationError, InvalidUpdate
from fedpress_strategies.strategy import NO_REPORT, Delta, Part, Report

UNIT = 2**10
"""The weight of an example in a fresh update; stale ones weigh an integer share of it."""


class Discount(Protocol):
    """The weight of an update by its staleness (0 or more): 1 for 0, never more."""

    def __call__(self, staleness: int) -> float: ...


@dataclass(frozen=True, slots=True)
class Polynomial:
    """(1 + staleness) ** -exponent; exponent 0 means no discount."""

    exponent: float = 0.5

    def __post_init__(self) -> None:
        if not self.exponent >= 0:
            raise ConfigurationError(f"exponent must be at least 0, not {self.exponent}")

    def __call__(self, staleness: int) -> float:
        return float((1.0 + staleness) ** -self.exponent)


@dataclass(frozen=True, slots=True)
class Hinge:
    """1 up to a staleness of `free`, then 1 / (1 + slope * (staleness - free))."""

    slope: float = 10.0
    free: int = 4

    def __post_init__(self) -> None:
        if not self.slope >= 0 or self.free < 0:
            raise ConfigurationError(
                f"slope and free must be at least 0, free a whole number, not {self.slope} and "
                f"{self.free}"
            )

    def __call__(self, staleness: int) -> float:
        return 1.0 / (1.0 + self.slope * max(staleness - self.free, 0))


class DiscountedMean:
    """The sum of examples * discount(staleness) * update, over the number of examples: a buffer of
    stale updates makes a shorter step.

    The sum is exact in any order. A weight is examples times an integer in [1, UNIT], the discount
    rounded to a share of UNIT, so one update may weigh UNIT times the maximum of `fixed_point`; if
    63 bits are not enough for that, the steps are coarser accordingly.

    A caller that adds to `sums` with a weight from `weight_of`, as `decode_add` does with an
    upload's bytes, must call `count`. With `mixes` a stale update counts from the newest model, not
    its own: the caller adds the difference of its model to the newest.
    """

    linear = False

    def __init__(
        self,
        size: int,
        fixed_point: FixedPoint,
        discount: Discount,
        *,
        weighted: bool = True,
        mixes: bool = False,
    ) -> None:
        bounds = FixedPoint.widest(
            max_abs=fixed_point.max_abs,
            max_weight=fixed_point.max_weight * UNIT,
            scale_bits=fixed_point.scale_bits,
        )
        self.sums = Accumulator(size, bounds)
        self.mixes = mixes
        self._discount, self._weighted = discount, weighted
        self._max_weight = fixed_point.max_weight
        self._counted = 0

    def weight_of(self, num_examples: int, staleness: int) -> int:
        """The weight of an upload; raises InvalidUpdate beyond the plan's bounds."""
        examples = self._examples(num_examples)
        if not 1 <= examples <= self._max_weight - self._counted:
            raise InvalidUpdate(
                f"weight {examples} on top of {self._counted}, where the plan allows "
                f"{self._max_weight} in all"
            )
        return examples * max(1, round(UNIT * self._discount(staleness)))

    def count(self, num_examples: int) -> None:
        """Count an upload that was added to `sums`."""
        self._counted += self._examples(num_examples)

    def add(
        self, update: Update, weight: int, report: Report = NO_REPORT, staleness: int = 0
    ) -> None:
        """Add one update of `weight` examples; raises InvalidUpdate without adding anything."""
        self.sums.add(update, self.weight_of(weight, staleness))
        self.count(weight)

    def part(self) -> Part:
        counts = np.array([self.sums.weight, self._counted])
        return {"total": self.sums.total, "counts": counts}

    def merge(self, part: Part) -> None:
        weight, counted = map(int, part["counts"])
        if counted > self._max_weight - self._counted:
            raise InvalidUpdate(
                f"weight {counted} on top of {self._counted}, where the plan allows "
                f"{self._max_weight} in all"
            )
        self.sums.add_sums(part["total"], weight)
        self._counted += counted

    def result(self) -> Delta:
        share = self.sums.weight / (UNIT * max(self._counted, 1))
        return self.sums.mean() * share

    def _examples(self, num_examples: int) -> int:
        return num_examples if self._weighted else 1
