"""Guards and actions that the protocols share. An action gives the round after a transition, and
its effects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from fedpress_protocols.messages import RoundState
from fedpress_server.rounds.effects import (
    Assign,
    CallUp,
    Effect,
    EndTask,
    Extend,
    Stage,
    StartAggregation,
)
from fedpress_server.rounds.events import (
    Aborted,
    Aggregated,
    AggregationFailed,
    Cancelled,
    ClientCheckedIn,
    CohortChosen,
    DeadlinePassed,
    Declined,
    Restored,
    UploadStaged,
)
from fedpress_server.rounds.parts import Part, Reason
from fedpress_server.rounds.round import Outcome, Round, Transition

Action = Callable[[Any, Any, float], Outcome]

# Guards


def always(round_: Round, event: Any, now: float) -> bool:
    return True


def is_new_here(round_: Round, event: ClientCheckedIn, now: float) -> bool:
    is_open = not round_.chooses and now < round_.deadline
    return is_open and round_.admits(event.client_id)


def may_choose(round_: Round, event: CohortChosen, now: float) -> bool:
    clients = [each.client_id for each in event.chosen]
    is_whole = 0 < len(clients) == len(set(clients)) <= round_.places_left
    is_open = round_.chooses and now < round_.deadline
    return is_open and is_whole and all(map(round_.admits, clients))


def is_awaited(round_: Round, event: UploadStaged | Declined, now: float) -> bool:
    part = round_.parts.get(event.assignment)
    return part is not None and part.is_open and now < min(round_.deadline, part.due)


def fills_up(round_: Round, event: UploadStaged, now: float) -> bool:
    is_last = round_.num_staged + 1 == round_.rules.size >= round_.rules.minimum
    return is_last and is_awaited(round_, event, now)


def has_few(round_: Round, event: DeadlinePassed, now: float) -> bool:
    """Whether the minimum was out of reach, whatever those assigned had done."""
    minimum = round_.rules.minimum
    is_beyond_them = event.store_was_away and round_.num_staged < minimum
    return now >= round_.deadline and (is_beyond_them or len(round_.parts) < minimum)


def is_due(round_: Round, event: DeadlinePassed, now: float) -> bool:
    return now >= round_.deadline


# Actions


def assign(round_: Round, event: ClientCheckedIn, now: float) -> Outcome:
    part = Part(event.client_id, len(round_.parts), profile=event.profile)
    return assigned(round_, event.assignment, part)


def assigned(round_: Round, name: str, part: Part) -> Outcome:
    """With a new assignment."""
    effect = Assign(name, part.client_id, part.index, part.turn, part.profile)
    return round_.having(name, part), [effect]


def assign_chosen(round_: Round, event: CohortChosen, now: float) -> Outcome:
    return assign_each(round_, event, now, assign)


def assign_each(round_: Round, event: CohortChosen, now: float, assign_one: Action) -> Outcome:
    effects: list[Effect] = []
    for each in event.chosen:
        round_, one = assign_one(round_, each, now)
        effects += one
    return round_, [*effects, CallUp()]


def stage(round_: Round, event: UploadStaged, now: float) -> Outcome:
    part = replace(round_.parts[event.assignment], upload=event.upload)
    return round_.having(event.assignment, part), [Stage(event.assignment, event.upload)]


def stage_last(round_: Round, event: UploadStaged, now: float) -> Outcome:
    full, effects = stage(round_, event, now)
    return close(full, "round-full", effects)


def close(round_: Round, reason: Reason, effects: Iterable[Effect] = ()) -> Outcome:
    """Settle whoever has sent nothing, and aggregate the others' uploads."""
    late: dict[str, Reason] = {n: reason for n, part in round_.parts.items() if part.is_open}
    closed, settled = round_.settled(late)
    return closed, [*effects, *settled, StartAggregation()]


def fold_at_deadline(round_: Round, event: DeadlinePassed, now: float) -> Outcome:
    return close(round_, "missed-deadline")


def decline(round_: Round, event: Declined, now: float) -> Outcome:
    return round_.settled({event.assignment: "declined"})


def extend(round_: Round, event: DeadlinePassed, now: float) -> Outcome:
    deadline = now + round_.rules.seconds
    return replace(round_, deadline=deadline), [Extend(deadline)]


def miss(round_: Round, event: DeadlinePassed, now: float) -> Outcome:
    return abandon_late(round_, f"{len(round_.staged)} uploads")


def abandon_late(round_: Round, reason: str) -> Outcome:
    """Abandon the attempt at its deadline, for `reason`; clients without an upload are late."""
    reasons: dict[str, Reason] = {
        name: "missed-deadline" if part.is_open and not part.is_ready else "round-abandoned"
        for name, part in round_.parts.items()
        if part.reason is None
    }
    settled, effects = round_.settled(reasons)
    minimum = round_.rules.minimum
    return abandon(settled, f"{reason} at the deadline, fewer than {minimum}", effects)


def give_up(round_: Round, event: AggregationFailed | Aborted, now: float) -> Outcome:
    settled, effects = round_.settled_all("round-abandoned")
    return abandon(settled, event.detail, effects)


def abandon(round_: Round, detail: str, effects: Iterable[Effect]) -> Outcome:
    then: Effect = round_.next_attempt()
    most = round_.rules.max_attempts
    if round_.attempt >= most:
        then = EndTask("cancelled")
        detail = f"{detail}; the last of {most} attempts (max_attempts)"
    return replace(round_, reason=detail), [*effects, then]


def start_anew(round_: Round, event: Restored, now: float) -> Outcome:
    settled, effects = round_.settled_all("round-abandoned")
    return replace(settled, reason=event.detail), [*effects, settled.next_attempt()]


def cancel(round_: Round, event: Cancelled, now: float) -> Outcome:
    settled, effects = round_.settled_all("cancelled")
    return replace(settled, reason=event.detail), [*effects, EndTask("cancelled")]


def commit(round_: Round, event: Aggregated, now: float) -> Outcome:
    settled, effects = round_.settled({name: "included" for name in round_.staged})
    settled = replace(settled, reason=event.stop)
    if round_.number < round_.rules.last_round and not event.stop:
        return settled, [*effects, settled.next_round()]
    settled, rest = settled.settled_all("round-full")
    return settled, [*effects, *rest, EndTask(round_.rules.at_end)]


# Rows


def assigning(
    assign: Action = assign, assign_chosen: Action = assign_chosen
) -> Sequence[Transition]:
    """Rows of every protocol: clients are assigned while uploads are collected."""
    state: RoundState = "collecting"
    return (
        Transition(state, ClientCheckedIn, "a place is left", is_new_here, assign, state),
        Transition(state, CohortChosen, "for places left", may_choose, assign_chosen, state),
    )


def ends(*phases: RoundState, give_up: Action = give_up) -> Sequence[Transition]:
    """Rows of every protocol: an attempt may be given up, or the task cancelled, in any phase."""
    return tuple(
        Transition(phase, event, "", always, action, "abandoned")
        for phase in phases
        for event, action in ((Aborted, give_up), (Restored, start_anew), (Cancelled, cancel))
    )
