"""Faults of docs/fault-table.md that only a real process and a real socket can have."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import httpx
import numpy as np
import pytest

from fedpress_protocols.errors import FedpressError, MalformedRequest
from fedpress_protocols.model import Model
from fedpress_protocols.signatures import Content
from tests.devices import Device, Operator
from tests.system.forked_server import ForkedServer
from tests.system.one_hot_fleet import DEVICES, Fleet
from tests.system.server_process import ADMIN_TOKEN

BATCH = 2
MODEL = Model.from_tensors({"weight": np.zeros(200_000, np.float32)})


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ForkedServer]:
    made = ForkedServer(
        tmp_path / "server", {"log_level": "debug", "shutdown_seconds": "5"}, batch=BATCH
    )
    made.start()
    made.wait()
    yield made
    made.kill()


@pytest.mark.slow
@pytest.mark.parametrize("part", [0.0, 0.5, 1.0], ids=["headers", "half", "all but the answer"])
def test_a_device_killed_in_mid_upload_leaves_nothing_behind(
    server: ForkedServer, part: float
) -> None:
    """Its connection is reset; then it comes again, and counts once."""
    with httpx.Client(base_url=server.url, timeout=30) as http:
        operator, device = Operator(http, ADMIN_TOKEN), Device(http)
        device.enrol(operator.token())
        operator.begin(MODEL, rounds=1, cohort={"size": 2, "minimum": 2}, round_seconds=3600.0)
        given = device.assignment("digits")
        body = device.body_for(given, np.ones(MODEL.spec.size, np.float32))
        path = f"/v1/assignments/{given.assignment}/update"
        headers: dict[str, str | bytes] = {
            **device.sign("PUT", path, Content.of(body)),
            "Host": http.base_url.netloc,
        }
        lines = [f"PUT {path} HTTP/1.1", *(f"{n}: {_text(v)}" for n, v in headers.items())]
        host, port = http.base_url.host, http.base_url.port
        assert port is not None
        with socket.create_connection((host, port)) as link:
            link.sendall("\r\n".join([*lines, "", ""]).encode())
            link.sendall(body[: int(part * len(body))])
            time.sleep(0.2)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        metric = ""
        for _ in range(1000):
            metric = http.get("/metrics").text
            if "fedpress_bytes_in_flight 0.0" in metric:
                break
            time.sleep(0.01)
        assert "fedpress_bytes_in_flight 0.0" in metric, "the reset connection holds its bytes"
        received = operator.get("/v1/tasks/digits/rounds")[0]["received"]
        assert received == (1 if part == 1.0 else 0)
        answer = device.put(given.assignment, body)
        assert answer.status_code == (200 if part == 1.0 else 201)
        assert operator.get("/v1/tasks/digits/rounds")[0]["received"] == 1


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


@pytest.mark.slow
@pytest.mark.soak
def test_a_server_told_to_stop_under_load_ends_well_and_loses_nothing(
    server: ForkedServer, soak: bool
) -> None:
    chance = random.Random(7)
    with httpx.Client(base_url=server.url, timeout=30) as client:
        fleet = Fleet([client], rounds=400)
        with fleet.taking_part():
            for _ in range(20 if soak else 3):
                fleet.wait_for_rounds(1)
                time.sleep(chance.random() / 4)
                began = time.monotonic()
                assert server.stop() == 0
                assert time.monotonic() - began < 30
                server.start()
                server.wait()
        assert fleet.check() >= 2 * DEVICES
    assert "Traceback" not in server.log.read_text()


@pytest.mark.slow
def test_a_stopped_worker_that_wakes_after_its_lease_changes_nothing(
    place: Mapping[str, str], tmp_path: Path
) -> None:
    """SIGSTOP where the model is made and not yet written; another worker has long gone on when it
    comes back."""

    def made(role: str, name: str) -> ForkedServer:
        return ForkedServer(tmp_path / name, {**place, "role": role}, batch=BATCH)

    api, first, second = made("api", "api"), made("worker", "w1"), made("worker", "w2")
    with ExitStack() as stack:
        for each in (api, first, second):
            stack.callback(each.kill)
        api.start()
        first.start("model-kept:pause")
        api.wait()
        first.wait()
        client = stack.enter_context(httpx.Client(base_url=api.url, timeout=30))
        fleet = Fleet([client], rounds=100)
        with fleet.taking_part():
            until(lambda: state_of(first.pid) == "T")
            assert fleet.history()[-1].round == 1
            second.start()
            second.wait()
            fleet.wait_for_rounds(2)
            os.kill(first.pid, signal.SIGCONT)
            second.kill()
            fleet.wait_for_rounds(2)
            assert "round 1.1 committed" not in first.log.read_text()
        fleet.check()


def state_of(pid: int) -> str:
    """As ps shows it: T is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def until(is_so: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < give_up
        time.sleep(0.02)


FORGED = "2026-01-01 00:00:00,000 INFO fedpress_server.api.operators: forged"


def test_nothing_that_comes_in_forges_a_line_of_the_log_and_no_secret_is_in_it(
    server: ForkedServer,
) -> None:
    with httpx.Client(base_url=server.url, timeout=30) as http:
        operator, device = Operator(http, ADMIN_TOKEN), Device(http)
        token = operator.token()
        with pytest.raises(MalformedRequest, match="name"):
            device.enrol(token, name="a\\n" + FORGED)
        device.enrol(token)
        operator.begin(MODEL, cohort={"size": 2, "minimum": 2}, round_seconds=3600.0)
        given = device.assignment("digits")
        secret = "a wrong admin token that nobody may read"
        path = "/v1/tasks/%0a" + FORGED.replace(" ", "%20")
        for headers in ({}, {"Authorization": f"Bearer {secret}"}, {"X-Request-Id": FORGED}):
            for where in (path, f"/v1/admin{path}", "/v1/admin/clients"):
                http.get(where, headers=headers)
        for text in ('{"x": "\\n' + FORGED + '"}', '{"pending": ["\\u000a' + FORGED + '"]}'):
            with pytest.raises(FedpressError):
                device.json("POST", "/v1/tasks/digits/check-in", text)
        with pytest.raises(FedpressError):
            device.json("GET", path)
        device.put(given.assignment, FORGED.encode())
        operator.post("/v1/admin/tasks/digits/abort-round")
        raw = f"GET /\n{FORGED} HTTP/1.1\r\nHost: x\r\nX: \n{FORGED}\r\n\r\n"
        with socket.create_connection((http.base_url.host, http.base_url.port or 0)) as link:
            link.sendall(raw.encode())
            link.recv(1000)
    assert server.stop() == 0
    log = server.log.read_text()
    assert re.search(r"\d DEBUG .*/v1/tasks", log), "there is a log to look at"
    assert not [line for line in log.splitlines() if line.startswith(FORGED[:20])]
    key = (server.data_dir / "server-key.pem").read_text()
    secrets = [ADMIN_TOKEN, token, secret, *key.splitlines()[1:-1], device.key.to_pem().decode()]
    assert not [each for each in secrets if each in log]
