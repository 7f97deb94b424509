"""Rehearsals of masked sessions: the costs and bytes of each party, measured in one process.

The real state machines run against the malicious profile, every message as bytes. Times are thread
CPU time. A few clients are timed, each with all caches emptied before, as on a device of its own
that meets its neighbours for the first time; the others run to make the server's input.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from fedpress_protocols.errors import ServerError
from fedpress_protocols.masking import certificates, graph, shamir
from fedpress_protocols.masking.certificates import Certificate
from fedpress_protocols.masking.client import ClientPolicy, MaskingClient, RoundDigests, Step
from fedpress_protocols.masking.keystream import Suite
from fedpress_protocols.masking.messages import (
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
    MaskingServer,
    Unmasked,
    aggregate_digest,
)
from fedpress_protocols.masking.transcript import SessionConfig, VectorSpec, rule_of
from fedpress_protocols.signatures import Content, DeviceKey

T = TypeVar("T")
Words = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]

TIMED = 10
"""Clients of a session that are timed."""

_SEED = 5
_REPEATS = 5
_NOW = 1_000_000.0
_POPULATION = "rehearsal"
_AUTHORITY = DeviceKey.from_bytes(bytes([1]) * 32)
_SERVER = DeviceKey.from_bytes(bytes([2]) * 32)


@dataclass(frozen=True, slots=True)
class Workload:
    """`n` clients with `coordinates` integers in [-bound, bound] each, of whom `dropped` share
    their secrets and then fall silent; `corrupt` and `dropout` are a SessionConfig's caps."""

    n: int
    coordinates: int
    bound: int
    dropped: int
    corrupt: int
    dropout: int
    suite: Suite = "chacha20"

    @property
    def config(self) -> SessionConfig:
        model, support, plan = (
            hashlib.sha256(name).digest() for name in (b"model", b"support", b"plan")
        )
        return SessionConfig(
            population=_POPULATION,
            task="rehearsal",
            round=1,
            attempt=1,
            server_key=_SERVER.public,
            server_nonce=bytes(32),
            model=model,
            support=support,
            plan=plan,
            vectors=(VectorSpec("update", self.coordinates, self.bound),),
            minimum=self.n // 2 + 1,
            maximum=self.n,
            expires=int(_NOW) + 3600,
            corrupt=self.corrupt,
            dropout=self.dropout,
            suite=self.suite,
            rule=rule_of("malicious", self.n),
        )


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """The costs of a session: medians over the timed clients, CPU seconds by step."""

    timed_clients: int
    client_seconds: dict[str, float]
    sent_bytes: float
    """Messages and body."""
    received_bytes: float
    body_bytes: int
    server_seconds: dict[str, float]
    server_masks: int


def rehearse(load: Workload, between: Callable[[], None] = lambda: None) -> Rehearsal:
    """Play one session of `load`. `between` is called before each timed client masks and after
    each repeat of the server's work, for measurements to compare with."""
    return _Session(load, between).play()


@dataclass
class _Client:
    """A device between two messages: its record, and its costs so far."""

    key: DeviceKey
    is_timed: bool
    is_lost: bool
    record: bytes = b""
    sent: int = 0
    received: int = 0
    body: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


