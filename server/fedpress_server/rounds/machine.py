"""One attempt at one round, as a pure state machine: events and the time in, effects out.

    round, effects = round.on(event, now)

No I/O, no clock, no chance in here: ids and the time come in with the events, so replaying the
events of an attempt gives the same round. An event that no row of TRANSITIONS takes changes
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

from fedpress_protocols.messages import RoundState, TaskState
from fedpress_server.rounds.effects import Effect, Settle
from fedpress_server.rounds.events import CarriedOver, Event
from fedpress_server.rounds.parts import Carried, Part, Reason
from fedpress_server.rounds.transitions import TRANSITIONS


@dataclass(frozen=True)
class Round:
    """`places` clients are assigned at most, not counting those that declined.

    In the masked lane clients that have trained queue up, and a session begins with those in the
    queue. The session is a machine of its own, with its own deadlines: here it is known who takes
    part, whose upload is in, and how it ended.

    An asynchronous task (`max_staleness` given) has a round for each of its models. The round
    closes with the upload that completes `size`, its buffer; what is open then, the next one takes
    over, and so it does with uploads that come while the buffer is folded. There `places` bounds
    those that are open at a time, a client whose upload is in may be assigned again, and each
    assignment has `seconds` for itself: the round has no deadline.
    """

    number: int
    attempt: int
    last_round: int
    max_attempts: int
    size: int
    minimum: int
    places: int
    seconds: float
    deadline: float
    is_masked: bool = False
    phase: RoundState = "collecting"
    reason: str = ""
    parts: Mapping[str, Part] = field(default_factory=dict)
    """By assignment, in the order of their indices."""
    members: frozenset[str] | None = None
    """Who may take part; None: everybody."""
    left_out: frozenset[str] = frozenset()
    """Who may not, of those: named by the masked sessions before. A replay has no need of it."""
    chooses: bool = False
    """Whether a policy chooses among those who check in; else whoever comes first is assigned."""
    trips: int = 1
    """With two, clients first send what a basis is made of, and then the same ones upload."""
    basis: str | None = None
    """The basis, once there is one: the second trip has begun."""
    at_end: TaskState = "finished"
    """What becomes of the task after its last round."""
    max_staleness: int | None = None
    """Models that an assignment may be behind; None: the task is not asynchronous."""
    given: int = 0
    """Assignments given in the task before this attempt, if it is asynchronous."""

    def on(self, event: Event, now: float) -> tuple[Round, tuple[Effect, ...]]:
        """The round after `event` and what must be done, all of it or nothing.

        An event that has no place here gives this very round and no effects.
        """
        for row in TRANSITIONS:
            if self.phase == row.source and isinstance(event, row.event):
                if not row.guard(self, event, now):
                    continue
                after, effects = row.action(self, event, now)
                if after.phase != row.target:
                    after = replace(after, phase=row.target)
                return after, tuple(effects)
        return self, ()

    @property
    def is_over(self) -> bool:
        return self.phase in ("committed", "abandoned")

    @property
    def staged(self) -> tuple[str, ...]:
        """The assignments whose uploads wait for the fold, in the order of their indices."""
        return tuple(name for name, part in self.parts.items() if part.is_staged)

    @property
    def queue(self) -> tuple[str, ...]:
        """The assignments that wait for the session or are in it, in the order of their indices."""
        return tuple(n for n, part in self.parts.items() if part.is_ready and part.reason is None)

    @property
    def is_first_trip(self) -> bool:
        return self.trips == 2 and self.basis is None

    @property
    def firsts(self) -> tuple[str, ...]:
        """The assignments whose first trips are in, in the order of their indices."""
        return tuple(n for n, part in self.parts.items() if part.first and part.reason is None)

    @property
    def is_asynchronous(self) -> bool:
        return self.max_staleness is not None

    @property
    def takes_uploads(self) -> bool:
        """Whether uploads may come; in an asynchronous task also while a buffer is folded."""
        return self.phase == "collecting" or (self.is_asynchronous and self.phase == "folding")

    def staleness(self, part: Part) -> int:
        """How many models its own is behind the newest."""
        return 0 if part.given is None else self.number - part.given[0]

    @property
    def places_left(self) -> int:
        return 0 if self.basis is not None else self.places - self._num_taken

    @cached_property
    def num_staged(self) -> int:
        """As many as there are in `staged`."""
        return sum(part.is_staged for part in self.parts.values())

    @cached_property
    def _num_taken(self) -> int:
        return sum(map(self._takes_place, self.parts.values()))

    def _takes_place(self, part: Part) -> bool:
        return part.is_open if self.is_asynchronous else part.reason != "declined"

    @cached_property
    def may_come(self) -> int | None:
        """How many members might still be assigned; None: there may be any number."""
        if self.members is None:
            return None
        parts = self.parts.values()
        taken = {part.client_id for part in parts if part.is_open or not self.is_asynchronous}
        return len(self.members - taken - self.left_out)

    @cached_property
    def next_deadline(self) -> float:
        """When `DeadlinePassed` has something to do, while uploads are collected."""
        if not self.is_asynchronous:
            return self.deadline
        return min((part.due for part in self.parts.values() if part.is_open), default=inf)

    def admits(self, client_id: str) -> bool:
        """Whether there is a place for this client, which has none yet: one assignment for each
        client and attempt, whatever became of it; in an asynchronous task one that is open, and
        none more after one that it declined."""
        is_member = self.members is None or client_id in self.members
        is_member &= client_id not in self.left_out
        found = self.part_of(client_id)
        may_again = self.is_asynchronous and found is not None
        is_free = found is None or (may_again and found[1].is_done)
        return is_member and self.places_left > 0 and is_free

    def part_of(self, client_id: str) -> tuple[str, Part] | None:
        """The client's newest assignment in this attempt, whatever became of it."""
        name = self._by_client.get(client_id)
        return None if name is None else (name, self.parts[name])

    @cached_property
    def _by_client(self) -> Mapping[str, str]:
        return {part.client_id: name for name, part in self.parts.items()}

    def is_stale(self, part: Part) -> bool:
        return self.max_staleness is not None and self.staleness(part) > self.max_staleness

    @property
    def opening(self) -> CarriedOver | None:
        """What the next attempt is to take over."""
        if not self.is_asynchronous:
            return None
        here, own = (self.number, self.attempt), 0
        carried = []
        for name, part in self.parts.items():
            own += part.given is None
            if part.reason is None:
                given = part.given or here
                whose = (name, part.client_id, *given)
                left = (part.upload, part.profile)
                carried.append(Carried(*whose, part.index, part.turn, part.due, *left))
        return CarriedOver(self.given + own, tuple(carried))

    def having(self, assignment: str, part: Part) -> Round:
        """With `part` under `assignment`, be it new or not. What is counted of all parts is counted
        on: a round of n clients makes some 2 n of these steps."""
        before = self.parts.get(assignment)
        after = replace(self, parts={**self.parts, assignment: part})
        staged, taken = self.num_staged + part.is_staged, self._num_taken + self._takes_place(part)
        by_client = self._by_client
        if before is not None:
            staged, taken = staged - before.is_staged, taken - self._takes_place(before)
        elif part.client_id not in by_client or by_client[part.client_id] != assignment:
            by_client = {**by_client, part.client_id: assignment}
        known = {"num_staged": staged, "_num_taken": taken, "_by_client": by_client}
        vars(after).update(known)  # where cached properties keep what they found
        return after

    def settled(self, reasons: Mapping[str, Reason]) -> tuple[Round, list[Effect]]:
        parts = dict(self.parts)
        for name, reason in reasons.items():
            parts[name] = replace(parts[name], reason=reason)
        effects: list[Effect] = [Settle(n, r, parts[n].upload) for n, r in reasons.items()]
        return replace(self, parts=parts), effects

    def settled_all(self, reason: Reason) -> tuple[Round, list[Effect]]:
        return self.settled({n: reason for n, part in self.parts.items() if part.reason is None})
