"""`fedpress plan`: its bytes are real ones, its advice follows from them, and it can say none."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import digits_bytes_to_accuracy as digits
import numpy as np
import pytest
from click.testing import CliRunner, Result

from fedpress.cli import app
from fedpress.planning import costs
from fedpress.planning.choice import Row, choose
from fedpress.planning.costs import Cost, cost
from fedpress.planning.downlink import Downlink, downlink
from fedpress.planning.profiles import AUTO, Candidate, candidates
from fedpress.planning.rehearsal import Workload, rehearse
from fedpress.planning.sessions import session_bytes
from fedpress.planning.situation import Situation, model_of, sample, sized
from fedpress.update_file import FIXTURE
from fedpress_compression.compressor import from_config, to_config
from fedpress_compression.tensors import ModelSpec, TensorSpec
from fedpress_protocols.defaults import MIN_BYTES, completed
from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.masking.graph import COMPLETE_UP_TO
from fedpress_protocols.masking.messages import Offer
from fedpress_protocols.model import Model

TOLERANCE = 0.25
"""docs/planning.md states it."""


def situation(**changes: object) -> Situation:
    spec = sized(50_826)
    usual = Situation("50826", spec, 4 * spec.size, uplink=1.0, downlink=8.0, cohort=10)
    return replace(usual, **changes)  # type: ignore[arg-type]


def candidate(name: str, **changes: object) -> Candidate:
    return next(each for each in candidates(situation(**changes)) if each.name == name)


def fedpress(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments])


# Bytes


@pytest.mark.parametrize(
    ("name", "method", "rounds"),
    [
        ("8 bits", "8 bits, EF, M .8", 40),
        pytest.param("4 bits", "4 bits, EF, M .8", 40, marks=pytest.mark.slow),
        pytest.param("top-k 2 %, 1 bit", "top-k 2 % + 1 bit, EF, M .8", 10, marks=pytest.mark.slow),
        ("top-k .1 %, CAFe", "top-k .1 % ternary, CAFe, contexts", 10),
    ],
)
@pytest.mark.slow
def test_expected_bodies_are_near_those_of_a_real_task(
    name: str, method: str, rounds: int, tmp_path: Path
) -> None:
    real = next(each for each in digits.METHODS if each.name == method)
    asked = candidate(name)
    assert from_config(real.compressor) == asked.made
    curve = digits.train(real, 0, rounds, tmp_path)
    found = curve.uploaded[-1] / (rounds * digits.COHORT)
    expected = cost(asked, situation(spec=digits.first_model(0).spec)).body
    assert expected == pytest.approx(found, rel=TOLERANCE)


def test_every_loss_is_of_the_method_that_was_measured() -> None:
    """Whoever changes a profile has to measure it again."""
    own = json.dumps(digits.RAW)  # the benchmark's, which no plan can name
    measured = [
        from_config(method.compressor)
        for method in digits.METHODS
        if own not in json.dumps(method.compressor)
    ]
    for each in candidates(situation()):
        assert each.made in measured or each.name == AUTO, each.name


def test_autos_loss_is_that_of_the_runs_that_are_kept() -> None:
    folder = Path(__file__).parents[2] / "benchmarks" / "results" / "accuracy_vs_bytes"

    def end(recipe: str) -> float:
        runs = [
            json.loads((folder / f"digits-{recipe}-{seed}.json").read_text()) for seed in range(3)
        ]
        return float(np.mean([[accuracy for accuracy, _ in run["average"][-5:]] for run in runs]))

    assert candidate(AUTO).loss == pytest.approx(100 * (end("fedavgm") - end("auto")), abs=0.05)


def test_the_body_expected_of_auto_is_near_that_of_the_runs_that_are_kept() -> None:
    folder = Path(__file__).parents[2] / "benchmarks" / "results" / "accuracy_vs_bytes"
    auto, whole = (
        json.loads((folder / f"digits-{n}-0.json").read_text()) for n in ("auto", "fedavg")
    )
    half = len(auto["up"]) // 2
    rounds = auto["rounds"][-1] - auto["rounds"][half]
    bits = 32 * (auto["up"][-1] - auto["up"][half]) / rounds * whole["rounds"][-1] / whole["up"][-1]
    expected = 8 * cost(candidate(AUTO), situation()).body / 50_826
    assert expected == pytest.approx(bits, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("rounds", "cohort", "bits"),
    [(100, 100, 0.1), (90, 10, 0.1), (40, 10, 0.28), (100, 3, 0.4), (20, 10, 0.57), (10, 2, 1.6)],
)
def test_the_profile_of_auto_is_that_of_a_task_of_as_many_uploads(
    rounds: int, cohort: int, bits: float
) -> None:
    """The hardest that does not wait for devices that upload often."""
    task = completed({"rounds": rounds, "cohort": {"size": cohort}})
    reserve = task["policies"][0].get("reserve", 0)
    level = task["profiles"][-1 - reserve]
    auto = candidate(AUTO, rounds=rounds, cohort=cohort)
    assert level["name"] == f"{bits}-bit"
    assert auto.config == level["compressor"]
    assert f"{bits} bit a value" in auto.advice
    assert ("in so short a task" in auto.advice) == (bits > 0.1)
    assert auto.loss == candidate(AUTO).loss


def test_a_short_task_has_larger_bodies_of_auto(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    short = ("--rounds", "20", "--cohort", "10")
    done = fedpress("50826", "--link", "1", *short, "--json", str(file))
    auto = next(each for each in json.loads(file.read_text())["profiles"] if each["name"] == AUTO)
    # The 20 rounds of `fedpress simulate` with 10 of 100 clients had 2,677 bytes.
    assert auto["body_bytes"] == pytest.approx(2_677, rel=TOLERANCE)
    assert "0.57 bit a value in so short a task" in auto["goes_with"]
    assert f"auto: {auto['goes_with']}" in done.output


def test_bodies_of_a_small_model_have_the_least_bytes_of_the_default() -> None:
    """Before they are coded in context. In 40 rounds of 10 a perceptron of the digits with 2,410
    parameters had bodies of 218 bytes."""
    small = situation(spec=sized(2_410), model_bytes=9_640, cohort=100)
    expected = cost(candidate(AUTO, cohort=100), small).body
    assert expected == pytest.approx(218, rel=TOLERANCE)
    assert expected < MIN_BYTES


def test_a_plan_says_of_which_task_its_losses_are_and_that_yours_is_unknown() -> None:
    done = fedpress("50826", "--link", "0.2", "--cohort", "10")
    assert "loss on digits" in done.output
    assert "a perceptron of 50,826 parameters" in done.output
    assert "unknown for your model" in done.output
    assert "--trial --app module:factory" in done.output


def test_a_part_of_a_model_tells_what_the_whole_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = situation(spec=sized(400_000))
    for name in ("8 bits", "top-k 2 %, 1 bit", "ternary 1 %, CAFe"):
        whole = cost(candidate(name), asked)
        assert whole.factor == 1
        with monkeypatch.context() as patched:
            patched.setattr(costs, "SAMPLE", 100_000)
            part = cost(candidate(name), asked)
        assert 3 < part.factor < 5
        assert part.body == pytest.approx(whole.body, rel=0.1)


def test_what_is_uncompressed_is_four_bytes_a_value_and_a_head() -> None:
    assert 0 <= cost(candidate("float32"), situation()).body - 4 * 50_826 < 8


@pytest.mark.parametrize("n", [5, 12, pytest.param(150, marks=pytest.mark.slow)])
def test_a_sessions_messages_are_as_long_as_those_of_a_session_that_was_played(n: int) -> None:
    load = Workload(n, 8, 1, 0, 1_000, 500)
    played = rehearse(load)
    found, offer = session_bytes(load.config), len(Offer(load.config).to_bytes())
    sent = played.sent_bytes - played.body_bytes
    assert abs(found.sent - sent) <= 2  # a set of clients is as long as its last one says
    received = played.received_bytes + offer
    if n <= COMPLETE_UP_TO:
        assert found.received == received
    else:  # of some neighbours the consent comes too late to be passed on
        assert received <= found.received < 1.03 * received


def test_masked_bodies_are_what_the_packing_makes_of_the_plan() -> None:
    for cohort in (10, 100):
        asked = situation(lane="masked", cohort=cohort)
        every, few = (cost(each, asked) for each in candidates(asked)[:2])
        bits = np.log2(2 * 2 * cohort + 1)
        assert 1 <= 8 * few.body / (50_826 * bits) < 1.1
        assert every.body > 2 * few.body
        assert few.sent == every.sent > 0


# Advice


def row(asked: Situation, name: str, body: float, cpu: float, loss: float | None = 0.5) -> Row:
    made = Candidate(name, {"id": "none"}, loss, baseline=name == "float32")
    return Row.of(made, Cost(body, cpu, 0.0), Downlink(1_000_000, 1_000_000), asked)


def rows(asked: Situation, codec_cpu: float) -> list[Row]:
    return [row(asked, "float32", 4e6, 0.01, 0.0), row(asked, "small", 4e4, codec_cpu)]


def test_a_slow_link_wants_compression_and_a_fast_one_with_a_slow_codec_none() -> None:
    slow = situation(uplink=0.5, compute=1.0, server_link=1e6)
    chosen = choose(rows(slow, 0.5), slow)
    assert chosen.row is not None
    assert chosen.row.candidate.name == "small"
    fast = replace(slow, uplink=100.0)
    none = choose(rows(fast, 0.5), fast)
    assert none.row is None
    assert "317 ms of upload" in none.reason
    assert "490 ms of CPU" in none.reason


def test_a_slow_device_turns_the_same_link_to_none() -> None:
    asked = situation(uplink=20.0, compute=0.0)
    assert choose(rows(asked, 0.1), asked).row is not None
    slower = replace(asked, slowdown=30.0)
    assert choose(rows(slower, 0.1), slower).row is None


def test_a_gain_that_nobody_would_notice_is_none() -> None:
    asked = situation(uplink=50.0, compute=300.0)
    none = choose(rows(asked, 0.02), asked)
    assert none.row is None
    assert "off a round of 302 s" in none.reason


def test_a_deadline_that_only_compression_meets_decides() -> None:
    asked = situation(uplink=1.0, compute=500.0, deadline=510.0)
    chosen = choose(rows(asked, 0.02), asked)
    assert chosen.row is not None
    assert "would miss the deadline of 510 s" in chosen.reason


def test_where_nothing_is_in_time_the_fastest_is_named_and_it_is_said() -> None:
    asked = situation(uplink=1.0, compute=700.0)
    chosen = choose(rows(asked, 0.02), asked)
    assert chosen.row is not None
    assert not chosen.row.in_time
    assert "nothing is in before the deadline of 10 min" in chosen.reason


def test_of_profiles_that_are_as_fast_the_gentlest_is_taken() -> None:
    asked = situation(uplink=1.0)
    found = [
        *rows(asked, 0.02),
        row(asked, "gentle", 5e4, 0.02, 0.1),
        row(asked, "hard", 1e3, 0.02, 0.9),
    ]
    chosen = choose(found, asked)
    assert chosen.row is not None
    assert chosen.row.candidate.name == "gentle"
    metered = choose(found, replace(asked, metered=True))
    assert metered.row is not None
    assert metered.row.candidate.name == "hard"


def test_nothing_beyond_the_tolerated_loss_or_unmeasured_is_recommended() -> None:
    asked = situation(uplink=0.1, most_loss=0.2)
    assert choose(rows(asked, 0.02), asked).row is None
    unknown = [row(asked, "float32", 4e6, 0.0), row(asked, "own", 1e3, 0.0, None)]
    assert choose(unknown, replace(asked, most_loss=100.0)).row is None


def test_the_servers_link_is_shared_by_the_cohort() -> None:
    asked = situation(uplink=100.0, cohort=1000, server_link=1000.0)
    assert asked.up == 1.0
    assert row(asked, "float32", 1e6, 0.0).up_seconds == pytest.approx(8.0)


def test_coded_downloads_are_what_a_task_with_a_downlink_sends() -> None:
    plain, coded = downlink(situation()), downlink(situation(coded_downloads=True))
    assert plain.each == plain.anew == 4 * 50_826
    assert coded.each <= plain.each / 10
    assert plain.anew / 4 < coded.anew <= plain.anew / 2
    asked = situation(coded_downloads=True)
    made = Row.of(candidate("float32"), Cost(1e6, 0.0, 0.0), coded, asked)
    assert made.download == coded.each
    assert made.codec_seconds == coded.seconds > 0


def test_a_model_with_frozen_tensors_is_planned_without_them() -> None:
    frozen = TensorSpec("table", (500, 100), "bfloat16", frozen=True)
    spec = ModelSpec((frozen, TensorSpec("adapter", (40, 50))))
    coded = downlink(situation(spec=spec, model_bytes=108_000, coded_downloads=True))
    assert 0 < coded.each < 2_000
    assert coded.anew > 0


# Models


def test_a_model_is_a_file_or_a_size(tmp_path: Path) -> None:
    model = Model.from_tensors({"w": np.ones((30, 40), np.float32), "b": np.zeros(7, np.float32)})
    file = tmp_path / "model.safetensors"
    file.write_bytes(model.to_bytes())
    spec, size = model_of(str(file))
    assert spec == model.spec
    assert size == file.stat().st_size
    for text, parameters in (("50826", 50_826), ("350k", 350_000), ("1.5M", 1_500_000)):
        spec, size = model_of(text)
        assert spec.size == parameters
        assert 1 <= size / (4 * parameters) < 1.02
    with pytest.raises(ConfigurationError, match="give a safetensors file"):
        model_of("large")
    with pytest.raises(ConfigurationError, match="outside"):
        model_of("900G")


@pytest.mark.parametrize("size", [1, 2, 3, 1024, 50_826, 1_050_625, 7_000_001])
def test_a_size_is_met_to_the_parameter(size: int) -> None:
    spec = sized(size)
    assert spec.size == size
    assert all(tensor.size for tensor in spec.tensors)


def test_a_sample_keeps_every_tensor_and_its_kind() -> None:
    spec = ModelSpec(
        (TensorSpec("a", (8192, 512)), TensorSpec("b", (8192,)), TensorSpec("c", ()),
         TensorSpec("d", (64, 3, 3, 64)))
    )  # fmt: skip
    smaller, factor = sample(spec, 100_000)
    assert [tensor.name for tensor in smaller.tensors] == ["a", "b", "c", "d"]
    assert factor == spec.size / smaller.size
    assert all(tensor.size >= 4096 for tensor in smaller.tensors if len(tensor.shape) > 1)
    assert sample(spec, spec.size) == (spec, 1.0)


# The command


def test_the_command_prints_a_table_and_its_figures(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    done = fedpress("50826", "--link", "0.2", "--cohort", "10", "--json", str(file))
    assert done.exit_code == 0, done.output
    found = json.loads(file.read_text())
    for each in found["profiles"]:
        assert each["name"] in done.output
        assert each["all_rounds_bytes"]["up"] == 10 * 100 * each["upload_bytes"]
    assert found["recommended"] != "none"
    assert f"recommended: {found['recommended']}" in done.output
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    for key in (*found, *found["profiles"][0]):
        assert f"`{key}" in page


def test_a_price_of_the_link_gives_the_money_of_all_rounds() -> None:
    asked = ("50826", "--link", "0.2", "--cohort", "10", "--rounds", "30")
    done = fedpress(*asked, "--price-gb", "2", "--json", "-")
    assert done.exit_code == 0, done.output
    for each in json.loads(done.output)["profiles"]:
        num_bytes = sum(each["all_rounds_bytes"].values())
        assert num_bytes == 300 * (each["upload_bytes"] + each["download_bytes"])
        assert each["money"] == pytest.approx(2 * num_bytes / 1e9)
    for price in ("-1", "nan"):
        refused = fedpress(*asked, "--price-gb", price)
        assert isinstance(refused.exception, ConfigurationError)
        assert "--price-gb" in str(refused.exception)


def test_figures_alone_go_to_a_pipe_and_own_compressors_are_measured_too() -> None:
    done = fedpress(
        *("50826", "--link", "5", "--json", "-", "--compressor", "topk:fraction=0.05"),
        *("--compressor", "randomk"),
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    own = {each["name"]: each for each in found["profiles"]}
    assert own["topk:fraction=0.05"]["expected_loss_points"] is None
    assert own["topk:fraction=0.05"]["upload_bytes"] > own["top-k 2 %, 1 bit"]["upload_bytes"]


def test_the_masked_lane_counts_the_session_and_refuses_what_it_cannot_carry() -> None:
    done = fedpress(
        *("50826", "--link", "1", "--lane", "masked", "--cohort", "10", "--json", "-"),
        *("--compressor", "topk"),
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert "commute with the sum" in found["refused"]["topk"]
    for each in found["profiles"]:
        assert each["upload_bytes"] == each["body_bytes"] + each["session_bytes"]["sent"]
        assert each["session_bytes"]["sent"] > 0
    alone = fedpress("50826", "--link", "1", "--lane", "masked", "--cohort", "2")
    assert isinstance(alone.exception, ConfigurationError)
    assert "reveals too much of each client" in str(alone.exception)


def test_real_updates_take_the_place_of_drawn_ones() -> None:
    arguments = ("50826", "--link", "1", "--json", "-")
    drawn, real = (
        json.loads(fedpress(*arguments, *more).output) for more in ((), ("--update", str(FIXTURE)))
    )
    bodies = [
        {each["name"]: each["body_bytes"] for each in found["profiles"]} for found in (drawn, real)
    ]
    assert bodies[0]["float32"] == bodies[1]["float32"]
    assert bodies[0]["8 bits"] != bodies[1]["8 bits"]
    wrong = fedpress("1000", "--link", "1", "--update", str(FIXTURE))
    assert isinstance(wrong.exception, ConfigurationError)
    assert "updates of 50,826 values, the model has 1,000" in str(wrong.exception)


def test_one_round_of_one_device_is_in_the_singular() -> None:
    done = fedpress("1k", "--link", "1", "--rounds", "1", "--cohort", "1", "--most-loss", "0")
    assert "1 device a round, 1 round, clear lane" in done.output
    assert "lose 0 points of accuracy" in done.output
    assert (
        "lose 1 point of accuracy"
        in choose([row(situation(), "float32", 4e6, 0.0)], situation()).reason
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nonsense", "--link", "1"), "give a safetensors file"),
        (("1k", "--link", "0"), "--link of 0, which must be a positive number"),
        (("1k", "--link", "nan"), "--link of nan"),
        (("1k", "--link", "1", "--cohort", "0"), "a cohort of 0"),
        (("1k", "--link", "1", "--compute", "-1"), "--compute of -1"),
        (("1k", "--link", "1", "--compressor", "zip"), "no compressor has the id 'zip'"),
        (("1k", "--link", "1", "--compressor", "auto:gap=1"), "auto is in the table already"),
        (("1k", "--link", "1", "--compressor", "auto", "--lane", "masked"), "in the clear lane"),
        (("1k", "--link", "1", "--update", "no.npz"), "there is no file no.npz"),
        (("1k", "--link", "1", "--json", "/nowhere/plan.json"), "cannot be written"),
        (("1k", "--link", "1", "--trial"), "on an app or on a data set, one of them"),
        (("1k", "--link", "1", "--trial-rounds", "3"), "no trial is asked for"),
        (
            ("1k", "--link", "1", "--trial", "--data", "digits", "--trial-clients", "1"),
            "a trial of 10 rounds with 1 clients",
        ),
    ],
)
def test_wrong_input_is_answered_in_a_sentence(arguments: tuple[str, ...], says: str) -> None:
    done = fedpress(*arguments)
    assert isinstance(done.exception, ConfigurationError), done.output
    assert says in str(done.exception)


def test_a_profile_is_a_configuration_that_a_task_takes() -> None:
    for lane in ("clear", "masked"):
        for each in candidates(situation(lane=lane)):
            assert to_config(each.made)["id"] == each.config["id"]
