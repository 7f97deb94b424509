"""A device that insists on masking, and a real server that asks for something else."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from fedpress.operator import Operator
from fedpress_client import Client, Event, MaskingRules
from fedpress_client.state import StateDirectory
from fedpress_client.trainer import Evaluation, Trained, TrainingRequest
from fedpress_client.transport import HttpTransport
from fedpress_protocols.messages import TaskConfig
from fedpress_protocols.model import Model
from fedpress_protocols.signatures import DeviceKey, to_base64url
from tests.system.server_process import ADMIN_TOKEN, ServerProcess

MODEL = Model.from_tensors({"w": np.linspace(-1, 1, 40, dtype=np.float32)})
AUTHORITY = to_base64url(DeviceKey.generate().public)
STRICT = MaskingRules(authority=AUTHORITY, minimum=20, adversary="malicious")
CLEAR = {
    "task": "clouds",
    "rounds": 1,
    "lane": "clear",
    "profiles": [{"name": "all", "compressor": {"id": "none"}}],
    "cohort": {"size": 1, "minimum": 1},
}


class Private:
    """Counts how often it is asked for what must not leave the device."""

    def __init__(self) -> None:
        self.num_trained = 0

    def train(self, model: Model, work: TrainingRequest) -> Trained:
        self.num_trained += 1
        return Trained(model.parameters + np.float32(0.25), 7)

    def evaluate(self, model: Model) -> Evaluation:
        return Evaluation(11, {"loss": 0.125})


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path)
    process.start()
    yield process
    assert process.stop() == 0


class Wire(httpx.HTTPTransport):
    """The real one; remembers every request that left."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[str] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.left.append(f"{request.method} {request.url.path}")
        return super().handle_request(request)


class Device:
    """One run of a device; another on the same folder is the same device, begun again."""

    def __init__(
        self, server: ServerProcess, folder: Path, token: str | None = None, **options: Any
    ) -> None:
        self.trainer, self.events, self.wire = Private(), list[Event](), Wire()
        self.stops_once_trained = False
        key = StateDirectory.open(folder).key()
        self.client = Client(
            server.url,
            self.trainer,
            state_dir=folder,
            token=token,
            wait=0.0,
            random=lambda: 0.0,
            on_event=self._heard,
            transport=HttpTransport(server.url, key, http=self.wire),
            **options,
        )

    def _heard(self, event: Event) -> None:
        self.events.append(event)
        if event.kind == "trained" and self.stops_once_trained:
            self.client.stop()

    @property
    def left(self) -> set[str]:
        """What left the device besides enrolment, check-ins, downloads and refusals."""
        harmless = ("GET ", "DELETE /v1/assignments/")
        return {
            each
            for each in self.wire.left
            if not each.startswith(harmless) and not each.endswith(("/enrol", "/check-in"))
        }

    def pauses_after_refusals(self, count: int, again: Callable[[], object]) -> list[float]:
        """The pauses that follow the next `count` plans that it declines; `again` has the server
        ask once more."""
        pauses: list[float] = []
        for _ in range(200):
            before = len(self.of("declined"))
            pause = self.client.step()
            assert pause is not None, "it goes on asking"
            if len(self.of("declined")) > before:
                pauses.append(pause)
                if len(pauses) == count:
                    return pauses
                again()
            time.sleep(0.05)
        raise AssertionError(f"{len(pauses)} plans were declined in 200 check-ins: {self.events}")

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]


def begin(operator: Operator, **changes: Any) -> None:
    digest = operator.register_model(MODEL)
    operator.create_task(TaskConfig.model_validate({**CLEAR, "model": digest, **changes}))


def token(operator: Operator) -> str:
    return operator.create_token(uses=5)


def test_a_device_that_insists_on_masking_gives_nothing_to_a_clear_plan(
    server: ServerProcess, tmp_path: Path
) -> None:
    """The device's own authority, twenty clients, a malicious server: what an adversary's task
    got around by asking for something else."""
    with server.operator() as operator:
        begin(operator)
        device = Device(server, tmp_path / "device", token(operator), masking=STRICT)
        pauses = device.pauses_after_refusals(3, lambda: operator.abort_round("clouds"))
        device.client.close()
        assert operator.task("clouds").round == 0
    assert device.left == set()
    assert device.trainer.num_trained == 0
    for event in device.of("declined"):
        assert event.details["rule"] == "required"
        assert "of task 'clouds' is of the clear lane" in event.details["reason"]
        assert "requires masking" in event.details["reason"]
    assert pauses == [1.0, 2.0, 4.0], "less and less often"


