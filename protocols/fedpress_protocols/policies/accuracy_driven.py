"""A closed loop on the loss that devices measure: harder while it is on track, gentler when not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from fedpress_protocols.plan import Term
from fedpress_protocols.policies.course import Facts, Trend

_DOUBLINGS = 6


class AccuracyDriven(Term):
    """Which profile of the ladder a round has, by the loss of the models so far.

    Losses fall by something like a power of the rounds, so the track is a line of the log loss
    over the log round: drawn from the last models of the gentlest profile, with `keep` of the
    slope that they had. While the mean of `window` models, or of a tenth of the rounds if these are
    more, is on the track, the next window has the next harder profile; if it lies above by more
    than `slack`, or by two standard errors where these are more, a gentler one. What was given up
    is not tried again for two windows, then for four, eight and so on. Each harder profile has the
    track anew from where it begins, with the steepest slope so far; back at the gentlest it is
    drawn with the slope of the day. The first half of `settle` of the rounds has the gentlest, and
    over the last `settle` of them the rate is not raised any more.

    Models whose loss nobody has measured yet are passed over; where none of `window` new ones was
    measured, the rate stays as it is, and the round says so.
    """

    id: Literal["accuracy_driven"] = "accuracy_driven"
    window: Annotated[int, Field(ge=3, le=1000)] = 5
    keep: Annotated[float, Field(gt=0, le=1)] = 0.6
    slack: Annotated[float, Field(gt=0, lt=1)] = 0.05
    settle: Annotated[float, Field(ge=0, lt=1)] = 0.2

    def steered(self, before: Trend, facts: Facts, hardest: int) -> tuple[Trend, str]:
        """The trend for the round that `facts` are of, no harder than `hardest`, and why."""
        number, rung = facts.number, min(before.rung, hardest)
        window = max(self.window, number // 10)
        if rung != before.rung:
            return before.model_copy(update={"rung": rung, "since": number - 1}), "lowered"
        known = [
            (math.log(model), math.log(loss))
            for model, loss in enumerate(facts.losses)
            if model > before.since and loss is not None and loss > 0
        ]
        if len(known) < window:
            is_blind = number - 1 - before.since >= 2 * window + 1 and not known
            return before, "no loss has been measured since the last change" if is_blind else ""
        newest = known[-window:]
        at, level = _mean(newest)
        strikes = _filled(before.strikes, hardest + 1)
        barred = _filled(before.barred, hardest + 1)
        after = {"since": max(before.since, number - 1 - window), "strikes": strikes}
        after["barred"] = barred
        may_press = rung < hardest and barred[rung + 1] <= number
        may_press &= self.settle * facts.rounds / 2 < number <= (1 - self.settle) * facts.rounds
        pace = max(0.0, -_slope(newest))
        why = ""
        if rung == 0:
            after |= {"at": at, "level": level, "pace": pace}
            if may_press:
                after |= {"rung": 1, "since": number - 1}
                why = "the track is drawn anew"
        elif before.level is not None:
            track = before.level - self.keep * before.pace * (at - before.at)
            slack = max(self.slack, 2 * _error(newest))
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
