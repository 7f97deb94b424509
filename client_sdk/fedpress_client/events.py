"""Client events: one frozen dataclass for each thing that happens to a device.

`Event` is their union. A callback tells them apart by class, or by `kind`, a word that does not
change between releases:

    def on_event(event: Event) -> None:
        match event:
            case UpdateTrained():
                print(f"round {event.round}: {event.num_examples} examples, {event.body_bytes} B")
            case AssignmentDeclined(code=code, reason=reason):
                print(f"declined ({code}): {reason}")
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, get_args

from fedpress_protocols.messages import DeclineReason, Outcome, TaskState

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientEvent:
    """Fields of every event. `task` is empty before a task is known; `round` and `attempt` are 0
    where the event belongs to no round, or to one whose plan this release cannot read."""

    kind: ClassVar[str]

    task: str = ""
    round: int = 0
    attempt: int = 0

    @property
    def details(self) -> dict[str, Any]:
        """The fields of this kind alone, as plain JSON, without those that are not set."""
        names = [each.name for each in dataclasses.fields(self) if each.name not in _COMMON]
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON, for a line in a log."""
        common = {name: getattr(self, name) for name in ("kind", *_COMMON)}
        return common | {"details": self.details}


_COMMON = tuple(each.name for each in dataclasses.fields(ClientEvent))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEnrolled(ClientEvent):
    """The server knows this device, as client `client_id`, by the key `key_id`."""

    kind: ClassVar[str] = "enrolled"

    client_id: str
    key_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ApprovalPending(ClientEvent):
    """An operator must approve this device, known by the key `key_id`, before it takes part."""

    kind: ClassVar[str] = "unapproved"

    key_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceApproved(ClientEvent):
    """An operator has approved this device."""

    kind: ClassVar[str] = "approved"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRotated(ClientEvent):
    """This device signs with the key `key_id` from now on."""

    kind: ClassVar[str] = "rotated"

    key_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskJoined(ClientEvent):
    """The task's state is open; `pending` uploads of earlier runs await their receipts."""

    kind: ClassVar[str] = "joined"

    pending: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParticipationPostponed(ClientEvent):
    """The `condition` of `should_participate` refused, for `reason`; it is asked again after
    `seconds`."""

    kind: ClassVar[str] = "postponed"

    condition: str
    reason: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundAssigned(ClientEvent):
    """The server assigned this device a round, to be compressed by the plan's `profile`."""

    kind: ClassVar[str] = "assigned"

    profile: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEvaluated(ClientEvent):
    """The trainer measured the model of digest `model` on `num_examples` local examples."""

    kind: ClassVar[str] = "evaluated"

    model: str
    num_examples: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationFailed(ClientEvent):
    """The trainer could not measure a model; `what` is always "evaluation"."""

    kind: ClassVar[str] = "failed"

    what: str = "evaluation"
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateTrained(ClientEvent):
    """Training is done, and the update is durable on this device, `body_bytes` when encoded. Of its
    examples `num_examples` count, the task's `max_examples` at most."""

    kind: ClassVar[str] = "trained"

    num_examples: int
    body_bytes: int
    metrics: Mapping[str, float]
    figures: Mapping[str, float] = field(default_factory=dict)
    """See `UploadFigures`: nmse, residual, norm, and the seconds of train and compress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacySpent(ClientEvent):
    """This device takes part for the `participations`th time of `max_participations`, and has spent
    `epsilon` at `delta` in this task, `total_epsilon` in all; `against` says whom that covers."""

    kind: ClassVar[str] = "privacy"

    participations: int
    max_participations: int
    epsilon: float
    total_epsilon: float
    delta: float
    against: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateUploaded(ClientEvent):
    """The server acknowledged an upload: it is stored durably, and its receipt will follow."""

    kind: ClassVar[str] = "uploaded"

    assignment: str
    body_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadRefused(ClientEvent):
    """The server did not accept an upload; it stays pending until its receipt."""

    kind: ClassVar[str] = "refused"

    assignment: str
    body_bytes: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignmentDeclined(ClientEvent):
    """This device gave an assignment back. The server learns `code`; `reason` stays here. `rule`
    names the rule on masking or privacy that a plan broke."""

    kind: ClassVar[str] = "declined"

    assignment: str
    code: DeclineReason
    reason: str
    rule: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiptReceived(ClientEvent):
    """The final, signed outcome of an upload, and the server's reason."""

    kind: ClassVar[str] = "settled"

    outcome: Outcome
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionAdvanced(ClientEvent):
    """A step of a masked session; `detail` is the session's id, or the reason to leave it."""

    kind: ClassVar[str] = "session"

    step: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRestored(ClientEvent):
    """The server came back from a backup, its restore number `restore`; `undone` uploads that it
    had accepted or included are no longer part of its model."""

    kind: ClassVar[str] = "restored"

    restore: int
    undone: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientWaiting(ClientEvent):
    """The next check-in follows after about `seconds`."""

    kind: ClassVar[str] = "waiting"

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFineTuned(ClientEvent):
    """The task's last model was trained on for this device alone."""

    kind: ClassVar[str] = "fine-tuned"

    num_examples: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEnded(ClientEvent):
    """The task is over, in `state`, with the last model of digest `model`."""

    kind: ClassVar[str] = "ended"

    state: TaskState
    model: str


Event = (
    DeviceEnrolled
    | ApprovalPending
    | DeviceApproved
    | KeyRotated
    | TaskJoined
    | ParticipationPostponed
    | RoundAssigned
    | ModelEvaluated
    | EvaluationFailed
    | UpdateTrained
    | PrivacySpent
    | UpdateUploaded
    | UploadRefused
    | AssignmentDeclined
    | ReceiptReceived
    | SessionAdvanced
    | ServerRestored
    | ClientWaiting
    | ModelFineTuned
    | TaskEnded
)
"""Everything that `Client(on_event=...)` is called with."""

EVENTS: tuple[type[ClientEvent], ...] = get_args(Event)
"""The kinds of events, in the order of a device's life."""


class InRound(Protocol):
    """A plan, an upload or a receipt: whatever belongs to an attempt at a round."""

    @property
    def round(self) -> int: ...

    @property
    def attempt(self) -> int: ...


@dataclass(slots=True)
class EventLog:
    """Completes events with their task and round, logs them, and passes them on."""

    on_event: Callable[[Event], None] | None = None
    task: str = ""

    def emit(self, event: Event, about: InRound | None = None) -> None:
        round_, attempt = (about.round, about.attempt) if about is not None else (0, 0)
        _log.info("%s round %d.%d %s", event.kind, round_, attempt, event.details)
        if self.on_event is not None:
            self.on_event(dataclasses.replace(event, task=self.task, round=round_, attempt=attempt))


def markdown_table() -> str:
    """The table of docs/client-events.md."""
    rows = ["| kind | class | fields | meaning |", "|---|---|---|---|"]
    for event in EVENTS:
        names = [each.name for each in dataclasses.fields(event) if each.name not in _COMMON]
        fields = ", ".join(f"`{name}`" for name in names) or "none"
        meaning = " ".join((event.__doc__ or "").split())
        rows.append(f"| `{event.kind}` | `{event.__name__}` | {fields} | {meaning} |")
    return "\n".join(rows) + "\n"
