"""PowerSGD as published: two trips in a round over HTTP, whoever drops out, whatever restarts."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from fedpress_client import Client, Discard, FailurePolicy
from fedpress_client.state import StateDirectory
from fedpress_client.trainer import Trained, TrainingRequest
from fedpress_client.transport import HttpTransport, Retries
from fedpress_compression.compressors.powersgd import two_trips
from fedpress_compression.matrices import Matrix, public_basis
from fedpress_compression.tensors import Vector
from fedpress_protocols.errors import (
    Conflict,
    DigestMismatch,
    IncompatiblePlan,
    InvalidUpdate,
    NotFound,
    RoundClosed,
    StorageFull,
    UpdateConflict,
)
from fedpress_protocols.messages import CheckInRequest
from fedpress_protocols.model import Model
from fedpress_protocols.plan import RoundPlan
from fedpress_protocols.signatures import Content
from fedpress_protocols.upload import Upload
from fedpress_server import Settings, create_app
from tests.devices import ADMIN_TOKEN, Device, Operator, checked
from tests.server.in_process import Clock, Server, history, running
from tests.system.test_coded_task import Unread

ROWS, COLUMNS, RANK = 20, 16, 2
POWERSGD = {"id": "powersgd", "rank": RANK, "trips": 2}
FEEDBACK = {"id": "error_feedback", "inner": POWERSGD}


class Drawn:
    """The update of each attempt by a seed of its own, whatever the model; remembers them."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.computed: dict[tuple[int, int], Vector] = {}
        self.fails = False

    def train(self, model: Model, work: TrainingRequest) -> Trained:
        if self.fails:
            raise RuntimeError("out of battery")
        rng = np.random.default_rng([self.seed, work.round, work.attempt])
        step = 0.1 * rng.standard_normal(model.spec.size)
        parameters = (model.parameters + step).astype(np.float32)
        self.computed[work.round, work.attempt] = parameters - model.parameters
        return Trained(parameters, 10)

    def evaluate(self, model: Model) -> None:
        return None


class Group:
    """A server and devices in this process, of which each takes a step when the test says so."""

    def __init__(self, folder: Path, num: int) -> None:
        self.folder, self.clock = folder, Clock()
        self.trainers = [Drawn(index) for index in range(num)]
        self.clients: list[Client] = []
        self.discards: list[list[Discard]] = [[] for _ in range(num)]
        self.http: Server | None = None

    @contextmanager
    def server(self) -> Iterator[Operator]:
        settings = Settings(
            data_dir=self.folder / "server", admin_token=ADMIN_TOKEN, tick_seconds=3600
        )
        with running(create_app(settings, clock=self.clock)) as http:
            self.http = http
            if self.clients:
                self.clients = [self.client(index) for index in range(len(self.trainers))]
            yield Operator(http)

    def begin(self, operator: Operator, **config: Any) -> Model:
        model = Model.from_tensors(
            {"w": np.zeros((ROWS, COLUMNS), np.float32), "b": np.zeros(COLUMNS, np.float32)}
        )
        defaults: dict[str, Any] = {
            "rounds": 3,
            "profiles": [{"name": "only", "compressor": FEEDBACK}],
            "cohort": {"size": len(self.trainers), "minimum": 2},
        }
        operator.begin(model, **(defaults | config))
        self.token = operator.token(uses=len(self.trainers))
        self.clients = [self.client(index) for index in range(len(self.trainers))]
        return model

    def client(self, index: int) -> Client:
        if index < len(self.clients):
            self.clients[index].close()
        assert self.http is not None
        state = self.folder / f"device-{index}"
        transport = HttpTransport(
            "http://fedpress.test",
            StateDirectory.open(state).key(),
            retries=Retries(base=0.0, cap=0.0),
            clock=self.clock,
            http=Unread(self.http),
        )
        return Client(
            "http://fedpress.test",
            self.trainers[index],
            failures=FailurePolicy(allowed=0),
            state_dir=state,
            task="digits",
            token=self.token,
            seed=index,
            wait=0.0,
            transport=transport,
            clock=self.clock,
            on_discard=self.discards[index].append,
        )

    def step(self, *indices: int) -> None:
        for index in indices:
            self.clients[index].step()

    def commit(self, operator: Operator, *indices: int, number: int) -> Model:
        """Step the devices until the round `number` is committed; its model."""
        for _ in range(300):
            for attempt in history(operator):
                if (attempt.round, attempt.state) == (number, "committed"):
                    assert self.http is not None
                    name = f"models/{attempt.model}.safetensors"
                    return Model.from_bytes(self.http.app.services.payloads.get(name))
            self.step(*indices)
        raise AssertionError(f"round {number} was never committed: {history(operator)}")

    def late(self) -> None:
        """The deadline passes."""
        assert self.http is not None
        self.clock.advance(61)
        self.http.tick()

    def check(self, index: int, included: dict[tuple[int, int], Vector]) -> None:
        """included + residual + pending + discards = everything computed."""
        ledger = self.clients[index].ledger
        found = sum(included.values(), np.zeros(ROWS * COLUMNS + COLUMNS, np.float32))
        if ledger.residual is not None:
            found = found + ledger.residual
        for held in ledger.pending.values():
            found = found + held.update.dense()
        for discard in self.discards[index]:
            found = found + discard.vector
        np.testing.assert_allclose(found, sum(self.trainers[index].computed.values()), atol=1e-5)


