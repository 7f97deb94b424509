"""Asynchronous tasks over HTTP: slow and fast devices, restarts, failing disks, what is refused.

Where uploads are one-hot vectors of weight 1 and age makes no difference, a model of buffers of K
is K times the indicator of what was counted: a 2 would be an upload counted twice.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config

from fedpress_compression.tensors import Vector
from fedpress_protocols.errors import (
    FedpressError,
    NotFound,
    RoundClosed,
    ServerError,
)
from fedpress_protocols.messages import Assignment, Receipt
from fedpress_protocols.model import Model
from fedpress_server.aggregation.aggregate import aggregate
from fedpress_server.coordination import job_runner
from fedpress_server.storage.database import Database
from fedpress_server.storage.payloads import LocalPayloads
from tests.devices import Device, Operator
from tests.server.in_process import Clock, Enrolled, Server, Start, history, ones
from tests.server.test_durability import Fails

BUFFER = 2
PAIRS: dict[str, Any] = {
    "cohort": {"size": BUFFER, "minimum": BUFFER},
    "asynchronous": {"concurrency": 8, "max_staleness": 3},
    "strategy": {"id": "fedbuff"},
    "rounds": 6,
}
SINGLY = {**PAIRS, "cohort": {"size": 1, "minimum": 1}}
MIXING = {"id": "fedasync", "mixing": 0.5}


def send(device: Device, assignment: Assignment, update: Vector, num_examples: int = 1) -> None:
    body = device.body_for(assignment, update, num_examples)
    device.upload(assignment.assignment, body)


def work_of(device: Device) -> Assignment:
    """What the device has to do, once the model before is there."""
    answer = device.check_in("digits", wait=30)
    assert answer is not None
    assert answer.assignment is not None
    return answer.assignment


def until(http: Server, number: int) -> Model:
    """The model `number` of the task, once there is one."""
    for _ in range(3000):
        found = [s for s in history(Operator(http)) if s.round == number and s.model]
        if found:
            answer = http.get(f"/v1/models/{found[0].model}", headers=Operator(http).headers)
            return Model.from_bytes(answer.content)
        time.sleep(0.01)
    raise AssertionError(f"no model {number}")


def reason(device: Device, assignment: Assignment) -> str:
    signed = device.receipt(assignment.assignment)
    return "" if signed is None else signed.receipt.reason


def test_the_slow_block_nobody_and_count_by_their_age(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model, **PAIRS)
    slow, fast, other = enrolled(), enrolled(), enrolled()
    late = work_of(slow)
    for number in (1, 2):
        for device in (fast, other):
            given = work_of(device)
            assert (given.plan.round, given.turn) == (number, 0)
            send(device, given, ones(model))
        until(http, number)
    assert work_of(slow).assignment == late.assignment
    send(slow, late, ones(model, 3.0), num_examples=2)
    send(fast, work_of(fast), ones(model), num_examples=1)
    made = until(http, 3)
    # The slow one is two models behind: 2 examples count 2 / sqrt(3) of 3 in all.
    share = round(1024 / np.sqrt(3)) / 1024
    assert made.parameters == pytest.approx(model.parameters + 2 + (2 * share * 3 + 1) / 3, 1e-6)
    assert reason(slow, late) == "included"
    receipt = slow.receipt(late.assignment)
    assert receipt is not None
    assert (receipt.receipt.round, receipt.receipt.attempt) == (1, 1)
    assert receipt.receipt.model == operator.get("/v1/tasks/digits")["model"]
    assert [s.included for s in history(operator)] == [2, 2, 2, 0]
    assert [s.assigned for s in history(operator)] == [3, 2, 1, 0]


def test_one_device_may_fill_a_buffer_alone(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model, **PAIRS)
    device = enrolled()
    turns = []
    for _ in range(BUFFER):
        given = work_of(device)
        turns.append(given.turn)
        send(device, given, ones(model))
    until(http, 1)
    assert turns == [0, 1]


def test_an_upload_is_read_as_its_own_plan_has_it(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    """Which coordinates are sent depends on the round's seed, what is predicted on its models."""
    drawn = {"id": "cafe", "inner": {"id": "randomk", "fraction": 0.4}, "guard": None}
    operator.begin(model, **SINGLY, profiles=[{"name": "drawn", "compressor": drawn}])
    slow, fast = enrolled(), enrolled()
    send(fast, work_of(fast), ones(model))
    until(http, 1)
    late = work_of(slow)
    for number in (2, 3):
        send(fast, work_of(fast), ones(model, number))
        before = until(http, number)
    update = np.arange(1, 13, dtype=np.float32)
    sent = decoded(slow, late, update)
    send(slow, late, update)
    made = until(http, 4)
    share = round(1024 / np.sqrt(3)) / 1024
    assert made.parameters == pytest.approx(before.parameters + share * sent, abs=1e-5)
    assert np.count_nonzero(sent) > 0


