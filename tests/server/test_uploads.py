"""Uploads through the API: what is taken, what is refused and why, what became of it."""

import gc
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import numpy as np
import pytest

from fedpress_protocols.errors import (
    BodyTooLarge,
    Conflict,
    DecodingError,
    DigestMismatch,
    FedpressError,
    Forbidden,
    InvalidUpdate,
    LengthRequired,
    MalformedRequest,
    RequestTimeout,
    RoundClosed,
    Unavailable,
    UnknownAssignment,
    UnknownDevice,
    UpdateConflict,
)
from fedpress_protocols.model import Model
from fedpress_protocols.signatures import Content
from tests.devices import ADMIN, Device, Operator, checked
from tests.server.in_process import Clock, Enrolled, Server, Start, history, include_one, ones

pytestmark = pytest.mark.both_databases

# Uploads


def test_the_same_bytes_get_the_same_answer_for_ever(
    operator: Operator, enrolled: Enrolled, model: Model, clock: Clock
) -> None:
    operator.begin(model, rounds=1, cohort={"size": 1, "minimum": 1})
    device = enrolled()
    assignment = device.assignment("digits")
    body = device.body_for(assignment, ones(model))
    first = device.put(assignment.assignment, body)
    assert first.status_code == 201
    clock.advance(5)
    again = device.put(assignment.assignment, body)
    assert (again.status_code, again.json()) == (200, first.json())
    answer = device.check_in("digits", assignment.assignment, wait=30)
    assert answer is not None
    assert answer.task.state == "finished"
    late = device.put(assignment.assignment, body)
    assert (late.status_code, late.json()) == (200, first.json())
    (status,) = history(operator)
    assert (status.received, status.included) == (1, 1)
    assert status.upload_bytes == 3 * len(body)


def test_other_bytes_conflict(operator: Operator, enrolled: Enrolled, model: Model) -> None:
    operator.begin(model)
    device = enrolled()
    assignment = device.assignment("digits")
    device.upload(assignment.assignment, device.body_for(assignment, ones(model)))
    with pytest.raises(UpdateConflict) as caught:
        device.upload(assignment.assignment, device.body_for(assignment, ones(model, 2.0)))
    assert caught.value.status == 409
    assert "send the first bytes again" in caught.value.hint


@pytest.mark.both_databases(short=True)
def test_uploads_at_once_are_counted_once(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model)
    device = enrolled()
    assignment = device.assignment("digits")
    body = device.body_for(assignment, ones(model))
    gate = threading.Barrier(8)

    def put() -> int:
        gate.wait()
        while (status := device.put(assignment.assignment, body).status_code) == 503:
            pass  # another is on its way
        return status

    with ThreadPoolExecutor(8) as pool:
        statuses = [future.result() for future in [pool.submit(put) for _ in range(8)]]
    assert sorted(statuses) == [200] * 7 + [201]
    assert history(operator)[0].received == 1


def unread(
    server: Server, device: Device, method: str, path: str, content: Content, **more: Any
) -> FedpressError:
    """The refusal of a request whose body the server must not touch, or `receive` says how."""
    signed = device.sign(method, path, content) | {"Host": "fedpress.test"}
    signed |= more.pop("headers", {})
    for name in more.pop("without", ()):
        del signed[name]
    sent: list[dict[str, Any]] = []

    async def untouched() -> dict[str, Any]:
        raise AssertionError("the body was read")

    receive = more.pop("receive", untouched)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(k.lower().encode(), v.encode()) for k, v in signed.items()],
        "client": ("test", 1),
        "server": ("fedpress.test", 80),
    }
    server.call(server.app, scope, receive, send)
    body = b"".join(message.get("body", b"") for message in sent)
    return FedpressError.from_problem(json.loads(body), sent[0]["status"])


def test_a_body_too_large_is_refused_unread(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model)
    device = enrolled()
    assignment = device.assignment("digits")
    limit = assignment.plan.max_body_bytes(model.spec)
    path = f"/v1/assignments/{assignment.assignment}/update"
    error = unread(http, device, "PUT", path, Content(bytes(32), limit + 1))
    assert isinstance(error, BodyTooLarge)
    assert (error.status, error.members["limit"]) == (413, limit)


