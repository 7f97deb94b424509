"""Whatever devices, operators, workers and faults do, in any order: counted once or not at all.

Random lists of operations under a clock that the test turns, on one server or on two that share a
database and a store, as Janus tests its aggregator. Every upload is zero but at one coordinate of
its own, so the last model says what it was made of: a 2 is an upload counted twice, a 0 for one
whose receipt says `included` an upload lost. Requests may be dropped before they arrive, or their
answers after; no answer may be a 5xx but where a fault was planted in the server itself.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fedpress_compression.contexts import contexts_of
from fedpress_protocols.errors import (
    Conflict,
    FedpressError,
    Forbidden,
    RoundClosed,
    UnknownAssignment,
    UpdateConflict,
)
from fedpress_protocols.messages import Assignment, Receipt, RoundStatus, UploadAck
from fedpress_protocols.model import Model
from fedpress_protocols.signatures import DeviceKey
from fedpress_protocols.upload import Upload
from fedpress_server import Settings, app, create_app, failpoints, services
from fedpress_server.api.listeners import Listening
from fedpress_server.coordination.job_runner import JobRunner
from fedpress_server.coordination.scheduler import Scheduler
from fedpress_server.identity.authentication import Authenticator
from fedpress_server.services import Services, assembled
from fedpress_server.storage.database import migrate
from fedpress_server.storage.payloads import LocalPayloads
from tests.devices import ADMIN_TOKEN, Device, Operator, checked
from tests.postgres import Cluster
from tests.server.in_process import Clock, Server, running

SIZE = 256
FIRST = Model.from_tensors({"weight": np.zeros(SIZE, np.float32)})
ONE, NAN = (np.float32(value).tobytes() for value in (1.0, np.nan))
BEGIN = 1_800_000_000.0
DEVICES = 5
ROUNDS = 4
TURNS = 400
AT_REQUESTS = (
    "file-written",
    "file-kept",
    "upload-kept",
    "commit-due",
    "committed",
    "upload-committed",
    "request-answered",
)
AT_WORK = (
    "job-leased",
    "upload-added",
    "model-stepped",
    "model-kept",
    "round-committed",
    "file-kept",
    "commit-due",
    "committed",
)


class Lost(Exception):
    """Nobody heard what was asked, or what was answered."""


class Line:
    """The way to a server, which may lose the next request, or the next answer."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.base_url = server.base_url
        self.fault: str | None = None

    def request(self, method: str, path: str, **how: Any) -> httpx.Response:
        fault, self.fault = self.fault, None
        if fault == "request":
            raise Lost
        answer = self._server.request(method, path, **how)
        if fault is not None and fault.startswith("in server"):
            raise Lost
        assert answer.status_code < 500, answer.text
        if fault == "answer":
            raise Lost
        return answer

    def get(self, path: str, **how: Any) -> httpx.Response:
        return self.request("GET", path, **how)

    def post(self, path: str, **how: Any) -> httpx.Response:
        return self.request("POST", path, **how)

    def put(self, path: str, **how: Any) -> httpx.Response:
        return self.request("PUT", path, **how)


