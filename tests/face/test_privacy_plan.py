"""`fedpress privacy plan`: its figures are those of the task that it prints."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from fedpress.cli import app
from fedpress.planning.privacy import PrivateTask, planned
from fedpress_compression.compressor import from_config
from fedpress_compression.tensors import ModelSpec, TensorSpec
from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan
from fedpress_protocols.masking.payload import Payload
from fedpress_protocols.messages import TaskConfig
from fedpress_protocols.model import Model
from fedpress_protocols.plan import MAX_PARTICIPATIONS, RoundPlan
from fedpress_protocols.privacy import correlated
from fedpress_protocols.upload import max_body_bytes
from tests.devices import Device, Operator
from tests.face.commands import Command, said
from tests.masked import masked_task
from tests.protocols.test_masked_payload import plan_fields
from tests.server.in_process import Clock, Server, include_one

ASKED = ["privacy", "plan", "20k", "--epsilon", "8", "--clip", "0.5", "--population", "1000"]
MODEL = ModelSpec((TensorSpec("w", (100, 190)), TensorSpec("b", (1000,))))
TASK: dict[str, Any] = {
    "model": MODEL, "fraction": 0.05, "cohort": 20, "minimum": 15, "population": 200, "rounds": 50,
    "participations": 5, "epsilon": 6.0, "delta": 1e-5, "clip": 0.5, "corrupt": 0.1,
    "adversary": "malicious",
}  # fmt: skip


def test_the_printed_task_is_one_that_a_server_takes() -> None:
    printed = said(CliRunner().invoke(app, ASKED))
    block = "{" + printed.split("configuration:\n")[1] + "}"
    fields = {"task": "a", "model": "0" * 64, "rounds": 100, **json.loads(block)}
    config = TaskConfig.model_validate(fields)
    assert config.privacy is not None
    assert config.privacy.participations == 10
    assert "against     a lying server with 10% of a cohort at most" in printed
    assert "not hidden  which devices take part" in printed


def test_the_page_of_a_privacy_budget_shows_what_its_commands_print() -> None:
    page = (Path(__file__).parents[2] / "docs/tutorials/privacy-budget.md").read_text()
    shown = re.findall(r"```\n(fedpress privacy plan .*)\n```\n\n(?:```text\n([^`]*)```)?", page)
    assert len(shown) == 3
    for command, lines in shown:
        printed = said(CliRunner().invoke(app, command.split()[1:]))
        for line in lines.splitlines():
            assert line == "..." or line in printed.splitlines()
    (error,) = re.findall(r"error .*, (\S+) times the clip", printed)
    assert f"It comes to {error} times the clip here" in page


@pytest.mark.parametrize(
    ("lane", "against", "more"),
    [
        ("central", "and not the server", []),
        ("central", "and not the server", ["--separation", "10"]),
        ("central", "and not the server", ["--quantile", "0.3"]),
        ("central", "and not the server", ["--per-tensor", "w=1", "--per-tensor", "*=3"]),
        ("local", "any server, other devices, and the public", []),
    ],
)
def test_a_printed_task_of_the_clear_lane_is_one_that_a_server_takes(
    lane: str, against: str, more: list[str], server: Server, tmp_path: Path
) -> None:
    tensors = {"w": np.zeros((200, 90), np.float32), "b": np.zeros(2000, np.float32)}
    model = Model.from_tensors(tensors)
    path = tmp_path / "model.safetensors"
    path.write_bytes(model.to_bytes())
    asked = [*ASKED[:2], str(path), *ASKED[3:]]
    printed = said(CliRunner().invoke(app, [*asked, "--lane", lane, *more]))
    assert against in printed
    assert ("correlated  over 100 rounds" in printed) == ("--separation" in more)
    assert ("adapts to the 0.3 quantile" in printed) == ("--quantile" in more)
    clips = "clips       0.1581 to 0.4743 for each of 2 tensors by itself, 0.5 for all together"
    assert (clips in " ".join(printed.split()).replace("clips ", "clips       ")) == (
        "--per-tensor" in more
    )
    block = json.loads("{" + printed.split("configuration:\n")[1] + "}")
    assert block["privacy"]["lane"] == lane
    assert "masking" not in block
    Operator(server).begin(model, **{**block, "rounds": 100})


def test_noise_in_the_clear_lane_is_that_of_the_real_terms() -> None:
    central = planned(PrivateTask(**{**TASK, "lane": "central"}))
    local = planned(PrivateTask(**{**TASK, "lane": "local"}))
    shared, skellam = (
        planned(PrivateTask(**{**TASK, "noise": each})) for each in ("discrete_gaussian", "skellam")
    )
    noise = central.privacy.noise_multiplier
    assert noise == local.privacy.noise_multiplier == shared.privacy.noise_multiplier
    assert noise < skellam.privacy.noise_multiplier
    assert shared.bits_per_parameter < 0.8 * skellam.bits_per_parameter
    assert shared.round_error < skellam.round_error
    assert central.round_error == pytest.approx(noise * math.sqrt(1000) / 20)
    assert local.round_error == pytest.approx(central.round_error * math.sqrt(20))
    assert 5.99 < central.task_epsilon <= 6.0
    assert central.masking is None


def test_bytes_and_range_of_the_clear_lane_are_those_of_its_compressor() -> None:
    """A coordinate of an update within the clip is clip / sqrt(n) in the mean; noise has no end."""
    central, local, few = (
        planned(PrivateTask(**{**TASK, **changes}))
        for changes in (
            {"lane": "central"},
            {"lane": "local"},
            {"lane": "central", "fraction": 0.001},
        )
    )
    noise = local.privacy.noise_multiplier * 0.5
    assert central.compressor["clip"] == float(f"{8 * 0.5 / math.sqrt(1000):.2g}")
    assert few.compressor["clip"] == 0.5
    assert local.compressor["clip"] == float(f"{4 * noise:.2g}")
    spec = ModelSpec((TensorSpec("all", (20_000,)),))
    for plan in (central, local, few):
        assert plan.compressor["id"] == "shared_support"
        assert plan.body_bytes == max_body_bytes(from_config(plan.compressor).layout(spec))
        assert plan.bits_per_parameter == 8 * plan.body_bytes / 20_000
        assert plan.noise_norm == pytest.approx(plan.round_error * 0.5)
        assert plan.model_error == pytest.approx(plan.round_error * math.sqrt(51 / 2))
        assert plan.numbers_sent == (20 if plan is few else 1000)


def test_correlated_noise_is_planned_with_what_leaves_least_of_it_in_the_model() -> None:
    task = {**TASK, "lane": "central", "fraction": 1.0, "participations": 5}
    plain, apart = (planned(PrivateTask(**{**task, "separation": each})) for each in (1, 10))
    assert apart.privacy.separation == 10
    assert apart.privacy.correlation == correlated.best(10, 50)
    assert plain.privacy.correlation is None
    assert (apart.compressor["id"], plain.compressor["id"]) == ("quantize", "shared_support")
    assert 5.99 < apart.task_epsilon <= 6.0
    assert apart.round_error > plain.round_error
    assert apart.model_error < 0.6 * plain.model_error
    assert plain.model_error == pytest.approx(plain.round_error * math.sqrt(51 / 2))


def test_noise_is_drawn_for_so_many_rounds_at_most() -> None:
    once = {**TASK, "lane": "central", "fraction": 1.0, "rounds": 1000, "participations": 1,
            "cohort": 4, "minimum": 2, "separation": 1000, "population": 4000}  # fmt: skip
    best, few = (planned(PrivateTask(**{**once, "max_draws": each})) for each in (2048, 64))
    for plan, rounds in ((best, 1000), (few, 64)):
        assert plan.privacy.correlation is not None
        assert plan.privacy.correlation.rounds == rounds
    assert best.model_error < 0.9 * few.model_error


def test_the_noise_of_an_adaptive_clip_pays_for_the_count() -> None:
    central = {**TASK, "lane": "central"}
    fixed, moves = (planned(PrivateTask(**central, quantile=each)) for each in (None, 0.5))
    assert fixed.privacy.adaptive is None
    assert moves.privacy.adaptive is not None
    assert moves.privacy.noise_multiplier == fixed.privacy.noise_multiplier
    assert fixed.round_error < moves.round_error < 1.021 * fixed.round_error
    assert moves.compressor["clip"] == float(f"{4 * 8 * 0.5 / math.sqrt(1000):.2g}")
    noise = moves.privacy.noise_multiplier
    assert moves.privacy.adaptive.count_noise == float(f"{2.5 * noise:.4g}") > 20 / 20
    many = planned(PrivateTask(**{**central, "quantile": 0.5, "cohort": 200, "population": 400}))
    assert many.privacy.adaptive is not None
    assert many.privacy.adaptive.count_noise == 10 > 2.5 * many.privacy.noise_multiplier


def test_clips_of_tensors_are_those_of_the_terms_and_the_noise_is_that_of_the_clip() -> None:
    central = {**TASK, "lane": "central", "fraction": 1.0}
    whole, each = (
        planned(PrivateTask(**central, per_tensor=shares)) for shares in ((), (("*", 1),))
    )
    assert whole.tensor_clips == {}
    assert each.tensor_clips == pytest.approx({"w": 0.5 / math.sqrt(2), "b": 0.5 / math.sqrt(2)})
    assert list(each.tensor_clips.values()) == each.privacy.bounds(MODEL).clips.tolist()
    assert each.privacy.noise_multiplier == whole.privacy.noise_multiplier
    assert (each.noise_norm, each.task_epsilon) == (whole.noise_norm, whole.task_epsilon)
    # the range is that of the tensor whose numbers may be largest, b
    assert each.compressor["clip"] == pytest.approx(8 * 0.5 / math.sqrt(2 * 1000), rel=0.05)


@pytest.mark.parametrize("share", ["w", "=1", "w=0", "w=much"])
def test_a_share_of_the_clip_is_a_pattern_and_a_number(share: str) -> None:
    result = CliRunner().invoke(app, [*ASKED, "--lane", "central", "--per-tensor", share])
    assert result.exit_code == 2
    assert "expected a pattern of tensors' names and a share" in result.output


@pytest.mark.parametrize("noise", ["discrete_gaussian", "skellam"])
def test_bits_and_noise_are_those_of_the_real_payload(noise: str) -> None:
    plan = planned(PrivateTask(**TASK, noise=noise))
    spec = MODEL
    fields = plan_fields(
        {"id": "shared_support", "fraction": 0.05},
        cohort={"size": 20, "minimum": 15},
        privacy=plan.privacy.model_dump(),
        spec=spec.digest,
    )
    round_plan = RoundPlan.model_validate(fields)
    payload = Payload(
        round_plan, round_plan.public(spec, {"previous": np.zeros(20_000, np.float32)})
    )
    assert payload.packing.num_bytes == plan.body_bytes
    assert plan.model_error == pytest.approx(plan.round_error * math.sqrt(51 / 2))
    assert plan.round_error == plan.noise_norm / 0.5
    assert payload.grid is not None
    assert payload.grid.shares == plan.noise_shares
    assert plan.ring_bits == (2 * payload.grid.sum_bound(20)).bit_length()
    assert plan.bits_per_parameter == 8 * plan.body_bytes / 20_000 < 2
    rng = np.random.default_rng(1)
    drawn = sum(payload.grid.noise(rng.bytes(48)) for _ in range(20)) * payload.grid.step / 20
    assert np.linalg.norm(drawn) == pytest.approx(plan.noise_norm, rel=0.1)


def test_figures_as_json() -> None:
    figures = json.loads(said(CliRunner().invoke(app, [*ASKED, "--json"])))
    assert figures["task_epsilon"] <= 8
    assert figures["privacy"]["clip"] == 0.5


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"population": 10}, "expected 3 <= minimum <= cohort <= population"),
        ({"participations": 2}, "raise --participations or --population"),
        ({"corrupt": 0.3, "minimum": 7}, "raise --minimum, or lower --corrupt"),
        ({"epsilon": 1e-6}, "raise epsilon"),
        ({"rounds": 10**8, "participations": 10**7}, "raise --population, or lower --rounds"),
        ({"separation": 10}, "choose --lane central, or leave --separation out"),
        ({"per_tensor": (("*", 1.0),)}, "choose --lane central and leave --quantile out"),
        (
            {"per_tensor": (("*", 1.0),), "lane": "central", "quantile": 0.5},
            "or leave --per-tensor out",
        ),
        (
            {"per_tensor": (("w", 1.0),), "lane": "central"},
            "fits the tensor 'b', which would have no bound",
        ),
        ({"quantile": 0.5}, "choose --lane central and leave --separation out"),
        ({"separation": 10, "lane": "central"}, "set --fraction 1, or leave --separation out"),
        (
            {"separation": 11, "lane": "central", "fraction": 1.0},
            "needs 215 devices for cohorts of 20, and the population is 200",
        ),
        (
            {"separation": 9, "lane": "central", "fraction": 1.0, "participations": 7},
            "do not fit into 50 rounds",
        ),
    ],
)
def test_a_plan_that_cannot_be_says_what_to_change(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(reason)):
        planned(PrivateTask(**{**TASK, **changes}))


def test_a_device_may_take_part_as_often_as_terms_can_say() -> None:
    often = planned(PrivateTask(**{**TASK, "participations": MAX_PARTICIPATIONS}))
    assert often.privacy.participations == MAX_PARTICIPATIONS


def test_a_cohort_that_nobody_may_drop_out_of_is_refused() -> None:
    sizes = {"cohort": 100, "minimum": 100, "corrupt": 0.9}
    with pytest.raises(IncompatiblePlan, match="96 of 100 clients must stay"):
        planned(PrivateTask(**{**TASK, **sizes, "participations": 50}))


def test_a_separation_may_take_every_device_and_every_round() -> None:
    task = {**TASK, "lane": "central", "fraction": 1.0, "separation": 10, "participations": 6}
    assert planned(PrivateTask(**{**task, "population": 195, "rounds": 51})).privacy.correlation
    for change in ({"population": 194, "rounds": 51}, {"population": 195, "rounds": 50}):
        with pytest.raises(ConfigurationError):
            planned(PrivateTask(**{**task, **change}))


def test_show_says_what_was_spent_and_against_whom(server: Server, fedpress: Command) -> None:
    model = Model.from_tensors({"w": np.zeros(40, np.float32)})
    privacy = {"clip": 0.1, "noise_multiplier": 2.1, "participations": 5, "epsilon": 6.0}
    masking = {"corrupt": 0.0, "adversary": "semi-honest"}
    masked_task(Operator(server), model, 4, privacy=privacy, masking=masking)
    for shown in (
        said(fedpress("task", "show", "digits")),
        said(fedpress("round", "show", "digits")),
    ):
        (line,) = [each for each in shown.splitlines() if each.startswith("privacy")]
        assert " ".join(line.split()) == (
            "privacy epsilon 0 of 6 at delta 1e-05, by 0 of 5 participations of a device at most; "
            "against a curious server with 0% of a cohort at most, other devices, and the public"
        )
    plain = said(fedpress("task", "list"))
    assert "digits" in plain


@pytest.mark.parametrize("lane", ["central", "local"])
def test_the_clear_lanes_show_what_was_spent_and_what_a_continuation_waits_for(
    server: Server, clock: Clock, fedpress: Command, lane: str
) -> None:
    operator = Operator(server)
    model = Model.from_tensors({"w": np.zeros(40, np.float32)})
    privacy = {
        "lane": lane, "clip": 0.1, "noise_multiplier": 2.1, "participations": 2, "epsilon": 6.0
    }  # fmt: skip
    cohort = {"size": 2, "minimum": 2}
    operator.begin(model, rounds=1, cohort=cohort, privacy=privacy, at_end="paused")
    devices = [Device(server, clock) for _ in range(2)]
    for device in devices:
        device.enrol(operator.token())
    for spent in (1, 2):
        for device in devices:
            assignment = include_one(device, model, value=0.0)
        assert devices[-1].check_in("digits", assignment, wait=30) is not None
        shown = " ".join(said(fedpress("task", "show", "digits")).split())
        assert f"by {spent} of 2 participations of a device at most" in shown
        assert "hint" not in shown
        continued = " ".join(said(fedpress("task", "continue", "digits")).split())
        assert f"by {spent} of 2 participations" in continued
        assert ("hint devices without a participation left" in continued) == (spent == 2)
    assert "privacy budget spent: 2" in continued
