"""The server of a masked session, as a pure state machine: events and the time in, effects out.

    if server.admit(message, identity):           # raises for what must be refused
        server, effects = server.on(message, now)  # store the event, then act on the effects
    answer = server.answer(Roster, identity)       # what a GET gives; None while it is not there

Like a round (`rounds.py`), a session is event-sourced: replaying its events restores it and all its
answers, to the byte. Roster, sharers and survivors are each decided once, by an event that is
stored before any answer depends on it: no client is asked for both secrets of another client, or
about two survivor sets.

No I/O, no clock, no randomness. The driver handles bodies: it stages a whole body, compares it with
`MaskedInput.content`, and only then passes the header in; it may add the words of bodies in any
order. TRANSITIONS is the complete behaviour; an event without a matching row changes nothing.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from fedpress_protocols.errors import (
    ConfigurationError,
    Conflict,
    Forbidden,
    IncompatiblePlan,
    InvalidKey,
    MalformedRequest,
    RoundClosed,
    UpdateConflict,
)
from fedpress_protocols.masking import shamir
from fedpress_protocols.masking.cohort import Cohort
from fedpress_protocols.masking.keys import (
    HYBRID_SEAL_BYTES,
    INTRODUCTION_BYTES,
    SEAL_BYTES,
    check_public,
    same,
)
from fedpress_protocols.masking.messages import (
    Abandoned,
    Advertise,
    ClientMessage,
    Complaint,
    Consent,
    Consents,
    Inbox,
    MaskedInput,
    Offer,
    Receipt,
    Reveal,
    Roster,
    ServerMessage,
    Shares,
    Survivors,
    parse,
    survivors_digest,
)
from fedpress_protocols.masking.shamir import SHARE_BYTES
from fedpress_protocols.masking.transcript import SessionConfig
from fedpress_protocols.masking.unmasking import UnmaskJob, recovered
from fedpress_protocols.signatures import DeviceKey

T = TypeVar("T")
Words = npt.NDArray[np.uint64]
Phase = Literal[
    "advertising",
    "sharing",
    "masking",
    "consenting",
    "revealing",
    "unmasking",
    "finished",
    "abandoned",
]

_PHASES: tuple[Phase, ...] = get_args(Phase)
_MESSAGES = (Advertise, Shares, MaskedInput, Consent, Reveal, Complaint)
_DUE: dict[type[Any], tuple[Phase, ...]] = {
    Advertise: ("advertising",),
    Shares: ("sharing",),
    MaskedInput: ("masking",),
    Complaint: ("masking",),
    Consent: ("consenting",),
    Reveal: ("revealing", "unmasking"),
}
"""The phases in which each message is accepted."""
_FILES: dict[type[Any], str] = {
    Shares: "shares",
    MaskedInput: "masked",
    Complaint: "complaints",
    Consent: "consents",
    Reveal: "reveals",
}
_AWAITED: dict[Phase, str] = {
    "advertising": "advertised",
    "sharing": "shares",
    "masking": "masked",
    "consenting": "consents",
    "revealing": "reveals",
}
_ANSWERED_FROM: dict[type[Any], Phase] = {
    Roster: "sharing",
    Inbox: "masking",
    Survivors: "consenting",
    Consents: "revealing",
}
_SECONDS: dict[Phase, str] = {
    "sharing": "share",
    "masking": "mask",
    "consenting": "consent",
    "revealing": "reveal",
}
_MAX_REASON = 512


# Events besides the clients' messages; a `MaskedInput` means that its body is staged and verified


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    pass


@dataclass(frozen=True, slots=True)
class Unmasked:
    """The sum is computed and on disk; `aggregate` is the hex SHA-256 of its packed bytes."""

    aggregate: str


@dataclass(frozen=True, slots=True)
class UnmaskFailed:
    """`recover` raised: shares were wrong, and there were too few others. `suspects` are the slots
    at fault, if the shares identify them, and `failures` pairs of slots of which one is; if there
    are any, more shares do not help."""

    detail: str
    suspects: tuple[int, ...] = ()
    failures: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Aborted:
    """The session was cancelled by an operator or by its round."""

    detail: str


Event = ClientMessage | DeadlinePassed | Unmasked | UnmaskFailed | Aborted


def to_record(event: Event) -> dict[str, Any]:
    """Convert an event to plain JSON for `from_record`; messages are in base64."""
    if isinstance(event, DeadlinePassed | Unmasked | UnmaskFailed | Aborted):
        return {"event": type(event).__name__, **asdict(event)}
    return {"event": "message", "message": base64.b64encode(event.to_bytes()).decode()}


def from_record(record: Mapping[str, Any]) -> Event:
    members = dict(record)
    name = members.pop("event")
    if name == "message":
        message: Any = parse(base64.b64decode(members["message"]))
        event: Event = message
        return event
    kinds = {kind.__name__: kind for kind in (DeadlinePassed, Unmasked, UnmaskFailed, Aborted)}
    fields: dict[str, Any] = {**members}
    if "suspects" in fields:
        fields["suspects"] = tuple(fields["suspects"])
    if "failures" in fields:
        fields["failures"] = tuple((one, other) for one, other in fields["failures"])
    parsed: Event = kinds[name](**fields)
    return parsed


# Effects


@dataclass(frozen=True, slots=True)
class Accept:
    """The message is accepted, and may be acknowledged once its event is stored."""


@dataclass(frozen=True, slots=True)
class Enter:
    """A phase starts and ends by `deadline`: wake up clients that wait for the previous phase's
    answer, set the timer for `DeadlinePassed`."""

    phase: Phase
    deadline: float


@dataclass(frozen=True, slots=True)
class StartUnmask:
    """Call `recover` and run the returned job in a thread; pass in `Unmasked` or `UnmaskFailed`. A
    driver that restarts in `unmasking` repeats it."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The sum is complete. Publish `receipt`; wipe bodies, and the messages of the session's
    events."""

    receipt: Receipt


@dataclass(frozen=True, slots=True)
class Abandon:
    """The session failed for `reason`. Wipe bodies, and the messages of the session's events."""

    reason: str