class Place:
    """A database, a store and up to two servers there, for one life after the other."""

    def __init__(self, folder: Path, cluster: Cluster | None) -> None:
        """Without a cluster the database is a SQLite file."""
        self.clock = Clock()
        self._store, self._cluster = folder / "store", cluster
        self._file, self._template = folder / "test.db", folder / "template.db"
        if cluster is None:
            migrate(f"sqlite:///{self._template}")
        self.url = f"sqlite:///{self._file}" if cluster is None else cluster.new()
        self._folders = [folder / f"server{number}" for number in (0, 1)]
        key = folder / "key.pem"
        key.write_bytes(DeviceKey.generate().to_pem())
        self._apps: list[Listening] = []
        for each in self._folders:
            options: dict[str, Any] = {
                "data_dir": each,
                "database_url": self.url,
                "admin_token": ADMIN_TOKEN,
                "server_key_file": key,
                "authority_key_file": key,
                "retention_grace": 1.0,
                "lease_seconds": 60.0,
            }
            self._apps.append(create_app(Settings(**options), clock=self.clock))

    def clear(self) -> None:
        self.clock.now = BEGIN
        for folder in (self._store, *self._folders):
            shutil.rmtree(folder, ignore_errors=True)
        if self._cluster is not None:
            self._cluster.give_back(self.url)
            assert self._cluster.new() == self.url
            return
        for path in self._file.parent.glob(f"{self._file.name}*"):
            path.unlink()
        shutil.copy(self._template, self._file)

    @property
    def uploads(self) -> list[Path]:
        """The files of uploads that the store has."""
        return [path for path in (self._store / "uploads").rglob("*") if path.is_file()]

    @contextmanager
    def server(self, number: int, *, is_alone: bool) -> Iterator[Server]:
        """One of the servers. What servers do of themselves, the test does: deadlines, work."""
        store = LocalPayloads(self._store)
        shared = None if is_alone else True

        async def idle(self: object) -> None:
            await asyncio.Event().wait()

        with ExitStack() as stack:
            # Undone as soon as it has started: servers end in any order, and patches may not.
            with (
                mock.patch.object(app, "opened_payloads", return_value=store),
                mock.patch.object(app, "assembled", partial(assembled, is_shared=shared)),
                mock.patch.object(
                    services, "Authenticator", partial(Authenticator, is_shared=shared)
                ),
                mock.patch.object(Scheduler, "_tick_forever", idle),
                mock.patch.object(Scheduler, "_follow_forever", idle),
                mock.patch.object(JobRunner, "serve", idle),
            ):
                server = stack.enter_context(running(self._apps[number]))
            yield server


