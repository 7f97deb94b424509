"""`fedpress simulate` with trainers that fail or return what they should not."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

pytest.importorskip("flwr")
pytest.importorskip("sklearn")

from fedpress.simulate.history import History
from fedpress.simulate.run import Settings, run, simulate
from fedpress.simulate.screen import print_summary
from fedpress_client.trainer import Evaluation, Trained
from fedpress_protocols.errors import ConfigurationError, FedpressError, InvalidUpdate
from fedpress_protocols.model import Model
from tests.flower.test_simulate import QUICK
from tests.flower.test_simulated_tasks import of_file

HERE = "tests.flower.test_wrong_trainers"
ONES = {"weight": np.ones((8, 3), np.float32), "bias": np.zeros(3, np.float32)}


class Good:
    """Adds 1 to each value; measures 0.5 or what a subclass does."""

    def __init__(self, index: int, clients: int) -> None:
        self.index = index

    def initial_model(self) -> Model:
        return Model.from_tensors(ONES)

    def train(self, model: Model, work: Any) -> Any:
        return Trained(model.parameters + 1, 10)

    def evaluate(self, model: Model) -> Any:
        return Evaluation(10, {"accuracy": 0.5})


class Flaky(Good):
    def train(self, model: Model, work: Any) -> Any:
        if work.round == 1:
            raise ValueError("disk full")
        return super().train(model, work)


class Diverging(Good):
    def train(self, model: Model, work: Any) -> Any:
        return Trained(np.full_like(model.parameters, np.nan), 10)


class Named(Good):
    def train(self, model: Model, work: Any) -> Any:
        return Trained(model.tensors(), 10)  # type: ignore[arg-type]


class Absent(Good):
    def train(self, model: Model, work: Any) -> Any:
        return None


class Halves(Good):
    num_examples: Any = 2.5

    def train(self, model: Model, work: Any) -> Any:
        return replace(super().train(model, work), num_examples=self.num_examples)


class Countless(Halves):
    num_examples = 10**30


class Wordy(Good):
    def train(self, model: Model, work: Any) -> Any:
        return replace(super().train(model, work), metrics={"loss": "low"})


class Unnamed(Good):
    def evaluate(self, model: Model) -> Any:
        return {"accuracy": 1.0}


class HalfMeasured(Good):
    """Of whose clients the first cannot measure."""

    def evaluate(self, model: Model) -> Any:
        if not self.index:
            raise ValueError("no data to measure on")
        return super().evaluate(model)


class Infinite(Good):
    def evaluate(self, model: Model) -> Any:
        return Evaluation(10, {"accuracy": math.nan, "loss": 2.0 if self.index else math.inf})


def simulated(app: str, folder: Path, **changes: Any) -> History:
    asked = {**QUICK, "engine": "local", "rounds": 2, "app": f"{HERE}:{app}", **changes}
    return simulate(Settings(**asked), folder)


def summary(history: History, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    print_summary(Console(width=200), [history], folder)
    return capsys.readouterr().out


def test_a_cohort_that_fails_is_one_round_and_each_client_one_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = simulated("Flaky", tmp_path, clients=6, fraction=0.5, rounds=3)
    assert [row.round for row in history.rows] == [1, 2, 3]
    assert [(row.asked, row.answered, len(row.failed)) for row in history.rows] == [
        (3, 0, 3), (3, 3, 0), (3, 3, 0)
    ]  # fmt: skip
    assert history.failures() == {"ValueError: disk full": 3}
    assert "simulation: 3 failed: ValueError: disk full\n" in summary(history, tmp_path, capsys)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_rounds_that_fail_to_the_last_keep_their_number_and_their_test(tmp_path: Path) -> None:
    asked = Settings(**{**QUICK, "engine": "local", "rounds": 2, "learning_rate": 1e30})
    history = simulate(asked, tmp_path)
    assert [row.round for row in history.rows] == [1, 2]
    assert [len(row.failed) for row in history.rows] == [4, 4]
    assert all(row.test for row in history.rows)
    (reason,) = history.failures()
    assert reason.endswith("holds NaN or infinity (training diverged: lower the learning rate)")


WRONG = [
    ("Named", "parameters that are a dict, not an array of real numbers"),
    ("Absent", "train returned a NoneType, not a Trained"),
    ("Halves", "num_examples must be a whole number from 1 to 4294967295, not 2.5"),
    ("Countless", "num_examples must be a whole number from 1 to 4294967295, not 1000000"),
    ("Wordy", "'loss' of the metrics is 'low', not a number"),
]


@pytest.mark.parametrize(("app", "reason"), [*WRONG, ("Diverging", "the update holds NaN")])
def test_a_wrong_result_has_the_same_reason_in_a_simulation_and_on_a_device(
    app: str, reason: str, tmp_path: Path
) -> None:
    history = simulated(app, tmp_path / "plain", rounds=1)
    (found,) = history.failures()
    kind = InvalidUpdate if app == "Diverging" else ConfigurationError
    assert found.startswith(f"{kind.__name__}: ")
    assert reason in found
    asked = Settings(clients=4, task=of_file(tmp_path / "task"), app=f"{HERE}:{app}")
    with pytest.raises(kind) as error:
        simulate(asked, tmp_path / "device")
    assert str(error.value) == found.removeprefix(f"{kind.__name__}: ")


def test_an_evaluation_of_another_kind_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = simulated("Unnamed", tmp_path)
    shown = summary(history, tmp_path, capsys)
    assert "8 evaluations failed: ConfigurationError: evaluate returned a dict, not an" in shown
    document = json.loads((tmp_path / "history.json").read_text())
    assert len(document["history"][0]["evaluation_failed"]) == 4


def test_evaluations_that_fail_are_counted_once_and_the_others_have_a_mean(tmp_path: Path) -> None:
    history = simulated("HalfMeasured", tmp_path)
    assert history.evaluation_failures() == {"ValueError: no data to measure on": 2}
    assert [row.accuracy for row in history.rows] == [0.5, 0.5]


def test_metrics_that_are_not_finite_are_left_out_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = simulated("Infinite", tmp_path)
    assert [row.evaluation for row in history.rows] == [{"loss": 2.0}] * 2
    shown = summary(history, tmp_path, capsys)
    assert "simulation: not finite, left out: accuracy, loss\n" in shown
    assert "nan" not in shown
    assert "NaN" not in (tmp_path / "history.json").read_text()


def test_an_exceeded_budget_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = Settings(**{**QUICK, "engine": "local"}, compressor="auto:upload_bytes=1000")
    (history,) = run(asked, tmp_path, Console(width=200))
    spent = history.summary()["upload_bytes"] / 1e3
    line = f"simulation: upload_bytes exceeded: {spent:,.1f} kB of 1.0 kB\n"
    assert line in capsys.readouterr().out
    policies = [{"id": "auto", "upload_bytes": 10**9}]
    task = of_file(tmp_path / "task", policies=policies, profiles=None)
    enough = simulate(Settings(clients=4, task=task), tmp_path / "out")
    assert enough.budget == 10**9
    assert "upload_bytes" not in summary(enough, tmp_path, capsys)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"weight": np.ones(5)}, "has 27 parameters, and "),
        ({**ONES, "weight": np.ones((3, 8))}, "tensor 'weight' is of shape (8, 3) in the model of"),
        ({"w": ONES["weight"], "bias": ONES["bias"]}, "missing in "),
    ],
)
def test_a_model_of_other_tensors_than_the_trainers_is_refused(
    tensors: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "other.safetensors"
    floats = {name: values.astype(np.float32) for name, values in tensors.items()}
    path.write_bytes(Model.from_tensors(floats).to_bytes())
    asked = Settings(
        clients=4, task=of_file(tmp_path / "task"), app=f"{HERE}:Good", model=str(path)
    )
    with pytest.raises(ConfigurationError) as error:
        simulate(asked, tmp_path / "out")
    assert said in error.value.detail
    assert str(path) in error.value.detail
    assert "leave --model out" in error.value.hint


def test_a_model_of_the_trainers_tensors_begins_the_task(tmp_path: Path) -> None:
    path = tmp_path / "own.safetensors"
    path.write_bytes(Model.from_tensors(ONES).to_bytes())
    asked = Settings(
        clients=4, task=of_file(tmp_path / "task"), app=f"{HERE}:Good", model=str(path)
    )
    history = simulate(asked, tmp_path / "out")
    assert [row.included for row in history.rows] == [4, 4, 4]
    other = replace(asked, app=None)
    with pytest.raises(FedpressError, match="the model of digits has"):
        simulate(other, tmp_path / "other")