Effect = Accept | Enter | StartUnmask | Finish | Abandon


# The machine


def blamed(failures: Iterable[tuple[T, T]]) -> frozenset[T]:
    """The slots at fault among failed pairs, one of each pair being at fault: those that fail with
    at least two others, and with more than any of these do. A single pair does not identify
    either."""
    others: dict[T, set[T]] = {}
    for one, other in failures:
        others.setdefault(one, set()).add(other)
        others.setdefault(other, set()).add(one)
    return frozenset(
        each
        for each, met in others.items()
        if len(met) > max(1, *(len(others[other]) for other in met))
    )


def aggregate_digest(config: SessionConfig, words: Words) -> str:
    """The digest of the sum in `Unmasked` and the receipt: hex SHA-256 of its packed bytes."""
    return hashlib.sha256(config.packing.to_bytes(words)).hexdigest()


@dataclass(frozen=True)
class MaskingServer:
    """The state of a session; `open` starts one.

    While `advertising`, clients are identified by their identity keys; after that by their slots.
    """

    config: SessionConfig
    key: DeviceKey = field(repr=False)
    authority: bytes
    phase: Phase
    deadline: float
    reason: str = ""
    advertised: Mapping[bytes, Advertise] = field(default_factory=dict, repr=False)
    keys: frozenset[bytes] = field(default=frozenset(), repr=False)
    """All advertised keys; none may be used twice."""
    cohort: Cohort | None = field(default=None, repr=False)
    shares: Mapping[int, Shares] = field(default_factory=dict, repr=False)
    sharers: frozenset[int] = frozenset()
    """U2."""
    masked: Mapping[int, MaskedInput] = field(default_factory=dict, repr=False)
    survivors: frozenset[int] = frozenset()
    """U3; set once."""
    complaints: Mapping[int, Complaint] = field(default_factory=dict, repr=False)
    suspects: frozenset[int] = frozenset()
    """Slots with wrong shares; see `blame` for those with wrong seals."""
    failed: frozenset[tuple[int, int]] = frozenset()
    """Pairs of slots without a mask between them, found while unmasking."""
    consents: Mapping[int, Consent] = field(default_factory=dict, repr=False)
    reveals: Mapping[int, Reveal] = field(default_factory=dict, repr=False)
    lacking: Mapping[int, int] = field(default_factory=dict, repr=False)
    """By slot, the number of missing consents or shares; slots that have enough are left out."""
    tried: int = 0
    """Number of answers to the last phase when unmasking was started."""
    aggregate: str = ""

    @classmethod
    def open(
        cls, config: SessionConfig, key: DeviceKey, *, authority: bytes, now: float
    ) -> MaskingServer:
        """Start a session in `advertising`. `authority` certifies clients, `key` signs for the
        server. A replay of the session's events starts with the same arguments, `now` included.

        Raises IncompatiblePlan for a configuration without room for the sums or without a safe
        graph for the largest cohort, ConfigurationError for another key than the configuration's.
        """
        if config.server_key != key.public:
            raise ConfigurationError("the configuration names another server's key")
        config.parameters(config.maximum)
        config.packing  # noqa: B018
        return cls(config, key, authority, "advertising", now + config.seconds.advertise)

    @cached_property
    def offer(self) -> Offer:
        """The offer for all clients that may take part."""
        return Offer(self.config).signed(self.key, self.config.digest)

    @property
    def is_over(self) -> bool:
        return self.phase in ("finished", "abandoned")

    @property
    def sid(self) -> bytes:
        """The session's id, 32 bytes; known once the roster is closed."""
        return self._closed.sid

    @property
    def _closed(self) -> Cohort:
        if self.cohort is None:
            raise Conflict("the roster of this session is not closed yet")
        return self.cohort

    # Messages

    def admit(self, message: ClientMessage, identity: bytes, now: float) -> bool:
        """Return whether `message`, from the device with the Ed25519 key `identity`, is an event
        for `on`; False for a repeated one, or one that is no longer needed: acknowledge it again.

        Raises InvalidSignature, Forbidden (another's message, or no member), RoundClosed (its phase
        is over), Conflict (its phase has not started), UpdateConflict (other bytes than before),
        MalformedRequest, InvalidKey or InvalidShare (invalid content for this session).
        """
        if isinstance(message, Advertise):
            return self._admit_advertise(message, identity, now)
        cohort = self._closed
        if cohort.slots.get(identity) != message.sender:
            raise Forbidden(f"slot {message.sender} belongs to another device")
        if self.is_over:
            return False
        before = self._filed(type(message)).get(message.sender)
        if before is not None:
            return _is_other(before, message)
        expected = _DUE[type(message)]
        place = _PHASES.index(self.phase)
        if place < _PHASES.index(expected[0]):
            raise Conflict(f"a {message.NAME} while the session is {self.phase}")
        if self.phase not in expected or (now >= self.deadline and self.phase != "unmasking"):
            if isinstance(message, Consent | Reveal):
                return False
            raise RoundClosed(f"a {message.NAME} after its phase")
        message.verify(identity, cohort.sid)
        self._check(message)
        return True

    def _admit_advertise(self, message: Advertise, identity: bytes, now: float) -> bool:
        if message.certificate.identity != identity:
            raise Forbidden("a certificate of another device")
        before = self.advertised.get(identity)
        if before is not None:
            return _is_other(before, message)
        if self.phase != "advertising" or now >= self.deadline:
            raise RoundClosed("the roster of this session is closed")
        message.certificate.check(self.authority, population=self.config.population, now=now)
        message.verify(identity, self.config.digest)
        keys = (message.mask_key, message.channel_key)
        for key in keys:
            check_public(key, hybrid=self.config.hybrid)
        if keys[0] == keys[1] or not self.keys.isdisjoint(keys):
            raise InvalidKey("a key that another client has advertised", hint="draw fresh ones")
        return True

    def _check(self, message: Shares | MaskedInput | Consent | Reveal | Complaint) -> None:
        cohort, config, sender = self._closed, self.config, message.sender
        match message:
            case Shares():
                length = 2 * SHARE_BYTES + (HYBRID_SEAL_BYTES if config.hybrid else SEAL_BYTES)
                lengths = [(len(each.sealed), len(each.introduction)) for each in message.sealed]
                expected = [
                    (length, INTRODUCTION_BYTES if config.hybrid and sender < other else 0)
                    for other in cohort.neighbours[sender]
                ]
                if lengths != expected:
                    raise MalformedRequest(
                        f"{len(lengths)} sealed shares, not {len(expected)} of {length} bytes"
                    )
            case MaskedInput():
                if sender not in self.sharers:
                    raise RoundClosed("this client's shares did not arrive in time")
                if sender in self.complaints:
                    raise Conflict("this client has complained, and masks nothing")
                if message.partners != self.sharers.intersection(cohort.neighbours[sender]):
                    raise MalformedRequest("masked with other partners than those in the inbox")
                if message.length != config.packing.num_bytes:
                    raise MalformedRequest(
                        f"a body of {message.length} bytes, expected {config.packing.num_bytes}"
                    )
            case Complaint():
                if sender not in self.sharers or sender in self.masked:
                    raise Conflict(
                        "a complaint of a client that has no inbox or has masked already"
                    )
                near = self.sharers.intersection(cohort.neighbours[sender])
                if not message.accused or not message.accused <= near:
                    raise MalformedRequest("a complaint about a client that is not in the inbox")
            case Consent() | Reveal():
                if sender not in self.survivors:
                    raise Forbidden("this client is not among the survivors")
                if not same(message.survivors, survivors_digest(self.survivors)):
                    raise MalformedRequest("an answer about other survivors")
        if isinstance(message, Reveal):
            count = len(cohort.owners(sender, self.sharers))
            if len(message.shares) != count * SHARE_BYTES:
                raise MalformedRequest(f"{len(message.shares)} bytes, expected {count} shares")
            for at in range(0, len(message.shares), SHARE_BYTES):
                shamir.from_bytes(message.shares[at : at + SHARE_BYTES])

    def _filed(self, kind: type[ClientMessage]) -> Mapping[int, Any]:
        filed: Mapping[int, Any] = getattr(self, _FILES[kind])
        return filed

    # Events

    def on(self, event: Event, now: float) -> tuple[MaskingServer, tuple[Effect, ...]]:
        """The session after `event` and the effects to execute, atomically.

        Messages must have been admitted. An event that does not apply returns this session and no
        effects.
        """
        recorded, effects = self._noted(event) if isinstance(event, _MESSAGES) else (self, ())
        if isinstance(event, _MESSAGES) and not effects:
            return self, ()
        for row in TRANSITIONS:
            if self.phase == row.source and isinstance(event, row.events):
                if not row.guard(recorded, event, now):
                    continue
                after, more = row.action(recorded, event, now)
                return replace(after, phase=row.target), (*effects, *more)
        return recorded, effects

    def _noted(self, message: ClientMessage) -> _Step:
        """Record `message`, if this is its phase and it is the first from its sender."""
        if self.phase not in _DUE[type(message)]:
            return self, ()
        if isinstance(message, Advertise):
            identity = message.certificate.identity
            if identity in self.advertised:
                return self, ()
            advertised = {**self.advertised, identity: message}
            keys = self.keys | {message.mask_key, message.channel_key}
            return replace(self, advertised=advertised, keys=keys), (Accept(),)
        filed = self._filed(type(message))
        if message.sender in filed:
            return self, ()
        changes: dict[str, Any] = {_FILES[type(message)]: {**filed, message.sender: message}}
        if isinstance(message, Consent | Reveal):
            lacking = dict(self.lacking)
            for owner in self._closed.holders[message.sender]:
                if lacking.get(owner, 0) > 1:
                    lacking[owner] -= 1
                else:
                    lacking.pop(owner, None)
            changes["lacking"] = lacking
        return replace(self, **changes), (Accept(),)

    def _enter(self, phase: Phase, now: float, **changes: Any) -> _Step:
        deadline = now + getattr(self.config.seconds, _SECONDS[phase])
        return replace(self, deadline=deadline, **changes), (Enter(phase, deadline),)

    def _wiped(self, **changes: Any) -> MaskingServer:
        """The session without anything that reveals a secret; the participants are kept."""
        return replace(self, shares={}, masked={}, consents={}, reveals={}, lacking={}, **changes)

    # Answers

    def answer(self, kind: type[ServerMessage], identity: bytes) -> ServerMessage | None:
        """The answer of that kind for that client, always the same bytes; None until the session
        has it.

        `Receipt` or `Abandoned` in its place once the session is over. Raises Forbidden for a
        stranger, RoundClosed for a client that missed an earlier phase.
        """
        if identity not in self.advertised:
            raise Forbidden("this device has not advertised in this session")
        if self.is_over:
            return self._receipt if self.phase == "finished" else self._abandoned
        cohort, place = self.cohort, _PHASES.index(self.phase)
        if cohort is None or place < _PHASES.index(_ANSWERED_FROM.get(kind, "finished")):
            return None
        slot = cohort.slots[identity]
        answer: ServerMessage
        if kind is Roster:
            return cohort.roster(slot).signed(self.key, self.config.digest)
        if slot not in self.sharers:
            raise RoundClosed("this client's shares did not arrive in time")
        if kind is Inbox:
            sealed = tuple(
                self.shares[other].sealed[cohort.place(other, slot)]
                for other in cohort.neighbours[slot]
                if other in self.sharers
            )
            answer = Inbox(self.sharers, sealed)
        elif kind is Survivors:
            answer = Survivors(self.survivors)
        else:
            near = sorted(self.consents.keys() & set(cohort.neighbours[slot]))
            answer = Consents(tuple(self.consents[other] for other in near))
        return answer.signed(self.key, cohort.sid)

    @cached_property
    def _receipt(self) -> Receipt:
        receipt = Receipt(self.sid, self.survivors, bytes.fromhex(self.aggregate))
        return receipt.signed(self.key, self.config.digest)

    @cached_property
    def _abandoned(self) -> Abandoned:
        return Abandoned(self.reason).signed(self.key, self.config.digest)

    # Faults

    @property
    def failures(self) -> tuple[tuple[int, int], ...]:
        """Pairs of slots that fail, ascending: (complainant, accused), or (lost, survivor)."""
        complaints = self.complaints.values()
        pairs = {(each.sender, other) for each in complaints for other in each.accused}
        return tuple(sorted(pairs | self.failed))

    @property
    def blame(self) -> frozenset[int]:
        """The slots at fault, by the failed pairs or by wrong shares."""
        return self.suspects | blamed(self.failures)

    # Unmasking

    def recover(self) -> UnmaskJob:
        """Reconstruct the clients' secrets; slow, and a function of the state alone.

        Each is compared with its owner's commitment; if it differs, wrong shares are corrected.
        Raises InvalidShare if too many are wrong, Conflict outside of `unmasking`.
        """
        if self.phase != "unmasking":
            raise Conflict(f"nothing to reconstruct in a session that is {self.phase}")
        return recovered(
            self._closed,
            sharers=self.sharers,
            survivors=self.survivors,
            shares=self.shares,
            reveals=self.reveals,
        )


