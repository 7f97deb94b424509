"""Models of which little is trained: the rest goes to each device once, and to some never."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from fedpress_client import Client
from fedpress_compression.tensors import ModelSpec
from fedpress_protocols.messages import RoundStatus
from fedpress_protocols.model import Base, Model
from fedpress_server import Settings, create_app
from tests import databases
from tests.devices import ADMIN_TOKEN, Operator
from tests.masked import Participant, Unread, drive, masked_task
from tests.server.in_process import Server, history, running
from tests.system.test_downlink import Fleet, Wanderer, one

TRAINED_BYTES = 4 * 2 * 6 * 60
HEAD_BYTES = 400
"""At most: the spec's text, coded, and the heads of the moves."""


def adapted_model() -> Model:
    rng = np.random.default_rng(4)

    def drawn(*shape: int) -> Any:
        return rng.normal(scale=0.05, size=shape).astype(np.float32)

    return Model.from_tensors(
        {
            "base.weight": drawn(120, 60),
            "down.weight": drawn(6, 60),
            "base.half": drawn(40, 60).astype(np.float16),
            "up.weight": drawn(60, 6),
            "steps": np.array(7, np.int64),
        },
        frozen=["base.weight", "base.half"],
    )


class Adapting(Wanderer):
    """Has the base at hand, as a trainer has that built its module from a local folder."""

    def __init__(self, number: int, model: Model) -> None:
        super().__init__(number)
        self.model = model

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    def initial_model(self) -> Model:
        return self.model


class EarlierServer(httpx.BaseTransport):
    """Has no route to the trained tensors alone."""

    def __init__(self, server: Server) -> None:
        self._transport = Unread(server)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if "/over/" in request.url.path:
            return httpx.Response(404, stream=httpx.ByteStream(b'{"detail":"Not Found"}'))
        return self._transport.handle_request(request)


@pytest.fixture
def server(tmp_path: Path) -> Any:
    settings = Settings(
        data_dir=tmp_path / "server", admin_token=ADMIN_TOKEN, tick_seconds=3600, poll_seconds=0.01
    )
    databases.lay(settings.data_dir / "fedpress.db")
    with running(create_app(settings)) as http:
        yield http


def down(status: RoundStatus) -> tuple[int, int]:
    """Bytes of models sent in a round, and how many of them relative to what a device had."""
    return status.download_bytes, status.difference_download_bytes


def bases(folder: Path) -> list[Path]:
    return sorted((folder / "bases").glob("*.safetensors"))


def fleet_of(server: Server, folder: Path, num_devices: int = 1, **config: Any) -> Fleet:
    return Fleet(server, folder, num_devices, model=adapted_model(), **{"downlink": None, **config})


def test_what_is_frozen_comes_once_and_no_update_has_it(server: Server, tmp_path: Path) -> None:
    fleet = fleet_of(server, tmp_path, 2, rounds=4)
    for number in (0, 0, 1, 0):
        fleet.round(number)
    whole = len(fleet.brought.to_bytes())
    rounds = history(fleet.operator)
    assert down(rounds[0]) == down(rounds[2]) == (whole, 0)  # either device's first
    for status in (rounds[1], rounds[3]):
        total, relative = down(status)
        assert TRAINED_BYTES < total == relative <= TRAINED_BYTES + HEAD_BYTES < whole / 10
    assert all(0 < status.upload_bytes < TRAINED_BYTES for status in rounds)
    (path,) = bases(tmp_path / "device-0")
    assert path.stem == fleet.brought.base.digest
    assert Base.from_bytes(path.read_bytes()).to_bytes() == fleet.brought.base.to_bytes()
    assert [*fleet.trainers[0].began, *fleet.trainers[1].began] == [
        *(fleet.models()[number] for number in (0, 1, 3)),
        fleet.models()[2],
    ]
    last = Model.from_bytes(fleet.file(fleet.models()[-1]))
    assert last.base.digest == fleet.brought.base.digest
    assert (last.parameters != fleet.brought.parameters).any()


def test_another_task_on_the_same_base_does_not_fetch_it(server: Server, tmp_path: Path) -> None:
    first = fleet_of(server, tmp_path, rounds=1)
    first.round(0)
    first.clients[0].close()
    again = fleet_of(server, tmp_path, task="letters", rounds=1)
    again.round(0)
    (status,) = history(again.operator, "letters")
    assert 0 < status.download_bytes <= TRAINED_BYTES + HEAD_BYTES


