"""Devices that send long bodies slowly, through real HTTP, beside one that trains."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import httpx
import numpy as np
import pytest

from fedpress_protocols.model import Model
from fedpress_protocols.signatures import Content
from tests.devices import Device, Operator
from tests.system.server_process import ADMIN_TOKEN, ServerProcess

MODEL = Model.from_tensors({"weight": np.zeros((512, 512), np.float32)})  # 1 MiB
ROOM = 2 * 2**20
ROUNDS = 5


class SlowUpload:
    """A signed body of which a byte comes now and then, till the server answers."""

    def __init__(self, http: httpx.Client, operator: Operator, task: str, first: int) -> None:
        device = Device(http)
        device.enrol(operator.token())
        assignment = device.assignment(task)
        body = device.body_for(assignment, np.ones(MODEL.spec.size, np.float32))
        path = f"/v1/assignments/{assignment.assignment}/update"
        host = f"{http.base_url.host}:{http.base_url.port}"
        headers = {"Host": host, **device.sign("PUT", path, Content.of(body))}
        lines = [f"PUT {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        self._link = socket.create_connection((http.base_url.host, http.base_url.port or 80))
        self._link.sendall("\r\n".join([*lines, "", ""]).encode() + body[:first])
        self._rest = body[first:]
        self._link.settimeout(0.1)
        self.answer = b""
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def _send(self) -> None:
        """600 bytes a second."""
        for start in range(0, len(self._rest), 60):
            try:
                self.answer = self._link.recv(4096)
                return
            except TimeoutError:
                pass
            except OSError:
                return
            try:
                self._link.sendall(self._rest[start : start + 60])
            except OSError:
                return

    def close(self) -> None:
        self._link.close()
        self._thread.join(10)

    def status(self) -> int:
        """Of the answer, which is waited for."""
        self._thread.join(60)
        return int(self.answer.split()[1])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    settings = {"FEDPRESS_MAX_BYTES_IN_FLIGHT": str(ROOM), "FEDPRESS_UPLOAD_SECONDS": "60"}
    process = ServerProcess(tmp_path, settings)
    process.start()
    yield process
    assert process.stop() == 0
    assert "Traceback" not in process.log.read_text()


def in_flight(operator: Operator) -> float:
    text = operator.http.get("/metrics", headers=operator.headers).text
    found = re.search(r"^fedpress_bytes_in_flight (\S+)$", text, re.MULTILINE)
    assert found is not None
    return float(found[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [
        pytest.param(0, id="from the start"),
        pytest.param(700 * 1024, id="after a good beginning", marks=pytest.mark.slow),
    ],
)
def test_an_honest_device_trains_beside_slow_uploads(
    server: ServerProcess, first: int, record_property: Callable[[str, object], None]
) -> None:
    """Three of 1 MiB at 600 bytes a second, where there is room for 2 MiB."""
    with httpx.Client(base_url=server.url, timeout=60) as http, ExitStack() as stack:
        operator = Operator(http, ADMIN_TOKEN)
        cohort = {"size": 3, "minimum": 1}
        operator.begin(MODEL, "slow", cohort=cohort, round_seconds=3600)
        operator.begin(MODEL, cohort={"size": 1, "minimum": 1}, rounds=ROUNDS)
        slow = [
            stack.enter_context(closing(SlowUpload(http, operator, "slow", first)))
            for _ in range(3)
        ]
        device = Device(http)
        device.enrol(operator.token())
        highest, pending = 0.0, list[str]()
        for number in range(ROUNDS):
            told = device.check_in("digits", *pending[-1:], wait=30)
            while told is None or told.assignment is None:
                told = device.check_in("digits", wait=30)
            assignment = told.assignment
            update = np.full(MODEL.spec.size, number, np.float32)
            device.upload(assignment.assignment, device.body_for(assignment, update))
            pending.append(assignment.assignment)
            highest = max(highest, in_flight(operator))
        receipts = [device.receipt(each) for each in pending[:-1]]
        assert [each.receipt.outcome for each in receipts if each] == ["included"] * (ROUNDS - 1)
        assert {each.status() for each in slow} <= {408, 503}
        assert in_flight(operator) == 0
        assert operator.get("/v1/tasks/slow/rounds")[0]["received"] == 0
    figure = f"three slow uploads of 1 MiB hold {highest / 1024:.0f} KiB of {ROOM // 1024}"
    record_property("figure", f"{figure}; {ROUNDS} uploads beside them, none refused")
