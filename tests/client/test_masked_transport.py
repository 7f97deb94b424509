"""The verbs of a masked session over HTTP, on a link that is not the server's alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from fedpress_client.transport import HttpTransport, Retries
from fedpress_protocols.errors import Forbidden, TransportError
from fedpress_protocols.signatures import DeviceKey

OCTETS = "application/octet-stream"


def reply(status: int, content: bytes = b"", **headers: str) -> httpx.Response:
    """An answer whose body is still to be read, as over a socket."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.Response(status, headers=named, stream=httpx.ByteStream(content))


def link(answer: Callable[[httpx.Request], httpx.Response]) -> HttpTransport:
    return HttpTransport(
        "http://fedpress.test",
        DeviceKey.generate(),
        http=httpx.MockTransport(answer),
        retries=Retries(0.0, 0.0, 0.0),
        sleep=lambda seconds: None,
    )


def test_a_message_is_heard_as_its_bytes() -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(f"{request.method} {request.url.raw_path.decode()}")
        return reply(200, b"\x02abc", content_type=OCTETS)

    assert link(answer).hear("a1", "advertise", 20.0) == b"\x02abc"
    assert asked == ["GET /v1/assignments/a1/session/advertise?wait=20"]


@pytest.mark.parametrize(("header", "seconds"), [({"retry_after": "3"}, 3.0), ({}, 0.0)])
def test_nothing_yet_says_when_to_ask_again(header: dict[str, Any], seconds: float) -> None:
    transport = link(lambda request: reply(204, **header))
    assert transport.hear("a1", "offer", 0.0) == seconds


def test_a_page_of_a_portal_is_no_message() -> None:
    tries: list[int] = []

    def answer(request: httpx.Request) -> httpx.Response:
        tries.append(1)
        if len(tries) < 3:
            return reply(200, b"<html>", content_type="text/html")
        return reply(200, b"\x01", content_type=OCTETS)

    assert link(answer).hear("a1", "offer", 0.0) == b"\x01"
    assert len(tries) == 3


def test_what_is_said_goes_out_as_it_is_and_may_be_refused() -> None:
    bodies: list[bytes] = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(request.read())
        assert request.headers["content-type"] == OCTETS
        return reply(204)

    link(answer).say("a1", "shares", b"\x11xyz")
    assert bodies == [b"\x11xyz"]
    problem = json.dumps(Forbidden("not you").to_problem()).encode()
    refusing = link(lambda request: reply(403, problem, content_type="application/problem+json"))
    with pytest.raises(Forbidden, match="not you"):
        refusing.ready("a1")


def test_a_membership_must_be_one() -> None:
    with pytest.raises(TransportError):
        link(lambda request: reply(200, b'{"population": "x"}')).certificate()