def decoded(device: Device, assignment: Assignment, update: Vector) -> Vector:
    """What the upload that says `update` stands for."""
    held = device.model(assignment.plan.model)
    public = assignment.plan.public(held.spec, device.known(assignment, held))
    compressor = assignment.plan.compressor(assignment.profile)
    rng = np.random.default_rng(0)
    symbols, _ = compressor.compress(update, compressor.init(held.spec), public, rng)
    return compressor.decompress(symbols, public).dense()


def test_fedasync_moves_towards_each_model_as_it_comes(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model, **SINGLY | {"strategy": MIXING})
    slow, fast = enrolled(), enrolled()
    late = work_of(slow)
    expected = model.parameters.astype(np.float64)
    for number in (1, 2):
        send(fast, work_of(fast), ones(model, number))
        expected = 0.5 * expected + 0.5 * (expected + number)
        assert until(http, number).parameters == pytest.approx(expected, abs=1e-5)
    send(slow, late, ones(model, 4.0))
    share = 0.5 * round(1024 / np.sqrt(3)) / 1024
    expected = (1 - share) * expected + share * (model.parameters + 4.0)
    assert until(http, 3).parameters == pytest.approx(expected, abs=1e-5)


def test_what_is_too_old_is_given_back(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model, **SINGLY | {"asynchronous": {"concurrency": 8, "max_staleness": 1}})
    slow, fast = enrolled(), enrolled()
    late = work_of(slow)
    for number in (1, 2):
        send(fast, work_of(fast), ones(model))
        until(http, number)
    with pytest.raises(RoundClosed):
        send(slow, late, ones(model))
    assert reason(slow, late) == "stale"
    assert work_of(slow).plan.round == 3


def test_a_device_that_vanished_makes_room_when_its_time_is_up(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model, clock: Clock
) -> None:
    operator.begin(model, **PAIRS | {"asynchronous": {"concurrency": 1}})
    gone, here = enrolled(), enrolled()
    lost = work_of(gone)
    assert lost.plan.deadline == clock.now + 60
    assert here.check_in("digits") is None
    clock.advance(30)
    assert work_of(gone).plan.deadline == clock.now + 30
    clock.advance(30)
    assert work_of(here).plan.deadline == clock.now + 60
    assert reason(gone, lost) == "missed-deadline"
    with pytest.raises(RoundClosed):
        send(gone, lost, ones(model))


def test_whoever_waits_for_a_place_is_told_of_one(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model, **PAIRS | {"asynchronous": {"concurrency": 1}})
    first, second = enrolled(), enrolled()
    given, answers = work_of(first), []
    waiting = threading.Thread(target=lambda: answers.append(second.check_in("digits", wait=30)))
    waiting.start()
    gauge = http.app.services.metrics.waiting
    while not gauge._value.get():
        time.sleep(0.01)
    send(first, given, ones(model))
    waiting.join(30)
    assert answers[0] is not None
    assert answers[0].assignment is not None


