"""What one connection may take: real uvicorn, raw sockets, short limits.

No test asserts how long something took. A connection that must be closed is waited for with a cap
far above its limit; one that must live sends for longer than its limit and gets its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from ipaddress import ip_network
from typing import Any

import pytest
import uvicorn

from fedpress_protocols.errors import ConfigurationError
from fedpress_server.api.http_protocol import ConnectionLimits, bounded_protocol

CAP = 10.0
"""Seconds, far above every limit here."""
SHORT = ConnectionLimits(header_timeout=0.4, body_timeout=0.4, write_timeout=0.4, min_rate=100)
"""For connections that must be closed."""
FAIR = ConnectionLimits(header_timeout=1.5, body_timeout=1.5, write_timeout=1.5, min_rate=100)
"""For those that must live longer than this, on a machine that may itself pause for a second."""
PATIENT = ConnectionLimits(header_timeout=60, body_timeout=60, write_timeout=60)
"""For those where time is not the question."""

takes_seconds = pytest.mark.parametrize(
    "loop", ["uvloop", pytest.param("asyncio", marks=pytest.mark.soak(only=True))], indirect=True
)

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class App:
    """Answers with the length and digest of the body; the path says what it does before."""

    def __init__(self) -> None:
        self.disconnects = 0
        self.headers: list[Any] = []

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        self.headers = scope["headers"]
        action, _, argument = scope["path"].strip("/").partition("/")
        if action == "sleep":
            await asyncio.sleep(float(argument))
        if action == "size":
            await answer(send, 200, bytes(int(argument)))
            return
        if action == "early":  # an answer to a body it does not read
            await answer(send, 413, b"too large")
            return
        if action == "big":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(int(argument)):
                await send({"type": "http.response.body", "body": bytes(65536), "more_body": True})
            await send({"type": "http.response.body", "body": b""})
            return
        if action == "started":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        body = b""
        while True:
            event = await receive()
            if event["type"] == "http.disconnect":
                self.disconnects += 1
                return
            body += event["body"]
            if not event["more_body"]:
                break
            if action == "slow":  # reads piece by piece
                await asyncio.sleep(0.05)
        text = f"{scope['path']} {len(body)} {hashlib.sha256(body).hexdigest()}".encode()
        await answer(send, 200, text)


async def answer(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Running:
    """A uvicorn on a thread of its own, and what it was seen to refuse."""

    def __init__(self, limits: ConnectionLimits, loop: str, **settings: Any) -> None:
        self.app = App()
        self.refusals: list[str] = []
        config = uvicorn.Config(
            self.app,
            host="127.0.0.1",
            port=0,
            http=bounded_protocol(limits, self.refusals.append),
            loop=loop,
            lifespan="off",
            log_level="error",
            **({"ws": "none"} | settings),
        )
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        wait_until(lambda: self.server.started or not self.thread.is_alive())
        self.port: int = self.server.servers[0].sockets[0].getsockname()[1]

    def connect(self, receive_buffer: int = 0) -> socket.socket:
        client = socket.socket()
        if receive_buffer:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.settimeout(CAP)
        client.connect(("127.0.0.1", self.port))
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return client

    def wait_for_no_connection(self) -> None:
        wait_until(lambda: not self.server.server_state.connections)

    def stop(self) -> None:
        self.server.should_exit = self.server.force_exit = True
        self.thread.join(CAP)
        assert not self.thread.is_alive()


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + CAP
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


@pytest.fixture(scope="module", params=["asyncio", "uvloop"])
def loop(request: pytest.FixtureRequest) -> str:
    if request.param == "uvloop":
        pytest.importorskip("uvloop", reason="uvicorn[standard] has none on this platform")
    return str(request.param)


@pytest.fixture(scope="module")
def servers(loop: str) -> Iterator[Callable[..., Running]]:
    """Servers by their settings; each is started once."""
    running: dict[Any, Running] = {}

    def start(limits: ConnectionLimits, **settings: Any) -> Running:
        key = (limits, *sorted(settings.items()))
        if key not in running:
            running[key] = Running(limits, loop, **settings)
        return running[key]

    yield start
    for server in running.values():
        server.stop()


@pytest.fixture
def serve(servers: Callable[..., Running]) -> Iterator[Callable[..., Running]]:
    """A server on which nothing has happened yet, under short limits unless told otherwise."""
    used: list[Running] = []

    def start(limits: ConnectionLimits = SHORT, **settings: Any) -> Running:
        server = servers(limits, **settings)
        server.refusals.clear()
        server.app.disconnects = 0
        used.append(server)
        return server

    yield start
    for server in used:
        server.wait_for_no_connection()


def read_to_end(client: socket.socket) -> bytes:
    """All that comes until the server closes; a reset counts as closed, a time-out fails."""
    data = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while piece := client.recv(65536):
            data += piece
    return bytes(data)


def read_answer(client: socket.socket) -> tuple[int, bytes]:
    """One answer with a Content-Length; interim answers are passed over."""
    data = bytearray()
    while True:
        while b"\r\n\r\n" not in data:
            piece = client.recv(1)
            assert piece, f"closed in the middle of {bytes(data)!r}"
            data += piece
        status = int(data.split()[1])
        if status != 100:
            break
        data.clear()
    length = int(data.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    body = bytearray()
    while len(body) < length:
        body += client.recv(length - len(body))
    return status, bytes(body)


def post(path: str, body: bytes, *extra: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *extra, "", ""]
    return "\r\n".join(lines).encode() + body


def expected(path: str, body: bytes) -> tuple[int, bytes]:
    return 200, f"{path} {len(body)} {hashlib.sha256(body).hexdigest()}".encode()


def trickle(client: socket.socket, data: bytes, pause: float, seconds: float) -> bool:
    """Send byte by byte for `seconds`; whether the server put up with it."""
    stop = time.monotonic() + seconds
    for byte in data:
        if time.monotonic() > stop:
            return True
        try:
            client.sendall(bytes([byte]))
        except (ConnectionResetError, BrokenPipeError):
            return False
        time.sleep(pause)
    return True


def assert_problem(data: bytes, status: int, slug: str) -> None:
    head, _, body = data.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode()), data
    assert b"content-type: application/problem+json" in head
    assert b"connection: close" in head
    problem = json.loads(body)
    assert problem["status"] == status
    assert problem["type"] == f"urn:fedpress:problem:{slug}"
    assert problem["title"]
    assert problem["detail"]


# Slow and silent clients


def test_a_silent_connection_is_closed_without_a_word(serve: Callable[..., Running]) -> None:
    server = serve()
    with server.connect() as client:
        assert read_to_end(client) == b""
    assert server.refusals == ["silent"]


def test_half_a_header_gets_408(serve: Callable[..., Running]) -> None:
    server = serve()
    with server.connect() as client:
        client.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Le")
        assert_problem(read_to_end(client), 408, "request-timeout")
    assert server.refusals == ["header-timeout"]
    server.wait_for_no_connection()


@takes_seconds
def test_a_header_that_trickles_in_gets_408(serve: Callable[..., Running]) -> None:
    server = serve()
    with server.connect() as client:
        sender = threading.Thread(
            target=trickle, args=(client, b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 999, 0.02, CAP)
        )
        sender.start()
        assert_problem(read_to_end(client), 408, "request-timeout")
        sender.join(CAP)


def test_half_a_body_gets_408_and_the_application_is_told(serve: Callable[..., Running]) -> None:
    server = serve()
    with server.connect() as client:
        client.sendall(post("/", b"x" * 100)[:-50])
        assert_problem(read_to_end(client), 408, "request-timeout")
    wait_until(lambda: server.app.disconnects == 1)
    assert server.refusals == ["body-timeout"]
    server.wait_for_no_connection()


def test_half_a_chunk_gets_408(serve: Callable[..., Running]) -> None:
    server = serve()
    with server.connect() as client:
        client.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nab")
        assert_problem(read_to_end(client), 408, "request-timeout")


@takes_seconds
def test_a_body_below_the_least_rate_gets_408(serve: Callable[..., Running]) -> None:
    server = serve()
    with server.connect() as client:
        client.sendall(post("/", b"x" * 9999)[:-9999])
        sender = threading.Thread(target=trickle, args=(client, b"x" * 9999, 0.05, CAP))
        sender.start()
        assert_problem(read_to_end(client), 408, "request-timeout")
        sender.join(CAP)
    assert server.refusals == ["body-timeout"]


@takes_seconds
def test_chunk_extensions_are_not_a_body(serve: Callable[..., Running]) -> None:
    server = serve()
    with server.connect() as client:
        client.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1;")
        sender = threading.Thread(target=trickle, args=(client, b"e" * 9999, 0.001, CAP))
        sender.start()
        assert_problem(read_to_end(client), 408, "request-timeout")
        sender.join(CAP)


def test_a_body_stopped_after_the_answer_began_is_cut(serve: Callable[..., Running]) -> None:
    server = serve()
    with server.connect() as client:
        client.sendall(post("/started", b"x" * 100)[:-50])
        data = read_to_end(client)
    assert data.startswith(b"HTTP/1.1 200 ")
    assert b"408" not in data
    wait_until(lambda: server.app.disconnects == 1)


def test_a_body_stopped_after_its_answer_is_not_waited_for(serve: Callable[..., Running]) -> None:
    server = serve()
    with server.connect() as client:
        client.sendall(post("/early", b"x" * 100)[:-50])
        assert read_answer(client) == (413, b"too large")
        assert read_to_end(client) == b""


def test_a_body_without_end_after_its_answer_is_cut(serve: Callable[..., Running]) -> None:
    server = serve()
    with server.connect() as client:
        client.sendall(b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999\r\n\r\n")
        assert read_answer(client) == (413, b"too large")
        assert not trickle(client, b"x" * 9999, 0.005, CAP)


def test_stray_line_ends_do_not_keep_a_connection(serve: Callable[..., Running]) -> None:
    """They disarm uvicorn's keep-alive timeout."""
    server = serve(timeout_keep_alive=60)
    with server.connect() as client:
        client.sendall(post("/", b"1"))
        assert read_answer(client) == expected("/", b"1")
        client.sendall(b"\r\n")
        assert read_to_end(client) == b""
    assert server.refusals == ["silent"]


