"""Private tasks over HTTP: noise under masks, budgets on the device and on the server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedpress_client import MaskingRules, PrivacyRules, privacy_budget
from fedpress_client import state as state_module
from fedpress_client.trainer import Evaluation
from fedpress_protocols.errors import ConfigurationError, FedpressError, StateCorrupt
from fedpress_protocols.masking import payload as payload_module
from fedpress_protocols.model import Model
from fedpress_protocols.plan import PrivacyTerms
from tests.devices import ADMIN
from tests.masked import Lost, Participant, drive, masked_task
from tests.server.in_process import Clock
from tests.system.test_masked_sessions import World

CORRUPT_NONE = {"corrupt": 0.0}
PRIVATE = {
    "clip": 0.05, "noise_multiplier": 2.1, "participations": 5, "epsilon": 6.0, "delta": 1e-5
}  # fmt: skip


@pytest.fixture(autouse=True)
def _repeatable_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same noise in each run of a test, so that a test of chance cannot fail by chance."""
    repeats = SimpleNamespace(urandom=np.random.default_rng(5).bytes)
    monkeypatch.setattr(payload_module, "os", repeats)


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


def begin(
    world: World, size: int = 4, privacy: dict[str, Any] | None = None, **config: Any
) -> None:
    defaults: dict[str, Any] = {
        "cohort": {"size": size, "minimum": 3},
        "masking": CORRUPT_NONE,
        "privacy": {**PRIVATE, **(privacy or {})},
    }
    masked_task(world.operator, world.model, size, **(defaults | config))


def enrol(world: World, count: int, **options: Any) -> list[Participant]:
    return world.enrol(count, masking=MaskingRules(corrupt=0.0), **options)


def budget_file(device: Participant) -> Path:
    return device.folder / "privacy.json"


def participations(device: Participant, task: str = "digits") -> int:
    account = json.loads(budget_file(device).read_bytes())
    return int(account["tasks"][task]["participations"])


def of(device: Participant, kind: str) -> list[dict[str, Any]]:
    return [event.details for event in device.events if event.kind == kind]


@pytest.mark.parametrize("noise", ["skellam", "discrete_gaussian"])
def test_a_private_round_adds_up_noised_integers_and_keeps_noise_out_of_residuals(
    make: Callable[..., World], noise: str
) -> None:
    world = make(privacy={"noise": noise})
    devices = enrol(world, 4)
    devices[3].die_after("shares")
    terms = world.terms
    grid = terms.payload.grid
    assert grid is not None
    assert grid.shares == 3
    world.drive()
    (status,) = world.statuses
    assert (status.state, status.included, status.num_examples) == ("committed", 3, 3)
    world.check(terms, {0, 1, 2}, status)
    world.check_conserved()
    pending = next(iter(devices[0].plain.values()))
    sent = terms.payload.packing.unpack(terms.payload.packing.from_bytes(pending.body))["values"]
    drawn = sent - np.rint(terms.payload._map.project(pending.update.dense()) / grid.step)
    assert 0.3 * grid.variance < np.var(drawn) < 3 * grid.variance


def test_the_spent_privacy_and_whom_it_covers_are_shown_everywhere(
    make: Callable[..., World],
) -> None:
    world = make(rounds=2)
    devices = enrol(world, 4)
    world.drive()
    claimed = PrivacyTerms(**PRIVATE)
    shown = [each.privacy for each in world.statuses]
    assert [each and each.participations for each in shown] == [1, 2]
    for count, each in enumerate(shown, 1):
        assert each is not None
        assert each.epsilon == pytest.approx(claimed.spent(count))
        assert each.against == (
            "a lying server with 0% of a cohort at most, other devices, and the public"
        )
    last = of(devices[0], "privacy")[-1]
    assert shown[-1] is not None
    assert last["against"] == shown[-1].against
    assert (last["participations"], last["max_participations"]) == (2, 5)
    assert last["epsilon"] == last["total_epsilon"] == pytest.approx(claimed.spent(2))
    world.server.tick()


