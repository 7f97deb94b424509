"""What the compose files' demo starts is valid and learns, so that it does not rot unseen."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from fedpress_client import TrainingRequest
from fedpress_protocols.messages import TaskConfig

FOLDER = Path(__file__).parents[2] / "examples" / "compose"


@pytest.fixture(scope="module")
def digits() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compose_digits", FOLDER / "digits.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_its_task_is_one_a_server_takes_and_its_trainer_learns(digits: ModuleType) -> None:
    model = digits.initial_model()
    fields = json.loads((FOLDER / "task.json").read_text())
    task = TaskConfig.model_validate({**fields, "model": model.digest}, strict=False)
    task.profiles[0].compressor.layout(model.spec)

    trainer = digits.trainer()
    before = trainer.evaluate(model).metrics["accuracy"]
    for number in range(1, 6):
        work = TrainingRequest(task.task, number, 1, task.training, seed=number)
        model = model.with_parameters(trainer.train(model, work).parameters)
    assert trainer.evaluate(model).metrics["accuracy"] > max(0.8, before)
