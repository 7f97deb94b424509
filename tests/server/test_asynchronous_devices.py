"""Real devices, with their ledgers, in asynchronous tasks: rounds overlap, and nothing is lost.

What the server made of the uploads is read off its models: with buffers in which all count the
same, the model's way times the buffer's size is the sum of what was included.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from fedpress_client import Client, Trained, TrainingRequest
from fedpress_client.state import StateDirectory
from fedpress_client.transport import HttpTransport
from fedpress_compression.tensors import Vector
from fedpress_protocols.model import Model
from tests.devices import Device, Operator
from tests.server.in_process import Enrolled, Server
from tests.server.test_asynchronous_tasks import send, until, work_of

BUFFER = 2
FEEDBACK = {"id": "error_feedback", "inner": {"id": "topk", "fraction": 0.25, "magnitude_bits": 2}}
TASK: dict[str, Any] = {
    "profiles": [{"name": "one", "compressor": FEEDBACK}],
    "cohort": {"size": BUFFER, "minimum": BUFFER},
    "asynchronous": {"concurrency": 4, "max_staleness": 2},
    "strategy": {"id": "fedbuff", "exponent": 0},
    "rounds": 400,
}


class Borrowed(httpx.BaseTransport):
    """Speaks through a client that is another's to close; `loses` the answer of the next upload."""

    loses = False

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.read()
        answer = self._http.send(request)
        if Borrowed.loses and request.method == "PUT":
            Borrowed.loses = False
            raise Crash
        unread = httpx.ByteStream(answer.content)
        return httpx.Response(answer.status_code, headers=answer.headers, stream=unread)


class Crash(BaseException):
    """The device's process dies here."""


class RandomTrainer:
    """Returns random updates and remembers them; `meanwhile` runs while it trains."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)
        self.computed: list[Vector] = []
        self.work: list[TrainingRequest] = []
        self.meanwhile: Callable[[], object] = lambda: None

    def train(self, model: Model, work: TrainingRequest) -> Trained:
        self.work.append(work)
        self.meanwhile()
        update = self.rng.standard_normal(model.spec.size).astype(np.float32)
        parameters = model.parameters + update
        self.computed.append(parameters - model.parameters)
        return Trained(parameters, num_examples=1)

    def evaluate(self, model: Model) -> None:
        return None


class Scene:
    """A real device with a ledger, and a fast one that uploads zeros to fill buffers."""

    def __init__(self, http: Server, folder: Path, fast: Device, begin: Model) -> None:
        self.http, self.folder, self.fast, self.begin = http, folder, fast, begin
        self.clock = fast.clock
        self.operator = Operator(http)
        self.token = self.operator.token()
        self.trainer = RandomTrainer()
        self.client = self.started()

    def started(self) -> Client:
        key = StateDirectory.open(self.folder).key()
        return Client(
            "http://fedpress.test",
            self.trainer,
            state_dir=self.folder,
            task="digits",
            token=self.token,
            seed=1,
            wait=0.0,
            transport=HttpTransport(
                "http://fedpress.test", key, http=Borrowed(self.http), clock=self.clock
            ),
            clock=self.clock,
        )

    def again(self) -> None:
        """The device's process begins anew."""
        self.client.close()
        self.client = self.started()

    @property
    def made(self) -> int:
        return int(self.operator.get("/v1/tasks/digits")["round"])

    def settle(self) -> None:
        """Until no buffer is being aggregated, as the server's memory has it."""
        task = self.http.app.services.store.tasks["digits"]
        assert task.attempt is not None
        while task.attempt.round.phase != "collecting":
            time.sleep(0.005)

    def fill(self, uploads: int) -> None:
        """The fast device sends zeros this many times, and every model that this makes is there."""
        for _ in range(uploads):
            self.settle()
            given = work_of(self.fast)
            send(self.fast, given, np.zeros(self.begin.spec.size, np.float32))
        self.settle()

    def balance(self) -> np.ndarray:
        """Everything computed, less the residual, what is pending and what the models have: zero
        once every receipt that there is has been fetched."""
        ledger = self.client.ledger
        newest = until(self.http, self.made) if self.made else self.begin
        rest = np.sum(self.trainer.computed, axis=0, dtype=np.float64)
        rest -= (newest.parameters.astype(np.float64) - self.begin.parameters) * BUFFER
        for held in ledger.pending.values():
            rest -= held.update.dense()
        return rest - (0.0 if ledger.residual is None else ledger.residual)

    def fetch_receipts(self) -> None:
        """Check in once more, with nothing to train: what it would train is another's by then."""
        self.settle()
        client, ledger = self.client, self.client.ledger
        found = [client._transport.receipt(name) for name in ledger.pending]
        here = client._join()
        client._runner.receipts.settle(
            here, tuple(each for each in found if not isinstance(each, float))
        )


