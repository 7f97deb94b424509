"""A task's policies together: which of its profiles a round has, and which its clients are given.

A task's profiles are then a ladder, the gentlest first. Each policy is a pure function of the
course of the round before and of the facts; the round's plan says the outcome and its record keeps
the course, so that nobody who reads them again has to ask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedpress_compression.sketches import LEAST_CELLS
from fedpress_protocols.plan import Profile
from fedpress_protocols.policies import (
    Comparison,
    Course,
    Policy,
    Trend,
    accuracy_driven,
    automatic,
    bandwidth_aware,
    divergence_guard,
    prober,
)
from fedpress_strategies.policies.accuracy_driven import next_trend
from fedpress_strategies.policies.auto import first_pace, next_momentum, next_pace
from fedpress_strategies.policies.auto import probes as paces_probe
from fedpress_strategies.policies.divergence_guard import first_watch, next_watch, probes
from fedpress_strategies.policies.facts import Facts

_VALUES_A_CELL = 16
"""At least, so that a small model's sketch takes no more than its upload."""


def next_course(
    policies: Sequence[Policy], ladder: int, before: Course | None, facts: Facts
) -> Course:
    """The course of the round that `facts` are of, over a `ladder` of so many profiles; `before` is
    that of the round before, None where the policies begin.

    The guard says which profile is the hardest, auto or the loop on the loss which is the gentlest;
    with none of them, these are the ladder's ends. Without bandwidth-awareness a round has one of
    them: auto's or the loop's, or else the hardest.
    """
    loop, guard, auto = (
        accuracy_driven(policies),
        divergence_guard(policies),
        automatic(policies),
    )
    hardest, watch, trend, why, probe = ladder - 1, None, None, "", False
    pace, momentum = None, None
    warnings: tuple[str, ...] = ()
    if guard is not None:
        watch = first_watch(hardest)
        if before is not None and before.watch is not None:
            watch, warnings = next_watch(
                guard, before.watch, facts, before.comparison, before.probe
            )
        hardest, probe = watch.ceiling, probes(guard, watch, facts.number)
    gentlest = hardest
    if loop is not None:
        trend = Trend(since=facts.number - 1)
        if before is not None and before.trend is not None:
            trend, why = next_trend(loop, before.trend, facts, hardest)
        gentlest = trend.rung
    if auto is not None:
        pace, why = first_pace(auto, facts, hardest)
        if before is not None and before.pace is not None:
            pace, why = next_pace(auto, before.pace, facts, before.comparison, hardest)
        gentlest, probe = pace.rung, paces_probe(auto, pace, facts)
        momentum, turn = next_momentum(auto, facts)
        if momentum != (None if before is None else before.momentum):
            why = "; ".join(filter(None, (why, turn)))
    each_its_own = bandwidth_aware(policies) is not None
    if each_its_own and loop is None and auto is None:
        gentlest = 0
    return Course(
        round=facts.number,
        gentlest=gentlest,
        hardest=hardest if each_its_own else gentlest,
        probe=probe,
        momentum=momentum,
        warnings=warnings,
        why=why,
        trend=trend,
        watch=watch,
        pace=pace,
    )


def profiles_of(ladder: Sequence[Profile], course: Course) -> tuple[Profile, ...]:
    """Those of a round's plan: gentlest to hardest."""
    return tuple(ladder[course.gentlest : course.hardest + 1])


def sketch_of(policies: Sequence[Policy], course: Course | None, size: int) -> int:
    """The cells of the sketches of updates of `size` values that a round's plan asks for; 0 if it
    is no probe."""
    probing = prober(policies)
    if probing is None or course is None or not course.probe:
        return 0
    most = max(LEAST_CELLS, size // _VALUES_A_CELL)
    return min(probing.sketch, 1 << most.bit_length() - 1)


def every_choice(
    policies: Sequence[Policy], ladder: Sequence[Profile]
) -> Iterator[tuple[Profile, ...]]:
    """The profiles that plans of these policies may come to have, as many as tell what may go
    wrong: every profile is in one of them beside each other one that may be beside it."""
    if bandwidth_aware(policies) is not None:
        yield tuple(ladder)
    else:
        yield from ((each,) for each in ladder)


def with_comparison(course: Course, comparison: Comparison | None) -> Course:
    """The course of a round that is over."""
    return course.model_copy(update={"comparison": comparison})