class Held:
    """An aggregation that waits until it may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

        def blocked(*args: Any) -> Any:
            self.begun.set()
            assert self.go.wait(30)
            return aggregate(*args)

        monkeypatch.setattr(job_runner, "aggregate", blocked)


def test_uploads_that_come_during_an_aggregation_count_in_the_next(
    http: Server,
    operator: Operator,
    enrolled: Enrolled,
    model: Model,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    operator.begin(model, **PAIRS)
    devices = [enrolled() for _ in range(5)]
    given = [work_of(device) for device in devices]
    held = Held(monkeypatch)
    for index in range(4):
        if index == BUFFER:
            assert held.begun.wait(30)
        send(devices[index], given[index], ones(model))
    assert [reason(*pair) for pair in zip(devices, given, strict=True)] == [""] * 5
    assert devices[0].check_in("digits") is None, "there is a newer model soon"
    assert work_of(devices[4]).assignment == given[4].assignment
    held.go.set()
    until(http, 2)
    told = [reason(*pair) for pair in zip(devices, given, strict=True)]
    assert told == ["included"] * 4 + [""]
    assert [status.included for status in history(operator)] == [2, 2, 0]


def one_hot(model: Model, index: int) -> Vector:
    return np.eye(1, model.spec.size, index, dtype=np.float32)[0]


def test_a_restart_goes_on_in_the_middle_of_a_buffer(
    start: Start, clock: Clock, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while a buffer is aggregated, another upload having come meanwhile."""
    equal = {"strategy": {"id": "fedbuff", "exponent": 0}}
    held = Held(monkeypatch)
    with start() as http:
        Operator(http).begin(model, **PAIRS | equal)
        devices = [Device(http, clock) for _ in range(4)]
        for device in devices:
            device.enrol(Operator(http).token())
        given = [work_of(device) for device in devices]
        for index in range(2):
            send(devices[index], given[index], one_hot(model, index))
        assert held.begun.wait(30)
        send(devices[2], given[2], one_hot(model, 2))
        threading.Timer(0.2, held.go.set).start()
    monkeypatch.undo()
    with start() as http:
        for device in devices:
            device.http = http
        until(http, 1)
        assert reason(devices[2], given[2]) == ""
        assert work_of(devices[3]) == given[3]
    with start() as http:
        for device in devices:
            device.http = http
        again = devices[3].put(given[3].assignment, b"?" * 9)
        assert again.status_code == 400
        send(devices[3], given[3], one_hot(model, 3))
        counted = until(http, 2).parameters - model.parameters
        assert counted * BUFFER == pytest.approx([1.0] * 4 + [0.0] * 8, abs=1e-6)
        assert [reason(*pair) for pair in zip(devices, given, strict=True)] == ["included"] * 4


class Fleet:
    """Three devices of different pace that send one-hot vectors until the task is over."""

    def __init__(self, clock: Clock) -> None:
        self.devices = [Device(None, clock) for _ in range(3)]  # type: ignore[arg-type]
        self.pending: list[dict[str, bytes]] = [{}, {}, {}]
        self.hot: dict[str, int] = {}
        self.receipts: dict[str, Receipt] = {}
        self.turns = 0

    def meet(self, http: Server) -> None:
        for device in self.devices:
            device.http = http

    def run(self, http: Server, fails: Fails | None = None) -> bool:
        """Until the task is over, or the failure has come."""
        self.meet(http)
        over = [False] * 3
        while not all(over):
            for index in range(3):
                self.turns += 1
                with suppress(ServerError):
                    over[index] = self.turn(index, is_late=self.turns % (3 * index + 2) > 0)
                if fails is not None and fails.is_past:
                    return False
        return True

    def turn(self, index: int, *, is_late: bool) -> bool:
        device, pending = self.devices[index], self.pending[index]
        for name, body in list(pending.items()) if not is_late else []:
            device.put(name, body)
        answer = device.check_in("digits", *pending)
        if answer is None:
            return False
        for signed in answer.receipts:
            name = signed.receipt.assignment
            assert self.receipts.setdefault(name, signed.receipt) == signed.receipt
            pending.pop(name, None)
        given = answer.assignment
        if given is not None and given.assignment not in self.hot:
            size = device.model(given.plan.model).spec.size
            hot = self.hot[given.assignment] = len(self.hot)
            update = np.eye(1, size, hot, dtype=np.float32)[0]
            pending[given.assignment] = device.body_for(given, update)
        return answer.task.state != "running" and not pending