# The table


_Step = tuple[MaskingServer, tuple[Effect, ...]]


def _is_due(server: MaskingServer, event: Event, now: float) -> bool:
    return isinstance(event, DeadlinePassed) and now >= server.deadline


def _has_roster(server: MaskingServer, event: Event, now: float) -> bool:
    count = len(server.advertised)
    is_full = count == server.config.maximum
    return (is_full or _is_due(server, event, now)) and _can_hide(server.config, count)


def _can_hide(config: SessionConfig, count: int) -> bool:
    """Whether the roster is large enough and has a safe graph."""
    try:
        return count >= config.least(count) and config.parameters(count).degree > 0
    except IncompatiblePlan:
        return False


def _has_sharers(server: MaskingServer, event: Event, now: float) -> bool:
    n, count = len(server._closed.members), len(server.shares)
    return (count == n or _is_due(server, event, now)) and count >= server.config.least(n)


def _has_inputs(server: MaskingServer, event: Event, now: float) -> bool:
    """Whether no more inputs can arrive."""
    num_done = len(server.masked) + len(server.complaints)
    return num_done == len(server.sharers) or _is_due(server, event, now)


def _has_survivors(server: MaskingServer, event: Event, now: float) -> bool:
    """Whether no more inputs can arrive, and the survivors can reconstruct every needed secret."""
    return _has_inputs(server, event, now) and _do_suffice(server, frozenset(server.masked))


