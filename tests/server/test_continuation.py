"""Tasks that stop, wait and go on: paused, continued from another model, finished."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpress_compression.tensors import Vector
from fedpress_protocols.errors import (
    ConfigurationError,
    Conflict,
    FedpressError,
    UnknownModel,
    UnknownTask,
)
from fedpress_protocols.model import Model
from fedpress_protocols.upload import Upload
from fedpress_server.storage.database import Database
from tests.devices import ADMIN, Device, Operator
from tests.server.in_process import Clock, Enrolled, Server, Start, history, include_one, ones
from tests.server.test_durability import Fails

pytestmark = pytest.mark.both_databases

ALONE = {"size": 1, "minimum": 1}


def go_on(operator: Operator, model: Model, after_round: int, rounds: int = 1) -> Any:
    more = {"after_round": after_round, "rounds": rounds, "model": operator.bring(model)}
    return operator.post("/v1/admin/tasks/digits/continue", more)


def included(device: Device, model: Model, value: float = 1.0) -> str:
    """A whole round of one device; the task's model after it."""
    pending = include_one(device, model, value=value)
    answer = device.check_in("digits", pending, wait=30)
    assert answer is not None
    assert answer.receipts[0].receipt.outcome == "included"
    return answer.task.model


def test_a_paused_task_waits_and_goes_on_from_another_model(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model, rounds=1, cohort=ALONE, at_end="paused")
    device = enrolled()
    included(device, model)
    assert operator.get("/v1/tasks/digits")["state"] == "paused"
    assert device.check_in("digits") is None
    other = model.with_parameters(ones(model, 5.0))
    summary = go_on(operator, other, 1, rounds=2)
    assert (summary["state"], summary["round"], summary["rounds"]) == ("running", 1, 3)
    made = included(device, model)
    np.testing.assert_array_equal(device.model(made).parameters, ones(model, 6.0))
    made = included(device, model)
    np.testing.assert_array_equal(device.model(made).parameters, ones(model, 7.0))
    assert [(status.round, status.state) for status in history(operator)] == [
        (1, "committed"),
        (2, "committed"),
        (3, "committed"),
    ]
    assert operator.get("/v1/tasks/digits")["state"] == "paused"


def test_a_device_that_waits_hears_of_it_at_once(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model, rounds=1, cohort=ALONE, at_end="paused")
    included(enrolled(), model)
    other = enrolled()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(other.check_in, "digits", wait=30)
        while not http.get("/metrics", headers=ADMIN).text.count("fedpress_waiting_check_ins 1.0"):
            assert not waiting.done()
        go_on(operator, model, 1)
        answer = waiting.result(20)
    assert answer is not None
    assert answer.assignment is not None


def test_to_continue_twice_is_to_continue_once(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model, rounds=1, cohort=ALONE, at_end="paused")
    device = enrolled()
    included(device, model)
    first = go_on(operator, model, 1)
    assert go_on(operator, model, 1) == first
    included(device, model)
    assert go_on(operator, model, 1)["state"] == "paused"
    assert len(history(operator)) == 2


def test_a_task_goes_on_only_from_where_it_stopped(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model, rounds=2, cohort=ALONE)
    with pytest.raises(Conflict, match="is running after 0 rounds"):
        go_on(operator, model, 0, rounds=5)
    device = enrolled()
    included(device, model)
    included(device, model)
    assert operator.get("/v1/tasks/digits")["state"] == "finished"
    with pytest.raises(Conflict, match="finished after 2 rounds"):
        go_on(operator, model, 1)
    more = {"after_round": 2, "rounds": 1, "model": "0" * 64}
    with pytest.raises(UnknownModel):
        operator.post("/v1/admin/tasks/digits/continue", more)
    other = Model.from_tensors({"weight": np.zeros(3, np.float32)})
    with pytest.raises(ConfigurationError, match="other tensors"):
        go_on(operator, other, 2)
    with pytest.raises(UnknownTask):
        operator.post("/v1/admin/tasks/nobody/finish")
    assert go_on(operator, model, 2)["state"] == "running"