def start(plan: RoundPlan, step: Vector) -> Matrix:
    """The right basis that a round begins at."""
    spec = Model.from_tensors(
        {"w": np.zeros((ROWS, COLUMNS), np.float32), "b": np.zeros(COLUMNS, np.float32)}
    ).spec
    stream = plan.public(spec).stream("powersgd")
    known = step[spec.slices["w"]].reshape(ROWS, COLUMNS).astype(np.float64)
    right, lengths = public_basis(known.T, RANK, stream)
    return right / lengths


def test_a_group_over_http_is_the_group_in_process(tmp_path: Path) -> None:
    group = Group(tmp_path, 3)
    with group.server() as operator:
        model = group.begin(operator)
        residuals = [np.zeros(model.spec.size, np.float32) for _ in range(3)]
        parameters, step, warm = model.parameters, np.zeros(model.spec.size, np.float32), None
        for number in (1, 2, 3):
            plan = plan_of(group)
            found = group.commit(operator, 0, 1, 2, number=number)
            wholes = [
                trainer.computed[number, 1] + residual
                for trainer, residual in zip(group.trainers, residuals, strict=True)
            ]
            where = model.spec.slices["w"]
            matrices = [w[where].reshape(ROWS, COLUMNS).astype(np.float64) for w in wholes]
            begun = start(plan, step)
            approximation, after = two_trips(matrices, begun)
            due = np.mean(wholes, axis=0)
            due[where] = approximation.ravel()
            step = found.parameters - parameters
            np.testing.assert_allclose(step, due, atol=1e-6)
            if warm is not None:  # from the last right factor itself, as published
                published, _ = two_trips(matrices, warm)
                np.testing.assert_allclose(step[where], published.ravel(), atol=1e-3)
            warm, parameters = after, found.parameters
            left = np.linalg.qr(np.sum([m @ begun for m in matrices], axis=0))[0]
            for index, (whole, matrix) in enumerate(zip(wholes, matrices, strict=True)):
                rest = np.zeros_like(whole)
                rest[where] = (matrix - left @ (left.T @ matrix)).ravel()
                residuals[index] = rest
        for index in range(3):
            group.step(index)
            residual = group.clients[index].ledger.residual
            assert residual is not None
            np.testing.assert_allclose(residual, residuals[index], atol=1e-5)
            assert not group.clients[index].ledger.pending


def plan_of(group: Group) -> RoundPlan:
    """The plan of the round that is open."""
    assert group.http is not None
    plan: RoundPlan = group.http.app.services.store.tasks["digits"].attempt.terms.plan
    return plan


def upload_of(group: Group, index: int) -> Vector:
    """What the device's one pending upload stands for."""
    (held,) = group.clients[index].ledger.pending.values()
    return held.update.dense()


def test_the_mean_is_exact_for_those_who_stay(tmp_path: Path) -> None:
    """A client vanishes between the trips: its image stays in the basis, and in nothing else."""
    group = Group(tmp_path, 3)
    with group.server() as operator:
        model = group.begin(operator, rounds=2)
        group.step(0, 1, 2)  # first trips
        while history(operator)[0].received < 2:
            group.step(0, 1)
        second = [upload_of(group, index) for index in (0, 1)]
        whole = upload_of(group, 2)
        np.testing.assert_array_equal(whole, group.trainers[2].computed[1, 1])
        assert history(operator)[-1].state == "collecting"
        group.late()
        found = group.commit(operator, 0, 1, number=1)
        assert history(operator)[0].included == 2
        due = np.mean(second, axis=0, dtype=np.float64)
        np.testing.assert_allclose(found.parameters - model.parameters, due, atol=1e-7)
        group.step(2)  # hears of it, and gets its whole update back
        receipts = group.clients[2].ledger.settled
        assert list(receipts.values()) == ["not-included"]
        group.check(2, {})