def _has_too_few(server: MaskingServer, event: Event, now: float) -> bool:
    """Whether no more inputs can arrive, or too many clients have complained."""
    if _has_inputs(server, event, now):
        return True
    remaining = server.sharers - server.complaints.keys()
    return bool(server.complaints) and not _do_suffice(server, remaining)


def _do_suffice(server: MaskingServer, survivors: frozenset[int]) -> bool:
    """Whether these clients can reconstruct every secret that their sum needs."""
    cohort = server._closed
    return len(survivors) >= server.config.least(len(cohort.members)) and all(
        len(survivors.intersection(cohort.holders[slot])) >= cohort.topology.threshold
        for slot in cohort.needed(server.sharers, survivors)
    )


def _must_consent(server: MaskingServer, event: Event, now: float) -> bool:
    return server.config.adversary == "malicious" and _has_survivors(server, event, now)


def _has_consents(server: MaskingServer, event: Event, now: float) -> bool:
    enough = len(server.consents) >= server._closed.topology.threshold
    return not server.lacking or (_is_due(server, event, now) and enough)


def _has_shares(server: MaskingServer, event: Event, now: float) -> bool:
    return not server.lacking and len(server.reveals) > server.tried


def _has_no_more(server: MaskingServer, event: Event, now: float) -> bool:
    return len(server.reveals) == len(server.survivors) or _is_due(server, event, now)


