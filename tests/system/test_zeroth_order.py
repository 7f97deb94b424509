"""Zeroth-order training over HTTP: K weights travel, in the clear and under masks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedpress_client import Client, MaskingRules
from fedpress_client.state import StateDirectory
from fedpress_client.transport import HttpTransport
from fedpress_client.zeroth_order import ZerothOrderTrainer
from fedpress_protocols.model import Model
from fedpress_protocols.subspace import materialised
from fedpress_server import Settings, create_app
from tests import databases
from tests.devices import ADMIN_TOKEN, Operator
from tests.masked import Participant, Unread, drive, masked_task
from tests.server.in_process import Server, history, running

NUM_WEIGHTS, WIDTH, DEVICES = 256, 96, 3
QUANTISED = {"id": "error_feedback", "inner": {"id": "ecsq", "control": "bits", "target": 1.0}}
HEAD_BYTES = 400


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    settings = Settings(
        data_dir=tmp_path / "server", admin_token=ADMIN_TOKEN, tick_seconds=3600, poll_seconds=0.01
    )
    databases.lay(settings.data_dir / "fedpress.db")
    with running(create_app(settings)) as http:
        yield http


def trainer(number: int, base: int = 1) -> ZerothOrderTrainer:
    """A device with examples of its own; those with another `base` have other values."""
    torch.manual_seed(base)
    model = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(number))
    data = torch.utils.data.TensorDataset(inputs, (inputs[:, 0] > inputs[:, 1]).long())
    return ZerothOrderTrainer(
        model,
        nn.CrossEntropyLoss(),
        lambda parameters: torch.optim.SGD(parameters, lr=3e-3),
        data,
        evaluation_data=data,
        num_weights=NUM_WEIGHTS,
    )


def client(server: Server, folder: Path, made: ZerothOrderTrainer, token: str, at: int) -> Client:
    key = StateDirectory.open(folder).key()
    url = "http://fedpress.test"
    http = HttpTransport(url, key, http=Unread(server))
    return Client(
        url, made, state_dir=folder, task="digits", token=token, seed=at, wait=0.0, transport=http
    )


def finish(clients: list[Client]) -> None:
    going = list(clients)
    give_up = time.monotonic() + 120
    while going and time.monotonic() < give_up:
        going = [each for each in going if each.step() is not None]
        time.sleep(0.002)
    assert not going


def last_model(server: Server) -> Model:
    digest = history(Operator(server))[-1].model
    return Model.from_bytes(server.app.services.payloads.get(f"models/{digest}.safetensors"))


def loss(made: ZerothOrderTrainer, model: Model) -> float:
    measured = made.evaluate(model)
    assert measured is not None
    return measured.metrics["loss"]


@pytest.mark.parametrize("downlink", [None, {"bits": 8, "rate": 1.0}])
def test_a_task_learns_and_a_late_device_gets_the_base_once_and_then_weights(
    downlink: Any, server: Server, tmp_path: Path
) -> None:
    made = [trainer(0), trainer(1), trainer(2, base=5)]  # the last lacks the task's base
    first = made[0].initial_model()
    operator = Operator(server)
    operator.begin(
        first,
        "digits",
        rounds=6,
        profiles=[{"name": "one", "compressor": QUANTISED}],
        cohort={"size": DEVICES, "minimum": DEVICES},
        training={"local_steps": 60},
        downlink=downlink,
    )
    token = operator.token(uses=DEVICES)
    clients = [
        client(server, tmp_path / f"device-{at}", each, token, at) for at, each in enumerate(made)
    ]
    finish(clients)
    rounds = history(operator)
    assert [status.state for status in rounds] == ["committed"] * 6
    weights = 4 * NUM_WEIGHTS + HEAD_BYTES
    assert all(0 < status.upload_bytes < DEVICES * weights / 4 for status in rounds)
    whole = len(first.to_bytes())
    assert whole > 4 * weights
    assert rounds[0].download_bytes <= 2 * weights + whole  # two have the base at hand
    assert all(status.download_bytes <= DEVICES * weights for status in rounds[1:])
    last = last_model(server)
    assert last.base.digest == first.base.digest
    assert loss(made[2], last) < 0.9 * loss(made[2], first)
    whole_model = materialised(last)
    inner = made[2].model.inner
    inner.load_state_dict({k: torch.from_numpy(v) for k, v in whole_model.tensors().items()})
    plain = inner(torch.ones(1, 8))
    loss(made[0], last)
    assert torch.equal(made[0].model.inner(torch.ones(1, 8)), plain)


@pytest.mark.parametrize(
    "privacy",
    [
        None,
        {"clip": 0.05, "noise_multiplier": 2.1, "participations": 5, "epsilon": 6.0, "delta": 1e-5},
    ],
)
def test_it_goes_under_masks_and_with_a_privacy_budget(
    privacy: Any, server: Server, tmp_path: Path
) -> None:
    operator, made = Operator(server), [trainer(number) for number in range(4)]
    first = made[0].initial_model()
    shared = {"id": "error_feedback", "inner": {"id": "shared_support", "fraction": 0.5}}
    masked_task(
        operator,
        first,
        4,
        rounds=2,
        cohort={"size": 4, "minimum": 3},
        masking={"corrupt": 0.0},
        training={"local_steps": 10},
        profiles=[{"name": "one", "compressor": shared}],
        **({} if privacy is None else {"privacy": privacy}),
    )
    token = operator.token(uses=4)
    people = [
        Participant(
            tmp_path, number, token, lambda: Unread(server), time.time,
            masking=MaskingRules(corrupt=0.0),
        )
        for number in range(4)
    ]  # fmt: skip
    for each, trains in zip(people, made, strict=True):
        each.trainer = trains  # type: ignore[assignment]
    drive(people, lambda: time.sleep(0.01), turns=2000)
    rounds = history(operator)
    assert [status.state for status in rounds] == ["committed"] * 2
    last = last_model(server)
    assert last.base.digest == first.base.digest
    assert np.count_nonzero(last.parameters) > NUM_WEIGHTS / 4
    assert materialised(last).spec.size == 8 * WIDTH + WIDTH + 2 * WIDTH + 2
