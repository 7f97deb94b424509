"""Uploads by parts: taken in order and once, resumed from what is durable, counted when whole."""

import asyncio
import hashlib
import itertools
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import httpx
import numpy as np
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedpress_protocols.errors import (
    BodyTooLarge,
    Conflict,
    DecodingError,
    DigestMismatch,
    Forbidden,
    InvalidSignature,
    MalformedRequest,
    OffsetConflict,
    ReplayedRequest,
    RoundClosed,
    ServerError,
    StorageFull,
    Unavailable,
    UnknownDevice,
    UnknownPartial,
    UpdateConflict,
)
from fedpress_protocols.messages import Assignment, PartialUpload, UploadAck
from fedpress_protocols.model import Model
from fedpress_protocols.signatures import Content
from fedpress_server.intake.resumable import MAX_PER_DEVICE, Resumable
from fedpress_server.storage import partials, records
from fedpress_server.storage.partials import PartialRecord
from fedpress_server.storage.payloads import Payloads
from fedpress_server.storage.records import AssignmentRecord
from tests.devices import Device, Operator, checked
from tests.lengths import examples
from tests.server.in_process import Clock, Enrolled, Server, Start, history, ones

pytestmark = pytest.mark.both_databases


class Parts:
    """One device's side of an upload by parts."""

    def __init__(self, device: Device, assignment: Assignment, body: bytes) -> None:
        self.device, self.body = device, body
        self.assignment = assignment.assignment
        self.path = f"/v1/assignments/{self.assignment}/partials"
        self.digest = hashlib.sha256(body).hexdigest()
        self.partial = ""

    def ask(self, max_bytes: int | None = None, **fields: str) -> httpx.Response:
        quoted = "".join(f', "{name}": "{value}"' for name, value in fields.items())
        most = len(self.body) if max_bytes is None else max_bytes
        return self.device.json("POST", self.path, f'{{"max_bytes": {most}{quoted}}}')

    def begin(self, max_bytes: int | None = None, **fields: str) -> PartialUpload:
        told = PartialUpload.model_validate_json(self.ask(max_bytes, **fields).content)
        self.partial = told.partial or ""
        return told

    def where(self, offset: int) -> str:
        return f"{self.path}/{self.partial}?offset={offset}"

    def send(self, start: int, stop: int, **how: Any) -> PartialUpload:
        answer = self.device.request("PATCH", self.where(start), self.body[start:stop], **how)
        return PartialUpload.model_validate_json(checked(answer).content)

    def held(self) -> tuple[int, str]:
        answer = self.device.request("HEAD", f"{self.path}/{self.partial}")
        if answer.status_code == 404:
            raise UnknownPartial
        assert answer.status_code == 204
        return int(answer.headers["upload-offset"]), answer.headers["upload-digest"]

    def complete(self, num_bytes: int | None = None, digest: str = "") -> httpx.Response:
        length = len(self.body) if num_bytes is None else num_bytes
        said = f'{{"num_bytes": {length}, "upload": "{digest or self.digest}"}}'
        return self.device.json("POST", f"{self.path}/{self.partial}/completion", said)

    def drop(self) -> None:
        checked(self.device.request("DELETE", f"{self.path}/{self.partial}"))


@pytest.fixture
def parts(operator: Operator, enrolled: Enrolled, model: Model) -> Parts:
    operator.begin(model, rounds=1, cohort={"size": 1, "minimum": 1})
    device = enrolled()
    assignment = device.assignment("digits")
    return Parts(device, assignment, device.body_for(assignment, ones(model)))


def prefix(body: bytes, stop: int) -> tuple[int, str]:
    return stop, hashlib.sha256(body[:stop]).hexdigest()


def files(http: Server) -> list[Path]:
    root = http.app.services.settings.data_dir / "parts"
    return sorted(path for path in root.rglob("*") if path.is_file())


