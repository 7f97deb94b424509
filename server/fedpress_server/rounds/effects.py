"""The effects of an event, all of them done in the transaction that writes the event."""

from __future__ import annotations

from dataclasses import dataclass

from fedpress_protocols.messages import TaskState
from fedpress_server.rounds.events import CarriedOver
from fedpress_server.rounds.parts import Reason, Step


@dataclass(frozen=True, slots=True)
class Assign:
    assignment: str
    client_id: str
    index: int
    turn: int = 0
    profile: str | None = None


@dataclass(frozen=True, slots=True)
class CallUp:
    """Those who were chosen wait to hear of it."""


@dataclass(frozen=True, slots=True)
class Begin:
    """The attempt has taken over what it was to."""


@dataclass(frozen=True, slots=True)
class Stage:
    """The upload counts as received and may be acknowledged."""

    assignment: str
    upload: str


@dataclass(frozen=True, slots=True)
class Queue:
    """The client waits for the session, which will begin with all that wait by then."""

    assignment: str


@dataclass(frozen=True, slots=True)
class BeginSession:
    """With those in the queue, and nobody else."""


@dataclass(frozen=True, slots=True)
class Keep:
    """The message counts as received and may be acknowledged."""

    assignment: str
    step: Step


@dataclass(frozen=True, slots=True)
class MoveSession:
    """The session goes on without those that have not answered, or with more of their answers."""


@dataclass(frozen=True, slots=True)
class Settle:
    """Issue the assignment's one receipt."""

    assignment: str
    reason: Reason
    upload: str | None


@dataclass(frozen=True, slots=True)
class StartAggregation:
    pass


@dataclass(frozen=True, slots=True)
class Extend:
    """Too few came: the deadline moves, and the attempt does not count."""

    deadline: float


@dataclass(frozen=True, slots=True)
class OpenRound:
    """The round `number`, attempt `attempt`, begins; in an asynchronous task with `opening`."""

    number: int
    attempt: int
    opening: CarriedOver | None = None


@dataclass(frozen=True, slots=True)
class EndTask:
    state: TaskState


Effect = (
    Assign
    | CallUp
    | Begin
    | Stage
    | Queue
    | BeginSession
    | Keep
    | MoveSession
    | Settle
    | StartAggregation
    | Extend
    | OpenRound
    | EndTask
)
