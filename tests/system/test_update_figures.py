"""What devices measure of their updates, from the device to the operator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpress_client import MaskingRules, PrivacyRules
from fedpress_protocols.errors import MalformedRequest
from fedpress_protocols.messages import RoundStatus
from tests.devices import ADMIN, Device, checked
from tests.masked import Participant
from tests.server.in_process import Clock, history, include_one
from tests.system.test_masked_sessions import World

TOPK = {"id": "error_feedback", "inner": {"id": "topk", "fraction": 0.025}}
OPEN = MaskingRules(required=False)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, Clock())
    yield made
    for each in made.participants:
        if each.client is not None:
            each.client.close()
    made.stop()


def begin(world: World, compressor: dict[str, Any], **config: Any) -> None:
    fields: dict[str, Any] = {
        "cohort": {"size": 2, "minimum": 2},
        "profiles": [{"name": "one", "compressor": compressor}],
    }
    world.operator.begin(world.model, **(fields | config))


def figures_in(device: Participant) -> list[dict[str, float]]:
    return [each.details["figures"] for each in device.events if each.kind == "trained"]


def test_an_operator_sees_what_compression_leaves(world: World) -> None:
    begin(world, TOPK, rounds=3)
    devices = world.enrol(2, masking=OPEN)
    world.drive()
    by_round = list(zip(*map(figures_in, devices), strict=True))
    assert len(by_round) == 3
    for status, told in zip(world.statuses, by_round, strict=True):
        assert status.figures is not None
        assert status.figures.num_uploads == 2
        for name in ("nmse", "residual", "norm"):
            mean = sum(each[name] for each in told) / 2
            assert getattr(status.figures, name) == pytest.approx(mean, rel=0.01)
    text = world.server.get("/metrics", headers=ADMIN).text
    assert 'fedpress_update_nmse_count{task="digits"} 6.0' in text
    assert 'fedpress_device_seconds_count{step="train",task="digits"} 6.0' in text


def test_a_residual_that_grows_shows_within_five_rounds(world: World) -> None:
    """One of forty values a round: everything else piles up."""
    begin(world, TOPK, rounds=5)
    world.enrol(2, masking=OPEN)
    world.drive()
    ratios = [status.figures.residual for status in world.statuses if status.figures]
    assert len(ratios) == 5
    assert ratios[0] < 1 < ratios[2] < ratios[4]


@pytest.mark.parametrize("recover", ["mean", "median"])
def test_a_sketch_that_is_made_for_sums_is_no_sign_of_divergence(
    world: World, recover: str
) -> None:
    begin(world, {"id": "count_sketch", "recover": recover, "keep": 1.0}, rounds=2)
    world.enrol(2, masking=OPEN)
    world.drive()
    for status in world.statuses:
        assert status.figures is not None
        assert status.figures.nmse > 1
        assert ("nmse" in status.warnings) == (recover == "median")


@pytest.mark.parametrize("kind", ["masked", "private"])
def test_nothing_is_told_of_single_updates_that_the_server_may_not_see(
    world: World, kind: str
) -> None:
    shared = {"id": "error_feedback", "inner": {"id": "shared_support", "fraction": 0.5}}
    if kind == "masked":
        world.begin(3, rounds=1)
        devices = world.enrol(3)
    else:
        privacy = {"lane": "central", "clip": 0.05, "noise_multiplier": 2.1}
        limits = {"participations": 5, "epsilon": 6.0, "delta": 1e-5}
        begin(world, shared, rounds=1, privacy=privacy | limits)
        devices = world.enrol(2, masking=OPEN, privacy=PrivacyRules(lanes=frozenset({"central"})))
    world.drive()
    assert all(figures["nmse"] > 0 for device in devices for figures in figures_in(device))
    (status,) = world.statuses
    assert status.state == "committed"
    assert status.figures is None
    assert "figures" not in status.model_dump()
    assert "fedpress_update_nmse_count" not in world.server.get("/metrics", headers=ADMIN).text


def test_a_server_ignores_figures_where_a_round_may_have_none(world: World) -> None:
    begin(world, {"id": "none"}, rounds=1, privacy={
        "lane": "central", "clip": 50.0, "noise_multiplier": 2.1, "participations": 5,
        "epsilon": 6.0, "delta": 1e-5,
    })  # fmt: skip
    device = Device(world.server, world.clock)
    device.enrol(world.operator.token())
    given = device.assignment("digits")
    body = device.body_for(given, np.zeros(40, np.float32))
    query = "nmse=0.5&residual=1&norm=2&train=3&compress=4"
    path = f"/v1/assignments/{given.assignment}/update?{query}"
    assert device.request("PUT", path, body).status_code == 201
    assert [status.figures for status in history(world.operator)] == [None]


def test_figures_that_are_none_are_refused_and_unknown_ones_ignored(world: World) -> None:
    begin(world, {"id": "none"}, rounds=1, cohort={"size": 1, "minimum": 1})
    device = Device(world.server, world.clock)
    device.enrol(world.operator.token())
    given = device.assignment("digits")
    body = device.body_for(given, np.zeros(40, np.float32))
    path = f"/v1/assignments/{given.assignment}/update"
    for wrong in ("nmse=-1", "nmse=nan", "norm=inf", "train=soon", "residual=1e10"):
        with pytest.raises(MalformedRequest, match=rf"query.{wrong.partition('=')[0]}"):
            checked(device.request("PUT", f"{path}?{wrong}", body))
    assert device.request("PUT", f"{path}?nmse=0.5&colour=blue", body).status_code == 201
    (status,) = history(world.operator)
    assert status.received == 1
    assert status.figures is None, "some are missing"


def test_an_upload_without_figures_counts_as_ever(world: World) -> None:
    begin(world, {"id": "none"}, rounds=1, cohort={"size": 1, "minimum": 1})
    device = Device(world.server, world.clock)
    device.enrol(world.operator.token())
    include_one(device, world.model)
    (status,) = history(world.operator)
    assert (status.received, status.figures) == (1, None)


def test_figures_of_a_body_that_goes_by_parts_are_counted(world: World) -> None:
    begin(world, {"id": "none"}, rounds=1)
    for device in world.enrol(2, masking=OPEN):
        device.start()
        assert device.client is not None
        device.client._transport.parts_above = 50  # type: ignore[attr-defined]
    world.drive()
    (status,) = world.statuses
    assert status.figures is not None
    assert (status.figures.num_uploads, status.figures.nmse) == (2, 0.0)


def test_an_older_status_is_read_and_a_newer_one_goes_round(world: World) -> None:
    begin(world, TOPK, rounds=1)
    world.enrol(2, masking=OPEN)
    world.drive()
    (status,) = world.statuses
    assert RoundStatus.model_validate_json(status.model_dump_json()) == status
    older = status.model_copy(update={"figures": None})
    assert RoundStatus.model_validate_json(older.model_dump_json()) == older


def test_means_over_too_few_devices_are_left_out(world: World) -> None:
    begin(world, TOPK, rounds=1, evaluation={"least_clients": 3})
    world.enrol(2, masking=OPEN)
    world.drive()
    assert [status.figures for status in world.statuses] == [None]
    shown = world.server.get("/v1/tasks/digits/rounds/1", headers=ADMIN).json()
    assert shown["received"] == 2
    assert "figures" not in shown
