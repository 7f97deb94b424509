"""What becomes of a device: waiting, approved, rejected, revoked, with one key after another."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedpress_protocols.device_keys import signed_rotation
from fedpress_protocols.errors import (
    AlreadyExists,
    Conflict,
    DeviceNotApproved,
    DeviceRejected,
    FedpressError,
    InvalidSignature,
    InvalidToken,
    MalformedRequest,
    NotFound,
    ServerError,
    StorageFull,
    UnknownDevice,
)
from fedpress_protocols.messages import RotationRequest, SignedRotation
from fedpress_protocols.model import Model
from fedpress_protocols.signatures import Content, DeviceKey, to_base64url
from fedpress_server import failpoints
from fedpress_server.coordination import server_registry
from fedpress_server.identity.authentication import SEEN_EVERY
from fedpress_server.storage import identities
from fedpress_server.storage.tables import audit_log
from tests.devices import ADMIN_TOKEN, Device, Operator, checked
from tests.lengths import examples
from tests.server.in_process import Clock, Server, Start

ASSIGNMENT = "Zr1x0nC5m3q9JtTz7Wb2-A"
ORDINARY = (
    ("GET", "/v1/tasks", b""),
    ("GET", "/v1/membership", b""),
    ("GET", f"/v1/assignments/{ASSIGNMENT}/receipt", b""),
    ("POST", "/v1/tasks/digits/check-in", b"{}"),
    ("PUT", f"/v1/assignments/{ASSIGNMENT}/update", b"body"),
    ("POST", f"/v1/assignments/{ASSIGNMENT}/partials", b'{"max_bytes": 48}'),
    ("DELETE", f"/v1/assignments/{ASSIGNMENT}", b""),
)
REFUSALS = (UnknownDevice, DeviceNotApproved, DeviceRejected)


@pytest.fixture
def servers(
    start: Start,
    database_url: Callable[[Path], str],
    dialect: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[list[Server]]:
    """One server on SQLite, or two on one PostgreSQL. None gives a sign of itself, whose commit
    would come to a failpoint that is meant for another."""
    monkeypatch.setattr(server_registry, "_EVERY", 3600.0)
    monkeypatch.setattr(server_registry, "_EVERY_ALONE", 3600.0)
    if dialect == "sqlite":
        with start() as server:
            yield [server]
        return
    keys = tmp_path / "key.pem"
    keys.write_bytes(DeviceKey.generate().to_pem())
    shared = {
        "database_url": database_url(tmp_path / "shared"),
        "server_key_file": keys,
        "authority_key_file": keys,
    }
    with ExitStack() as stack:
        yield [
            stack.enter_context(start(data_dir=tmp_path / name, **shared))
            for name in ("one", "other")
        ]


def token_for(http: httpx.Client, **options: Any) -> str:
    return str(Operator(http).post("/v1/admin/tokens", {"uses": 100, **options})["token"])


def waiting(http: httpx.Client, clock: Clock, token: str | None = None) -> Device:
    device = Device(http, clock)
    device.enrol(token or token_for(http, approve_each=True))
    return device


def told(http: httpx.Client, clock: Clock, key: DeviceKey, path: str = "/v1/tasks") -> type | None:
    """The refusal that a request under `key` meets."""
    try:
        Device(http, clock, key).json("GET", path)
    except REFUSALS as exc:
        return type(exc)
    return None


def rotate(
    http: httpx.Client,
    clock: Clock,
    signer: DeviceKey,
    *rotations: SignedRotation,
) -> dict[str, Any]:
    body = RotationRequest(rotations=rotations).model_dump_json()
    answer = Device(http, clock, signer).json("POST", "/v1/key-rotation", body)
    found: dict[str, Any] = answer.json()
    return found


def entries(server: Server, subject: str) -> list[str]:
    def read(connection: sa.Connection) -> list[str]:
        row = audit_log.c
        return list(
            connection.scalars(
                sa.select(row.action).where(row.subject == subject).order_by(row.seq)
            )
        )

    found: list[str] = server.call(server.app.services.database.read, read)
    return found


@pytest.mark.both_databases
@pytest.mark.parametrize(
    ("steps", "refusal"),
    [
        ((), DeviceNotApproved),
        (("approve",), None),
        (("reject",), DeviceRejected),
        (("reject", "approve"), None),
        (("revoke",), UnknownDevice),
        (("approve", "revoke"), UnknownDevice),
        (("reject", "revoke"), UnknownDevice),
    ],
    ids=lambda each: "-".join(each) or "waiting" if isinstance(each, tuple) else "",
)
def test_every_request_is_told_what_the_device_is(
    servers: list[Server],
    clock: Clock,
    steps: tuple[str, ...],
    refusal: type[FedpressError] | None,
) -> None:
    device = waiting(servers[0], clock)
    path = f"/v1/admin/clients/{device.client_id}"
    for step in steps:
        Operator(servers[0]).post(f"{path}/{step}")
    for server in servers:
        there = Device(server, clock, device.key)
        for method, where, body in ORDINARY:
            headers = {"Content-Type": "application/json"} if body else {}
            answer = there.request(method, where, body, headers)
            slug = answer.json().get("type", "") if answer.status_code >= 400 else ""
            if refusal is None:
                assert slug.removeprefix("urn:fedpress:problem:") not in {
                    each.slug for each in REFUSALS
                }, (method, where, answer.text)
            else:
                assert slug.endswith(refusal.slug), (method, where, answer.text)
            if refusal is DeviceNotApproved:
                assert answer.status_code == 403
                assert answer.headers["retry-after"] == "30"
                assert answer.json()["key_id"] == device.key.key_id
        status = Operator(server).get(path)
        assert (status["key_id"], status["former_keys"]) == (device.key.key_id, [])
    listed = Operator(servers[-1]).get(f"/v1/admin/clients?state={status['state']}")
    assert device.client_id in [each["client_id"] for each in listed]


def test_a_setting_has_every_device_wait(start: Start, clock: Clock) -> None:
    with start(approve_each_device=True, approval_poll_seconds=7) as http:
        device = waiting(http, clock, token_for(http))
        with pytest.raises(DeviceNotApproved) as caught:
            device.json("GET", "/v1/tasks")
        assert caught.value.members["retry_after"] == 7


@pytest.mark.both_databases
def test_whoever_was_let_in_stays_in(servers: list[Server], clock: Clock) -> None:
    device = waiting(servers[0], clock, token_for(servers[0]))
    operator = Operator(servers[-1])
    path = f"/v1/admin/clients/{device.client_id}"
    with pytest.raises(Conflict, match="revoke it"):
        operator.post(f"{path}/reject")
    assert operator.post(f"{path}/approve")["decided_at"] is None
    operator.post(f"{path}/revoke")
    for word in ("approve", "reject"):
        with pytest.raises(Conflict, match="final"):
            operator.post(f"{path}/{word}")
    for word in ("approve", "reject", "revoke"):
        with pytest.raises(NotFound):
            operator.post(f"/v1/admin/clients/nobody/{word}")


# Keys


@pytest.mark.both_databases
def test_a_device_goes_on_under_its_next_key(
    servers: list[Server], clock: Clock, model: Model
) -> None:
    operator = Operator(servers[0])
    operator.begin(model)
    device = waiting(servers[0], clock, token_for(servers[0]))
    assignment = device.assignment("digits")
    old, new = device.key, DeviceKey.generate()
    change = signed_rotation(device.client_id, old, new)
    answer = rotate(servers[0], clock, old, change)
    assert (answer["client_id"], answer["key_id"]) == (device.client_id, new.key_id)
    for server in servers:
        assert told(server, clock, old) is UnknownDevice
        assert told(server, clock, new) is None
        for signer in (old, new):  # a lost answer
            assert rotate(server, clock, signer, change)["key_id"] == new.key_id
    after = Device(servers[0], clock, new)
    after.client_id, after.server_key = device.client_id, device.server_key
    ack = after.upload(assignment.assignment, after.body_for(assignment, model.parameters * 0))
    assert ack.assignment == assignment.assignment
    with pytest.raises(UnknownDevice, match="replaced"):
        device.enrol(token_for(servers[0]))
    details = operator.get(f"/v1/admin/clients/{device.client_id}")
    assert details["key_id"] == new.key_id
    assert [each["key_id"] for each in details["former_keys"]] == [old.key_id]
    assert entries(servers[0], device.client_id) == ["device.enrolled", "device.key-rotated"]


@pytest.mark.both_databases
def test_changes_of_key_that_are_none(servers: list[Server], clock: Clock) -> None:
    http = servers[0]
    token = token_for(http)
    device, other, gone = (waiting(http, clock, token) for _ in range(3))
    Operator(http).post(f"/v1/admin/clients/{gone.client_id}/revoke")
    mine, new, stranger = device.key, DeviceKey.generate(), DeviceKey.generate()
    client = device.client_id
    good = signed_rotation(client, mine, new)
    stolen = signed_rotation(other.client_id, other.key, new)

    def refused(error: type[FedpressError], signer: DeviceKey, *links: SignedRotation) -> None:
        with pytest.raises(error):
            rotate(http, clock, signer, *links)
        assert told(http, clock, mine) is None
        assert told(http, clock, other.key) is None

    # To a key that is another device's, or was revoked: with its proof, and without.
    refused(AlreadyExists, mine, signed_rotation(client, mine, other.key))
    refused(AlreadyExists, mine, signed_rotation(client, mine, gone.key))
    forged = signed_rotation(client, mine, stranger).model_dump(mode="json")
    forged["rotation"]["new_key"] = to_base64url(other.key.public)
    refused(InvalidSignature, mine, SignedRotation.model_validate(forged))
    # With a proof made for another device, and with a statement of it.
    mixed = {**good.model_dump(mode="json"), "new_signature": stolen.new_signature}
    refused(InvalidSignature, mine, SignedRotation.model_validate(mixed))
    refused(InvalidSignature, mine, stolen)
    refused(MalformedRequest, mine, signed_rotation(other.client_id, mine, new))
    # By somebody who has seen the statement and has neither key.
    refused(InvalidSignature, stranger, good)
    refused(UnknownDevice, stranger, signed_rotation(client, stranger, new))
    refused(UnknownDevice, gone.key, signed_rotation(gone.client_id, gone.key, new))
    assert Operator(http).get(f"/v1/admin/clients/{client}")["former_keys"] == []


@pytest.mark.both_databases
def test_no_key_comes_back(servers: list[Server], clock: Clock) -> None:
    http = servers[0]
    token = token_for(http)
    device = waiting(http, clock, token)
    keys = [device.key, DeviceKey.generate(), DeviceKey.generate()]
    first = signed_rotation(device.client_id, keys[0], keys[1])
    second = signed_rotation(device.client_id, keys[1], keys[2])
    rotate(http, clock, keys[0], first)
    rotate(http, clock, keys[1], second)
    for signer in keys[:2]:  # the first change, heard again
        with pytest.raises(UnknownDevice):
            rotate(http, clock, signer, first)
    back = signed_rotation(device.client_id, keys[2], keys[0])
    with pytest.raises(AlreadyExists, match="never valid again"):
        rotate(http, clock, keys[2], back)
    other = waiting(http, clock, token)
    with pytest.raises(AlreadyExists):
        rotate(http, clock, other.key, signed_rotation(other.client_id, other.key, keys[1]))
    Operator(http).post(f"/v1/admin/clients/{device.client_id}/revoke")
    for server in servers:
        for key in keys:
            assert told(server, clock, key) is UnknownDevice
            with pytest.raises(UnknownDevice):
                Device(server, clock, key).enrol(token)
        with pytest.raises(UnknownDevice, match="revoked"):
            rotate(server, clock, keys[2], second)


def test_a_change_of_key_is_bound_to_its_body_and_its_key(http: Server, clock: Clock) -> None:
    device = waiting(http, clock, token_for(http))
    new = DeviceKey.generate()
    body = RotationRequest(rotations=(signed_rotation(device.client_id, device.key, new),))
    text = body.model_dump_json().encode()
    headers = {"Content-Type": "application/json"}
    other = device.sign("POST", "/v1/key-rotation", Content.of(text + b" "))
    answer = http.post("/v1/key-rotation", content=text, headers={**other, **headers})
    assert answer.status_code in (400, 401), answer.text
    with pytest.raises(InvalidSignature, match="not signed"):
        checked(http.post("/v1/key-rotation", content=text, headers=headers))
    assert told(http, clock, device.key) is None


@pytest.mark.both_databases
@pytest.mark.parametrize("point", ["commit-due", "committed", "device-changed"])
def test_a_server_that_fails_in_a_change_of_key_knows_one_key_afterwards(
    servers: list[Server], clock: Clock, point: str
) -> None:
    http = servers[0]
    device = waiting(http, clock, token_for(http))
    new = DeviceKey.generate()
    change = signed_rotation(device.client_id, device.key, new)
    with failpoints.armed(f"{point}:raise"), pytest.raises(ServerError):
        rotate(http, clock, device.key, change)
    good, bad = (device.key, new) if point == "commit-due" else (new, device.key)
    for server in servers:
        assert told(server, clock, good) is None
        assert told(server, clock, bad) is UnknownDevice
    assert rotate(servers[-1], clock, device.key, change)["key_id"] == new.key_id
    assert told(http, clock, new) is None
    assert entries(http, device.client_id).count("device.key-rotated") == 1


@pytest.mark.parametrize("word", ["approve", "reject", "revoke"])
@pytest.mark.parametrize("point", ["commit-due", "committed", "device-changed"])
def test_a_server_that_fails_in_a_decision_knows_what_it_wrote(
    http: Server, clock: Clock, word: str, point: str
) -> None:
    device = waiting(http, clock)
    operator = Operator(http)
    with failpoints.armed(f"{point}:raise"), pytest.raises(ServerError):
        operator.post(f"/v1/admin/clients/{device.client_id}/{word}")
    before = told(http, clock, device.key)
    state = operator.get(f"/v1/admin/clients/{device.client_id}")["state"]
    assert (
        before
        is {
            "waiting": DeviceNotApproved,
            "approved": None,
            "rejected": DeviceRejected,
            "revoked": UnknownDevice,
        }[state]
    )
    assert (state == "waiting") is (point == "commit-due")


def test_a_server_that_lost_the_change_of_key_follows_it_again(
    start: Start, clock: Clock, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    with start() as http:
        device = waiting(http, clock, token_for(http))
    shutil.copytree(data, tmp_path / "before")
    keys = [device.key, DeviceKey.generate(), DeviceKey.generate()]
    changes = [
        signed_rotation(device.client_id, keys[0], keys[1]),
        signed_rotation(device.client_id, keys[1], keys[2]),
    ]
    clock.advance(400)
    with start() as http:
        rotate(http, clock, keys[0], changes[0])
        rotate(http, clock, keys[1], *changes)
    clock.advance(400)
    with start(data_dir=tmp_path / "before") as http:
        assert told(http, clock, keys[2]) is UnknownDevice
        with pytest.raises(UnknownDevice):
            rotate(http, clock, keys[2], changes[1])  # the key before is not known here
        assert rotate(http, clock, keys[2], *changes)["client_id"] == device.client_id
        assert [told(http, clock, key) for key in keys] == [UnknownDevice, UnknownDevice, None]
        # Enrolled with the same token, by a key that it has left: it is known, and stays out.
        with pytest.raises(UnknownDevice, match="replaced"):
            Device(http, clock, keys[0]).enrol(token_for(http))


def enrolment(
    http: Server, clock: Clock, key: DeviceKey, token: str, *links: SignedRotation
) -> Any:
    body = json.dumps(
        {
            "public_key": to_base64url(key.public),
            "rotations": [each.model_dump(mode="json") for each in links],
        }
    ).encode()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    return checked(Device(http, clock, key).request("POST", "/v1/enrol", body, headers)).json()


def test_a_server_that_lost_the_device_knows_it_by_its_first_key(
    start: Start, clock: Clock, tmp_path: Path
) -> None:
    with start(data_dir=tmp_path / "lost") as http:
        device = waiting(http, clock, token_for(http))
    client = device.client_id
    keys = [device.key, DeviceKey.generate(), DeviceKey.generate()]
    changes = [
        signed_rotation(client, keys[0], keys[1]),
        signed_rotation(client, keys[1], keys[2]),
    ]
    with start() as http:
        token = token_for(http)
        for links in (changes[:1], changes[1:]):
            with pytest.raises(MalformedRequest):
                enrolment(http, clock, keys[2], token, *links)
        forged = [changes[0].model_copy(update={"old_signature": changes[0].new_signature})]
        with pytest.raises(InvalidSignature):
            enrolment(http, clock, keys[2], token, *forged, changes[1])
        assert enrolment(http, clock, keys[2], token, *changes)["client_id"] == client
        assert enrolment(http, clock, keys[2], token, *changes)["client_id"] == client
        assert [told(http, clock, key) for key in keys] == [UnknownDevice, UnknownDevice, None]
        for key in keys[:2]:
            with pytest.raises(UnknownDevice, match="replaced"):
                Device(http, clock, key).enrol(token)
        thief = DeviceKey.generate()
        with pytest.raises(AlreadyExists, match="enrolled with an earlier key"):
            enrolment(http, clock, thief, token, signed_rotation(client, keys[0], thief))


# Any order


class Expected:
    """What every server should say of one device, in a few lines."""

    def __init__(self, client_id: str, key: DeviceKey) -> None:
        self.client_id, self.keys = client_id, [key]
        self.state, self.entries = "waiting", 1
        self.change: SignedRotation | None = None

    @property
    def refusal(self) -> type[FedpressError] | None:
        return {
            "waiting": DeviceNotApproved,
            "approved": None,
            "rejected": DeviceRejected,
            "revoked": UnknownDevice,
        }[self.state]

    def decide(self, word: str) -> type[FedpressError] | None:
        """The error that a decision meets."""
        to = {"approve": "approved", "reject": "rejected", "revoke": "revoked"}[word]
        if to != "revoked" and (self.state == "revoked" or (self.state, to) == FORBIDDEN):
            return Conflict
        self.entries += self.state != to
        self.state = to
        return None

    def rotate(self) -> tuple[DeviceKey, SignedRotation]:
        """The next change of key and who signs it; it counts if the device may change its key."""
        old, new = self.keys[-1], DeviceKey.generate()
        change = signed_rotation(self.client_id, old, new)
        if self.refusal is None:
            self.keys.append(new)
            self.change = change
            self.entries += 1
        return old, change


FORBIDDEN = ("approved", "rejected")
WORDS = ("approve", "approve", "reject", "revoke", "rotate", "rotate", "again")
OPERATIONS = st.lists(st.tuples(st.sampled_from(WORDS), st.integers(0, 1)), min_size=1, max_size=8)


@pytest.mark.both_databases
@settings(
    max_examples=examples(4, 10),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(operations=OPERATIONS)
def test_in_any_order_every_server_says_the_same(
    servers: list[Server], clock: Clock, operations: Sequence[tuple[str, int]]
) -> None:
    device = waiting(servers[0], clock)
    path = f"/v1/admin/clients/{device.client_id}"
    expected = Expected(device.client_id, device.key)
    for word, place in operations:
        server = servers[place % len(servers)]
        error: type[FedpressError] | None = expected.refusal
        met: type[FedpressError] | None = None
        try:
            if word == "rotate":
                signer, change = expected.rotate()
                rotate(server, clock, signer, change)
            elif word == "again":
                if expected.change is not None:
                    rotate(server, clock, expected.keys[-2], expected.change)
                else:
                    error = None
            else:
                error = expected.decide(word)
                Operator(server).post(f"{path}/{word}")
        except FedpressError as exc:
            met = type(exc)
        assert met is error, (word, expected.state)
        for each in servers:
            assert told(each, clock, expected.keys[-1]) is expected.refusal
            for former in expected.keys[:-1]:
                assert told(each, clock, former) is UnknownDevice
            status = Operator(each).get(path)
            assert status["state"] == expected.state
            assert status["key_id"] == expected.keys[-1].key_id
    assert len(entries(servers[0], device.client_id)) == expected.entries


# What is remembered


def test_a_former_key_uploads_nothing_from_a_server_that_remembers_it(
    start: Start, clock: Clock, model: Model, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The hint that another server changed the device may be lost; what counts is asked again."""
    cluster = request.getfixturevalue("cluster")
    key = tmp_path / "key.pem"
    key.write_bytes(DeviceKey.generate().to_pem())
    url = cluster.new()
    shared = {"database_url": url, "server_key_file": key, "authority_key_file": key}
    with (
        start(data_dir=tmp_path / "one", **shared) as one,
        start(data_dir=tmp_path / "two", **shared) as two,
    ):
        Operator(two).begin(model)
        device = waiting(two, clock, token_for(two))
        assignment = device.assignment("digits")
        body = device.body_for(assignment, model.parameters * 0)
        gate = two.app.services.authenticator

        def forget_nothing(topic: str | None = None) -> None:
            """As if nothing had been heard."""

        two.app.services.database._hearers[:] = [forget_nothing]
        # It is remembered by an upload that came to nothing.
        with pytest.raises(NotFound):
            checked(device.put(ASSIGNMENT, body))
        assert device.key.key_id in gate._read
        new = DeviceKey.generate()
        change = signed_rotation(device.client_id, device.key, new)
        rotate(one, clock, device.key, change)
        assert device.key.key_id in gate._read
        with pytest.raises(UnknownDevice, match="former key"):
            device.upload(assignment.assignment, body)
        after = Device(two, clock, new)
        assert after.upload(assignment.assignment, body).assignment == assignment.assignment
    cluster.give_back(url)


