"""Schedules on a server: what each round's plan has, across restarts and attempts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedpress_protocols.errors import IncompatiblePlan
from fedpress_protocols.model import Model
from fedpress_protocols.plan import RoundPlan
from tests.devices import Device, Operator
from tests.server.in_process import Clock, Enrolled, Server, Start, history, include_one

ALONE = {"size": 1, "minimum": 1}
FEEDBACK = {"id": "error_feedback", "inner": {"id": "topk", "fraction": 0.25}}
ONE_BIT = {"id": "error_feedback", "inner": {"id": "sign"}}


def profiles(compressor: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"name": "only", "compressor": compressor}]


def period(compressor: dict[str, Any], **terms: Any) -> dict[str, Any]:
    return {"profiles": profiles(compressor), **terms}


def device_of(http: Any, clock: Clock) -> Device:
    device = Device(http, clock)
    device.enrol(Operator(http).token())
    return device


def plan_of(device: Device) -> RoundPlan:
    return device.assignment("digits").plan


def a_round(device: Device, model: Model) -> RoundPlan:
    """The plan of a round that this device then completes."""
    plan = plan_of(device)
    pending = include_one(device, model)
    answer = device.check_in("digits", pending, wait=30)
    assert answer is not None
    assert answer.receipts[0].receipt.outcome == "included"
    return plan


def test_rounds_have_their_periods_through_restarts_and_abandoned_attempts(
    start: Start, clock: Clock, model: Model
) -> None:
    schedule = [
        period({"id": "none"}, rounds=2, warms_up=True),
        period({"id": "error_feedback", "inner": {"id": "topk", "fraction": 0.5}}, rounds=1),
    ]
    found = []
    with start() as http:
        settings: dict[str, Any] = {"schedule": schedule, "profiles": profiles(FEEDBACK)}
        Operator(http).begin(model, rounds=5, cohort=ALONE, **settings)
        device = device_of(http, clock)
        found.append(a_round(device, model))
        before = plan_of(device)
        Operator(http).post("/v1/admin/tasks/digits/abort-round")
        again = plan_of(device)
        assert (before.profiles, before.warming) == (again.profiles, again.warming)
        assert (before.round, before.attempt + 1) == (again.round, again.attempt)
    with start() as http:
        device.http = http
        assert plan_of(device) == again
        found += [a_round(device, model) for _ in range(4)]
    assert [plan.round for plan in found] == [1, 2, 3, 4, 5]
    assert [plan.warming for plan in found] == [True, True, False, False, False]
    ids = [plan.compressor("only").wire_id for plan in found]  # type: ignore[attr-defined]
    assert ids == ["none"] * 2 + ["error_feedback"] * 3
    shares = [plan.compressor("only").inner.fraction for plan in found[2:]]  # type: ignore[attr-defined]
    assert shares == [0.5, 0.25, 0.25]


def test_a_budget_is_of_the_bytes_that_were_counted(
    start: Start, clock: Clock, model: Model
) -> None:
    """12 values in float32 and a few bytes of head; ten rounds would be 480."""
    settings: dict[str, Any] = {
        "schedule": [period({"id": "none"}, budget=0.3)],
        "profiles": profiles(FEEDBACK),
        "rounds": 10,
        "cohort": ALONE,
    }
    with start() as http:
        Operator(http).begin(model, **settings)
        device = device_of(http, clock)
        dense = [a_round(device, model).compressor("only") for _ in range(2)]
    with start() as http:
        device.http = http
        dense += [a_round(device, model).compressor("only") for _ in range(2)]
        spent = [status.upload_bytes for status in history(Operator(http))][:3]
    assert len({type(each) for each in dense[:2]}) == 1
    assert sum(spent[:2]) <= 0.3 * 480 < sum(spent[:2]) + spent[1]
    assert [hasattr(each, "inner") for each in dense] == [False, False, True, True]


def test_a_continuation_has_its_schedule_from_the_beginning(
    start: Start, clock: Clock, model: Model
) -> None:
    settings: dict[str, Any] = {
        "schedule": [period({"id": "none"}, rounds=1, warms_up=True)],
        "profiles": profiles(ONE_BIT),
        "strategy": {"id": "onebit_adam"},
        "rounds": 2,
        "cohort": ALONE,
        "at_end": "paused",
    }
    with start() as http:
        operator = Operator(http)
        operator.begin(model, **settings)
        device = device_of(http, clock)
        first = [a_round(device, model).warming for _ in range(2)]
        more = {"after_round": 2, "rounds": 2, "model": operator.bring(model)}
        operator.post("/v1/admin/tasks/digits/continue", more)
        second = [a_round(device, model).warming for _ in range(2)]
    assert first == second == [True, False]


def test_what_is_frozen_is_what_the_warm_up_settled(
    start: Start, clock: Clock, model: Model
) -> None:
    """1-bit Adam through the server: after the warm-up small updates make small steps, which the
    second moment of plain Adam would have followed."""
    settings: dict[str, Any] = {
        "schedule": [period({"id": "none"}, rounds=1, warms_up=True)],
        "strategy": {"id": "onebit_adam", "learning_rate": 1.0, "beta1": 0.0, "tau": 1e-6},
        "profiles": profiles(ONE_BIT),
        "rounds": 3,
        "cohort": ALONE,
    }
    moved, now = [], model
    with start() as http:
        Operator(http).begin(model, **settings)
        device = device_of(http, clock)
        for value in (1.0, 0.25):
            assignment = device.assignment("digits")
            update = np.full(model.spec.size, value, np.float32)
            device.upload(assignment.assignment, device.body_for(assignment, update))
            answer = device.check_in("digits", assignment.assignment, wait=30)
            assert answer is not None
            after = device.model(answer.task.model)
            moved.append(after.parameters - now.parameters)
            now = after
    assert moved[0] == pytest.approx(1.0, abs=1e-4)
    assert moved[1] == pytest.approx(0.25, abs=1e-3)


def test_an_assignment_of_an_earlier_period_is_read_as_that_has_it(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    """In an asynchronous task, whose assignments outlive their rounds."""
    whole = {"name": "whole", "compressor": {"id": "none"}}
    operator.begin(
        model,
        schedule=[{"profiles": [whole], "rounds": 1}],
        profiles=profiles(FEEDBACK),
        cohort=ALONE,
        asynchronous={"concurrency": 2},
        strategy={"id": "fedbuff"},
        rounds=2,
    )
    slow, fast = enrolled(), enrolled()
    kept = slow.assignment("digits")
    a_round(fast, model)
    held = slow.assignment("digits")
    assert (held.assignment, held.profile, held.plan.round) == (kept.assignment, "whole", 1)
    update = np.full(model.spec.size, 2.0, np.float32)
    slow.upload(held.assignment, slow.body_for(held, update))
    answer = slow.check_in("digits", held.assignment, wait=30)
    assert answer is not None
    assert answer.receipts[0].receipt.outcome == "included"
    assert answer.task.round == 2


@pytest.mark.parametrize("schedule", [[], [period({"id": "none"}, rounds=2)]])
def test_a_strategy_that_freezes_begins_with_a_warm_up(
    operator: Operator, model: Model, schedule: list[dict[str, Any]]
) -> None:
    with pytest.raises(IncompatiblePlan, match="a period that warms_up"):
        operator.begin(model, strategy={"id": "onebit_lamb"}, schedule=schedule)


def test_a_later_period_is_checked_when_the_task_begins(operator: Operator, model: Model) -> None:
    delta = period({"id": "delta"}, rounds=1)
    with pytest.raises(IncompatiblePlan, match="name the task's members"):
        operator.begin(model, schedule=[period({"id": "none"}, rounds=1), delta])
    follow: dict[str, Any] = {"strategy": {"id": "fedavgm"}, "profiles": profiles({"id": "ef21"})}
    half = period({"id": "ef21", "inner": {"id": "topk", "fraction": 0.5}}, rounds=1)
    with pytest.raises(IncompatiblePlan, match="counts on a model that moves by the very mean"):
        operator.begin(model, schedule=[half], **follow)


def test_what_a_device_repeats_is_not_on_the_budget(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    schedule = [period({"id": "none"}, budget=0.9)]
    operator.begin(model, rounds=10, cohort=ALONE, schedule=schedule, profiles=profiles(FEEDBACK))
    device, plans = enrolled(), []
    for _ in range(3):
        assignment = device.assignment("digits")
        plans.append(assignment.plan)
        body = device.body_for(assignment, np.ones(model.spec.size, np.float32))
        for _ in range(20):
            device.upload(assignment.assignment, body)
        device.check_in("digits", assignment.assignment, wait=30)
    assert [plan.profiles for plan in plans[1:]] == [plans[0].profiles] * 2
