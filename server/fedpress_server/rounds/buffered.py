"""Buffered rounds of an asynchronous task: every `size` uploads make a model, whatever the models
that they were trained from.

Theory of operation. A task has one such round for each of its models. The round closes with the
upload that completes `size`, its buffer; nobody is late for it. What is open then, the next attempt
takes over as its first event (`CarriedOver`), and so it does with uploads that come while the
buffer is *folding*. `places` bounds the assignments that are open at a time: a client whose upload
is in may be assigned again, with another `turn`. Each assignment has `seconds` for itself, the
round has no deadline. An assignment whose model is more than `max_staleness` models behind is
settled as stale when it would be taken over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar

from fedpress_server.rounds import actions as do
from fedpress_server.rounds.effects import Begin, StartAggregation
from fedpress_server.rounds.events import (
    Aborted,
    Aggregated,
    AggregationFailed,
    CarriedOver,
    ClientCheckedIn,
    CohortChosen,
    DeadlinePassed,
    Declined,
    UploadStaged,
)
from fedpress_server.rounds.parts import Carried, Part, Reason
from fedpress_server.rounds.round import Outcome, Round, Transition


@dataclass(frozen=True)
class BufferedRound(Round):
    """A round that is a buffer of uploads."""

    is_asynchronous: ClassVar[bool] = True

    max_staleness: int = 0
    given: int = 0
    """Assignments given in the task before this attempt."""

    @classmethod
    def table(cls) -> Sequence[Transition]:
        return TRANSITIONS

    @property
    def takes_uploads(self) -> bool:
        return self.phase in ("collecting", "folding")

    def takes_place(self, part: Part) -> bool:
        return part.is_open

    def _taken_clients(self) -> frozenset[str]:
        return frozenset(part.client_id for part in self.parts.values() if part.is_open)

    @property
    def next_deadline(self) -> float:
        return min((part.due for part in self.parts.values() if part.is_open), default=inf)

    def admits(self, client_id: str) -> bool:
        """Whether there is a place for this client: it has none that is open, and has declined none
        of this attempt."""
        members, assignment = self.rules.members, self.part_of(client_id)
        is_member = members is None or client_id in members
        return is_member and self.places_left > 0 and (assignment is None or assignment[1].is_done)

    def staleness(self, part: Part) -> int:
        return 0 if part.given is None else self.number - part.given[0]

    def is_stale(self, part: Part) -> bool:
        return self.staleness(part) > self.max_staleness

    @property
    def own(self) -> tuple[Part, ...]:
        """The assignments that this attempt gave."""
        return tuple(part for part in self.parts.values() if part.given is None)

    @property
    def opening(self) -> CarriedOver:
        key = (self.number, self.attempt)
        carried = []
        for name, part in self.parts.items():
            if part.reason is None:
                whose = (name, part.client_id, *(part.given or key))
                upload = (part.upload, part.profile)
                carried.append(Carried(*whose, part.index, part.turn, part.due, *upload))
        return CarriedOver(self.given + len(self.own), tuple(carried))


def _carries_buffer(round_: BufferedRound, event: CarriedOver, now: float) -> bool:
    """Whether the uploads taken over fill the buffer at once."""
    return StartAggregation() in _carry_over(round_, event, now)[1]


def _has_overdue(round_: BufferedRound, event: DeadlinePassed, now: float) -> bool:
    return now >= round_.next_deadline


def _assign(round_: BufferedRound, event: ClientCheckedIn, now: float) -> Outcome:
    own = round_.own
    turn = sum(other.client_id == event.client_id for other in own)
    due = now + round_.rules.seconds
    part = Part(event.client_id, round_.given + len(own), turn=turn, due=due, profile=event.profile)
    return do.assigned(round_, event.assignment, part)


def _assign_chosen(round_: BufferedRound, event: CohortChosen, now: float) -> Outcome:
    return do.assign_each(round_, event, now, _assign)


def _carry_over(round_: BufferedRound, event: CarriedOver, now: float) -> Outcome:
    parts: dict[str, Part] = {}
    for each in event.carried:
        parts[each.assignment] = Part(
            each.client_id,
            each.index,
            each.upload,
            given=(each.round, each.attempt),
            turn=each.turn,
            due=each.due,
            profile=each.profile,
        )
    current = replace(round_, given=event.given, parts=parts)
    stale: dict[str, Reason] = {n: "stale" for n, part in parts.items() if current.is_stale(part)}
    current, effects = current.settled(stale)
    size = round_.rules.size
    for name in current.staged[size:]:
        current = current.having(name, replace(current.parts[name], is_next=True))
    if len(current.staged) == size:
        effects.append(StartAggregation())
    return current, [Begin(), *effects]


def _stage_last(round_: BufferedRound, event: UploadStaged, now: float) -> Outcome:
    full, effects = do.stage(round_, event, now)
    return full, [*effects, StartAggregation()]


def _stage_for_next(round_: BufferedRound, event: UploadStaged, now: float) -> Outcome:
    staged, effects = do.stage(round_, event, now)
    part = replace(staged.parts[event.assignment], is_next=True)
    return staged.having(event.assignment, part), effects


def _expire(round_: BufferedRound, event: DeadlinePassed, now: float) -> Outcome:
    parts = round_.parts.items()
    return round_.settled({n: "missed-deadline" for n, p in parts if p.is_open and p.due <= now})


def _give_up(round_: BufferedRound, event: AggregationFailed | Aborted, now: float) -> Outcome:
    """Give the buffer's uploads back; what is open goes on in the next attempt."""
    if round_.attempt >= round_.rules.max_attempts:
        return do.give_up(round_, event, now)
    settled, effects = round_.settled({name: "round-abandoned" for name in round_.staged})
    return do.abandon(settled, event.detail, effects)


TRANSITIONS = (
    Transition(
        "collecting", CarriedOver, "with a full buffer", _carries_buffer, _carry_over, "folding"
    ),
    Transition("collecting", CarriedOver, "", do.always, _carry_over, "collecting"),
    *do.assigning(_assign, _assign_chosen),
    Transition("collecting", UploadStaged, "the last of size", do.fills_up, _stage_last, "folding"),
    Transition("collecting", UploadStaged, "awaited", do.is_awaited, do.stage, "collecting"),
    Transition("collecting", Declined, "awaited", do.is_awaited, do.decline, "collecting"),
    Transition(
        "collecting", DeadlinePassed, "of an assignment", _has_overdue, _expire, "collecting"
    ),
    Transition("folding", Aggregated, "", do.always, do.commit, "committed"),
    Transition(
        "folding", UploadStaged, "for the next buffer", do.is_awaited, _stage_for_next, "folding"
    ),
    Transition("folding", Declined, "awaited", do.is_awaited, do.decline, "folding"),
    Transition("folding", AggregationFailed, "", do.always, _give_up, "abandoned"),
    *do.ends("collecting", "folding", give_up=_give_up),
)
