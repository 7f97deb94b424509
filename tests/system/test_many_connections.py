"""Connections that say nothing, and bodies in tiny chunks, beside a device that trains."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest

from fedpress_protocols.model import Model
from tests.devices import Device, Operator
from tests.system.server_process import ADMIN_TOKEN, ServerProcess

MODEL = Model.from_tensors({"weight": np.zeros((256, 256), np.float32)})


@contextmanager
def serving(folder: Path, **settings: str) -> Iterator[ServerProcess]:
    process = ServerProcess(folder, settings, open_files=256)
    process.start()
    try:
        yield process
    finally:
        assert process.stop() == 0
    assert "Traceback" not in process.log.read_text()


@pytest.mark.parametrize(
    ("num_idle", "settings"),
    [
        (100, {"FEDPRESS_MAX_CONNECTIONS": "80", "FEDPRESS_MAX_CONNECTIONS_PER_ADDRESS": "60"}),
        (600, {}),
        pytest.param(2_000, {}, marks=pytest.mark.soak(only=True)),
        pytest.param(8_000, {}, marks=pytest.mark.soak(only=True)),
    ],
)
@pytest.mark.slow
def test_a_device_trains_beside_idle_connections(
    tmp_path: Path,
    num_idle: int,
    settings: dict[str, str],
    record_property: Callable[[str, object], None],
) -> None:
    """From another address; more files than the server's soft limit was, which it raises."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < num_idle + 100:
        pytest.skip(f"needs {num_idle} open files: ulimit -n")
    with serving(tmp_path, **settings) as server, ExitStack() as stack:
        for _ in range(num_idle):
            idle = stack.enter_context(socket.socket())
            idle.connect(("127.0.0.1", server.port))
        transport = httpx.HTTPTransport(local_address="127.0.0.2")
        http = stack.enter_context(
            httpx.Client(base_url=server.url, timeout=60, transport=transport)
        )
        operator = Operator(http, ADMIN_TOKEN)
        operator.begin(MODEL, rounds=6, cohort={"size": 1, "minimum": 1})
        device = Device(http)
        device.enrol(operator.token())
        pending, downloads = list[str](), 0
        while len(pending) < 6:
            told = device.check_in("digits", *pending[-1:], wait=30)
            if told is None or told.assignment is None:
                continue
            device.model(told.assignment.plan.model)
            downloads += 1
            body = device.body_for(told.assignment, np.ones(MODEL.spec.size, np.float32))
            device.upload(told.assignment.assignment, body)
            pending.append(told.assignment.assignment)
    record_property("figure", f"{num_idle} idle connections: {downloads} of 6 downloads, 0 errors")


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_million_tiny_chunks_cost_next_to_nothing(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with serving(tmp_path) as server:
        assert server._process is not None
        before = cpu_seconds(server._process.pid)
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", server.port), 30) as link:
                link.sendall(
                    b"POST /v1/enrol HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
                )
                try:
                    link.sendall(b"1\r\nx\r\n" * 10**6 + b"0\r\n\r\n")
                    while link.recv(65536):
                        pass
                except OSError:
                    pass
        time.sleep(0.2)
        spent = (cpu_seconds(server._process.pid) - before) / 5
    record_property("figure", f"a million chunks of one byte: {spent * 1e3:.0f} ms of CPU")
    assert spent < 1.0
