"""A server process: its lines on stdout, its level by signal, the bytes that it sends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.system.server_process import ServerProcess


def exchanged(port: int, target: str) -> bytes:
    """All that the server sends for one request, as it comes out of the socket."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as link:
        link.sendall(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        link.settimeout(30)
        received = b""
        while b"\r\n\r\n" not in received:
            received += link.recv(65536)
        head, _, body = received.partition(b"\r\n\r\n")
        length = int(re.search(rb"content-length: (\d+)", head.lower())[1])  # type: ignore[index]
        while len(body) < length:
            body += link.recv(65536)
    return head + b"\r\n\r\n" + body


def sent(metrics: bytes) -> float:
    found = re.search(rb'fedpress_egress_bytes_total\{kind="answer"\} (\S+)', metrics)
    return float(found[1]) if found else 0.0


def wait_for(log: Path, words: str) -> None:
    give_up = time.monotonic() + 60
    while words not in log.read_text():
        assert time.monotonic() < give_up
        time.sleep(0.02)


@pytest.mark.slow
def test_bytes_are_counted_and_a_signal_changes_the_level(tmp_path: Path) -> None:
    server = ServerProcess(
        tmp_path,
        {
            "FEDPRESS_LOG_FORMAT": "json",
            # Nobody listens there; the server runs, answers and stops all the same.
            "FEDPRESS_OTLP_ENDPOINT": "http://127.0.0.1:9/v1/traces",
        },
    )
    server.start()
    try:
        assert server._process is not None
        total = 0
        for target in ("/livez", "/readyz", "/v1/nothing", "/v1/tasks", "/metrics"):
            total += len(exchanged(server.port, target))
        assert sent(exchanged(server.port, "/metrics")) == total
        lines = [json.loads(line) for line in server.log.read_text().splitlines()]
        assert not any(line["level"] == "debug" for line in lines)
        os.kill(server._process.pid, signal.SIGUSR1)
        ready = next(line for line in lines if "server ready on" in line["event"])
        assert ready["level"] == "info"
        wait_for(server.log, "log level is debug")
        exchanged(server.port, "/livez")
        wait_for(server.log, '"/livez"')  # an answer is out before its line is
        os.kill(server._process.pid, signal.SIGUSR1)
        wait_for(server.log, "log level is info")
        exchanged(server.port, "/livez")
    finally:
        assert server.stop() == 0
    lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    routes = [line for line in lines if line["logger"] == "fedpress_server.requests"]
    routes = [line for line in routes if line["route"] != "/metrics"]  # the scrape's may come late
    assert [line["route"] for line in routes] == ["/livez"]
    assert routes[0]["level"] == "debug"
    assert re.fullmatch("[0-9a-f]{32}", routes[0]["trace"])