@takes_seconds
def test_an_idle_kept_connection_is_left_to_uvicorn(serve: Callable[..., Running]) -> None:
    server = serve(timeout_keep_alive=2)
    with server.connect() as client:
        client.sendall(post("/", b"1"))
        assert read_answer(client) == expected("/", b"1")
        time.sleep(0.6)  # longer than the header's time, which has not begun
        client.sendall(post("/", b"2"))
        assert read_answer(client) == expected("/", b"2")
        assert read_to_end(client) == b""
    assert server.refusals == []


@takes_seconds
def test_half_a_second_request_does_not_cost_the_first_its_answer(
    serve: Callable[..., Running],
) -> None:
    server = serve()
    with server.connect() as client:
        client.sendall(post("/sleep/1", b"1") + b"POST / HT")
        assert read_answer(client) == expected("/sleep/1", b"1")
        assert read_to_end(client) == b""
    assert server.refusals == ["header-timeout"]


# Clients that are slow within reason


@takes_seconds
def test_a_slow_body_above_the_least_rate_survives(serve: Callable[..., Running]) -> None:
    server = serve(FAIR)
    body = b"y" * 1200
    with server.connect() as client:
        client.sendall(post("/", body)[: -len(body)])
        for start in range(0, len(body), 30):  # 600 bytes a second for 2 s
            client.sendall(body[start : start + 30])
            time.sleep(0.05)
        assert read_answer(client) == expected("/", body)
    assert server.refusals == []