# Tokens


class Held:
    """The first call of an async function stops with its result, until `go`."""

    def __init__(self, of: Callable[..., Any]) -> None:
        self._of = of
        self._has_stopped, self._may_go = threading.Event(), threading.Event()

    async def __call__(self, *given: Any, **named: Any) -> Any:
        found = await self._of(*given, **named)
        if not self._has_stopped.is_set():
            self._has_stopped.set()
            assert await asyncio.to_thread(self._may_go.wait, 30)
        return found

    def wait(self) -> None:
        assert self._has_stopped.wait(30)

    def go(self) -> None:
        self._may_go.set()


@pytest.mark.parametrize("stops", ["before it is known again", "while it is known again"])
def test_a_device_that_is_revoked_while_it_enrols_again_is_no_device(
    http: Server, clock: Clock, monkeypatch: pytest.MonkeyPatch, stops: str
) -> None:
    """What the enrolment has read of it by then is old."""
    operator, device = Operator(http), Device(http, clock)
    token = operator.token()
    device.enrol(token)
    if stops == "before it is known again":
        door = http.app.services.enrolment
        held = Held(door._enrolled)
        monkeypatch.setattr(door, "_enrolled", held)
    else:
        database = http.app.services.database
        held = Held(database.read)

        async def look_again(client_id: str) -> Any:
            with monkeypatch.context() as patch:
                patch.setattr(database, "read", held)
                return await real(client_id)

        real = http.app.services.authenticator.look_again
        monkeypatch.setattr(http.app.services.authenticator, "look_again", look_again)
    revoke = f"/v1/admin/clients/{device.client_id}/revoke"
    with ThreadPoolExecutor(2) as pool:
        enrolling = pool.submit(device.enrol, token)
        held.wait()
        revoking = pool.submit(operator.post, revoke)
        with suppress(TimeoutError):  # it may have to wait until the enrolment is through
            revoking.result(timeout=0.5)
        held.go()
        enrolling.result(timeout=30)
        revoking.result(timeout=30)
    with pytest.raises(UnknownDevice, match="revoked"):
        device.check_in("digits")


