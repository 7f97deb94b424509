"""One attempt at one round, as a pure state machine: events and the time in, effects out.

    round, effects = round.on(event, now)

No I/O, no clock, no chance in here: ids and the time come in with the events, so replaying the
events of an attempt gives the same round. TRANSITIONS is all there is to know; an event that no row
takes changes nothing. `diagram()` draws the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from fedpress_protocols.messages import RoundState, TaskState

Reason = Literal[
    "included", "round-full", "round-abandoned", "missed-deadline", "cancelled", "declined"
]


# Events


@dataclass(frozen=True, slots=True)
class ClientCheckedIn:
    """A client asks for work; `assignment` is the id it gets if there is any."""

    client_id: str
    assignment: str


@dataclass(frozen=True, slots=True)
class UploadStaged:
    """The body of an upload, checked, lies on disk; `upload` is its SHA-256."""

    assignment: str
    upload: str


@dataclass(frozen=True, slots=True)
class Declined:
    assignment: str


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    pass


@dataclass(frozen=True, slots=True)
class Folded:
    """The next model lies on disk."""

    model: str


@dataclass(frozen=True, slots=True)
class FoldFailed:
    detail: str


@dataclass(frozen=True, slots=True)
class Aborted:
    """An operator gives this attempt up; the next one follows."""

    detail: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """An operator ends the task."""

    detail: str


Event = (
    ClientCheckedIn
    | UploadStaged
    | Declined
    | DeadlinePassed
    | Folded
    | FoldFailed
    | Aborted
    | Cancelled
)
_EVENTS: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (
        ClientCheckedIn,
        UploadStaged,
        Declined,
        DeadlinePassed,
        Folded,
        FoldFailed,
        Aborted,
        Cancelled,
    )
}


def to_record(event: Event) -> dict[str, str]:
    """Plain JSON, from which `from_record` makes the event again."""
    return {"event": type(event).__name__, **asdict(event)}


def from_record(record: Mapping[str, str]) -> Event:
    fields = dict(record)
    event: Event = _EVENTS[fields.pop("event")](**fields)
    return event


# Effects


@dataclass(frozen=True, slots=True)
class Assign:
    assignment: str
    client_id: str
    index: int


@dataclass(frozen=True, slots=True)
class Stage:
    """The upload counts as received and may be acknowledged."""

    assignment: str
    upload: str


@dataclass(frozen=True, slots=True)
class Settle:
    """Issue the assignment's one receipt."""

    assignment: str
    reason: Reason
    upload: str | None


@dataclass(frozen=True, slots=True)
class StartFold:
    pass


@dataclass(frozen=True, slots=True)
class Extend:
    """Too few came: the deadline moves, and the attempt does not count."""

    deadline: float


@dataclass(frozen=True, slots=True)
class OpenRound:
    """The round `number`, attempt `attempt`, begins."""

    number: int
    attempt: int


@dataclass(frozen=True, slots=True)
class EndTask:
    state: TaskState


Effect = Assign | Stage | Settle | StartFold | Extend | OpenRound | EndTask


# The machine


@dataclass(frozen=True, slots=True)
class Part:
    """What one client has to do with this attempt; `reason` is set once, when it is settled."""

    client_id: str
    index: int
    upload: str | None = None
    reason: Reason | None = None

    @property
    def is_open(self) -> bool:
        return self.upload is None and self.reason is None

    @property
    def is_staged(self) -> bool:
        return self.upload is not None and self.reason is None


@dataclass(frozen=True)
class Round:
    """`places` clients are assigned at most, not counting those that declined."""

    number: int
    attempt: int
    last_round: int
    max_attempts: int
    size: int
    minimum: int
    places: int
    seconds: float
    deadline: float
    phase: RoundState = "collecting"
    reason: str = ""
    parts: Mapping[str, Part] = field(default_factory=dict)
    """By assignment, in the order of their indices."""

    def on(self, event: Event, now: float) -> tuple[Round, tuple[Effect, ...]]:
        """The round after `event` and what must be done, all of it or nothing.

        An event that has no place here gives this very round and no effects.
        """
        for row in TRANSITIONS:
            if self.phase == row.source and isinstance(event, row.event):
                if not row.guard(self, event, now):
                    continue
                after, effects = row.action(self, event, now)
                return replace(after, phase=row.target), tuple(effects)
        return self, ()

    @property
    def is_over(self) -> bool:
        return self.phase in ("committed", "abandoned")

    @property
    def staged(self) -> tuple[str, ...]:
        """The assignments whose uploads wait for the fold, in the order of their indices."""
        return tuple(name for name, part in self.parts.items() if part.is_staged)

    @cached_property
    def places_left(self) -> int:
        return self.places - sum(part.reason != "declined" for part in self.parts.values())

    def part_of(self, client_id: str) -> tuple[str, Part] | None:
        """The client's assignment in this attempt, whatever became of it."""
        name = self._by_client.get(client_id)
        return None if name is None else (name, self.parts[name])

    @cached_property
    def _by_client(self) -> Mapping[str, str]:
        return {part.client_id: name for name, part in self.parts.items()}

    def _with(self, assignment: str, part: Part) -> Round:
        return replace(self, parts={**self.parts, assignment: part})

    def _settle(self, reasons: Mapping[str, Reason]) -> tuple[Round, list[Effect]]:
        parts = dict(self.parts)
        for name, reason in reasons.items():
            parts[name] = replace(parts[name], reason=reason)
        effects: list[Effect] = [Settle(n, r, parts[n].upload) for n, r in reasons.items()]
        return replace(self, parts=parts), effects

    def _settle_all(self, *, open_ones: Reason, staged: Reason) -> tuple[Round, list[Effect]]:
        return self._settle(
            {
                name: open_ones if part.is_open else staged
                for name, part in self.parts.items()
                if part.reason is None
            }
        )