def _may_have_more(server: MaskingServer, event: Event, now: float) -> bool:
    return len(server.reveals) < len(server.survivors) and now < server.deadline


def _is_settled(server: MaskingServer, event: UnmaskFailed, now: float) -> bool:
    return bool(event.suspects or event.failures)


def _always(server: MaskingServer, event: Event, now: float) -> bool:
    return True


def _to_sharing(server: MaskingServer, event: Event, now: float) -> _Step:
    cohort = Cohort.of(server.config, server.advertised.values())
    return server._enter("sharing", now, cohort=cohort)


def _to_masking(server: MaskingServer, event: Event, now: float) -> _Step:
    return server._enter("masking", now, sharers=frozenset(server.shares))


def _to_consenting(server: MaskingServer, event: Event, now: float) -> _Step:
    survivors = frozenset(server.masked)
    lacking = dict.fromkeys(survivors, server._closed.topology.threshold)
    return server._enter("consenting", now, survivors=survivors, lacking=lacking)


def _to_revealing(server: MaskingServer, event: Event, now: float) -> _Step:
    survivors = server.survivors or frozenset(server.masked)
    requests = server._closed.needed(server.sharers, survivors)
    lacking = dict.fromkeys(requests, server._closed.topology.threshold)
    return server._enter("revealing", now, survivors=survivors, lacking=lacking)


