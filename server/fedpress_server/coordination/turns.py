"""What happens to a task at about the same time, as one step: one claim, one commit.

Of many devices that check in or upload, each needs its event on the disk before it is answered, and
each event the one before it. Those that wait for the task's lock leave a wish; whoever has the lock
next takes all of them, one after the other in memory, and writes them in one transaction. A commit
costs the same for one as for many.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy.engine import Connection

from fedpress_protocols.errors import UnknownDevice
from fedpress_server.coordination.attempts import Attempt
from fedpress_server.rounds import (
    Assign,
    ClientCheckedIn,
    Effect,
    Event,
    Stage,
    UploadStaged,
    to_record,
)
from fedpress_server.storage import identities, participants, records
from fedpress_server.storage.records import AssignmentRecord, RoundKey, UploadRecord

TOGETHER = 64
"""Wishes that one transaction takes."""

Also = Callable[[Connection, float], None]


@dataclass(slots=True)
class Received:
    """An upload's row, and what its round counts of it: what is written with `UploadStaged`."""

    key: RoundKey
    """Of the attempt that gave the assignment."""
    upload: UploadRecord
    """Without the time at which it was received."""
    amounts: dict[str, int]
    client_id: str
    key_id: str | None = None
    """Of the key that signed it; None where the sender is told by another way than a request."""
    received_at: float = 0.0
    """Once it is written."""

    def __call__(self, connection: Connection, now: float) -> None:
        write_received(connection, [self], now)


def write_received(connection: Connection, received: Sequence[Received], now: float) -> None:
    """Raises UnknownDevice if one of the devices was revoked, or has left the key that signed."""
    check_senders(connection, [(each.client_id, each.key_id) for each in received])
    counts: dict[RoundKey, dict[str, int]] = {}
    for each in received:
        each.received_at = now
        sums = counts.setdefault(each.key, {})
        for name, amount in each.amounts.items():
            sums[name] = sums.get(name, 0) + amount
    records.add_uploads(connection, [each.upload for each in received], now)
    for key, sums in counts.items():
        records.count(connection, key, **sums)


def check_senders(connection: Connection, senders: Sequence[tuple[str, str | None]]) -> None:
    """That all of them, clients and the keys that they signed with, may still send; raises
    UnknownDevice."""
    key_ids = {key_id for _, key_id in senders if key_id is not None}
    strangers = identities.strangers_among(connection, key_ids) if key_ids else set[str]()
    others = [client_id for client_id, key_id in senders if key_id is None]
    revoked = records.revoked_among(connection, others) if others else set[str]()
    if strangers or revoked:
        num = len(strangers) + len(revoked)
        raise UnknownDevice(f"{num} of these devices were revoked, or signed with a former key")


def note_delivered(connection: Connection, received: Sequence[Received], now: float) -> None:
    """For choices among the clients to come; see `participants`."""
    for each in received:
        participants.has_delivered(
            connection,
            each.key[0],
            each.client_id,
            num_examples=each.upload.num_examples,
            loss=each.upload.loss,
            at=now,
        )


@dataclass(slots=True, eq=False)
class Wish:
    """An event that is to happen to a task, to the attempt `key` or to whichever is open; `also`
    is written with it. The outcome is its effects, none if it had no place."""

    event: Event
    key: RoundKey | None
    also: Also | None
    outcome: asyncio.Future[tuple[Effect, ...]]

    def grant(self, effects: tuple[Effect, ...]) -> None:
        if not self.outcome.done():  # or nobody waits any more
            self.outcome.set_result(effects)

    def fail(self, exc: BaseException) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(exc)


def may_wait(event: Event) -> bool:
    """Whether an event is of those that come in numbers."""
    return isinstance(event, UploadStaged | ClientCheckedIn)


@dataclass(frozen=True, slots=True)
class Turn:
    """What some wishes come to: the attempt after them, and the effects of each; of events with a
    place, the numbers too."""

    after: Attempt | None
    outcomes: tuple[tuple[Wish, int, tuple[Effect, ...]], ...]

    @property
    def taken(self) -> list[tuple[Wish, int, tuple[Effect, ...]]]:
        """Those that something came of."""
        return [each for each in self.outcomes if each[2]]

    def write(self, connection: Connection, now: float) -> None:
        if self.after is None:
            return
        key, terms = self.after.key, self.after.terms
        events, given, received, others = [], [], list[Received](), list[Also]()
        for wish, seq, effects in self.taken:
            events.append((seq, to_record(wish.event)))
            for effect in effects:
                if isinstance(effect, Assign):
                    profile = terms.profile(effect.index, effect.profile)
                    row = (effect.assignment, *key, effect.client_id, effect.index, profile)
                    given.append(AssignmentRecord(*row, now, None, effect.turn))
            if isinstance(wish.also, Received):
                received.append(wish.also)
            elif wish.also is not None:
                others.append(wish.also)
        records.add_events(connection, key, now, events)
        if given:
            records.add_assignments(connection, given)
            records.count(connection, key, assigned=len(given))
        if received:
            write_received(connection, received, now)
            if self.after.round.chooses:
                note_delivered(connection, received, now)
        for also in others:
            also(connection, now)


def turn_of(attempt: Attempt | None, wishes: Iterable[Wish], now: float) -> Turn:
    """As many of `wishes`, from the first on, as change nothing but places and uploads; none in the
    masked lane, where a session may begin with any of them."""
    if attempt is not None and attempt.round.is_masked:
        return Turn(attempt, ())
    outcomes: list[tuple[Wish, int, tuple[Effect, ...]]] = []
    for wish in wishes:
        if attempt is None or not attempt.concerns(wish.event, wish.key):
            outcomes.append((wish, 0, ()))
            continue
        after, effects = attempt.after(wish.event, now)
        if not all(isinstance(each, Assign | Stage) for each in effects):
            break
        outcomes.append((wish, after.seq, effects))
        attempt = after
    return Turn(attempt, tuple(outcomes))