def test_a_token_that_was_revoked_brings_nobody(http: Server, clock: Clock) -> None:
    operator = Operator(http)
    made = operator.post("/v1/admin/tokens", {"uses": 3, "note": "a batch"})
    device = waiting(http, clock, made["token"])
    shown = operator.get("/v1/admin/tokens")[0]
    assert "token" not in shown
    assert (shown["state"], shown["uses"], shown["used"]) == ("good", 3, 1)
    path = f"/v1/admin/tokens/{made['token_id']}/revoke"
    revoked = operator.post(path)
    assert revoked["state"] == "revoked"
    assert operator.post(path) == revoked
    with pytest.raises(InvalidToken, match="revoked"):
        waiting(http, clock, made["token"])
    assert told(http, clock, device.key) is None
    assert device.enrol(made["token"]).client_id == device.client_id
    assert entries(http, made["token_id"]) == ["token.created", "token.revoked"]
    with pytest.raises(NotFound):
        operator.post("/v1/admin/tokens/none/revoke")


@pytest.mark.both_databases
def test_lists_come_in_pages(servers: list[Server], clock: Clock) -> None:
    http = servers[0]
    ids, devices = [], []
    for number in range(5):
        clock.advance(number % 2)  # some at the same moment
        made = Operator(http).post("/v1/admin/tokens", {"expires_in": 10.0 + number})
        ids.append(made["token_id"])
        devices.append(waiting(http, clock, made["token"]).client_id)

    def pages(path: str) -> list[dict[str, Any]]:
        found, headers = [], {"Authorization": f"Bearer {ADMIN_TOKEN}"}
        while path:
            answer = checked(servers[-1].get(path, headers=headers))
            assert len(answer.json()) <= 2
            found += answer.json()
            path = answer.links.get("next", {}).get("url", "")
        return found

    tokens = pages("/v1/admin/tokens?limit=2")
    assert {each["token_id"] for each in tokens} == set(ids)
    assert len(tokens) == 5
    times = [each["created_at"] for each in tokens]
    assert times == sorted(times, reverse=True)
    listed = pages("/v1/admin/clients?limit=2&state=approved")
    assert {each["client_id"] for each in listed} == set(devices)
    assert len(listed) == 5
    assert pages("/v1/admin/clients?limit=2&state=waiting") == []
    for path in ("/v1/admin/tokens?before=none", "/v1/admin/clients?after=none"):
        with pytest.raises(NotFound):
            Operator(http).get(path)
    clock.advance(12)
    states = {each["state"] for each in Operator(http).get("/v1/admin/tokens")}
    assert states == {"used-up"}


