"""The device's part in masked sessions: say, hear, and write down everything before it is said.

    ready → offer → advertise → shares → masked body → (consent) → reveal → the round's receipt

The session itself is `MaskingClient`, a pure machine. Its record lies in the task's folder before a
byte of it leaves, so a device that dies anywhere goes on where it was and says what it said: it
never masks twice, and never answers for two sets of survivors. What it masked lies in the ledger,
and only the receipt says what became of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from fedpress_client.ledger import Ledger
from fedpress_client.state import Identity
from fedpress_compression.compressor import compressors, members
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_protocols.errors import (
    ConfigurationError,
    Conflict,
    Forbidden,
    IncompatiblePlan,
    InvalidSignature,
    MalformedRequest,
    NotFound,
    PlanDeclined,
    StateCorrupt,
    UpdateConflict,
)
from fedpress_protocols.masking.agreement import check_agreed
from fedpress_protocols.masking.certificates import Certificate
from fedpress_protocols.masking.client import ClientPolicy, MaskingClient, Trained
from fedpress_protocols.masking.client import Step as MaskingStep
from fedpress_protocols.masking.graph import Adversary
from fedpress_protocols.masking.keystream import SUITES, Suite
from fedpress_protocols.masking.messages import Offer, ServerMessage, parse, survivors_digest
from fedpress_protocols.masking.payload import Payload
from fedpress_protocols.masking.transcript import (
    U64,
    Bytes32,
    Record,
    SessionConfig,
    Text,
    blob,
)
from fedpress_protocols.messages import Membership, Outcome, Receipt
from fedpress_protocols.plan import RoundPlan
from fedpress_protocols.signatures import DeviceKey, from_base64url, to_base64url

RENEW_SECONDS = 30 * 24 * 3600
"""A certificate that expires sooner is asked for anew."""
_SAID_IN = {
    "advertised": "advertise",
    "shared": "shares",
    "masked": "masked",
    "consented": "consent",
    "revealed": "reveal",
    "complained": "complaint",
}
_LONGEST_SECONDS = 7 * 24 * 3600
"""How far ahead a session may expire: so long a device remembers that it has answered it."""
_AGAIN_SECONDS = 1.0
_OVER = (Conflict, Forbidden, NotFound)


@dataclass(frozen=True, slots=True)
class MaskingRules:
    """Requirements of a device that no plan can overrule.

    With `required` nothing of an update leaves the device unmasked: a plan of the clear lane is
    declined. A device that joined a masked round of a task declines that task's clear plans even
    without it. `authority` is the public key (base64url) of the enrolment authority, by a way that
    is not the server's; without it the first one that the server names is pinned. `certificate` is
    a file that the authority's operator issued, for servers that do not hold the authority's key.
    `minimum`, `adversary`, `corrupt`, `suites` and `hybrid` are as in `ClientPolicy`. What the
    device measures of a model stays with it, since its losses and counts would travel in clear,
    unless `reports_evaluations`.

    The others bound what a plan may choose; None sets no bound. `max_weight`: the examples by which
    one masked update may count. `compressors`: the ids that a plan's profiles may use, without
    error_feedback, which sends nothing of its own. `min_support`: how many numbers of an update a
    masked sum must hold. `max_rounds`: the updates that the device prepares for one task. Raises
    ConfigurationError for bounds that no plan keeps.
    """

    authority: str | None = None
    certificate: Path | None = None
    minimum: int = 3
    adversary: Adversary = "malicious"
    corrupt: float = 0.1
    suites: tuple[Suite, ...] = SUITES
    hybrid: bool = False
    reports_evaluations: bool = False
    required: bool = True
    max_weight: int | None = None
    compressors: tuple[str, ...] | None = None
    min_support: int = 1
    max_rounds: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_weight", "min_support", "max_rounds"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigurationError(f"{name} must be at least 1, not {value}")
        unknown = sorted(set(self.compressors or ()) - set(compressors()))
        if unknown or self.compressors == ():
            raise ConfigurationError(
                f"compressors names {', '.join(unknown) or 'none'}",
                hint=f"choose among {', '.join(sorted(compressors()))}",
            )

    def check_lane(self, lane: str, about: str, *, is_pinned: bool) -> None:
        """Raises PlanDeclined for a `lane` other than "masked" where masking is required, or where
        the task's lane `is_pinned`; `about` names the plan."""
        if lane == "masked" or not (self.required or is_pinned):
            return
        if self.required:
            raise PlanDeclined(
                f"{about} is of the clear lane, and this device requires masking",
                hint="put the task into the masked lane; nothing was sent",
                rule="required",
            )
        raise PlanDeclined(
            f"{about} is of the clear lane, and this device joined the task when it was masked",
            hint="if its owner agrees to the change, give the device a new state directory",
            rule="pinned lane",
        )

    def check(self, plan: RoundPlan, rounds: int, *, is_pinned: bool) -> None:
        """Raises PlanDeclined for a plan that the rules do not admit, before its model is fetched;
        `rounds` counts the updates prepared for the task so far."""
        about = _name_of(plan)
        self.check_lane(plan.lane, about, is_pinned=is_pinned)
        if self.compressors is not None:
            used = sorted({each for profile in plan.profiles for each in _ids(profile.compressor)})
            strange = [each for each in used if each not in self.compressors]
            if strange:
                raise PlanDeclined(
                    f"{about} compresses by {', '.join(strange)}, this device allows "
                    f"{', '.join(self.compressors)}",
                    rule="compressors",
                )
        weight = None if plan.masking is None else plan.masking.max_weight
        if self.max_weight is not None and weight is not None and weight > self.max_weight:
            raise PlanDeclined(
                f"{about} lets one update count {weight} times, this device allows "
                f"{self.max_weight} at most",
                rule="max_weight",
            )
        if self.max_rounds is not None and rounds >= self.max_rounds:
            raise PlanDeclined(
                f"{about} comes after {rounds} updates, this device gives a task "
                f"{self.max_rounds} at most",
                rule="max_rounds",
            )

    def check_payload(self, payload: Payload) -> None:
        """Raises PlanDeclined where a sum would hold too few numbers of an update."""
        size = payload.vectors[0].length
        if size < self.min_support:
            raise PlanDeclined(
                f"{_name_of(payload.plan)} sums {size} numbers of an update, this device gives "
                f"{self.min_support} at least",
                hint="a support that small may be chosen to single something out",
                rule="min_support",
            )


