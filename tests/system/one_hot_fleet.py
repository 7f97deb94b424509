"""Devices whose uploads show in the model: each is zero but at one coordinate of its own.

What became of every upload is then in the last model itself: 1 where it counts, 0 where it does
not, 2 where it was counted twice.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import numpy as np

from fedpress_compression.contexts import contexts_of
from fedpress_protocols.errors import ClockSkew, RoundClosed, Unavailable
from fedpress_protocols.messages import Assignment, Receipt, RoundStatus
from fedpress_protocols.model import Model
from fedpress_protocols.upload import Upload
from tests.devices import Device, Operator, checked
from tests.system.server_process import ADMIN_TOKEN

DEVICES = 4
TASK = "one-hot"


@dataclass
class OneHot:
    """A device that says everything again until it has its receipt, to whichever server answers.

    What it was told goes into `acknowledged` and `receipts`; it never forgets.
    """

    index: int
    size: int
    clients: Sequence[httpx.Client]
    chance: random.Random
    device: Device
    is_over: threading.Event
    pending: dict[str, bytes] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)
    acknowledged: set[str] = field(default_factory=set)
    receipts: dict[str, Receipt] = field(default_factory=dict)
    failure: BaseException | None = None
    refused: Counter[str] = field(default_factory=Counter)

    def run(self) -> None:
        try:
            while not self.is_over.is_set() or self.pending:
                self.device.http = self.chance.choice(self.clients)
                try:
                    self._turn()
                except (httpx.TransportError, ClockSkew):  # by a server that has just begun
                    time.sleep(0.02)
                except Unavailable:
                    self.refused["unavailable"] += 1
                    time.sleep(0.02)
        except BaseException as exc:
            self.failure = exc

    def _turn(self) -> None:
        for name in list(self.pending):
            if name not in self.acknowledged or self.chance.random() < 0.3:
                self._send(name)
        answer = self.device.check_in(TASK, *self.pending, wait=0.5)
        if answer is None:
            return
        for signed in answer.receipts:
            name = signed.receipt.assignment
            assert self.receipts.setdefault(name, signed.receipt) == signed.receipt
            self.pending.pop(name, None)
        given = answer.assignment
        if given is not None and given.assignment not in self.receipts:
            name = given.assignment
            if name not in self.places:
                self.places[name] = (given.plan.round - 1) * DEVICES + self.index
            self.pending.setdefault(name, one_hot(given, self.places[name], self.size))
            self._send(name)

    def _send(self, name: str) -> None:
        try:
            answer = checked(self.device.put(name, self.pending[name]))
        except RoundClosed:
            assert name not in self.acknowledged, "an upload was acknowledged, and then not known"
        else:
            if name in self.acknowledged:
                assert answer.status_code == 200, "what is staged is not new"
            self.acknowledged.add(name)


def one_hot(assignment: Assignment, place: int, size: int) -> bytes:
    """The upload whose share in the mean of all devices is 1 at `place`."""
    spec = first_model(size).spec
    update = np.zeros(size, np.float32)
    update[place] = DEVICES
    plan = assignment.plan
    compressor, public = plan.compressor(assignment.profile), plan.public(spec)
    rng = np.random.default_rng(0)
    symbols, _ = compressor.compress(update, compressor.init(spec), public, rng)
    layout = compressor.layout(spec)
    made = Upload(plan.profile_index(assignment.profile), 1, symbols)
    return made.to_bytes(layout, contexts_of(layout, public))


def first_model(size: int) -> Model:
    return Model.from_tensors({"weight": np.zeros(size, np.float32)})


class Fleet:
    """Devices in threads of their own, and an operator, at servers that may come and go."""

    def __init__(
        self, clients: list[httpx.Client], rounds: int, operator: Operator | None = None
    ) -> None:
        """Begins a task of so many rounds; the devices wait for `taking_part`. `operator`, where it
        is not one at the first of the servers."""
        self.operator = operator or Operator(clients[0], ADMIN_TOKEN)
        self._is_over = threading.Event()
        self.devices = []
        size = rounds * DEVICES
        for index in range(DEVICES):
            device = Device(clients[0])
            device.enrol(self.operator.token())
            chance = random.Random(index)
            self.devices.append(OneHot(index, size, clients, chance, device, self._is_over))
        self.operator.begin(
            first_model(size),
            TASK,
            rounds=rounds,
            cohort={"size": DEVICES, "minimum": DEVICES},
            round_seconds=86400.0,
            max_attempts=1000,
        )

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        """While the block lasts; then the task is cancelled, and everybody waits for receipts."""
        threads = [threading.Thread(target=each.run, daemon=True) for each in self.devices]
        for thread in threads:
            thread.start()
        try:
            yield
            self.wait_for_rounds(2)
            self.operator.post(f"/v1/admin/tasks/{TASK}/cancel")
        finally:
            self._is_over.set()
        for thread, each in zip(threads, self.devices, strict=True):
            thread.join(60)
            assert not thread.is_alive(), f"device {each.index} waits for {set(each.pending)}"
        self.check_failures()

    def wait_for_rounds(self, number: int) -> None:
        """Until so many more rounds are over."""
        began, give_up = self.history()[-1].round, time.monotonic() + 120
        while self.history()[-1].round < began + number:
            self.check_failures()
            assert time.monotonic() < give_up, "no round comes to its end"
            time.sleep(0.05)

    def check_failures(self) -> None:
        for each in self.devices:
            if each.failure is not None:
                raise each.failure

    def history(self) -> list[RoundStatus]:
        found = self.operator.get(f"/v1/tasks/{TASK}/rounds")
        return [RoundStatus.model_validate(each) for each in found]

    def model(self) -> Model:
        digest = self.operator.get(f"/v1/tasks/{TASK}")["model"]
        device = self.devices[0].device
        device.http = self.devices[0].clients[0]
        return device.model(digest, TASK)

    def check(self) -> int:
        """Nothing lost, nothing doubled; how many uploads the model is made of."""
        history, model = self.history(), self.model()
        expected = np.zeros(model.parameters.size)
        by_round: Counter[tuple[int, int]] = Counter()
        for each in self.devices:
            assert each.acknowledged <= each.receipts.keys(), "acknowledged, and no receipt"
            for name, receipt in each.receipts.items():
                if receipt.outcome == "included":
                    expected[each.places[name]] += 1
                    by_round[receipt.round, receipt.attempt] += 1
        assert expected.max() == 1
        lost = np.flatnonzero((model.parameters == 0) & (expected == 1))
        doubled = np.flatnonzero(model.parameters > 1)
        assert not lost.size, lost
        assert not doubled.size, doubled
        assert np.array_equal(model.parameters, expected)
        committed = [status for status in history if status.state == "committed"]
        assert [status.round for status in committed] == list(range(1, len(committed) + 1))
        assert all(by_round[s.round, s.attempt] == s.included == DEVICES for s in committed)
        assert by_round.total() == DEVICES * len(committed)
        return by_round.total()
