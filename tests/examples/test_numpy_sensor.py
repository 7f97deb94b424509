"""The example of a device without torch: pumps learn from files, and say what is wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fedpress_client import load_trainer
from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.model import Model
from tests.examples.joining import fedpress, join
from tests.system.server_process import ServerProcess

FOLDER = Path(__file__).parents[2] / "examples" / "numpy-sensor"
WITHOUT_TORCH = (
    "-c",
    "import sys; sys.modules['torch'] = None; from fedpress.cli import app; app()",
)


@pytest.fixture
def sensor(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return __import__("sensor")


def test_two_pumps_learn_together_without_torch(
    tmp_path: Path, sensor: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(*arguments: str | Path) -> None:
        monkeypatch.setattr(sys, "argv", ["sensor.py", *map(str, arguments)])
        sensor.main()

    server = ServerProcess(tmp_path)
    server.start()
    try:
        begun, ended = tmp_path / "model.safetensors", tmp_path / "trained.safetensors"
        made("model", begun)
        fedpress("task", "create", FOLDER / "task.json", begun, url=server.url)
        pumps = {}
        for number in ("1", "2"):
            readings = tmp_path / f"pump-{number}.csv"
            made("readings", readings, "--seed", number)
            pumps[tmp_path / number] = {"SENSOR_CSV": str(readings)}
        for output in join(FOLDER, "sensor:trainer", server.url, pumps, program=WITHOUT_TORCH):
            assert "10 uploads included, 0 not, 0 pending" in output
        fedpress("task", "model", "bearings", ended, url=server.url)
    finally:
        server.stop()
    sensor.write_readings(tmp_path / "other.csv", seed=3)
    unseen = sensor.SensorTrainer(sensor.read(tmp_path / "other.csv"))
    before = unseen.evaluate(sensor.initial_model()).metrics["rmse_degrees"]
    after = unseen.evaluate(Model.from_bytes(ended.read_bytes())).metrics["rmse_degrees"]
    assert after < 0.4 * before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read"),
        ("", "must begin with the line temperature,"),
        ("{header}\n1,2,3,4,5\n", "has 1 readings; at least 5"),
        ("{header}\n" + "1,2,3,4,5\n" * 5 + "1,2,x,4,5\n", "line 7 of"),
        ("{header}\n" + "1,2,3,4,5\n" * 5 + "1,2,nan,4,5\n", "line 7 of"),
        ("{header}\n" + "1,2,3,4,5\n" * 5 + "1,2\n", "line 7 of"),
    ],
)
def test_a_wrong_file_is_named(
    sensor: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str | None,
    message: str,
) -> None:
    path = tmp_path / "pump.csv"
    if text is not None:
        path.write_text(text.replace("{header}", ",".join(sensor.COLUMNS)))
    monkeypatch.setenv("SENSOR_CSV", str(path))
    with pytest.raises(ConfigurationError, match=message):
        load_trainer("sensor:trainer", FOLDER)


def test_the_readme_shows_the_task_that_is_there() -> None:
    task = json.loads((FOLDER / "task.json").read_text())
    assert f"`{task['task']}`" in (FOLDER / "README.md").read_text()