_Step = tuple[Round, Iterable[Effect]]


def _assign(round_: Round, event: ClientCheckedIn, now: float) -> _Step:
    index = len(round_.parts)
    assigned = round_._with(event.assignment, Part(event.client_id, index))
    return assigned, [Assign(event.assignment, event.client_id, index)]


def _stage(round_: Round, event: UploadStaged, now: float) -> _Step:
    part = replace(round_.parts[event.assignment], upload=event.upload)
    return round_._with(event.assignment, part), [Stage(event.assignment, event.upload)]


def _stage_last(round_: Round, event: UploadStaged, now: float) -> _Step:
    full, effects = _stage(round_, event, now)
    return _close(full, "round-full", effects)


def _close(round_: Round, reason: Reason, effects: Iterable[Effect] = ()) -> _Step:
    late: dict[str, Reason] = {n: reason for n, part in round_.parts.items() if part.is_open}
    closed, settled = round_._settle(late)
    return closed, [*effects, *settled, StartFold()]


def _decline(round_: Round, event: Declined, now: float) -> _Step:
    return round_._settle({event.assignment: "declined"})


def _fold_at_deadline(round_: Round, event: DeadlinePassed, now: float) -> _Step:
    return _close(round_, "missed-deadline")


def _extend(round_: Round, event: DeadlinePassed, now: float) -> _Step:
    deadline = now + round_.seconds
    return replace(round_, deadline=deadline), [Extend(deadline)]


def _miss(round_: Round, event: DeadlinePassed, now: float) -> _Step:
    detail = f"{len(round_.staged)} uploads at the deadline, fewer than {round_.minimum}"
    settled, effects = round_._settle_all(open_ones="missed-deadline", staged="round-abandoned")
    return _abandon(settled, detail, effects)


def _give_up(round_: Round, event: FoldFailed | Aborted, now: float) -> _Step:
    settled, effects = round_._settle_all(open_ones="round-abandoned", staged="round-abandoned")
    return _abandon(settled, event.detail, effects)


def _abandon(round_: Round, detail: str, effects: Iterable[Effect]) -> _Step:
    then: Effect = OpenRound(round_.number, round_.attempt + 1)
    if round_.attempt >= round_.max_attempts:
        then = EndTask("cancelled")
    return replace(round_, reason=detail), [*effects, then]


def _cancel(round_: Round, event: Cancelled, now: float) -> _Step:
    settled, effects = round_._settle_all(open_ones="cancelled", staged="cancelled")
    return replace(settled, reason=event.detail), [*effects, EndTask("cancelled")]


def _commit(round_: Round, event: Folded, now: float) -> _Step:
    settled, effects = round_._settle({name: "included" for name in round_.staged})
    then: Effect = OpenRound(round_.number + 1, 1)
    if round_.number >= round_.last_round:
        then = EndTask("finished")
    return settled, [*effects, then]


def _always(round_: Round, event: Any, now: float) -> bool:
    return True


def _is_new_here(round_: Round, event: ClientCheckedIn, now: float) -> bool:
    """One assignment for each client and attempt, whatever became of it."""
    is_new = round_.part_of(event.client_id) is None
    return is_new and round_.places_left > 0 and now < round_.deadline


def _is_awaited(round_: Round, event: UploadStaged | Declined, now: float) -> bool:
    part = round_.parts.get(event.assignment)
    return part is not None and part.is_open and now < round_.deadline


def _fills_up(round_: Round, event: UploadStaged, now: float) -> bool:
    return _is_awaited(round_, event, now) and len(round_.staged) + 1 == round_.size


def _has_minimum(round_: Round, event: DeadlinePassed, now: float) -> bool:
    return now >= round_.deadline and len(round_.staged) >= round_.minimum


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
    action: Callable[[Round, Any, float], _Step]
    target: RoundState


TRANSITIONS: tuple[Transition, ...] = (
    Transition(
        "collecting", ClientCheckedIn, "a place is left", _is_new_here, _assign, "collecting"
    ),
    Transition("collecting", UploadStaged, "the last of size", _fills_up, _stage_last, "folding"),
    Transition("collecting", UploadStaged, "awaited", _is_awaited, _stage, "collecting"),
    Transition("collecting", Declined, "awaited", _is_awaited, _decline, "collecting"),
    Transition(
        "collecting", DeadlinePassed, "fewer than minimum came", _has_few, _extend, "collecting"
    ),
    Transition(
        "collecting", DeadlinePassed, "minimum reached", _has_minimum, _fold_at_deadline, "folding"
    ),
    Transition("collecting", DeadlinePassed, "too few uploads", _is_due, _miss, "abandoned"),
    Transition("collecting", Aborted, "", _always, _give_up, "abandoned"),
    Transition("collecting", Cancelled, "", _always, _cancel, "abandoned"),
    Transition("folding", Folded, "", _always, _commit, "committed"),
    Transition("folding", FoldFailed, "", _always, _give_up, "abandoned"),
    Transition("folding", Aborted, "", _always, _give_up, "abandoned"),
    Transition("folding", Cancelled, "", _always, _cancel, "abandoned"),
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
