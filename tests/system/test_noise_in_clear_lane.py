"""Private tasks of the clear lane over HTTP: the server's noise, or each device's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpress_client import MaskingRules, PrivacyRules, privacy_budget
from fedpress_client.trainer import Evaluation
from fedpress_protocols.errors import FedpressError, InvalidUpdate
from fedpress_protocols.model import Model
from fedpress_protocols.plan import PrivacyTerms
from fedpress_protocols.privacy.accounting import PrivacyLane
from fedpress_server.aggregation.aggregate import aggregate
from fedpress_server.coordination import job_runner
from fedpress_strategies import private
from tests.devices import ADMIN, Device
from tests.masked import Participant
from tests.server.in_process import Clock
from tests.system.test_masked_sessions import World

PRIVATE: dict[str, Any] = {
    "lane": "central", "clip": 0.05, "noise_multiplier": 2.1, "participations": 5, "epsilon": 6.0,
    "delta": 1e-5,
}  # fmt: skip
FEEDBACK = {"id": "error_feedback", "inner": {"id": "shared_support", "fraction": 0.5}}
LANES = ("central", "local")
BOTH: frozenset[PrivacyLane] = frozenset({"central", "local", "distributed"})


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def world(**terms: Any) -> World:
        made.append(World(tmp_path, Clock()))
        begin(made[-1], **terms)
        return made[-1]

    yield world
    for each in made:
        for participant in each.participants:
            if participant.client is not None:
                participant.client.close()
        each.stop()


def begin(world: World, privacy: dict[str, Any] | None = None, **config: Any) -> None:
    defaults: dict[str, Any] = {
        "cohort": {"size": 4, "minimum": 2},
        "profiles": [{"name": "private", "compressor": FEEDBACK}],
        "privacy": {**PRIVATE, **(privacy or {})},
    }
    world.operator.begin(world.model, **(defaults | config))


def enrol(world: World, count: int, **options: Any) -> list[Participant]:
    return world.enrol(count, **({"masking": MaskingRules(required=False)} | options))


def of(device: Participant, kind: str) -> list[dict[str, Any]]:
    return [event.details for event in device.events if event.kind == kind]


def moved(world: World, number: int = -1) -> np.ndarray:
    status = world.statuses[number]
    before = Model.from_bytes(world._file(status.base_model)).parameters.astype(np.float64)
    return Model.from_bytes(world._file(status.model or "")).parameters - before


def sent(world: World) -> list[np.ndarray]:
    return [each.update.dense() for device in world.participants for each in device.plain.values()]


def test_the_server_adds_noise_once_and_none_enters_a_residual(make: Callable[..., World]) -> None:
    world = make(rounds=1)
    enrol(world, 4)
    world.drive()
    (status,) = world.statuses
    assert (status.state, status.included, status.num_examples) == ("committed", 4, 4)
    plain = np.sum(sent(world), axis=0) / 4
    support = np.flatnonzero(plain)
    noise = (moved(world) - plain)[moved(world) != 0]
    expected = PRIVATE["clip"] * PRIVATE["noise_multiplier"] / 4
    assert np.std(noise) == pytest.approx(expected, rel=0.5)
    assert 18 <= support.size <= np.count_nonzero(moved(world)) <= 20, "noise off the support"
    world.check_conserved()


@pytest.mark.parametrize("lane", LANES)
def test_what_is_sent_is_within_the_clip(make: Callable[..., World], lane: str) -> None:
    world = make(privacy={"lane": lane, "clip": 0.02}, rounds=2)
    enrol(world, 4)
    world.drive()
    updates = sent(world)
    assert len(updates) == 8
    norms = [float(np.linalg.norm(each.astype(np.float64))) for each in updates]
    # on the local lane's grid rounding adds to the clip, and the noise is by what it adds
    assert max(norms) <= 0.02 * (1 if lane == "central" else 1.05)
    assert min(norms) > 0.015
    world.check_conserved()


def test_a_device_noises_what_it_sends_by_itself(make: Callable[..., World]) -> None:
    whole = {"id": "error_feedback", "inner": {"id": "none"}}
    profiles = [{"name": "whole", "compressor": whole}]
    world = make(privacy={"lane": "local"}, rounds=1, profiles=profiles)
    enrol(world, 4)
    world.drive()
    noise = moved(world) - np.mean(sent(world), axis=0)
    assert np.std(noise) == pytest.approx(0.05 * 2.1 / 2, rel=0.4)
    world.check_conserved()


@pytest.mark.parametrize("lane", LANES)
def test_the_spent_privacy_is_shown_everywhere(make: Callable[..., World], lane: str) -> None:
    world = make(rounds=2, privacy={"lane": lane})
    devices = enrol(world, 4)
    world.drive_until(lambda: world.terms.plan.round == 2)
    text = world.server.get("/metrics", headers=ADMIN).text
    (line,) = [each for each in text.splitlines() if each.startswith("fedpress_privacy_epsilon{")]
    claimed = PrivacyTerms(**{**PRIVATE, "lane": lane})
    assert float(line.split()[-1]) == pytest.approx(claimed.spent(1))
    world.drive()
    shown = [each.privacy for each in world.statuses]
    assert [each and each.participations for each in shown] == [1, 2]
    assert shown[-1] is not None
    assert shown[-1].epsilon == pytest.approx(claimed.spent(2))
    last = of(devices[0], "privacy")[-1]
    assert last["against"] == shown[-1].against
    assert (
        shown[-1].against
        == {
            "central": "other devices and the public, who see models, and not the server",
            "local": "any server, other devices, and the public",
        }[lane]
    )
    assert last["epsilon"] == pytest.approx(claimed.spent(2))


@pytest.mark.parametrize("lane", LANES)
def test_nobody_takes_part_more_often_than_the_terms_allow(
    make: Callable[..., World], lane: str
) -> None:
    world = make(rounds=2, privacy={"participations": 1, "lane": lane}, round_seconds=3600.0)
    devices = enrol(world, 4)
    world.drive_until(lambda: world.terms.plan.round == 2)
    for restarts in (False, True):
        if restarts:
            world.stop()
            world.start()
        for _ in range(5):
            for each in devices:
                each.step()
        assert [len(of(each, "assigned")) for each in devices] == [1, 1, 1, 1]
    summary = world.operator.get("/v1/tasks/digits")
    assert summary["reason"] == "devices that take no further part, their privacy budget spent: 4"
    more = enrol(world, 4)
    world.drive()
    assert [each.state for each in world.statuses] == ["committed", "committed"]
    assert [len(of(each, "assigned")) for each in more] == [1, 1, 1, 1]


def test_an_aggregation_that_is_run_again_has_the_same_noise(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server dies after the model was made and before that is known; another does it again."""
    world = make(rounds=1)
    enrol(world, 4)
    models, jobs = [], []

    def dies(job: Any, *rest: Any) -> Any:
        models.append(aggregate(job, *rest).model)
        jobs.append(job)
        if len(models) == 1:
            raise OSError("the machine loses power")
        return aggregate(job, *rest)

    monkeypatch.setattr(job_runner, "aggregate", dies)
    world.drive_until(lambda: bool(models))
    world.stop()
    world.start()
    world.drive()
    assert len(models) >= 2
    assert len(set(models)) == 1
    assert world.statuses[-1].model == models[0]
    fewer = [each.digest for each in jobs[0].uploads[:3]]
    secret = jobs[0].noise_secret
    plan, all_of_them = jobs[0].terms.plan.digest, [each.digest for each in jobs[0].uploads]
    seeds = {
        private.noise_seed(private.NoisedSum(plan, tuple(fewer)), secret),
        private.noise_seed(private.NoisedSum(plan, tuple(all_of_them)), secret),
        private.noise_seed(private.NoisedSum(plan, tuple(fewer)), bytes(32)),
    }
    assert len(seeds) == 3