@pytest.mark.slow
def test_without_rules_the_same_plan_gets_its_update(server: ServerProcess, tmp_path: Path) -> None:
    """What shows that the test before can fail."""
    with server.operator() as operator:
        begin(operator)
        device = Device(server, tmp_path / "device", token(operator))
        assert device.client.run().included == 1
    assert len(device.left) == 2, "an update and an evaluation"


@pytest.mark.slow
def test_an_update_prepared_before_the_rules_stays_and_goes_back_to_the_residual(
    server: ServerProcess, tmp_path: Path
) -> None:
    """A device dies between its training and its upload, and its user begins it with rules."""
    feedback = {"id": "error_feedback", "inner": {"id": "none"}}
    with server.operator() as operator:
        begin(operator, profiles=[{"name": "all", "compressor": feedback}])
        first = Device(server, tmp_path / "device", token(operator))
        first.stops_once_trained = True
        while not first.client.ledger.pending:
            first.client.step()
        first.client.close()
        second = Device(server, tmp_path / "device", masking=STRICT)
        for _ in range(20):
            second.client.step()
            if not second.client.ledger.pending:
                break
        residual = second.client.ledger.residual
        second.client.close()
    assert first.left | second.left <= {"POST /v1/tasks/clouds/evaluations"}
    assert second.left == set()
    assert second.of("declined")[0].details["rule"] == "required"
    assert residual is not None
    np.testing.assert_array_equal(residual, MODEL.parameters + np.float32(0.25) - MODEL.parameters)


@pytest.mark.slow
def test_a_masked_task_is_joined_where_a_clear_one_runs_beside_it(
    server: ServerProcess, tmp_path: Path
) -> None:
    with server.operator() as operator:
        begin(operator)
        shared = {"id": "shared_support", "fraction": 0.5}
        begin(
            operator,
            task="rain",
            lane="masked",
            profiles=[{"name": "all", "compressor": shared}],
            cohort={"size": 3, "minimum": 3},
        )
        device = Device(server, tmp_path / "device", token(operator), masking=MaskingRules())
        device.client.step()
        device.client.close()
        assert [event.task for event in device.of("joined")] == ["rain"]


@pytest.mark.slow
def test_a_device_leaves_a_clear_task_for_a_masked_one_that_begins_later(
    server: ServerProcess, tmp_path: Path
) -> None:
    with server.operator() as operator:
        begin(operator)
        device = Device(server, tmp_path / "device", token(operator), masking=MaskingRules())
        device.pauses_after_refusals(1, lambda: None)
        shared = {"id": "shared_support", "fraction": 0.5}
        begin(
            operator,
            task="rain",
            lane="masked",
            profiles=[{"name": "all", "compressor": shared}],
            cohort={"size": 3, "minimum": 3},
        )
        operator.abort_round("clouds")
        device.pauses_after_refusals(1, lambda: None)
        device.client.step()
        device.client.close()
    assert [event.task for event in device.of("joined")] == ["clouds", "rain"]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["join", "relay"])
@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("--require-masking", "is of the clear lane, and this device requires masking"),
        ("--require-privacy", "sends updates without noise, and this device requires privacy"),
    ],
)
def test_the_command_says_which_plan_its_rules_refused(
    server: ServerProcess, tmp_path: Path, command: str, option: str, reason: str
) -> None:
    """A device and a region; nothing has to be behind `--region`, since nothing is trained."""
    (tmp_path / "region.json").write_text('{"task": "inner", "cohort": {"size": 2, "minimum": 1}}')
    options = {
        "join": ["--app", "numpy_softmax:make_trainer"],
        "relay": ["--region", "http://127.0.0.1:9", "--config", str(tmp_path / "region.json")],
    }
    with server.operator() as operator:
        begin(operator)
        process = subprocess.Popen(
            [
                *(
                    sys.executable,
                    "-m",
                    "fedpress",
                    "client",
                    command,
                    server.url,
                    *options[command],
                ),
                *("--state-dir", str(tmp_path / "device"), option),
            ],
            cwd=Path(__file__).parents[2] / "client_sdk" / "examples",
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(sys.path),
                "FEDPRESS_TOKEN": token(operator),
                "FEDPRESS_ADMIN_TOKEN": ADMIN_TOKEN,
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        try:
            said = next((line for line in process.stderr if line.startswith("declined: ")), "")
        finally:
            process.terminate()
            process.stderr.close()
            process.wait(30)
        assert operator.task("clouds").round == 0
    assert f"the plan of round 1.1 of task 'clouds' {reason}" in said
