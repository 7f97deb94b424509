"""Policies beside what else a task may go through: continuations, rounds that are aborted, tasks
that are cancelled or paused, asynchronous buffers; and the lineage of what asynchronous tasks make.
"""

from __future__ import annotations

import hashlib
import json

import pytest

from fedpress_protocols.messages import Assignment
from fedpress_protocols.model import Model
from fedpress_protocols.policies import Course
from fedpress_protocols.registry import ModelLineage
from tests.devices import Device, Operator
from tests.server.in_process import Enrolled, history, ones

ALONE = {"size": 1, "minimum": 1}
LADDER = [
    {"name": "whole", "compressor": {"id": "none"}},
    {"name": "half", "compressor": {"id": "topk", "fraction": 0.5}},
    {"name": "one", "compressor": {"id": "topk", "count": 1}},
]
LOOP = {"id": "accuracy_driven", "window": 3, "settle": 0}
GUARD = {"id": "divergence_guard", "first": 2, "settle": 2}
FALLING = [2.0 / (number + 1) for number in range(40)]


def given(device: Device) -> Assignment:
    answer = device.check_in("digits", wait=30)
    assert answer is not None
    assert answer.assignment is not None
    return answer.assignment


def report(device: Device, assignment: Assignment) -> None:
    loss = FALLING[assignment.plan.round]
    told = {"model": assignment.plan.model, "num_examples": 9, "metrics": {"loss": loss}}
    device.json("POST", "/v1/tasks/digits/evaluations", json.dumps(told))


def trained(device: Device, model: Model, rounds: int) -> list[str]:
    """The profiles of so many rounds by this device alone, while its losses fall."""
    profiles = []
    for _ in range(rounds):
        assignment = given(device)
        profiles.append(assignment.profile)
        report(device, assignment)
        device.upload(assignment.assignment, device.body_for(assignment, ones(model)))
        device.check_in("digits", assignment.assignment, wait=30)
    return profiles


def courses(operator: Operator) -> list[Course | None]:
    return [each.course for each in history(operator)]


@pytest.mark.parametrize("ends", ["finished", "cancelled"])
def test_a_continued_task_begins_its_policies_anew(
    ends: str, operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    rounds = 12 if ends == "finished" else 30
    operator.begin(model, profiles=LADDER, policies=[LOOP], cohort=ALONE, rounds=rounds)
    device = enrolled()
    before = trained(device, model, 12)
    assert before[0] == "whole"
    assert before[-1] != "whole", "the loss fell as it did"
    if ends == "cancelled":
        operator.post("/v1/admin/tasks/digits/cancel")
    summary = operator.get("/v1/tasks/digits")
    assert (summary["state"], summary["round"]) == (ends, 12)
    known = courses(operator)
    more = {"after_round": 12, "rounds": 12, "model": summary["model"]}
    operator.post("/v1/admin/tasks/digits/continue", more)
    after = trained(device, model, 12)
    assert after[0] == "whole"
    assert courses(operator)[: len(known)] == known
    begun = next(each for each in history(operator)[len(known) :] if each.state == "committed")
    assert begun.course is not None
    assert begun.course.trend is not None
    assert (begun.course.trend.rung, begun.course.trend.since) == (0, 12)


def test_an_aborted_round_has_the_course_of_its_first_attempt(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model, profiles=LADDER, policies=[LOOP], cohort=ALONE, rounds=30)
    device = enrolled()
    trained(device, model, 11)
    before = given(device)
    report(device, before)  # known by the time of the second attempt, and not asked about
    operator.post("/v1/admin/tasks/digits/abort-round")
    again = given(device)
    assert (again.plan.attempt, again.profile) == (2, before.profile)
    first, second = courses(operator)[-2:]
    assert first == second


def test_a_paused_task_keeps_its_course(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model, profiles=LADDER, policies=[LOOP], cohort=ALONE, rounds=30)
    device, other = enrolled(), enrolled()
    trained(device, model, 10)
    due = courses(operator)[-1]
    operator.post("/v1/admin/tasks/digits/pause")
    assert other.check_in("digits") is None
    operator.post("/v1/admin/tasks/digits/resume")
    trained(device, model, 1)
    assert courses(operator)[10] == due


def test_a_task_that_is_cancelled_in_a_probe_gives_everything_back(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(
        model, profiles=LADDER, policies=[GUARD], cohort={"size": 4, "minimum": 4}, rounds=9
    )
    devices = [enrolled() for _ in range(3)]
    for device in devices:
        assignment = given(device)
        device.upload(assignment.assignment, device.body_for(assignment, ones(model)))
    operator.post("/v1/admin/tasks/digits/cancel")
    for device in devices:
        answer = device.check_in("digits")
        assert answer is not None
        assert answer.task.state == "cancelled"
    probed = history(operator)[0]
    assert probed.course is not None
    assert probed.course.probe
    assert probed.course.comparison is None


def test_an_asynchronous_task_probes_and_presses(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    """Uploads of a probe are in buffers with those of rounds before and after it."""
    operator.begin(
        model,
        profiles=LADDER,
        policies=[GUARD, LOOP],
        cohort={"size": 4, "minimum": 4},
        asynchronous={"concurrency": 5, "max_staleness": 10},
        strategy={"id": "fedbuff"},
        rounds=8,
    )
    devices, profiles = [enrolled() for _ in range(5)], []
    slow = given(devices[4])
    for number in range(8):
        here = [given(device) for device in devices[:4]]
        profiles.append({(each.profile, each.plan.sketch) for each in here})
        for device, assignment in zip(devices[:4], here, strict=True):
            report(device, assignment)
            device.upload(assignment.assignment, device.body_for(assignment, ones(model)))
            if number == 6 and device is devices[2]:
                body = devices[4].body_for(slow, ones(model))
                devices[4].upload(slow.assignment, body)
                break
        devices[0].check_in("digits", here[0].assignment, wait=30)
        if number == 6:
            break
    assert profiles[:2] == [{("whole", 64)}] * 2
    assert profiles[3] == {("whole", 0)}
    probed = [each.course for each in history(operator)][:2]
    assert all(each is not None and each.comparison is not None for each in probed)
    made = ModelLineage.model_validate(operator.get("/v1/admin/tasks/digits/versions/7"))
    late = hashlib.sha256(devices[4].body_for(slow, ones(model))).hexdigest()
    assert late in made.updates, "trained on version 0, and part of version 7"
    assert (made.version, made.num_updates, len(made.ancestors)) == (7, 4, 7)
