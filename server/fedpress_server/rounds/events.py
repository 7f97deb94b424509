"""The events of an attempt at a round, as plain data that is written down and replayed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fedpress_protocols.errors import ServerError
from fedpress_protocols.masking.messages import ClientMessage
from fedpress_server.rounds.parts import Carried, Step


@dataclass(frozen=True, slots=True)
class CarriedOver:
    """The first event of an attempt of an asynchronous task: what it takes over from the one
    before, and how many assignments the task has `given` so far."""

    given: int = 0
    carried: tuple[Carried, ...] = ()


@dataclass(frozen=True, slots=True)
class ClientCheckedIn:
    """A client asks for work; `assignment` is the id it gets if there is any, and `profile` what it
    is to use of the plan's, None for the next in turn."""

    client_id: str
    assignment: str
    profile: str | None = None


@dataclass(frozen=True, slots=True)
class CohortChosen:
    """The task's policy gives places to clients that have checked in; see `selection`."""

    chosen: tuple[ClientCheckedIn, ...]


@dataclass(frozen=True, slots=True)
class ClientReady:
    """In the masked lane: a client has trained, and waits for the session to begin."""

    assignment: str


@dataclass(frozen=True, slots=True)
class Said:
    """A client's message of the session, admitted and kept; `digest` is its SHA-256. The `message`
    itself lies apart from the event's record, and goes when the attempt is over."""

    assignment: str
    step: Step
    digest: str
    message: ClientMessage | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """The uploads that are staged can be unmasked, and there will be no others."""


@dataclass(frozen=True, slots=True)
class UnmaskFailed:
    """Shares were wrong; those of other clients may still do, unless the slots at fault, the
    `suspects`, are known."""

    detail: str
    suspects: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SessionFailed:
    """Those who are left in the session cannot bring it to its end."""

    detail: str


@dataclass(frozen=True, slots=True)
class UploadStaged:
    """The body of an upload, checked, lies on disk; `upload` is its SHA-256."""

    assignment: str
    upload: str


@dataclass(frozen=True, slots=True)
class Declined:
    """A client gives its assignment back; `reason` is a `DeclineReason`, `other` or `unstated`, and
    `needed_seconds` what a client that is too slow expects to need."""

    assignment: str
    reason: str = "unstated"
    needed_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """`store_was_away`: uploads and downloads were put off, so that few uploads tell nothing."""

    store_was_away: bool = False


@dataclass(frozen=True, slots=True)
class Aggregated:
    """The next model lies on disk. With a reason to `stop` the task ends with it; `best` is the
    model that devices measured best so far. `comparison`: of a probe, see `policies.Comparison`."""

    model: str
    stop: str = ""
    best: str | None = None
    comparison: Mapping[str, Any] | None = None
    suspects: tuple[int, ...] = ()
    """Of a masked session: the slots whose shares were wrong."""


@dataclass(frozen=True, slots=True)
class AggregationFailed:
    detail: str


@dataclass(frozen=True, slots=True)
class Aborted:
    """An operator gives this attempt up; the next one follows."""

    detail: str


@dataclass(frozen=True, slots=True)
class Restored:
    """The attempt was open in the backup that the server came back from; devices may know another
    end of it, so all of it is given up, and the next one follows, whatever their number."""

    detail: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """An operator ends the task."""

    detail: str


@dataclass(frozen=True, slots=True)
class Retired:
    """An event of an earlier release that no protocol has any more; it changes nothing."""

    name: str


Event = (
    CarriedOver
    | ClientCheckedIn
    | CohortChosen
    | ClientReady
    | Said
    | SessionEnded
    | UnmaskFailed
    | SessionFailed
    | Retired
    | UploadStaged
    | Declined
    | DeadlinePassed
    | Aggregated
    | AggregationFailed
    | Aborted
    | Restored
    | Cancelled
)
_RETIRED = frozenset({"FirstStaged", "BasisMade"})
_NAMES: dict[type[Any], str] = {Aggregated: "Folded", AggregationFailed: "FoldFailed"}
"""Names in the database of events whose class has another."""
_EVENTS: dict[str, type[Any]] = {
    _NAMES.get(cls, cls.__name__): cls
    for cls in (
        CarriedOver,
        ClientCheckedIn,
        CohortChosen,
        ClientReady,
        Said,
        SessionEnded,
        UnmaskFailed,
        SessionFailed,
        UploadStaged,
        Declined,
        DeadlinePassed,
        Aggregated,
        AggregationFailed,
        Aborted,
        Restored,
        Cancelled,
    )
}


def to_record(event: Event) -> dict[str, Any]:
    """Plain JSON, from which `from_record` makes the event again."""
    name = _NAMES.get(type(event), type(event).__name__)
    if isinstance(event, UploadStaged | ClientCheckedIn):  # of which there are many: all plain
        return {"event": name, **{each: getattr(event, each) for each in event.__slots__}}
    if event == DeadlinePassed():
        return {"event": name}  # readable for servers of earlier releases
    if isinstance(event, Said):
        event = replace(event, message=None)
        fields = asdict(event)
        del fields["message"]
        return {"event": name, **fields}
    return {"event": name, **asdict(event)}


def from_record(record: Mapping[str, Any], message: ClientMessage | None = None) -> Event:
    """The event of a record; `message` is that of `Said`."""
    fields = dict(record)
    name = fields.pop("event")
    if name not in _EVENTS:
        if name in _RETIRED:
            return Retired(name)
        raise ServerError(f"an event {name!r} of a later release", hint="update this server")
    if "carried" in fields:
        fields["carried"] = tuple(Carried(**each) for each in fields["carried"])
    if "suspects" in fields:
        fields["suspects"] = tuple(fields["suspects"])
    if "chosen" in fields:
        fields["chosen"] = tuple(ClientCheckedIn(**each) for each in fields["chosen"])
    if message is not None:
        fields["message"] = message
    event: Event = _EVENTS[name](**fields)
    return event