def test_a_gauge_has_the_privacy_spent_before_the_open_round(make: Callable[..., World]) -> None:
    world = make(rounds=2)
    enrol(world, 4)
    world.drive_until(lambda: world.terms.plan.round == 2)
    text = world.server.get("/metrics", headers=ADMIN).text
    (line,) = [each for each in text.splitlines() if each.startswith("fedpress_privacy_epsilon{")]
    assert float(line.split()[-1]) == pytest.approx(PrivacyTerms(**PRIVATE).spent(1))


def test_nobody_takes_part_more_often_than_the_terms_allow(make: Callable[..., World]) -> None:
    world = make(size=3, rounds=2, privacy={"participations": 1})
    devices = enrol(world, 3)
    world.drive_until(lambda: world.terms.plan.round == 2)
    for _ in range(10):
        for each in devices:
            each.step()
    assert [len(of(each, "assigned")) for each in devices] == [1, 1, 1]
    summary = world.operator.get("/v1/tasks/digits")
    assert summary["reason"] == ("devices that take no further part, their privacy budget spent: 3")
    world.stop()  # what was spent is on the disk
    world.start()
    for _ in range(10):
        for each in devices:
            each.step()
    assert [len(of(each, "assigned")) for each in devices] == [1, 1, 1]
    more = enrol(world, 3)
    world.drive()
    assert [each.state for each in world.statuses] == ["committed", "committed"]
    assert [len(of(each, "assigned")) for each in more] == [1, 1, 1]


def test_a_restart_in_a_round_keeps_the_bodies_of_those_whose_budget_it_spent(
    make: Callable[..., World],
) -> None:
    world = make(rounds=1, privacy={"participations": 1})
    enrol(world, 4)
    world.drive_until(lambda: world.attempt.round.num_staged > 0)
    staged = world.attempt.round.num_staged
    world.stop()
    world.start()
    assert world.attempt.round.num_staged == staged
    world.drive()
    assert [(each.state, each.attempt) for each in world.statuses] == [("committed", 1)]
    world.check_conserved()


def test_a_task_that_goes_on_remembers_what_was_spent(make: Callable[..., World]) -> None:
    world = make(size=3, rounds=1, privacy={"participations": 1}, at_end="paused")
    devices = enrol(world, 3)
    world.drive_until(lambda: world.attempt is None)
    summary = world.operator.get("/v1/tasks/digits")
    more = {"after_round": 1, "rounds": 1, "model": summary["model"]}
    world.operator.post("/v1/admin/tasks/digits/continue", more)
    for _ in range(5):
        for each in devices:
            each.step()
    assert [len(of(each, "assigned")) for each in devices] == [1, 1, 1]
    assert world.attempt.round.num_spent == 3


def test_a_device_refuses_what_would_overspend_whatever_the_server_says(
    make: Callable[..., World],
) -> None:
    world = make(rounds=2)
    first, *others = enrol(world, 5)
    first.start()
    account = privacy_budget._Account(
        tasks={"digits": privacy_budget._Spent(terms=PrivacyTerms(**PRIVATE), participations=5)}
    )
    budget_file(first).write_text(account.model_dump_json())
    world.drive()
    (declined,) = of(first, "declined")
    assert (declined["rule"], declined["code"]) == ("participations", "privacy-budget")
    assert "comes after 5 participations, which is all" in declined["reason"]
    assert not of(first, "trained")
    assert participations(first) == 5
    assert [each.state for each in world.statuses] == ["committed"] * 2
    assert all(len(of(each, "settled")) == 2 for each in others)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"clip": 0.5}, "clip from 0.5 to 0.05"),
        ({"noise_multiplier": 9.0}, "noise_multiplier from 9 to 2.1"),
    ],
)
def test_terms_that_change_within_a_task_are_refused(
    make: Callable[..., World], change: dict[str, Any], told: str
) -> None:
    world = make()
    (device,) = enrol(world, 1)
    device.start()
    terms = PrivacyTerms(**{**PRIVATE, **change})
    account = privacy_budget._Account(
        tasks={"digits": privacy_budget._Spent(terms=terms, participations=1)}
    )
    budget_file(device).write_text(account.model_dump_json())
    world.drive_until(lambda: bool(of(device, "declined")))
    (declined,) = of(device, "declined")
    assert declined["rule"] == "privacy terms"
    assert told in declined["reason"]