class _Session:
    """One session of `load`, played once; `between` runs between the steps that are timed."""

    def __init__(self, load: Workload, between: Callable[[], None]) -> None:
        self._load, self._config, self._between = load, load.config, between
        self._now = _NOW
        self._seconds: dict[str, float] = {}
        self._server = MaskingServer.open(
            self._config, _SERVER, authority=_AUTHORITY.public, now=self._now
        )
        self._policy = ClientPolicy(
            _AUTHORITY.public,
            _SERVER.public,
            _POPULATION,
            minimum=2,
            corrupt=self._config.corrupt / 1e4,
        )
        every = max(1, load.n // TIMED)
        lost = np.random.default_rng(_SEED).permutation(load.n)[: load.dropped].tolist()
        self._clients = [
            _Client(_identity(i), i % every == 0 and i not in lost, i in lost)
            for i in range(load.n)
        ]
        self._total: Words = np.zeros(self._config.packing.num_words, np.uint64)
        self._expected = np.zeros(load.coordinates, np.int64)
        self._config.packing.unpack(self._total)  # compiles its kernels

    def play(self) -> Rehearsal:
        """Run the session to its end; raises ServerError if the sum is wrong."""
        for client, content in zip(self._clients, self._contents(), strict=True):
            self._begin(client, content)
        self._end("advertising")
        for client in self._clients:
            self._hear(client, Roster, "share")
        self._end("sharing")
        staying = [client for client in self._clients if not client.is_lost]
        for number, client in enumerate(staying):
            self._hear(client, Inbox, "open")
            self._mask(client, number)
        self._end("masking")
        for client in staying:
            self._hear(client, Survivors, "consent")
        self._end("consenting")
        for client in staying:
            self._hear(client, Consents, "reveal")
        self._end("revealing")
        masks = self._unmask()
        for client in staying:
            self._hear(client, Receipt, "receipt")
        timed = [client for client in staying if client.is_timed]
        return Rehearsal(
            timed_clients=len(timed),
            client_seconds={
                label: median(client.seconds[label] for client in timed)
                for label in timed[0].seconds
            },
            sent_bytes=median(client.sent for client in timed),
            received_bytes=median(client.received for client in timed),
            body_bytes=timed[0].body,
            server_seconds=dict(self._seconds),
            server_masks=masks,
        )

    # The devices

    def _values(self, number: int) -> Ints:
        load = self._load
        rng = np.random.default_rng([_SEED, number])
        return rng.integers(-load.bound, load.bound, load.coordinates, endpoint=True)

    def _contents(self) -> Iterator[bytes]:
        """The digest of each client's packed integers; empty for those that drop out."""
        packing, number = self._config.packing, 0
        for client in self._clients:
            content = b""
            if not client.is_lost:
                packed = packing.pack({"update": self._values(number)})
                content = hashlib.sha256(packing.to_bytes(packed)).digest()
                number += 1
            yield content

    def _begin(self, client: _Client, content: bytes) -> None:
        config = self._config
        certificate = Certificate.issue(
            _AUTHORITY,
            identity=client.key.public,
            client_id=client.key.key_id,
            population=_POPULATION,
            expires=config.expires,
        )

        def begin() -> Step:
            return MaskingClient.begin(
                self._server.offer,
                identity=client.key,
                certificate=certificate,
                policy=self._policy,
                trained=RoundDigests(config.model, config.support, config.plan, content),
                now=self._now,
            )

        self._step(client, "advertise", begin)
        self._post(client)

    def _hear(self, client: _Client, kind: type[ServerMessage], label: str) -> None:
        with self._clock("answers"):
            answer: Any = self._server.answer(kind, client.key.public)
            data: bytes = answer.to_bytes()
        client.received += len(data)

        def hear() -> Step:
            message: Any = parse(data)
            return self._machine(client).on(message, self._now)

        self._step(client, label, hear)
        if self._machine(client).outgoing is not None:
            self._post(client)

    def _mask(self, client: _Client, number: int) -> None:
        values = self._values(number)
        self._expected += values
        if client.is_timed:
            self._between()
        bodies: list[bytes] = []

        def mask() -> Step:
            step, body = self._machine(client).mask({"update": values})
            bodies.append(body)
            return step

        self._step(client, "mask", mask)
        client.body = len(bodies[0])
        self._post(client, bodies[0])

    def _machine(self, client: _Client) -> MaskingClient:
        return MaskingClient.from_bytes(client.record, identity=client.key, policy=self._policy)

    @staticmethod
    def _step(client: _Client, label: str, call: Callable[[], Step]) -> None:
        if client.is_timed:  # caches that other clients of this process filled
            for cached in (certificates._verify, graph._ring, graph.search):
                cached.cache_clear()
        begun = time.thread_time()
        client.record = call().record
        client.seconds[label] = time.thread_time() - begun

    # The server

    def _post(self, client: _Client, body: bytes = b"") -> None:
        outgoing: Any = self._machine(client).outgoing
        data: bytes = outgoing.to_bytes()
        client.sent += len(data) + len(body)
        with self._clock("messages"):
            message: Any = parse(data)
            is_new = self._server.admit(message, client.key.public, self._now)
        if isinstance(message, MaskedInput):
            with self._clock("bodies"):
                message.content.check(Content.of(body))
                self._total += self._config.packing.from_bytes(body)
        if is_new:
            with self._clock("messages"):
                self._server, _ = self._server.on(message, self._now)

    def _end(self, phase: str) -> None:
        """Let the deadline of `phase` pass if it has not ended by itself."""
        if self._server.phase == phase:
            self._now = self._server.deadline
            with self._clock("messages"):
                self._server, _ = self._server.on(DeadlinePassed(), self._now)

    def _unmask(self) -> int:
        """The number of masks expanded. Each part runs a few times; its median counts."""
        job = self._repeated("reconstruction", self._server.recover)
        total = self._repeated("unmasking", lambda: job.unmask([self._total]))
        sums = self._repeated("unpacking", lambda: self._config.packing.unpack(total))["update"]
        if (sums != self._expected).any():
            raise ServerError("the sum is not that of the clients' integers")
        unmasked = Unmasked(aggregate_digest(self._config, total))
        self._server, _ = self._server.on(unmasked, self._now)
        return len(job.masks)

    def _repeated(self, name: str, call: Callable[[], T]) -> T:
        times = []
        for _ in range(_REPEATS):
            shamir._weights.cache_clear()
            begun = time.thread_time()
            done = call()
            times.append(time.thread_time() - begun)
            self._between()
        self._seconds[name] = median(times)
        return done

    @contextmanager
    def _clock(self, name: str) -> Iterator[None]:
        begun = time.thread_time()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.thread_time() - begun


def _identity(number: int) -> DeviceKey:
    return DeviceKey.from_bytes(hashlib.sha256(b"rehearsal %d" % number).digest())
