"""Whole masked sessions in memory: real clients, a real server, bytes between them, a turned clock.

    session = Session(10)
    session.run({2: "share", 5: "mask"})      # two drop out: before P1's message, before P2's
    assert session.sums == session.expected

Every client is put to bytes and read again at each step, as a device that is killed all the time;
the server's events are kept, so that a test can replay any prefix of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedpress_protocols.errors import FedpressError, InvalidShare
from fedpress_protocols.masking.certificates import Certificate
from fedpress_protocols.masking.client import ClientPolicy, MaskingClient, RoundDigests, Step
from fedpress_protocols.masking.messages import (
    ClientMessage,
    Consents,
    Inbox,
    MaskedInput,
    Receipt,
    Roster,
    ServerMessage,
    Survivors,
    parse,
)
from fedpress_protocols.masking.server import (
    DeadlinePassed,
    Effect,
    Event,
    MaskingServer,
    StartUnmask,
    Unmasked,
    UnmaskFailed,
    aggregate_digest,
    from_record,
    to_record,
)
from fedpress_protocols.masking.transcript import SessionConfig, VectorSpec, rule_of
from fedpress_protocols.signatures import DeviceKey

POPULATION = "tests"
MODEL, SUPPORT, PLAN = (hashlib.sha256(name).digest() for name in (b"model", b"support", b"plan"))
VECTORS = (VectorSpec("update", 37, 1000), VectorSpec("examples", 1, 65_536))
START = 1_000_000.0

AUTHORITY = DeviceKey.from_bytes(bytes([1]) * 32)
SERVER = DeviceKey.from_bytes(bytes([2]) * 32)


def identity(number: int) -> DeviceKey:
    return DeviceKey.from_bytes(hashlib.sha256(b"device %d" % number).digest())


def certificate(key: DeviceKey, **changes: Any) -> Certificate:
    terms: dict[str, Any] = {
        "identity": key.public,
        "client_id": key.key_id,
        "population": POPULATION,
        "expires": int(START) + 86_400,
    }
    return Certificate.issue(AUTHORITY, **(terms | changes))


def config(n: int, **changes: Any) -> SessionConfig:
    terms: dict[str, Any] = {
        "population": POPULATION,
        "task": "digits",
        "round": 1,
        "attempt": 1,
        "server_key": SERVER.public,
        "server_nonce": bytes(32),
        "model": MODEL,
        "support": SUPPORT,
        "plan": PLAN,
        "vectors": VECTORS,
        "minimum": min(3, n),
        "maximum": n,
        "expires": int(START) + 3_600,
        "corrupt": 0 if n <= 4 else 1_000,
    }
    terms |= changes
    terms.setdefault("rule", rule_of(terms.get("adversary", "malicious"), terms["maximum"]))
    return SessionConfig(**terms)


def policy(**changes: Any) -> ClientPolicy:
    terms: dict[str, Any] = {
        "authority": AUTHORITY.public,
        "server_key": SERVER.public,
        "population": POPULATION,
        "minimum": 2,
        "adversary": "semi-honest",
        "corrupt": 0.0,
    }
    return ClientPolicy(**(terms | changes))


TRAINED = RoundDigests(MODEL, SUPPORT, PLAN, bytes(32))


@dataclass
class Device:
    """A client and what its driver keeps: the record, the values, the body."""

    key: DeviceKey
    values: Mapping[str, np.ndarray[Any, Any]]
    policy: ClientPolicy
    trained: RoundDigests = TRAINED
    record: bytes = b""
    body: bytes = b""

    def keep(self, step: Step) -> None:
        """Write the record, and go on with nothing but what was written."""
        self.record = step.record
        self.client = self.read()

    def read(self) -> MaskingClient:
        return MaskingClient.from_bytes(self.record, identity=self.key, policy=self.policy)

    def hear(self, message: ServerMessage, now: float = START) -> None:
        self.keep(self.client.on(message, now))

    def mask(self) -> None:
        step, self.body = self.client.mask(self.values)
        self.keep(step)


def values_of(vectors: Sequence[VectorSpec], number: int) -> dict[str, np.ndarray[Any, Any]]:
    """Whole range, the extremes among them."""
    rng = np.random.default_rng(number)
    made = {}
    for each in vectors:
        drawn = rng.integers(-each.bound, each.bound + 1, each.length, dtype=np.int64)
        drawn[0] = each.bound if number % 2 else -each.bound
        made[each.name] = drawn
    return made


@dataclass
class Session:
    """`n` devices and a server; `run` plays it out, the single phases can be played by hand."""

    n: int
    changes: dict[str, Any] = field(default_factory=dict)
    policy: ClientPolicy = field(default_factory=policy)
    now: float = START
    log: list[tuple[float, dict[str, str]]] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    states: list[MaskingServer] = field(default_factory=list)
    """The server after each event of the log."""
    words: Any = None
    suspects: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.config = config(self.n, **self.changes)
        self.server = MaskingServer.open(
            self.config, SERVER, authority=AUTHORITY.public, now=self.now
        )
        self.devices = [
            Device(identity(i), values_of(self.config.vectors, i), self.policy)
            for i in range(self.n)
        ]
        self.bodies: dict[int, bytes] = {}

    # One step at a time

    def content_of(self, device: Device) -> bytes:
        """The digest of what the device is to mask."""
        packing = self.config.packing
        return hashlib.sha256(packing.to_bytes(packing.pack(device.values))).digest()

    def begin(self, device: Device) -> None:
        content = self.content_of(device)
        step = MaskingClient.begin(
            self.server.offer,
            identity=device.key,
            certificate=certificate(device.key),
            policy=device.policy,
            trained=replace(device.trained, content=content),
            now=self.now,
        )
        device.keep(step)

    def event(self, event: Event) -> tuple[Effect, ...]:
        record = json.loads(json.dumps(to_record(event)))
        self.server, effects = self.server.on(from_record(record), self.now)
        if effects:
            self.log.append((self.now, record))
            self.states.append(self.server)
            self.effects += effects
        return effects

    def post(self, device: Device, message: ClientMessage | None = None) -> bool:
        """Send what the device has to send, over bytes; whether it was new to the server."""
        sent = message or device.client.outgoing
        assert sent is not None
        received: Any = parse(sent.to_bytes())
        is_new = self.server.admit(received, device.key.public, self.now)
        if is_new:
            if isinstance(received, MaskedInput):
                assert len(device.body) == received.length
                assert hashlib.sha256(device.body).digest() == received.sha256
                self.bodies[received.sender] = device.body
            self.event(received)
        return is_new

    def answer(self, device: Device, kind: type[ServerMessage]) -> Any:
        answer = self.server.answer(kind, device.key.public)
        assert answer is None or parse(answer.to_bytes()) == answer
        return answer

    def hear(self, device: Device, kind: type[ServerMessage]) -> None:
        answer = self.answer(device, kind)
        assert answer is not None
        device.hear(answer, self.now)

    def pass_deadline(self) -> None:
        self.now = max(self.now, self.server.deadline)
        self.event(DeadlinePassed())

    def unmask(self) -> None:
        """What the driver does on `StartUnmask`."""
        try:
            job = self.server.recover()
        except InvalidShare as exc:
            found = [tuple(exc.members.get(name, ())) for name in ("suspects", "failures")]
            self.event(UnmaskFailed(exc.detail, *found))
            return
        packing = self.config.packing
        self.words = job.unmask(packing.from_bytes(self.bodies[slot]) for slot in job.survivors)
        self.suspects = job.suspects
        self.event(Unmasked(aggregate_digest(self.config, self.words)))

    # All of it

    def run(self, drops: Mapping[int, str] | None = None) -> Session:
        """To the end; `drops` says which devices fall silent before which of their messages:
        "advertise", "share", "mask", "consent" or "reveal"."""
        self.play("advertise", None, drops)
        self.play("share", Roster, drops)
        self.play("mask", Inbox, drops)
        if self.config.adversary == "malicious":
            self.play("consent", Survivors, drops)
            self.play("reveal", Consents, drops)
        else:
            self.play("reveal", Survivors, drops)
        for device in self.devices:
            if device.record and self.server.is_over:
                self.hear(device, Receipt)
        return self

    def play(
        self, phase: str, awaited: type[ServerMessage] | None, drops: Mapping[int, str] | None
    ) -> None:
        """One phase: its clients hear what they awaited and send; then the deadline, if needed."""
        if self.server.is_over:
            return
        before = self.server.phase
        gone = {number for number, when in (drops or {}).items() if PHASES[when] <= PHASES[phase]}
        for number, device in enumerate(self.devices):
            if number in gone:
                continue
            if awaited is None:
                self.begin(device)
            else:
                try:
                    self.hear(device, awaited)
                except FedpressError:  # it came too late in the phase before
                    continue
                if phase == "mask" and device.client.phase == "ready":
                    device.mask()
            if device.client.outgoing is not None:
                self.post(device)
        if self.server.phase == before:
            self.pass_deadline()
        while self.server.phase == "unmasking":
            assert any(isinstance(effect, StartUnmask) for effect in self.effects)
            self.unmask()

    @property
    def survivors(self) -> list[Device]:
        slots = self.server.cohort.slots if self.server.cohort else {}
        return [d for d in self.devices if slots.get(d.key.public) in self.server.survivors]

    @property
    def sums(self) -> dict[str, list[int]]:
        """What the server has unmasked."""
        return {k: v.tolist() for k, v in self.config.packing.unpack(self.words).items()}

    @property
    def expected(self) -> dict[str, list[int]]:
        """The plain sums over the survivors."""
        return {
            each.name: np.sum([d.values[each.name] for d in self.survivors], axis=0).tolist()
            for each in self.config.vectors
        }


PHASES = {"advertise": 0, "share": 1, "mask": 2, "consent": 3, "reveal": 4}


def replayed(session: Session, events: int) -> tuple[MaskingServer, list[Effect]]:
    """The server again, from the first `events` of the session's events."""
    server = MaskingServer.open(session.config, SERVER, authority=AUTHORITY.public, now=START)
    effects: list[Effect] = []
    for now, record in session.log[:events]:
        server, more = server.on(from_record(record), now)
        effects += more
    return server, effects
