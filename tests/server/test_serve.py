"""A real server process on a real socket."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPResponse
from pathlib import Path

import httpx
import pytest

from fedpress_protocols.errors import BodyTooLarge, Unavailable
from fedpress_protocols.model import Model
from fedpress_protocols.signatures import Content
from tests.devices import ADMIN, ADMIN_TOKEN, Device, Operator, checked


@contextmanager
def served(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process, and where it says it listens."""
    environment = os.environ | {
        "FEDPRESS_PORT": "0",
        "FEDPRESS_DATA_DIR": str(folder),
        "FEDPRESS_ADMIN_TOKEN": ADMIN_TOKEN,
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "fedpress_server"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert ready.startswith("fedpress server ready on http://127.0.0.1:"), ready
        yield process, ready.split()[-1]
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("server") / "data") as (_, url):
        yield url


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


def assigned(http: httpx.Client, model: Model, task: str) -> tuple[Device, str, int]:
    """A device, the path of its upload, and the largest body that may go there."""
    operator = Operator(http)
    operator.begin(model, task)
    device = Device(http)
    device.enrol(operator.token())
    assignment = device.assignment(task)
    path = f"/v1/assignments/{assignment.assignment}/update"
    return device, path, assignment.plan.max_body_bytes(model.spec)


def test_a_round_goes_through_a_socket(http: httpx.Client, model: Model) -> None:
    operator = Operator(http)
    operator.begin(model, "socket", rounds=1, cohort={"size": 1, "minimum": 1})
    device = Device(http)
    device.enrol(operator.token())
    assignment = device.assignment("socket")
    body = device.body_for(assignment, model.parameters)
    device.upload(assignment.assignment, body)
    answer = device.check_in("socket", assignment.assignment, wait=30)
    assert answer is not None
    assert (device.model(answer.task.model).parameters == 2 * model.parameters).all()
    (status,) = operator.get("/v1/tasks/socket/rounds")
    assert status["upload_bytes"] == len(body)
    assert status["download_bytes"] == len(model.to_bytes())


@pytest.mark.parametrize("expect", [False, True])
def test_a_body_too_large_is_refused_before_it_is_sent(
    url: str, http: httpx.Client, model: Model, expect: bool
) -> None:
    device, path, limit = assigned(http, model, f"large-{expect}")
    headers = device.sign("PUT", path, Content(bytes(32), limit + 1))
    headers |= {"Host": url.removeprefix("http://")}
    headers |= {"Expect": "100-continue"} if expect else {}
    lines = [f"PUT {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as link:
        link.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        answer = HTTPResponse(link)
        answer.begin()
        problem = json.loads(answer.read())
    assert answer.status == 413
    assert problem["limit"] == limit


def test_who_sends_too_much_still_hears_why(http: httpx.Client, model: Model) -> None:
    device, path, _ = assigned(http, model, "much")
    with pytest.raises(BodyTooLarge):
        checked(device.request("PUT", path, bytes(5_000_000)))


def test_a_server_told_to_stop_answers_who_waits_and_has_not_failed(
    tmp_path: Path, model: Model
) -> None:
    with (
        served(tmp_path / "data") as (process, url),
        httpx.Client(base_url=url, timeout=60) as http,
        ThreadPoolExecutor(1) as pool,
    ):
        operator = Operator(http)
        operator.begin(model, cohort={"size": 1, "minimum": 1})
        first, waiting = Device(http), Device(http)
        for device in (first, waiting):
            device.enrol(operator.token())
        first.assignment("digits")
        poll = pool.submit(waiting.check_in, "digits", wait=30.0)
        while "fedpress_waiting_check_ins 1.0" not in http.get("/metrics", headers=ADMIN).text:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(Unavailable) as refused:
            poll.result(60)
        assert refused.value.members["retry_after"] >= 1
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out == ""
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_second_server_on_the_folder_ends_with_a_sentence(tmp_path: Path) -> None:
    with served(tmp_path / "data"):
        second = subprocess.run(
            [
                sys.executable,
                "-m",
                "fedpress_server",
                "--port",
                "0",
                "--data-dir",
                tmp_path / "data",
            ],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert second.returncode == 2
    assert "another server uses the data folder" in second.stderr
    assert "Traceback" not in second.stderr


@pytest.mark.slow
def test_a_port_that_is_taken_ends_with_a_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        second = subprocess.run(
            [
                *(sys.executable, "-m", "fedpress_server", "--port", str(port)),
                *("--data-dir", tmp_path / "data"),
            ],
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(sys.path), "FEDPRESS_ADMIN_PROT": "27998"},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert second.returncode == 2
    assert "nothing reads the variable FEDPRESS_ADMIN_PROT: did you mean FED" in second.stderr
    assert f"cannot listen on 127.0.0.1:{port}" in second.stderr
    assert "or choose another port (--port, FEDPRESS_PORT)" in second.stderr
    assert "Traceback" not in second.stderr