def _to_unmasking(server: MaskingServer, event: Event, now: float) -> _Step:
    entered = Enter("unmasking", server.deadline)
    return replace(server, tried=len(server.reveals)), (entered, StartUnmask())


def _wait_for_more(server: MaskingServer, event: Event, now: float) -> _Step:
    return server, (Enter("revealing", server.deadline),)


def _finish(server: MaskingServer, event: Unmasked, now: float) -> _Step:
    finished = server._wiped(aggregate=event.aggregate)
    return finished, (Finish(finished._receipt),)


def _abandon(server: MaskingServer, event: Event, now: float) -> _Step:
    if isinstance(event, UnmaskFailed):
        suspects = server.suspects | frozenset(event.suspects)
        server = replace(server, suspects=suspects, failed=frozenset(event.failures))
    if isinstance(event, Aborted | UnmaskFailed):
        reason = event.detail
    elif server.phase == "masking" and server.complaints:
        blamed = " ".join(map(str, sorted(server.blame))) or "none"
        reason = (
            f"{len(server.complaints)} clients could not open messages sealed for them; the "
            f"failed pairs point to slot {blamed}"
        )
    else:
        count = len(getattr(server, _AWAITED[server.phase]))
        reason = (
            f"only {count} clients answered while the session was {server.phase}: too few for a sum"
        )
    reason = reason.encode(errors="replace")[:_MAX_REASON].decode(errors="ignore")
    return server._wiped(reason=reason), (Abandon(reason),)


