"""The device's own side of its key: approval waited for, a change of key that nothing tears."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from fedpress_client import Client, Event, device_key
from fedpress_client.device_key import change_key, is_changing, rotations
from fedpress_client.masking import _Diary
from fedpress_client.state import StateDirectory, write_durably
from fedpress_client.transport import HttpTransport, Retries
from fedpress_protocols.errors import (
    ConfigurationError,
    Conflict,
    DeviceRejected,
    StateCorrupt,
    StateLocked,
    TransportError,
    UnknownDevice,
)
from fedpress_protocols.messages import MAX_ROTATIONS
from fedpress_protocols.model import Model
from fedpress_protocols.signatures import DeviceKey
from tests.client.fake_server import RandomTrainer
from tests.devices import Device, Operator
from tests.server.in_process import Clock, Server, Start

URL = "http://fedpress.test"
MODULE = "fedpress_client.device_key"


class Line(httpx.BaseTransport):
    """To whichever server is there now."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        found = self.server._transport.handle_request(request)
        stream = httpx.ByteStream(found.content)
        return httpx.Response(found.status_code, headers=found.headers, stream=stream)

    def close(self) -> None:
        pass


@dataclass
class Bench:
    """A server, its clock, and a device's folder."""

    line: Line
    clock: Clock
    folder: Path
    events: list[Event] = field(default_factory=list)

    @property
    def operator(self) -> Operator:
        return Operator(self.line.server)

    def transport(self) -> HttpTransport:
        key = StateDirectory.open(self.folder).key()
        return HttpTransport(
            URL,
            key,
            http=self.line,
            clock=self.clock,
            sleep=lambda seconds: None,
            retries=Retries(patience=1.0),
        )

    def client(self, token: str | None = None, **options: Any) -> Client:
        options.setdefault("sleep", self.clock.advance)
        return Client(
            URL,
            RandomTrainer(13),
            state_dir=self.folder,
            token=token,
            wait=0.0,
            transport=self.transport(),
            clock=self.clock,
            on_event=self.events.append,
            **options,
        )

    @property
    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]

    def is_known(self, key: DeviceKey) -> bool:
        try:
            Device(self.line.server, self.clock, key).json("GET", "/v1/tasks")
        except UnknownDevice:
            return False
        return True

    def finish(self, client: Client) -> Any:
        """Until the task is over; the server closes its rounds beside it, and makes its models on
        threads, which take real time."""
        give_up = time.monotonic() + 60
        while time.monotonic() < give_up:
            pause = client.step()
            if pause is None:
                return client.summary()
            self.clock.advance(max(pause, 0.5))
            self.line.server.tick()
            time.sleep(0.001)
        raise AssertionError("the task does not end")


@pytest.fixture
def bench(start: Start, clock: Clock, tmp_path: Path) -> Iterator[Bench]:
    with start() as server:
        yield Bench(Line(server), clock, tmp_path / "device")


def one_device_task(bench: Bench, rounds: int = 2) -> None:
    model = Model.from_tensors({"weight": np.zeros(13, np.float32)})
    bench.operator.begin(model, cohort={"size": 1, "minimum": 1}, rounds=rounds)


# Approval


def test_a_device_waits_for_approval_says_so_once_and_goes_on(bench: Bench) -> None:
    one_device_task(bench)
    token = bench.operator.post("/v1/admin/tokens", {"approve_each": True})["token"]
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        bench.clock.advance(seconds)
        waiting = bench.operator.get("/v1/admin/clients?state=waiting")
        if len(pauses) == 3:
            assert [each["key_id"] for each in waiting] == [client.key_id]
            bench.operator.post(f"/v1/admin/clients/{waiting[0]['client_id']}/approve")
        bench.line.server.tick()

    client = bench.client(token, sleep=sleep)
    ended = client.run()
    assert (ended.state, ended.included) == ("finished", 2)
    assert all(30 <= pause <= 33.1 for pause in pauses[:3])
    kinds = [kind for kind in bench.kinds if kind != "waiting"]
    assert kinds[:3] == ["enrolled", "unapproved", "joined"]
    assert kinds.count("unapproved") == kinds.count("approved") == 1
    told = next(event for event in bench.events if event.kind == "unapproved")
    assert told.details == {"key_id": client.key_id}


