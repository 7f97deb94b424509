"""The commands of a task store: a change of a task, with all that is written beside it.

A command is a value: the change, and the typed payload that goes into the same transaction. The
outcome is its result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedpress_protocols.messages import TaskConfig
from fedpress_server.aggregation.aggregate import AggregationResult
from fedpress_server.aggregation.masked import Message
from fedpress_server.coordination.attempts import Attempt
from fedpress_server.identity import audit
from fedpress_server.rounds import Effect, Event
from fedpress_server.storage.leases import Lease
from fedpress_server.storage.records import ModelRecord, RoundKey, UploadRecord

Sender = tuple[str, str | None]
"""A client, and the key that signed what it sent, where a request did."""


@dataclass(frozen=True, slots=True)
class ReceivedUpload:
    """An upload's row, and what its round counts of it: the payload of `UploadStaged`."""

    key: RoundKey
    """Of the attempt that gave the assignment."""
    upload: UploadRecord
    """Without the time at which it was received, which is that of the command."""
    amounts: dict[str, float]
    sender: Sender


@dataclass(frozen=True, slots=True)
class ReceivedMessage:
    """A message of a masked session: the payload of `Said`."""

    message: Message
    body: bytes


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """A job that ends with the event, if the lease is still good; and the model that it made."""

    lease: Lease
    result: AggregationResult | None = None


@dataclass(frozen=True, slots=True)
class AuditEntry:
    by: str
    action: audit.Action
    detail: str


@dataclass(frozen=True, slots=True)
class LeftQueue:
    """Clients that wait for a place no longer, where servers share the list of them."""

    client_ids: Sequence[str]


Payload = ReceivedUpload | ReceivedMessage | FinishedJob | AuditEntry | LeftQueue


@dataclass(frozen=True, slots=True)
class Happen:
    """`event` happens to the attempt `key`, or to whichever is open if there is no key."""

    event: Event
    key: RoundKey | None = None
    payload: Payload | None = None

    @property
    def result(self) -> AggregationResult | None:
        return self.payload.result if isinstance(self.payload, FinishedJob) else None


@dataclass(frozen=True, slots=True)
class GivePlace:
    """A client asks for work in a task whose policies choose the profile of each client."""

    client_id: str
    uplink: float | None
    """As the client reports it, in bytes a second."""


@dataclass(frozen=True, slots=True)
class GivePlaces:
    """The task's selection gives the places that are left, if it is time to."""


@dataclass(frozen=True, slots=True)
class Create:
    """A task begins, with all that was checked before; it must not be there yet."""

    by: str
    model: ModelRecord
    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Continue:
    """A task that has stopped gets more rounds, from `model`."""

    by: str
    model: ModelRecord
    config: TaskConfig
    attempt: Attempt
    optimizer_state: str | None
    seen: int
    """The task's version for which all this was made."""


@dataclass(frozen=True, slots=True)
class Pause:
    """No device gets work from now on; what was given is taken, and may end the round."""

    by: str


@dataclass(frozen=True, slots=True)
class Resume:
    by: str


@dataclass(frozen=True, slots=True)
class Finish:
    """A paused task ends for good."""

    by: str


@dataclass(frozen=True, slots=True)
class Rate:
    """The best model is named anew: devices measure the last one after the task's end."""


@dataclass(frozen=True, slots=True)
class RecoverJobs:
    """The jobs that the task has come to are among the rows: an earlier release had none."""


Command = (
    Happen
    | GivePlace
    | GivePlaces
    | Create
    | Continue
    | Pause
    | Resume
    | Finish
    | Rate
    | RecoverJobs
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a command, durable when it is told; `at`: when, in Unix seconds."""

    at: float
    has_changed: bool = False
    effects: tuple[Effect, ...] = ()

    def __bool__(self) -> bool:
        """Whether the command had a place, and changed the task."""
        return self.has_changed
