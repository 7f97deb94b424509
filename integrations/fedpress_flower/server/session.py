"""A masked session over Flower's messages: the machine `MaskingServer`, one exchange a phase.

The server's machine waits for deadlines, and Flower's grid for replies; so a phase is one exchange
of messages, and whoever has not answered when it is over was silent. Time stands still within one:
a session is then a function of the replies, and a run that is repeated from them comes to the same.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from flwr.app import ConfigRecord, Message, RecordDict

from fedpress_flower import envelope
from fedpress_flower.server.host import Host
from fedpress_flower.server.plan import NO_ANSWER
from fedpress_flower.server.rounds import Round
from fedpress_protocols.errors import (
    FedpressError,
    Forbidden,
    InvalidShare,
    InvalidUpdate,
    MalformedRequest,
)
from fedpress_protocols.masking.agreement import agreed, chosen
from fedpress_protocols.masking.messages import (
    Advertise,
    ClientMessage,
    Complaint,
    Consent,
    Consents,
    Inbox,
    MaskedInput,
    Receipt,
    Reveal,
    Roster,
    ServerMessage,
    Shares,
    Survivors,
    parse,
)
from fedpress_protocols.masking.payload import Aggregate, Payload
from fedpress_protocols.masking.server import (
    Aborted,
    DeadlinePassed,
    Event,
    MaskingServer,
    Unmasked,
    UnmaskFailed,
    aggregate_digest,
)

Exchange = Callable[[list[Message], float], Iterable[Message]]
"""Sends messages, waits so many seconds at most, and gives the replies as they come."""

_LASTS = 3600
"""Seconds that an offer is good for beyond its phases: devices' clocks are not exact."""
_TRAIN = "train"
_SLOT = re.compile(r"\bslot (\d{1,5})\b")


@dataclass(frozen=True, slots=True)
class _Phase:
    """A phase: the message that clients send, the message that they receive first, and the field of
    the configuration that limits its seconds."""

    step: str
    said: type[ClientMessage]
    heard: type[ServerMessage]
    seconds: str


_PHASES: Mapping[str, _Phase] = {
    "sharing": _Phase(envelope.SHARES, Shares, Roster, "share"),
    "masking": _Phase(envelope.MASKED, MaskedInput, Inbox, "mask"),
    "consenting": _Phase(envelope.CONSENT, Consent, Survivors, "consent"),
    "revealing": _Phase(envelope.REVEAL, Reveal, Survivors, "reveal"),
}


def step_message(node: int, **fields: str | bytes) -> Message:
    """A message of a session to a node; it goes as one to train, see fedpress_flower.envelope."""
    content = RecordDict({envelope.RECORD: ConfigRecord(fields)})
    return Message(content, dst_node_id=node, message_type=_TRAIN)


def said_by(reply: Message) -> bytes:
    """Return the message of a reply; raises MalformedRequest if it is not one of a masked round."""
    record = reply.content.get(envelope.RECORD)
    message = record.get(envelope.SAID) if isinstance(record, ConfigRecord) else None
    if not isinstance(message, bytes):
        raise MalformedRequest("the reply is none of a masked round: has the app masking_mod?")
    return message