def test_a_rejected_device_stops_with_a_reason(bench: Bench) -> None:
    one_device_task(bench)
    token = bench.operator.post("/v1/admin/tokens", {"approve_each": True})["token"]

    def sleep(seconds: float) -> None:
        (each,) = bench.operator.get("/v1/admin/clients")
        bench.operator.post(f"/v1/admin/clients/{each['client_id']}/reject")

    with pytest.raises(DeviceRejected, match="rejected this device"):
        bench.client(token, sleep=sleep).run()


# A change of key


class Died(Exception):
    """Where a process ended."""


def moments(
    monkeypatch: pytest.MonkeyPatch, bench: Bench, at: int
) -> tuple[HttpTransport, list[str]]:
    """Dies at the moment number `at` of a change of key: before and after each durable step, and
    before the request and after it, its answer lost. The moments passed."""
    passed: list[str] = []

    def around(name: str, do: Callable[..., Any]) -> Callable[..., Any]:
        def done(*args: Any, **named: Any) -> Any:
            reach(f"before {name}")
            result = do(*args, **named)
            reach(f"after {name}")
            return result

        return done

    def reach(name: str) -> None:
        passed.append(name)
        if len(passed) == at + 1:
            raise Died(name)

    transport = bench.transport()
    monkeypatch.setattr(f"{MODULE}.write_durably", around("write", write_durably))
    monkeypatch.setattr(os, "replace", around("rename", os.replace))
    monkeypatch.setattr(transport, "rotate", around("request", transport.rotate))
    return transport, passed


@pytest.mark.parametrize(
    "at", [at if at % 6 == 1 else pytest.param(at, marks=pytest.mark.slow) for at in range(14)]
)
def test_a_device_that_dies_anywhere_in_a_change_of_key_goes_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    one_device_task(bench)
    first = bench.client(bench.operator.token())
    first.step()
    client_id = first.ledger.client_id
    pending = set(first.ledger.pending)
    first.close()
    directory = StateDirectory.open(bench.folder)
    old = directory.key()
    with monkeypatch.context() as patched:
        transport, passed = moments(patched, bench, at)
        try:
            change_key(directory, transport)
            died = False
        except Died:
            died = True
    assert died or len(passed) <= at
    is_begun = is_changing(directory)
    again = bench.client()
    ended = bench.finish(again)
    assert ended.included == 2
    assert again.ledger.client_id == client_id
    assert pending <= set(again.ledger.settled) | set(again.ledger.pending)
    again.close()
    now = directory.key()
    is_changed = now.key_id != old.key_id
    assert is_changed or not is_begun
    assert not is_changing(directory)
    assert len(rotations(directory)) == is_changed
    assert bench.is_known(now)
    assert bench.is_known(old) is not is_changed
    shown = bench.operator.get(f"/v1/admin/clients/{client_id}")
    assert shown["key_id"] == now.key_id
    assert len(shown["former_keys"]) == is_changed


def test_one_key_after_another(bench: Bench) -> None:
    one_device_task(bench)
    client = bench.client(bench.operator.token())
    client.step()
    keys = [client.key_id]
    for _ in range(3):
        keys.append(client.rotate_key())
        client.step()
    assert len(set(keys)) == 4
    assert bench.finish(client).included == 2
    (shown,) = bench.operator.get("/v1/admin/clients")
    assert shown["key_id"] == keys[-1] == client.key_id
    assert bench.kinds.count("rotated") == 3


def test_another_process_of_the_device_takes_the_new_key(bench: Bench) -> None:
    one_device_task(bench)
    client = bench.client(bench.operator.token())
    client.step()
    following = change_key(StateDirectory.open(bench.folder), bench.transport())
    assert client.key_id != following.key_id
    assert bench.finish(client).included == 2
    assert client.key_id == following.key_id