def test_an_upload_without_a_length_is_refused_unread(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model)
    device = enrolled()
    path = f"/v1/assignments/{device.assignment('digits').assignment}/update"
    content = Content(bytes(32), 10)
    for how in (
        {"without": ["Content-Length"]},
        {"headers": {"Transfer-Encoding": "chunked"}},
    ):
        error = unread(http, device, "PUT", path, content, **how)
        assert isinstance(error, LengthRequired)
        assert error.status == 411


def test_a_stranger_s_upload_is_refused_unread(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model, clock: Clock
) -> None:
    operator.begin(model)
    device, other = enrolled(), enrolled()
    assignment = device.assignment("digits").assignment
    content = Content(bytes(32), 10)

    def refusal(who: Device, name: str) -> FedpressError:
        return unread(http, who, "PUT", f"/v1/assignments/{name}/update", content)

    assert isinstance(refusal(Device(http, clock), assignment), UnknownDevice)
    assert isinstance(refusal(other, assignment), Forbidden)
    assert isinstance(refusal(device, "unheard-of"), UnknownAssignment)


@pytest.mark.parametrize("headers", [{}, {"Expect": "100-continue"}])
def test_what_is_not_awaited_is_refused_unread(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model, headers: dict[str, str]
) -> None:
    operator.begin(model)
    device = enrolled()
    assignment = device.assignment("digits").assignment
    device.json("DELETE", f"/v1/assignments/{assignment}")
    path = f"/v1/assignments/{assignment}/update"
    error = unread(http, device, "PUT", path, Content(bytes(32), 10), headers=headers)
    assert isinstance(error, RoundClosed)
    other = enrolled()
    pending = include_one(other, model)
    path = f"/v1/assignments/{pending}/update"
    error = unread(http, other, "PUT", path, Content(bytes(32), 10), headers=headers)
    assert isinstance(error, UpdateConflict)


def test_a_body_has_its_time(start: Start, clock: Clock, model: Model) -> None:
    with start(upload_seconds=0.05) as http:
        operator = Operator(http)
        operator.begin(model)
        device = Device(http, clock)
        device.enrol(operator.token())
        assignment = device.assignment("digits")
        path = f"/v1/assignments/{assignment.assignment}/update"

        async def drip() -> dict[str, Any]:
            await anyio.sleep(0.01)
            return {"type": "http.request", "body": b"", "more_body": True}

        error = unread(http, device, "PUT", path, Content(bytes(32), 10), receive=drip)
        assert isinstance(error, RequestTimeout)
        assert error.status == 408
        device.upload(assignment.assignment, device.body_for(assignment, ones(model)))


@pytest.mark.parametrize("what", ["invalid", "another digest", "late"])
def test_a_refused_body_waits_for_no_collector(
    http: Server, operator: Operator, enrolled: Enrolled, what: str
) -> None:
    """An error leads to the frames that it passed. If one of these held the error, the body would
    be in memory, and counted nowhere, until the collector came."""
    model = Model.from_tensors({"weight": np.zeros(100_000, np.float32)})
    operator.begin(model)
    device = enrolled()
    assignment = device.assignment("digits").assignment
    body = device.body_for(device.assignment("digits"), ones(model))
    if what == "late":
        operator.post("/v1/admin/tasks/digits/cancel")
    sent = bytes([255]) + body[1:] if what == "invalid" else body
    signed = Content(bytes(32), len(sent)) if what == "another digest" else Content.of(sent)
    path = f"/v1/assignments/{assignment}/update"
    headers = device.sign("PUT", path, signed)
    gc.collect()
    gc.disable()
    try:
        refused = http.request("PUT", path, content=sent, headers=headers)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        holders = [each for each in gc.garbage if has_bytes(each, len(sent))]
        ours = [each for each in holders if not type(each).__module__.startswith("httpx")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert refused.status_code in (400, 409)
    assert not ours


def has_bytes(holder: object, num_bytes: int) -> bool:
    held = gc.get_referents(holder)
    return any(isinstance(each, bytes) and len(each) == num_bytes for each in held)


def test_a_wrong_digest_is_refused(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model)
    device = enrolled()
    assignment = device.assignment("digits")
    body = device.body_for(assignment, ones(model))
    path = f"/v1/assignments/{assignment.assignment}/update"
    signed = device.sign("PUT", path, Content(bytes(32), len(body)))
    with pytest.raises(DigestMismatch) as caught:
        checked(http.put(path, headers=signed, content=body))
    assert caught.value.status == 400
    assert history(operator)[0].upload_bytes == 0, "what the device has not signed is not counted"
    device.upload(assignment.assignment, body)
    assert history(operator)[0].upload_bytes == len(body)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 257.0, 3e38])
