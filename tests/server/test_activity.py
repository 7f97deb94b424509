"""The server's map of activity: named by the plan, made of the models, as durable as they are."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedpress_compression import activity
from fedpress_protocols.errors import NotFound
from fedpress_protocols.model import Model
from fedpress_protocols.plan import RoundPlan
from fedpress_server.storage.database import Database
from fedpress_server.storage.payloads import LocalPayloads
from tests.devices import Device, Operator
from tests.server.in_process import Clock, Enrolled, Server, Start, history
from tests.server.test_durability import Fails, Party, finish, outcome

CODED = {
    "id": "coded",
    "inner": {"id": "topk", "fraction": 0.5, "magnitude_bits": 0},
    "contexts": "activity",
}


def begin(operator: Operator, model: Model, task: str = "digits", size: int = 1) -> None:
    operator.begin(
        model,
        task,
        rounds=4,
        profiles=[{"name": "one", "compressor": CODED}],
        cohort={"size": size, "minimum": size},
        strategy={"id": "fedavgm", "momentum": 0.5},
    )


def take_part(device: Device, seed: int, task: str = "digits") -> tuple[RoundPlan, str]:
    """A round of one device: its plan, and the model that came of it."""
    assignment = device.assignment(task)
    size = device.model(assignment.plan.model).spec.size
    update = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
    device.upload(assignment.assignment, device.body_for(assignment, update))
    answer = device.check_in(task, assignment.assignment, wait=30)
    assert answer is not None
    assert answer.receipts[0].receipt.outcome == "included"
    return assignment.plan, answer.task.model


def test_the_map_is_that_of_the_published_models(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    begin(operator, model)
    device = enrolled()
    average, before = None, model
    for number in range(4):
        plan, made = take_part(device, number)
        if average is None:
            assert plan.activity is None
        else:
            due = activity.to_bytes(average, model.spec)
            assert plan.activity == hashlib.sha256(due).hexdigest()
        after = device.model(made)
        average = activity.averaged(average, after.parameters - before.parameters)
        before = after


def test_a_map_lasts_as_long_as_its_round(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model, tmp_path: Path
) -> None:
    begin(operator, model)
    device, folder = enrolled(), tmp_path / "data/artefacts"
    take_part(device, 0)
    first = device.assignment("digits").plan
    assert first.activity is not None
    operator.post("/v1/admin/tasks/digits/abort-round")
    again = device.assignment("digits").plan
    assert (again.attempt, again.activity) == (2, first.activity)
    assert [path.name for path in folder.iterdir()] == [first.activity]
    take_part(device, 1)
    with pytest.raises(NotFound, match="no open round names"):
        device.artefact(first.activity, "digits")
    for seed in (2, 3):
        take_part(device, seed)
    assert list(folder.iterdir()) == [], "the task is over"


def test_two_tasks_may_share_a_map(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    device = enrolled()
    for task in ("digits", "letters"):
        begin(operator, model, task)
        take_part(device, 0, task)
    shared = device.assignment("letters").plan.activity
    assert shared is not None
    assert device.assignment("digits").plan.activity == shared
    take_part(device, 1, "digits")
    assert device.artefact(shared, "letters")


def test_the_map_s_bytes_count_as_downloaded(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    begin(operator, model)
    device = enrolled()
    take_part(device, 0)
    plan = device.assignment("digits").plan
    assert plan.activity is not None
    data = device.artefact(plan.activity, "digits")
    assert history(operator)[-1].download_bytes == len(data)
    path = f"/v1/artefacts/{plan.activity}?task=digits"
    part = device.request("GET", path, headers={"Range": "bytes=1-"})
    assert (part.status_code, part.content) == (206, data[1:])
    kept = device.request("GET", path, headers={"If-None-Match": f'"{plan.activity}"'})
    assert kept.status_code == 304


def test_a_map_goes_to_devices_alone(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    begin(operator, model)
    device = enrolled()
    take_part(device, 0)
    digest = device.assignment("digits").plan.activity
    assert http.get(f"/v1/artefacts/{digest}").status_code == 401


def test_a_restart_keeps_the_map_and_sweeps_what_nothing_leads_to(
    start: Start, clock: Clock, model: Model, tmp_path: Path
) -> None:
    device = Device(None, clock)  # type: ignore[arg-type]
    plans = []
    for number in range(3):
        stray = tmp_path / "data/artefacts" / ("0" * 64)
        stray.parent.mkdir(parents=True, exist_ok=True)
        stray.write_bytes(b"left behind")
        with start() as http:
            device.http = http
            if not number:
                device.enrol(Operator(http).token())
                begin(Operator(http), model)
            else:
                assert not stray.exists()
            plans.append(take_part(device, number)[0])
    with start(data_dir=tmp_path / "other") as http:
        undisturbed = Device(http, clock)
        undisturbed.enrol(Operator(http).token())
        begin(Operator(http), model)
        again = [take_part(undisturbed, number)[0] for number in range(3)]
    assert [plan.activity for plan in plans] == [plan.activity for plan in again]


@pytest.mark.soak(only=True)
@pytest.mark.parametrize(
    ("cls", "function"), [(Database, "_commit"), (LocalPayloads, "put")], ids=["commit", "file"]
)
def test_a_server_that_dies_at_any_write_names_the_same_maps(
    start: Start,
    clock: Clock,
    model: Model,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cls: type,
    function: str,
) -> None:
    def federated(folder: Path, at: int | None) -> tuple[str, bool]:
        """The last model, and whether the task was over before the call number `at` failed."""
        party, is_over = Party(clock), True
        with start(data_dir=folder) as http:
            party.enrol(http)
            Operator(http).begin(
                model,
                rounds=2,
                profiles=[{"name": "one", "compressor": CODED}],
                cohort={"size": 2, "minimum": 2},
            )
            if at is not None:
                fails = Fails(written, at, "after")
                monkeypatch.setattr(cls, function, fails)
                is_over = finish(http, party, lambda: fails.is_past)
        monkeypatch.setattr(cls, function, written)
        with start(data_dir=folder) as http:
            finish(http, party)
            names = {path.name for path in (folder / "artefacts").iterdir()}
            assert not names
            return outcome(http, party)[0], is_over

    written: Callable[..., object] = getattr(cls, function)
    undisturbed, _ = federated(tmp_path / "undisturbed", None)
    for at in range(100):
        found, is_over = federated(tmp_path / f"died-{at}", at)
        assert found == undisturbed
        if is_over:
            break
    assert at > 5