def test_a_task_that_was_private_stays_so_for_its_devices(make: Callable[..., World]) -> None:
    world = make()
    (device,) = enrol(world, 1)
    device.start()
    spent = privacy_budget._Spent(terms=PrivacyTerms(**PRIVATE), participations=1)
    account = privacy_budget._Account(tasks={"plain": spent})
    budget_file(device).write_text(account.model_dump_json())
    masked_task(world.operator, world.model, 3, "plain", masking=CORRUPT_NONE)
    (other,) = world.enrol(1, masking=MaskingRules(corrupt=0.0), task="plain")
    other.start()
    budget_file(other).write_text(account.model_dump_json())
    for _ in range(3):
        other.step()
    (declined,) = of(other, "declined")
    assert declined["rule"] == "privacy terms"
    assert "sends updates without noise" in declined["reason"]


def test_a_device_that_requires_privacy_declines_plans_without(tmp_path: Path) -> None:
    world = World(tmp_path, Clock())
    masked_task(world.operator, world.model, 3, masking=CORRUPT_NONE)
    (device,) = enrol(world, 1, privacy=PrivacyRules())
    for _ in range(3):
        device.step()
    (declined,) = of(device, "declined")
    assert declined["rule"] == "privacy"
    assert "requires privacy" in declined["reason"]
    assert device.client is not None
    device.client.close()
    world.stop()


def test_a_bound_on_epsilon_counts_all_tasks_of_a_device(make: Callable[..., World]) -> None:
    world = make(rounds=1)
    bound = 1.05 * PrivacyTerms(**PRIVATE).spent(3)
    devices = enrol(world, 4, privacy=PrivacyRules(max_epsilon=bound))
    devices[0].start()
    other = privacy_budget._Spent(terms=PrivacyTerms(**{**PRIVATE, "clip": 1.0}), participations=3)
    account = privacy_budget._Account(tasks={"another": other})
    budget_file(devices[0]).write_text(account.model_dump_json())
    world.drive_until(lambda: bool(of(devices[0], "declined")))
    (declined,) = of(devices[0], "declined")
    assert declined["rule"] == "max_epsilon"
    assert "would bring what this device has spent to epsilon" in declined["reason"]
    world.drive()
    assert world.statuses[-1].included == 3


