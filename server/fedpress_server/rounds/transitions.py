"""All there is to know of how a round goes: one table, and the guards of its rows.

`diagram()` draws it; docs/rounds.md has the drawing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedpress_protocols.messages import RoundState
from fedpress_server.rounds import actions
from fedpress_server.rounds.effects import StartFold
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

if TYPE_CHECKING:  # the machine reads this table
    from fedpress_server.rounds.machine import Round


def _always(round_: Round, event: Any, now: float) -> bool:
    return True


def _is_new_here(round_: Round, event: ClientCheckedIn, now: float) -> bool:
    is_open = not round_.chooses and now < round_.deadline
    return is_open and round_.admits(event.client_id)


def _may_choose(round_: Round, event: CohortChosen, now: float) -> bool:
    clients = [each.client_id for each in event.chosen]
    is_whole = 0 < len(clients) == len(set(clients)) <= round_.places_left
    is_open = round_.chooses and now < round_.deadline
    return is_open and is_whole and all(map(round_.admits, clients))


def _is_awaited(round_: Round, event: UploadStaged | Declined, now: float) -> bool:
    part = round_.parts.get(event.assignment)
    return part is not None and part.is_open and now < min(round_.deadline, part.due)


def _is_awaited_yet(round_: Round, event: UploadStaged | Declined, now: float) -> bool:
    return round_.is_asynchronous and _is_awaited(round_, event, now)


def _carries_buffer(round_: Round, event: CarriedOver, now: float) -> bool:
    """Whether the uploads taken over fill the buffer at once."""
    return StartFold() in actions.carry_over(round_, event, now)[1]


def _has_overdue(round_: Round, event: DeadlinePassed, now: float) -> bool:
    return round_.is_asynchronous and now >= round_.next_deadline


def _takes_body(round_: Round, event: UploadStaged, now: float) -> bool:
    is_time = not round_.is_masked and not round_.is_first_trip
    return is_time and _is_awaited(round_, event, now)


def _fills_up(round_: Round, event: UploadStaged, now: float) -> bool:
    size = round_.size if round_.basis is None else len(round_.firsts)
    is_last = round_.num_staged + 1 == size >= round_.minimum
    return is_last and _takes_body(round_, event, now)


def _has_minimum(round_: Round, event: DeadlinePassed, now: float) -> bool:
    is_time = not round_.is_masked and not round_.is_first_trip
    return is_time and now >= round_.deadline and round_.num_staged >= round_.minimum


def _leaves_rest(round_: Round, event: Declined, now: float) -> bool:
    """Whether all others of the second trip have uploaded, and are enough."""
    num_staged = round_.num_staged
    is_last = round_.basis is not None and num_staged + 1 == len(round_.firsts)
    return _is_awaited(round_, event, now) and is_last and num_staged >= round_.minimum


def _takes_first(round_: Round, event: FirstStaged, now: float) -> bool:
    part = round_.parts.get(event.assignment)
    is_new = part is not None and part.is_open and not part.first
    return round_.is_first_trip and is_new and now < round_.deadline


def _fills_first(round_: Round, event: FirstStaged, now: float) -> bool:
    return _takes_first(round_, event, now) and len(round_.firsts) + 1 == round_.size


def _has_firsts(round_: Round, event: DeadlinePassed, now: float) -> bool:
    is_enough = round_.is_first_trip and len(round_.firsts) >= round_.minimum
    return is_enough and now >= round_.deadline


def _may_queue(round_: Round, event: ClientReady, now: float) -> bool:
    part = round_.parts.get(event.assignment)
    is_new = part is not None and part.is_open and not part.is_ready
    return round_.is_masked and is_new and now < round_.deadline


def _fills_queue(round_: Round, event: ClientReady, now: float) -> bool:
    return _may_queue(round_, event, now) and len(round_.queue) + 1 == round_.size


def _has_queue(round_: Round, event: DeadlinePassed, now: float) -> bool:
    is_enough = round_.is_masked and len(round_.queue) >= round_.minimum
    return is_enough and now >= round_.deadline


def _is_in_session(round_: Round, event: Said, now: float) -> bool:
    return event.assignment in round_.queue


def _is_in_session_without(round_: Round, event: UploadStaged | Declined, now: float) -> bool:
    part = round_.parts.get(event.assignment)
    return part is not None and part.is_ready and part.is_open


def _has_few(round_: Round, event: DeadlinePassed, now: float) -> bool:
    """Whether the minimum was out of reach, whatever those assigned had done."""
    return now >= round_.deadline and len(round_.parts) < round_.minimum


def _is_due(round_: Round, event: DeadlinePassed, now: float) -> bool:
    return now >= round_.deadline


@dataclass(frozen=True, slots=True)
class Transition:
    """Of the rows for a phase and an event, the first whose guard holds is taken."""

    source: RoundState
    event: type[Any]
    when: str
    guard: Callable[[Round, Any, float], bool]
    action: Callable[[Round, Any, float], actions.Outcome]
    target: RoundState


TRANSITIONS: tuple[Transition, ...] = (
    Transition(
        "collecting",
        CarriedOver,
        "with a full buffer",
        _carries_buffer,
        actions.carry_over,
        "folding",
    ),
    Transition("collecting", CarriedOver, "", _always, actions.carry_over, "collecting"),
    Transition(
        "collecting", ClientCheckedIn, "a place is left", _is_new_here, actions.assign, "collecting"
    ),
    Transition(
        "collecting",
        CohortChosen,
        "for places left",
        _may_choose,
        actions.assign_chosen,
        "collecting",
    ),
    Transition(
        "collecting", UploadStaged, "the last of size", _fills_up, actions.stage_last, "folding"
    ),
    Transition("collecting", UploadStaged, "awaited", _takes_body, actions.stage, "collecting"),
    Transition(
        "collecting",
        FirstStaged,
        "the last of size",
        _fills_first,
        actions.stage_last_first,
        "basing",
    ),
    Transition(
        "collecting", FirstStaged, "awaited", _takes_first, actions.stage_first, "collecting"
    ),
    Transition(
        "collecting", ClientReady, "the last of size", _fills_queue, actions.queue_last, "masking"
    ),
    Transition("collecting", ClientReady, "awaited", _may_queue, actions.queue, "collecting"),
    Transition(
        "collecting",
        Declined,
        "the last of a second trip",
        _leaves_rest,
        actions.decline_last,
        "folding",
    ),
    Transition("collecting", Declined, "awaited", _is_awaited, actions.decline, "collecting"),
    Transition(
        "collecting", DeadlinePassed, "of an assignment", _has_overdue, actions.expire, "collecting"
    ),
    Transition(
        "collecting",
        DeadlinePassed,
        "fewer than minimum came",
        _has_few,
        actions.extend,
        "collecting",
    ),
    Transition(
        "collecting",
        DeadlinePassed,
        "minimum reached",
        _has_minimum,
        actions.fold_at_deadline,
        "folding",
    ),
    Transition(
        "collecting",
        DeadlinePassed,
        "minimum ready",
        _has_queue,
        actions.begin_at_deadline,
        "masking",
    ),
    Transition(
        "collecting",
        DeadlinePassed,
        "minimum of first trips",
        _has_firsts,
        actions.base_at_deadline,
        "basing",
    ),
    Transition("collecting", DeadlinePassed, "too few uploads", _is_due, actions.miss, "abandoned"),
    Transition("collecting", Aborted, "", _always, actions.give_up, "abandoned"),
    Transition("collecting", Restored, "", _always, actions.start_anew, "abandoned"),
    Transition("collecting", Cancelled, "", _always, actions.cancel, "abandoned"),
    Transition("basing", BasisMade, "", _always, actions.begin_second, "collecting"),
    Transition("basing", FoldFailed, "", _always, actions.give_up, "abandoned"),
    Transition("basing", Aborted, "", _always, actions.give_up, "abandoned"),
    Transition("basing", Restored, "", _always, actions.start_anew, "abandoned"),
    Transition("basing", Cancelled, "", _always, actions.cancel, "abandoned"),
    Transition("masking", Said, "by one in the session", _is_in_session, actions.keep, "masking"),
    Transition(
        "masking",
        UploadStaged,
        "of one in the session",
        _is_in_session_without,
        actions.stage,
        "masking",
    ),
    Transition(
        "masking", Declined, "without an upload", _is_in_session_without, actions.decline, "masking"
    ),
    Transition(
        "masking", DeadlinePassed, "of the session", _always, actions.move_session, "masking"
    ),
    Transition("masking", SessionEnded, "", _always, actions.end_session, "folding"),
    Transition("masking", SessionFailed, "", _always, actions.give_up, "abandoned"),
    Transition("masking", Aborted, "", _always, actions.give_up, "abandoned"),
    Transition("masking", Restored, "", _always, actions.start_anew, "abandoned"),
    Transition("masking", Cancelled, "", _always, actions.cancel, "abandoned"),
    Transition("folding", Folded, "", _always, actions.commit, "committed"),
    Transition(
        "folding",
        UploadStaged,
        "for the next buffer",
        _is_awaited_yet,
        actions.stage_for_next,
        "folding",
    ),
    Transition(
        "folding", Declined, "in an asynchronous task", _is_awaited_yet, actions.decline, "folding"
    ),
    Transition("folding", Said, "by one in the session", _is_in_session, actions.keep, "folding"),
    Transition("folding", UnmaskFailed, "", _always, actions.move_session, "masking"),
    Transition("folding", FoldFailed, "", _always, actions.give_up, "abandoned"),
    Transition("folding", Aborted, "", _always, actions.give_up, "abandoned"),
    Transition("folding", Restored, "", _always, actions.start_anew, "abandoned"),
    Transition("folding", Cancelled, "", _always, actions.cancel, "abandoned"),
)


def diagram() -> str:
    """The table as a Mermaid state diagram."""

    def lines() -> Iterator[str]:
        yield "stateDiagram-v2"
        yield "    [*] --> collecting"
        for row in TRANSITIONS:
            when = f", {row.when}" if row.when else ""
            yield f"    {row.source} --> {row.target}: {row.event.__name__}{when}"
        yield "    committed --> [*]"
        yield "    abandoned --> [*]"

    return "\n".join(lines()) + "\n"