@pytest.mark.soak
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("cls", "function"), [(Database, "_commit"), (LocalPayloads, "put")], ids=["commit", "file"]
)
def test_a_server_that_dies_at_any_write_counts_every_upload_once_or_not_at_all(
    start: Start,
    clock: Clock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    soak: bool,
    cls: type,
    function: str,
    when: str,
) -> None:
    model = Model.from_tensors({"counts": np.zeros(256, np.float32)})
    config = PAIRS | {
        "rounds": 3,
        "strategy": {"id": "fedbuff", "exponent": 0},
        "asynchronous": {"concurrency": 3, "max_staleness": 1},
    }
    written = getattr(cls, function)
    for at in range(100) if soak else (12, 80):
        fleet, folder = Fleet(clock), tmp_path / f"died-{at}"
        with start(data_dir=folder) as http:
            fleet.meet(http)
            for device in fleet.devices:
                device.enrol(Operator(http).token())
            Operator(http).begin(model, **config)
            fails = Fails(written, at, when)
            monkeypatch.setattr(cls, function, fails)
            is_over = fleet.run(http, fails)
        monkeypatch.setattr(cls, function, written)
        with start(data_dir=folder) as http:
            fleet.run(http)
            counted = until(http, 3).parameters * BUFFER
            included = [n for n, r in fleet.receipts.items() if r.outcome == "included"]
            due = np.zeros(256, np.float32)
            due[[fleet.hot[name] for name in included]] = 1.0
            assert (counted == due).all()
            assert len(included) == 3 * BUFFER
            assert not any(fleet.pending), "every upload has its receipt"
            left = [path for path in (folder / "uploads").rglob("*") if path.is_file()]
            assert left == []
        if is_over:
            break
    assert at > 5


def test_what_an_old_plan_names_lasts_as_long_as_it(
    start: Start, clock: Clock, model: Model, tmp_path: Path
) -> None:
    coded = {
        "id": "coded",
        "inner": {"id": "topk", "fraction": 0.5, "magnitude_bits": 0},
        "contexts": "activity",
    }
    folder = tmp_path / "data/artefacts"
    with start() as http:
        Operator(http).begin(model, **SINGLY, profiles=[{"name": "one", "compressor": coded}])
        slow, fast = Device(http, clock), Device(http, clock)
        for device in (slow, fast):
            device.enrol(Operator(http).token())
        send(fast, work_of(fast), ones(model))
        until(http, 1)
        late = work_of(slow)
        named = late.plan.activity
        assert named is not None
        for number in (2, 3):
            send(fast, work_of(fast), one_hot(model, number))
            until(http, number)
        assert named in [path.name for path in folder.iterdir()]
    with start() as http:
        slow.http = fast.http = http
        update = np.arange(12, dtype=np.float32)
        send(slow, work_of(slow), update)
        until(http, 4)
        assert reason(slow, late) == "included"
        for number in (5, 6):
            send(fast, work_of(fast), one_hot(model, number))
            until(http, number)
        with pytest.raises(NotFound):
            slow.artefact(named, "digits")
        assert list(folder.iterdir()) == []


