"""`fedpress plan --trial`: what a simulation of the app measures, beside what was expected."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("flwr")
pytest.importorskip("sklearn")

from fedpress.cli import app
from fedpress.planning.profiles import AUTO
from fedpress.simulate.run import Settings, simulate
from fedpress.simulate.tasks import Task
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
    assert 1000 < trial["profiles"][AUTO]["body_bytes"] < 2500  # .28 bit, contexts and all


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
    assert "recommended: top-k .1 %, CAFe" not in done.stdout
    assert "unknown for your model" not in done.stdout


def test_an_app_that_measures_no_accuracy_is_told_so() -> None:
    app = "tests.flower.test_trial:unmeasured"
    done = fedpress("50826", "--link", "0.2", "--trial", "--app", app, *SHORT, "--json", "-")
    found = json.loads(done.stdout)
    assert {each["accuracy"] for each in found["trial"]["profiles"].values()} == {None}
    assert found["recommended"] == "none"
    assert "known to lose" in found["reason"]


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
        (("60k", "--data", "digits"), "the model of digits has 50,826 parameters, and 60k"),
    ],
)
def test_what_cannot_be_tried_is_answered_in_a_sentence(
    arguments: tuple[str, ...], says: str
) -> None:
    done = fedpress(*arguments, "--link", "1", "--trial", *SHORT)
    assert isinstance(done.exception, ConfigurationError), done.output
    assert says in str(done.exception)
