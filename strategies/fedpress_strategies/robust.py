"""Robust aggregation rules, which compare the updates of a round instead of summing them, so that
forged updates have a bounded effect.

All except norm bounding with a fixed norm need all updates at once (`rows.Rows`): 4 bytes on disk
per value of each update, and bounded memory. None of them is linear, so none works on masked
updates, of which a server only learns the sum; there the devices can clip their updates themselves,
with the compressor `clip`.

Unless a rule states otherwise all updates have the same weight: example counts are reported by
clients, and a forged count must not multiply the weight of an update.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fedpress_compression.coding.fields import Alphabet, Integers, Positions, Reals, Symbols
from fedpress_compression.compressor import Compressor, Public
from fedpress_compression.fixed_point import FixedPoint
from fedpress_compression.update import Update
from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan, InvalidUpdate
from fedpress_protocols.plan import RoundPlan
from fedpress_strategies.rows import Rows, memory_for
from fedpress_strategies.strategy import (
    NO_REPORT,
    AggregationSpace,
    Aggregator,
    Delta,
    Properties,
    Report,
    ServerSGD,
    Strategy,
)

Support = npt.NDArray[np.bool_]
"""A mask [size] of the coordinates for which an update has values."""

Weights = npt.NDArray[np.float64]
"""The updates' numbers of examples [number]."""


class Rule(Protocol):
    """An aggregation rule over the rows of a round; a frozen dataclass.

    `coordinatewise`: it treats each coordinate separately, so all updates must have values for the
    same ones. `pairwise`: it needs memory for each pair of updates.
    """

    @property
    def coordinatewise(self) -> bool: ...

    @property
    def pairwise(self) -> bool: ...

    def check(self, number: int) -> None:
        """Raise ConfigurationError if `number` updates are too few."""
        ...

    def combine(self, rows: Rows, weights: Weights) -> Delta:
        """Aggregate the rows into one update [rows.width]."""
        ...


def side_by_side(rule: Rule, learning_rate: float, momentum: float, source: str) -> Strategy:
    """Build the strategy of a rule: server SGD with its aggregate as the gradient."""

    def planned(plan: RoundPlan, public: Public, space: AggregationSpace) -> Aggregator:
        check_lane(plan)
        _check_cohort(rule, plan, space)
        try:
            support = common_support(plan, public)
        except IncompatiblePlan:
            if rule.coordinatewise:
                raise
            support = None
        return SideBySide(rule, public.spec.size, plan.sum_bounds(), space, support)

    return Strategy(
        partial(SideBySide, rule),
        ServerSGD(learning_rate, momentum),
        planned_aggregator=planned,
        properties=Properties(
            server_state="velocity [d]" if momentum else "none",
            memory="fold_memory_bytes, and on disk 4 d n bytes for n uploads",
            source=source,
        ),
    )


class SideBySide:
    """Stores the updates of a round on disk, then aggregates them with `rule`.

    `support` is the mask of coordinates for which all updates have values, if known; the others are
    then left out, also on disk. Without it, a coordinate-wise rule takes updates that
    have values for all coordinates.
    """

    linear = False

    def __init__(
        self,
        rule: Rule,
        size: int,
        fixed_point: FixedPoint,
        space: AggregationSpace | None = None,
        support: Support | None = None,
    ) -> None:
        self._rule = rule
        self._size = size
        self._fixed_point = fixed_point
        self._support = None if support is None or support.all() else support
        width = size if self._support is None else int(self._support.sum())
        self._rows = Rows(width, space or AggregationSpace())
        self._weights: list[int] = []

    def add(self, update: Update, weight: int, report: Report = NO_REPORT) -> None:
        """Add one update; raises InvalidUpdate without adding anything."""
        if update.size != self._size:
            raise InvalidUpdate(f"an update of {update.size} values, expected {self._size}")
        most, max_weight = self._fixed_point.max_weight, sum(self._weights)
        if not 1 <= weight <= most - max_weight:
            raise InvalidUpdate(
                f"weight {weight} on top of {max_weight}, where the plan allows {most} in all"
            )
        update.check(self._fixed_point.max_abs)
        width = self._rows.width
        if (self._rule.coordinatewise or self._support is not None) and not self._fills(update):
            raise InvalidUpdate(f"{_SENTENCE}; the update leaves some of {width} coordinates out")
        values = update.dense()
        self._rows.add(values if self._support is None else values[self._support])
        self._weights.append(weight)

    def result(self) -> Delta:
        """The aggregated update [size] of the round; zeros if nothing was added."""
        whole = np.zeros(self._size)
        if self._weights:
            self._rule.check(len(self._weights))
            combined = self._rule.combine(self._rows, np.array(self._weights, np.float64))
            whole[slice(None) if self._support is None else self._support] += combined
        return whole

    def _fills(self, update: Update) -> bool:
        has_value = support_of(update)
        return bool(
            has_value.all() if self._support is None else (has_value == self._support).all()
        )