SCAFFOLD, STEPS = {"id": "scaffold", "clients": 2}, {"local_steps": 2, "learning_rate": 0.5}
DELTA = {"id": "delta", "inner": {"id": "topk", "fraction": 0.5}}
TWO_TRIPS = {"id": "powersgd", "rank": 1, "trips": 2}
EF21 = {"id": "ef21", "inner": {"id": "topk", "fraction": 0.5}}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"lane": "masked"}, "masked lane"),
        ({"cohort": {"size": 2, "minimum": 1}}, "set both to the same"),
        (
            {"cohort": {"size": 2, "minimum": 2, "over_selection": 1.5}},
            "set asynchronous.concurrency",
        ),
        ({"asynchronous": {"concurrency": 0}}, "must be 1 or more"),
        ({"strategy": {"id": "fedavg"}}, "choose fedbuff or fedasync"),
        ({"strategy": {"id": "median"}}, "choose fedbuff or fedasync"),
        ({"strategy": {"id": "fedasync"}}, "set cohort.size and cohort.minimum to 1"),
        ({"profiles": [{"name": "one", "compressor": EF21}]}, "stale ones count less"),
        ({"profiles": [{"name": "one", "compressor": DELTA}]}, "cannot use delta"),
        ({"profiles": [{"name": "one", "compressor": TWO_TRIPS}]}, "powersgd in two exchanges"),
        ({"strategy": SCAFFOLD, "training": STEPS}, "choose fedbuff or fedasync"),
        ({"asynchronous": None}, "give the task asynchronous terms"),
    ],
)
def test_what_cannot_be_asynchronous_is_refused_with_the_reason(
    operator: Operator, model: Model, config: dict[str, Any], says: str
) -> None:
    with pytest.raises(FedpressError) as caught:
        operator.begin(model, **PAIRS | config)
    assert caught.value.status in (400, 422)
    assert says in f"{caught.value.detail} {caught.value.hint}"
    assert operator.get("/v1/tasks") == []


def test_what_wraps_an_asynchronous_strategy_is_one(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    near = {"id": "fedprox", "mu": 0.1, "inner": {"id": "ema", "inner": MIXING}}
    operator.begin(model, **SINGLY | {"strategy": near})
    device = enrolled()
    given = work_of(device)
    assert given.plan.client_terms.proximal == 0.1
    send(device, given, ones(model))
    assert until(http, 1).parameters == pytest.approx(model.parameters + 0.5)
    assert history(operator)[0].published.keys() == {"average"}


def test_aborting_gives_a_buffer_back_and_keeps_what_is_open(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model, **PAIRS)
    first, second = enrolled(), enrolled()
    staged, open_ = work_of(first), work_of(second)
    send(first, staged, ones(model))
    operator.post("/v1/admin/tasks/digits/abort-round")
    assert reason(first, staged) == "round-abandoned"
    assert work_of(second).assignment == open_.assignment
    again = work_of(first)
    assert (again.plan.round, again.plan.attempt) == (1, 2)
    send(second, open_, ones(model))
    send(first, again, ones(model))
    assert until(http, 1).parameters == pytest.approx(model.parameters + 1)


def test_rows_of_an_older_release_are_taken_over(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'test.db'}"
    engine, config = sa.create_engine(url), Config()
    config.set_main_option("script_location", "fedpress_server:migrations")
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0004")
        for name in ("enrolment_tokens", "clients", "models"):
            fill(connection, name)
        fill(connection, "tasks", config='{"model": "x"}')
        for name in ("rounds", "assignments", "uploads"):
            fill(connection, name)
    engine.dispose()
    database = Database(url)
    row = anyio.run(database.read, lambda c: c.execute(sa.text("SELECT * FROM assignments")).one())
    assert (row.assignment, row.turn) == ("x", 0)
    with pytest.raises(sa.exc.IntegrityError):
        anyio.run(database.write, lambda c: c.execute(sa.text("DELETE FROM assignments")))
    database.close()


def fill(connection: sa.Connection, name: str, **values: Any) -> None:
    """One row, of x and 1 but for `values`."""
    table = sa.Table(name, sa.MetaData(), autoload_with=connection)
    kinds: dict[type, Any] = {str: "x", bytes: b"x"}
    row = {c.name: kinds.get(c.type.python_type, 1) for c in table.columns if not c.nullable}
    connection.execute(sa.insert(table), row | values)
