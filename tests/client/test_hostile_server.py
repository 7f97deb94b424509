"""A device and a server that means it ill: no answer crashes the one, keeps it busy or holds it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from fedpress_client import Client, HttpTransport, Retries
from fedpress_client.settings import Stopped
from fedpress_compression.compressors.quantize import Quantize
from fedpress_protocols.errors import TransportError
from fedpress_protocols.messages import RECALL_CONTEXT, CheckInRequest
from fedpress_protocols.model import Model
from fedpress_protocols.signatures import DeviceKey, sign_document, to_base64url
from tests.client.fake_server import TASK, FakeServer, RandomTrainer

NOW = 1_800_000_000.0
HUGE = 10**400
"""An integer that JSON may hold and no float."""
NEWS = f"/v1/tasks/{TASK}/check-in"


def problem(code: int, slug: str, **members: Any) -> httpx.Response:
    document = {"type": f"urn:fedpress:problem:{slug}", "detail": "d", **members}
    return answer(document, code)


def answer(document: Any, status: int = 200, **headers: str) -> httpx.Response:
    return raw(json.dumps(document).encode(), status=status, **headers)


def raw(*chunks: bytes, status: int = 200, **headers: str) -> httpx.Response:
    class Stream(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            yield from chunks

    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.Response(status, stream=Stream(), headers=named)


class Hostile:
    """Answers the first check-ins as `evil` says, then stops the client."""

    def __init__(self, *evil: Any) -> None:
        self.honest = FakeServer(
            Model.from_tensors({"w": np.zeros(50, np.float32)}), lambda r, a: [Quantize(bits=8)]
        )
        self.evil = list(evil)
        self.asked: list[str] = []
        self.headers: list[httpx.Headers] = []
        self.slept: list[float] = []
        self.client: Client | None = None

    def news(self, **changes: Any) -> httpx.Response:
        document = {
            "task": self.honest.summary.model_dump(mode="json"),
            "retry_after": 60.0,
            "server_time": 0.0,
        }
        return answer(document | changes)

    def assignment(self, **plan: Any) -> dict[str, Any]:
        assigned = self.honest.assignment_for("c")
        assert assigned is not None
        document: dict[str, Any] = assigned.model_dump(mode="json")
        document["plan"] |= plan
        return document

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(f"{request.method} {request.url.raw_path.decode()}")
        self.headers.append(request.headers)
        path = request.url.path
        if path == "/v1/enrol":
            self.honest.enrol(json.loads(request.content)["public_key"])
            self.honest.clients = {"": "c"}
            key = to_base64url(self.honest.key.public)
            return answer({"client_id": "c", "server_key": key, "server_time": 0.0}, 201)
        if path == NEWS:
            if self.evil:
                evil = self.evil.pop(0)
                result: httpx.Response = evil(self) if callable(evil) else evil
                return result
            assert self.client is not None
            self.client.stop()
            return raw(status=204, retry_after="1")
        return self.other(request)

    def other(self, request: httpx.Request) -> httpx.Response:
        return raw(status=204) if request.method == "DELETE" else problem(404, "not-found")

    def run(self, state_dir: Path) -> None:
        """A client, until it has had all of `evil`."""
        transport = HttpTransport(
            "http://server",
            DeviceKey.generate(),
            sleep=self.slept.append,
            clock=lambda: NOW,
            random=lambda: 0.5,
            http=httpx.MockTransport(self),
        )
        self.client = Client(
            "http://server",
            RandomTrainer(50),
            state_dir=state_dir,
            task=TASK,
            token="token",
            transport=transport,
            sleep=self.slept.append,
            clock=lambda: NOW,
            random=lambda: 0.0,
        )
        self.client.run()

    @property
    def others(self) -> list[str]:
        return [each for each in self.asked if NEWS not in each and "enrol" not in each]


def unreadable(compressor: dict[str, Any]) -> Callable[[Hostile], httpx.Response]:
    profiles = [{"name": "p0", "compressor": compressor}]
    return lambda server: server.news(assignment=server.assignment(profiles=profiles))


@pytest.mark.parametrize(
    ("evil", "pause"),
    [
        (problem(503, "unavailable", retry_after=HUGE), 0.25),
        (problem(503, "unavailable", retry_after=float("nan")), 0.25),
        (problem(503, "unavailable", retry_after=-3), 0.25),
        (problem(503, "of-tomorrow", status=float("inf")), 0.25),
        (raw(status=503, retry_after="nan"), 0.25),
        (raw(status=503, retry_after="1" * 5000), 0.25),
        (problem(401, "clock-skew", server_time=HUGE), 0.25),
        (problem(403, "device-not-approved", retry_after=HUGE), 30.0),
        (problem(403, "device-not-approved", retry_after="soon"), 30.0),
        (problem(403, "device-not-approved", retry_after=7), 7.0),
        (unreadable({"id": {}}), 60.0),
        (unreadable({"id": ["none"]}), 60.0),
        (unreadable({"id": "quantize", "clip": HUGE}), 60.0),
        (unreadable({"id": "error_feedback", "inner": {"id": "topk"}, "decay": HUGE}), 60.0),
    ],
)
def test_no_value_of_an_answer_crashes_or_hurries_a_device(
    tmp_path: Path, evil: Any, pause: float
) -> None:
    server = Hostile(evil)
    server.run(tmp_path)
    assert server.slept[0] == pause
    is_unreadable = callable(evil)
    declined = "DELETE /v1/assignments/c-1-1?reason=incompatible-plan"
    assert server.others == ([declined] if is_unreadable else [])


@pytest.mark.parametrize(
    "name",
    ["../../v1/enrol?x=1&y=", "a\nb", "\ud800", "a b\x00", "x" * 70_000, "", None, 7, {}, ["a"]],
)
def test_an_assignment_without_a_proper_id_is_in_no_request(tmp_path: Path, name: Any) -> None:
    server = Hostile(lambda server: server.news(assignment={"assignment": name}))
    server.run(tmp_path)
    assert server.others == []
    assert server.slept[0] == 60.0


def test_a_range_that_no_file_has_is_no_range(tmp_path: Path) -> None:
    class Ranges(Hostile):
        def other(self, request: httpx.Request) -> httpx.Response:
            body = self.honest.model.to_bytes()
            if len(self.others) > 1:
                return raw(body) if request.method == "GET" else super().other(request)
            return raw(body, status=206, content_range=f"bytes {'9' * 5000}-5/10")

    server = Ranges(lambda server: server.news(assignment=server.assignment()))
    server.run(tmp_path)
    assert server.others[0] == server.others[1]
    assert server.slept[0] == 0.25


def test_a_device_keeps_no_cookies(tmp_path: Path) -> None:
    def cookies(server: Hostile) -> httpx.Response:
        response = server.news()
        many = [("Set-Cookie", f"c{index}={'v' * 3900}; Max-Age=999999") for index in range(20)]
        response.headers = httpx.Headers([*response.headers.multi_items(), *many])
        return response

    server = Hostile(*[cookies] * 3)
    server.run(tmp_path)
    assert len(server.asked) == 5
    assert not any("cookie" in headers for headers in server.headers)


def test_recalls_without_end_take_no_pause_away(tmp_path: Path) -> None:
    number = 0

    def recalled(server: Hostile) -> httpx.Response:
        nonlocal number
        number += 1
        restore = {"number": number, "epoch": f"e{number}", "backup_at": 1, "restored_at": 2}
        recall = {"client_id": "c", "task": TASK, "restore": restore, "unknown": [], "issued_at": 3}
        both = sign_document(recall, server.honest.key, context=RECALL_CONTEXT)
        signed = {"recall": recall, "key_id": both["key_id"], "signature": both["signature"]}
        return server.news(recall=signed)

    server = Hostile(*[recalled] * 8, lambda server: server.news(), *[recalled] * 4)
    server.run(tmp_path)
    # Each is confirmed by a second check-in. The first of several in a row is followed at once.
    assert server.slept == [*[60.0] * 5, 1.0]


# Answers without an end


class Clock:
    """Time that passes while answers are read."""

    def __init__(self) -> None:
        self.now = NOW
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def transport(self, handler: Callable[[httpx.Request], httpx.Response]) -> HttpTransport:
        return HttpTransport(
            "http://server",
            DeviceKey.generate(),
            sleep=self.slept.append,
            clock=self,
            random=lambda: 0.5,
            retries=Retries(patience=10),
            http=httpx.MockTransport(handler),
        )


@pytest.mark.parametrize(("step", "is_read"), [(0.5, False), (0.001, True)])
def test_an_answer_by_drops_is_left(step: float, is_read: bool) -> None:
    clock, served = Clock(), 0
    body = b" " * 20_000 + json.dumps([]).encode()

    class Drops(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            nonlocal served
            for byte in body:
                clock.now += step
                served += 1
                yield bytes([byte])

    transport = clock.transport(lambda request: httpx.Response(200, stream=Drops()))
    if is_read:
        assert transport.tasks() == ()
    else:
        with pytest.raises(TransportError, match=r"of /v1/tasks came in 30 s, fewer than 256"):
            transport.tasks()
        assert served < 1000
        assert len(clock.slept) == 5


def test_a_file_that_never_comes_to_its_end_is_left() -> None:
    clock, asked = Clock(), 0

    def half(request: httpx.Request) -> httpx.Response:
        nonlocal asked
        asked += 1
        if "range" in request.headers:
            return problem(416, "not-found")
        return raw(b"x" * 500, content_length="1000")

    with pytest.raises(TransportError, match=r"broke off|shorter"):
        clock.transport(half).model("0" * 64, 10_000, TASK)
    assert clock.slept == [0.25, 0.5, 1.0, 2.0, 4.0]
    assert asked == 6


def test_a_list_of_tasks_ends_at_some_bytes() -> None:
    page = 0
    summary = Hostile().honest.summary.model_dump(mode="json")

    def many(request: httpx.Request) -> httpx.Response:
        nonlocal page
        page += 1
        rows = [
            summary | {"task": f"t{page}-{row:04d}", "reason": "r" * 7500} for row in range(1000)
        ]
        return answer(rows)

    assert len(Clock().transport(many).tasks()) == 3000
    assert page == 3


class Endless:
    """A server on a real socket, whose interim answers never end."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection = self.socket.accept()[0]
            except OSError:
                return
            with connection:
                try:
                    while True:
                        connection.sendall(b"HTTP/1.1 103 Early Hints\r\nX: y\r\n\r\n")
                        self.clock.now += 1.0
                except OSError:
                    pass

    def close(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        self.thread.join()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def endless(clock: Clock) -> Iterator[Endless]:
    server = Endless(clock)
    yield server
    server.close()


def test_interim_answers_without_end_are_left(clock: Clock, endless: Endless) -> None:
    transport = HttpTransport(
        endless.url,
        DeviceKey.generate(),
        sleep=clock.slept.append,
        clock=clock,
        random=lambda: 0.5,
        retries=Retries(patience=0),
    )
    with pytest.raises(TransportError, match="no end"):
        transport.check_in(TASK, CheckInRequest(wait=20))
    transport.close()


def test_a_stop_is_looked_for_while_an_answer_takes_long(clock: Clock, endless: Endless) -> None:
    def stop(seconds: float) -> None:
        assert seconds == 0.0
        raise Stopped

    transport = HttpTransport(
        endless.url, DeviceKey.generate(), sleep=stop, clock=clock, timeout=1e6
    )
    with pytest.raises(Stopped):
        transport.tasks()
    transport.close()