@pytest.mark.both_databases
def test_parts_are_an_upload_once_they_are_complete(
    http: Server, parts: Parts, operator: Operator
) -> None:
    assert parts.begin().offset == 0
    size = len(parts.body)
    cuts = [0, 1, size // 2, size]
    for start, stop in itertools.pairwise(cuts):
        assert parts.send(start, stop).offset == stop
        assert parts.held() == prefix(parts.body, stop)
    assert history(operator)[0].received == 0
    assert len(files(http)) == 3
    answer = parts.complete()
    assert answer.status_code == 201
    assert UploadAck.model_validate_json(answer.content).upload == parts.digest
    assert files(http) == []
    again = parts.complete()
    assert (again.status_code, again.json()) == (200, answer.json())
    one_shot = parts.device.put(parts.assignment, parts.body)
    assert (one_shot.status_code, one_shot.json()) == (200, answer.json())
    assert parts.device.check_in("digits", parts.assignment, wait=30) is not None
    (status,) = history(operator)
    assert (status.received, status.included) == (1, 1)
    assert status.upload_bytes == 2 * size
    assert status.wire_upload_bytes > status.upload_bytes


def test_the_model_is_that_of_an_upload_in_one(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    models = []
    for task in ("whole", "parts"):
        operator.begin(model, task, rounds=1, cohort={"size": 1, "minimum": 1})
        device = enrolled()
        assignment = device.assignment(task)
        body = device.body_for(assignment, ones(model, 0.5), num_examples=3)
        if task == "whole":
            device.upload(assignment.assignment, body)
        else:
            sender = Parts(device, assignment, body)
            sender.begin()
            sender.send(0, 7)
            sender.send(7, len(body))
            sender.complete()
        answer = device.check_in(task, assignment.assignment, wait=30)
        assert answer is not None
        assert answer.task.state == "finished"
        models.append(answer.task.model)
    assert models[0] == models[1]


@pytest.mark.both_databases
def test_begun_again_it_is_found(parts: Parts) -> None:
    begun = parts.begin()
    parts.send(0, 9)
    again = parts.ask()
    assert again.status_code == 200
    found = PartialUpload.model_validate_json(again.content)
    assert (found.partial, found.offset, found.digest) == (begun.partial, *prefix(parts.body, 9))


@pytest.mark.both_databases
def test_a_longer_body_begins_anew(http: Server, parts: Parts) -> None:
    first = parts.begin(len(parts.body) - 1)
    parts.send(0, 9)
    second = parts.begin()
    assert second.partial != first.partial
    assert second.offset == 0
    assert files(http) == []


def test_of_what_is_staged_nothing_is_to_be_sent(parts: Parts) -> None:
    parts.device.upload(parts.assignment, parts.body)
    told = parts.begin(upload=parts.digest)
    assert told.partial is None
    assert told.ack is not None
    assert told.ack.upload == parts.digest
    with pytest.raises(UpdateConflict, match="came before"):
        parts.begin(upload="0" * 64)


def test_a_part_elsewhere_is_refused_before_it_is_read(http: Server, parts: Parts) -> None:
    parts.begin()
    parts.send(0, 9)
    for wrong in (0, 8, 10, len(parts.body), 2**40):
        with pytest.raises(OffsetConflict) as caught:
            unread(http, parts, wrong)
        assert caught.value.members["offset"] == 9
    assert parts.held() == prefix(parts.body, 9)


def unread(http: Server, parts: Parts, offset: int) -> None:
    """Announce a part that cannot be read; raises what the server says."""
    path = f"{parts.path}/{parts.partial}"
    target = f"{path}?offset={offset}"
    signed = parts.device.sign("PATCH", target, Content.of(b"part")) | {"host": "fedpress.test"}
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "PATCH",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": f"offset={offset}".encode(),
        "headers": [(k.lower().encode(), v.encode()) for k, v in signed.items()],
        "client": ("test", 1),
        "server": ("fedpress.test", 80),
    }
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        raise AssertionError("the body was read")

    async def send(message: Any) -> None:
        sent.append(message)

    http.call(http.app, scope, receive, send)
    headers = {k.decode(): v.decode() for k, v in sent[0]["headers"]}
    checked(httpx.Response(sent[0]["status"], headers=headers, content=sent[1]["body"]))


def test_a_changed_part_is_not_kept(parts: Parts) -> None:
    parts.begin()
    path, part = parts.where(0), parts.body[:20]
    signed = parts.device.sign("PATCH", path, Content.of(part))
    changed = bytes([part[0] ^ 1]) + part[1:]
    with pytest.raises(DigestMismatch):
        checked(parts.device.http.request("PATCH", path, content=changed, headers=signed))
    forged = signed | {"Signature": signed["Signature"].replace("fp=:", "fp=:A")[:-2] + ":"}
    with pytest.raises(InvalidSignature):
        checked(parts.device.http.request("PATCH", path, content=part, headers=forged))
    for offset in (1, 20):
        elsewhere = parts.where(offset)
        with pytest.raises(InvalidSignature):
            checked(parts.device.http.request("PATCH", elsewhere, content=part, headers=signed))
    assert parts.held() == prefix(parts.body, 0)


def test_a_part_replayed_is_refused(parts: Parts) -> None:
    parts.begin()
    path, part = parts.where(0), parts.body[:20]
    signed = parts.device.sign("PATCH", path, Content.of(part))
    checked(parts.device.http.request("PATCH", path, content=part, headers=signed))
    with pytest.raises(ReplayedRequest):
        checked(parts.device.http.request("PATCH", path, content=part, headers=signed))
    assert parts.held() == prefix(parts.body, 20)


def test_nobody_else_gets_at_it(parts: Parts, enrolled: Enrolled) -> None:
    parts.begin()
    parts.send(0, 9)
    stranger = enrolled()
    path = f"{parts.path}/{parts.partial}"
    for method, where, body in (
        ("POST", parts.path, b'{"max_bytes": 9}'),
        ("PATCH", parts.where(9), parts.body[9:]),
        ("DELETE", path, b""),
        ("POST", f"{path}/completion", b'{"num_bytes": 9, "upload": "' + b"0" * 64 + b'"}'),
    ):
        with pytest.raises(Forbidden):
            checked(stranger.request(method, where, body, {"Content-Type": "application/json"}))
    assert stranger.request("HEAD", path).status_code == 403
    assert parts.held() == prefix(parts.body, 9)


def test_an_upload_goes_by_its_own_assignment_alone(
    http: Server, operator: Operator, parts: Parts, model: Model
) -> None:
    operator.begin(model, "other", rounds=1, cohort={"size": 1, "minimum": 1})
    device = parts.device
    other = Parts(device, device.assignment("other"), parts.body)
    parts.begin()
    other.partial = parts.partial
    with pytest.raises(UnknownPartial):
        other.send(0, 9)
    with pytest.raises(UnknownPartial):
        other.complete()
    with pytest.raises(UnknownPartial):
        other.drop()
    assert parts.held() == prefix(parts.body, 0)


def test_a_revoked_device_goes_no_further(http: Server, parts: Parts, operator: Operator) -> None:
    parts.begin()
    parts.send(0, 9)
    operator.post(f"/v1/admin/clients/{parts.device.client_id}/revoke")
    with pytest.raises(UnknownDevice):
        parts.send(9, 12)
    with pytest.raises(UnknownDevice):
        parts.complete()


def test_a_completion_has_to_name_what_is_there(parts: Parts, operator: Operator) -> None:
    parts.begin()
    size = len(parts.body)
    parts.send(0, size - 1)
    for length in (size - 2, size):
        with pytest.raises(OffsetConflict) as caught:
            parts.complete(length)
        assert caught.value.members["offset"] == size - 1
    parts.send(size - 1, size)
    with pytest.raises(DigestMismatch, match="begin it again"):
        parts.complete(digest="0" * 64)
    assert parts.held() == prefix(parts.body, size)
    assert history(operator)[0].received == 0
    assert parts.complete().status_code == 201


def test_a_body_that_the_plan_does_not_admit_goes_with_its_parts(
    http: Server, parts: Parts, operator: Operator
) -> None:
    parts.body = b"\x01\x00\x01" + b"\xff" * (len(parts.body) - 3)
    parts.digest = hashlib.sha256(parts.body).hexdigest()
    parts.begin()
    parts.send(0, len(parts.body))
    with pytest.raises(DecodingError):
        parts.complete()
    with pytest.raises(UnknownPartial):
        parts.held()
    assert files(http) == []
    assert history(operator)[0].received == 0


def test_other_bytes_conflict(parts: Parts) -> None:
    parts.begin()
    parts.send(0, len(parts.body))
    parts.device.upload(parts.assignment, other := bytes([*parts.body[:-1], parts.body[-1] ^ 1]))
    assert other != parts.body
    with pytest.raises(UpdateConflict):
        parts.complete()


def test_a_round_that_is_over_takes_no_part(parts: Parts, clock: Clock) -> None:
    parts.begin()
    parts.send(0, 9)
    clock.advance(61)
    with pytest.raises(RoundClosed):
        parts.send(9, 12)
    with pytest.raises(RoundClosed):
        parts.begin()


@pytest.mark.parametrize(
    ("limits", "number"), [({"max_part_bytes": 64 * 1024}, 64 * 1024), ({}, 8 * 2**20)]
)
def test_a_part_has_a_length(
    start: Start, model: Model, clock: Clock, limits: dict[str, int], number: int
) -> None:
    with start(**limits) as http:
        parts = begun(http, clock, model)
        assert parts.begin().part_bytes == number
        with pytest.raises(MalformedRequest, match="no bytes"):
            parts.send(0, 0)
        with pytest.raises(BodyTooLarge):
            checked(parts.device.request("PATCH", parts.where(0), bytes(number + 1)))
        with pytest.raises(BodyTooLarge, match="of an upload of at most"):
            checked(parts.device.request("PATCH", parts.where(0), bytes(len(parts.body) + 1)))
        with pytest.raises(BodyTooLarge, match="where the plan allows"):
            parts.begin(10**6)


def test_there_are_no_more_parts_than_so_many(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedpress_server.intake.resumable.MAX_PARTS", 3)
    parts.begin()
    for start in range(3):
        parts.send(start, start + 1)
    with pytest.raises(BodyTooLarge, match="send longer ones"):
        parts.send(3, 4)


def begun(http: Server, clock: Clock, model: Model, task: str = "digits") -> Parts:
    operator = Operator(http)
    operator.begin(model, task, rounds=1, cohort={"size": 1, "minimum": 1})
    device = Device(http, clock)
    device.enrol(operator.token())
    assignment = device.assignment(task)
    return Parts(device, assignment, device.body_for(assignment, ones(model)))


@pytest.mark.both_databases
def test_the_server_promises_no_more_than_it_has(start: Start, clock: Clock) -> None:
    model = Model.from_tensors({"w": np.linspace(-1, 1, 60, dtype=np.float32)})
    with start(max_partial_bytes=1024) as http:
        parts = [begun(http, clock, model, f"task{index}") for index in range(5)]
        room = 1024 // len(parts[0].body)
        for sender in parts[:room]:
            sender.begin()
        with pytest.raises(Unavailable, match="in all are under way") as caught:
            parts[room].begin()
        assert caught.value.members["retry_after"] == 30
        parts[0].drop()
        parts[room].begin()


@pytest.mark.both_databases
def test_a_device_has_no_more_than_so_many_under_way(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model, clock: Clock
) -> None:
    device = enrolled()
    parts = []
    for index in range(MAX_PER_DEVICE + 1):
        task = f"task{index}"
        operator.begin(model, task, rounds=1, cohort={"size": 1, "minimum": 1})
        assignment = device.assignment(task)
        parts.append(Parts(device, assignment, device.body_for(assignment, ones(model))))
    for sender in parts[:-1]:
        sender.begin()
    with pytest.raises(Unavailable, match="of this device"):
        parts[-1].begin()
    parts[0].begin()
    parts[0].send(0, len(parts[0].body))
    parts[0].complete()
    parts[-1].begin()


@pytest.mark.both_databases
def test_an_upload_expires_and_every_part_puts_that_off(
    start: Start, clock: Clock, model: Model
) -> None:
    with start(partial_seconds=20.0) as http:
        parts = begun(http, clock, model)
        assert parts.begin().expires_at == clock.now + 20
        clock.advance(19)
        assert parts.send(0, 9).expires_at == clock.now + 20
        clock.advance(19)
        assert parts.held() == prefix(parts.body, 9)
        clock.advance(1)
        with pytest.raises(UnknownPartial):
            parts.send(9, 12)
        assert len(files(http)) == 1
        http.call(http.app.services.resumable.sweep)
        assert files(http) == []
        assert parts.begin().offset == 0


@pytest.mark.both_databases
def test_what_nobody_awaits_any_more_is_swept(http: Server, parts: Parts, clock: Clock) -> None:
    parts.begin()
    parts.send(0, 9)
    http.call(http.app.services.resumable.sweep)
    assert len(files(http)) == 1
    checked(parts.device.request("DELETE", f"/v1/assignments/{parts.assignment}"))
    http.call(http.app.services.resumable.sweep)
    assert files(http) == []
    with pytest.raises(UnknownPartial):
        parts.held()


def test_what_is_spent_is_dropped_together(
    http: Server, parts: Parts, clock: Clock, dialect: str
) -> None:
    services = http.app.services
    key, client_id = ("digits", 1, 1), str(parts.device.client_id)

    def fill(connection: sa.Connection) -> None:
        for turn in range(1, 31):
            of, until = f"a{turn}", clock() + (1 if turn == 7 else -1)
            given = AssignmentRecord(of, *key, client_id, turn, "only", clock(), None, turn)
            records.add_assignments(connection, [given])
            empty = (9, 0, partials.NOTHING, 0)
            partials.add(connection, PartialRecord(f"p{turn}", of, "update", *empty, until))

    http.call(services.database.write, fill)
    statements = list[str]()

    def noted(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        statements.append(statement)

    sa.event.listen(sa.Engine, "before_cursor_execute", noted)
    try:
        http.call(services.resumable.sweep)
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", noted)
    assert http.call(services.database.read, partials.names) == {"p7"}
    of_uploads = [each for each in statements if "partial_uploads" in each]
    assert len(of_uploads) == 4  # all, the spent, those still spent, their deletion


def test_an_upload_that_a_newer_request_takes_waits_for_the_next_sweep(
    http: Server, parts: Parts, clock: Clock
) -> None:
    database, resumable = http.app.services.database, http.app.services.resumable
    parts.begin()
    clock.advance(3600)

    async def take() -> None:
        async with resumable._turn(parts.partial):
            pass

    async def overtaken() -> None:
        async with resumable._turn(parts.partial):
            sweep = asyncio.create_task(resumable._drop_spent([parts.partial], clock()))
            await asyncio.sleep(0)
            newer = asyncio.create_task(take())
            await asyncio.sleep(0)
        await asyncio.gather(sweep, newer)

    http.call(overtaken)
    assert http.call(database.read, partials.names) == {parts.partial}
    http.call(resumable.sweep)
    assert http.call(database.read, partials.names) == set()


@pytest.mark.both_databases
def test_an_upload_outlives_the_server(start: Start, clock: Clock, model: Model) -> None:
    with start() as http:
        parts = begun(http, clock, model)
        parts.begin()
        parts.send(0, 5)
        parts.send(5, 30)
        (http.app.services.settings.data_dir / "parts" / "nobodys").mkdir()
    clock.advance(1)
    with start() as http:
        parts.device.http = http
        assert parts.held() == prefix(parts.body, 30)
        assert len(list((http.app.services.settings.data_dir / "parts").iterdir())) == 1
        parts.send(30, len(parts.body))
        assert parts.complete().status_code == 201


def test_parts_lost_from_the_store_are_sent_again(http: Server, parts: Parts) -> None:
    parts.begin()
    parts.send(0, 9)
    parts.send(9, len(parts.body))
    files(http)[0].unlink()
    with pytest.raises(UnknownPartial):
        parts.complete()
    assert parts.begin().offset == 0
    parts.send(0, len(parts.body))
    where = files(http)[0]
    where.write_bytes(bytes(len(parts.body)))
    with pytest.raises(UnknownPartial):
        parts.complete()


def test_a_full_disk_keeps_what_there_was(
    http: Server, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts.begin()
    parts.send(0, 9)
    payloads = http.app.services.payloads

    def full(name: str, data: bytes) -> None:
        raise StorageFull("no space is left on the server", retry_after=60)

    with monkeypatch.context() as patched:
        patched.setattr(payloads, "put", full, raising=False)
        with pytest.raises(StorageFull):
            parts.send(9, 12)
        assert parts.held() == prefix(parts.body, 9)
    parts.send(9, len(parts.body))
    with monkeypatch.context() as patched:
        patched.setattr(payloads, "put", full, raising=False)
        with pytest.raises(StorageFull):
            parts.complete()
    assert parts.held() == prefix(parts.body, len(parts.body))
    assert parts.complete().status_code == 201


def test_a_newer_request_takes_over_from_a_connection_that_stalls(
    http: Server, parts: Parts
) -> None:
    """As after a link was lost and the server has not noticed: its half of a part is given up."""
    parts.begin()
    parts.send(0, 9)
    stalled = Stalled(http, parts, 9, 20)
    assert parts.held() == prefix(parts.body, 9)
    assert stalled.status() == 408
    stalled = Stalled(http, parts, 9, 20)
    assert parts.send(9, 15).offset == 15
    assert stalled.status() == 408
    assert http.app.services.bytes_in_flight._held == 0
    parts.send(15, len(parts.body))
    assert parts.complete().status_code == 201


class Stalled:
    """A request whose body stops half-way, on a connection that stays open."""

    def __init__(self, http: Server, parts: Parts, start: int, stop: int) -> None:
        path, body = f"{parts.path}/{parts.partial}", parts.body[start:stop]
        signed = parts.device.sign("PATCH", f"{path}?offset={start}", Content.of(body))
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "PATCH",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": f"offset={start}".encode(),
            "headers": [
                (k.lower().encode(), v.encode())
                for k, v in (signed | {"host": "fedpress.test"}).items()
            ],
            "client": ("test", 1),
            "server": ("fedpress.test", 80),
        }
        self.sent: list[Any] = []
        asked, half = threading.Event(), [body[: len(body) // 2]]

        async def receive() -> dict[str, Any]:
            if half:
                return {"type": "http.request", "body": half.pop(), "more_body": True}
            asked.set()
            await anyio.sleep_forever()
            raise AssertionError

        async def send(message: Any) -> None:
            self.sent.append(message)

        self.running = http.portal.start_task_soon(http.app, scope, receive, send)
        assert asked.wait(10)

    def status(self) -> int:
        self.running.result(10)
        return int(self.sent[0]["status"])


@pytest.mark.both_databases
def test_of_parts_sent_at_once_each_byte_counts_once(parts: Parts, operator: Operator) -> None:
    parts.begin()
    size = len(parts.body)
    gate = threading.Barrier(6)
    outcomes: list[int] = []

    def send(index: int) -> None:
        gate.wait()
        stop = size if index % 2 else size // 2
        answer = parts.device.request("PATCH", parts.where(0), parts.body[:stop])
        outcomes.append(answer.status_code)

    threads = [threading.Thread(target=send, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count(200) == 1
    assert set(outcomes) <= {200, 408, 409}
    offset, digest = parts.held()
    assert (offset, digest) == prefix(parts.body, offset)
    if offset < size:
        parts.send(offset, size)
    parts.complete()
    assert history(operator)[0].received == 1


@pytest.mark.both_databases
def test_a_server_that_ended_before_it_forgot_the_parts_answers_again(
    http: Server, parts: Parts, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts.begin()
    parts.send(0, len(parts.body))

    async def ended(partial: str) -> None:
        raise RuntimeError("SIGKILL")

    with monkeypatch.context() as patched:
        patched.setattr(http.app.services.resumable, "_drop", ended)
        with pytest.raises(ServerError):
            parts.complete()
    assert history(operator)[0].received == 1
    assert parts.complete().status_code == 200
    assert files(http) == []
    assert history(operator)[0].received == 1


def another(http: Server, payloads: Payloads | None = None) -> Resumable:
    """As a server has that has just started, or another replica."""
    state = http.app.services
    known = (state.intake, state.database, payloads or state.payloads, state.metrics, state.clock)
    return Resumable(*known, state.resumable.limits)


def use(http: Server, resumable: Resumable) -> None:
    http.app.process.running = replace(http.app.services, resumable=resumable)


def test_parts_lie_in_an_object_store_as_well(http: Server, parts: Parts, tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    pytest.importorskip("moto")
    from fedpress_server.storage.bucket import Bucket
    from tests.s3 import KEYS, make_bucket, store

    with store() as endpoint:
        make_bucket(endpoint, "parts")
        bucket = Bucket(
            "s3://parts/here", tmp_path / "cache", endpoint=endpoint, timeout=10, grace=60, **KEYS
        )
        bucket.put("parts/nobodys/0", b"left by a server that was killed")
        use(http, another(http, bucket))
        parts.begin()
        parts.send(0, 9)
        http.call(http.app.services.resumable.sweep)
        assert list(bucket.names("parts")) == [f"parts/{parts.partial}"]
        use(http, another(http, bucket))
        assert parts.held() == prefix(parts.body, 9)
        parts.send(9, len(parts.body))
        assert len(list(bucket.names(f"parts/{parts.partial}"))) == 2
        assert parts.complete().status_code == 201
        assert list(bucket.names("parts")) == []


@pytest.mark.both_databases
def test_two_replicas_at_one_upload_append_it_once(
    http: Server, parts: Parts, operator: Operator
) -> None:
    """Each with a memory of its own; they meet in the rows."""
    state = http.app.services
    first, second = http.app.services.resumable, another(http)
    parts.begin()
    size = len(parts.body)
    for start, stop in itertools.pairwise([0, 7, 9, 20, size]):
        use(http, second if http.app.services.resumable is first else first)
        assert parts.send(start, stop).offset == stop
        assert parts.held() == prefix(parts.body, stop)

    async def both() -> list[Any]:
        slot = await state.intake.slot(parts.device.client_id, parts.assignment)
        data, digest = parts.body[:9], hashlib.sha256(parts.body[:9]).hexdigest()
        return await asyncio.gather(
            *(each.append(slot, parts.partial, 0, data, digest, 0) for each in (first, second)),
            return_exceptions=True,
        )

    parts.drop()
    parts.begin()
    outcomes = http.call(both)
    assert sorted(type(each).__name__ for each in outcomes) == ["OffsetConflict", "PartialUpload"]
    assert parts.held() == prefix(parts.body, 9)
    parts.send(9, size)
    assert parts.complete().status_code == 201


def test_a_round_has_no_first_phase_to_send_by_parts(parts: Parts) -> None:
    with pytest.raises(RoundClosed):
        parts.begin(trip="first")


NUMBERS = itertools.count()


@settings(
    deadline=None,
    max_examples=examples(8, 30),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_whatever_happens_between_the_parts_it_comes_to_one_upload(
    http: Server, clock: Clock, data: st.DataObject
) -> None:
    """Cuts at any byte, answers that are lost, memory that is lost, wrong offsets, half bodies, in
    any order: what HEAD tells is always a prefix of the body, and the body is staged once."""
    model = Model.from_tensors({"w": np.linspace(-1, 1, 100, dtype=np.float32)})
    task = f"task{next(NUMBERS)}"
    parts = begun(http, clock, model, task)
    go_on(data, http, parts)
    offset, digest = parts.held()
    assert (offset, digest) == prefix(parts.body, offset)
    if offset < len(parts.body):
        parts.send(offset, len(parts.body))
    assert parts.complete().status_code == 201
    assert history(Operator(http), task)[0].received == 1


def go_on(data: st.DataObject, http: Server, parts: Parts) -> None:
    size = len(parts.body)
    parts.begin()
    offset = 0
    for _ in range(data.draw(st.integers(0, 12))):
        act = data.draw(st.sampled_from(["part", "wrong", "half", "begin", "early", "forget"]))
        stop = data.draw(st.integers(offset + 1, size)) if offset < size else size
        if act == "part" and offset < size:
            parts.send(offset, stop)  # whether or not the answer arrives
            offset = stop
        elif act == "wrong":
            wrong = data.draw(st.sampled_from([at for at in range(size + 1) if at != offset]))
            with pytest.raises(OffsetConflict):
                unread(http, parts, wrong)
        elif act == "half" and offset + 1 < size:
            stalled = Stalled(http, parts, offset, size)
            assert parts.held()[0] == offset
            assert stalled.status() == 408
        elif act == "begin":
            assert parts.begin().offset == offset
        elif act == "forget":
            use(http, another(http))
        elif act == "early" and offset < size:
            with pytest.raises((Conflict, DigestMismatch)):
                parts.complete()
        assert parts.held() == prefix(parts.body, offset)