@takes_seconds
@pytest.mark.parametrize("path", ["/sleep/2", "/slow"])
def test_time_that_the_application_takes_is_not_the_clients(
    serve: Callable[..., Running], path: str
) -> None:
    server = serve(FAIR)
    body = bytes(4_000_000)
    with server.connect() as client:
        client.sendall(post(path, body))
        assert read_answer(client) == expected(path, body)
    assert server.refusals == []


@takes_seconds
def test_a_client_may_wait_to_be_asked_for_its_body(serve: Callable[..., Running]) -> None:
    server = serve(FAIR)
    with server.connect() as client:
        client.sendall(post("/sleep/2", b"1234", "Expect: 100-continue")[:-4])
        assert client.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(b"1234")
        assert read_answer(client) == expected("/sleep/2", b"1234")
    assert server.refusals == []


def test_who_was_asked_for_a_body_must_send_it(serve: Callable[..., Running]) -> None:
    server = serve()
    with server.connect() as client:
        client.sendall(post("/sleep/0.5", b"1234", "Expect: 100-continue")[:-4])
        data = read_to_end(client).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert_problem(data, 408, "request-timeout")


@takes_seconds
def test_without_a_least_rate_any_progress_will_do(serve: Callable[..., Running]) -> None:
    server = serve(ConnectionLimits(header_timeout=1.5, body_timeout=1.5, min_rate=0))
    body = b"z" * 10
    with server.connect() as client:
        client.sendall(post("/", body)[:-10])
        for _ in body:
            client.sendall(b"z")
            time.sleep(0.2)
        assert read_answer(client) == expected("/", body)
    assert server.refusals == []


