"""The common part of every round protocol: rules, state, and the step by a table.

    round, effects = round.on(event, now)

A protocol is a pure state machine: a state dataclass and one table, in a file of its own
(`synchronous`, `buffered`, `masked`). No I/O, no clock, no chance in here: ids and the time come in
with the events, so replaying the events of an attempt gives the same round. An event that no row of
the table takes changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, TypeVar

from fedpress_protocols.messages import RoundState, TaskState
from fedpress_server.rounds.effects import Effect, OpenRound, Settle
from fedpress_server.rounds.events import CarriedOver, Event
from fedpress_server.rounds.parts import Part, Reason

Outcome = tuple["Round", Iterable[Effect]]
RoundT = TypeVar("RoundT", bound="Round")


@dataclass(frozen=True, slots=True)
class Transition:
    """Of the rows for a phase and an event, the first whose guard holds is taken."""

    source: RoundState
    event: type[Any]
    when: str
    guard: Callable[[Any, Any, float], bool]
    action: Callable[[Any, Any, float], tuple[Any, Iterable[Effect]]]
    target: RoundState


@dataclass(frozen=True)
class Rules:
    """The terms of an attempt at a round, fixed when it opens.

    `places` clients are assigned at most, not counting those that declined. With `chooses` a policy
    gives the places to those who wait; else whoever comes first has one.
    """

    number: int
    attempt: int
    last_round: int
    max_attempts: int
    size: int
    minimum: int
    places: int
    seconds: float
    members: frozenset[str] | None = None
    """The clients that may take part; None: all."""
    chooses: bool = False
    at_end: TaskState = "finished"
    """The state of the task after its last round."""


@dataclass(frozen=True)
class Round:
    """One attempt at one round."""

    is_masked: ClassVar[bool] = False
    is_asynchronous: ClassVar[bool] = False

    rules: Rules
    deadline: float
    phase: RoundState = "collecting"
    reason: str = ""
    parts: Mapping[str, Part] = field(default_factory=dict)
    """By assignment, in the order of their indices."""
    left_out: frozenset[str] = frozenset()
    """Clients that take no part: without privacy budget left or, under masks, named by the sessions
    before. A replay has no need of it."""
    participations: int = field(default=0, compare=False)
    """Under privacy terms: how often any client took part in the task before, at most."""
    num_spent: int = field(default=0, compare=False)
    """Under privacy terms: the number of clients left out because they have no budget left."""
    num_resting: int = field(default=0, compare=False)
    """Under privacy terms: the number of clients left out until a later round, by `separation`."""

    @classmethod
    def table(cls) -> Sequence[Transition]:
        """The transitions of the protocol."""
        raise NotImplementedError

    def on(self: RoundT, event: Event, now: float) -> tuple[RoundT, tuple[Effect, ...]]:
        """The round after `event` and what must be done, all of it or nothing.

        An event that has no place here gives this very round and no effects.
        """
        for row in self.table():
            if self.phase == row.source and isinstance(event, row.event):
                if not row.guard(self, event, now):
                    continue
                after, effects = row.action(self, event, now)
                if after.phase != row.target:
                    after = replace(after, phase=row.target)
                return after, tuple(effects)
        return self, ()

    @property
    def number(self) -> int:
        return self.rules.number

    @property
    def attempt(self) -> int:
        return self.rules.attempt

    @property
    def chooses(self) -> bool:
        return self.rules.chooses

    @property
    def is_over(self) -> bool:
        return self.phase in ("committed", "abandoned")

    @property
    def staged(self) -> tuple[str, ...]:
        """The assignments whose uploads wait to be aggregated, in the order of their indices."""
        return tuple(name for name, part in self.parts.items() if part.is_staged)

    @property
    def takes_uploads(self) -> bool:
        """Whether uploads may come."""
        return self.phase == "collecting"

    @property
    def places_left(self) -> int:
        return self.rules.places - self._num_taken

    @cached_property
    def num_staged(self) -> int:
        """As many as there are in `staged`."""
        return sum(part.is_staged for part in self.parts.values())

    @cached_property
    def _num_taken(self) -> int:
        return sum(map(self.takes_place, self.parts.values()))

    def takes_place(self, part: Part) -> bool:
        """Whether an assignment counts among the `places`."""
        return part.reason != "declined"

    @cached_property
    def may_come(self) -> int | None:
        """Number of members that might still be assigned; None for any number."""
        if self.rules.members is None:
            return None
        return len(self.rules.members - self._taken_clients())

    def _taken_clients(self) -> frozenset[str]:
        return self.left_out.union(part.client_id for part in self.parts.values())

    @property
    def next_deadline(self) -> float:
        """Time of the next `DeadlinePassed` that has an effect, while uploads are collected."""
        return self.deadline

    def admits(self, client_id: str) -> bool:
        """Whether there is a place for this client, which has none yet: one assignment for each
        client and attempt, whatever became of it."""
        members = self.rules.members
        is_member = (members is None or client_id in members) and client_id not in self.left_out
        return is_member and self.places_left > 0 and self.part_of(client_id) is None

    def part_of(self, client_id: str) -> tuple[str, Part] | None:
        """The client's newest assignment in this attempt, whatever became of it."""
        name = self._by_client.get(client_id)
        return None if name is None else (name, self.parts[name])

    @cached_property
    def _by_client(self) -> Mapping[str, str]:
        return {part.client_id: name for name, part in self.parts.items()}

    def staleness(self, part: Part) -> int:
        """Number of models that the part's own is behind the newest."""
        return 0

    @property
    def opening(self) -> CarriedOver | None:
        """The first event of the next attempt, if it takes something over."""
        return None

    def having(self: RoundT, assignment: str, part: Part) -> RoundT:
        """With `part` under `assignment`, be it new or not. What is counted of all parts is counted
        on: a round of n clients makes some 2 n of these steps."""
        before = self.parts.get(assignment)
        after = replace(self, parts={**self.parts, assignment: part})
        staged, taken = self.num_staged + part.is_staged, self._num_taken + self.takes_place(part)
        by_client = self._by_client
        if before is not None:
            staged, taken = staged - before.is_staged, taken - self.takes_place(before)
        elif part.client_id not in by_client or by_client[part.client_id] != assignment:
            by_client = {**by_client, part.client_id: assignment}
        cached = {"num_staged": staged, "_num_taken": taken, "_by_client": by_client}
        vars(after).update(cached)  # where cached properties keep what they found
        return after

    def settled(self: RoundT, reasons: Mapping[str, Reason]) -> tuple[RoundT, list[Effect]]:
        parts = dict(self.parts)
        for name, reason in reasons.items():
            parts[name] = replace(parts[name], reason=reason)
        effects: list[Effect] = [Settle(n, r, parts[n].upload) for n, r in reasons.items()]
        return replace(self, parts=parts), effects

    def settled_all(self: RoundT, reason: Reason) -> tuple[RoundT, list[Effect]]:
        return self.settled({n: reason for n, part in self.parts.items() if part.reason is None})

    def next_attempt(self) -> OpenRound:
        return OpenRound(self.number, self.attempt + 1, self.opening)

    def next_round(self) -> OpenRound:
        return OpenRound(self.number + 1, 1, self.opening)


def diagram(table: Sequence[Transition]) -> str:
    """A table as a Mermaid state diagram."""

    def lines() -> Iterator[str]:
        yield "stateDiagram-v2"
        yield "    [*] --> collecting"
        for row in table:
            when = f", {row.when}" if row.when else ""
            yield f"    {row.source} --> {row.target}: {row.event.__name__}{when}"
        yield "    committed --> [*]"
        yield "    abandoned --> [*]"

    return "\n".join(lines()) + "\n"
