"""A task that its operator pauses gives no work, loses nothing, and goes on where it was."""

import asyncio
from typing import Any

import pytest

from fedpress_protocols.errors import Conflict, NotFound
from fedpress_protocols.messages import TaskSummary
from fedpress_protocols.model import Model
from tests.devices import Device, Operator
from tests.server.in_process import Clock, Enrolled, Server, Start, history, include_one, ones

ALONE = {"size": 1, "minimum": 1}


def told(operator: Operator, *action: str) -> TaskSummary:
    found = (
        operator.post(f"/v1/admin/tasks/digits/{action[0]}")
        if action
        else operator.get("/v1/tasks/digits")
    )
    return TaskSummary.model_validate(found)


def work(device: Device) -> Any:
    answer = device.check_in("digits")
    return None if answer is None else answer.assignment


def test_a_paused_task_gives_no_work_and_a_resumed_one_does(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model, cohort=ALONE)
    device = enrolled()
    for _ in range(2):  # the second time it is paused already
        assert told(operator, "pause").reason == "held by the operator"
    assert told(operator).state == "running"
    assert work(device) is None
    for _ in range(2):
        assert told(operator, "resume").reason == ""
    assert work(device) is not None


def test_what_was_given_before_the_pause_is_taken_and_the_next_round_waits(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model, clock: Clock
) -> None:
    operator.begin(model, cohort=ALONE, rounds=5, max_attempts=1)
    device = enrolled()
    held = device.assignment("digits")
    told(operator, "pause")
    device.upload(held.assignment, device.body_for(held, ones(model)))
    answer = device.check_in("digits", held.assignment, wait=30)
    assert answer is not None
    assert [each.receipt.outcome for each in answer.receipts] == ["included"]
    assert answer.assignment is None
    for _ in range(5):  # many deadlines: none of them is an attempt
        clock.advance(61)
        http.tick()
    assert (told(operator).state, told(operator).round) == ("running", 1)
    assert [each.attempt for each in history(operator)] == [1, 1]
    told(operator, "resume")
    include_one(device, model)


def test_an_upload_of_a_cohort_that_is_not_full_waits_for_its_round(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model, clock: Clock
) -> None:
    operator.begin(model, cohort={"size": 2, "minimum": 2})
    first, second = enrolled(), enrolled()
    include_one(first, model)
    told(operator, "pause")
    assert work(second) is None
    for _ in range(3):
        clock.advance(61)
        http.tick()
    told(operator, "resume")
    include_one(second, model)
    answer = first.check_in("digits", wait=30)
    assert answer is not None
    assert history(operator)[0].included == 2


@pytest.mark.parametrize("policy", ["first", "uniform"])
def test_a_pause_outlasts_a_restart_and_keeps_what_the_optimizer_knows(
    start: Start, clock: Clock, model: Model, policy: str
) -> None:
    """With momentum: a task that was paused makes bit for bit what one that was not makes."""
    ends = {}
    selection = {"policy": policy} | ({"window": 0.01} if policy != "first" else {})
    with start() as http:
        operator, device = Operator(http), Device(http, clock)
        device.enrol(operator.token())
        for task in ("plain", "paused"):
            operator.begin(
                model,
                task,
                cohort=ALONE,
                rounds=4,
                strategy={"id": "fedavgm", "momentum": 0.8},
                selection=selection,
            )
            run(device, http, clock, model, task, 2)
        operator.post("/v1/admin/tasks/paused/pause")
        key, server_key = device.key, device.server_key
    with start() as http:
        operator, device = Operator(http), Device(http, clock, key)
        device.server_key, device.client_id = server_key, client_of(operator)
        clock.advance(1)
        http.tick()
        answer = device.check_in("paused")
        assert answer is None or answer.assignment is None
        operator.post("/v1/admin/tasks/paused/resume")
        for task in ("plain", "paused"):
            ends[task] = run(device, http, clock, model, task, 2)
    assert ends["plain"] == ends["paused"] != model.digest


def client_of(operator: Operator) -> str:
    return str(operator.get("/v1/admin/clients")[0]["client_id"])


def run(device: Device, http: Server, clock: Clock, model: Model, task: str, rounds: int) -> str:
    """So many rounds; the model after them."""
    for _ in range(rounds):
        for _ in range(20):
            answer = device.check_in(task)
            if answer is not None and answer.assignment is not None:
                break
            clock.advance(0.1)
            http.tick()
        else:
            raise AssertionError(f"no work in {task}")
        given = answer.assignment
        device.upload(given.assignment, device.body_for(given, ones(model)))
        for _ in range(1000):  # asked by itself, for a check-in would bring the next round's work
            receipt = device.receipt(given.assignment)
            if receipt is not None:
                break
            http.call(asyncio.sleep, 0.01)
    assert receipt is not None
    assert receipt.receipt.model is not None
    return receipt.receipt.model


def test_only_a_running_task_is_paused(operator: Operator, model: Model) -> None:
    operator.begin(model, cohort=ALONE)
    with pytest.raises(NotFound):
        operator.post("/v1/admin/tasks/other/pause")
    operator.post("/v1/admin/tasks/digits/cancel")
    for action in ("pause", "resume"):
        with pytest.raises(Conflict, match="is cancelled; only a running one"):
            told(operator, action)


def test_a_held_task_is_not_finished_and_says_how_it_goes_on_or_ends(
    operator: Operator, model: Model
) -> None:
    operator.begin(model, cohort=ALONE)
    told(operator, "pause")
    with pytest.raises(Conflict, match=r"running, held by the operator; .* last round") as found:
        told(operator, "finish")
    assert "fedpress task resume" in found.value.hint
    assert "fedpress task cancel" in found.value.hint


def test_a_task_that_is_cancelled_while_paused_goes_on_without_the_pause(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model, cohort=ALONE)
    told(operator, "pause")
    operator.post("/v1/admin/tasks/digits/cancel")
    more = {"after_round": 0, "rounds": 2, "model": model.digest}
    operator.post("/v1/admin/tasks/digits/continue", more)
    assert work(enrolled()) is not None
