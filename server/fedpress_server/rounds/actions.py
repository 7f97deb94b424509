"""What each transition does: the round after it, and the effects. Which is taken when, the table
says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from fedpress_server.rounds.effects import (
    Assign,
    Begin,
    BeginSecond,
    BeginSession,
    CallUp,
    Effect,
    EndTask,
    Extend,
    Keep,
    MoveSession,
    OpenRound,
    Queue,
    Stage,
    StageFirst,
    StartBasis,
    StartFold,
)
from fedpress_server.rounds.events import (
    Aborted,
    BasisMade,
    Cancelled,
    CarriedOver,
    ClientCheckedIn,
    ClientReady,
    CohortChosen,
    DeadlinePassed,
    Declined,
    FirstStaged,
    Folded,
    FoldFailed,
    Restored,
    Said,
    SessionEnded,
    SessionFailed,
    UnmaskFailed,
    UploadStaged,
)
from fedpress_server.rounds.parts import (
    Part,
    Reason,
)

if TYPE_CHECKING:  # the machine reads the table, which names these
    from fedpress_server.rounds.machine import Round

Outcome = tuple["Round", Iterable[Effect]]


def assign(round_: Round, event: ClientCheckedIn, now: float) -> Outcome:
    own = [part for part in round_.parts.values() if part.given is None]
    part = Part(event.client_id, round_.given + len(own), profile=event.profile)
    if round_.is_asynchronous:
        turn = sum(other.client_id == event.client_id for other in own)
        part = replace(part, turn=turn, due=now + round_.seconds)
    assigned = round_.having(event.assignment, part)
    given = Assign(event.assignment, event.client_id, part.index, part.turn, part.profile)
    return assigned, [given]


def assign_chosen(round_: Round, event: CohortChosen, now: float) -> Outcome:
    effects: list[Effect] = []
    for each in event.chosen:
        round_, assigned = assign(round_, each, now)
        effects += assigned
    return round_, [*effects, CallUp()]


def carry_over(round_: Round, event: CarriedOver, now: float) -> Outcome:
    parts: dict[str, Part] = {}
    for each in event.carried:
        given = (each.round, each.attempt)
        parts[each.assignment] = Part(
            each.client_id,
            each.index,
            each.upload,
            given=given,
            turn=each.turn,
            due=each.due,
            profile=each.profile,
        )
    begun = replace(round_, given=event.given, parts=parts)
    stale: dict[str, Reason] = {n: "stale" for n, part in parts.items() if begun.is_stale(part)}
    begun, effects = begun.settled(stale)
    for name in begun.staged[round_.size :]:
        begun = begun.having(name, replace(begun.parts[name], is_next=True))
    if len(begun.staged) == round_.size:
        effects.append(StartFold())
    return begun, [Begin(), *effects]


def stage(round_: Round, event: UploadStaged, now: float) -> Outcome:
    part = replace(round_.parts[event.assignment], upload=event.upload)
    return round_.having(event.assignment, part), [Stage(event.assignment, event.upload)]


def stage_last(round_: Round, event: UploadStaged, now: float) -> Outcome:
    full, effects = stage(round_, event, now)
    return close(full, "round-full", effects)


def stage_for_next(round_: Round, event: UploadStaged, now: float) -> Outcome:
    part = replace(round_.parts[event.assignment], upload=event.upload, is_next=True)
    return round_.having(event.assignment, part), [Stage(event.assignment, event.upload)]


def close(round_: Round, reason: Reason, effects: Iterable[Effect] = ()) -> Outcome:
    late: dict[str, Reason] = {n: reason for n, part in round_.parts.items() if part.is_open}
    closed, settled = round_.settled({} if round_.is_asynchronous else late)
    return closed, [*effects, *settled, StartFold()]


def stage_first(round_: Round, event: FirstStaged, now: float) -> Outcome:
    part = replace(round_.parts[event.assignment], first=event.upload)
    return round_.having(event.assignment, part), [StageFirst(event.assignment, event.upload)]


def stage_last_first(round_: Round, event: FirstStaged, now: float) -> Outcome:
    full, effects = stage_first(round_, event, now)
    return close_first(full, "round-full", effects)


def base_at_deadline(round_: Round, event: DeadlinePassed, now: float) -> Outcome:
    return close_first(round_, "missed-deadline")


def close_first(round_: Round, reason: Reason, effects: Iterable[Effect] = ()) -> Outcome:
    late: dict[str, Reason] = {
        n: reason for n, part in round_.parts.items() if part.is_open and not part.first
    }
    closed, settled = round_.settled(late)
    return closed, [*effects, *settled, StartBasis()]


def begin_second(round_: Round, event: BasisMade, now: float) -> Outcome:
    deadline = now + round_.seconds
    return replace(round_, basis=event.basis, deadline=deadline), [BeginSecond(deadline)]


def queue(round_: Round, event: ClientReady, now: float) -> Outcome:
    part = replace(round_.parts[event.assignment], is_ready=True)
    return round_.having(event.assignment, part), [Queue(event.assignment)]


def queue_last(round_: Round, event: ClientReady, now: float) -> Outcome:
    full, effects = queue(round_, event, now)
    return begin_session(full, "round-full", effects)


def begin_at_deadline(round_: Round, event: DeadlinePassed, now: float) -> Outcome:
    return begin_session(round_, "missed-deadline")


def begin_session(round_: Round, reason: Reason, effects: Iterable[Effect] = ()) -> Outcome:
    late: dict[str, Reason] = {
        n: reason for n, part in round_.parts.items() if part.is_open and not part.is_ready
    }
    begun, settled = round_.settled(late)
    return begun, [*effects, *settled, BeginSession()]


def keep(round_: Round, event: Said, now: float) -> Outcome:
    return round_, [Keep(event.assignment, event.step)]


def move_session(round_: Round, event: DeadlinePassed | UnmaskFailed, now: float) -> Outcome:
    return round_, [MoveSession()]


def end_session(round_: Round, event: SessionEnded, now: float) -> Outcome:
    return close(round_, "dropped-out")


def decline(round_: Round, event: Declined, now: float) -> Outcome:
    return round_.settled({event.assignment: "declined"})


def decline_last(round_: Round, event: Declined, now: float) -> Outcome:
    left, effects = round_.settled({event.assignment: "declined"})
    return close(left, "missed-deadline", effects)


def fold_at_deadline(round_: Round, event: DeadlinePassed, now: float) -> Outcome:
    return close(round_, "missed-deadline")


def expire(round_: Round, event: DeadlinePassed, now: float) -> Outcome:
    parts = round_.parts.items()
    return round_.settled({n: "missed-deadline" for n, p in parts if p.is_open and p.due <= now})


def extend(round_: Round, event: DeadlinePassed, now: float) -> Outcome:
    deadline = now + round_.seconds
    return replace(round_, deadline=deadline), [Extend(deadline)]


def miss(round_: Round, event: DeadlinePassed, now: float) -> Outcome:
    found = f"{len(round_.staged)} uploads"
    if round_.is_masked:
        found = f"{len(round_.queue)} ready"
    elif round_.is_first_trip:
        found = f"{len(round_.firsts)} first trips"
    detail = f"{found} at the deadline, fewer than {round_.minimum}"

    def is_late(part: Part) -> bool:
        has_come = part.first is not None if round_.is_first_trip else part.is_ready
        return part.is_open and not has_come

    reasons: dict[str, Reason] = {
        name: "missed-deadline" if is_late(part) else "round-abandoned"
        for name, part in round_.parts.items()
        if part.reason is None
    }
    settled, effects = round_.settled(reasons)
    return abandon(settled, detail, effects)


def give_up(round_: Round, event: FoldFailed | SessionFailed | Aborted, now: float) -> Outcome:
    if round_.is_asynchronous and round_.attempt < round_.max_attempts:
        settled, effects = round_.settled({name: "round-abandoned" for name in round_.staged})
    else:
        settled, effects = round_.settled_all("round-abandoned")
    return abandon(settled, event.detail, effects)


def start_anew(round_: Round, event: Restored, now: float) -> Outcome:
    settled, effects = round_.settled_all("round-abandoned")
    follows = OpenRound(round_.number, round_.attempt + 1, settled.opening)
    return replace(settled, reason=event.detail), [*effects, follows]


def abandon(round_: Round, detail: str, effects: Iterable[Effect]) -> Outcome:
    then: Effect = OpenRound(round_.number, round_.attempt + 1, round_.opening)
    if round_.attempt >= round_.max_attempts:
        then = EndTask("cancelled")
    return replace(round_, reason=detail), [*effects, then]


def cancel(round_: Round, event: Cancelled, now: float) -> Outcome:
    settled, effects = round_.settled_all("cancelled")
    return replace(settled, reason=event.detail), [*effects, EndTask("cancelled")]


def commit(round_: Round, event: Folded, now: float) -> Outcome:
    settled, effects = round_.settled({name: "included" for name in round_.staged})
    settled = replace(settled, reason=event.stop)
    if round_.number < round_.last_round and not event.stop:
        return settled, [*effects, OpenRound(round_.number + 1, 1, settled.opening)]
    settled, rest = settled.settled_all("round-full")
    return settled, [*effects, *rest, EndTask(round_.at_end)]