def test_an_update_out_of_bounds_is_refused_with_the_reason(
    operator: Operator, enrolled: Enrolled, model: Model, value: float
) -> None:
    operator.begin(model)
    device = enrolled()
    assignment = device.assignment("digits")
    honest = device.body_for(assignment, ones(model, 1.0))
    one, forged = (np.array([v], "<f4").tobytes() for v in (1.0, value))
    assert one in honest
    with pytest.raises(InvalidUpdate) as caught:
        device.upload(assignment.assignment, honest.replace(one, forged))
    assert caught.value.status == 422
    assert "NaN" in caught.value.detail or "larger than the plan's 256" in caught.value.detail
    device.upload(assignment.assignment, honest)


@pytest.mark.parametrize(
    "forge",
    [
        lambda body: b"",
        lambda body: body[:-1],
        lambda body: body + b"\x00",
        lambda body: b"\x01\x07" + body[2:],
        lambda body: b"\x01\x00\x00" + body[3:],
    ],
    ids=["empty", "short", "long", "other profile", "no examples"],
)
def test_a_malformed_update_is_refused_with_the_reason(
    operator: Operator, enrolled: Enrolled, model: Model, forge: Callable[[bytes], bytes]
) -> None:
    operator.begin(model)
    device = enrolled()
    assignment = device.assignment("digits")
    with pytest.raises(DecodingError) as caught:
        device.upload(assignment.assignment, forge(device.body_for(assignment, ones(model))))
    assert caught.value.status == 422
    assert caught.value.detail
    assert history(operator)[0].received == 0


def test_more_examples_than_the_plan_allows_are_refused(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model, max_examples=10)
    device = enrolled()
    assignment = device.assignment("digits")
    body = device.body_for(assignment, ones(model), num_examples=11)
    with pytest.raises(InvalidUpdate, match="11"):
        device.upload(assignment.assignment, body)


def test_too_many_bytes_at_once_are_put_off(start: Start, clock: Clock, model: Model) -> None:
    with start(max_bytes_in_flight=1024) as http:
        operator = Operator(http)
        operator.begin(model)
        device = Device(http, clock)
        device.enrol(operator.token())
        assignment = device.assignment("digits")
        in_flight = http.app.services.bytes_in_flight
        with in_flight.hold("another", 1000) as place:
            place.fill()
            with pytest.raises(Unavailable) as caught:
                device.upload(assignment.assignment, device.body_for(assignment, ones(model)))
        assert caught.value.members["retry_after"] > 0
        device.upload(assignment.assignment, device.body_for(assignment, ones(model)))


def test_a_second_body_at_a_time_is_put_off_unread(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model, cohort={"size": 1, "minimum": 1}, rounds=2)
    device, hold = enrolled(), http.app.services.bytes_in_flight.hold

    def refusal(name: str, body: bytes) -> FedpressError:
        path = f"/v1/assignments/{name}/update"
        return unread(http, device, "PUT", path, Content.of(body))

    first = device.assignment("digits")
    body = device.body_for(first, ones(model))
    with hold(first.assignment, 0):
        assert isinstance(refusal(first.assignment, body), Unavailable)
    device.upload(first.assignment, body)
    device.check_in("digits", first.assignment, wait=30)
    second = device.assignment("digits")
    with hold(f"settled of {device.client_id}", 0):
        assert isinstance(refusal(first.assignment, body), Unavailable)
        device.upload(second.assignment, device.body_for(second, ones(model)))
    assert device.put(first.assignment, body).status_code == 200