FREE = MaskingRules(required=False)
"""The rules of a device that was given none."""


def _name_of(plan: RoundPlan) -> str:
    return f"the plan of round {plan.round}.{plan.attempt} of task {plan.task!r}"


def _ids(made: Any) -> Iterator[str]:
    if not isinstance(made, ErrorFeedback):
        yield made.wire_id
    for member in members(made):
        yield from _ids(member)


@dataclass(frozen=True, slots=True)
class Member:
    """Who this device is to the others of a session, and whom it trusts."""

    certificate: Certificate
    policy: ClientPolicy

    @classmethod
    def of(cls, identity: Identity, rules: MaskingRules) -> Member | None:
        """As far as it is known already; None if the server has to be asked.

        Raises ConfigurationError if the rules name another authority than was pinned before.
        """
        if not identity.certificate:
            return None
        if rules.authority not in (None, identity.authority):
            raise ConfigurationError(
                f"this device has pinned the enrolment authority {identity.authority}, its rules "
                f"name {rules.authority}",
                hint="enrol it anew, with an empty state directory",
            )
        certificate = Certificate.from_bytes(_decoded(identity.certificate))
        policy = ClientPolicy(
            authority=from_base64url(identity.authority, 32),
            server_key=from_base64url(identity.server_key, 32),
            population=identity.population,
            minimum=rules.minimum,
            adversary=rules.adversary,
            corrupt=rules.corrupt,
            suites=rules.suites,
            hybrid=rules.hybrid,
        )
        return cls(certificate, policy)


