"""`fedpress plan --trial`: what a simulation of the app measures, beside what was expected."""

import json
import logging
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("flwr")
pytest.importorskip("sklearn")

from fedpress.cli import app
from fedpress.planning.choice import Row, choose
from fedpress.planning.costs import cost
from fedpress.planning.downlink import Downlink
from fedpress.planning.profiles import AUTO, candidates
from fedpress.planning.report import Report
from fedpress.planning.situation import Situation
from fedpress.planning.trial import Measured, Trial, rate_of_auto, tried
from fedpress.simulate.run import Settings, simulate
from fedpress.simulate.tasks import Task
from fedpress_client.trainer import Evaluation
from fedpress_protocols.errors import ConfigurationError

SHORT = ("--trial-rounds", "2", "--trial-clients", "4", "--cohort", "3")
APP = "tests.flower.test_trial:trainers"


def fedpress(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments])


def trainers(index: int, clients: int) -> Any:
    """Of an app of one's own; evaluates on what it is given."""
    trainer = Task(clients=clients).trainer(index)
    trainer.initial_model = Task(clients=clients).initial_model  # type: ignore[attr-defined]
    return trainer


def unmeasured(index: int, clients: int) -> Any:
    trainer = trainers(index, clients)
    trainer.evaluate = lambda model: None
    return trainer


def no_number(index: int, clients: int) -> Any:
    trainer = trainers(index, clients)
    trainer.evaluate = lambda model: Evaluation(10, {"accuracy": math.nan})
    return trainer


def soon_done(index: int, clients: int) -> Any:
    """Learns next to nothing after its first round, so that a residual is cut."""
    trainer = trainers(index, clients)
    train = trainer.train

    def short(model: Any, work: Any) -> Any:
        trained = train(model, work)
        if work.round == 1:
            return trained
        moved = model.parameters + 1e-4 * (trained.parameters - model.parameters)
        return replace(trained, parameters=moved)

    trainer.train = short
    return trainer


def test_a_trial_measures_what_a_simulation_of_the_app_does(tmp_path: Path) -> None:
    done = fedpress("50826", "--link", "0.2", "--trial", "--app", APP, *SHORT, "--json", "-")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    trial = found["trial"]
    assert (trial["of"], trial["rounds"], trial["clients"], trial["cohort"]) == (APP, 2, 4, 3)
    assert set(trial["profiles"]) == {each["name"] for each in found["profiles"]}
    settings = Settings(
        clients=4,
        fraction=0.75,
        rounds=2,
        engine="local",
        app=APP,
        compressor=json.dumps({"id": "ecsq", "target": 0.05}),
        strategy="fedavg",
        downlink=False,
    )
    rows = simulate(settings, tmp_path).rows
    measured = trial["profiles"]["ecsq .05 bit"]
    assert measured["body_bytes"] == sum(row.upload_bytes or 0 for row in rows) / 6
    assert measured["nmse"] == pytest.approx(sum(row.nmse or 0 for row in rows) / 2)
    assert measured["accuracy"] == pytest.approx(50 * sum(row.accuracy or 0 for row in rows))
    base = trial["profiles"]["float32"]
    assert base["loss_points"] == 0
    assert measured["loss_points"] == pytest.approx(base["accuracy"] - measured["accuracy"])
    assert 3000 < trial["profiles"][AUTO]["body_bytes"] < 6000  # 1.6 bit at first, in a cohort of 3


def test_the_recommendation_goes_by_the_losses_of_the_trial() -> None:
    """In two rounds nothing that sends little has come far, and on the digits it all had."""
    arguments = ("50826", "--link", "0.2", "--metered", "--most-loss", "3", "--cohort", "3")
    untried = json.loads(fedpress(*arguments, "--json", "-").stdout)
    assert untried["recommended"] == "top-k .1 %, CAFe"
    assert untried["trial"] is None
    done = fedpress(*arguments, "--trial", "--data", "digits", *SHORT)
    assert done.exit_code == 0, done.output
    assert "trial on digits: 2 rounds, 3 of 4 clients each" in done.stdout
    assert "body expected" in done.stdout
    assert "accuracies are means of the last 2 rounds" in done.stdout
    assert "recommended: top-k .1 %, CAFe" not in done.stdout
    assert "  goes with: strategy fedavg, as in the trial\n" in done.stdout
    assert "unknown for your model" not in done.stdout


def test_an_app_that_measures_no_accuracy_is_told_so() -> None:
    app = "tests.flower.test_trial:unmeasured"
    done = fedpress("50826", "--link", "0.2", "--trial", "--app", app, *SHORT, "--json", "-")
    found = json.loads(done.stdout)
    assert {each["accuracy"] for each in found["trial"]["profiles"].values()} == {None}
    assert found["recommended"] == "none"
    assert f"the trainers of {app} measure no accuracy" in found["reason"]


