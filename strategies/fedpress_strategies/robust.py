"""Rules that compare the updates of a round instead of adding them up, so that a share of forged
ones moves the result only so far.

All but norm bounding with a given norm need the updates side by side (`rows.Rows`): 4 bytes on the
disk for each value of each update, and memory within a limit. None of them is linear, so none works
on masked updates, of which a server learns the sum alone; there the devices can bound their norms
themselves, by the compressor `clip`.

Unless a rule says otherwise every update counts alike: how many examples a client has is its own
word, and a rule for which one update in ten is nothing must not be told that it is nine.
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
    Aggregator,
    Delta,
    FoldSpace,
    Properties,
    Report,
    ServerSGD,
    Strategy,
)

Support = npt.NDArray[np.bool_]
"""Which coordinates [size] an update has values for."""

Weights = npt.NDArray[np.float64]
"""The updates' numbers of examples [number]."""


class Rule(Protocol):
    """What becomes of the rows of a round; a frozen dataclass.

    `coordinatewise`: it looks at each coordinate by itself, so that all updates must have values
    for the same ones. `pairwise`: it keeps something for each pair of updates.
    """

    @property
    def coordinatewise(self) -> bool: ...

    @property
    def pairwise(self) -> bool: ...

    def check(self, number: int) -> None:
        """Raise ConfigurationError if `number` updates are too few."""
        ...

    def combine(self, rows: Rows, weights: Weights) -> Delta:
        """One update [rows.width] for all."""
        ...


def side_by_side(rule: Rule, learning_rate: float, momentum: float, source: str) -> Strategy:
    """The strategy of a rule: what it makes of the updates is the step that SGD on the server
    takes."""

    def planned(plan: RoundPlan, public: Public, space: FoldSpace) -> Aggregator:
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
    """Keeps the updates of a round on the disk, then lets `rule` make one of them.

    `support` names the coordinates that all updates have values for, if that is known; the others
    are then left out, on the disk as well. Without it, a coordinate-wise rule takes updates that
    have values for all coordinates.
    """

    linear = False

    def __init__(
        self,
        rule: Rule,
        size: int,
        fixed_point: FixedPoint,
        space: FoldSpace | None = None,
        support: Support | None = None,
    ) -> None:
        self._rule = rule
        self._size = size
        self._fixed_point = fixed_point
        self._support = None if support is None or support.all() else support
        width = size if self._support is None else int(self._support.sum())
        self._rows = Rows(width, space or FoldSpace())
        self._weights: list[int] = []

    def add(self, update: Update, weight: int, report: Report = NO_REPORT) -> None:
        """Take one update in; raises InvalidUpdate, and then nothing was added."""
        if update.size != self._size:
            raise InvalidUpdate(f"an update of {update.size} values, expected {self._size}")
        most, given = self._fixed_point.max_weight, sum(self._weights)
        if not 1 <= weight <= most - given:
            raise InvalidUpdate(
                f"weight {weight} on top of {given}, where the plan allows {most} in all"
            )
        update.check(self._fixed_point.max_abs)
        due = self._rows.width
        if (self._rule.coordinatewise or self._support is not None) and not self._fills(update):
            raise InvalidUpdate(f"{_SENTENCE}; the update leaves some of {due} coordinates out")
        values = update.dense()
        self._rows.add(values if self._support is None else values[self._support])
        self._weights.append(weight)

    def result(self) -> Delta:
        """One update [size] for the round; zeros if nothing was added."""
        whole = np.zeros(self._size)
        if self._weights:
            self._rule.check(len(self._weights))
            combined = self._rule.combine(self._rows, np.array(self._weights, np.float64))
            whole[slice(None) if self._support is None else self._support] += combined
        return whole

    def _fills(self, update: Update) -> bool:
        found = support_of(update)
        return bool(found.all() if self._support is None else (found == self._support).all())


# What a plan must be like