def joined(
    identity: Identity, told: Membership, rules: MaskingRules, *, key: bytes, now: float
) -> Identity:
    """`identity` with what the server `told` of its population; the authority is pinned by it.

    Raises ConfigurationError for another authority than the one that is pinned, or where there is
    no certificate of it for the device's public `key` that is good at `now`.
    """
    pinned = rules.authority or identity.authority
    if pinned and told.authority != pinned:
        raise ConfigurationError(
            f"the server names the enrolment authority {told.authority}, pinned is {pinned}",
            hint="whoever made certificates with another key may be inventing devices",
        )
    if identity.population and told.population != identity.population:
        raise ConfigurationError(
            f"the server names the population {told.population!r}, it was {identity.population!r}"
        )
    certificate = told.certificate
    if rules.certificate is not None:
        try:
            certificate = to_base64url(rules.certificate.read_bytes())
        except OSError as exc:
            raise ConfigurationError(f"{rules.certificate}: {exc.strerror}") from exc
    if certificate is None:
        raise ConfigurationError(
            f"this device has no certificate of the authority {told.authority}",
            hint="have one issued (fedpress authority issue) and give its file",
        )
    _check(certificate, told, key, now)
    fields = {
        "population": told.population,
        "authority": told.authority,
        "certificate": certificate,
    }
    return identity.model_copy(update=fields)


@dataclass(frozen=True, slots=True)
class _Seen(Record):
    """A configuration that was answered once, and is good until `expires`."""

    config: Bytes32
    expires: U64


@dataclass(frozen=True, slots=True)
class _Diary(Record):
    """What is on the disk: the assignment, the session that its plan calls for, the machine's
    record once there was an offer, and the offers answered so far."""

    assignment: Text
    due: Annotated[bytes, blob()]
    record: Annotated[bytes, blob()]
    seen: tuple[_Seen, ...]


class SessionFile(Protocol):
    """Where the record of a session lies, durable once `save_session` returns."""

    def session(self) -> bytes | None: ...

    def save_session(self, data: bytes) -> None: ...


class Relay(Protocol):
    """The server, as far as sessions go: those verbs of `Transport`."""

    def ready(self, assignment: str) -> None: ...

    def hear(self, assignment: str, step: Any, wait: float) -> bytes | float: ...

    def say(self, assignment: str, step: Any, message: bytes) -> None: ...

    def upload(self, assignment: str, body: bytes) -> object: ...