def test_an_accuracy_that_is_no_number_is_null(tmp_path: Path) -> None:
    app, file = "tests.flower.test_trial:no_number", tmp_path / "plan.json"
    asked = ("50826", "--link", "0.2", "--trial", "--app", app, *SHORT, "--json", str(file))
    done = fedpress(*asked)
    assert done.exit_code == 0, done.output
    assert "NaN" not in file.read_text()
    profiles = json.loads(file.read_text())["trial"]["profiles"].values()
    assert {(each["accuracy"], each["loss_points"]) for each in profiles} == {(None, None)}
    assert "nan" not in done.stdout


@pytest.mark.parametrize(("rounds", "cohort", "bits"), [(100, 100, 0.1), (20, 10, 0.57)])
def test_auto_has_the_rate_of_the_plan_in_a_trial(rounds: int, cohort: int, bits: float) -> None:
    spec = Task().initial_model().spec
    asked = Situation("50826", spec, 4 * spec.size, 1.0, 1.0, cohort=cohort, rounds=rounds)
    every = [each for each in candidates(asked) if each.baseline or each.name == AUTO]
    trial = Trial(data="digits", rounds=2, clients=4)
    measured = tried(every, asked, trial)
    assert rate_of_auto(asked) == bits
    assert measured[AUTO].body == pytest.approx(cost(every[1], asked).body, rel=0.3)


def test_updates_that_a_trial_loses_are_one_line_of_its_profile(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = candidates(Situation("", Task().initial_model().spec, 0, 1.0, 1.0, cohort=3))
    few = tuple(each for each in everything if each.baseline or each.name == AUTO)
    monkeypatch.setattr("fedpress.planning.report.candidates", lambda situation: few)
    app = "tests.flower.test_trial:soon_done"
    one = ("--trial-rounds", "1", "--trial-clients", "4", "--cohort", "3")
    first = fedpress("50826", "--link", "1", "--trial", "--app", app, *one)
    assert "trial on tests.flower.test_trial:soon_done: 1 round, 3 of 4" in first.stdout
    assert "accuracies are of that round" in first.stdout
    assert "; 1 round tells how a task begins" in first.stdout
    assert "lost to the model" not in first.output
    done = fedpress("50826", "--link", "1", "--trial", "--app", app, *SHORT, "--trial-rounds", "3")
    assert "auto: 3 updates lost to the model, in whole or in part: capped" in done.stdout
    assert done.output.count("lost to the model") == 1
    assert not caplog.records
    assert not logging.getLogger("fedpress_flower.client.compression").filters


def test_a_trial_is_checked_before_anything_is_measured() -> None:
    """Even before the compressors are looked at, of which one is none here."""
    trial = ("--trial", "--data", "digits", "--trial-strategy", "nonsense")
    done = fedpress("50826", "--link", "1", "--compressor", "zip", *trial)
    assert isinstance(done.exception, ConfigurationError), done.output
    assert "no strategy" in str(done.exception)


def test_a_loss_of_nothing_has_no_sign() -> None:
    spec = Task().initial_model().spec
    asked = Situation("50826", spec, 4 * spec.size, 0.2, 0.2, cohort=3)
    base, eight = candidates(asked)[:2]
    rows = tuple(Row.of(each, cost(each, asked), Downlink(0, 0), asked) for each in (base, eight))
    measured = {
        base.name: Measured(4e5, 0.0, 50.0, 0.0),
        eight.name: Measured(2e4, 0.1, 50.04, -0.04),
    }
    trial = Trial(data="digits", rounds=1, clients=4)
    report = Report(asked, Downlink(0, 0), rows, {}, choose(rows, asked), trial, measured)
    assert re.search(r"50\.0 +0\.0$", report.to_text(), re.MULTILINE)
    assert "-0.0" not in report.to_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("1k", "--app", APP), "has 50,826 parameters, and 1k has 1,000"),
        (("50826", "--app", "examples/flower"), "is a Flower app"),
        (("50826", "--app", "no.such:thing"), "no module 'no'"),
        (("50826", "--app", APP, "--data", "digits"), "one of them"),
        (("50826", "--data", "mnist"), "no data 'mnist'"),
        (("50826", "--data", "digits", "--lane", "masked"), "--trial measures the clear lane"),
        (("50826", "--data", "digits", "--trial-strategy", "fedprox"), "proximal"),
        (
            ("50826", "--app", APP, "--partition", "iid"),
            "--partition cannot be combined with --app",
        ),
        (("60k", "--data", "digits"), "the model of digits has 50,826 parameters, and 60k"),
    ],
)
def test_what_cannot_be_tried_is_answered_in_a_sentence(
    arguments: tuple[str, ...], says: str
) -> None:
    done = fedpress(*arguments, "--link", "1", "--trial", *SHORT)
    assert isinstance(done.exception, ConfigurationError), done.output
    assert says in str(done.exception)