def test_a_change_that_the_server_cannot_take_now_is_ended_later(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_device_task(bench, rounds=9)
    client = bench.client(bench.operator.token())
    client.step()
    old = client.key_id
    with monkeypatch.context() as patched:
        lost = TransportError("no answer")
        patched.setattr(client._transport, "rotate", lambda request: (_ for _ in ()).throw(lost))
        with pytest.raises(TransportError):
            client.rotate_key()
        assert is_changing(StateDirectory.open(bench.folder))
        client.step()
        assert client.key_id == old
        client.close()
    after = bench.client()
    after.step()
    assert after.key_id != old
    assert not is_changing(StateDirectory.open(bench.folder))


def test_a_device_in_a_masked_session_keeps_its_key(bench: Bench) -> None:
    one_device_task(bench)
    client = bench.client(bench.operator.token())
    client.step()
    client.close()
    directory = StateDirectory.open(bench.folder)
    files = directory.task("digits")
    files.save_session(_Diary("an-assignment", b"", b"", ()).to_bytes())
    with pytest.raises(StateLocked):
        change_key(directory, bench.transport())
    files.close()
    with pytest.raises(Conflict, match="an-assignment of task 'digits'"):
        change_key(directory, bench.transport())
    assert not is_changing(directory)
    files = directory.task("digits")
    files.save_session(_Diary("", b"", b"", ()).to_bytes())
    files.close()
    change_key(directory, bench.transport())


def test_a_certificate_of_the_key_before_is_not_shown_any_more(bench: Bench) -> None:
    one_device_task(bench)
    client = bench.client(bench.operator.token())
    client.step()
    for _ in range(2):
        part = client._runner.masked.open_part(client._join(), may_ask=True)
        assert part is not None
        assert part.member.certificate.identity == client._enrolment.key.public
        client.rotate_key()


def test_what_is_no_change_of_key_says_why(bench: Bench) -> None:
    directory = StateDirectory.open(bench.folder)
    with pytest.raises(ConfigurationError, match="not enrolled"):
        change_key(directory, bench.transport())
    one_device_task(bench)
    client = bench.client(bench.operator.token())
    client.step()
    client.rotate_key()
    client.close()
    path = bench.folder / "rotations.json"
    one = rotations(directory)
    path.write_bytes(device_key._ROTATIONS.dump_json(one * MAX_ROTATIONS))
    with pytest.raises(ConfigurationError, match="256 times"):
        change_key(directory, bench.transport())
    path.write_text("[{}]")
    with pytest.raises(StateCorrupt, match=r"rotations\.json"):
        change_key(directory, bench.transport())


# Servers that go back


def test_a_server_from_before_the_change_learns_of_it(
    start: Start, clock: Clock, tmp_path: Path
) -> None:
    data, before, empty = (tmp_path / name for name in ("data", "before", "empty"))
    with start() as server:
        bench = Bench(Line(server), clock, tmp_path / "device")
        one_device_task(bench)
        bench.operator.post("/v1/admin/tasks/digits/pause")
        client = bench.client(bench.operator.token())
        client.step()
        client_id = client.ledger.client_id
    shutil.copytree(data, before)
    clock.advance(400)
    with start() as bench.line.server:
        for _ in range(2):
            client.rotate_key()
        client.step()
    clock.advance(400)
    with start(data_dir=before) as bench.line.server:
        client.step()
        client.step()
        shown = bench.operator.get(f"/v1/admin/clients/{client_id}")
        assert shown["key_id"] == client.key_id
        assert len(shown["former_keys"]) == 2
        bench.operator.post("/v1/admin/tasks/digits/resume")
        assert bench.finish(client).included == 2
        client.close()
    clock.advance(400)
    files = {name: before / f"{name[:-5].replace('_', '-')}.pem" for name in ("server_key_file",)}
    with start(data_dir=empty, **files) as bench.line.server:
        one_device_task(bench)
        with pytest.raises(UnknownDevice, match="does not know this device any more"):
            bench.client().step()
        again = bench.client(bench.operator.token())
        again.step()
        (shown,) = bench.operator.get("/v1/admin/clients")
        assert (shown["client_id"], shown["key_id"]) == (client_id, again.key_id)