class Member:
    """A device, and all that it was ever told."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.given: list[Assignment] = []
        """In the order in which they came; the last one is what it works on."""
        self.sent: set[str] = set()
        """What may be on the server, whether that was acknowledged or not."""
        self.acknowledged: dict[str, UploadAck] = {}
        self.receipts: dict[str, Receipt] = {}
        self.declined: dict[str, dict[str, Any]] = {}
        """What the server answered when an assignment was given back."""

    @property
    def pending(self) -> list[str]:
        return sorted(self.sent - self.receipts.keys())

    @property
    def is_asked(self) -> bool:
        """Whether it has work of which it was not told that it is staged."""
        return bool(self.given) and self.given[-1].assignment not in self.acknowledged


servers_ = st.integers(0, 1)
members_ = st.integers(0, DEVICES - 1)
faults = st.sampled_from([None, None, None, "request", "answer"])


class AnyOrder(RuleBasedStateMachine):
    """One life of a task."""

    def __init__(self, place: Place, done: Counter[str]) -> None:
        super().__init__()
        self.place, self.done = place, done
        place.clear()
        self.members: list[Member] = []
        self.places: dict[str, int] = {}
        self.stacks: list[ExitStack] = []
        self.servers: list[Server] = []
        self.is_cancelled = False

    @initialize(
        number=st.integers(1, 2),
        size=st.integers(2, 3),
        spare=st.integers(0, 2),
        keeps=st.booleans(),
    )
    def begin(self, number: int, size: int, spare: int, keeps: bool) -> None:
        for index in range(number):
            self.stacks.append(ExitStack())
            server = self.place.server(index, is_alone=number == 1)
            self.servers.append(self.stacks[-1].enter_context(server))
        retention: dict[str, Any] = {"retention": {"last": 1}} if keeps else {}
        Operator(self.servers[0]).begin(
            FIRST,
            rounds=ROUNDS,
            cohort={"size": size, "minimum": max(1, size - spare)},
            round_seconds=60.0,
            max_attempts=1000,
            **retention,
        )
        for _ in range(size):
            self.enrol(0, None)

    # Devices

    @rule(server=servers_, fault=faults)
    @precondition(lambda self: self.servers and len(self.members) < DEVICES)
    def enrol(self, server: int, fault: str | None) -> None:
        token = Operator(self._at(server)).token()
        device = Device(Line(self._at(server)), self.place.clock)  # type: ignore[arg-type]
        device.http.fault = fault  # type: ignore[attr-defined]
        try:
            device.enrol(token)
        except Lost:
            device.enrol(token)
        self.members.append(Member(device))
        self.done["enrol"] += 1

    @rule(server=servers_, member=members_, fault=faults)
    def check_in(self, server: int, member: int, fault: str | None) -> None:
        who = self._who(member, server, fault)
        try:
            answer = who.device.check_in("digits", *who.pending)
        except Lost:
            return
        self.done["check-in"] += 1
        if answer is None:
            return
        for signed in answer.receipts:
            name = signed.receipt.assignment
            assert name in who.sent
            assert who.receipts.setdefault(name, signed.receipt) == signed.receipt
        given = answer.assignment
        if given is not None and given.assignment not in self.places:
            who.given.append(given)
            self.places[given.assignment] = len(self.places)

    @rule(server=servers_, member=members_, fault=faults)
    @precondition(lambda self: any(who.given for who in self.members))
    def upload(self, server: int, member: int, fault: str | None) -> None:
        """What the device was last given, however long ago."""
        who = self._who(member, server, fault)
        if not who.given:
            return
        name = who.given[-1].assignment
        who.sent.add(name)
        try:
            answer = checked(who.device.put(name, self._body(who.given[-1])))
        except Lost:
            return
        except RoundClosed:
            assert name not in who.acknowledged
            self.done["closed"] += 1
            return
        self._told(who, name, answer)
        self.done["upload"] += 1

    @rule(servers=st.tuples(servers_, servers_), faults=st.tuples(faults, faults))
    def all_take_part(
        self, servers: tuple[int, int], faults: tuple[str | None, str | None]
    ) -> None:
        """Every device comes, to whichever server, and sends what it has."""
        for member in range(len(self.members)):
            self.check_in(servers[0] + member, member, faults[0])
            self.upload(servers[1] + member, member, faults[1])

    @rule(server=servers_, member=members_, pick=st.integers(0, 20), fault=faults)
    @precondition(lambda self: any(who.acknowledged for who in self.members))
    def upload_again(self, server: int, member: int, pick: int, fault: str | None) -> None:
        """The same bytes get the same answer, for ever."""
        who = self._who(member, server, fault, lambda who: bool(who.acknowledged))
        name = sorted(who.acknowledged, key=self.places.__getitem__)[pick % len(who.acknowledged)]
        given = next(each for each in who.given if each.assignment == name)
        try:
            answer = checked(who.device.put(name, self._body(given)))
        except Lost:
            return
        assert answer.status_code == 200
        self._told(who, name, answer)
        self.done["upload again"] += 1

    @rule(server=servers_, member=members_, pick=st.integers(0, 20))
    @precondition(lambda self: any(who.acknowledged for who in self.members))
    def upload_other_bytes(self, server: int, member: int, pick: int) -> None:
        who = self._who(member, server, None, lambda who: bool(who.acknowledged))
        name = sorted(who.acknowledged, key=self.places.__getitem__)[pick % len(who.acknowledged)]
        given = next(each for each in who.given if each.assignment == name)
        with pytest.raises(UpdateConflict):
            checked(who.device.put(name, self._body(given, value=2.0)))
        self.done["other bytes"] += 1

    @rule(
        server=servers_,
        member=members_,
        damage=st.sampled_from(["empty", "short", "long", "flipped", "not finite"]),
    )
    @precondition(lambda self: any(who.is_asked for who in self.members))
    def upload_invalid(self, server: int, member: int, damage: str) -> None:
        who = self._who(member, server, None, lambda who: who.is_asked)
        given = who.given[-1]
        body = self._body(given)
        damaged = {
            "empty": b"",
            "short": body[:-1],
            "long": body + b"\0",
            "flipped": bytes([body[0] ^ 0x80]) + body[1:],
            "not finite": body.replace(ONE, NAN),
        }[damage]
        assert damaged != body
        with pytest.raises(FedpressError) as caught:
            checked(who.device.put(given.assignment, damaged))
        assert caught.value.status in (400, 409, 413, 422), caught.value
        self.done[f"invalid: {type(caught.value).__name__}"] += 1

    @rule(server=servers_, member=members_, of=members_)
    @precondition(lambda self: any(who.given for who in self.members))
    def upload_to_anothers(self, server: int, member: int, of: int) -> None:
        who, other = self._who(member, server, None), self.members[of % len(self.members)]
        if who is other or not other.given:
            return
        with pytest.raises((Forbidden, UnknownAssignment)):
            checked(who.device.put(other.given[-1].assignment, self._body(other.given[-1])))

    @rule(
        server=servers_,
        member=members_,
        fault=faults,
        query=st.sampled_from(["", "?reason=training-failed", "?reason=too-slow&needed_seconds=9"]),
    )
    @precondition(lambda self: any(who.given for who in self.members))
    def decline(self, server: int, member: int, fault: str | None, query: str) -> None:
        who = self._who(member, server, fault)
        if not who.given:
            return
        name = who.given[-1].assignment
        try:
            answer = who.device.json("DELETE", f"/v1/assignments/{name}{query}")
        except Lost:
            return
        except Conflict:
            assert name in who.sent
        else:
            receipt = answer.json()["receipt"]
            assert who.declined.setdefault(name, receipt) == receipt, "one answer for ever"
        self.done["decline"] += 1

    @rule(
        server=servers_,
        member=members_,
        point=st.sampled_from(AT_REQUESTS),
        at=st.integers(1, 2),
    )
    @precondition(lambda self: any(who.given for who in self.members))
    def upload_where_the_server_fails(self, server: int, member: int, point: str, at: int) -> None:
        with failpoints.armed(f"{point}:raise:{at}"):
            self.upload(server, member, f"in server: {point}")

    @rule(server=servers_, member=members_, point=st.sampled_from(("commit-due", "committed")))
    def check_in_where_the_server_fails(self, server: int, member: int, point: str) -> None:
        with failpoints.armed(f"{point}:raise"):
            self.check_in(server, member, f"in server: {point}")

    # Servers

    @rule(server=servers_)
    def work(self, server: int) -> None:
        self.done["work"] += self._at(server).call(self._services(server).job_runner.once)

    @rule(server=servers_, point=st.sampled_from(AT_WORK), at=st.integers(1, 2))
    def work_that_fails(self, server: int, point: str, at: int) -> None:
        with failpoints.armed(f"{point}:raise:{at}"):
            try:
                self._at(server).call(self._services(server).job_runner.once)
            except failpoints.FailpointReached:
                self.done["worker failed"] += 1

    @rule(server=servers_)
    def tick(self, server: int) -> None:
        self._at(server).tick()

    @rule(seconds=st.sampled_from([1.0, 20.0, 61.0, 200.0]))
    def advance_time(self, seconds: float) -> None:
        self.place.clock.advance(seconds)

    @rule(server=servers_)
    def restart(self, server: int) -> None:
        index = server % len(self.servers)
        self.stacks[index].close()
        alone = len(self.servers) == 1
        self.servers[index] = self.stacks[index].enter_context(
            self.place.server(index, is_alone=alone)
        )
        self.done["restart"] += 1

    @rule(server=servers_)
    def collect_garbage(self, server: int) -> None:
        self.place.clock.advance(2.0)
        collected = self._at(server).call(self._services(server).retention.collect)
        self.done["collected"] += len(collected.models)

    # Operators

    @rule(server=servers_, action=st.sampled_from(["pause", "resume", "resume", "abort-round"]))
    def operate(self, server: int, action: str) -> None:
        try:
            Operator(self._at(server)).post(f"/v1/admin/tasks/digits/{action}")
            self.done[action] += 1
        except Conflict:
            pass

    @rule(server=servers_, odds=st.integers(0, 7))
    def cancel(self, server: int, odds: int) -> None:
        if odds == 7 and not self.is_cancelled:
            try:
                Operator(self._at(server)).post("/v1/admin/tasks/digits/cancel")
                self.is_cancelled = True
                self.done["cancel"] += 1
            except Conflict:
                pass

    # What must be so

    def teardown(self) -> None:
        try:
            if self.servers:
                self._come_to_an_end()
                self._check()
                self.restart(0)
                self._check()
                if len(self.servers) == 1:
                    assert not self.place.uploads, "a start leaves nothing of what is over"
        finally:
            for stack in self.stacks:
                stack.close()

    def _come_to_an_end(self) -> None:
        operator = Operator(self.servers[0])
        with suppress(Conflict):
            operator.post("/v1/admin/tasks/digits/resume")
        for turn in range(TURNS):
            for member in range(len(self.members)):
                self.check_in(turn + member, member, None)
                self.upload(turn + member + 1, member, None)
            self.work(turn)
            self.collect_garbage(turn)
            self.place.clock.advance(5.0)
            self.tick(turn + 1)
            state = operator.get("/v1/tasks/digits")["state"]
            if state != "running" and not any(
                who.acknowledged.keys() - who.receipts.keys() for who in self.members
            ):
                return
        raise AssertionError("the task does not end")

    def _check(self) -> None:
        summaries = [Operator(server).get("/v1/tasks/digits") for server in self.servers]
        assert all(each == summaries[0] for each in summaries)
        expected = np.zeros(SIZE)
        included: Counter[tuple[int, int]] = Counter()
        by_round: dict[tuple[int, int], list[str]] = {}
        for who in self.members:
            assert who.acknowledged.keys() <= who.receipts.keys(), "acknowledged, and no receipt"
            for name, receipt in who.receipts.items():
                if receipt.outcome == "included":
                    included[receipt.round, receipt.attempt] += 1
                    by_round.setdefault((receipt.round, receipt.attempt), []).append(name)
        history = [
            RoundStatus.model_validate(each)
            for each in Operator(self.servers[-1]).get("/v1/tasks/digits/rounds")
        ]
        declined = Counter(
            (each["round"], each["attempt"])
            for who in self.members
            for each in who.declined.values()
            if each["reason"] == "declined"
        )
        for status in history:
            assert sum(status.declined.values()) >= declined[status.round, status.attempt]
            names = by_round.pop((status.round, status.attempt), [])
            assert status.included == len(names)
            for name in names:
                expected[self.places[name]] += 1 / len(names)
            assert (status.state == "committed") == bool(names)
            assert status.state != "abandoned" or status.reason
        assert not by_round, "a receipt of a round that never was"
        committed = [status.round for status in history if status.state == "committed"]
        assert committed == list(range(1, len(committed) + 1))
        who = self._who(0, 0, None)
        model = who.device.model(summaries[0]["model"], "digits")
        np.testing.assert_allclose(model.parameters, expected, atol=1e-6)
        self.done["included"] += sum(included.values())

    # How

    def _at(self, server: int) -> Server:
        return self.servers[server % len(self.servers)]

    def _services(self, server: int) -> Services:
        found: Services = self._at(server).app.services
        return found

    def _who(
        self,
        member: int,
        server: int,
        fault: str | None,
        suits: Callable[[Member], bool] = lambda who: True,
    ) -> Member:
        """One of the members that suit, ready to ask a server."""
        found = [who for who in self.members if suits(who)]
        who = found[member % len(found)]
        line = Line(self._at(server))
        line.fault = fault
        who.device.http = line  # type: ignore[assignment]
        return who

    def _told(self, who: Member, name: str, answer: httpx.Response) -> None:
        told = UploadAck.model_validate_json(answer.content)
        if answer.status_code == 201:
            assert name not in who.acknowledged, "what is staged is not new"
        assert who.acknowledged.setdefault(name, told) == told

    def _body(self, assignment: Assignment, value: float = 1.0) -> bytes:
        update = np.zeros(SIZE, np.float32)
        update[self.places[assignment.assignment]] = value
        plan = assignment.plan
        compressor, public = plan.compressor(assignment.profile), plan.public(FIRST.spec)
        rng = np.random.default_rng(0)
        symbols, _ = compressor.compress(update, compressor.init(FIRST.spec), public, rng)
        layout = compressor.layout(FIRST.spec)
        made = Upload(plan.profile_index(assignment.profile), 1, symbols)
        return made.to_bytes(layout, contexts_of(layout, public))


@pytest.mark.soak
@pytest.mark.slow(short=True)
@pytest.mark.both_databases
def test_whatever_happens_every_upload_counts_once_or_not_at_all(
    tmp_path: Path,
    dialect: str,
    request: pytest.FixtureRequest,
    slow: bool,
    soak: bool,
    record_property: Callable[[str, object], None],
) -> None:
    cluster = None if dialect == "sqlite" else request.getfixturevalue("cluster")
    place, done = Place(tmp_path, cluster), Counter[str]()
    run_state_machine_as_test(
        lambda: AnyOrder(place, done),  # type: ignore[arg-type]  # "a callable", as documented
        settings=settings(
            max_examples=300 if soak else 6 if slow else 2,
            stateful_step_count=50 if soak else 30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    told = ", ".join(f"{what} {number}" for what, number in sorted(done.items()))
    record_property("figure", f"operations in any order: {told}")