def standing(http: httpx.Client, device: Device) -> dict[str, Any]:
    found: dict[str, Any] = Operator(http).get(f"/v1/admin/clients/{device.client_id}")
    return found


@pytest.mark.both_databases
def test_it_is_noted_when_a_device_was_last_seen(servers: list[Server], clock: Clock) -> None:
    device = Device(servers[0], clock)
    device.enrol(token_for(servers[0]))
    assert standing(servers[0], device)["seen_at"] is None
    first = clock.now
    told = {"User-Agent": "fedpress/9.9\t" + "x" * 99}
    assert device.request("GET", "/v1/tasks", headers=told, skew=7).status_code == 200
    for http in servers:
        seen = standing(http, device)
        assert (seen["seen_at"], seen["clock_ahead"]) == (first, 7.0)
        assert seen["agent"] == "fedpress/9.9" + "x" * 52
    clock.advance(SEEN_EVERY - 1)
    for http in servers:
        Device(http, clock, device.key).json("GET", "/v1/tasks")
    assert standing(servers[0], device)["seen_at"] == first
    clock.advance(1)
    for http in servers:
        Device(http, clock, device.key).json("GET", "/v1/tasks")
    seen = standing(servers[0], device)
    assert (seen["seen_at"], seen["clock_ahead"]) == (first + SEEN_EVERY, 0.0)


def test_a_full_disk_does_not_refuse_who_is_seen(
    start: Start, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise StorageFull("the disk is full")

    with start() as http:
        device = Device(http, clock)
        device.enrol(token_for(http))
        with monkeypatch.context() as patched:
            patched.setattr(identities, "note_sightings", full)
            device.json("GET", "/v1/tasks")
        assert standing(http, device)["seen_at"] is None
        device.json("GET", "/v1/tasks")
        assert standing(http, device)["seen_at"] == clock.now


def test_a_device_that_is_revoked_while_it_is_noted_stays_revoked(
    start: Start, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start() as http:
        operator, device = Operator(http), Device(http, clock)
        device.enrol(token_for(http))
        services = http.app.services
        note = services.authenticator._note

        async def late(seen: identities.Sighting) -> None:
            await note(seen)
            await services.device_registry.revoke(device.client_id, "test")

        monkeypatch.setattr(services.authenticator, "_note", late)
        device.json("GET", "/v1/tasks")
        assert operator.get(f"/v1/admin/clients/{device.client_id}")["state"] == "revoked"
        with pytest.raises(FedpressError):
            device.json("GET", "/v1/tasks")
