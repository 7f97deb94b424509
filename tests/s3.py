"""An S3 store of the tests' own on loopback, and a proxy that stands before it and fails."""

from __future__ import annotations

import http.client
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypedDict


class Keys(TypedDict):
    access_key_id: str
    secret_access_key: str


KEYS: Keys = {"access_key_id": "fedpress", "secret_access_key": "of no worth"}
_SERVER = """
import warnings, sys
warnings.simplefilter("ignore")
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@contextmanager
def store() -> Iterator[str]:
    """The address of an S3 server, another process, that ends with the block."""
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def make_bucket(endpoint: str, bucket: str) -> None:
    connection = http.client.HTTPConnection(endpoint.removeprefix("http://"))
    connection.request("PUT", f"/{bucket}")
    assert connection.getresponse().status == 200
    connection.close()


class FaultProxy:
    """Passes requests on to `target`, but the next ones of which `faults` has one each.

    A fault is a status to answer with at once, "cut": the request is done and its answer lost, or
    "stall": no answer until the proxy is closed. `always` is a fault for every request.
    """

    def __init__(self, target: str) -> None:
        self.faults: list[int | str] = []
        self.always: int | str | None = None
        self.seen: list[str] = []
        self._over = threading.Event()
        proxy, where = self, target.removeprefix("http://")

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def pass_on(self) -> None:
                length = int(self.headers.get("content-length", 0))
                body = self.rfile.read(length)
                fault = proxy.faults.pop(0) if proxy.faults else proxy.always
                proxy.seen.append(f"{self.command} {fault or ''}".strip())
                if fault == "stall":
                    proxy._over.wait(60)
                    return self.cut()
                if isinstance(fault, int):
                    return self.answer(fault, [], b"")
                connection = http.client.HTTPConnection(where)
                connection.request(self.command, self.path, body, dict(self.headers.items()))
                given = connection.getresponse()
                content = given.read()
                connection.close()
                if fault == "cut":
                    return self.cut()
                return self.answer(given.status, given.getheaders(), content)

            do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = pass_on

            def answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
                self.send_response_only(status)
                length = str(len(body))
                for name, value in headers:
                    if name.lower() == "content-length" and self.command == "HEAD":
                        length = value
                    if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                        self.send_header(name, value)
                self.send_header("Content-Length", length)
                self.end_headers()
                self.wfile.write(body)

            def cut(self) -> None:
                """With a reset, as when a machine goes away."""
                linger = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                self.close_connection = True

            def log_message(self, format: str, *args: Any) -> None:
                """Tests are quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