class MaskedPart:
    """A device's part in one task's sessions, one at a time.

    `ledger` gives the account and `save` makes another durable; `tell` is told what happened, for
    progress bars and logs: the assignment, the step, and more about it.
    """

    def __init__(
        self,
        files: SessionFile,
        key: DeviceKey,
        member: Member,
        transport: Relay,
        *,
        ledger: Callable[[], Ledger],
        save: Callable[[Ledger], None],
        tell: Callable[[str, str, str], None],
        clock: Callable[[], float],
        believes: Callable[[bytes], bool] = lambda key: False,
    ) -> None:
        """`believes`: whether a key other than the pinned one is the server's, too: it may change
        its key while an update is being trained."""
        self.member = member
        self._believes = believes
        self._files, self._key, self._transport = files, key, transport
        self._ledger, self._save, self._tell, self._clock = ledger, save, tell, clock
        self._diary = _read(files)
        self._machine: MaskingClient | None = None
        if self._diary.record:
            self._machine = MaskingClient.from_bytes(
                self._diary.record, identity=key, policy=self._policy
            )
        self._said: set[str] = set()
        """Steps that the server has acknowledged to this process."""

    @property
    def _policy(self) -> ClientPolicy:
        """The device's own, under the server's key that this session is signed with."""
        due = SessionConfig.from_bytes(self._diary.due)
        return replace(self.member.policy, server_key=due.server_key)

    @property
    def assignment(self) -> str | None:
        """What the session under way is for."""
        return self._diary.assignment or None

    def enter(self, assignment: str, due: SessionConfig) -> None:
        """Take part for `assignment`, in the session `due` and in no other; durable when this
        returns, and to be called before the ledger holds what is to be masked."""
        self._machine, self._said = None, set()
        self._write(replace(self._diary, assignment=assignment, due=due.to_bytes(), record=b""))

    def leave(self) -> None:
        """Forget the session and its secrets: its update has its receipt, or was never prepared."""
        if self._diary.assignment:
            self._machine, self._said = None, set()
            now = self._clock()
            seen = tuple(each for each in self._diary.seen if each.expires > now)
            self._write(_Diary("", b"", b"", seen))

    def check(self, receipt: Receipt) -> None:
        """Raises Conflict if `receipt` counts the update in a sum that the device did not help to
        unmask: of another session, or over other clients than it was told of."""
        machine = self._machine
        if receipt.assignment != self._diary.assignment or receipt.outcome != "included":
            return
        masked = receipt.masked
        if machine is None or masked is None or masked.session != machine.sid.hex():
            raise Conflict(f"receipt {receipt.assignment} is of another session than the device's")
        seen = machine.survivors
        if seen and masked.survivors != survivors_digest(seen).hex():
            raise Conflict(f"receipt {receipt.assignment} is of a sum over other survivors")

    def outcome(self, word: bytes | None) -> Outcome | Literal["pending"]:
        """What became of the masked input, by the session's last word, a Receipt or Abandoned that
        the server signed. Without one it is pending where a body may have left; where none has, the
        device withdraws. Raises InvalidSignature for the word of anybody else."""
        machine = self._machine
        if machine is None:
            return "not-included"
        if word is not None:
            message = parse(word)
            if not isinstance(message, ServerMessage):
                raise MalformedRequest(f"a message of kind {message.NAME!r}, which is a client's")
            self._enter(machine.on(message, self._clock()))
        elif machine.phase in ("advertised", "shared", "ready"):
            self._enter(machine.give_up("the server went on to another session"))
        return self._machine.outcome if self._machine is not None else "not-included"

    def advance(self, wait: float) -> float | None:
        """Go on as far as the server lets us, which may hold each answer for `wait` seconds.

        The seconds until it is worth while to go on; None once all is said, or the session is over:
        what is left is the receipt. Raises IncompatiblePlan for a session that this device does not
        take part in, and is to decline.
        """
        try:
            while True:
                self._expire()
                machine = self._machine
                pause = None
                if machine is None:
                    pause = self._await_offer(wait)
                elif self._is_to_mask(machine):
                    self._mask(machine)
                elif machine.phase in ("revealed", "complained"):
                    self._speak(machine)
                    return None
                elif machine.phase in ("withdrawn", "over"):
                    self._withdraw(machine)
                    return None
                else:
                    self._speak(machine)
                    pause = self._listen(machine, wait)
                if pause is not None:
                    return pause
        except _OVER as exc:
            self._tell(self._diary.assignment, "left", exc.detail)
            return None
        except InvalidSignature as exc:  # anybody on the way may say anything: as good as no answer
            self._tell(self._diary.assignment, "unsigned", exc.detail)
            return _AGAIN_SECONDS

    def _expire(self) -> None:
        """Give up, and with it the secrets, once the session cannot be finished any more."""
        machine = self._machine
        if machine is None or machine.phase in ("revealed", "complained", "withdrawn", "over"):
            return
        if machine.config.expires <= self._clock():
            self._enter(machine.give_up("the session has expired"))

    def _await_offer(self, wait: float) -> float | None:
        name = self._diary.assignment
        if "ready" not in self._said:
            self._transport.ready(name)
            self._said.add("ready")
            self._tell(name, "ready", "")
        heard = self._transport.hear(name, "offer", wait)
        if not isinstance(heard, bytes):
            return heard
        offer = parse(heard)
        if not isinstance(offer, Offer):
            raise MalformedRequest(f"a message of kind {offer.NAME!r} where an offer is due")
        config, now = offer.config, self._clock()
        due = SessionConfig.from_bytes(self._diary.due)
        if config.server_key != due.server_key and self._believes(config.server_key):
            due = replace(due, server_key=config.server_key)
            self._diary = replace(self._diary, due=due.to_bytes())
        check_agreed(config, due)
        if config.expires > now + _LONGEST_SECONDS:
            raise IncompatiblePlan(
                f"a session that may last {(config.expires - now) / 86400:.0f} days",
                hint="shorten the phases of the task's masking terms",
            )
        seen = tuple(each for each in self._diary.seen if each.expires > now)
        if any(each.config == config.digest for each in seen):
            raise IncompatiblePlan("this session was answered before, and its record is gone")
        step = MaskingClient.begin(
            offer,
            identity=self._key,
            certificate=self.member.certificate,
            policy=self._policy,
            trained=Trained(due.model, due.support, due.plan, self._content()),
            now=now,
        )
        self._diary = replace(self._diary, seen=(*seen, _Seen(config.digest, config.expires)))
        self._enter(step)
        return None

    def _is_to_mask(self, machine: MaskingClient) -> bool:
        """Whether the ledger does not hold the body; the record may have been written before it."""
        held = self._ledger().pending.get(self._diary.assignment)
        is_plain = held is not None and held.session is None
        return machine.phase == "ready" or (machine.phase == "masked" and is_plain)

    def _mask(self, machine: MaskingClient) -> None:
        """Mask what the ledger holds. The machine's record comes first: with it the same body can
        be made again from the ledger, and never another."""
        name = self._diary.assignment
        held = self._ledger().pending.get(name)
        if held is None:
            self._enter(machine.give_up("the update was settled before it was masked"))
            return
        if held.session is not None:
            self._enter(machine.give_up("the update was masked, and the record of it is gone"))
            return
        packing = machine.config.packing
        try:
            step, body = machine.mask(packing.unpack(packing.from_bytes(held.body)))
        except UpdateConflict as exc:
            self._enter(machine.give_up(str(exc)))
            return
        self._enter(step)
        session = machine.sid.hex()
        self._save(self._ledger().masked(name, session, body))

    def _content(self) -> bytes:
        """The digest of what is to be masked: the session's secrets are for nothing else."""
        held = self._ledger().pending.get(self._diary.assignment)
        if held is None or held.session is not None:
            raise IncompatiblePlan("the update of this session is not here, or was masked before")
        return hashlib.sha256(held.body).digest()

    def _speak(self, machine: MaskingClient) -> None:
        """Say what is due, unless this process has said it."""
        name, step = self._diary.assignment, _SAID_IN[machine.phase]
        if step not in self._said:
            held = self._ledger().pending[name]
            if step == "masked" and held.session != machine.sid.hex():
                raise Conflict("the update is not masked for this session")
            outgoing = machine.outgoing
            if outgoing is not None:
                try:
                    self._transport.say(name, step, outgoing.to_bytes())
                except MalformedRequest as exc:
                    if step != "complaint":
                        raise
                    # A server from before complaints: leave as from then on.
                    raise IncompatiblePlan(f"withdrawn from the session: {machine.reason}") from exc
            if step == "masked":
                self._transport.upload(name, held.body)
            self._said.add(step)
            self._tell(name, step, machine.sid.hex())

    def _listen(self, machine: MaskingClient, wait: float) -> float | None:
        """Hear what comes of it, and go on with that."""
        step = _SAID_IN[machine.phase]
        heard = self._transport.hear(self._diary.assignment, step, wait)
        if not isinstance(heard, bytes):
            return heard
        answer = parse(heard)
        if not isinstance(answer, ServerMessage):
            raise MalformedRequest(f"a message of kind {answer.NAME!r}, which is a client's")
        self._enter(machine.on(answer, self._clock()))
        return None

    def _withdraw(self, machine: MaskingClient) -> None:
        if machine.reason and "withdrawn" not in self._said:
            self._said.add("withdrawn")
            raise IncompatiblePlan(f"withdrawn from the session: {machine.reason}")

    def _enter(self, step: MaskingStep) -> None:
        self._write(replace(self._diary, record=step.record))
        self._machine = step.written()

    def _write(self, diary: _Diary) -> None:
        self._files.save_session(diary.to_bytes())
        self._diary = diary


