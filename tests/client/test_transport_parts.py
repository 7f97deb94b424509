"""Uploads by parts over HTTP: what goes out when, and what a server without them gets."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import httpx
import pytest

from fedpress_client import Retries
from fedpress_client.parts import FIRST_PART, LEAST_PART
from fedpress_protocols.errors import (
    MalformedRequest,
    NotFound,
    OffsetConflict,
    RoundClosed,
    TransportError,
    Unavailable,
    UnknownAssignment,
    UnknownPartial,
)
from fedpress_protocols.messages import PartialUpload, UploadAck
from tests.client.test_transport import Server, problem, raw

PART = LEAST_PART
BODY = bytes(range(256)) * 600
WHOLE = len(BODY)
DIGEST = hashlib.sha256(BODY).hexdigest()
WHERE = "/v1/assignments/a/partials"


def told(offset: int, *, status: int = 200, part_bytes: int = PART) -> httpx.Response:
    state = PartialUpload(
        partial="u",
        offset=offset,
        digest=hashlib.sha256(BODY[:offset]).hexdigest(),
        part_bytes=part_bytes,
        expires_at=0.0,
    )
    return httpx.Response(status, content=state.model_dump_json())


def held(offset: int, **changed: str) -> httpx.Response:
    headers: dict[str, Any] = {
        "upload_offset": str(offset),
        "upload_digest": hashlib.sha256(BODY[:offset]).hexdigest(),
        "upload_part_bytes": str(PART),
        "upload_expires": "1800000000.5",
    }
    return raw(status=204, **(headers | changed))


def acked() -> httpx.Response:
    done = UploadAck(assignment="a", upload=DIGEST, received_at=1.0)
    return httpx.Response(201, content=done.model_dump_json())


def asked(server: Server) -> list[str]:
    return [f"{each.method} {each.url.raw_path.decode()}" for each in server.requests]


def test_a_large_body_goes_by_parts() -> None:
    server = Server(told(0, status=201), told(PART), told(2 * PART), told(WHOLE), acked())
    transport = server.transport(parts_above=WHOLE - 1)
    assert transport.upload("a", BODY).upload == DIGEST
    assert asked(server) == [
        f"POST {WHERE}",
        f"PATCH {WHERE}/u?offset=0",
        f"PATCH {WHERE}/u?offset={PART}",
        f"PATCH {WHERE}/u?offset={2 * PART}",
        f"POST {WHERE}/u/completion",
    ]
    begun, *parts, completion = (request.content for request in server.requests)
    assert json.loads(begun) == {"trip": "update", "max_bytes": WHOLE, "upload": DIGEST}
    assert b"".join(parts) == BODY
    assert json.loads(completion) == {"num_bytes": WHOLE, "upload": DIGEST}
    assert server.requests[1].headers["content-type"] == "application/offset+octet-stream"
    assert transport.traffic.body_up == sum(len(request.content) for request in server.requests)


def test_a_body_that_is_not_large_goes_in_one() -> None:
    server = Server(acked())
    server.transport(parts_above=len(BODY)).upload("a", BODY)
    assert asked(server) == ["PUT /v1/assignments/a/update"]


def test_after_a_cut_the_server_is_asked_where_it_stands() -> None:
    server = Server(
        told(0, status=201),
        told(PART),
        httpx.ReadError("reset"),
        httpx.ConnectError("refused"),
        problem(Unavailable(retry_after=3)),
        held(2 * PART),
        told(WHOLE),
        httpx.ReadTimeout("lost"),
        held(WHOLE),
        acked(),
    )
    transport = server.transport(parts_above=9, retries=Retries(patience=1e9))
    assert transport.upload("a", BODY).upload == DIGEST
    assert asked(server)[2:] == [
        f"PATCH {WHERE}/u?offset={PART}",
        *[f"HEAD {WHERE}/u"] * 3,
        f"PATCH {WHERE}/u?offset={2 * PART}",
        f"POST {WHERE}/u/completion",
        f"HEAD {WHERE}/u",
        f"POST {WHERE}/u/completion",
    ]
    assert server.slept == [0.25, 0.5, 4.0, 0.25]


def test_of_parts_that_are_put_off_the_pauses_count_as_away() -> None:
    put_off = problem(Unavailable(retry_after=5))
    server = Server(told(0, status=201), told(PART), put_off, put_off, held(PART))
    server.answers += [told(2 * PART), told(WHOLE), acked()]
    transport = server.transport(parts_above=WHOLE - 1)
    transport.upload("a", BODY)
    assert len(server.slept) == 2
    assert transport.traffic.seconds_away == pytest.approx(sum(server.slept))


def test_a_part_that_was_kept_is_not_sent_again() -> None:
    server = Server(
        told(0, status=201),
        problem(OffsetConflict(offset=2 * PART)),
        held(2 * PART),
        told(WHOLE),
        acked(),
    )
    server.transport(parts_above=9).upload("a", BODY)
    assert f"PATCH {WHERE}/u?offset={2 * PART}" in asked(server)


def test_an_upload_that_is_gone_is_begun_again() -> None:
    server = Server(
        told(0, status=201),
        problem(UnknownPartial()),
        told(0, status=201),
        httpx.ReadError("reset"),
        raw(status=404),
        told(WHOLE),
        acked(),
    )
    server.transport(parts_above=9).upload("a", BODY)
    assert [line.split()[0] for line in asked(server)] == [
        *("POST", "PATCH", "POST", "PATCH", "HEAD", "POST", "POST")
    ]


def test_of_a_body_that_is_staged_nothing_is_sent() -> None:
    ack = UploadAck(assignment="a", upload=DIGEST, received_at=1.0)
    state = PartialUpload(
        partial=None,
        offset=0,
        digest=hashlib.sha256().hexdigest(),
        part_bytes=1,
        expires_at=0.0,
        ack=ack,
    )
    server = Server(httpx.Response(200, content=state.model_dump_json()))
    assert server.transport(parts_above=9).upload("a", BODY) == ack


@pytest.mark.parametrize("answer", [httpx.Response(404), problem(NotFound("no route"))])
def test_a_server_without_parts_gets_the_body_in_one(answer: httpx.Response) -> None:
    server = Server(answer, acked(), acked())
    transport = server.transport(parts_above=9)
    transport.upload("a", BODY)
    transport.upload("b", BODY)
    assert asked(server) == [
        f"POST {WHERE}",
        "PUT /v1/assignments/a/update",
        "PUT /v1/assignments/b/update",
    ]
    transport.ahead("c", 1000, lambda offset, most: b"", lambda name: None)  # nor does it ask again


@pytest.mark.parametrize("error", [UnknownAssignment(), RoundClosed(), MalformedRequest()])
def test_what_the_server_refuses_is_raised_as_of_an_upload_in_one(error: Exception) -> None:
    with pytest.raises(type(error)):
        Server(problem(error)).transport(parts_above=9).upload("a", BODY)
    with pytest.raises(type(error)):
        Server(told(WHOLE), problem(error)).transport(parts_above=9).upload("a", BODY)


def test_a_portal_is_no_place_to_stand() -> None:
    server = Server(
        told(0, status=201),
        httpx.Response(200, text="<html>log in here</html>"),
        held(0, upload_offset="many"),
        raw(status=204),
        held(0, upload_digest="none"),
        held(WHOLE),
        acked(),
    )
    server.transport(parts_above=9).upload("a", BODY)
    assert len(server.slept) == 4


def test_ahead_nothing_is_tried_again() -> None:
    server = Server(told(0, status=201), httpx.ReadError("reset"))
    transport = server.transport(parts_above=9)
    names: list[str] = []
    with pytest.raises(TransportError, match="reset"):
        transport.ahead("a", 1000, lambda offset, most: BODY[offset : offset + most], names.append)
    assert names == ["u"]
    assert server.slept == []


def test_dropping_what_is_gone_is_no_error() -> None:
    server = Server(raw(status=204), problem(UnknownPartial()), httpx.ReadError("reset"))
    transport = server.transport()
    transport.drop_parts("a", "u")
    transport.drop_parts("a", "u")
    with pytest.raises(TransportError):
        transport.drop_parts("a", "u")
    assert asked(server) == [f"DELETE {WHERE}/u"] * 3


def test_parts_that_are_all_requests_are_no_parts() -> None:
    server = Server(told(0, status=201, part_bytes=1), acked())
    server.transport(parts_above=9).upload("a", BODY)
    assert asked(server) == [f"POST {WHERE}", "PUT /v1/assignments/a/update"]


def test_a_server_that_goes_back_and_forth_has_no_patience_won() -> None:
    reset = httpx.ReadError("reset")
    server = Server(told(0, status=201), told(PART), reset)
    server.answers += [held(0), reset, held(0), told(PART), reset] * 9
    with pytest.raises(TransportError, match="reset"):
        server.transport(parts_above=9, retries=Retries(base=1, patience=10)).upload("a", BODY)
    assert server.slept == [0.5, 1, 2, 4]


def test_a_server_may_allow_less_than_the_first_part() -> None:
    assert FIRST_PART > PART
    server = Server(told(0, status=201), told(PART), told(2 * PART), told(WHOLE), acked())
    server.transport(parts_above=9).upload("a", BODY)
    assert [len(request.content) for request in server.requests[1:4]] == [
        PART,
        PART,
        WHOLE - 2 * PART,
    ]
