"""The operators' own listener on a real socket, beside the devices'."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from fedpress_protocols.errors import ConfigurationError
from fedpress_server.settings import Settings
from tests.devices import ADMIN_TOKEN, Device, Operator


def started(folder: Path, **settings: str) -> subprocess.Popen[str]:
    environment = os.environ | {
        "FEDPRESS_PORT": "0",
        "FEDPRESS_ADMIN_PORT": "0",
        "FEDPRESS_DATA_DIR": str(folder),
        "FEDPRESS_ADMIN_TOKEN": ADMIN_TOKEN,
        "PYTHONPATH": os.pathsep.join(sys.path),
        **settings,
    }
    return subprocess.Popen(
        [sys.executable, "-m", "fedpress_server"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def served(
    folder: Path, **settings: str
) -> Iterator[tuple[subprocess.Popen[str], httpx.Client, httpx.Client]]:
    """The process, and a client of either listener."""
    process = started(folder, **settings)
    try:
        assert process.stdout is not None
        apart, ready = process.stdout.readline(), process.stdout.readline()
        assert apart.startswith("fedpress operators' listener on http://127.0.0.1:"), apart
        assert ready.startswith("fedpress server ready on http://127.0.0.1:"), ready
        with (
            httpx.Client(base_url=ready.split()[-1], timeout=60) as devices,
            httpx.Client(base_url=apart.split()[-1], timeout=60) as operators,
        ):
            yield process, devices, operators
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_both_listen_with_the_same_limits_and_stop_together(tmp_path: Path) -> None:
    slow = {"FEDPRESS_HEADER_TIMEOUT": "0.5"}
    with served(tmp_path / "data", **slow) as (process, devices, operators):
        operator = Operator(operators)
        device = Device(devices)
        device.enrol(operator.token())
        assert device.json("GET", "/v1/tasks").json() == operator.get("/v1/tasks") == []
        for http, status in ((devices, 404), (operators, 200)):
            assert http.get("/readyz").status_code == 200
            for path in ("/metrics", "/openapi.json", "/docs"):
                assert http.get(path).status_code == (401 if status == 200 else 404)
                assert http.get(path, headers=operator.headers).status_code == status
            found = http.get("/v1/admin/clients", headers=operator.headers)
            assert found.status_code == status
            if status == 404:
                assert found.json()["type"].endswith(":not-found")
        for http in (devices, operators):
            url = http.base_url
            with socket.create_connection((url.host, url.port or 80), 10) as connection:
                connection.sendall(b"GET /livez HTTP/1.1\r\n")
                assert b"request-timeout" in connection.recv(65536)
        with socket.create_connection((operators.base_url.host, operators.base_url.port or 80)):
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        for http in (devices, operators):
            with pytest.raises(httpx.ConnectError):
                http.get("/livez")


@pytest.mark.slow
def test_an_operators_port_that_is_taken_is_told_in_a_sentence(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = started(tmp_path / "data", FEDPRESS_ADMIN_PORT=str(port))
        out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert f"127.0.0.1:{port}" in err.splitlines()[-1]
    assert "FEDPRESS_ADMIN_PORT" in err.splitlines()[-1]
    assert "Traceback" not in err
    assert "ready" not in out


def test_one_port_cannot_be_both(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="port and admin_port are both 8080"):
        Settings.load(data_dir=tmp_path, admin_port=8080)
