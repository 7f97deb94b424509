"""What strategies publish and keep, on a server: over HTTP, across restarts, on its disk."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpress_client import Client
from fedpress_client.state import StateDirectory
from fedpress_client.transport import HttpTransport
from fedpress_compression.tensors import ModelSpec, TensorSpec
from fedpress_protocols.errors import ConfigurationError, DecodingError, NotFound
from fedpress_protocols.messages import TaskSummary
from fedpress_protocols.model import Model
from fedpress_protocols.upload import Upload
from tests.devices import ADMIN, Device, Operator
from tests.server.in_process import Clock, Enrolled, Server, Start, history, ones
from tests.system.test_coded_task import Unread

sys.path.insert(0, str(Path(__file__).parents[2] / "client_sdk" / "examples"))
from numpy_softmax import initial_model, make_trainer

SCAFFOLD = {"id": "scaffold", "clients": 2}
STEPS = {"local_steps": 2, "learning_rate": 0.5}
ALONE = {"size": 1, "minimum": 1}


def summary(http: Server) -> TaskSummary:
    return TaskSummary.model_validate(Operator(http).get("/v1/tasks/digits"))


def include(device: Device, model: Model, value: float) -> None:
    assignment = device.assignment("digits")
    device.upload(assignment.assignment, device.body_for(assignment, ones(model, value)))


@pytest.mark.parametrize("downlink", [None, {"bits": 8, "rate": 2.0}])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rounds_carry_frozen_tensors(
    start: Start, clock: Clock, model: Model, dtype: str, downlink: dict[str, Any] | None
) -> None:
    """Of half precision too, which no downlink codes where it is trained."""
    table = np.array([0.5, -2.0, 3.0], np.float16 if dtype == "float16" else np.float32)
    frozen = TensorSpec("table", (3,), dtype, frozen=True)
    partly = Model(
        ModelSpec((frozen, *model.spec.tensors)),
        model.parameters,
        {**model.buffers, "table": table},
    )
    eden = [{"name": "eden", "compressor": {"id": "eden"}}]
    with start() as http:
        Operator(http).begin(partly, profiles=eden, cohort=ALONE, rounds=3, downlink=downlink)
        device = Device(http, clock)
        device.enrol(Operator(http).token())
        for value in (1.0, 4.0):
            include(device, partly, value)
            receipt_of(device, http)
        after = device.model(summary(http).model, "digits")
    assert after.spec == partly.spec
    assert (after.parameters != partly.parameters).any()
    assert after.buffers["table"].tobytes() == table.tobytes()
    assert after.buffers["steps"] == 3


@pytest.mark.parametrize("downlink", [None, {}])
def test_the_default_s_models_have_the_running_statistics_that_devices_measure(
    start: Start, clock: Clock, downlink: dict[str, Any] | None
) -> None:
    """The newest one and the average, while weights go on moving."""
    goal: dict[str, float] = {"bn.running_mean": 0.4, "bn.running_var": 0.02}
    begun = {"weight": np.zeros(300), "bn.running_mean": np.zeros(9), "bn.running_var": np.ones(9)}
    first = Model.from_tensors({name: each.astype(np.float32) for name, each in begun.items()})
    strategy = {"id": "ema", "decay": 0.5, "inner": {"id": "fedavgm", "momentum": 0.8}}
    rng = np.random.default_rng(0)
    with start() as http:
        Operator(http).begin(first, strategy=strategy, cohort=ALONE, rounds=20, downlink=downlink)
        device = Device(http, clock)
        device.enrol(Operator(http).token())
        for _ in range(12):
            assignment = device.assignment("digits")
            now = device.model(assignment.plan.model, "digits").tensors()
            change = {"weight": rng.normal(scale=0.05, size=300).astype(np.float32)}
            change |= {name: np.float32(value) - now[name] for name, value in goal.items()}
            body = device.body_for(assignment, first.spec.flatten(change))
            device.upload(assignment.assignment, body)
            receipt_of(device, http)
        task = summary(http)
        for digest in (task.model, task.published["average"]):
            made = device.model(digest, "digits").tensors()
            assert made["bn.running_var"] == pytest.approx(0.02, rel=1 / 16)
            assert made["bn.running_mean"] == pytest.approx(0.4, abs=0.01)


def test_products_of_factors_are_averaged_and_their_error_is_a_metric(
    http: Server, operator: Operator, enrolled: Enrolled, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    shapes = {"layer.lora_A.weight": (2, 3), "layer.lora_B.weight": (4, 2)}
    adapter = Model.from_tensors({name: np.zeros(s, np.float32) for name, s in shapes.items()})
    cohort = {"size": 2, "minimum": 2}
    operator.begin(adapter, strategy={"id": "lora", "rank": 1}, cohort=cohort, rounds=2)
    devices = [enrolled(), enrolled()]
    for device, value in zip(devices, (1.0, 3.0), strict=True):
        include(device, adapter, value)
    receipt_of(devices[0], http)
    tensors = devices[0].model(summary(http).model, "digits").tensors()
    product = tensors["layer.lora_B.weight"] @ tensors["layer.lora_A.weight"]
    assert product == pytest.approx(np.full((4, 3), (2 * 1 + 2 * 9) / 2), rel=1e-5)
    metrics = operator.http.get("/metrics", headers=ADMIN).text
    assert re.search(r'fedpress_averaging_error\{task="digits"\} 0\.2(0000)?', metrics)
    assert "task digits round 1.1: averaging_error 0.2" in caplog.text


def test_an_average_is_published_beside_every_model(
    start: Start, clock: Clock, model: Model
) -> None:
    config: dict[str, Any] = {"strategy": {"id": "ema", "decay": 0.5}, "cohort": ALONE, "rounds": 3}
    with start() as http:
        Operator(http).begin(model, **config)
        assert summary(http).published == {}
        device = Device(http, clock)
        device.enrol(Operator(http).token())
        for value in (1.0, 4.0):
            include(device, model, value)
            receipt_of(device, http)
    with start() as http:
        device.http = http
        told = summary(http).published["average"]
        assert told == history(Operator(http))[1].published["average"]
        average = device.model(told)
        # After the rounds' models m + 1 and m + 5: half of each.
        assert average.parameters == pytest.approx(model.parameters + 3.0)
        assert average.buffers["steps"] == model.buffers["steps"]
        assert history(Operator(http))[0].published.keys() == {"average"}


def test_the_better_one_of_the_newest_model_and_the_average_is_served(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model, strategy={"id": "ema", "decay": 0.5}, cohort=ALONE, rounds=2)
    device = enrolled()
    for value in (1.0, 4.0):
        include(device, model, value)
        receipt_of(device, http)
    found = summary(http)
    average = found.published["average"]
    assert (found.state, found.served) == ("finished", average), "nobody has measured either"

    def measured(digest: str, loss: float) -> str:
        told = {"model": digest, "num_examples": 9, "metrics": {"loss": loss}}
        device.json("POST", "/v1/tasks/digits/evaluations", json.dumps(told))
        return summary(http).served

    assert measured(found.model, 2.0) == found.model
    assert measured(average, 1.0) == average
    assert measured(average, 3.0) == found.model


def receipt_of(device: Device, http: Server) -> None:
    """Wait until the round is over."""
    done = len([status for status in history(Operator(http)) if status.state == "committed"])
    for _ in range(400):
        found = history(Operator(http))
        if len([status for status in found if status.state == "committed"]) > done or (
            found[-1].state == "collecting" and found[-1].received == 0
        ):
            return
        device.check_in("digits", wait=0.05)


def test_a_control_variate_is_named_by_the_plan_and_replaced(
    start: Start, clock: Clock, model: Model, tmp_path: Path
) -> None:
    folder = tmp_path / "data" / "payloads" / "artefacts"
    with start() as http:
        Operator(http).begin(model, strategy=SCAFFOLD, training=STEPS, cohort=ALONE, rounds=4)
        device = Device(http, clock)
        device.enrol(Operator(http).token())
        first = device.assignment("digits").plan.client_terms.control
        assert first is not None
        assert (first.server, first.offset, first.scale) == (None, 1.0, -1.0)
        include(device, model, 1.0)
        receipt_of(device, http)
        digest = named(device)
        # c = -(1 of 2 clients) * (update / (K r)) = -0.5
        assert read(device, digest) == [-0.5] * model.spec.size
    with start() as http:
        device.http = http
        assert named(device) == digest
        assert read(device, digest) == [-0.5] * model.spec.size
        Operator(http).post("/v1/admin/tasks/digits/abort-round")
        assert named(device) == digest
        include(device, model, 0.5)
        receipt_of(device, http)
        assert read(device, named(device)) == [-0.75] * model.spec.size
        with pytest.raises(NotFound):
            device.json("GET", f"/v1/artefacts/{digest}")
        files = [path for path in (tmp_path / "data").rglob("artefacts/*") if path.is_file()]
        assert [path.name for path in files] == [named(device)], folder


def named(device: Device) -> str:
    control = device.assignment("digits").plan.client_terms.control
    assert control is not None
    assert control.server is not None
    return control.server


def read(device: Device, digest: str) -> list[float]:
    data = device.json("GET", f"/v1/artefacts/{digest}?task=digits").content
    return [float(value) for value in np.frombuffer(data, "<f4")]


def test_what_a_strategy_needs_is_asked_for_when_the_task_is_made(
    http: Server, operator: Operator, model: Model
) -> None:
    with pytest.raises(ConfigurationError, match=r"set training\.local_steps"):
        operator.begin(model, strategy=SCAFFOLD)
    around = [{"name": "one", "compressor": {"id": "error_feedback", "inner": {"id": "topk"}}}]
    with pytest.raises(ConfigurationError, match="counted twice it diverges"):
        operator.begin(model, strategy=SCAFFOLD, training=STEPS, profiles=around)
    with pytest.raises(ConfigurationError, match="match no trained tensor: head"):
        operator.begin(model, strategy={"id": "fedper", "personal": ["head"]})
    ef21 = [{"name": "one", "compressor": {"id": "ef21", "inner": {"id": "topk"}}}]
    with pytest.raises(ConfigurationError, match="counts on a model that moves by the very mean"):
        operator.begin(model, strategy={"id": "fednova"}, profiles=ef21)
    operator.begin(model, strategy={"id": "ema"}, profiles=ef21)


def test_steps_out_of_bounds_are_refused_at_the_door(
    http: Server, operator: Operator, model: Model, enrolled: Any
) -> None:
    operator.begin(model, strategy={"id": "fednova"}, cohort=ALONE)
    device = enrolled()
    assignment = device.assignment("digits")
    assert assignment.plan.report == ("steps",)
    assert assignment.plan.client_terms.normalise
    symbols = (ones(model, 2.0).astype("<f4"),)
    layout = assignment.plan.layouts(model.spec)[0]
    with pytest.raises(DecodingError, match="steps of 0 outside"):
        device.upload(assignment.assignment, Upload(0, 1, symbols, (0.0,)).to_bytes(layout))
    device.upload(assignment.assignment, Upload(0, 1, symbols, (3.0,)).to_bytes(layout))
    receipt_of(device, http)
    made = device.model(summary(http).model)
    assert made.parameters == pytest.approx(model.parameters + 6.0)


def test_personal_layers_never_reach_the_server(start: Start, tmp_path: Path) -> None:
    """Whole devices over HTTP; each ends with a bias of its own."""
    model = initial_model()
    with start() as http:
        operator = Operator(http)
        operator.begin(
            model,
            strategy={"id": "fedper", "personal": ["bias"]},
            training={"local_epochs": 2},
            rounds=3,
        )
        clients = []
        for index in range(2):
            folder = tmp_path / f"device-{index}"
            key = StateDirectory.open(folder).key()
            clients.append(
                Client(
                    "http://fedpress.test",
                    make_trainer(seed=index, examples=60),
                    state_dir=folder,
                    task="digits",
                    token=operator.token(),
                    seed=index,
                    wait=0.0,
                    transport=HttpTransport("http://fedpress.test", key, http=Unread(http)),
                )
            )
        ended = [False, False]
        for _ in range(200):
            ended = [
                over or client.step() is None for over, client in zip(ended, clients, strict=True)
            ]
            if all(ended):
                break
        assert all(ended)
        last = Model.from_bytes(
            http.app.services.payloads.get(f"models/{summary(http).model}.safetensors")
        )
        assert (last.tensors()["bias"] == model.tensors()["bias"]).all()
        assert (last.tensors()["weight"] != model.tensors()["weight"]).any()
        own = [client.own_model() for client in clients]
        assert own[0] is not None
        assert own[1] is not None
        biases = [each.tensors()["bias"] for each in own if each is not None]
        assert (biases[0] != biases[1]).all()
        assert (own[0].tensors()["weight"] == last.tensors()["weight"]).all()
        assert history(operator)[0].upload_bytes == 2 * (3 + 4 * 24)
        for client in clients:
            client.close()