_SENTENCE = (
    "coordinate-wise rules need dense or shared-support updates: the median of client-chosen "
    "top-k is zero nearly everywhere"
)


def check_lane(plan: RoundPlan) -> None:
    """Raise IncompatiblePlan for the masked lane."""
    if plan.lane != "clear":
        raise IncompatiblePlan(
            f"a robust rule looks at every update, and of the {plan.lane} lane's it sees the sum "
            "alone",
            hint="bound the norms on the devices, by the compressor clip, under fedavg; or choose "
            "the clear lane",
        )


def common_support(plan: RoundPlan, public: Public) -> Support:
    """The coordinates [size] for which every upload of the plan has values.

    Raises IncompatiblePlan where clients choose them, or profiles differ in them. Clients choose
    them where positions travel; otherwise two unlike uploads of each profile are decompressed.
    """
    found: list[tuple[str, Support]] = []
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
            found.append((profile.name, support_of(update)))
    first, support = found[0]
    for name, other in found[1:]:
        if (other != support).any():
            who = "clients choose" if name == first else f"and {name!r} they are not the same"
            raise IncompatiblePlan(f"{_SENTENCE}; under the profile {first!r} {who}", hint=_INSTEAD)
    return support


_INSTEAD = (
    "choose shared_support, randomk with a shared seed, quantize or none, alike in all profiles; "
    "or a rule for whole vectors: multi_krum, geometric_median, norm_bounding"
)


def support_of(update: Update) -> Support:
    """The coordinates [size] that `update` has values for, zeros among them."""
    found = np.zeros(update.size, bool)
    for piece in update.pieces:
        found[piece.where] = True
    return found


def _any_symbols(compressor: Compressor[Any], public: Public, seed: int) -> Symbols:
    """Symbols that fill a layout without positions."""
    rng = np.random.default_rng(seed)
    made: list[npt.NDArray[np.generic]] = []
    for field in compressor.layout(public.spec):
        match field:
            case Alphabet(size, int(count)):
                made.append(rng.integers(0, size, count, np.uint8))
            case Integers(bound, int(count)):
                made.append(rng.integers(-bound, bound + 1, count, np.int32))
            case Reals(count):
                made.append(np.abs(rng.standard_normal(count)).astype(field.dtype))
            case _:
                raise IncompatiblePlan(f"{compressor} has {field} without positions before it")
    return tuple(made)


def _check_cohort(rule: Rule, plan: RoundPlan, space: FoldSpace) -> None:
    """A round may close with any number of uploads from the cohort's minimum to its size."""
    needed = memory_for(plan.cohort.size, pairwise=rule.pairwise)
    if needed > space.memory:
        raise IncompatiblePlan(
            f"to compare {plan.cohort.size} updates takes {needed} bytes of memory, where the "
            f"server allows {space.memory}",
            hint="raise the setting fold_memory_bytes, or choose a smaller cohort",
        )
    for number in range(plan.cohort.minimum, plan.cohort.size + 1):
        try:
            rule.check(number)
        except ConfigurationError as exc:
            raise IncompatiblePlan(
                f"a round may close with {number} uploads, and {exc.detail}",
                hint="raise the cohort's minimum, or let the rule expect fewer forged ones",
            ) from exc


# What rules share


def check_share(name: str, share: float) -> None:
    """Raise ConfigurationError unless 0 <= share < 1/2, beyond which no rule can tell."""
    if not 0 <= share < 0.5:
        raise ConfigurationError(f"{name} must lie in [0, 0.5), not {share}")


def part_of(share: float, number: int) -> int:
    """`share` of `number` updates, rounded up."""
    return math.ceil(round(share * number, 6))


def check_enough(what: str, number: int, least: int) -> None:
    """Raise ConfigurationError if `number` updates are fewer than the `least`."""
    if number < least:
        raise ConfigurationError(f"{what} needs {least} updates at least, not {number}")
