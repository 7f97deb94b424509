"""An adaptive clip over HTTP: devices use each round's, the count has noise, restarts change
nothing, and what a server may not do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpress.cli.rounds import privacy_spent
from fedpress_client.privacy_budget import NO_RULES, PrivacyBudget
from fedpress_client.state import StateDirectory
from fedpress_protocols.errors import FedpressError, ServerError
from fedpress_protocols.plan import AdaptiveClip, PrivacyTerms
from fedpress_protocols.privacy import gaussian
from fedpress_server.aggregation import accumulate
from fedpress_server.aggregation.aggregate import aggregate
from fedpress_server.coordination import job_runner, opening
from fedpress_strategies import private
from tests.server.in_process import Clock
from tests.system.test_masked_sessions import World
from tests.system.test_noise_in_clear_lane import PRIVATE, begin, enrol, of, sent

FIRST = 0.005
TERMS = {**PRIVATE, "clip": FIRST, "adaptive": {"count_noise": 1.5, "learning_rate": 1.0}}


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def world(privacy: dict[str, Any] | None = None, **config: Any) -> World:
        made.append(World(tmp_path, Clock()))
        begin(made[-1], privacy={**TERMS, **(privacy or {})}, **config)
        return made[-1]

    yield world
    for each in made:
        for participant in each.participants:
            if participant.client is not None:
                participant.client.close()
        each.stop()


class Counts:
    """The bits of each aggregation, its noise in the count, and its clip."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.rounds: list[tuple[int, list[float], float, float]] = []
        adapted, sample = private.adapted_clip, gaussian.sample
        drawn: list[int] = []

        def sampled(size: int, deviation: float, secret: bytes) -> np.ndarray:
            values = sample(size, deviation, secret)
            if size == 1:
                assert deviation == 1.5 * 2**17
                drawn.append(int(values[0]))
            return values

        def recorded(plan: Any, within: list[float], *rest: Any) -> float | None:
            clip = adapted(plan, within, *rest)
            assert clip is not None
            self.rounds.append((plan.round, list(within), drawn[-1] / 2**17, clip))
            return clip

        patch.setattr(gaussian, "sample", sampled)
        patch.setattr(accumulate, "adapted_clip", recorded)


