"""Rounds through the API, in one process, with a clock that the test turns."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from fedpress_compression.coding.fields import Symbols
from fedpress_compression.compressor import Public
from fedpress_compression.compressors.none import Uncompressed
from fedpress_compression.update import Update
from fedpress_protocols.errors import (
    AlreadyExists,
    ConfigurationError,
    Conflict,
    FedpressError,
    IncompatiblePlan,
    MalformedRequest,
    RoundClosed,
    Unavailable,
    UnknownModel,
    UnknownRound,
    UnknownTask,
)
from fedpress_protocols.model import Model
from tests.devices import Device, Operator
from tests.server.in_process import Clock, Enrolled, Server, Start, history, include_one, ones

pytestmark = pytest.mark.both_databases

# A round


def test_a_round_goes_from_check_in_to_the_next_model(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model, rounds=1)
    devices = [enrolled(), enrolled()]
    pending = []
    for number, device in enumerate(devices):
        assignment = device.assignment("digits")
        body = device.body_for(assignment, ones(model, 1.0 + number), num_examples=1 + 2 * number)
        ack = device.upload(assignment.assignment, body)
        assert ack.assignment == assignment.assignment
        assert ack.upload == hashlib.sha256(body).hexdigest()
        pending.append(assignment.assignment)
    answer = devices[0].check_in("digits", pending[0], wait=30)
    assert answer is not None
    assert answer.task.state == "finished"
    (receipt,) = answer.receipts
    assert receipt.receipt.outcome == "included"
    made = devices[1].model(answer.task.model)
    assert receipt.receipt.model == made.digest
    np.testing.assert_array_equal(made.parameters, model.parameters + np.float32(1.75))
    np.testing.assert_array_equal(made.buffers["steps"], model.buffers["steps"])


def test_tasks_live_side_by_side(operator: Operator, enrolled: Enrolled, model: Model) -> None:
    for task in ("one", "two"):
        operator.begin(model, task, rounds=1, cohort={"size": 1, "minimum": 1})
    device = enrolled()
    first = include_one(device, model, "one", 1.0)
    second = include_one(device, model, "two", 2.0)
    for task, pending, value in (("one", first, 1.0), ("two", second, 2.0)):
        answer = device.check_in(task, pending, wait=30)
        assert answer is not None
        made = device.model(answer.task.model)
        np.testing.assert_array_equal(made.parameters, model.parameters + np.float32(value))


def test_a_device_that_asks_again_gets_its_open_assignment_again(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model)
    device = enrolled()
    assert device.assignment("digits") == device.assignment("digits")


def test_a_device_with_an_upload_in_gets_no_second_part(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model)
    device = enrolled()
    pending = include_one(device, model)
    assert device.check_in("digits", pending) is None
    assert device.receipt(pending) is None


def test_a_full_round_has_nothing_for_another(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model, cohort={"size": 1, "minimum": 1})
    enrolled().assignment("digits")
    assert enrolled().check_in("digits") is None


def test_the_first_uploads_of_an_over_selected_cohort_close_the_round(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model, cohort={"size": 2, "minimum": 1, "over_selection": 1.5})
    devices = [enrolled() for _ in range(3)]
    assignments = [device.assignment("digits") for device in devices]
    bodies = [d.body_for(a, ones(model)) for d, a in zip(devices, assignments, strict=True)]
    for number in (2, 0):
        devices[number].upload(assignments[number].assignment, bodies[number])
    with pytest.raises(RoundClosed) as caught:
        devices[1].upload(assignments[1].assignment, bodies[1])
    assert "check in again" in caught.value.hint
    receipt = devices[1].receipt(assignments[1].assignment)
    assert receipt is not None
    assert (receipt.receipt.outcome, receipt.receipt.reason) == ("not-included", "round-full")
    assert receipt.receipt.upload is None


def test_a_deadline_aggregates_or_abandons(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model, clock: Clock
) -> None:
    operator.begin(model, cohort={"size": 3, "minimum": 2}, max_attempts=2, rounds=1)
    devices = [enrolled() for _ in range(3)]
    first = include_one(devices[0], model)
    idle = devices[1].assignment("digits").assignment
    clock.advance(60)
    answer = devices[0].check_in("digits", first)
    assert answer is not None
    assert answer.receipts[0].receipt.reason == "round-abandoned"
    assert answer.receipts[0].receipt.upload is not None
    assert answer.assignment is not None
    assert answer.assignment.plan.attempt == 2
    missed = devices[1].receipt(idle)
    assert missed is not None
    assert missed.receipt.reason == "missed-deadline"

    seconds = [include_one(device, model) for device in devices[:2]]
    late = devices[2].assignment("digits")
    body = devices[2].body_for(late, ones(model))
    clock.advance(60)
    with pytest.raises(RoundClosed):
        devices[2].upload(late.assignment, body)
    http.tick()
    answer = devices[0].check_in("digits", seconds[0], wait=30)
    assert answer is not None
    assert answer.receipts[0].receipt.outcome == "included"
    assert [(s.attempt, s.state, s.received, s.included) for s in history(operator)] == [
        (1, "abandoned", 1, 0),
        (2, "committed", 2, 2),
    ]


def test_a_task_out_of_attempts_is_cancelled(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model, clock: Clock
) -> None:
    operator.begin(model, max_attempts=1)
    device = enrolled()
    pending = device.assignment("digits").assignment
    clock.advance(60)
    answer = device.check_in("digits", pending)
    assert answer is not None
    assert (answer.task.state, answer.assignment) == ("cancelled", None)
    assert answer.receipts[0].receipt.reason == "missed-deadline"
    assert history(operator)[0].reason.endswith("the last of 1 attempts (max_attempts)")


def test_an_attempt_waits_for_its_first_client(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model, clock: Clock
) -> None:
    operator.begin(model, max_attempts=1)
    clock.advance(1000)
    http.tick()
    assignment = enrolled().assignment("digits")
    assert assignment.plan.attempt == 1
    assert assignment.plan.deadline == clock.now + 60


def test_an_idle_device_alone_cancels_no_task(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model, clock: Clock
) -> None:
    operator.begin(model, max_attempts=1, cohort={"size": 2, "minimum": 2})
    idle = enrolled()
    assignment = idle.assignment("digits")
    for _ in range(3):
        clock.advance(60)
        http.tick()
    again = idle.assignment("digits")
    assert (again.assignment, again.plan.attempt) == (assignment.assignment, 1)
    clock.advance(60)  # nobody has looked at the deadline yet
    idle.upload(again.assignment, idle.body_for(again, ones(model)))
    include_one(enrolled(), model)
    answer = idle.check_in("digits", again.assignment, wait=30)
    assert answer is not None
    assert answer.receipts[0].receipt.outcome == "included"


def test_an_aborted_round_begins_again(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model)
    device = enrolled()
    pending = include_one(device, model)
    operator.post("/v1/admin/tasks/digits/abort-round", {"detail": "for a test"})
    answer = device.check_in("digits", pending)
    assert answer is not None
    assert answer.receipts[0].receipt.reason == "round-abandoned"
    assert answer.assignment is not None
    assert answer.assignment.plan.attempt == 2
    assert history(operator)[0].reason == "aborted for a test"


def test_a_cancelled_task_gives_every_upload_back(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model)
    device = enrolled()
    pending = include_one(device, model)
    assert operator.post("/v1/admin/tasks/digits/cancel")["state"] == "cancelled"
    answer = device.check_in("digits", pending)
    assert answer is not None
    assert answer.receipts[0].receipt.reason == "cancelled"
    with pytest.raises(Conflict):
        operator.post("/v1/admin/tasks/digits/cancel")
    with pytest.raises(Conflict):
        operator.post("/v1/admin/tasks/digits/abort-round")


def test_an_update_that_breaks_the_model_gives_every_upload_back(
    operator: Operator, enrolled: Enrolled
) -> None:
    model = Model.from_tensors({"w": np.full(4, 65000, np.float16)})
    operator.begin(model, cohort={"size": 1, "minimum": 1}, max_abs=1000.0, max_attempts=1)
    device = enrolled()
    pending = include_one(device, model, value=1000.0)
    answer = device.check_in("digits", pending, wait=30)
    assert answer is not None
    assert answer.receipts[0].receipt.reason == "round-abandoned"
    assert "beyond float16's maximum" in history(operator)[0].reason


def test_a_plan_names_the_earlier_models_that_its_profiles_read(
    http: Server,
    operator: Operator,
    enrolled: Enrolled,
    model: Model,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Uncompressed, "needs", frozenset({"previous", "drift"}))
    read: list[Public] = []
    decompress = Uncompressed.decompress

    def reading(self: Uncompressed, symbols: Symbols, public: Public, n: int = 1) -> Update:
        read.append(public)
        return decompress(self, symbols, public, n)

    monkeypatch.setattr(Uncompressed, "decompress", reading)
    operator.begin(model, rounds=3, cohort={"size": 1, "minimum": 1})
    device, made = enrolled(), [model]
    for number in range(3):
        if number == 2:
            operator.post("/v1/admin/tasks/digits/abort-round")
        plan = device.assignment("digits").plan
        previous = made[max(0, number - 1)]
        assert (plan.previous_model, plan.first_model) == (previous.digest, model.digest)
        pending = include_one(device, model)
        answer = device.check_in("digits", pending, wait=30)
        assert answer is not None
        public = read[-1]
        np.testing.assert_array_equal(
            public.known("previous"), made[-1].parameters - previous.parameters
        )
        np.testing.assert_array_equal(public.known("drift"), made[-1].parameters - model.parameters)
        made.append(device.model(answer.task.model))


# Long polls


def test_a_long_poll_is_answered_by_news(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model)
    waiting, other = enrolled(), enrolled()
    pending = include_one(waiting, model)
    with ThreadPoolExecutor(1) as pool:
        poll = pool.submit(waiting.check_in, "digits", pending, wait=30.0)
        include_one(other, model)
        answer = poll.result(30)
    assert answer is not None
    assert answer.receipts[0].receipt.outcome == "included"
    assert answer.assignment is not None
    assert answer.assignment.plan.round == 2


def test_a_long_poll_without_news_ends_empty(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model, cohort={"size": 1, "minimum": 1})
    enrolled().assignment("digits")
    assert enrolled().check_in("digits", wait=0.01) is None


def test_a_stopping_server_lets_nobody_wait(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model, cohort={"size": 1, "minimum": 1})
    enrolled().assignment("digits")
    device = enrolled()
    with ThreadPoolExecutor(1) as pool:
        poll = pool.submit(device.check_in, "digits", wait=30.0)
        http.call(http.app.services.scheduler.release)
        with pytest.raises(Unavailable, match="about to stop"):
            poll.result(30)


# Tasks and rounds


def test_what_is_unknown_is_not_found(operator: Operator, enrolled: Enrolled, model: Model) -> None:
    operator.begin(model)
    device = enrolled()
    for missing in (UnknownTask, UnknownRound):
        path = "/v1/tasks/nope" if missing is UnknownTask else "/v1/tasks/digits/rounds/2"
        with pytest.raises(missing) as caught:
            device.json("GET", path)
        assert caught.value.status == 404
    for number in ("0", "9" * 23, "9" * 5000, "one"):
        with pytest.raises(MalformedRequest, match="number"):
            device.json("GET", f"/v1/tasks/digits/rounds/{number}")
    with pytest.raises(UnknownTask):
        device.check_in("nope")


def test_devices_and_operators_see_the_same_history(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model)
    device = enrolled()
    for path in ("/v1/tasks", "/v1/tasks/digits", "/v1/tasks/digits/rounds"):
        assert device.json("GET", path).json() == operator.get(path)
    assert device.json("GET", "/v1/tasks/digits/rounds/1").json()["state"] == "collecting"


def around(inner: dict[str, Any]) -> dict[str, Any]:
    return {
        "profiles": [{"name": "one", "compressor": {"id": "error_feedback", "inner": inner}}],
        "members": ["one", "two"],
    }


@pytest.mark.parametrize(
    ("config", "error", "says"),
    [
        ({"strategy": {"id": "magic"}}, ConfigurationError, "fedavg"),
        ({"strategy": {"id": "fedavgm", "momentum": 2}}, ConfigurationError, "momentum"),
        ({"profiles": []}, MalformedRequest, "profiles"),
        ({"cohort": {"size": 1, "minimum": 2}}, MalformedRequest, "minimum 2"),
        ({"max_abs": 1e15}, ConfigurationError, "overflow"),
        ({"rounds": 0}, MalformedRequest, "rounds"),
        ({"strategy": {"id": "fetchsgd"}}, IncompatiblePlan, "takes count_sketch"),
        (around({"id": "qsgd"}), IncompatiblePlan, "around qsgd, which does not contract"),
        (around({"id": "delta"}), IncompatiblePlan, "use delta without error_feedback"),
        ({"strategy": {"id": "fetchsgd", "rows": 0}}, ConfigurationError, "rows"),
    ],
)
def test_a_task_that_cannot_work_is_refused_with_the_reason(
    operator: Operator,
    model: Model,
    config: dict[str, Any],
    error: type[FedpressError],
    says: str,
) -> None:
    with pytest.raises(error, match=says):
        operator.begin(model, **config)
    assert operator.get("/v1/tasks") == []


@pytest.mark.parametrize(
    ("strategy", "dtype"),
    [
        ({"id": "fedavgm", "momentum": 0.5}, np.float32),
        ({"id": "fedavg", "learning_rate": 0.5}, np.float32),
        ({"id": "fedavg"}, np.float16),
    ],
)
def test_a_profile_that_needs_the_plain_mean_gets_no_other(
    operator: Operator, monkeypatch: pytest.MonkeyPatch, strategy: dict[str, Any], dtype: type
) -> None:
    monkeypatch.setattr(Uncompressed, "needs_plain_mean", True, raising=False)
    with pytest.raises(IncompatiblePlan, match="'whole' counts on"):
        operator.begin(Model.from_tensors({"w": np.zeros(4, dtype)}), strategy=strategy)
    operator.begin(Model.from_tensors({"w": np.zeros(4, np.float32)}), strategy={"id": "fedavg"})


def test_a_task_on_an_unknown_model_is_refused(operator: Operator, model: Model) -> None:
    config = {"task": "digits", "model": "0" * 64, "rounds": 1}
    config |= {"profiles": [{"name": "whole", "compressor": {"id": "none"}}]}
    with pytest.raises(UnknownModel):
        operator.post("/v1/admin/tasks", config | {"cohort": {"size": 1, "minimum": 1}})


def test_a_plan_larger_than_the_server_takes_is_refused(start: Start) -> None:
    model = Model.from_tensors({"w": np.zeros(1000, np.float16)})
    with start(max_body_bytes=3000) as http, pytest.raises(ConfigurationError, match="3000"):
        Operator(http).begin(model)


def test_a_taken_name_is_refused(operator: Operator, model: Model) -> None:
    operator.begin(model)
    with pytest.raises(AlreadyExists):
        operator.begin(model)


def test_a_seed_makes_the_rounds_public_seeds(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    for task, seed in (("a", 1), ("b", 2), ("c", None)):
        operator.begin(model, task, seed=seed)
    device = enrolled()
    seeds = {device.assignment(task).plan.public_seed for task in "abc"}
    assert len(seeds) == 3


def test_evaluations_are_averaged_by_examples_and_the_last_counts(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model, cohort={"size": 2, "minimum": 2})
    devices = [enrolled(), enrolled()]
    pending = [include_one(device, model) for device in devices]
    answer = devices[0].check_in("digits", pending[0], wait=30)
    assert answer is not None
    made = answer.task.model

    def report(device: Device, examples: int, model: str = made, **metrics: float) -> None:
        shown = str(metrics).replace("'", '"')
        body = f'{{"model": "{model}", "num_examples": {examples}, "metrics": {shown}}}'
        assert device.json("POST", "/v1/tasks/digits/evaluations", body).status_code == 204

    report(devices[0], 99, accuracy=0.0)
    report(devices[0], 1, accuracy=0.5)
    report(devices[1], 3, accuracy=0.9, loss=2.0)
    first, second = history(operator)
    assert first.metrics == pytest.approx({"accuracy": 0.8, "loss": 2.0})
    assert second.metrics == {}
    with pytest.raises(UnknownModel):
        report(devices[0], 1, model="0" * 64, accuracy=1.0)


def test_a_metric_too_large_is_refused_and_counts_in_no_mean(
    operator: Operator, enrolled: Enrolled, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator.begin(model, cohort={"size": 2, "minimum": 2})
    device, other = enrolled(), enrolled()
    include_one(other, model)
    answer = device.check_in("digits", include_one(device, model), wait=30)
    assert answer is not None
    made = answer.task.model

    def report(device: Device, value: float) -> None:
        body = f'{{"model": "{made}", "num_examples": 99, "metrics": {{"loss": {value}}}}}'
        device.json("POST", "/v1/tasks/digits/evaluations", body)

    for value in (1e308, -1e16):
        with pytest.raises(MalformedRequest, match="loss of"):
            report(device, value)
    monkeypatch.setattr("fedpress_server.api.devices.MAX_METRIC", np.inf)  # as an earlier server
    report(device, 1e308)
    report(other, 2.0)
    assert history(operator)[0].metrics == {"loss": 2.0}
