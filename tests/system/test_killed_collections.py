"""A server killed in the middle of a collection of old rounds."""

from __future__ import annotations

import sqlite3
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from fedpress.operator import Operator
from fedpress_protocols.model import Model
from fedpress_server.storage.files import model_name
from tests import devices
from tests.server.in_process import include_one
from tests.system.forked_server import ForkedServer
from tests.system.server_process import ADMIN_TOKEN

ROUNDS = 5


def events(server: ForkedServer) -> list[int]:
    """The rounds that have events."""
    with sqlite3.connect(server.data_dir / "fedpress.db") as database:
        rows = database.execute("SELECT DISTINCT round FROM round_events ORDER BY round")
        return [number for (number,) in rows]


@pytest.mark.slow
@pytest.mark.parametrize("point", ["models-given-up", "events-dropped"])
def test_a_killed_collection_loses_nothing_and_leaves_nothing(tmp_path: Path, point: str) -> None:
    model = Model.from_tensors({"weight": np.zeros(12, np.float32)})
    with ExitStack() as stack:
        server = ForkedServer(tmp_path / "server", {"retention_grace": "0.01"}, batch=2)
        stack.callback(server.kill)
        server.start(f"{point}:kill")
        server.wait()
        http = stack.enter_context(httpx.Client(base_url=server.url, timeout=30))
        tester = devices.Operator(http, ADMIN_TOKEN)
        terms: dict[str, Any] = {"rounds": 50, "retention": {"last": 1}, "round_seconds": 3600.0}
        tester.begin(model, cohort={"size": 1, "minimum": 1}, **terms)
        device = devices.Device(http)
        device.enrol(tester.token())
        for _ in range(ROUNDS):
            device.check_in("digits", include_one(device, model), wait=30)
        time.sleep(0.02)  # the newest of the old rounds is older than the grace
        with pytest.raises(httpx.RemoteProtocolError):
            tester.post("/v1/admin/models/collect", {"dry_run": False})
        assert server.process is not None
        server.process.join(30)
        assert server.was_killed
        server.start()
        server.wait()
        operator = stack.enter_context(Operator(server.url, ADMIN_TOKEN))
        operator.collect()
        versions = operator.versions("digits")
        assert [each.version for each in versions] == list(range(ROUNDS, -1, -1))
        kept = [each for each in versions if each.collected_at is None]
        assert {each.version for each in kept} == {0, ROUNDS}
        names = {Path(model_name(each.model)).name for each in kept}
        assert {each.name for each in (server.data_dir / "models").iterdir()} == names
        assert events(server) == [ROUNDS, ROUNDS + 1]
        answer = device.check_in("digits", include_one(device, model), wait=30)
        assert answer is not None
        assert answer.task.round == ROUNDS + 1