def test_a_sum_without_its_noise_is_not_to_be_had(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make(rounds=1, max_attempts=1)
    enrol(world, 4)
    monkeypatch.setattr(job_runner, "has_own_noise", lambda plan: False)
    world.drive()
    (status,) = world.statuses
    assert status.state == "abandoned"
    assert "needs the server's noise" in status.reason


def test_an_upload_beyond_the_clip_is_refused_where_it_comes_in(make: Callable[..., World]) -> None:
    world = make(profiles=[{"name": "whole", "compressor": {"id": "none"}}])
    device = Device(world.server, world.clock)
    device.enrol(world.operator.token())
    assignment = device.assignment("digits")
    assert assignment.plan.fixed_point.max_examples == 1
    update = np.zeros(40, np.float32)
    update[:4] = 0.04
    with pytest.raises(InvalidUpdate, match=r"larger than the clip of 0\.05"):
        device.upload(assignment.assignment, device.body_for(assignment, update))
    with pytest.raises(InvalidUpdate, match="num_examples is 2, expected at most 1"):
        device.upload(assignment.assignment, device.body_for(assignment, update / np.float32(4), 2))
    device.upload(assignment.assignment, device.body_for(assignment, update / np.float32(4)))


def test_tensors_are_clipped_one_by_one_and_checked_where_they_come_in(tmp_path: Path) -> None:
    world = World(tmp_path, Clock())
    try:
        tensors = {"w": np.zeros((6, 5), np.float32), "b": np.ones(10, np.float32)}
        world.model = Model.from_tensors(tensors)
        privacy = {"clip": 0.05, "per_tensor": [["b", 3], ["*", 4]]}
        whole = {"id": "error_feedback", "inner": {"id": "none"}}
        profiles = [{"name": "whole", "compressor": whole}]
        begin(world, privacy=privacy, profiles=profiles, rounds=1)
        forger = Device(world.server, world.clock)
        forger.enrol(world.operator.token())
        assignment = forger.assignment("digits")
        slices, update = world.model.spec.slices, np.zeros(40, np.float32)
        update[slices["b"].start] = 0.0301  # within the clip, not within 3/5 of it
        with pytest.raises(InvalidUpdate, match=r"norm of tensor 'b' is 0\.0301.*clip of 0\.03"):
            forger.upload(assignment.assignment, forger.body_for(assignment, update))
        forger.upload(assignment.assignment, forger.body_for(assignment, np.float32(0.99) * update))
        enrol(world, 3)
        world.drive()
        (status,) = world.statuses
        assert (status.state, status.included) == ("committed", 4)
        assert status.privacy is not None
        assert status.privacy.per_tensor
        for each in sent(world):
            norms = {name: np.linalg.norm(each[where]) for name, where in slices.items()}
            assert 0.9 * 0.03 < norms["b"] <= 0.03
            assert 0.9 * 0.04 < norms["w"] <= 0.04
        world.check_conserved()
        with pytest.raises(FedpressError, match="fits the tensor 'w', which would have no bound"):
            begin(world, privacy={"per_tensor": [["b", 1]]}, task="other")
    finally:
        world.stop()


def test_a_device_that_requires_privacy_trusts_no_server_by_default(
    make: Callable[..., World],
) -> None:
    world = make(rounds=1)
    (careful,) = enrol(world, 1, privacy=PrivacyRules())
    trusting = enrol(world, 4, privacy=PrivacyRules(lanes=BOTH))
    world.drive()
    (declined,) = of(careful, "declined")
    assert declined["rule"] == "privacy"
    assert "takes part in distributed, local only" in declined["reason"]
    assert [each.state for each in world.statuses] == ["committed"]
    assert all(of(each, "privacy") for each in trusting)


def test_a_lane_that_changes_within_a_task_is_refused(make: Callable[..., World]) -> None:
    world = make()
    (device,) = enrol(world, 1)
    device.start()
    spent = privacy_budget._Spent(
        terms=PrivacyTerms(**{**PRIVATE, "lane": "local"}), participations=1
    )
    account = privacy_budget._Account(tasks={"digits": spent})
    (device.folder / "privacy.json").write_text(account.model_dump_json())
    world.drive_until(lambda: bool(of(device, "declined")))
    (declined,) = of(device, "declined")
    assert "changes the privacy terms: lane from local to central" in declined["reason"]


def test_no_evaluation_and_no_number_of_examples_leaves_a_device(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make(rounds=2)
    for each in enrol(world, 4):
        measured = Evaluation(10, {"loss": 0.5})
        monkeypatch.setattr(each.trainer, "evaluate", lambda model, found=measured: found)
    world.drive()
    assert [status.metrics for status in world.statuses] == [{}, {}]
    assert [status.num_examples for status in world.statuses] == [4, 4]
    assert of(world.participants[0], "evaluated")


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize(
    "compressor",
    [
        {"id": "none"},
        {"id": "qsgd", "levels": 64, "bucket": 40},
        {"id": "error_feedback", "inner": {"id": "quantize", "bits": 4}},
        {"id": "randomk", "fraction": 0.5},
        {"id": "count_sketch", "fraction": 0.6},
    ],
)
def test_compressors_whose_support_is_public_may_be_private(
    make: Callable[..., World], lane: str, compressor: dict[str, Any]
) -> None:
    profiles = [{"name": "p", "compressor": compressor}]
    world = make(rounds=1, privacy={"lane": lane}, profiles=profiles)
    enrol(world, 4)
    world.drive()
    assert [each.state for each in world.statuses] == ["committed"]
    assert np.isfinite(moved(world)).all()
    assert moved(world).any()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"privacy": {"lane": "nowhere"}}, "privacy.lane"),
        ({"privacy": {"epsilon": 1.0}}, "raise noise_multiplier to"),
        ({"privacy": {"lane": "distributed"}}, "set lane to masked, or privacy.lane to central"),
        ({"lane": "masked", "cohort": {"size": 4, "minimum": 3}}, "central in the masked lane"),
        ({"cohort": {"size": 4, "minimum": 1}}, "raise it to 2"),
        (
            {"profiles": [{"name": "a", "compressor": {"id": "topk", "fraction": 0.1}}]},
            "chooses the coordinates that it sends by the device's data",
        ),
        (
            {"profiles": [{"name": "a", "compressor": {"id": "dgc"}}]},
            "chooses the coordinates",
        ),
        ({"strategy": {"id": "median"}}, "choose a strategy that takes the mean"),
        ({"strategy": {"id": "fedbuff"}, "asynchronous": {"concurrency": 4}}, "leave asynchronous"),
        ({"selection": {"policy": "loss"}}, "devices tell neither"),
        ({"evaluation": {"patience": 3}}, "leave patience out"),
    ],
)
def test_a_task_that_cannot_be_private_is_refused_with_what_to_change(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    world = World(tmp_path, Clock())
    try:
        with pytest.raises(FedpressError, match=reason):
            begin(world, **changes)
    finally:
        world.stop()


def test_a_restart_in_a_round_keeps_the_uploads_of_those_whose_budget_it_spent(
    make: Callable[..., World],
) -> None:
    world = make(rounds=1, privacy={"participations": 1}, round_seconds=3600.0)
    first, second, third, fourth = enrol(world, 4)
    for device in (first, second):
        while not of(device, "uploaded"):
            device.step()
    third.step()
    world.stop()
    world.start()
    assert world.attempt.round.num_staged == 3
    world.drive()
    assert [(each.state, each.included) for each in world.statuses] == [("committed", 4)]
    assert fourth.ledger.included == first.ledger.included == 1