@pytest.fixture
def scene(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model, tmp_path: Path
) -> Scene:
    operator.begin(model, **TASK)
    return Scene(http, tmp_path / "device", enrolled(), model)


def pending_rounds(scene: Scene) -> list[int]:
    return [held.round for held in scene.client.ledger.pending.values()]


def test_an_upload_may_be_pending_while_a_later_model_is_trained(scene: Scene) -> None:
    scene.trainer.meanwhile = lambda: scene.fill(2 * BUFFER)
    scene.client.step()
    assert pending_rounds(scene) == [1]
    assert scene.balance() == pytest.approx(0, abs=1e-5)
    seen: list[list[int]] = []
    scene.trainer.meanwhile = lambda: seen.append(pending_rounds(scene))
    scene.client.step()
    assert (seen, scene.trainer.work[-1].round) == ([[1]], 3), "round 3, with round 1 pending"
    scene.settle()
    scene.trainer.meanwhile = lambda: None
    scene.client.step()
    assert scene.client.ledger.included == 2
    assert pending_rounds(scene) == [4]
    assert scene.balance() == pytest.approx(0, abs=1e-5)


def test_an_upload_given_back_while_a_later_one_is_pending_is_not_lost(scene: Scene) -> None:
    scene.trainer.meanwhile = lambda: scene.fill(2 * BUFFER)
    scene.client.step()
    scene.trainer.meanwhile = lambda: scene.operator.post("/v1/admin/tasks/digits/abort-round")
    scene.client.step()
    assert pending_rounds(scene) == [1, 3]
    scene.trainer.meanwhile = lambda: None
    scene.client.step()
    assert scene.client.ledger.not_included == 1
    scene.fetch_receipts()
    assert scene.client.ledger.included == 2
    assert scene.balance() == pytest.approx(0, abs=1e-5)


def test_the_same_model_is_trained_from_with_other_chance(scene: Scene) -> None:
    scene.fill(1)
    scene.client.step()
    scene.operator.post("/v1/admin/tasks/digits/abort-round")
    scene.client.step()
    scene.settle()
    scene.client.step()
    rounds = [(work.round, work.attempt) for work in scene.trainer.work]
    assert rounds[0] == (1, 1)
    assert len({work.seed for work in scene.trainer.work}) == 3


@pytest.mark.soak
def test_nothing_is_lost_in_any_mishap(scene: Scene, soak: bool) -> None:
    rng = np.random.default_rng(0)
    crashes = 0
    for _ in range(400 if soak else 25):
        behind = int(rng.choice([0, 0, 1, 2, 6]))
        scene.trainer.meanwhile = lambda behind=behind: scene.fill(behind)  # type: ignore[misc]
        Borrowed.loses = bool(rng.random() < 0.15)
        try:
            scene.client.step()
        except Crash:
            crashes += 1
            scene.again()
        Borrowed.loses = False
        if rng.random() < 0.1:
            scene.settle()
            scene.operator.post("/v1/admin/tasks/digits/abort-round")
        if rng.random() < 0.3:
            scene.fetch_receipts()
            assert scene.balance() == pytest.approx(0, abs=2e-4)
    scene.fetch_receipts()
    ledger = scene.client.ledger
    assert crashes
    assert ledger.included
    assert ledger.not_included
    assert scene.balance() == pytest.approx(0, abs=2e-4)