def test_wire_bytes_are_those_of_the_request(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model)
    device = enrolled()
    assignment = device.assignment("digits")
    body = device.body_for(assignment, ones(model))
    sent = device.put(assignment.assignment, body)
    request = sent.request
    lines = [
        f"PUT {request.url.raw_path.decode()} HTTP/1.1",
        *(f"{k}: {v}" for k, v in request.headers.items()),
    ]
    written = len("".join(line + "\r\n" for line in lines) + "\r\n") + len(body)
    (status,) = history(operator)
    assert (status.upload_bytes, status.wire_upload_bytes) == (len(body), written)


# Assignments


def test_a_declined_assignment_is_settled_and_its_place_free(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model, cohort={"size": 1, "minimum": 1})
    device, other = enrolled(), enrolled()
    assignment = device.assignment("digits")
    path = f"/v1/assignments/{assignment.assignment}"
    first = device.json("DELETE", path)
    assert first.json()["receipt"]["reason"] == "declined"
    assert device.json("DELETE", path).content == first.content
    assert device.check_in("digits") is None
    other.assignment("digits")
    with pytest.raises(RoundClosed):
        device.upload(assignment.assignment, device.body_for(assignment, ones(model)))


def test_an_operator_sees_why_assignments_were_declined_and_what_time_devices_need(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model, cohort={"size": 8, "minimum": 1}, round_seconds=60.0)
    operator.begin(model, "another")
    stated = [
        "?reason=too-slow&needed_seconds=90.5",
        "?reason=too-slow&needed_seconds=200",
        "?reason=training-failed",
        "?reason=of-a-later-release",
        "",
    ]
    for query in stated:
        device = enrolled()
        path = f"/v1/assignments/{device.assignment('digits').assignment}"
        first = device.json("DELETE", path + query)
        again = device.json("DELETE", f"{path}?reason=session-failed")
        assert again.content == first.content, "counted once, as it was first"
    counts = {"other": 1, "too-slow": 2, "training-failed": 1, "unstated": 1}
    shown = operator.get("/v1/tasks/digits/rounds/1")
    assert shown["declined"] == counts
    assert shown["durations"] == {
        "num_uploads": 0,
        "num_too_slow": 2,
        "median": 145.25,
        "longest": 200.0,
        "suggested_round_seconds": 260.0,
    }
    include_one(enrolled(), model)
    shown = operator.get("/v1/tasks/digits/rounds/1")["durations"]
    assert (shown["num_uploads"], shown["suggested_round_seconds"]) == (1, 260.0)
    (listed,) = operator.get("/v1/tasks/digits/rounds")
    assert listed["declined"] == counts
    (other,) = operator.get("/v1/tasks/another/rounds")
    assert (other["declined"], other["durations"]) == ({}, None)
    metrics = http.get("/metrics", headers=ADMIN).text
    for reason, count in counts.items():
        assert f'fedpress_declined_total{{reason="{reason}",task="digits"}} {count}.0' in metrics


def test_a_reason_that_is_no_word_is_refused_and_the_assignment_stays(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model)
    device = enrolled()
    assignment = device.assignment("digits")
    path = f"/v1/assignments/{assignment.assignment}"
    for query in ("?reason=Two%20words", "?reason=" + 33 * "a", "?needed_seconds=-1"):
        with pytest.raises(MalformedRequest):
            device.json("DELETE", path + query)
    assert device.assignment("digits") == assignment


def test_an_upload_cannot_be_declined(operator: Operator, enrolled: Enrolled, model: Model) -> None:
    operator.begin(model)
    device = enrolled()
    pending = include_one(device, model)
    with pytest.raises(Conflict, match="upload already"):
        device.json("DELETE", f"/v1/assignments/{pending}")


def test_a_receipt_is_for_its_own_device(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model, cohort={"size": 1, "minimum": 1}, rounds=1)
    device, other = enrolled(), enrolled()
    pending = include_one(device, model)
    device.check_in("digits", pending, wait=30)
    with pytest.raises(Forbidden):
        other.receipt(pending)
    with pytest.raises(UnknownAssignment):
        device.receipt("unheard-of")
    strange = other.check_in("digits", pending, "unheard-of")
    assert strange is not None
    assert strange.receipts == ()