def test_too_few_in_either_trip_give_everything_back(tmp_path: Path) -> None:
    group = Group(tmp_path, 3)
    with group.server() as operator:
        group.begin(operator, cohort={"size": 3, "minimum": 3})
        group.step(0, 1, 2)
        while history(operator)[0].received < 2:
            group.step(0, 1)
        group.late()
        group.step(0)
        for index in (1, 2):  # assigned, and then declined
            group.trainers[index].fails = True
            with pytest.raises(RuntimeError, match="out of battery"):
                group.step(index)
            group.trainers[index].fails = False
        group.late()
        first, second, third = history(operator)
        assert first.reason == "2 uploads at the deadline, fewer than 3"
        assert second.reason == "1 first trips at the deadline, fewer than 3"
        assert third.state == "collecting"
        group.step(0, 1, 2)
        for index in range(3):
            group.check(index, {})


def test_a_device_that_lost_its_update_leaves_the_round(tmp_path: Path) -> None:
    group = Group(tmp_path, 3)
    with group.server() as operator:
        group.begin(operator, rounds=1)
        group.step(0, 1, 2)
        group.clients[2].close()
        shutil.rmtree(tmp_path / "device-2/tasks")
        group.clients[2] = group.client(2)
        group.commit(operator, 0, 1, 2, number=1)
        assert history(operator)[-1].included == 2, "without waiting for the deadline"


def test_restarts_of_either_end_change_nothing(tmp_path: Path) -> None:
    made = []
    for name, steps in (("undisturbed", 100), ("restarted", 1)):
        group = Group(tmp_path / name, 3)
        with group.server() as operator:
            group.begin(operator, rounds=1)
        for _ in range(100):
            with group.server() as operator:
                for _ in range(steps):
                    group.step(0, 1, 2)
                    task = operator.get("/v1/tasks/digits")
                    if task["state"] == "finished":
                        break
            if task["state"] == "finished":
                made.append(task["model"])
                break
    assert len(made) == 2
    assert made[0] == made[1]


# What a server refuses


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[tuple[Operator, Device, Group]]:
    """A task with one device that speaks for itself."""
    group = Group(tmp_path, 0)
    with group.server() as operator:
        assert group.http is not None
        model = Model.from_tensors({"w": np.zeros((ROWS, COLUMNS), np.float32)})
        operator.begin(
            model,
            profiles=[{"name": "only", "compressor": POWERSGD}],
            cohort={"size": 2, "minimum": 1},
        )
        device = Device(group.http, group.clock)
        device.enrol(operator.token())
        yield operator, device, group


def first_body(device: Device, seed: int, scale: float = 1.0) -> tuple[str, bytes]:
    assignment = device.assignment("digits")
    plan, model = assignment.plan, device.model(assignment.plan.model)
    update = np.random.default_rng(seed).standard_normal(model.spec.size).astype(np.float32)
    known = {"previous": np.zeros(model.spec.size, np.float32)}
    made = plan.first_trip
    assert made is not None
    symbols = made.first(np.float32(scale) * update, plan.public(model.spec, **known))
    return assignment.assignment, Upload(0, 1, symbols).to_bytes(made.first_layout(model.spec))


def put_first(device: Device, assignment: str, body: bytes) -> httpx.Response:
    return checked(device.request("PUT", f"/v1/assignments/{assignment}/first", body))


