"""included y + residual + pending y + reported discards = everything computed.

For every device and coordinate, after every step of everything that can go wrong.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpress_client import Client, Discard, Ledger, ResidualRules
from fedpress_client.outgoing import Outgoing
from fedpress_compression.compressor import Compressor
from fedpress_compression.compressors.coded import Coded
from fedpress_compression.compressors.delta import Delta
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.none import Uncompressed
from fedpress_compression.compressors.per_tensor import PerTensor
from fedpress_compression.compressors.quantize import Quantize
from fedpress_compression.compressors.topk import TopK
from fedpress_protocols.errors import TransportError
from fedpress_protocols.messages import Assignment, Receipt
from fedpress_protocols.model import Model
from tests.client.coded_server import CodedLink, CodedServer, rounded
from tests.client.fake_server import (
    Drops,
    FakeLink,
    FakeServer,
    RandomTrainer,
    make_client,
    make_plan,
)

EPS = float(np.finfo(np.float32).eps)
COMPRESSORS: tuple[Compressor[Any], ...] = (
    ErrorFeedback(TopK(fraction=0.01)),
    ErrorFeedback(TopK(fraction=0.05, magnitude_bits=0)),
    ErrorFeedback(TopK(count=7, magnitude_bits=4, scope="tensor")),
    ErrorFeedback(Quantize(bits=2)),
    ErrorFeedback(Quantize(bits=4, rounding="stochastic")),
    ErrorFeedback(PerTensor(large=TopK(fraction=0.02), min_size=64)),
    ErrorFeedback(Uncompressed()),
    Uncompressed(),
    TopK(fraction=0.1),
    Quantize(bits=8),
)
OVER_A_LINK: tuple[Compressor[Any], ...] = (
    *COMPRESSORS,
    ErrorFeedback(Coded(TopK(fraction=0.02), contexts="activity")),
    Delta(TopK(fraction=0.1)),
    ErrorFeedback(Delta(TopK(fraction=0.02))),
    ErrorFeedback(PerTensor(large=Delta(TopK(fraction=0.1)), min_size=64)),
)
"""With those that read what a server publishes or keeps."""


def small_model() -> Model:
    rng = np.random.default_rng(1)
    return Model.from_tensors(
        {
            "w": rng.normal(size=(20, 12)).astype(np.float32),
            "b": rng.normal(size=12).astype(np.float32),
            "steps": np.array(0, np.int64),
        }
    )


class Crash(BaseException):
    """The process dies here."""


class Device:
    """One device with its own oracle, which outlives every crash of the client."""

    def __init__(self, server: FakeServer, folder: Path, seed: int | None, **options: Any) -> None:
        self.server, self.folder, self.seed, self.options = server, folder, seed, options
        self.trainer = RandomTrainer(server.model.spec.size)
        self.discards: dict[int, Discard] = {}
        self.magnitude = np.zeros(server.model.spec.size)
        self.seen: set[str] = set()
        self.started: dict[tuple[int, int], int] = {}
        self.client: Client | None = None

    def start(self, link: FakeLink) -> None:
        if self.client is not None:
            self.client.close()
        self.client = make_client(
            self.server,
            self.trainer,
            self.folder,
            link,
            seed=self.seed,
            on_discard=self.told,
            **self.options,
        )

    @property
    def running(self) -> Client:
        assert self.client is not None
        return self.client

    def told(self, discard: Discard) -> None:
        before = self.discards.get(discard.number)
        if before is not None:
            assert before.reason == discard.reason
            np.testing.assert_array_equal(before.vector, discard.vector)
        self.discards[discard.number] = discard

    def durable(self) -> Ledger | None:
        path = self.folder / "tasks" / "task" / "ledger.safetensors"
        return Ledger.from_bytes(path.read_bytes()) if path.exists() else None

    def check(self) -> float:
        """The equation, from what is on disk; the largest error as a share of what is allowed.

        The oracle sums in float64. Every float32 addition of the device errs by at most eps / 2
        times its result, whose magnitude is at most that of the residual before, the update and
        the pendings together; their sum over all checks, times 2 eps, is the bound.
        """
        ledger = self.durable()
        if ledger is None:
            return 0.0
        size = self.server.model.spec.size
        computed, found = np.zeros(size), np.zeros(size)
        for name in {*ledger.pending, *ledger.settled}:
            part = self.server.parts[name]
            update = self.trainer.computed[part.round, part.attempt].astype(np.float64)
            computed += update
            if name not in self.seen:
                self.seen.add(name)
                self.magnitude += np.abs(update)
        for name, outcome in ledger.settled.items():
            part = self.server.parts[name]
            assert part.receipt is not None
            assert part.receipt.receipt.outcome == outcome
            if outcome == "included":
                assert part.update is not None
                found += part.update.dense()
        for name, held in ledger.pending.items():
            y = held.update.dense()
            self.magnitude += np.abs(y)
            found += y
            part = self.server.parts[name]
            if part.update is not None:  # the server decoded the same bytes to the same bits
                assert part.body == held.body
                np.testing.assert_array_equal(part.update.dense(), y)
        if ledger.residual is not None:
            self.magnitude += np.abs(ledger.residual)
            found += ledger.residual
        for discard in (self.discards | {d.number: d for d in ledger.discards}).values():
            found += discard.vector
        allowed = 2 * EPS * self.magnitude + 1e-30
        error = np.abs(found - computed)
        assert (error <= allowed).all(), float((error / allowed).max())
        return float((error / allowed).max())


def included_total(server: FakeServer, device: Device) -> np.ndarray:
    total = np.zeros(server.model.spec.size)
    for part in server.parts.values():
        if part.receipt is not None and part.receipt.receipt.outcome == "included":
            assert part.update is not None
            total += part.update.dense()
    return total


SEEDS = pytest.mark.parametrize(
    "seed",
    [
        pytest.param(0, marks=pytest.mark.slow(short=True)),
        pytest.param(1, marks=pytest.mark.slow),
        *(pytest.param(seed, marks=pytest.mark.soak(only=True)) for seed in (2, 3)),
    ],
)


@pytest.fixture
def rounds(slow: bool, soak: bool) -> int:
    return 55 if slow or soak else 15


@SEEDS
def test_nothing_is_lost_over_many_rounds_of_mishaps(
    seed: int,
    rounds: int,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(seed)
    server = FakeServer(small_model(), two_of(rng), rounds=rounds)
    told = mishaps(server, lambda chance: Drops(server, rng, chance), rng, tmp_path, monkeypatch)
    record_property("figure", f"conservation, seed {seed}: {told}")


@SEEDS
def test_nothing_is_lost_by_parts_and_coded_models(
    seed: int,
    rounds: int,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bodies leave before they are whole; a process that dies takes nothing of them back."""
    leaves = Outgoing.__exit__

    def left(
        outgoing: Outgoing,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None and issubclass(kind, Crash):
            outgoing._stop()  # its thread dies with the process, and that is all
        else:
            leaves(outgoing, kind, error, trace)

    monkeypatch.setattr(Outgoing, "__exit__", left)
    rng = np.random.default_rng(seed)
    server = CodedServer(rounded(small_model()), two_of(rng), rounds=rounds)
    told = mishaps(
        server, lambda chance: CodedLink(server, rng, chance), rng, tmp_path, monkeypatch
    )
    assert server.completed > rounds // 5
    record_property(
        "figure", f"conservation, {server.completed} uploads by parts, seed {seed}: {told}"
    )


def two_of(rng: np.random.Generator) -> Callable[[int, int], list[Compressor[Any]]]:
    def profiles(round_: int, attempt: int) -> list[Compressor[Any]]:
        return [OVER_A_LINK[i] for i in rng.choice(len(OVER_A_LINK), size=2, replace=False)]

    return profiles


def mishaps(
    server: FakeServer,
    link: Callable[[float], FakeLink],
    rng: np.random.Generator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """The task to its end with all that may go wrong, the equation after every step; what did."""
    rules = [ResidualRules(), ResidualRules(), ResidualRules(decay=0.9, max_ratio=3.0)]
    devices = [
        Device(server, tmp_path / str(i), None if i else 5, rules=rules[i]) for i in range(3)
    ]
    die = crashing(monkeypatch)
    restarts = crashes = lost = 0
    for device in devices:
        device.start(link(0.05))
    worst, not_included = 0.0, 0
    while server.state == "running":
        device = devices[rng.integers(len(devices))]
        action = rng.random()
        if action < 0.06:
            device.start(link(0.05))
            restarts += 1
        elif action < 0.16:
            # Some uploads come too late to be aggregated; with none the round is abandoned.
            server.close(keep=lambda name: bool(rng.random() < 0.7))
        else:
            die.after(int(rng.integers(1, 40)) if rng.random() < 0.15 else None)
            try:
                device.running.step()
            except TransportError:
                lost += 1
            except Crash:
                crashes += 1
                if rng.random() < 0.5:  # or an interrupt, after which the same client goes on
                    device.start(link(0.05))
            die.after(None)
        worst = max(worst, *(device.check() for device in devices))
    for device in devices:
        device.start(link(0.0))
        summary = device.running.run()
        assert (summary.state, summary.pending) == ("finished", 0)
        worst = max(worst, device.check())
        assert summary.included > server.rounds // 10
        not_included += summary.not_included
    # Threads draw from one generator in any order, so that no seed fixes how often what happens.
    assert not_included > server.rounds // 10
    assert server.abandoned >= server.rounds // 30
    assert min(restarts, crashes, lost) >= server.rounds // 15
    return (
        f"{server.committed} rounds, {server.abandoned} abandoned, {len(server.parts)} "
        f"assignments, {restarts} restarts, {crashes} crashes, {lost} calls lost; largest error "
        f"{worst:.2f} of the bound"
    )


class crashing:
    """Lets the process die at the n-th step from now: a write, a sync, a rename, a call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: int | None = None
        self.count = 0
        self.trace: list[str] = []
        for name in ("open", "write", "fsync", "replace"):
            wrapped = self._wrapped(name, getattr(os, name))
            monkeypatch.setattr(f"fedpress_client.state.os.{name}", wrapped)

    def _wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.step(name)
            if name == "write" and len(args[1]) > 1 and self.left == 0:
                call(args[0], args[1][: len(args[1]) // 2])  # torn
            result = None if name == "fsync" else call(*args, **kwargs)  # no power cut here
            self.step(f"after {name}")
            return result

        return wrapped

    def after(self, steps: int | None) -> None:
        self.left = steps

    def step(self, what: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # a process dies as a whole: the moment is the main thread's to choose
        self.count += 1
        self.trace.append(what)
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise Crash(what)


def undisturbed_task(tmp_path: Path) -> tuple[FakeServer, list[Device]]:
    plans: list[Compressor[Any]] = [
        ErrorFeedback(TopK(fraction=0.05)),
        ErrorFeedback(Quantize(bits=3)),
        TopK(),
    ]
    server = FakeServer(
        small_model(),
        lambda round_, attempt: [plans[round_ % 3]],
        rounds=4,
        auto=2,
    )
    return server, [Device(server, tmp_path / str(i), seed=i) for i in range(2)]


def drive(server: FakeServer, devices: list[Device], die: crashing) -> str:
    """Both devices in turn to the end of the task; the model's digest."""
    for device in devices:
        device.start(FakeLink(server, die.step))
    running = set(range(len(devices)))
    for turn in range(200):
        if turn == 5:
            server.close(minimum=3)  # the second round is abandoned once
        for index in sorted(running):
            device = devices[index]
            try:
                if device.running.step() is None:
                    running.discard(index)
            except Crash:
                device.start(FakeLink(server, die.step))
            device.check()
        if not running:
            return server.model.digest
    raise AssertionError("the task did not end")


def outcomes(server: FakeServer) -> dict[str, str]:
    """By assignment; each has its receipt."""
    found: dict[str, str] = {}
    for name, part in server.parts.items():
        assert part.receipt is not None
        found[name] = part.receipt.receipt.outcome
    return found


@pytest.mark.soak
@pytest.mark.slow(short=True)
def test_a_crash_between_any_two_steps_changes_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
    slow: bool,
    soak: bool,
) -> None:
    die = crashing(monkeypatch)
    server, devices = undisturbed_task(tmp_path / "undisturbed")
    digest = drive(server, devices, die)
    counts = outcomes(server)
    points = die.count
    assert points > 200
    tried = range(0, points, 1 if soak else 5 if slow else 31)
    for point in tried:
        die.after(point)
        server, devices = undisturbed_task(tmp_path / str(point))
        try:
            server_digest = drive(server, devices, die)
        except Crash:  # while a client was being made
            server_digest = drive(server, devices, die)
        assert die.left is None, "it never came to the crash"
        assert server_digest == digest, f"a crash at step {point}, {die.trace[point]}"
        assert outcomes(server) == counts
        assert not any(len(d.running.ledger.pending) for d in devices)
    record_property(
        "figure", f"device crash at {len(tried)} of {points} steps: the same model, nothing lost"
    )


@given(data=st.data())
def test_any_order_of_prepares_and_receipts_conserves(data: st.DataObject) -> None:
    """The ledger alone, without disk or network, with several uploads under way at once."""

    model = small_model()
    ledger = Ledger("task", "me")
    size = model.spec.size
    computed, included, discarded, magnitude = (np.zeros(size) for _ in range(4))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    for round_ in range(1, data.draw(st.integers(1, 8)) + 1):
        compressor = data.draw(st.sampled_from(COMPRESSORS))
        plan = make_plan(
            model, compressor, round_=round_, max_abs=data.draw(st.sampled_from([0.5, 64]))
        )
        assignment = Assignment(assignment=f"a{round_}", client_id="me", plan=plan, profile="p0")
        update = (rng.standard_t(2, size) * 10.0 ** rng.integers(-6, 1)).astype(np.float32)
        ledger, body = ledger.prepare(assignment, update, 10, model.spec, rng)
        assert ledger.prepare(assignment, update * 2, 10, model.spec, rng) == (ledger, body)
        computed += update
        magnitude += np.abs(update)
        for name in data.draw(st.lists(st.sampled_from(sorted(ledger.pending)), unique=True)):
            held = ledger.pending[name]
            is_in = data.draw(st.booleans())
            receipt = Receipt(
                assignment=name,
                client_id="me",
                task="task",
                round=held.round,
                attempt=held.attempt,
                outcome="included" if is_in else "not-included",
                reason="included" if is_in else "round-full",
                upload=hashlib.sha256(held.body).hexdigest(),
                model=None,
                issued_at=0,
            )
            ledger = ledger.settle(receipt)
            assert ledger.settle(receipt) is ledger
            if is_in:
                included += held.update.dense()
            magnitude += np.abs(held.update.dense())
        if data.draw(st.booleans()):
            ledger = Ledger.from_bytes(ledger.to_bytes())
        for discard in ledger.discards:
            discarded += discard.vector
        ledger = ledger.told()
        held_y = sum((p.update.dense() for p in ledger.pending.values()), np.zeros(size))
        residual = np.zeros(size) if ledger.residual is None else ledger.residual
        magnitude += np.abs(residual)
        error = np.abs(included + residual + held_y + discarded - computed)
        assert (error <= 2 * EPS * magnitude + 1e-30).all()
