"""Synchronous rounds: one cohort, one deadline, one model.

Theory of operation. While the round is *collecting*, up to `places` clients are assigned; each
trains and uploads. The upload that completes `size` closes the round, and so does the deadline if
`minimum` uploads are there: whoever is late has a receipt that says so. The round is then
*folding*: a job aggregates what was staged, and ends the round as *committed*. With too few uploads
at the deadline the attempt is *abandoned*, all updates go back to their devices, and the round
begins again as its next attempt; unless fewer than `minimum` clients were ever assigned, or the
store was away, in which case the deadline moves on: neither devices asleep overnight nor an outage
of the store use up an attempt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedpress_server.rounds import actions as do
from fedpress_server.rounds.events import (
    Aggregated,
    AggregationFailed,
    DeadlinePassed,
    Declined,
    UploadStaged,
)
from fedpress_server.rounds.round import Round, Transition


@dataclass(frozen=True)
class SynchronousRound(Round):
    """A round that waits for its cohort."""

    @classmethod
    def table(cls) -> Sequence[Transition]:
        return TRANSITIONS


def _has_minimum(round_: Round, event: DeadlinePassed, now: float) -> bool:
    return now >= round_.deadline and round_.num_staged >= round_.rules.minimum


TRANSITIONS = (
    *do.assigning(),
    Transition(
        "collecting", UploadStaged, "the last of size", do.fills_up, do.stage_last, "folding"
    ),
    Transition("collecting", UploadStaged, "awaited", do.is_awaited, do.stage, "collecting"),
    Transition("collecting", Declined, "awaited", do.is_awaited, do.decline, "collecting"),
    Transition(
        "collecting",
        DeadlinePassed,
        "fewer than minimum came, or the store was away",
        do.has_few,
        do.extend,
        "collecting",
    ),
    Transition(
        "collecting",
        DeadlinePassed,
        "minimum reached",
        _has_minimum,
        do.fold_at_deadline,
        "folding",
    ),
    Transition("collecting", DeadlinePassed, "too few uploads", do.is_due, do.miss, "abandoned"),
    Transition("folding", Aggregated, "", do.always, do.commit, "committed"),
    Transition("folding", AggregationFailed, "", do.always, do.give_up, "abandoned"),
    *do.ends("collecting", "folding"),
)
