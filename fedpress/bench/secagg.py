"""`fedpress bench secagg`: what a masked session costs each party, against what masks cost at all.

Whole sessions of the real machines run in this process, every message as bytes. Times are thread
CPU time. The floor is the key stream of a mask and its addition to the words, and nothing else,
measured between the clients of the same run; only ratios to it are worth comparing between
machines. A few clients are timed, each with all caches emptied before, as on a device of its own
that meets its neighbours for the first time; the others run to make the server's input.
docs/bench-secagg.md says what each key is.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES, ChaCha20
from cryptography.hazmat.primitives.ciphers.modes import CTR

from fedpress_compression import kernels
from fedpress_protocols.errors import ServerError
from fedpress_protocols.masking import certificates, graph, shamir
from fedpress_protocols.masking.certificates import Certificate
from fedpress_protocols.masking.client import ClientPolicy, MaskingClient, Step, Trained
from fedpress_protocols.masking.keystream import SUITES, Suite
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

SEED = 5
TIMED = 10
"""Clients of a session that are timed."""

_FLOOR_MASKS = 20
_REPEATS = 5
_CHUNK = 2**15
_NOW = 1_000_000.0
_POPULATION = "bench"
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
    def name(self) -> str:
        return f"n={self.n:,} {self.suite}"

    @property
    def config(self) -> SessionConfig:
        model, support, plan = (
            hashlib.sha256(name).digest() for name in (b"model", b"support", b"plan")
        )
        return SessionConfig(
            population=_POPULATION,
            task="bench",
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


# Sums of 16 bits in a complete graph; of 21 bits in a graph of degree 140.
COMPLETE = Workload(100, 1_000_000, 327, 5, 1_000, 500)
SPARSE = Workload(1_000, 1_000_000, 1_048, 50, 500, 500)

# By the kind of session, the ratio and what it may be.
TARGETS = {
    "complete": {"client / floor": 1.5, "server / floor": 1.5, "bytes / bound": 1.0},
    "sparse": {
        "client / floor": 1.6,
        "server less reconstruction / floor": 1.6,
        "bytes / bound": 1.0,
    },
}


def run(json_file: Path | None, quick: bool) -> str:
    """Measure, write `json_file` if there is one, and return the tables for people."""
    found = measure(quick)
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=2) + "\n")
    return _tables(found)


def measure(quick: bool = False) -> dict[str, Any]:
    """All figures; `quick` leaves the session of 1,000 clients out."""
    loads = [replace(COMPLETE, suite=suite) for suite in SUITES]
    if not quick:
        loads.append(SPARSE)
    for load in loads:  # compile, and fill what lasts longer than a session
        _Session(replace(load, n=4, coordinates=1000, dropped=0, corrupt=0)).play()
    sessions = {load.name: _Session(load).play() for load in loads}
    return {
        "machine": {
            "kernels": kernels.CHOSEN,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "cpus": os.cpu_count(),
            "load": os.getloadavg()[0],
        },
        "sessions": sessions,
        "targets": _targets(sessions),
    }


def play(load: Workload) -> dict[str, Any]:
    """The figures of one session of `load`."""
    return _Session(load).play()


@dataclass
class _Client:
    """A device between two messages: its record, and what it has cost so far."""

    key: DeviceKey
    is_timed: bool
    is_lost: bool
    record: bytes = b""
    sent: int = 0
    received: int = 0
    body: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


class _Session:
    """One session of `load`, played once."""

    def __init__(self, load: Workload) -> None:
        self._load, self._config = load, load.config
        self._now = _NOW
        self._seconds: dict[str, float] = {}
        self._floors: list[float] = []
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
        lost = np.random.default_rng(SEED).permutation(load.n)[: load.dropped].tolist()
        self._clients = [
            _Client(_identity(i), i % every == 0 and i not in lost, i in lost)
            for i in range(load.n)
        ]
        self._total: Words = np.zeros(self._config.packing.num_words, np.uint64)
        self._expected = np.zeros(load.coordinates, np.int64)
        self._config.packing.unpack(self._total)  # compiles its kernels

    def play(self) -> dict[str, Any]:
        """The figures, once the sum has come out right."""
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
        return self._figures([client for client in staying if client.is_timed], masks)

    # The devices

    def _values(self, number: int) -> Ints:
        load = self._load
        rng = np.random.default_rng([SEED, number])
        return rng.integers(-load.bound, load.bound, load.coordinates, endpoint=True)

    def _contents(self) -> Iterator[bytes]:
        """What each client is to mask, as a digest; those that are lost mask nothing."""
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
                trained=Trained(config.model, config.support, config.plan, content),
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
        load = self._load
        values = self._values(number)
        self._expected += values
        if client.is_timed:
            self._floors.append(_floor(self._config.packing.num_words, load.suite))
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
        if client.is_timed:  # of what other clients of this process found out
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
        """How many masks it took. Each part is done a few times, and its median counts."""
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
            self._floors.append(_floor(self._config.packing.num_words, self._load.suite))
        self._seconds[name] = median(times)
        return done

    @contextmanager
    def _clock(self, name: str) -> Iterator[None]:
        begun = time.thread_time()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.thread_time() - begun

    # What it comes to

    def _figures(self, timed: list[_Client], server_masks: int) -> dict[str, Any]:
        load, config = self._load, self._config
        parameters = config.parameters(load.n)
        floor = median(self._floors)
        steps = {
            label: median(client.seconds[label] for client in timed) for label in timed[0].seconds
        }
        client_masks = 1 + parameters.degree
        sum_bits = math.log2(2 * load.n * load.bound + 1)
        bound = 1.03 * load.coordinates * sum_bits / 8 + 144 * parameters.degree
        server = self._seconds
        client_floor, server_floor = client_masks * floor, server_masks * floor
        sent = median(client.sent for client in timed)
        unmask = server["reconstruction"] + server["unmasking"] + server["unpacking"]
        return {
            "clients": load.n,
            "dropped": load.dropped,
            "degree": parameters.degree,
            "threshold": parameters.threshold,
            "coordinates": load.coordinates,
            "sum_bits": sum_bits,
            "suite": load.suite,
            "timed_clients": len(timed),
            "floor_seconds_per_mask": floor,
            "client": {
                "masks": client_masks,
                "floor_seconds": client_floor,
                "seconds": steps,
                "total_seconds": sum(steps.values()),
                "sent_bytes": sent,
                "body_bytes": timed[0].body,
                "received_bytes": median(client.received for client in timed),
            },
            "server": {
                "masks": server_masks,
                "floor_seconds": server_floor,
                "seconds": dict(server),
                "total_seconds": sum(server.values()),
            },
            "ratios": {
                "client / floor": (steps["open"] + steps["mask"]) / client_floor,
                "client's masking alone / floor": steps["mask"] / client_floor,
                "client in all / floor": sum(steps.values()) / client_floor,
                "server / floor": unmask / server_floor,
                "server less reconstruction / floor": (unmask - server["reconstruction"])
                / server_floor,
                "server in all / floor": sum(server.values()) / server_floor,
                "bytes / bound": sent / bound,
                "body / entropy": 8 * timed[0].body / (load.coordinates * sum_bits),
            },
        }


def _identity(number: int) -> DeviceKey:
    return DeviceKey.from_bytes(hashlib.sha256(b"bench %d" % number).digest())


def _floor(num_words: int, suite: Suite) -> float:
    """CPU seconds of one mask: a key stream made in chunks and added to the words, and no more."""
    words, buffer = np.zeros(num_words, np.uint64), np.empty(_CHUNK, np.uint64)
    octets, zeros = buffer.data.cast("B"), memoryview(bytes(8 * _CHUNK))
    begun = time.thread_time()
    for number in range(_FLOOR_MASKS):
        key = bytes([number]) * 32
        cipher: Cipher[Any] = (
            Cipher(ChaCha20(key, key[:16]), mode=None)
            if suite == "chacha20"
            else Cipher(AES(key[:16]), CTR(key[:16]))
        )
        stream = cipher.encryptor()
        for at in range(0, num_words, _CHUNK):
            chunk = words[at : at + _CHUNK]
            stream.update_into(zeros[: chunk.nbytes], octets[: chunk.nbytes])
            np.add(chunk, buffer[: chunk.size], out=chunk)
    return (time.thread_time() - begun) / _FLOOR_MASKS


def _targets(sessions: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for name, session in sessions.items():
        kind = "complete" if session["degree"] == session["clients"] - 1 else "sparse"
        for ratio, due in TARGETS[kind].items():
            value = session["ratios"][ratio]
            rows.append(
                {"name": f"{name}: {ratio}", "value": value, "due": due, "met": value <= due}
            )
    return rows


def _tables(found: dict[str, Any]) -> str:
    lines = ["  ".join(f"{key} {value}" for key, value in found["machine"].items())]
    for name, session in found["sessions"].items():
        lines += [
            "",
            f"{name}: degree {session['degree']}, threshold {session['threshold']}, "
            f"{session['dropped']} dropped, {session['coordinates']:,} coordinates, sums of "
            f"{session['sum_bits']:.2f} bits",
            f"a mask {1e3 * session['floor_seconds_per_mask']:.3f} ms",
        ]
        for party in ("client", "server"):
            costs = session[party]
            parts = ", ".join(
                f"{label} {1e3 * seconds:.1f}" for label, seconds in costs["seconds"].items()
            )
            lines.append(
                f"{party}: {costs['masks']} masks, floor {1e3 * costs['floor_seconds']:.1f} ms, "
                f"in all {1e3 * costs['total_seconds']:.1f} ms: {parts}"
            )
        client = session["client"]
        lines.append(
            f"client sends {client['sent_bytes']:,.0f} bytes (body {client['body_bytes']:,}), "
            f"receives {client['received_bytes']:,.0f}"
        )
        lines += [f"    {key:40}{value:8.3f}" for key, value in session["ratios"].items()]
    lines += ["", f"{'target':64}{'found':>8}{'due':>8}"]
    for row in found["targets"]:
        verdict = "" if row["met"] else "  missed"
        lines.append(f"{row['name']:64}{row['value']:8.3f}{row['due']:8.3f}{verdict}")
    return "\n".join(lines)
