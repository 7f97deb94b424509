"""A closed loop on the loss that devices measure: harder while it is on track, gentler when not."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedpress_protocols.policies import AccuracyDriven, Trend
from fedpress_strategies.policies.facts import Facts

_DOUBLINGS = 6


def next_trend(
    policy: AccuracyDriven, before: Trend, facts: Facts, hardest: int
) -> tuple[Trend, str]:
    """The trend for the round that `facts` are of, no harder than `hardest`, and why."""
    number, rung = facts.number, min(before.rung, hardest)
    window = max(policy.window, number // 10)
    if rung != before.rung:
        return before.model_copy(update={"rung": rung, "since": number - 1}), "lowered"
    measured = [
        (math.log(model), math.log(loss))
        for model, loss in enumerate(facts.losses)
        if model > before.since and loss is not None and loss > 0
    ]
    if len(measured) < window:
        is_blind = number - 1 - before.since >= 2 * window + 1 and not measured
        return before, "no loss has been measured since the last change" if is_blind else ""
    newest = measured[-window:]
    at, level = _mean(newest)
    strikes = _filled(before.strikes, hardest + 1)
    barred = _filled(before.barred, hardest + 1)
    after = {"since": max(before.since, number - 1 - window), "strikes": strikes}
    after["barred"] = barred
    may_press = rung < hardest and barred[rung + 1] <= number
    may_press &= policy.settle * facts.rounds / 2 < number <= (1 - policy.settle) * facts.rounds
    pace = max(0.0, -_slope(newest))
    why = ""
    if rung == 0:
        after |= {"at": at, "level": level, "pace": pace}
        if may_press:
            after |= {"rung": 1, "since": number - 1}
            why = "the track is drawn anew"
    elif before.level is not None:
        track = before.level - policy.keep * before.pace * (at - before.at)
        slack = max(policy.slack, 2 * _error(newest))
        if level > track + slack:
            strikes[rung] += 1
            barred[rung] = number + window * 2 ** min(strikes[rung], _DOUBLINGS)
            after |= {"rung": rung - 1, "since": number - 1}
            why = f"the loss is {math.exp(level):.4g} where {math.exp(track):.4g} is on track"
        elif level <= track + slack / 2 and may_press:
            after |= {"rung": rung + 1, "since": number - 1}
            after |= {"at": at, "level": level, "pace": max(pace, before.pace)}
            why = f"the loss is {math.exp(level):.4g}, on track"
    after["strikes"], after["barred"] = tuple(strikes), tuple(barred)
    return before.model_copy(update=after), why


def _filled(values: Sequence[int], length: int) -> list[int]:
    return [*values, *[0] * (length - len(values))]


def _mean(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points)


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the line of least squares."""
    at, level = _mean(points)
    spread = sum((x - at) ** 2 for x, _ in points)
    return sum((x - at) * (y - level) for x, y in points) / spread


def _error(points: Sequence[tuple[float, float]]) -> float:
    """The standard error of their mean around the line of least squares."""
    at, level = _mean(points)
    slope = _slope(points)
    rest = sum((y - level - slope * (x - at)) ** 2 for x, y in points)
    return math.sqrt(rest / len(points)) / math.sqrt(len(points))
