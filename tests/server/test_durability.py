"""What is acknowledged stays: restarts, failures at every write, and what they leave behind."""

import errno
import gc
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import anyio
import numpy as np
import pytest
import sqlalchemy as sa

from fedpress_protocols.errors import (
    AlreadyExists,
    ConfigurationError,
    FedpressError,
    NotFound,
    RoundClosed,
    ServerError,
    StorageFull,
    Unavailable,
)
from fedpress_protocols.messages import Receipt
from fedpress_protocols.model import Model
from fedpress_server.aggregation.accumulate import AggregationJob
from fedpress_server.aggregation.aggregate import aggregate
from fedpress_server.coordination import job_runner
from fedpress_server.coordination.file_cleanup import SWEEP_SECONDS
from fedpress_server.registry.sweeping import sweep
from fedpress_server.storage.database import Database
from fedpress_server.storage.payloads import LocalPayloads
from fedpress_server.storage.tables import models
from tests.devices import Device, Operator
from tests.server.in_process import Clock, Server, Start, include_one

ALONE = {"size": 1, "minimum": 1}
MOMENTUM = {"id": "fedavgm", "momentum": 0.9}


class Fails:
    """Wraps a function: its call number `at` fails, before it does anything or after it all."""

    def __init__(self, wrapped: Callable[..., Any], at: int, when: str) -> None:
        self.wrapped, self.at, self.when = wrapped, at, when
        self.calls = -1

    def __get__(self, owner: object, cls: type) -> Callable[..., Any]:
        return lambda *args: self(owner, *args)

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        if self.calls == self.at and self.when == "before":
            raise OSError("the failure that the test wants")
        result = self.wrapped(*args)
        if self.calls == self.at:
            raise OSError("the failure that the test wants")
        return result

    @property
    def is_past(self) -> bool:
        return self.calls >= self.at


class Party:
    """Two devices that take part, whatever happens, until the task is over."""

    def __init__(self, clock: Clock) -> None:
        self.devices = [Device(None, clock) for _ in range(2)]  # type: ignore[arg-type]
        self.pending: list[dict[str, bytes]] = [{}, {}]
        self.receipts: dict[str, Receipt] = {}

    def enrol(self, http: Server) -> None:
        operator = Operator(http)
        self.meet(http)
        for device in self.devices:
            device.enrol(operator.token())

    def meet(self, http: Server) -> None:
        for device in self.devices:
            device.http = http

    def step(self, index: int, wait: float) -> bool:
        """One turn of one device: send what is pending, ask for news. True at the task's end."""
        device, pending = self.devices[index], self.pending[index]
        for name, body in list(pending.items()):
            device.put(name, body)
        answer = device.check_in("digits", *pending, wait=wait)
        if answer is None:
            return False
        for signed in answer.receipts:
            name = signed.receipt.assignment
            assert self.receipts.setdefault(name, signed.receipt) == signed.receipt
            del pending[name]
        if answer.assignment is not None:
            plan, name = answer.assignment.plan, answer.assignment.assignment
            size = device.model(plan.model).spec.size
            update = np.full(size, plan.round + index, np.float32) / np.float32(8)
            pending[name] = device.body_for(answer.assignment, update, num_examples=index + 1)
            device.upload(name, pending[name])
        return answer.task.state != "running" and not pending


def begin(http: Server, party: Party, model: Model) -> None:
    party.enrol(http)
    strategy = {"id": "fedavgm", "momentum": 0.5}
    Operator(http).begin(model, rounds=2, strategy=strategy, cohort={"size": 2, "minimum": 2})


def outcome(http: Server, party: Party) -> tuple[str, list[tuple[str, int, int]]]:
    """The final model, and how each attempt ended."""
    operator = Operator(http)
    status = operator.get("/v1/tasks/digits")
    rounds = operator.get("/v1/tasks/digits/rounds")
    included = [receipt for receipt in party.receipts.values() if receipt.outcome == "included"]
    assert len(included) == sum(attempt["included"] for attempt in rounds) == 4
    return status["model"], [(a["state"], a["received"], a["included"]) for a in rounds]


def finish(http: Server, party: Party, is_enough: Callable[[], bool] = lambda: False) -> bool:
    """Go on until the task is over, or `is_enough`; refusals are met by trying again."""
    over = [False, False]
    party.meet(http)
    while not all(over):
        for index in range(2):
            with suppress(ServerError):
                over[index] = party.step(index, wait=0.05)
            if is_enough():
                return False
    return True


