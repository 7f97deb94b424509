"""Tasks that name their members, and differences to each member's own last included upload."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpress_compression.tensors import Vector
from fedpress_protocols.errors import (
    ConfigurationError,
    FedpressError,
    Forbidden,
    IncompatiblePlan,
    NotFound,
)
from fedpress_protocols.messages import Assignment
from fedpress_protocols.model import Model
from fedpress_server.storage.database import Database
from fedpress_server.storage.payloads import LocalPayloads
from tests.devices import Device, Operator
from tests.server.in_process import Clock, Enrolled, Server, Start, history, include_one
from tests.server.test_durability import Fails, Party, finish, outcome

DELTA = {"id": "delta", "inner": {"id": "topk", "fraction": 0.3, "magnitude_bits": 0}}


def begin(operator: Operator, model: Model, members: list[Device], **config: Any) -> None:
    defaults: dict[str, Any] = {
        "rounds": 5,
        "profiles": [{"name": "one", "compressor": DELTA}],
        "cohort": {"size": len(members), "minimum": 1},
        "members": [device.client_id for device in members],
    }
    operator.begin(model, **(defaults | config))


def update_of(seed: int, size: int) -> Vector:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def send(device: Device, model: Model, seed: int) -> tuple[Assignment, Vector]:
    """The device uploads; its assignment, and what the upload stands for."""
    assignment = device.assignment("digits")
    size, plan = model.spec.size, assignment.plan
    update = update_of(seed, size)
    device.upload(assignment.assignment, device.body_for(assignment, update))
    made = plan.compressor("one")
    public = plan.public(model.spec, {"own": device.own(assignment, size)})
    symbols, _ = made.compress(update, None, public, np.random.default_rng(0))
    return assignment, made.decompress(symbols, public).dense()


def settled(device: Device, assignment: Assignment) -> str:
    """What became of the assignment, once it is known."""
    answer = device.check_in("digits", assignment.assignment, wait=30)
    assert answer is not None
    return answer.receipts[0].receipt.reason


# Members


def test_nobody_but_members_is_assigned(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    member, stranger = enrolled(), enrolled()
    begin(operator, model, [member], profiles=[{"name": "one", "compressor": {"id": "none"}}])
    assert stranger.check_in("digits") is None
    assert member.assignment("digits").plan.fixed_cohort
    include_one(member, model)
    assert stranger.check_in("digits") is None


@pytest.mark.parametrize(
    ("members", "said"),
    [
        (lambda ids: [ids[0], ids[0]], "1 different members for cohorts of 2"),
        (lambda ids: [ids[0]], "1 different members for cohorts of 2"),
        (lambda ids: [ids[0], "nobody"], "no device is enrolled as nobody"),
    ],
)
def test_members_that_make_no_cohort_are_refused(
    operator: Operator,
    enrolled: Enrolled,
    model: Model,
    members: Callable[[list[str]], list[str]],
    said: str,
) -> None:
    ids = [enrolled().client_id for _ in range(2)]
    with pytest.raises(ConfigurationError, match=said):
        operator.begin(model, members=members(ids))


def test_an_open_cohort_is_no_place_for_differences(operator: Operator, model: Model) -> None:
    with pytest.raises(IncompatiblePlan, match="name the task's members, so that their number"):
        operator.begin(model, profiles=[{"name": "one", "compressor": DELTA}])


@pytest.mark.parametrize("compressor", [DELTA, {"id": "powersgd", "trips": 2}])
def test_an_asynchronous_task_is_no_place_for_either(
    operator: Operator, enrolled: Enrolled, model: Model, compressor: dict[str, Any]
) -> None:
    profiles = [{"name": "one", "compressor": compressor}]
    with pytest.raises(FedpressError, match="decode only within their round"):
        begin(
            operator,
            model,
            [enrolled()],
            profiles=profiles,
            asynchronous={"concurrency": 1},
            cohort={"size": 1, "minimum": 1},
        )


# Differences to a member's own last upload


def test_the_model_moves_by_the_mean_of_what_uploads_stand_for(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model, tmp_path: Path
) -> None:
    members = [enrolled() for _ in range(3)]
    begin(operator, model, members, rounds=3)
    parameters = model.parameters.astype(np.float64)
    bases: list[str | None] = [None] * 3
    for number in range(3):
        sent = [send(device, model, 10 * number + i) for i, device in enumerate(members)]
        assert [assignment.own for assignment, _ in sent] == bases
        assert {settled(d, a) for d, (a, _) in zip(members, sent, strict=True)} == {"included"}
        stood_for = [whole for _, whole in sent]
        bases = [hashlib.sha256(whole.tobytes()).hexdigest() for whole in stood_for]
        parameters += np.mean(stood_for, axis=0, dtype=np.float64)
        found = members[0].model(operator.get("/v1/tasks/digits")["model"]).parameters
        np.testing.assert_allclose(found, parameters, atol=1e-6)
        parameters = found.astype(np.float64)
        left = {path.name for path in (tmp_path / "data/bases").rglob("*") if path.is_file()}
        named = {f"{d.client_id}-{base}" for d, base in zip(members, bases, strict=True)}
        assert left == (named if number < 2 else set()), "one file for each member"


def test_what_was_not_included_is_no_base(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    one, other = members = [enrolled(), enrolled()]
    begin(operator, model, members, cohort={"size": 1, "minimum": 1, "over_selection": 2})
    first, stood_for = send(one, model, 0)
    assert settled(one, first) == "included"
    base = hashlib.sha256(stood_for.tobytes()).hexdigest()
    again, _ = send(other, model, 1)  # which leaves no place for `one`
    assert settled(other, again) == "included"
    third, _ = send(one, model, 2)
    assert (third.plan.round, third.own) == (3, base)


def test_an_aborted_round_leaves_the_base_before_it(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model, tmp_path: Path
) -> None:
    one, other = members = [enrolled(), enrolled()]
    begin(operator, model, members, cohort={"size": 2, "minimum": 2})
    pair = [send(device, model, seed) for seed, device in enumerate(members)]
    assert settled(one, pair[0][0]) == settled(other, pair[1][0]) == "included"
    base = hashlib.sha256(pair[0][1].tobytes()).hexdigest()
    lost, _ = send(one, model, 7)
    stray = tmp_path / f"data/bases/digits/{one.client_id}-{'0' * 64}"
    stray.write_bytes(b"of an aggregation that was broken off")
    operator.post("/v1/admin/tasks/digits/abort-round")
    assert settled(one, lost) == "round-abandoned"
    assert one.assignment("digits").own == base
    assert not stray.exists()


def test_the_base_is_its_member_s_alone(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    one, other = members = [enrolled(), enrolled()]
    begin(operator, model, members, cohort={"size": 2, "minimum": 2})
    early = one.assignment("digits")
    with pytest.raises(NotFound, match="names no upload before it"):
        one.json("GET", f"/v1/assignments/{early.assignment}/own")
    pair = [send(device, model, seed) for seed, device in enumerate(members)]
    settled(one, pair[0][0])
    path = f"/v1/assignments/{one.assignment('digits').assignment}/own"
    with pytest.raises(Forbidden):
        other.json("GET", path)
    assert one.json("GET", path).content == pair[0][1].tobytes()
    assert history(operator)[-1].download_bytes == 0, "it was not asked for in a task's name"
    one.json("GET", path + "?task=digits")
    assert history(operator)[-1].download_bytes == 4 * model.spec.size
    with pytest.raises(NotFound, match="or is over"):
        one.json("GET", f"/v1/assignments/{early.assignment}/own")


def test_differences_that_sum_up_beyond_the_bound_are_refused(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    device = enrolled()
    begin(operator, model, [device], max_abs=4.0, profiles=[_raw()])
    first = device.assignment("digits")
    device.upload(first.assignment, device.body_for(first, np.full(12, 3, np.float32)))
    assert settled(device, first) == "included"
    second = device.assignment("digits")
    honest = device.body_for(second, np.full(12, 3.5, np.float32))
    forged = honest[:3] + np.full(12, 1.5, "<f4").tobytes()
    assert device.put(second.assignment, forged).status_code == 422
    device.upload(second.assignment, honest)


def _raw() -> dict[str, Any]:
    return {"name": "one", "compressor": {"id": "delta", "inner": {"id": "none"}}}


# Crashes


def test_a_restart_keeps_the_bases_and_sweeps_what_nothing_leads_to(
    start: Start, clock: Clock, model: Model, tmp_path: Path
) -> None:
    device = Device(None, clock)  # type: ignore[arg-type]
    base = None
    for number in range(3):
        with start() as http:
            device.http = http
            if not number:
                device.enrol(Operator(http).token())
                begin(Operator(http), model, [device])
            sent, stood_for = send(device, model, number)
            assert sent.own == base
            assert settled(device, sent) == "included"
            base = hashlib.sha256(stood_for.tobytes()).hexdigest()
        stray = tmp_path / f"data/bases/digits/{device.client_id}-{'0' * 64}"
        stray.write_bytes(b"left behind")
    with start() as http:
        device.http = http
        assert not stray.exists()
        assert device.assignment("digits").own == base
        Operator(http).post("/v1/admin/tasks/digits/cancel")
        assert not list((tmp_path / "data/bases/digits").iterdir())


@pytest.mark.soak
@pytest.mark.parametrize(
    ("cls", "function", "when"),
    [
        pytest.param(Database, "_commit", "before", marks=pytest.mark.slow),
        (Database, "_commit", "after"),
        pytest.param(LocalPayloads, "put", "after", marks=pytest.mark.slow),
    ],
)
def test_a_server_that_dies_at_any_write_keeps_both_ends_together(
    start: Start,
    clock: Clock,
    model: Model,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cls: type,
    function: str,
    when: str,
    soak: bool,
) -> None:
    """A device takes its base by the assignment's digest, and fails if the server has another."""
    written = getattr(cls, function)

    def federated(folder: Path, at: int | None) -> tuple[str, bool]:
        party, is_over = Party(clock), True
        with start(data_dir=folder) as http:
            party.enrol(http)
            cohort = {"size": 2, "minimum": 2}
            begin(Operator(http), model, party.devices, rounds=2, cohort=cohort)
            if at is not None:
                fails = Fails(written, at, when)
                monkeypatch.setattr(cls, function, fails)
                is_over = finish(http, party, lambda: fails.is_past)
        monkeypatch.setattr(cls, function, written)
        with start(data_dir=folder) as http:
            finish(http, party)
            assert not list((folder / "bases/digits").iterdir())
            return outcome(http, party)[0], is_over

    undisturbed, _ = federated(tmp_path / "undisturbed", None)
    for at in range(0, 100, 1 if soak else 17):
        found, is_over = federated(tmp_path / f"died-{at}", at)
        assert found == undisturbed
        if is_over:
            break
    assert at > 5


def test_who_may_not_take_part_is_sent_away_for_longer(
    operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    first, waiting, stranger = (enrolled() for _ in range(3))
    members = [first.client_id, waiting.client_id]
    operator.begin(model, members=members, cohort={"size": 1, "minimum": 1})
    first.assignment("digits")
    path, body = "/v1/tasks/digits/check-in", '{"pending": [], "wait": 0}'
    soon, later = (
        int(device.json("POST", path, body).headers["retry-after"])
        for device in (waiting, stranger)
    )
    assert 4 * soon < later