def test_of_a_first_trip_as_much_is_counted_as_of_an_upload(
    alone: tuple[Operator, Device, Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of one that the device has not signed, nor of one that finds no room."""
    operator, device, group = alone
    name, body = first_body(device, 0)
    path = f"/v1/assignments/{name}/first"
    signed = device.sign("PUT", path, Content(bytes(32), len(body)))
    with pytest.raises(DigestMismatch):
        checked(device.http.put(path, headers=signed, content=body))
    assert group.http is not None
    payloads = group.http.app.services.payloads

    def full(*given: object) -> None:
        raise StorageFull("no space is left on the server", retry_after=60)

    with monkeypatch.context() as patch:
        patch.setattr(payloads, "put", full)
        with pytest.raises(StorageFull):
            put_first(device, name, body)
    assert history(operator)[0].upload_bytes == 0
    assert put_first(device, name, body).status_code == 201
    assert history(operator)[0].upload_bytes == len(body)


def test_a_first_trip_is_staged_once(alone: tuple[Operator, Device, Group]) -> None:
    operator, device, group = alone
    name, body = first_body(device, 0)
    assert put_first(device, name, body).status_code == 201
    assert put_first(device, name, body).status_code == 200
    with pytest.raises(UpdateConflict):
        put_first(device, name, body[:-1] + bytes([body[-1] ^ 1]))
    assert device.check_in("digits") is None, "nothing to do before there is a basis"
    assert history(operator)[0].upload_bytes == 2 * len(body)
    with pytest.raises(RoundClosed):
        checked(device.put(name, body))
    with pytest.raises(NotFound, match="has no basis yet"):
        device.json("GET", f"/v1/assignments/{name}/basis")
    group.late()
    answer = device.check_in("digits", wait=30)
    assert answer is not None
    assert answer.assignment is not None
    assert answer.assignment.basis is not None
    again = put_first(device, name, body)
    assert again.status_code == 200, "also in the second trip"
    basis = device.json("GET", f"/v1/assignments/{name}/basis").content
    columns = np.frombuffer(basis, "<f4").reshape(RANK, ROWS)
    np.testing.assert_allclose(columns @ columns.T, np.eye(RANK), atol=1e-6)


def test_malformed_first_trips_are_refused(alone: tuple[Operator, Device, Group]) -> None:
    _, device, _ = alone
    name, body = first_body(device, 0)
    for forged in (body[:-1], body + b"\0", body[:3] + b"\xff" * (len(body) - 3)):
        with pytest.raises((InvalidUpdate, Conflict)):
            put_first(device, name, forged)
    _, huge = first_body(device, 0, 1e6)
    with pytest.raises(InvalidUpdate, match="larger than the plan"):
        put_first(device, name, huge)
    assert put_first(device, name, body).status_code == 201


def test_a_first_trip_that_comes_too_late_leaves_no_file(tmp_path: Path) -> None:
    group = Group(tmp_path, 0)
    with group.server() as operator:
        model = Model.from_tensors({"w": np.zeros((ROWS, COLUMNS), np.float32)})
        cohort = {"size": 1, "minimum": 1, "over_selection": 2}
        operator.begin(model, profiles=[{"name": "a", "compressor": POWERSGD}], cohort=cohort)
        devices = [Device(group.http, group.clock) for _ in range(2)]
        for device in devices:
            device.enrol(operator.token())
        (name, body), (late, other) = (first_body(device, 0) for device in devices)
        put_first(devices[0], name, body)
        with pytest.raises(RoundClosed):
            put_first(devices[1], late, other)
        answer = devices[0].check_in("digits", wait=30)
        assert answer is not None
        files = [path.name for path in (tmp_path / "server/uploads/digits/1-1").iterdir()]
        assert not any(late in file for file in files)
        assert any(name in file for file in files)


# What a device refuses


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (bytes(4), "a basis of 4 bytes where 160 are due"),
        (np.full(40, np.nan, "<f4").tobytes(), "not of length 1"),
        (np.full(40, 2, "<f4").tobytes(), "not of length 1"),
    ],
)
def test_a_device_refuses_what_is_no_basis(tmp_path: Path, data: bytes, said: str) -> None:
    group = Group(tmp_path, 1)
    with group.server() as operator:
        model = group.begin(operator, cohort={"size": 1, "minimum": 1})
        client, reasons = group.clients[0], []
        client._events.on_event = lambda event: reasons.append(event.details.get("reason", ""))
        client.step()
        told = client._transport.check_in
        while True:
            news = told("digits", CheckInRequest())
            if news.response is not None and news.response.assignment is not None:
                break
        named = hashlib.sha256(data).hexdigest()
        assignment = news.response.assignment.model_copy(update={"basis": named})
        news = news._replace(response=news.response.model_copy(update={"assignment": assignment}))
        client._transport.check_in = lambda *_: news
        client._transport.basis = lambda *_: data
        client.step()
        assert said in "".join(reasons)
        assert not client.ledger.pending, "declined, and its whole update is back"
        residual = client.ledger.residual
        assert residual is not None
        np.testing.assert_array_equal(residual, group.trainers[0].computed[1, 1])
        assert model.spec.size == residual.size


@pytest.mark.parametrize(
    "profiles",
    [
        [{"name": "a", "compressor": POWERSGD}, {"name": "b", "compressor": {"id": "none"}}],
        [{"name": "a", "compressor": {"id": "per_tensor", "large": POWERSGD}}],
        [{"name": "a", "compressor": {"id": "clip", "inner": POWERSGD}}],
    ],
)
def test_two_trips_are_for_whole_uploads(tmp_path: Path, profiles: list[dict[str, Any]]) -> None:
    group = Group(tmp_path, 1)
    with group.server() as operator, pytest.raises(IncompatiblePlan, match="for the whole upload"):
        group.begin(operator, profiles=profiles, cohort={"size": 1, "minimum": 1})
