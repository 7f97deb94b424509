"""A server in this process, whose clock the test turns."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from fedpress_protocols.model import Model
from fedpress_server import Settings, create_app
from tests.devices import ADMIN_TOKEN, Device, Operator
from tests.server.in_process import Clock, Server, Start, running


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def start(tmp_path: Path, clock: Clock) -> Start:
    """Starts the server on the test's data folder; ends it, and may be used again."""

    def started(**settings: Any) -> AbstractContextManager[Server]:
        defaults = {"data_dir": tmp_path / "data", "admin_token": ADMIN_TOKEN, "tick_seconds": 3600}
        return running(create_app(Settings(**(defaults | settings)), clock=clock))

    return started


@pytest.fixture
def http(start: Start) -> Iterator[Server]:
    with start() as client:
        yield client


@pytest.fixture
def operator(http: httpx.Client) -> Operator:
    return Operator(http)


@pytest.fixture
def enrolled(http: httpx.Client, operator: Operator, clock: Clock) -> Callable[[], Device]:
    """Makes devices, enrolled."""

    def make() -> Device:
        device = Device(http, clock)
        device.enrol(operator.token())
        return device

    return make


@pytest.fixture
def model() -> Model:
    weights = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    return Model.from_tensors({"weight": weights, "steps": np.array([3], np.int64)})