def _is_other(before: ClientMessage, message: ClientMessage) -> Literal[False]:
    """Return False; raises UpdateConflict if `message` differs from the one `before`."""
    if before != message:
        raise UpdateConflict(
            f"this client has sent another {message.NAME} before",
            hint="resend the first bytes, or leave this session",
        )
    return False


@dataclass(frozen=True, slots=True)
class Transition:
    """One row of the table. For a phase and an event, the first row whose guard is true applies.

    A message is recorded before the guards are evaluated; without a matching row, it is only
    recorded.
    """

    source: Phase
    events: type[Any] | tuple[type[Any], ...]
    when: str
    guard: Callable[[MaskingServer, Any, float], bool]
    action: Callable[[MaskingServer, Any, float], _Step]
    target: Phase


TRANSITIONS: tuple[Transition, ...] = (
    Transition(
        "advertising",
        (Advertise, DeadlinePassed),
        "the maximum cohort is complete, or enough clients at the deadline",
        _has_roster,
        _to_sharing,
        "sharing",
    ),
    Transition("advertising", DeadlinePassed, "too few", _is_due, _abandon, "abandoned"),
    Transition(
        "sharing",
        (Shares, DeadlinePassed),
        "all have shared, or enough at the deadline",
        _has_sharers,
        _to_masking,
        "masking",
    ),
    Transition("sharing", DeadlinePassed, "too few", _is_due, _abandon, "abandoned"),
    Transition(
        "masking",
        (MaskedInput, Complaint, DeadlinePassed),
        "no more can arrive, enough did; malicious profile",
        _must_consent,
        _to_consenting,
        "consenting",
    ),
    Transition(
        "masking",
        (MaskedInput, Complaint, DeadlinePassed),
        "no more can arrive, enough did",
        _has_survivors,
        _to_revealing,
        "revealing",
    ),
    Transition(
        "masking",
        (MaskedInput, Complaint, DeadlinePassed),
        "too few",
        _has_too_few,
        _abandon,
        "abandoned",
    ),
    Transition(
        "consenting",
        (Consent, DeadlinePassed),
        "enough consent near every survivor, or anywhere at the deadline",
        _has_consents,
        _to_revealing,
        "revealing",
    ),
    Transition("consenting", DeadlinePassed, "too few", _is_due, _abandon, "abandoned"),
    Transition(
        "revealing",
        (Reveal, DeadlinePassed),
        "enough shares of every secret",
        _has_shares,
        _to_unmasking,
        "unmasking",
    ),
    Transition(
        "revealing", (Reveal, DeadlinePassed), "too few", _has_no_more, _abandon, "abandoned"
    ),
    Transition("unmasking", Unmasked, "", _always, _finish, "finished"),
    Transition(
        "unmasking",
        UnmaskFailed,
        "the clients at fault, or pairs with one, are known",
        _is_settled,
        _abandon,
        "abandoned",
    ),
    Transition(
        "unmasking", UnmaskFailed, "more came since", _has_shares, _to_unmasking, "unmasking"
    ),
    Transition(
        "unmasking", UnmaskFailed, "more may come", _may_have_more, _wait_for_more, "revealing"
    ),
    Transition("unmasking", UnmaskFailed, "", _always, _abandon, "abandoned"),
    *(
        Transition(phase, Aborted, "", _always, _abandon, "abandoned")
        for phase in _PHASES
        if phase not in ("finished", "abandoned")
    ),
)


def diagram() -> str:
    """The table as a Mermaid state diagram."""

    def lines() -> Iterator[str]:
        yield "stateDiagram-v2"
        yield "    [*] --> advertising"
        for row in TRANSITIONS:
            events = row.events if isinstance(row.events, tuple) else (row.events,)
            when = f", {row.when}" if row.when else ""
            names = " or ".join(event.__name__ for event in events)
            yield f"    {row.source} --> {row.target}: {names}{when}"
        yield "    finished --> [*]"
        yield "    abandoned --> [*]"

    return "\n".join(lines()) + "\n"