def session_under_way(files: SessionFile) -> str | None:
    """The assignment of the masked session that the device is in; raises StateCorrupt."""
    return _read(files).assignment or None


def _read(files: SessionFile) -> _Diary:
    data = files.session()
    if data is None:
        return _Diary("", b"", b"", ())
    try:
        return _Diary.from_bytes(data)
    except MalformedRequest as exc:
        raise StateCorrupt(
            f"the record of the masked session: {exc.detail}",
            hint="remove it: the device is then out of that session, and nothing else is lost",
        ) from exc


def _check(certificate: str, told: Membership, key: bytes, now: float) -> None:
    try:
        found = Certificate.from_bytes(_decoded(certificate))
    except MalformedRequest as exc:
        raise ConfigurationError(f"not a certificate: {exc.detail}") from exc
    if found.identity != key:
        raise ConfigurationError(
            "the certificate is of another key than this device's",
            hint="after a change of key have one issued for the new key, which `fedpress authority "
            "request` prints, and give its file",
        )
    try:
        authority = from_base64url(told.authority, 32)
        found.check(authority, population=told.population, now=now)
    except InvalidSignature as exc:
        raise ConfigurationError(
            f"the certificate is not good for {told.population!r}: {exc.detail}", hint=exc.hint
        ) from exc


def _decoded(text: str) -> bytes:
    return from_base64url(text, len(text) * 3 // 4)
