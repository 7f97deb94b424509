"""A whole task, devices and server, whose uploads are coded in the context of earlier models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from fedpress_client import Client, Event
from fedpress_client.state import StateDirectory
from fedpress_client.trainer import Evaluation, Trained, TrainingRequest
from fedpress_client.transport import HttpTransport
from fedpress_protocols.model import Model
from fedpress_server import Settings, create_app
from tests.devices import ADMIN_TOKEN, Operator
from tests.server.in_process import Server, running

ROUNDS = 4
MATRIX = (60, 40)


class Unread(httpx.BaseTransport):
    """To a server in this process, whose answers come as a stream, as over a socket."""

    def __init__(self, server: Server) -> None:
        self._transport = server._transport

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer = self._transport.handle_request(request)
        stream = httpx.ByteStream(answer.read())
        return httpx.Response(answer.status_code, headers=answer.headers, stream=stream)


class Clustered:
    """Updates whose large values lie in some rows and columns, much the same in every round."""

    def train(self, model: Model, work: TrainingRequest) -> Trained:
        where, now = np.random.default_rng(5), np.random.default_rng([6, work.round])
        scale = np.outer(where.gamma(0.2, 1, MATRIX[0]), where.gamma(0.2, 1, MATRIX[1]))
        step = np.zeros(model.spec.size, np.float32)
        step[: scale.size] = (scale * now.standard_normal(MATRIX)).ravel()
        return Trained(model.parameters + step, 10)

    def evaluate(self, model: Model) -> Evaluation | None:
        return None


def whole_task(folder: Path, compressor: dict[str, Any]) -> tuple[str, list[int]]:
    """The last model's digest and the bytes of each upload."""
    settings = Settings(data_dir=folder / "server", admin_token=ADMIN_TOKEN, tick_seconds=3600)
    model = Model.from_tensors(
        {"w": np.zeros(MATRIX, np.float32), "b": np.zeros(MATRIX[0], np.float32)}
    )
    sizes: list[int] = []

    def heard(event: Event) -> None:
        if event.kind == "trained":
            sizes.append(event.details["body_bytes"])

    with running(create_app(settings)) as server:
        operator = Operator(server)
        operator.begin(
            model,
            rounds=ROUNDS,
            profiles=[{"name": "one", "compressor": compressor}],
            cohort={"size": 1, "minimum": 1},
            max_abs=1e4,
        )
        key = StateDirectory.open(folder / "device").key()
        client = Client(
            "http://fedpress.test",
            Clustered(),
            state_dir=folder / "device",
            task="digits",
            token=operator.token(),
            seed=3,
            on_event=heard,
            transport=HttpTransport("http://fedpress.test", key, http=Unread(server)),
        )
        client.run()
        return operator.get("/v1/tasks/digits")["model"], sizes


def around_topk(inner: dict[str, Any]) -> dict[str, Any]:
    member = {"id": "per_tensor", "large": inner, "min_size": 100}
    return {"id": "error_feedback", "inner": member}


def around_cafe(inner: dict[str, Any]) -> dict[str, Any]:
    return {"id": "cafe", "inner": inner, "guard": None}


@pytest.mark.parametrize(
    "contexts",
    ["previous", *(pytest.param(each, marks=pytest.mark.slow) for each in ("drift", "activity"))],
)
@pytest.mark.parametrize("around", [around_topk, pytest.param(around_cafe, marks=pytest.mark.slow)])
def test_contexts_make_uploads_smaller_and_change_no_model(
    tmp_path: Path, contexts: str, around: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    plain = {"id": "topk", "fraction": 0.05, "magnitude_bits": 1}
    coded = {"id": "coded", "inner": plain, "coder": "auto", "contexts": contexts}
    made, sizes = whole_task(tmp_path / "plain", around(plain))
    same, smaller = whole_task(tmp_path / "coded", around(coded))
    assert same == made
    assert len(sizes) == len(smaller) == ROUNDS
    assert sum(smaller[1:]) < 0.85 * sum(sizes[1:])
