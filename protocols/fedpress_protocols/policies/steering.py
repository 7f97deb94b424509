"""A task's policies together: which of its profiles a round has, and what its clients are given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, TypeVar

from pydantic import Field

from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.plan import Profile
from fedpress_protocols.policies.accuracy_driven import AccuracyDriven
from fedpress_protocols.policies.bandwidth_aware import BandwidthAware
from fedpress_protocols.policies.course import Comparison, Course, Facts, Trend
from fedpress_protocols.policies.divergence_guard import DivergenceGuard

Policy = Annotated[BandwidthAware | AccuracyDriven | DivergenceGuard, Field(discriminator="id")]
Policies = Annotated[tuple[Policy, ...], Field(max_length=3)]
PolicyT = TypeVar("PolicyT", AccuracyDriven, BandwidthAware, DivergenceGuard)


def steered(policies: Sequence[Policy], ladder: int, before: Course | None, facts: Facts) -> Course:
    """The course of the round that `facts` are of, over a `ladder` of so many profiles; `before` is
    that of the round before, None where the policies begin.

    The guard says which profile is the hardest, the loop on the loss which is the gentlest; with
    neither, these are the ladder's ends. Without bandwidth-awareness a round has one of them: the
    loop's, or else the hardest.
    """
    loop, guard = _one(policies, AccuracyDriven), _one(policies, DivergenceGuard)
    hardest, watch, trend, why, probe = ladder - 1, None, None, "", False
    warnings: tuple[str, ...] = ()
    if guard is not None:
        watch = guard.begins(hardest)
        if before is not None and before.watch is not None:
            watch, warnings = guard.watched(before.watch, facts, before.comparison, before.probe)
        hardest, probe = watch.ceiling, guard.probes(watch, facts.number)
    gentlest = hardest
    if loop is not None:
        trend = Trend(since=facts.number - 1)
        if before is not None and before.trend is not None:
            trend, why = loop.steered(before.trend, facts, hardest)
        gentlest = trend.rung
    each_its_own = _one(policies, BandwidthAware) is not None
    if each_its_own and loop is None:
        gentlest = 0
    return Course(
        round=facts.number,
        gentlest=gentlest,
        hardest=hardest if each_its_own else gentlest,
        probe=probe,
        warnings=warnings,
        why=why,
        trend=trend,
        watch=watch,
    )


def profiles_of(
    policies: Sequence[Policy], ladder: Sequence[Profile], course: Course
) -> tuple[Profile, ...]:
    """Those of a round's plan: gentlest to hardest, and in a probe the reference after them."""
    chosen = tuple(ladder[course.gentlest : course.hardest + 1])
    guard = _one(policies, DivergenceGuard)
    return (*chosen, guard.reference) if guard is not None and course.probe else chosen


def every_choice(
    policies: Sequence[Policy], ladder: Sequence[Profile]
) -> Iterator[tuple[Profile, ...]]:
    """The profiles that plans of these policies may come to have, as many as tell what may go
    wrong: every profile is in one of them beside each other one that may be beside it."""
    whole = _one(policies, BandwidthAware) is not None
    guard = _one(policies, DivergenceGuard)
    for chosen in [tuple(ladder)] if whole else [(each,) for each in ladder]:
        yield chosen
        if guard is not None and guard.share:
            yield (*chosen, guard.reference)


def bandwidth_aware(policies: Sequence[Policy]) -> BandwidthAware | None:
    return _one(policies, BandwidthAware)


def divergence_guard(policies: Sequence[Policy]) -> DivergenceGuard | None:
    return _one(policies, DivergenceGuard)


def check_policies(
    policies: Sequence[Policy], ladder: Sequence[Profile], *, lane: str, size: int
) -> None:
    """Raise ConfigurationError where a task of this `lane` and cohort `size` cannot have them."""
    if not policies:
        return
    ids = [each.id for each in policies]
    if len(set(ids)) < len(ids):
        raise ConfigurationError(f"a policy twice: {', '.join(ids)}")
    if len(ladder) < 2:
        raise ConfigurationError(
            f"{', '.join(ids)} over one profile, which leaves nothing to choose",
            hint="give the task's profiles in order, the gentlest first",
        )
    guard, masked = divergence_guard(policies), lane == "masked"
    if masked and bandwidth_aware(policies) is not None:
        raise ConfigurationError(
            "bandwidth_aware in the masked lane, whose cohort adds up one kind of numbers",
            hint="use the clear lane, or accuracy_driven, which gives all of a cohort one profile",
        )
    if guard is None or not guard.share:
        return
    if masked:
        raise ConfigurationError(
            "a divergence_guard that probes in the masked lane, where no update is seen by itself",
            hint="set its share to 0: losses and accuracies by class are watched still",
        )
    if guard.reference.name in {each.name for each in ladder}:
        raise ConfigurationError(
            f"the guard's reference has the name {guard.reference.name!r} of one of the profiles"
        )
    of_reference = guard.references_among(size)
    if min(of_reference, size - of_reference) < LEAST_COMPARED:
        raise ConfigurationError(
            f"a share of {guard.share:g} of a cohort of {size} is {of_reference} with the "
            f"reference and {size - of_reference} without, where {LEAST_COMPARED} of each are "
            "the least that can be compared",
            hint="set share nearer to 0.5"
            if size >= 2 * LEAST_COMPARED
            else f"make cohort.size {2 * LEAST_COMPARED} or more, or set share to 0",
        )


LEAST_COMPARED = 2
"""Updates of either kind whose products tell their mean's norm without the noise."""


def _one(policies: Sequence[Policy], kind: type[PolicyT]) -> PolicyT | None:
    return next((each for each in policies if isinstance(each, kind)), None)


def with_comparison(course: Course, comparison: Comparison | None) -> Course:
    """The course of a round that is over."""
    return course.model_copy(update={"comparison": comparison})
