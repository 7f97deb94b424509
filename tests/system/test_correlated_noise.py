"""Noise that is correlated over rounds, over HTTP: its values, who rests, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpress_protocols.errors import FedpressError
from fedpress_protocols.plan import PrivacyTerms
from fedpress_protocols.privacy import gaussian
from fedpress_protocols.privacy.correlated import Correlation
from fedpress_server.registry import restores
from fedpress_server.storage import privacy as stored
from fedpress_strategies import private
from tests.devices import Device
from tests.masked import Participant
from tests.protocols.test_masked_payload import SPEC, made_plan
from tests.server.in_process import Clock
from tests.system.test_masked_sessions import World
from tests.system.test_noise_in_clear_lane import PRIVATE, begin, enrol, of

CORRELATION = Correlation(separation=2, rounds=3, weight=1.6, decay=1.0)
TERMS = {**PRIVATE, "noise_multiplier": 2.5, "participations": 3,
         "correlation": CORRELATION.model_dump()}  # fmt: skip
WHOLE: dict[str, Any] = {
    "profiles": [{"name": "whole", "compressor": {"id": "none"}}],
    "cohort": {"size": 2, "minimum": 2},
}


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def world(privacy: dict[str, Any] | None = None, **config: Any) -> World:
        made.append(World(tmp_path, Clock()))
        begin(made[-1], privacy={**TERMS, **(privacy or {})}, **(WHOLE | config))
        return made[-1]

    yield world
    for each in made:
        for participant in each.participants:
            if participant.client is not None:
                participant.client.close()
        each.stop()


class Drawn:
    """The draws of noise of each aggregation, by its order."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seeds: list[list[bytes]] = []
        self.noise: list[np.ndarray] = []
        self.values: dict[bytes, np.ndarray] = {}
        sample, noise = gaussian.sample, private._noise

        def recorded_sample(size: int, deviation: float, secret: bytes) -> np.ndarray:
            values = sample(size, deviation, secret)
            assert np.array_equal(self.values.setdefault(secret, values), values)
            return values

        def recorded_noise(plan: Any, terms: Any, size: int, seeds: list[bytes]) -> np.ndarray:
            self.seeds.append(list(seeds))
            self.noise.append(noise(plan, terms, size, seeds))
            return self.noise[-1]

        patch.setattr(gaussian, "sample", recorded_sample)
        patch.setattr(private, "_noise", recorded_noise)


def rounds_of(device: Participant) -> list[int]:
    return [event.round for event in device.events if event.kind == "assigned"]


def step(devices: list[Participant], times: int = 10) -> None:
    for _ in range(times):
        for each in devices:
            each.step()