@takes_seconds
def test_a_process_that_slept_reads_before_it_judges(serve: Callable[..., Running]) -> None:
    server = serve(FAIR)
    body = b"z" * 10
    with server.connect() as client:
        client.sendall(post("/", body)[:-10])
        wait_until(lambda: server.server.server_state.connections)
        (connection,) = server.server.server_state.connections
        connection.loop.call_soon_threadsafe(time.sleep, 2.5)
        client.sendall(body)
        assert read_answer(client) == expected("/", body)
    assert server.refusals == []


# Size


@pytest.mark.parametrize(
    "request_head",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 64,
        b"GET / HTTP/1.1\r\nHost: x\r\na: " + b"b" * 17_000,
        b"GET / HTTP/1.1\r\n" + b"b" * 17_000 + b": c",
        b"GET /" + b"b" * 17_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: " + b"b" * 9_000 + b"\r\na: " + b"c" * 9_000,
        b"GET / HTTP/1.1\r\nHost: x\r\na: " + b"b" * 500_000 + b"\r\n\r\n",
    ],
    ids=["many", "long value", "long name", "long path", "long together", "very long"],
)
def test_a_large_header_gets_431(serve: Callable[..., Running], request_head: bytes) -> None:
    server = serve(PATIENT)
    with server.connect() as client:
        client.sendall(request_head + b"\r\n\r\n")
        assert_problem(read_to_end(client), 431, "header-too-large")
    assert server.refusals == ["header-size"]
    server.wait_for_no_connection()


def test_what_follows_a_refused_header_is_not_refused_again(serve: Callable[..., Running]) -> None:
    server = serve(PATIENT)
    with server.connect() as client:
        client.sendall(b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 99 + b"\r\n" + b"not HTTP\r\n\r\n")
        assert_problem(read_to_end(client), 431, "header-too-large")
    assert server.refusals == ["header-size"]


def test_a_header_within_the_limits_passes(serve: Callable[..., Running]) -> None:
    server = serve(PATIENT)
    with server.connect() as client:
        client.sendall(post("/", b"1", *["a: b"] * 62))
        assert read_answer(client) == expected("/", b"1")
        client.sendall(post("/", bytes(100_000), "a: " + "b" * 16_000))
        assert read_answer(client) == expected("/", bytes(100_000))


def test_trailers_reach_no_application_and_no_end(serve: Callable[..., Running]) -> None:
    server = serve(PATIENT)
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"
    with server.connect() as client:
        client.sendall(head + b"signature: forged\r\n\r\n")
        assert read_answer(client) == expected("/", b"x")
        assert b"signature" not in dict(server.app.headers)
    with server.connect() as client:
        client.sendall(head + b"a: b\r\n" * 99)
        assert read_to_end(client).split()[1] in {b"200", b"431"}
    assert server.refusals == ["header-size"]


def test_what_is_not_http_gets_400(serve: Callable[..., Running]) -> None:
    server = serve(PATIENT)
    with server.connect() as client:
        client.sendall(b"\x16\x03\x01 this is not HTTP\r\n\r\n")
        assert_problem(read_to_end(client), 400, "malformed-request")
    with server.connect() as client:
        client.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")
        assert_problem(read_to_end(client), 400, "malformed-request")
    assert server.refusals == ["malformed", "malformed"]
    wait_until(lambda: server.app.disconnects == 1)