def test_privacy_is_debited_before_anything_leaves_and_never_given_back(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make(rounds=1)
    devices = enrol(world, 4)

    def dies(event: Any) -> None:
        if event.kind == "privacy":
            raise Lost("privacy")

    devices[0].on_event = dies
    for each in devices[1:3]:
        each.die_after("shares")
    world.drive_until(lambda: world.terms.plan.attempt == 2)
    assert [participations(each) for each in devices] == [1, 1, 1, 1]
    ledger = devices[0].folder / "tasks" / "digits" / "ledger.safetensors"
    assert not ledger.exists(), "it died before there was a body"
    world.revive()
    world.drive()
    assert [participations(each) for each in devices] == [2, 2, 2, 2]
    assert [each.state for each in world.statuses] == ["abandoned", "committed"]
    world.check_conserved()


def test_an_account_that_cannot_be_written_stops_the_body(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make(rounds=1)
    (device,) = enrol(world, 1)
    write = state_module.write_durably

    def full(path: Path, data: bytes) -> None:
        if path.name == "privacy.json":
            raise state_module.not_written(path, OSError(28, "No space left on device"), len(data))
        write(path, data)

    monkeypatch.setattr(privacy_budget, "write_durably", full)
    while not of(device, "declined"):
        device.step()
    assert device.client is not None
    assert not device.client.ledger.pending
    assert not of(device, "session")
    assert of(device, "declined")[0]["code"] == "storage-failed"


@pytest.mark.parametrize("text", [b"", b"{}x", b'{"tasks": {"a": {"participations": 3}}}'])
def test_a_damaged_account_is_named_and_not_begun_anew(
    make: Callable[..., World], text: bytes
) -> None:
    world = make(rounds=1)
    (device,) = enrol(world, 1)
    device.start()
    budget_file(device).write_bytes(text)
    with pytest.raises(StateCorrupt, match=r"privacy\.json"):
        drive([device], world.pass_time)
    assert budget_file(device).read_bytes() == text


def test_no_evaluation_leaves_a_device_in_a_private_task(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make(rounds=2)
    rules = MaskingRules(corrupt=0.0, reports_evaluations=True)
    for each in world.enrol(4, masking=rules):
        measured = Evaluation(10, {"loss": 0.5})
        monkeypatch.setattr(each.trainer, "evaluate", lambda model, found=measured: found)
    world.drive()
    assert [status.metrics for status in world.statuses] == [{}, {}]
    assert of(world.participants[0], "evaluated")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lane": "clear", "masking": None}, "set lane to masked"),
        ({"privacy": {**PRIVATE, "epsilon": 1.0}}, "raise noise_multiplier to"),
        ({"privacy": {**PRIVATE, "clip": 0.0}}, "privacy.clip"),
        ({"selection": {"policy": "loss"}}, "devices tell neither"),
        ({"evaluation": {"patience": 3}}, "leave patience out"),
        ({"cohort": {"size": 20, "minimum": 3}, "masking": {}}, "raise cohort.minimum"),
        (
            {
                "strategy": {"id": "scaffold", "clients": 4},
                "training": {"local_steps": 1, "learning_rate": 0.1},
            },
            "control variates",
        ),
        ({"masking": {"corrupt": 0.0, "max_weight": 3}}, "leave max_weight out"),
        (
            {"profiles": [{"name": "a", "compressor": {"id": "topk", "fraction": 0.1}}]},
            "does not commute with the sum",
        ),
        ({"privacy": {**PRIVATE, "noise_multiplier": 2.0**20}}, "noise of variance"),
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


def test_rules_that_no_plan_keeps_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="max_epsilon must be a number above 0"):
        PrivacyRules(max_epsilon=0.0)
    with pytest.raises(ConfigurationError, match="delta must lie in"):
        PrivacyRules(delta=0.0)


def test_noise_is_drawn_anew_for_devices_with_the_same_seed(make: Callable[..., World]) -> None:
    """A device's seed makes training and rounding repeat, and never its noise."""
    world = make(rounds=1)
    enrol(world, 4)
    payload = world.terms.payload
    update = np.full(world.model.spec.size, 0.001, np.float32)
    bodies = {payload.compress(update, 1, {}, bytes(48)).integers["values"].tobytes() for _ in "ab"}
    assert len(bodies) == 2


def test_the_model_moves_by_the_noisy_mean(make: Callable[..., World]) -> None:
    world = make(rounds=1)
    enrol(world, 4)
    grid = world.terms.payload.grid
    assert grid is not None
    world.drive()
    (status,) = world.statuses
    before = Model.from_bytes(world._file(status.base_model)).parameters
    after = Model.from_bytes(world._file(status.model or "")).parameters
    moved = (after - before)[after != before]
    noise = np.sqrt(4 * grid.variance) * grid.step / 4
    assert 4 * PRIVATE["clip"] / np.sqrt(20) / 4 < noise, "updates are within the noise"
    assert np.std(moved) == pytest.approx(noise, rel=0.7)