def test_each_round_takes_off_parts_of_the_noise_before_also_after_a_restart(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = Drawn(monkeypatch)
    world = make(rounds=5)
    enrol(world, 4)
    world.drive_until(lambda: world.terms.plan.round == 4)
    world.stop()
    world.start()
    world.drive()
    assert [each.state for each in world.statuses] == ["committed"] * 5
    own = [seeds[0] for seeds in drawn.seeds]
    assert len(set(own)) == 5
    assert drawn.seeds == [own[last // 3 * 3 : last + 1][::-1] for last in range(5)]
    factors = CORRELATION.noising
    ratio = 2.0 ** round(np.log2(np.std(drawn.values[own[0]]) / np.std(drawn.noise[0])))
    for seeds, noise in zip(drawn.seeds, drawn.noise, strict=True):
        expected = sum(f * drawn.values[s] for f, s in zip(factors, seeds, strict=False)) / ratio
        assert np.abs(noise - expected).max() <= 1.5


def test_a_device_rests_between_its_rounds(make: Callable[..., World]) -> None:
    world = make(rounds=4, round_seconds=3600.0)
    first = enrol(world, 2)
    world.drive_until(lambda: world.terms.plan.round == 2)
    step(first)
    assert [rounds_of(each) for each in first] == [[1], [1]]
    summary = world.operator.get("/v1/tasks/digits")
    assert summary["reason"] == "devices that took part too recently for privacy.separation: 2"
    second = enrol(world, 2)
    world.drive()
    assert [each.state for each in world.statuses] == ["committed"] * 4
    assert [rounds_of(each) for each in (*first, *second)] == [[1, 3], [1, 3], [2, 4], [2, 4]]


def test_a_device_refuses_a_round_too_soon_whatever_the_server_says(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "resting", lambda *given: frozenset())
    world = make(rounds=2, round_seconds=3600.0)
    devices = enrol(world, 2)
    world.drive_until(lambda: bool(of(devices[0], "declined")))
    (declined,) = of(devices[0], "declined")
    assert (declined["rule"], declined["code"]) == ("separation", "masking-rules")
    assert "too soon after round 1" in declined["reason"]
    assert "from round 3 on" in declined["reason"]
    account = json.loads((devices[0].folder / "privacy.json").read_text())
    assert account["tasks"]["digits"]["participations"] == 1
    enrol(world, 2)
    world.drive()
    assert [each.state for each in world.statuses] == ["committed"] * 2


def test_another_attempt_at_a_round_is_no_other_round(make: Callable[..., World]) -> None:
    world = make(rounds=1, round_seconds=60.0)
    early, late = enrol(world, 2)
    device = Device(world.server, world.clock)
    device.enrol(world.operator.token())
    device.assignment("digits")  # and never uploads
    late.is_gone = True
    world.drive_until(lambda: world.terms.plan.attempt == 2)
    assert of(early, "uploaded")
    late.is_gone = False
    world.drive()
    assert world.statuses[-1].included == 2
    assert rounds_of(early) == [1, 1]


def test_noise_begins_anew_after_a_restore(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = Drawn(monkeypatch)
    world = make(rounds=4)
    enrol(world, 4)
    world.drive_until(lambda: world.terms.plan.round == 3)
    world.clock.advance(5.0)
    now = world.clock()
    database = world.server.app.services.store._database
    world.server.call(database.write, lambda c: restores.add(c, "later", now - 2, now))
    world.drive()
    assert [len(seeds) for seeds in drawn.seeds] == [1, 2, 1, 1]


def test_status_and_claim_are_those_of_the_correlated_terms(make: Callable[..., World]) -> None:
    world = make(rounds=2)
    devices = enrol(world, 4)
    world.drive()
    terms = PrivacyTerms(**TERMS)
    shown = world.statuses[-1].privacy
    assert shown is not None
    assert shown.separation == 2
    assert shown.epsilon == pytest.approx(terms.spent(1))
    assert of(devices[0], "privacy")[-1]["epsilon"] == pytest.approx(terms.spent(1))
    assert terms.spent(1) > PrivacyTerms(**{**TERMS, "correlation": None}).spent(1)


@pytest.mark.parametrize(
    ("privacy", "config", "reason"),
    [
        ({"lane": "local"}, {}, "only where the server adds it; set lane to central"),
        ({"correlation": {"separation": 2, "rounds": 3}}, {}, "weight"),
        (
            {"correlation": {**CORRELATION.model_dump(), "rounds": 2049}},
            {},
            "must be 2048 at most, not 2049",
        ),
        ({"noise_multiplier": 1.0}, {}, "raise noise_multiplier to"),
        (
            {},
            {"profiles": [{"name": "p", "compressor": {"id": "shared_support", "fraction": 0.5}}]},
            "use quantize or none, or leave privacy.correlation out",
        ),
        (
            {},
            {"members": ["a", "b", "c"], "rounds": 2},
            "3 members are too few for a privacy.separation of 2 rounds",
        ),
    ],
)
def test_terms_that_cannot_be_correlated_are_refused_with_what_to_change(
    tmp_path: Path, privacy: dict[str, Any], config: dict[str, Any], reason: str
) -> None:
    world = World(tmp_path, Clock())
    try:
        with pytest.raises(FedpressError, match=reason):
            begin(world, privacy={**TERMS, **privacy}, **(WHOLE | config))
    finally:
        world.stop()


@pytest.mark.parametrize("below", [1e-9, 0.3, 1 - 1e-9])
def test_draws_of_any_deviation_are_within_what_can_be_drawn(below: float) -> None:
    """Their steps are powers of two, so a deviation just below one has the largest draws."""
    terms = {**TERMS, "clip": 0.3, "noise_multiplier": 1.0}
    plan = made_plan(
        {"id": "none"},
        privacy={**terms, "epsilon": 30.0},
        lane="clear",
        masking=None,
        cohort={"size": 2, "minimum": 2},
        fixed_point={"scale_bits": 30, "max_abs": 0.3, "max_examples": 1},
    )
    assert plan.privacy is not None
    unit = private._deviation(plan, plan.privacy, SPEC.size)
    multiplier = 2.0**30 * (2 - below) / unit
    claimed = plan.privacy.model_copy(update={"noise_multiplier": multiplier})
    seeds = [np.random.default_rng(number).bytes(48) for number in range(3)]
    noise = private._noise(plan, claimed, SPEC.size, seeds)
    deviation = multiplier * unit * float(np.linalg.norm(CORRELATION.noising))
    assert np.std(noise) == pytest.approx(deviation, rel=0.1)
