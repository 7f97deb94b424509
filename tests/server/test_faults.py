"""Faults of docs/fault-table.md that a server in this process can have."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator

import anyio
import pytest

from fedpress_protocols.errors import ClockSkew
from fedpress_protocols.messages import UploadAck
from fedpress_protocols.model import Model
from fedpress_protocols.signatures import Content
from tests.devices import Device, Operator, checked
from tests.server.in_process import Clock, Enrolled, Server, history, ones
from tests.server.replicated import Databases, replicas

PUTS = 50


@pytest.mark.both_databases(short=True)
def test_of_fifty_equal_uploads_at_once_to_two_servers_one_is_new(databases: Databases) -> None:
    async def go() -> None:
        async with replicas(databases) as servers:
            await servers.begin(2, rounds=1)
            await servers.check_in(0, 0)
            assignment = servers.given[0]
            body = servers.body(assignment)
            digest = hashlib.sha256(body).hexdigest()

            async def put(number: int) -> tuple[UploadAck, bool]:
                intake = servers.all[number % 2].intake
                slot = await intake.slot("d0", assignment.assignment)
                await intake.admit(slot, digest)
                return await intake.stage(slot, body, digest, len(body))

            answers = await asyncio.gather(*(put(number) for number in range(PUTS)))
            assert sum(is_new for _, is_new in answers) == 1
            assert len({ack.model_dump_json() for ack, _ in answers}) == 1
            assert (await servers.all[0].services.queries.history("digits"))[0].received == 1
            servers.acknowledged[assignment.assignment] = 0
            await servers.finish(2)
            await servers.check()

    anyio.run(go)


@pytest.mark.parametrize("jump", [-86400.0, -3600.0, -30.0, 30.0])
def test_a_clock_that_jumps_short_of_the_deadline_loses_nothing(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model, clock: Clock, jump: float
) -> None:
    """Set back by more than the life of a signature, the server no longer knows which requests it
    has seen, and takes none until its clock is right again."""
    clock.advance(1000)
    operator.begin(model, rounds=1)
    devices = [enrolled(), enrolled()]
    given = [device.assignment("digits") for device in devices]
    bodies = [
        device.body_for(assignment, ones(model))
        for device, assignment in zip(devices, given, strict=True)
    ]
    first = devices[0].upload(given[0].assignment, bodies[0])
    clock.advance(jump)
    http.tick()
    if jump < -300:
        with pytest.raises(ClockSkew) as caught:
            checked(devices[1].put(given[1].assignment, bodies[1]))
        assert caught.value.members["server_time"] == clock.now
        assert history(operator)[0].received == 1
        clock.advance(-jump)
    assert devices[0].upload(given[0].assignment, bodies[0]) == first
    devices[1].upload(given[1].assignment, bodies[1])
    answer = devices[1].check_in("digits", given[1].assignment, wait=30)
    assert answer is not None
    assert [each.receipt.outcome for each in answer.receipts] == ["included"]
    assert [(each.attempt, each.included) for each in history(operator)] == [(1, 2)]


def test_a_clock_that_jumps_beyond_the_deadline_ends_the_attempt_once(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model, clock: Clock
) -> None:
    clock.advance(1000)
    operator.begin(model, cohort={"size": 2, "minimum": 2})
    device, silent = enrolled(), enrolled()
    given = device.assignment("digits")
    silent.assignment("digits")
    device.upload(given.assignment, device.body_for(given, ones(model)))
    clock.advance(61)
    http.tick()
    clock.advance(-61)
    for _ in range(3):
        http.tick()
    found = [(each.attempt, each.state) for each in history(operator)]
    assert found == [(1, "abandoned"), (2, "collecting")]
    receipt = device.receipt(given.assignment)
    assert receipt is not None
    assert receipt.receipt.outcome != "included"


def flips(data: bytes, every: int = 1) -> Iterator[bytes]:
    """`data` with one bit other than it was: each bit that is the next `every`th."""
    for place in range(0, 8 * len(data), every):
        changed = bytearray(data)
        changed[place // 8] ^= 1 << place % 8
        yield bytes(changed)


def test_no_bit_of_a_signed_upload_may_change(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    """Each bit of the body, and every fifth of each header field that is signed or signs."""
    operator.begin(model)
    device = enrolled()
    given = device.assignment("digits")
    body = device.body_for(given, ones(model))
    path = f"/v1/assignments/{given.assignment}/update"

    def refused(headers: dict[str, bytes], content: bytes) -> int:
        raw = [(name.encode(), value) for name, value in headers.items()]
        answer = http.request("PUT", path, content=content, headers=raw)
        assert 400 <= answer.status_code < 500, (answer.status_code, headers)
        assert answer.headers["content-type"] == "application/problem+json"
        return answer.status_code

    statuses = set()
    for changed in flips(body):
        headers = device.sign("PUT", path, Content.of(body))
        statuses.add(refused({n: v.encode() for n, v in headers.items()}, changed))
    for name in device.sign("PUT", path, Content.of(body)):
        value = device.sign("PUT", path, Content.of(body))[name].encode()
        for number, _ in enumerate(flips(value, 5)):
            headers = device.sign("PUT", path, Content.of(body))
            signed = {n: v.encode() for n, v in headers.items()}
            changes = list(flips(signed[name], 5))
            if number < len(changes) and not set(changes[number]) & set(b"\r\n\0"):
                statuses.add(refused(signed | {name: changes[number]}, body))
    assert statuses >= {400, 401}
    assert history(operator)[0].received == 0
    device.upload(given.assignment, body)
    assert history(operator)[0].received == 1


def test_a_request_is_too_old_after_its_time_and_taken_once_before(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model, clock: Clock
) -> None:
    """What somebody wrote down on the way: good for nothing a second time, nor later."""
    operator.begin(model)
    device: Device = enrolled()
    given = device.assignment("digits")
    body = device.body_for(given, ones(model))
    path = f"/v1/assignments/{given.assignment}/update"
    kept = device.sign("PUT", path, Content.of(body))
    unused = device.sign("PUT", path, Content.of(body))
    assert http.put(path, content=body, headers=kept).status_code == 201
    for wait in (0.0, 1.0, 1000.0):
        clock.advance(wait)
        again = http.put(path, content=body, headers=kept)
        assert again.status_code == 401
    late = http.put(path, content=body, headers=unused)
    assert late.status_code == 401
    assert late.json()["type"].endswith("clock-skew")
    elsewhere = path.replace("update", "first")
    fresh = device.sign("PUT", path, Content.of(body))
    assert http.put(elsewhere, content=body, headers=fresh).status_code == 401
    assert device.put(given.assignment, body).status_code == 200
