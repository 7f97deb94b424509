"""Masked rounds: the server learns the sum of a cohort's updates, and no single one.

Theory of operation. While the round is *collecting*, clients are assigned and train. One that has
trained is ready and waits in the queue; it does not upload yet. A session begins with those in the
queue, once `size` are ready or at the deadline with `minimum` of them; whoever else was assigned
has a receipt that says so. While the round is *masking*, the session (`MaskingServer`, a pure
machine of its own, with a deadline for each of its phases) is part of the round's state: messages,
masked uploads and deadlines go to it, and its outcome happens to the round in the same step. When
the uploads to be summed can be unmasked the round is *folding*. Wrong shares send it back to
*masking*, since those of other clients may still do; if the session fails the attempt is
*abandoned*, and a masked update is never sent a second time.

`SessionEnded` and `SessionFailed` come from the session, not from outside: a replay of the events
brings them about again, and no record has them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

from fedpress_protocols.errors import FedpressError
from fedpress_protocols.masking.server import MaskingServer
from fedpress_server.rounds import actions as do
from fedpress_server.rounds.effects import BeginSession, Effect, Keep, MoveSession, Queue
from fedpress_server.rounds.events import (
    Aggregated,
    AggregationFailed,
    ClientReady,
    DeadlinePassed,
    Declined,
    Event,
    Said,
    SessionEnded,
    SessionFailed,
    UnmaskFailed,
    UploadStaged,
)
from fedpress_server.rounds.parts import Reason
from fedpress_server.rounds.round import Outcome, Round, Transition
from fedpress_server.rounds.session import Session


class Opening(Protocol):
    """All that a session is begun with."""

    def begin(self, queue: Collection[str], now: float) -> MaskingServer:
        """Raises FedpressError where no session can begin."""


@dataclass(frozen=True)
class MaskedRound(Round):
    """A round whose uploads are masked; without `opens` it has no session, as in tests."""

    is_masked: ClassVar[bool] = True

    opens: Opening | None = field(default=None, compare=False, repr=False)
    session: Session | None = None
    """Once it has begun."""
    failure: str = ""
    """The reason for which none could."""

    @classmethod
    def table(cls) -> Sequence[Transition]:
        return TRANSITIONS

    def on(self, event: Event, now: float) -> tuple[MaskedRound, tuple[Effect, ...]]:
        """As `Round.on`; what the session comes to with the event happens in the same step."""
        after, effects = super().on(event, now)
        verdict = after._verdict()
        if not effects or verdict is None:
            return after, effects
        after, more = Round.on(after, verdict, now)
        return after, (*effects, *more)

    def _verdict(self) -> SessionEnded | SessionFailed | None:
        if self.session is not None:
            return self.session.outcome
        return SessionFailed(self.failure) if self.failure else None

    @property
    def queue(self) -> tuple[str, ...]:
        """The assignments that wait for the session or are in it, in the order of their indices."""
        return tuple(n for n, part in self.parts.items() if part.is_ready and part.reason is None)


def _may_queue(round_: MaskedRound, event: ClientReady, now: float) -> bool:
    part = round_.parts.get(event.assignment)
    return part is not None and part.is_open and not part.is_ready and now < round_.deadline


def _fills_queue(round_: MaskedRound, event: ClientReady, now: float) -> bool:
    return _may_queue(round_, event, now) and len(round_.queue) + 1 == round_.rules.size


def _has_queue(round_: MaskedRound, event: DeadlinePassed, now: float) -> bool:
    return now >= round_.deadline and len(round_.queue) >= round_.rules.minimum


def _is_in_session(round_: MaskedRound, event: Said, now: float) -> bool:
    return event.assignment in round_.queue


def _is_silent(round_: MaskedRound, event: Declined, now: float) -> bool:
    part = round_.parts.get(event.assignment)
    return part is not None and part.is_ready and part.is_open


def _takes_body(round_: MaskedRound, event: UploadStaged, now: float) -> bool:
    part, session = round_.parts.get(event.assignment), round_.session
    is_asked = part is not None and part.is_ready and part.is_open
    return is_asked and (session is None or session.takes_body(event.assignment, now))


def _is_phase_over(round_: MaskedRound, event: DeadlinePassed, now: float) -> bool:
    return round_.session is None or now >= round_.session.machine.deadline


def _queue(round_: MaskedRound, event: ClientReady, now: float) -> tuple[MaskedRound, list[Effect]]:
    part = replace(round_.parts[event.assignment], is_ready=True)
    return round_.having(event.assignment, part), [Queue(event.assignment)]


def _queue_last(round_: MaskedRound, event: ClientReady, now: float) -> Outcome:
    full, effects = _queue(round_, event, now)
    return _begin(full, "round-full", now, effects)


def _begin_at_deadline(round_: MaskedRound, event: DeadlinePassed, now: float) -> Outcome:
    return _begin(round_, "missed-deadline", now)


def _begin(
    round_: MaskedRound, reason: Reason, now: float, effects: Iterable[Effect] = ()
) -> Outcome:
    """A session with those in the queue, and nobody else."""
    late: dict[str, Reason] = {
        n: reason for n, part in round_.parts.items() if part.is_open and not part.is_ready
    }
    current, settled = round_.settled(late)
    effects = [*effects, *settled, BeginSession()]
    if current.opens is None:
        return current, effects
    clients = {name: current.parts[name].client_id for name in current.queue}
    try:
        machine = current.opens.begin(clients, now)
    except FedpressError as exc:
        return replace(current, failure=f"no session can begin: {exc.detail}"), effects
    return replace(current, session=Session.begun(machine, clients, now)), effects


def _keep(round_: MaskedRound, event: Said, now: float) -> Outcome:
    session = round_.session
    if session is not None and event.message is not None:
        session = session.said(event.assignment, event.message, now, len(round_.queue))
    return replace(round_, session=session), [Keep(event.assignment, event.step)]


def _stage(round_: MaskedRound, event: UploadStaged, now: float) -> Outcome:
    session = None if round_.session is None else round_.session.staged(event.assignment, now)
    return do.stage(replace(round_, session=session), event, now)


def _pass_deadline(round_: MaskedRound, event: DeadlinePassed, now: float) -> Outcome:
    session = None if round_.session is None else round_.session.passed(now)
    return replace(round_, session=session), [MoveSession()]


def _fail_unmasking(round_: MaskedRound, event: UnmaskFailed, now: float) -> Outcome:
    session = round_.session
    if session is not None:
        session = session.unmask_failed(event.detail, event.suspects, now)
    return replace(round_, session=session), [MoveSession()]


def _end_session(round_: MaskedRound, event: SessionEnded, now: float) -> Outcome:
    return do.close(round_, "dropped-out")


def _commit(round_: MaskedRound, event: Aggregated, now: float) -> Outcome:
    session = None if round_.session is None else round_.session.suspecting(event.suspects)
    return do.commit(replace(round_, session=session), event, now)


def _miss(round_: MaskedRound, event: DeadlinePassed, now: float) -> Outcome:
    return do.abandon_late(round_, f"{len(round_.queue)} ready")


TRANSITIONS = (
    *do.assigning(),
    Transition("collecting", ClientReady, "the last of size", _fills_queue, _queue_last, "masking"),
    Transition("collecting", ClientReady, "awaited", _may_queue, _queue, "collecting"),
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
        "collecting", DeadlinePassed, "minimum ready", _has_queue, _begin_at_deadline, "masking"
    ),
    Transition("collecting", DeadlinePassed, "too few ready", do.is_due, _miss, "abandoned"),
    Transition("masking", Said, "by one in the session", _is_in_session, _keep, "masking"),
    Transition("masking", UploadStaged, "that was announced", _takes_body, _stage, "masking"),
    Transition("masking", Declined, "without an upload", _is_silent, do.decline, "masking"),
    Transition(
        "masking", DeadlinePassed, "of its phase", _is_phase_over, _pass_deadline, "masking"
    ),
    Transition("masking", SessionEnded, "", do.always, _end_session, "folding"),
    Transition("masking", SessionFailed, "", do.always, do.give_up, "abandoned"),
    Transition("folding", Aggregated, "", do.always, _commit, "committed"),
    Transition("folding", Said, "by one in the session", _is_in_session, _keep, "folding"),
    Transition("folding", UnmaskFailed, "", do.always, _fail_unmasking, "masking"),
    Transition("folding", AggregationFailed, "", do.always, do.give_up, "abandoned"),
    *do.ends("collecting", "masking", "folding"),
)