def test_a_cancelled_task_goes_on_with_its_round_again(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model, rounds=2, cohort=ALONE)
    device = enrolled()
    pending = device.assignment("digits").assignment
    operator.post("/v1/admin/tasks/digits/cancel")
    answer = device.check_in("digits", pending)
    assert answer is not None
    assert answer.receipts[0].receipt.reason == "cancelled"
    assert go_on(operator, model, 0, rounds=1)["state"] == "running"
    included(device, model)
    assert [(status.attempt, status.state) for status in history(operator)] == [
        (1, "abandoned"),
        (2, "committed"),
    ]


def test_only_a_paused_task_is_finished(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model, rounds=1, cohort=ALONE, at_end="paused")
    with pytest.raises(Conflict, match="is running"):
        operator.post("/v1/admin/tasks/digits/finish")
    device = enrolled()
    included(device, model)
    with pytest.raises(Conflict, match="is paused after its last round; only a running one"):
        operator.post("/v1/admin/tasks/digits/resume")
    assert operator.post("/v1/admin/tasks/digits/finish")["state"] == "finished"
    assert operator.post("/v1/admin/tasks/digits/finish")["state"] == "finished"
    answer = device.check_in("digits")
    assert answer is not None
    assert answer.task.state == "finished"


def test_a_restart_knows_of_it(start: Start, clock: Clock, model: Model) -> None:
    with start() as http:
        operator, device = Operator(http), Device(http, clock)
        device.enrol(operator.token())
        operator.begin(model, rounds=1, cohort=ALONE, at_end="paused")
        included(device, model)
    with start() as http:
        operator, device.http = Operator(http), http
        assert device.check_in("digits") is None
        go_on(operator, model.with_parameters(ones(model, 5.0)), 1)
    with start() as http:
        operator, device.http = Operator(http), http
        made = included(device, model)
        np.testing.assert_array_equal(device.model(made).parameters, ones(model, 6.0))
        assert operator.get("/v1/tasks/digits")["state"] == "paused"