class Session:
    """The session of one round. `exchange` reaches its clients; what they do wrong is told to
    `here`."""

    def __init__(
        self, host: Host, here: Round, payload: Payload, *, now: float, seconds: float, seed: str
    ) -> None:
        """`seconds` is how long training may take. The nonce is made of `seed`, which no other
        session of the host's may have had at the same time."""
        config = agreed(payload, population=host.population, server_key=host.key.public)
        phases = config.seconds
        lasts = phases.share + phases.mask + phases.consent + phases.reveal + _LASTS
        nonce = hashlib.sha256(f"fedpress session|{seed}|{now!r}".encode()).digest()
        config = chosen(config, nonce=nonce, expires=int(now + seconds) + lasts)
        self.machine = MaskingServer.open(config, host.key, authority=host.authority, now=now)
        self.up_bytes = self.down_bytes = 0
        self.silent: dict[str, int] = {}
        self.faults: dict[int, str] = {}
        """Faults of survivors, by node."""
        self.began: set[int] = set()
        """Nodes that were told with whom to mask, and may have sent a body."""
        self._host, self._here, self._payload, self._now = host, here, payload, now
        self._nodes: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._gone: set[int] = set()
        self._digest = ""
        self._found: Aggregate | None = None
        self._total: npt.NDArray[np.uint64] = np.zeros(config.packing.num_words, np.uint64)

    @property
    def offer(self) -> bytes:
        return self.machine.offer.to_bytes()

    @property
    def survivors(self) -> list[int]:
        """The nodes in the sum, rising; none before they are settled."""
        members = self.machine.cohort.members if self.machine.cohort is not None else ()
        slots = self.machine.survivors
        return sorted(self._node(members[slot]) for slot in slots)

    @property
    def trained(self) -> set[int]:
        """The nodes that have advertised."""
        return set(self._keys)

    def ended(self, node: int) -> bytes:
        """The session's last word to a client of it, once it is over."""
        word = self.machine.answer(Receipt, self._keys[node])
        assert word is not None  # noqa: S101 - it is over
        return word.to_bytes()

    def advertise(self, replies: Iterable[Message]) -> None:
        """Take in what clients said when they had trained."""
        self._hear(replies, set(self._here.asked), _TRAIN, Advertise)

    def run(self, exchange: Exchange, *, hurry: bool) -> Aggregate | None:
        """Go through the phases; what the sum says, or None if there was none. With a sum, the
        session is over after `close`. In a `hurry` nobody waits for shares that are not needed."""
        if self.machine.phase == "advertising":
            self._pass()
        while (due := _PHASES.get(self.machine.phase)) is not None:
            phase = self.machine.phase
            asked = sorted((n, key) for n, key in self._keys.items() if self._is_due(key, n))
            seconds = getattr(self.machine.config.seconds, due.seconds)
            messages = [self._message(node, key, due) for node, key in asked]
            replies = exchange(messages, seconds)
            self._hear(replies, {node for node, _ in asked}, due.step, due.said, hurry=hurry)
            if self.machine.phase == phase:
                self._pass()
            self._unmask()
            if self._found is not None:
                break
        return self._found

    def close(self) -> None:
        """The sum is used: publish the receipt."""
        self._on(Unmasked(self._digest))

    def abort(self, reason: str) -> None:
        """The sum was of no use."""
        self._on(Aborted(reason))

    def _is_due(self, identity: bytes, node: int) -> bool:
        """Whether a client is to be asked in this phase: it has come so far, and not failed."""
        cohort = self.machine.cohort
        if node in self._gone or cohort is None or identity not in cohort.slots:
            return False
        slot = cohort.slots[identity]
        match self.machine.phase:
            case "masking":
                return slot in self.machine.sharers
            case "consenting" | "revealing":
                return slot in self.machine.survivors
        return True

    def _message(self, node: int, identity: bytes, due: _Phase) -> Message:
        kind = due.heard
        if due.step == envelope.REVEAL and self.machine.config.adversary == "malicious":
            kind = Consents
        answer = self.machine.answer(kind, identity)
        assert answer is not None  # noqa: S101 - the machine has come to this phase
        message = answer.to_bytes()
        self.down_bytes += len(message)
        if due.step == envelope.MASKED:
            self.began.add(node)
        fields: dict[str, str | bytes] = {
            envelope.STEP: due.step,
            envelope.TASK: self._here.plan.task,
            envelope.CLIENT: str(node),
            envelope.ASSIGNMENT: self._here.assignment(node),
            envelope.HEARD: message,
        }
        return step_message(node, **fields)

    def _hear(
        self,
        replies: Iterable[Message],
        waiting: set[int],
        step: str,
        kind: type[ClientMessage],
        *,
        hurry: bool = False,
    ) -> None:
        """Take in one reply of each node that was asked; who has failed is asked no more."""
        for reply in replies:
            node = reply.metadata.src_node_id
            if node not in waiting:
                continue
            waiting.discard(node)
            if reply.has_error():
                reason = (reply.error.reason or "no reason given").strip()
                self._fail(node, f"failed: {_SLOT.sub(self._named, reason)}")
                continue
            try:
                self._take(node, reply, kind)
            except FedpressError as exc:
                self._fail(node, exc.detail)
            if hurry and self.machine.phase == "unmasking":
                self._unmask()
                if self._found is not None:
                    waiting.clear()
                    break
        self.silent[step] = len(waiting)
        for node in waiting - self._here.dropped.keys() - set(self.survivors):
            self._here.drop(node, NO_ANSWER if step == _TRAIN else f"{NO_ANSWER} to {step}")

    def _take(self, node: int, reply: Message, kind: type[ClientMessage]) -> None:
        data = said_by(reply)
        message = parse(data)
        if kind is MaskedInput and isinstance(message, Complaint):
            if self.machine.admit(message, self._keys[node], self._now):
                self._on(message)
            of = ", ".join(f"node {self._at(slot)}" for slot in sorted(message.accused))
            raise InvalidShare(f"could not open what was sealed for it by {of}")
        if not isinstance(message, kind):
            raise MalformedRequest(f"a {message.NAME} where a {kind.NAME} is due")
        if isinstance(message, Advertise):
            identity = message.certificate.identity
            if identity in self._nodes:
                raise MalformedRequest("an identity that another node has")
            if not self._host.is_of(message.certificate, node):
                raise Forbidden("the certificate of another node")
        else:
            identity = self._keys[node]
        if not self.machine.admit(message, identity, self._now):
            return
        words = None
        if isinstance(message, MaskedInput):
            words = self._words(message, reply)
        self.up_bytes += len(data)
        if isinstance(message, Advertise):
            self._nodes[identity], self._keys[node] = node, identity
        self._on(message)
        if words is not None:
            self._total += words

    def _words(self, header: MaskedInput, reply: Message) -> npt.NDArray[np.uint64]:
        """Of a masked body, as its header announces it; raises InvalidUpdate."""
        arrays = reply.content.array_records.get(envelope.BODY_RECORD, {})
        if list(arrays) != [envelope.BODY] or arrays[envelope.BODY].stype != envelope.MASKED_STYPE:
            raise InvalidUpdate("a masked input without its body")
        body = arrays[envelope.BODY].data
        self._here.upload_bytes += len(body)
        if (hashlib.sha256(body).digest(), len(body)) != (header.sha256, header.length):
            raise InvalidUpdate("a body other than the one that was announced")
        return self.machine.config.packing.from_bytes(body)

    def _unmask(self) -> None:
        """Find what the sum says, if there are shares enough; wrong ones are passed over."""
        while self.machine.phase == "unmasking" and self._found is None:
            packing = self.machine.config.packing
            try:
                job = self.machine.recover()
                words = job.unmask([self._total])
                aggregate = self._payload.decompress(packing.unpack(words), len(job.survivors))
            except (InvalidShare, InvalidUpdate) as exc:
                suspects = tuple(exc.members.get("suspects", ()))
                self._on(UnmaskFailed(exc.detail, suspects))
                for slot in suspects:
                    self.faults[self._at(slot)] = "shares of a secret that it did not announce"
                continue
            self._digest = aggregate_digest(self.machine.config, words)
            members = self.machine.cohort.members if self.machine.cohort is not None else ()
            for slot in job.suspects:
                self.faults[self._node(members[slot])] = "shares that were not dealt to it"
            self._found = aggregate

    def _fail(self, node: int, reason: str) -> None:
        self._gone.add(node)
        if node in self.survivors:
            self.faults[node] = reason
        else:
            self._here.drop(node, reason)

    def _named(self, match: re.Match[str]) -> str:
        """The slot that a client complains of, with its node."""
        members = self.machine.cohort.members if self.machine.cohort is not None else ()
        slot = int(match[1])
        return f"{match[0]}, node {self._node(members[slot])}" if slot < len(members) else match[0]

    def _at(self, slot: int) -> int:
        """The node in that slot of the roster."""
        cohort = self.machine.cohort
        assert cohort is not None  # noqa: S101 - it is closed
        return self._node(cohort.members[slot])

    def _node(self, member: Advertise) -> int:
        return self._nodes[member.certificate.identity]

    def _pass(self) -> None:
        self._now = max(self._now, self.machine.deadline)
        self._on(DeadlinePassed())

    def _on(self, event: Event) -> None:
        self.machine, _ = self.machine.on(event, self._now)