def test_a_trainer_that_has_the_base_at_hand_never_fetches_it(
    server: Server, tmp_path: Path
) -> None:
    trainer = Adapting(0, adapted_model())
    fleet = fleet_of(server, tmp_path, rounds=2, trainers=[trainer])
    for _ in range(2):
        fleet.round(0)
    for status in history(fleet.operator):
        assert 0 < status.download_bytes <= TRAINED_BYTES + HEAD_BYTES
    assert trainer.began == fleet.models()[:-1]


@pytest.mark.parametrize("harm", ["another base", "damaged", "earlier server"])
def test_whoever_lacks_the_base_gets_the_whole(harm: str, server: Server, tmp_path: Path) -> None:
    trainer: Wanderer = Wanderer(0)
    if harm == "another base":
        model = adapted_model()
        other = {name: np.array(array) + 1 for name, array in model.buffers.items()}
        trainer = Adapting(0, Model(model.spec, model.parameters, other))
    fleet = fleet_of(server, tmp_path, rounds=2, trainers=[trainer])
    if harm == "earlier server":
        fleet.clients[0] = fleet.client(0, EarlierServer(server))
    fleet.round(0)
    if harm == "damaged":
        (path,) = bases(tmp_path / "device-0")
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    fleet.round(0)
    whole = len(fleet.brought.to_bytes())
    first, second = (down(status) for status in history(fleet.operator))
    assert first == (whole, 0)
    assert (second == (whole, 0)) == (harm != "another base")
    assert trainer.began == fleet.models()[:-1]
    (path,) = bases(tmp_path / "device-0")
    assert path.stem == fleet.brought.base.digest


def test_a_device_that_was_away_too_long_for_a_difference_gets_no_base_again(
    server: Server, tmp_path: Path
) -> None:
    fleet = fleet_of(server, tmp_path, 2, rounds=5, downlink={"keep": 1})
    for number in (0, 1, 1, 1, 0):
        fleet.round(number)
    rounds = history(fleet.operator)
    assert rounds[0].difference_download_bytes == 0
    total, relative = down(rounds[-1])
    assert 0 < total == relative < TRAINED_BYTES  # coded
    assert fleet.trainers[0].began == [fleet.models()[0], fleet.models()[4]]


def test_the_model_for_inference_is_fetched_over_the_base(server: Server, tmp_path: Path) -> None:
    fleet = fleet_of(server, tmp_path, rounds=2, strategy={"id": "ema", "decay": 0.5})
    fleet.round(0)
    fleet.round(0)
    client: Client = fleet.clients[0]
    before = client.summary().traffic.body_down
    model = client.model()
    assert model.base.digest == fleet.brought.base.digest
    assert client.summary().traffic.body_down - before <= TRAINED_BYTES + 2 * HEAD_BYTES + 4096


def test_it_goes_with_the_masked_lane(server: Server, tmp_path: Path) -> None:
    operator, first = Operator(server), adapted_model()
    masked_task(operator, first, 3, rounds=2)
    token = operator.token(uses=3)
    people = [
        Participant(tmp_path, number, token, lambda: Unread(server), time.time)
        for number in range(3)
    ]
    drive(people, lambda: time.sleep(0.01), turns=2000)
    rounds = history(operator)
    assert [status.state for status in rounds] == ["committed"] * 2
    assert down(rounds[0]) == (3 * len(first.to_bytes()), 0)
    assert down(rounds[1])[0] <= 3 * (TRAINED_BYTES + HEAD_BYTES)
    assert rounds[1].model is not None
    digest = rounds[1].model
    last = Model.from_bytes(server.app.services.payloads.get(f"models/{digest}.safetensors"))
    assert last.base.digest == first.base.digest
    assert (last.parameters != first.parameters).any()


def test_error_feedback_keeps_nothing_of_what_is_frozen(server: Server, tmp_path: Path) -> None:
    inner = {"id": "eden", "bits": 1, "scale": "mmse"}
    fleet = fleet_of(server, tmp_path, rounds=2, **one({"id": "error_feedback", "inner": inner}))
    fleet.round(0)
    fleet.round(0)
    size = fleet.brought.spec.size
    ledger = tmp_path / "device-0" / "tasks" / "digits" / "ledger.safetensors"
    assert 4 * size < ledger.stat().st_size < 4 * 4 * size < fleet.brought.base.num_bytes