def test_a_commit_whose_answer_is_lost_counts(
    operator: Operator, enrolled: Enrolled, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator.begin(model, rounds=1, cohort=ALONE, at_end="paused")
    device = enrolled()
    included(device, model)
    operator.bring(model)
    commit = Database._commit
    monkeypatch.setattr(Database, "_commit", Fails(commit, 0, "after"))
    with pytest.raises(FedpressError):
        go_on(operator, model, 1, rounds=3)
    monkeypatch.setattr(Database, "_commit", commit)
    assert go_on(operator, model, 1, rounds=3)["rounds"] == 4
    included(device, model)
    assert operator.get("/v1/tasks/digits")["state"] == "running"


def test_attempts_before_do_not_count(operator: Operator, enrolled: Enrolled, model: Model) -> None:
    operator.begin(model, rounds=1, cohort=ALONE, max_attempts=2)
    for _ in range(2):
        operator.post("/v1/admin/tasks/digits/abort-round")
    assert operator.get("/v1/tasks/digits")["state"] == "cancelled"
    go_on(operator, model, 0)
    operator.post("/v1/admin/tasks/digits/abort-round")
    assert operator.get("/v1/tasks/digits")["state"] == "running"
    operator.post("/v1/admin/tasks/digits/abort-round")
    assert operator.get("/v1/tasks/digits")["state"] == "cancelled"


def test_momentum_begins_anew(operator: Operator, enrolled: Enrolled, model: Model) -> None:
    strategy = {"id": "fedavgm", "momentum": 0.5}
    operator.begin(model, rounds=1, cohort=ALONE, at_end="paused", strategy=strategy)
    device = enrolled()
    included(device, model)
    go_on(operator, model, 1)
    made = included(device, model, 2.0)
    np.testing.assert_array_equal(device.model(made).parameters, model.parameters + np.float32(2))


def test_control_variates_do_not_follow(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(
        model,
        rounds=1,
        cohort=ALONE,
        strategy={"id": "scaffold", "clients": 1},
        training={"local_steps": 1, "learning_rate": 0.1},
    )
    operator.post("/v1/admin/tasks/digits/cancel")
    with pytest.raises(ConfigurationError, match="control variates"):
        go_on(operator, model, 0)


EF21_ONLY = [
    {
        "name": "only",
        "compressor": {
            "id": "per_tensor",
            "min_size": 1,
            "large": {"id": "ef21", "inner": {"id": "topk", "fraction": 0.1}},
        },
    }
]


class Follower:
    """A device that goes 1/10 of the way to `target` in a round, and keeps its compressor's state
    as the ledger does."""

    def __init__(self, device: Device, target: Vector) -> None:
        self.device, self.target = device, target
        self.state: Any = None

    def train(self) -> str:
        """The assignment, whose upload is included."""
        assignment = self.device.assignment("digits")
        plan = assignment.plan
        model = self.device.model(plan.model)
        made = plan.compressor(assignment.profile)
        public = plan.public(model.spec, self.device.known(assignment, model))
        state = made.init(model.spec) if self.state is None else self.state
        update = np.float32(0.1) * (self.target - model.parameters)
        symbols, self.state = made.compress(update, state, public, np.random.default_rng(0))
        index = plan.profile_index(assignment.profile)
        body = Upload(index, 1, symbols).to_bytes(made.layout(model.spec))
        self.device.upload(assignment.assignment, body)
        return assignment.assignment


def followed(
    operator: Operator, devices: list[Device], model: Model, legs: list[int]
) -> list[Vector]:
    """The models of a task of two devices in so many rounds, continued from its own model."""
    both = {"size": 2, "minimum": 2}
    operator.begin(model, rounds=legs[0], cohort=both, at_end="paused", profiles=EF21_ONLY)
    rng, made = np.random.default_rng(1), list[Vector]()
    followers = [
        Follower(each, rng.normal(size=model.spec.size).astype(np.float32)) for each in devices
    ]
    for number, rounds in enumerate(legs):
        if number:
            summary = operator.get("/v1/tasks/digits")
            more = {"after_round": len(made), "rounds": rounds, "model": summary["model"]}
            operator.post("/v1/admin/tasks/digits/continue", more)
        for _ in range(rounds):
            pending = [follower.train() for follower in followers]
            answer = devices[0].check_in("digits", pending[0], wait=30)
            assert answer is not None
            made.append(devices[0].model(answer.task.model).parameters)
    operator.post("/v1/admin/tasks/digits/finish")
    return made


def test_ef21_continues_as_if_it_had_not_stopped(
    start: Start, clock: Clock, model: Model, tmp_path: Path
) -> None:
    """The estimates stay on the devices, so the server's mean of them stays as well."""
    made: list[list[Vector]] = []
    for name, legs in (("whole", [6]), ("legs", [2, 1, 3])):
        with start(data_dir=tmp_path / name) as http:
            operator, devices = Operator(http), [Device(http, clock) for _ in range(2)]
            for each in devices:
                each.enrol(operator.token())
            made.append(followed(operator, devices, model, legs))
    whole, in_legs = made
    np.testing.assert_array_equal(whole, in_legs)


def test_ef21_does_not_continue_from_another_model(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model, rounds=1, cohort=ALONE, at_end="paused", profiles=EF21_ONLY)
    device = enrolled()
    own = included(device, model)
    for other in (model, model.with_parameters(ones(model, 5.0))):
        with pytest.raises(ConfigurationError, match="cannot continue from another model"):
            go_on(operator, other, 1)
    assert go_on(operator, device.model(own), 1)["state"] == "running"
    assert device.assignment("digits").plan.previous_model == model.digest


def test_ef21_starts_from_any_model_while_nothing_is_included(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model, rounds=1, cohort=ALONE, profiles=EF21_ONLY)
    operator.post("/v1/admin/tasks/digits/cancel")
    other = model.with_parameters(ones(model, 5.0))
    assert go_on(operator, other, 0)["state"] == "running"
    assert enrolled().assignment("digits").plan.previous_model == other.digest