# Keep-alive and pipelining


def test_a_connection_serves_many_requests(serve: Callable[..., Running]) -> None:
    server = serve()
    with server.connect() as client:
        for number in range(20):
            body = bytes([number]) * 1000 * number
            client.sendall(post(f"/{number}", body))
            assert read_answer(client) == expected(f"/{number}", body)
            time.sleep(0.05)
    assert server.refusals == []


def test_pipelined_requests_are_answered_in_order(serve: Callable[..., Running]) -> None:
    server = serve(PATIENT)
    bodies = [bytes([number]) * 20_000 * (number % 3) for number in range(12)]
    with server.connect() as client:
        client.sendall(b"".join(post(f"/{n}", body) for n, body in enumerate(bodies)))
        for number, body in enumerate(bodies):
            assert read_answer(client) == expected(f"/{number}", body)
    assert server.refusals == []


@takes_seconds
def test_a_slow_answer_holds_up_the_next_without_harm(serve: Callable[..., Running]) -> None:
    server = serve(FAIR)
    bodies = [b"1" * 200_000, b"2" * 200_000]
    with server.connect() as client:
        sender = threading.Thread(
            target=client.sendall, args=(b"".join(post("/sleep/2", body) for body in bodies),)
        )
        sender.start()
        for body in bodies:
            assert read_answer(client) == expected("/sleep/2", body)
        sender.join(CAP)
    assert server.refusals == []


def test_too_many_pipelined_requests_are_answered_in_part(serve: Callable[..., Running]) -> None:
    server = serve(ConnectionLimits(max_pipelined=3))
    with server.connect() as client:
        client.sendall(b"".join(post(f"/{number}", b"") for number in range(50)))
        data = read_to_end(client)
    assert data.count(b"HTTP/1.1 200 OK") == 4
    assert server.refusals == ["pipelining"]


def test_an_answer_before_the_body_leaves_the_connection_usable(
    serve: Callable[..., Running],
) -> None:
    server = serve(PATIENT)
    with server.connect() as client:
        request = post("/early", b"x" * 100)
        client.sendall(request[:-50])
        assert read_answer(client) == (413, b"too large")
        client.sendall(request[-50:])
        client.sendall(post("/", b"1"))
        assert read_answer(client) == expected("/", b"1")


# Clients that do not read


def test_a_client_that_does_not_read_is_cut(serve: Callable[..., Running]) -> None:
    server = serve()
    with server.connect(receive_buffer=4096) as client:
        client.sendall(b"GET /big/400 HTTP/1.1\r\nHost: x\r\n\r\n")
        wait_until(lambda: server.refusals)
        server.wait_for_no_connection()
    assert server.refusals == ["unread"]


@takes_seconds
def test_answers_that_nobody_reads_do_not_outlive_keep_alive(
    serve: Callable[..., Running],
) -> None:
    """Closing waits for what is still to be sent, so it needs an end of its own."""
    server = serve(timeout_keep_alive=1)
    with server.connect(receive_buffer=4096) as client:
        wait_until(lambda: server.server.server_state.connections)
        (connection,) = server.server.server_state.connections
        state = server.server.server_state
        for answered in range(state.total_requests + 1, 10_000):
            client.sendall(b"GET /size/16384 HTTP/1.1\r\nHost: x\r\n\r\n")
            wait_until(functools.partial(lambda n: state.total_requests == n, answered))
            if connection.transport.get_write_buffer_size():
                break
        wait_until(lambda: server.refusals)
    assert server.refusals == ["unread"]