@pytest.fixture
def undisturbed(
    start: Start, clock: Clock, model: Model, tmp_path: Path
) -> tuple[str, list[tuple[str, int, int]]]:
    party = Party(clock)
    with start(data_dir=tmp_path / "undisturbed") as http:
        begin(http, party, model)
        finish(http, party)
        return outcome(http, party)


@pytest.mark.slow(short=True)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("cls", "function"), [(Database, "_commit"), (LocalPayloads, "put")], ids=["commit", "file"]
)
def test_a_server_that_dies_at_any_write_goes_on_where_it_was(
    start: Start,
    clock: Clock,
    model: Model,
    tmp_path: Path,
    undisturbed: tuple[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    cls: type,
    function: str,
    when: str,
    slow: bool,
) -> None:
    written = getattr(cls, function)
    for at in range(0, 100, 1 if slow else 19):
        party, folder = Party(clock), tmp_path / f"died-{at}"
        with start(data_dir=folder) as http:
            begin(http, party, model)
            fails = Fails(written, at, when)
            monkeypatch.setattr(cls, function, fails)
            is_over = finish(http, party, partial(getattr, fails, "is_past"))
        monkeypatch.setattr(cls, function, written)
        with start(data_dir=folder) as http:
            finish(http, party)
            assert outcome(http, party) == undisturbed
        if is_over:
            break
    assert at > 5


@pytest.mark.slow(short=True)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_server_that_fails_at_any_commit_recovers_by_itself(
    start: Start,
    clock: Clock,
    model: Model,
    tmp_path: Path,
    undisturbed: tuple[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    when: str,
    slow: bool,
) -> None:
    commit = Database._commit
    for at in range(0, 100, 1 if slow else 19):
        party = Party(clock)
        with start(data_dir=tmp_path / f"failed-{at}") as http:
            begin(http, party, model)
            fails = Fails(commit, at, when)
            monkeypatch.setattr(Database, "_commit", fails)
            finish(http, party)
            monkeypatch.setattr(Database, "_commit", commit)
            assert outcome(http, party) == undisturbed
        if not fails.is_past:
            break
    assert at > 5


@pytest.mark.both_databases
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_task_whose_beginning_failed_has_begun_or_not(
    http: Server, model: Model, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    operator = Operator(http)
    operator.bring(model)
    commit = Database._commit
    fails = Fails(commit, 1, when)  # the model's own commit comes first
    monkeypatch.setattr(Database, "_commit", fails)
    with pytest.raises(ServerError):
        operator.begin(model)
    monkeypatch.setattr(Database, "_commit", commit)
    if when == "before":
        operator.begin(model)
    else:
        with pytest.raises(AlreadyExists):
            operator.begin(model)
    assert [task["task"] for task in operator.get("/v1/tasks")] == ["digits"]
    assert len(operator.get("/v1/tasks/digits/rounds")) == 1


@pytest.mark.both_databases
def test_a_restart_keeps_assignments_acknowledgements_and_receipts(
    start: Start, clock: Clock, model: Model
) -> None:
    party = Party(clock)
    with start() as http:
        begin(http, party, model)
        first, second = party.devices
        assignment = first.assignment("digits")
        other = second.assignment("digits")
        key = first.server_key
    with start() as http:
        party.meet(http)
        assert first.assignment("digits") == assignment
        body = first.body_for(assignment, np.ones(12, np.float32))
        ack = first.upload(assignment.assignment, body)
    with start() as http:
        party.meet(http)
        again = first.put(assignment.assignment, body)
        assert (again.status_code, again.json()) == (200, ack.model_dump())
        assert first.check_in("digits", assignment.assignment) is None
        second.upload(other.assignment, second.body_for(other, np.ones(12, np.float32)))
        first.check_in("digits", assignment.assignment, wait=30)
        receipt = first.receipt(assignment.assignment)
    clock.advance(1000)
    with start() as http:
        party.meet(http)
        assert first.receipt(assignment.assignment) == receipt
        assert first.server_key == key
        assert first.put(assignment.assignment, body).json() == ack.model_dump()


@pytest.mark.both_databases
def test_a_deadline_that_passed_while_the_server_was_down_has_passed(
    start: Start, clock: Clock, model: Model
) -> None:
    party = Party(clock)
    with start() as http:
        begin(http, party, model)
        name = party.devices[0].assignment("digits").assignment
        party.devices[1].assignment("digits")
    clock.advance(61)
    with start() as http:
        party.meet(http)
        http.tick()
        receipt = party.devices[0].receipt(name)
        assert receipt is not None
        assert receipt.receipt.reason == "missed-deadline"
        assert party.devices[0].assignment("digits").plan.attempt == 2


def test_small_steps_of_a_16_bit_model_are_not_rounded_away(start: Start, clock: Clock) -> None:
    model = Model.from_tensors({"w": np.ones(4, np.float16)})
    with start() as http:
        device = Device(http, clock)
        device.enrol(Operator(http).token())
        Operator(http).begin(model, rounds=10, cohort={"size": 1, "minimum": 1})
        for _ in range(10):
            assignment = device.assignment("digits")
            step = np.full(4, 1e-4, np.float32)  # a tenth of the distance between numbers at 1
            device.upload(assignment.assignment, device.body_for(assignment, step))
            answer = device.check_in("digits", assignment.assignment, wait=30)
        assert answer is not None
        np.testing.assert_array_equal(
            device.model(answer.task.model).parameters, np.float32(np.float16(1.001))
        )


# What is left behind


def test_what_nothing_leads_to_is_swept_at_the_start(
    start: Start, clock: Clock, model: Model, tmp_path: Path
) -> None:
    party, data = Party(clock), tmp_path / "data"
    with start() as http:
        begin(http, party, model)
        device = party.devices[0]
        assignment = device.assignment("digits")
        device.upload(assignment.assignment, device.body_for(assignment, np.ones(12, np.float32)))
    (kept,) = (data / "uploads/digits/1-1").iterdir()
    stray = [
        data / "models/0123.tmp",
        data / f"models/{'0' * 64}.safetensors",
        data / f"optimizers/{'0' * 64}.safetensors",
        data / "uploads/digits/1-1/other",
        data / "uploads/digits/1-0/old",
    ]
    for path in stray:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"left behind")
    with start() as http:
        assert not any(path.exists() for path in stray)
        assert kept.exists()
        assert (data / f"models/{model.digest}.safetensors").exists()
        finish(http, party)
    with start():
        assert list((data / "uploads/digits").iterdir()) == []


def test_a_replaced_optimizer_state_is_dropped(
    start: Start, clock: Clock, model: Model, tmp_path: Path
) -> None:
    party = Party(clock)
    with start() as http:
        begin(http, party, model)
        finish(http, party)
        assert len(list((tmp_path / "data/optimizers").iterdir())) == 1


@pytest.mark.both_databases
def test_an_upload_that_came_too_late_leaves_no_file(
    start: Start, clock: Clock, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    party = Party(clock)
    with start() as http:
        begin(http, party, model)
        device = party.devices[0]
        assignment = device.assignment("digits")
        body = device.body_for(assignment, np.ones(12, np.float32))
        payloads, dropped = http.app.services.payloads, threading.Event()
        put, drop = payloads.put, payloads.drop

        def put_late(name: str, data: bytes) -> None:
            Operator(http).post("/v1/admin/tasks/digits/cancel")
            assert dropped.wait(30)
            put(name, data)

        def drop_and_tell(name: str) -> None:
            drop(name)
            dropped.set()

        monkeypatch.setattr(payloads, "put", put_late)
        monkeypatch.setattr(payloads, "drop", drop_and_tell)
        with pytest.raises(RoundClosed):
            device.upload(assignment.assignment, body)
        database = http.app.services.database
        if database.is_shared:  # another server's row may lead to it: the sweeper looks first
            http.call(sweep, database, payloads, clock())
        left = (tmp_path / "data/uploads").rglob("*")
        assert [path for path in left if path.is_file()] == []


def test_uploads_that_the_store_does_not_remove_are_left_to_the_sweep(
    start: Start,
    clock: Clock,
    model: Model,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    away = Unavailable("the store does not answer", retry_after=5)
    with start() as http:
        operator, device = Operator(http), Device(http, clock)
        device.enrol(operator.token())
        operator.begin(model, rounds=2, cohort={"size": 1, "minimum": 1})
        payloads, cleanup = http.app.services.payloads, http.app.services.scheduler._cleanup
        drop = mock.Mock(side_effect=away)
        monkeypatch.setattr(payloads, "drop", drop)
        name = include_one(device, model)
        assert device.check_in("digits", name, wait=30) is not None
        until = time.monotonic() + 20
        while cleanup._left_at is None and time.monotonic() < until:
            time.sleep(0.01)
        gc.collect()
        told = [each for each in caplog.records if each.levelno >= logging.WARNING]
        assert [each.exc_info for each in told] == [None]
        said = "uploads of a round that is over could not be removed yet: the store does not"
        assert told[0].getMessage().startswith(said)

        def uploads() -> list[Path]:
            found = (tmp_path / "data/uploads/digits/1-1").glob("*")
            return [path for path in found if path.is_file()]

        (left,) = uploads()
        os.utime(left, (0, 0))
        clock.advance(SWEEP_SECONDS + 1)
        with pytest.raises(Unavailable):
            http.call(cleanup.sweep_if_due)
        monkeypatch.undo()
        http.call(cleanup.sweep_if_due)
        assert uploads() == [left], "in an hour again"
        clock.advance(SWEEP_SECONDS + 1)
        http.call(cleanup.sweep_if_due)
        assert uploads() == []


class Gate:
    """Aggregations of tasks whose names begin with "slow" wait until it opens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waiting, self.open = threading.Semaphore(0), threading.Event()

        def held(job: AggregationJob, *args: Any) -> Any:
            if job.terms.plan.task.startswith("slow"):
                self.waiting.release()
                assert self.open.wait(60)
            return aggregate(job, *args)

        monkeypatch.setattr(job_runner, "aggregate", held)


def test_states_that_are_replaced_while_another_task_aggregates_are_swept(
    start: Start, clock: Clock, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    with start() as http:
        operator, device = Operator(http), Device(http, clock)
        device.enrol(operator.token())
        for name in ("slow", "fast"):
            operator.begin(model, name, strategy=MOMENTUM, cohort=ALONE, rounds=9)
        include_one(device, model, "slow")
        assert gate.waiting.acquire(timeout=60)
        for _ in range(4):
            name = include_one(device, model, "fast")
            assert device.check_in("fast", name, wait=30) is not None
        states = tmp_path / "data/optimizers"
        assert len(list(states.iterdir())) == 4
        for path in states.iterdir():
            os.utime(path, (0, 0))
        clock.advance(SWEEP_SECONDS + 1)
        http.call(http.app.services.scheduler._cleanup.sweep_if_due)
        assert len(list(states.iterdir())) == 1
        gate.open.set()


def test_a_download_does_not_wait_for_aggregations(
    start: Start, clock: Clock, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    with start(worker_threads=2) as http:
        operator, device = Operator(http), Device(http, clock)
        device.enrol(operator.token())
        operator.begin(model, "coded", downlink={}, cohort=ALONE)
        for name in ("slow-1", "slow-2"):
            operator.begin(model, name, cohort=ALONE)
            include_one(device, model, name)
            assert gate.waiting.acquire(timeout=60)
        digest = operator.get("/v1/tasks/coded")["model"]
        answer = device.json("GET", f"/v1/models/{digest}/coded?task=coded")
        assert answer.status_code == 200
        assert not gate.open.is_set()
        gate.open.set()


def test_bases_that_cannot_be_removed_hold_nobody_up(
    start: Start, clock: Clock, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes after the commit goes on: who waits is woken, and the bodies are removed."""
    with start() as http:
        operator, device = Operator(http), Device(http, clock)
        device.enrol(operator.token())
        members = [device.client_id]
        delta = {"id": "delta", "inner": {"id": "none"}}
        profiles = [{"name": "one", "compressor": delta}]
        operator.begin(model, cohort=ALONE, rounds=4, members=members, profiles=profiles)
        drop = LocalPayloads.drop

        def refuses(self: LocalPayloads, name: str) -> None:
            if name.startswith("bases/"):
                raise OSError(errno.EIO, "Input/output error")
            drop(self, name)

        monkeypatch.setattr(LocalPayloads, "drop", refuses)
        for number in (1, 2, 3):
            name = include_one(device, model, value=float(number))
            assert device.check_in("digits", name, wait=30) is not None
            assert operator.get("/v1/tasks/digits")["round"] == number
        until = time.monotonic() + 30
        while any((tmp_path / "data/uploads/digits").rglob("*-*/*")) and time.monotonic() < until:
            time.sleep(0.01)
        left = (tmp_path / "data/uploads/digits").rglob("*")
        assert not [path for path in left if path.is_file()]
        assert http.app.services.scheduler._cleanup._left_at is not None


def test_a_file_that_has_become_shorter_breaks_its_download_off(
    start: Start, model: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with start() as http:
        operator = Operator(http)
        digest = operator.bring(model)
        path = tmp_path / "data/models" / f"{digest}.safetensors"
        path.write_bytes(path.read_bytes()[:-3])
        with pytest.raises(AssertionError):  # httpx's, of an answer without an end
            http.get(f"/v1/models/{digest}", headers=operator.headers)
    assert "a file ends at byte" in caplog.text


def test_what_is_secret_is_the_owner_s_alone(start: Start, tmp_path: Path) -> None:
    with start():
        data = tmp_path / "data"
        assert stat.S_IMODE(data.stat().st_mode) == 0o700
        assert stat.S_IMODE((data / "server-key.pem").stat().st_mode) == 0o600


def test_a_data_folder_serves_one_server(start: Start) -> None:
    with start(), pytest.raises(ConfigurationError, match="another server"), start():
        pass


def test_a_full_disk_is_told_and_leaves_nothing(
    start: Start, clock: Clock, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    party = Party(clock)
    with start() as http:
        begin(http, party, model)
        device = party.devices[0]
        assignment = device.assignment("digits")
        body = device.body_for(assignment, np.ones(12, np.float32))

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            with pytest.raises(StorageFull) as caught:
                LocalPayloads(tmp_path / "data").put("file", b"data")
        assert caught.value.status == 507
        assert not (tmp_path / "data/file").exists()
        assert not list((tmp_path / "data").rglob("*.tmp"))

        def put(*_: object) -> None:
            raise StorageFull("no space", retry_after=60)

        with monkeypatch.context() as patch:
            patch.setattr(http.app.services.payloads, "put", put)
            answer = device.put(assignment.assignment, body)
        assert (answer.status_code, answer.headers["retry-after"]) == (507, "60")
        device.upload(assignment.assignment, body)


def test_payloads_are_found_or_not(tmp_path: Path) -> None:
    payloads = LocalPayloads(tmp_path / "p")
    payloads.put("a/b", b"1")
    payloads.put("a/b", b"1")
    assert payloads.get("a/b") == b"1"
    assert list(payloads.names("a")) == ["a/b"]
    assert list(payloads.names("none")) == []
    payloads.drop("a")
    payloads.drop("a")
    with pytest.raises(NotFound):
        payloads.get("a/b")


# The database


@pytest.fixture
def database(tmp_path: Path, database_url: Callable[[Path], str]) -> Iterator[Database]:
    opened = Database(database_url(tmp_path) or f"sqlite:///{tmp_path / 'test.db'}")
    yield opened
    opened.close()


@pytest.mark.both_databases
def test_writes_that_share_a_commit_fail_alone(database: Database) -> None:
    def add(connection: sa.Connection, number: int) -> int:
        row = {"digest": str(number), "spec": "", "num_bytes": 0, "created_at": 0.0}
        connection.execute(sa.insert(models), row)
        if number % 3 == 0:
            raise ServerError(f"{number}")
        return number

    def write(number: int) -> int | str:
        try:
            return anyio.run(database.write, lambda c: add(c, number))
        except FedpressError as exc:
            return exc.detail

    with ThreadPoolExecutor(30) as pool:
        results = list(pool.map(write, range(30)))
    assert results == [number if number % 3 else str(number) for number in range(30)]
    found = anyio.run(database.read, lambda c: set(c.execute(sa.select(models.c.digest)).scalars()))
    assert found == {str(number) for number in range(30) if number % 3}


def test_acknowledged_writes_outlive_a_power_cut(database: Database) -> None:
    def pragmas(connection: sa.Connection) -> list[Any]:
        return [
            connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys")
        ]

    assert anyio.run(database.read, pragmas) == ["wal", 2, 1]
    assert anyio.run(database.write, pragmas) == ["wal", 2, 1]