def test_each_round_has_the_clip_that_the_noised_count_of_the_last_gives(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = Counts(monkeypatch)
    world = make(rounds=5)
    devices = enrol(world, 4)
    world.drive_until(lambda: world.terms.plan.round == 3)
    world.stop()
    world.start()
    world.drive()
    assert [each.state for each in world.statuses] == ["committed"] * 5
    shown = [each.privacy for each in world.statuses]
    clips = [each.clip for each in shown if each is not None]
    adaptive = AdaptiveClip.model_validate(TERMS["adaptive"])
    assert clips[0] == FIRST
    assert set(counts.rounds[0][1]) == {0.0}, "updates are far larger than the first clip"
    for (number, within, noise, clip), before in zip(counts.rounds, clips, strict=True):
        share = (sum(bit - 0.5 for bit in within) + noise) / 4 + 0.5  # of some 2 to 4 devices
        assert clip == adaptive.next_clip(before, share, FIRST)
        assert clip == clips[number] if number < 5 else True
        norms = [
            float(np.linalg.norm(pending.update.dense().astype(np.float64)))
            for device in devices
            for pending in device.plain.values()
            if pending.round == number
        ]
        assert len(norms) >= len(within) >= 2
        assert max(norms) <= before * (1 + 1e-9)
    assert len(set(clips)) > 1
    assert shown[-1] is not None
    terms = PrivacyTerms.model_validate(TERMS)
    assert shown[-1].epsilon == pytest.approx(terms.spent(shown[-1].participations))
    assert f"; clip {clips[-1]:.3g}, by the 0.5 quantile" in privacy_spent(shown[-1])
    account = json.loads((devices[0].folder / "privacy.json").read_text())["tasks"]["digits"]
    assert account["participations"] <= 5
    assert account["terms"]["clip"] in clips
    world.check_conserved()


def test_the_noise_of_updates_grows_by_what_the_count_spends(make: Callable[..., World]) -> None:
    world = make(rounds=1, privacy={"noise_multiplier": 2.1, "adaptive": {"count_noise": 1.2}})
    assert world.terms.plan.privacy is not None
    expected = (2.1**-2 - 2.4**-2) ** -0.5
    assert world.terms.plan.privacy.update_multiplier == pytest.approx(expected)
    assert private._deviation(world.terms.plan, world.terms.plan.privacy, 20) == pytest.approx(
        expected * (FIRST * 2.0**world.terms.plan.fixed_point.scale_bits + np.sqrt(20) / 2)
    )
    enrol(world, 4)
    world.drive()
    assert [each.state for each in world.statuses] == ["committed"]
    assert max(np.abs(each).max() for each in sent(world)) <= FIRST


def test_an_aggregation_that_is_run_again_gives_the_same_clip(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server dies after the aggregation and before its result is known; another does it
    again."""
    world = make(rounds=2)
    enrol(world, 4)
    clips: list[float | None] = []

    def dies(job: Any, *rest: Any) -> Any:
        result = aggregate(job, *rest)
        clips.append(result.clip)
        if len(clips) == 1:
            raise OSError("the machine loses power")
        return result

    monkeypatch.setattr(job_runner, "aggregate", dies)
    world.drive_until(lambda: bool(clips))
    world.stop()
    world.start()
    world.drive()
    assert clips[0] == clips[1]
    assert world.statuses[1].privacy is not None
    assert world.statuses[1].privacy.clip == clips[0]


def test_a_round_that_is_given_up_keeps_its_clip(make: Callable[..., World]) -> None:
    world = make(rounds=2)
    enrol(world, 4)
    world.drive_until(lambda: world.terms.plan.round == 2)
    terms = world.terms.plan.privacy
    assert terms is not None
    assert terms.clip != FIRST
    carryover = opening.RoundCarryover.after(world.terms, None, opening.History())
    assert carryover.clip == terms.clip


def test_a_task_that_is_continued_goes_on_with_its_last_clip(make: Callable[..., World]) -> None:
    world = make(rounds=3)
    enrol(world, 4)
    world.drive()
    last = world.statuses[-1]
    assert last.privacy is not None
    assert last.privacy.clip != FIRST
    more = {"rounds": 1, "after_round": 3, "model": last.model}
    world.operator.post("/v1/admin/tasks/digits/continue", more)
    terms = world.terms.plan.privacy
    assert world.terms.plan.round == 4
    assert terms is not None
    assert terms.clip == last.privacy.clip
    world.drive()
    assert world.statuses[-1].state == "committed"


def test_a_count_without_its_noise_is_not_to_be_had(
    make: Callable[..., World],
) -> None:
    world = make()
    job = accumulate.AggregationJob(world.terms, None, None, ())  # type: ignore[arg-type]
    with pytest.raises(ServerError, match="a count that needs the server's noise"):
        accumulate._next_clip(job, [])


def test_a_clip_that_a_server_changes_without_adaptive_terms_is_refused_by_the_device(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make(rounds=2, privacy={"adaptive": None}, round_seconds=3600.0)
    (device, *_) = enrol(world, 4)
    changed = opening.opened

    def larger(config: Any, *rest: Any, **named: Any) -> Any:
        terms = config.privacy.with_clip(2 * FIRST)
        return changed(config.model_copy(update={"privacy": terms}), *rest, **named)

    monkeypatch.setattr("fedpress_server.coordination.planner.opened", larger)
    world.drive_until(lambda: bool(of(device, "declined")))
    (declined,) = of(device, "declined")
    assert declined["rule"] == "privacy terms"
    assert "clip from 0.005 to 0.01" in declined["reason"]


@pytest.mark.parametrize(
    ("before", "now"), [(None, TERMS["adaptive"]), (TERMS["adaptive"], {"count_noise": 9.0})]
)
def test_adaptive_terms_hold_for_a_whole_task(
    make: Callable[..., World], before: dict[str, Any] | None, now: dict[str, Any]
) -> None:
    world = make(rounds=2, privacy={"adaptive": before}, round_seconds=3600.0)
    (device, *_) = enrol(world, 4)
    world.drive_until(lambda: world.terms.plan.round == 2)
    plan = world.terms.plan
    terms = PrivacyTerms.model_validate({**TERMS, "adaptive": now})
    report = ("within-clip",)
    other = plan.model_copy(update={"privacy": terms, "report": report})
    with pytest.raises(FedpressError, match="changes the privacy terms: adaptive from"):
        PrivacyBudget(StateDirectory.open(device.folder), NO_RULES).check(other)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"adaptive": {"quantile": 0.5}}, "count of devices within the clip has no noise"),
        ({"lane": "local"}, "set lane to central"),
        (
            {"clip": 4096.0, "noise_multiplier": 3e5, "adaptive": {"count_noise": 2e5}},
            "Gaussian noise of deviation",
        ),
    ],
)
def test_a_task_whose_clip_cannot_adapt_is_refused_with_what_to_change(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    world = World(tmp_path, Clock())
    try:
        with pytest.raises(FedpressError, match=reason):
            begin(world, privacy={**TERMS, **changes})
    finally:
        world.stop()