@takes_seconds
def test_a_slow_reader_above_the_least_rate_survives(serve: Callable[..., Running]) -> None:
    server = serve(FAIR)
    with server.connect(receive_buffer=65536) as client:
        client.sendall(b"GET /big/100 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        received = 0
        for _ in range(40):
            received += len(client.recv(20_000))
            time.sleep(0.05)
        while piece := client.recv(1 << 20):
            received += len(piece)
    assert received > 100 * 65536
    assert server.refusals == []


# The rest


def test_no_connection_leaves_its_bounds_as_a_websocket(serve: Callable[..., Running]) -> None:
    server = serve(PATIENT, ws="websockets-sansio")
    for protocol in ("websocket", "h2c"):
        with server.connect() as client:
            client.sendall(
                b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\n"
                + f"Upgrade: {protocol}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
                + post("/", b"1")
            )
            assert read_answer(client) == expected("/", b"")
            assert read_to_end(client) == b""


@takes_seconds
def test_many_slow_clients_do_not_keep_out_a_good_one(serve: Callable[..., Running]) -> None:
    server = serve(FAIR)
    with contextlib.ExitStack() as stack:
        for number in range(60):
            client = stack.enter_context(server.connect())
            client.sendall((b"", b"POST / HT", post("/", b"12")[:-1])[number % 3])
        good = stack.enter_context(server.connect())
        good.sendall(post("/", b"1"))
        assert read_answer(good) == expected("/", b"1")
        wait_until(lambda: len(server.server.server_state.connections) <= 1)
        wait_until(lambda: len(server.refusals) == 60)
        assert server.refusals.count("silent") == 20
        assert server.refusals.count("header-timeout") == 20
        assert server.refusals.count("body-timeout") == 20


@pytest.mark.parametrize(
    "settings",
    [
        {"header_timeout": 0},
        {"body_timeout": -1},
        {"write_timeout": 0},
        {"min_rate": -1},
        {"max_header_bytes": 0},
        {"max_headers": 0},
        {"max_pipelined": 0},
    ],
)
def test_limits_that_let_nothing_through_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        ConnectionLimits(**settings)


# How many


def get(link: socket.socket) -> bytes:
    link.sendall(b"GET /size/3 HTTP/1.1\r\nHost: x\r\n\r\n")
    return link.recv(65536)


def all_of(link: socket.socket) -> bytes:
    received = b""
    while data := link.recv(65536):
        received += data
    return received


def test_more_connections_than_allowed_are_answered_503(serve: Callable[..., Running]) -> None:
    limits = dataclasses.replace(PATIENT, connections=3)
    server = serve(limits)
    with contextlib.ExitStack() as stack:
        kept = [stack.enter_context(server.connect()) for _ in range(3)]
        wait_until(lambda: len(server.server.server_state.connections) == 3)
        answer = all_of(stack.enter_context(server.connect()))
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 5" in answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["retry_after"] == 5
        assert get(kept[0]).startswith(b"HTTP/1.1 200")
        kept[1].close()
        wait_until(lambda: len(server.server.server_state.connections) == 2)
        assert get(stack.enter_context(server.connect())).startswith(b"HTTP/1.1 200")
        assert server.refusals == ["too-many"]


def test_one_address_leaves_room_for_others_unless_it_is_a_proxy(
    serve: Callable[..., Running],
) -> None:
    for proxies, is_refused in (((), True), ((ip_network("127.0.0.0/31"),), False)):
        limits = dataclasses.replace(PATIENT, address_connections=2, trusted_proxies=proxies)
        server = serve(limits)
        with contextlib.ExitStack() as stack:
            for _ in range(2):
                assert get(stack.enter_context(server.connect())).startswith(b"HTTP/1.1 200")
            third = stack.enter_context(server.connect())
            if is_refused:
                assert all_of(third).startswith(b"HTTP/1.1 503")
                assert server.refusals == ["too-many-from-address"]
            else:
                assert get(third).startswith(b"HTTP/1.1 200")
            other = stack.enter_context(socket.socket())
            other.bind(("127.0.0.2", 0))
            other.connect(("127.0.0.1", server.port))
            assert get(other).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("size", "count", "status"), [(1, 300, 400), (1, 200, 200), (600, 999, 200)]
)
def test_many_small_chunks_are_refused(
    serve: Callable[..., Running], size: int, count: int, status: int
) -> None:
    server = serve(PATIENT)
    with server.connect() as link:
        link.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        with contextlib.suppress(OSError):
            link.sendall((b"%x\r\n" % size + b"x" * size + b"\r\n") * count + b"0\r\n\r\n")
        assert link.recv(65536).startswith(b"HTTP/1.1 %d" % status)
        assert server.refusals == (["body-chunks"] if status == 400 else [])
