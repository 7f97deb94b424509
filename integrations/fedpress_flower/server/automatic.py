"""The default of a plan that names no compressor: a rate for each round, chosen by `auto`.

The rate levels and the decisions are those of fedpress's server (docs/auto.md). Losses are those
that clients measure: in evaluations where there are any, else in training, of the model that a
round begins at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from flwr.app import MetricRecord

from fedpress_compression.running_statistics import has_statistics
from fedpress_compression.tensors import ModelSpec
from fedpress_protocols.defaults import careful_momentum, rate_levels, reserves, strategy_for
from fedpress_protocols.plan import Profile
from fedpress_protocols.policies import Auto, Comparison, Course
from fedpress_strategies.policies.decisions import (
    next_course,
    profiles_of,
    sketch_of,
    with_comparison,
)
from fedpress_strategies.policies.facts import FLAT_ROUNDS, Facts, mostly_flat
from fedpress_strategies.strategy import Strategy, from_config


def default_strategy(
    rounds: int,
    cohort: int | None = None,
    *,
    is_masked: bool = False,
    is_restricted: bool = False,
) -> Strategy:
    """Return what goes with the default's rates over so many rounds of so many clients: momentum,
    and the average."""
    fields = strategy_for(rounds, cohort, is_masked=is_masked, is_restricted=is_restricted)
    return from_config(fields)


class Rates:
    """The profile of each round of a run, and which rounds are probes; where the strategy is the
    default's, its momentum too."""

    def __init__(self, auto: Auto, *, of_default: bool = False) -> None:
        self.auto = auto
        self._is_of_default = of_default
        self.begin(0)

    def begin(self, rounds: int) -> None:
        """Forget all rounds: a run of `rounds` follows."""
        self._rounds = rounds
        self._levels: tuple[Profile, ...] = ()
        self._reserves: dict[str, int] = {}
        self._course: Course | None = None
        self._open: Course | None = None
        self._uploaded: list[int] = []
        self._flat: list[tuple[int, int]] = []
        self._evaluated: dict[int, float] = {}
        self._trained: dict[int, float] = {}

    def opened(
        self, number: int, spec: ModelSpec, size: int, population: int | None = None
    ) -> tuple[Profile, int]:
        """Decide on round `number` of `size` clients out of `population`, over models of `spec`:
        the profile, and in a probe the cells of a sketch, else 0."""
        if not self._levels:
            is_free = self.auto.model_fields_set.isdisjoint({"gap", "upload_bytes"})
            uploads = max(self._rounds, number) * size if is_free else None
            levels = rate_levels(self.auto.gap, uploads)
            self._levels = tuple(Profile.model_validate(each) for each in levels)
            self._reserves = reserves(len(levels), uploads) if is_free else {}
        losses, flat = self._evaluated or self._trained, self._flat[-FLAT_ROUNDS:]
        facts = Facts(
            number,
            max(self._rounds, number),
            tuple(losses.get(model) for model in range(number)),
            uploaded=tuple(self._uploaded) if self.auto.upload_bytes is not None else (),
            size=size,
            population=population,
            are_flat=mostly_flat(sum(num for num, _ in flat), sum(of for _, of in flat)),
            has_statistics=has_statistics(spec),
        )
        own: dict[str, Any] = {**self._reserves}
        if self._is_of_default:
            own["careful_momentum"] = careful_momentum(size)
        policies = (self.auto.model_copy(update=own),)
        self._open = next_course(policies, len(self._levels), self._course, facts)
        (chosen,) = profiles_of(self._levels, self._open)
        return chosen, sketch_of(policies, self._open, spec.size)

    @property
    def momentum(self) -> float | None:
        """The most of the open round's step; None for all of what the strategy has."""
        return None if self._open is None else self._open.momentum

    def closed(
        self, comparison: Comparison | None, upload_bytes: int, flat: tuple[int, int] = (0, 0)
    ) -> Course | None:
        """Take in the round's comparison and bytes, and how many updates were flat, of how many;
        return the record of what was decided."""
        if self._open is None:
            return None
        self._course, self._open = with_comparison(self._open, comparison), None
        self._uploaded.append(upload_bytes)
        self._flat.append(flat)
        return self._course

    def trained(self, number: int, metrics: MetricRecord | None) -> None:
        """Take in what clients measured as they trained in round `number`."""
        _note(self._trained, number - 1, metrics)

    def evaluated(self, number: int, metrics: MetricRecord | None) -> None:
        """Take in what clients measured of the model after round `number`."""
        _note(self._evaluated, number, metrics)


def _note(losses: dict[int, float], model: int, metrics: Mapping[str, object] | None) -> None:
    """Note the first metric whose name ends with "loss" and that is a finite number."""
    for name, value in sorted((metrics or {}).items()):
        is_number = isinstance(value, int | float) and math.isfinite(value)
        if name.lower().endswith("loss") and is_number:
            losses[model] = float(value)  # type: ignore[arg-type]
            return