# Requirements on the plan

_SENTENCE = (
    "coordinate-wise rules need dense or shared-support updates: the median of client-chosen "
    "top-k is zero nearly everywhere"
)


def check_lane(plan: RoundPlan) -> None:
    """Raise IncompatiblePlan for the masked lane."""
    if plan.lane != "clear":
        raise IncompatiblePlan(
            f"a robust rule needs every update, but the server of the {plan.lane} lane sees the "
            "sum "
            "alone",
            hint="bound the norms on the devices with the compressor clip under fedavg; or choose "
            "the clear lane",
        )


def common_support(plan: RoundPlan, public: Public) -> Support:
    """The coordinates [size] for which every upload of the plan has values.

    Raises IncompatiblePlan if clients choose them, or profiles differ in them. Clients choose them
    if the layout has positions; otherwise two different uploads of each profile are compared.
    """
    supports: list[tuple[str, Support]] = []
    for profile in plan.profiles:
        compressor: Compressor[Any] = profile.compressor
        layout = compressor.layout(public.spec)
        if any(isinstance(field, Positions) for field in layout):
            raise IncompatiblePlan(
                f"{_SENTENCE}; under the profile {profile.name!r} clients choose", hint=_INSTEAD
            )
        for seed in (0, 1):
            with np.errstate(all="ignore"):
                update = compressor.decompress(_any_symbols(compressor, public, seed), public)
            supports.append((profile.name, support_of(update)))
    first, support = supports[0]
    for name, other in supports[1:]:
        if (other != support).any():
            subject = "clients choose" if name == first else f"and {name!r} they are not the same"
            raise IncompatiblePlan(
                f"{_SENTENCE}; under the profile {first!r} {subject}", hint=_INSTEAD
            )
    return support


_INSTEAD = (
    "choose shared_support, randomk with a shared seed, quantize or none, alike in all profiles; "
    "or a rule for whole vectors: multi_krum, geometric_median, norm_bounding"
)


def support_of(update: Update) -> Support:
    """The mask [size] of coordinates for which `update` has values, zeros included."""
    mask = np.zeros(update.size, bool)
    for piece in update.pieces:
        mask[piece.where] = True
    return mask


def _any_symbols(compressor: Compressor[Any], public: Public, seed: int) -> Symbols:
    """Symbols that fill a layout without positions."""
    rng = np.random.default_rng(seed)
    arrays: list[npt.NDArray[np.generic]] = []
    for field in compressor.layout(public.spec):
        match field:
            case Alphabet(size, int(count)):
                arrays.append(rng.integers(0, size, count, np.uint8))
            case Integers(bound, int(count)):
                arrays.append(rng.integers(-bound, bound + 1, count, np.int32))
            case Reals(count):
                arrays.append(np.abs(rng.standard_normal(count)).astype(field.dtype))
            case _:
                raise IncompatiblePlan(f"{compressor} has {field} without positions before it")
    return tuple(arrays)


def _check_cohort(rule: Rule, plan: RoundPlan, space: AggregationSpace) -> None:
    """Check the rule for every possible number of uploads: the cohort's minimum to its size."""
    required = memory_for(plan.cohort.size, pairwise=rule.pairwise)
    if required > space.memory:
        raise IncompatiblePlan(
            f"comparing {plan.cohort.size} updates takes {required} bytes of memory, but the "
            f"server allows {space.memory}",
            hint="raise the setting fold_memory_bytes, or choose a smaller cohort",
        )
    for number in range(plan.cohort.minimum, plan.cohort.size + 1):
        try:
            rule.check(number)
        except ConfigurationError as exc:
            raise IncompatiblePlan(
                f"a round may close with {number} uploads, and {exc.detail}",
                hint="raise the cohort's minimum, or configure the rule for fewer forged updates",
            ) from exc


# Shared by the rules


def check_share(name: str, share: float) -> None:
    """Raise ConfigurationError unless 0 <= share < 1/2, the limit of any robust rule."""
    if not 0 <= share < 0.5:
        raise ConfigurationError(f"{name} must lie in [0, 0.5), not {share}")


def part_of(share: float, number: int) -> int:
    """`share` of `number` updates, rounded up."""
    return math.ceil(round(share * number, 6))


def check_enough(rule: str, number: int, least: int) -> None:
    """Raise ConfigurationError if `number` updates are fewer than the `least`."""
    if number < least:
        raise ConfigurationError(f"{rule} needs at least {least} updates, not {number}")
