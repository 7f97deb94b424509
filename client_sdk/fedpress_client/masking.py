"""The device's part in masked sessions: say, hear, and write down everything before it is said.

    ready → offer → advertise → shares → masked body → (consent) → reveal → the round's receipt

The session itself is `MaskingClient`, a pure machine. Its record lies in the task's folder before a
byte of it leaves, so a device that dies anywhere goes on where it was and says what it said: it
never masks twice, and never answers for two sets of survivors. What it masked lies in the ledger,
and only the receipt says what became of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Protocol

from fedpress_client.ledger import Ledger
from fedpress_client.membership import Member
from fedpress_protocols.errors import (
    Conflict,
    Forbidden,
    IncompatiblePlan,
    InvalidSignature,
    MalformedRequest,
    NotFound,
    StateCorrupt,
    UpdateConflict,
)
from fedpress_protocols.masking.agreement import check_agreed
from fedpress_protocols.masking.client import ClientPolicy, MaskingClient, RoundDigests
from fedpress_protocols.masking.client import Step as MaskingStep
from fedpress_protocols.masking.messages import Offer, ServerMessage, parse, survivors_digest
from fedpress_protocols.masking.transcript import (
    U64,
    Bytes32,
    Record,
    SessionConfig,
    Text,
    blob,
)
from fedpress_protocols.messages import Outcome, Receipt
from fedpress_protocols.signatures import DeviceKey

_SAID_IN = {
    "advertised": "advertise",
    "shared": "shares",
    "masked": "masked",
    "consented": "consent",
    "revealed": "reveal",
    "complained": "complaint",
}
_LONGEST_SECONDS = 7 * 24 * 3600
"""The latest expiry of a session: so long a device remembers that it has answered it."""
_AGAIN_SECONDS = 1.0
"""The least time from one question to the next, if the answer was nothing new."""
_OVER = (Conflict, Forbidden, NotFound)


@dataclass(frozen=True, slots=True)
class _Seen(Record):
    """A configuration that was answered once, and is good until `expires`."""

    config: Bytes32
    expires: U64


@dataclass(frozen=True, slots=True)
class _Diary(Record):
    """The record on the disk: the assignment, the session that its plan calls for, the machine's
    record once there was an offer, and the offers answered so far."""

    assignment: Text
    due: Annotated[bytes, blob()]
    record: Annotated[bytes, blob()]
    seen: tuple[_Seen, ...]


class SessionFile(Protocol):
    """The file of a session's record, durable once `save_session` returns."""

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
        """The assignment of the session under way."""
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
            offers = tuple(each for each in self._diary.seen if each.expires > now)
            self._write(_Diary("", b"", b"", offers))

    def check(self, receipt: Receipt) -> None:
        """Raises Conflict if `receipt` counts the update in a sum that the device did not help to
        unmask: of another session, or over other clients than it was told of."""
        machine = self._machine
        if receipt.assignment != self._diary.assignment or receipt.outcome != "included":
            return
        masked = receipt.masked
        if machine is None or masked is None or masked.session != machine.sid.hex():
            raise Conflict(f"receipt {receipt.assignment} is of another session than the device's")
        survivors = machine.survivors
        if survivors and masked.survivors != survivors_digest(survivors).hex():
            raise Conflict(f"receipt {receipt.assignment} is of a sum over other survivors")

    def outcome(self, word: bytes | None) -> Outcome | Literal["pending"]:
        """The outcome of the masked input, by the session's last word, a Receipt or Abandoned that
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
                asked_at = self._clock()
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
                    held = self._clock() - asked_at
                    return pause if held >= _AGAIN_SECONDS else max(pause, _AGAIN_SECONDS)
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
        answer = self._transport.hear(name, "offer", wait)
        if not isinstance(answer, bytes):
            return answer
        offer = parse(answer)
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
        offers = tuple(each for each in self._diary.seen if each.expires > now)
        if any(each.config == config.digest for each in offers):
            raise IncompatiblePlan("this session was answered before, and its record is gone")
        step = MaskingClient.begin(
            offer,
            identity=self._key,
            certificate=self.member.certificate,
            policy=self._policy,
            trained=RoundDigests(due.model, due.support, due.plan, self._content()),
            now=now,
        )
        self._diary = replace(self._diary, seen=(*offers, _Seen(config.digest, config.expires)))
        self._enter(step)
        return None

    def _is_to_mask(self, machine: MaskingClient) -> bool:
        """Whether the ledger does not hold the body; the record may have been written before it."""
        pending = self._ledger().pending.get(self._diary.assignment)
        is_plain = pending is not None and pending.session is None
        return machine.phase == "ready" or (machine.phase == "masked" and is_plain)

    def _mask(self, machine: MaskingClient) -> None:
        """Mask what the ledger holds. The machine's record comes first: with it the same body can
        be made again from the ledger, and never another."""
        name = self._diary.assignment
        pending = self._ledger().pending.get(name)
        if pending is None:
            self._enter(machine.give_up("the update was settled before it was masked"))
            return
        if pending.session is not None:
            self._enter(machine.give_up("the update was masked, and the record of it is gone"))
            return
        packing = machine.config.packing
        try:
            vectors = packing.unpack(packing.from_bytes(pending.body))
            step, body = machine.mask(vectors, is_checked=True)
        except UpdateConflict as exc:
            self._enter(machine.give_up(str(exc)))
            return
        self._enter(step)
        session = machine.sid.hex()
        self._save(self._ledger().masked(name, session, body))

    def _content(self) -> bytes:
        """The digest of what is to be masked: the session's secrets are for nothing else."""
        pending = self._ledger().pending.get(self._diary.assignment)
        if pending is None or pending.session is not None:
            raise IncompatiblePlan("the update of this session is not here, or was masked before")
        return hashlib.sha256(pending.body).digest()

    def _speak(self, machine: MaskingClient) -> None:
        """Say what is due, unless this process has said it."""
        name, step = self._diary.assignment, _SAID_IN[machine.phase]
        if step not in self._said:
            pending = self._ledger().pending[name]
            if step == "masked" and pending.session != machine.sid.hex():
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
                self._transport.upload(name, pending.body)
            self._said.add(step)
            self._tell(name, step, machine.sid.hex())

    def _listen(self, machine: MaskingClient, wait: float) -> float | None:
        """Hear what comes of it, and go on with that; the pause before asking again if it is
        nothing, or what was heard before."""
        step = _SAID_IN[machine.phase]
        answer = self._transport.hear(self._diary.assignment, step, wait)
        if not isinstance(answer, bytes):
            return answer
        message = parse(answer)
        if not isinstance(message, ServerMessage):
            raise MalformedRequest(f"a message of kind {message.NAME!r}, which is a client's")
        is_news = self._enter(machine.on(message, self._clock()))
        return None if is_news else _AGAIN_SECONDS

    def _withdraw(self, machine: MaskingClient) -> None:
        if machine.reason and "withdrawn" not in self._said:
            self._said.add("withdrawn")
            raise IncompatiblePlan(f"withdrawn from the session: {machine.reason}")

    def _enter(self, step: MaskingStep) -> bool:
        """Make the step durable and take it; whether it changes anything."""
        if step.written() is self._machine:
            return False
        self._write(replace(self._diary, record=step.record))
        self._machine = step.written()
        return True

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
