"""Stations on batteries: one waits for its battery, and both learn."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from fedpress import Model
from fedpress.conditions import Hours, Refusal
from fedpress_protocols.messages import TaskConfig
from tests.system.server_process import ADMIN_TOKEN, ServerProcess

FOLDER = Path(__file__).parents[2] / "examples" / "edge-battery"
PATIENCE = 120.0
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; import station; station.main()"

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads batteries as Linux shows them"
)


@pytest.fixture
def station(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return __import__("station")


def command(*arguments: object, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=FOLDER,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Station:
    """A station's process, whose lines are read as they come."""

    def __init__(self, folder: Path, number: int, url: str, token: str) -> None:
        arguments = ["run", url, "--number", number, "--state-dir", folder / f"state-{number}"]
        arguments += ["--power", folder / f"power-{number}", "--ask-again", 0.2]
        self.process = subprocess.Popen(
            [sys.executable, "-c", WITHOUT_TORCH, *map(str, arguments)],
            cwd=FOLDER,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(FOLDER), *sys.path]),
                "FEDPRESS_TOKEN": token,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._refused = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self.lines.append(line.rstrip())
                if line.startswith("not now: the battery"):
                    self._refused.set()

    def await_refusal(self) -> None:
        assert self._refused.wait(PATIENCE), self.lines

    def ended_reading(self) -> None:
        self._reader.join()

    def ended(self) -> str:
        assert self.process.wait(PATIENCE) == 0, self.lines
        self.ended_reading()
        return "\n".join(self.lines)


@contextmanager
def fleet(folder: Path, url: str, token: str) -> Iterator[list[Station]]:
    stations = [Station(folder, number, url, token) for number in (1, 2)]
    try:
        yield stations
    finally:
        for each in stations:
            each.process.kill()
            each.process.wait()
            each.ended_reading()


@pytest.mark.slow
def test_a_station_waits_for_its_battery_and_then_both_learn(
    tmp_path: Path, station: ModuleType
) -> None:
    server = ServerProcess(tmp_path)
    server.start()
    try:
        access = {"FEDPRESS_URL": server.url, "FEDPRESS_ADMIN_TOKEN": ADMIN_TOKEN}
        begun, trained = tmp_path / "model.safetensors", tmp_path / "trained.safetensors"
        command("station.py", "model", begun)
        command("-m", "fedpress", "task", "create", "task.json", begun, **access)
        create = ("-m", "fedpress", "devices", "token", "create", "--uses", "2")
        token = command(*create, **access).strip()
        command("station.py", "battery", tmp_path / "power-1", "--percent", 80)
        command("station.py", "battery", tmp_path / "power-2", "--percent", 12)
        with fleet(tmp_path, server.url, token) as (charged, empty):
            empty.await_refusal()
            assert not any("assigned" in line for line in empty.lines)
            command("station.py", "battery", tmp_path / "power-2", "--percent", 70)
            shown = [charged.ended(), empty.ended()]
        command("-m", "fedpress", "task", "model", "weather", trained, **access)
    finally:
        server.stop()
    for output in shown:
        assert "8 updates included; tomorrow is of class" in output
        sizes = [int(each) for each in re.findall(r": (\d+) bytes to upload", output)]
        assert len(sizes) == 8
        assert max(sizes) < 100, "README says some 60 bytes"
    model = Model.from_bytes(trained.read_bytes())
    unseen = station.StationTrainer(*station.readings(9))
    before = unseen.evaluate(station.initial_model()).metrics["accuracy"]
    assert unseen.evaluate(model).metrics["accuracy"] > max(before + 0.2, 0.6)


@pytest.mark.slow
def test_stations_refuse_and_train_in_turns_and_a_picture_shows_it(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    command("day.py", "run", tmp_path / "day", OMP_NUM_THREADS="1")
    document = json.loads((tmp_path / "day" / "history.json").read_text())
    assert [each["round"] for each in document["rounds"]] == list(range(1, 9))
    stations = document["stations"]
    assert sum(len(each["updates"]) for each in stations) >= 2 * 8
    reasons = [{reason.split(" ")[1] for _, reason in each["refusals"]} for each in stations]
    assert "battery" in reasons[1]
    command("day.py", "draw", tmp_path / "day", tmp_path / "result.svg")
    picture = (tmp_path / "result.svg").read_text()
    for words in ("station 3, %", "metered link", "refuses", "trains, round"):
        assert words in picture


def test_a_made_up_link_is_read_as_a_real_one(tmp_path: Path, station: ModuleType) -> None:
    for interface, is_metered in (("eth0", False), ("ppp0", True)):
        station.write_route(tmp_path, interface)
        *_, link = station.conditions(tmp_path, 5.0, [], tmp_path)
        assert isinstance(link(), Refusal) == is_metered


def test_its_task_is_one_that_a_server_takes(station: ModuleType) -> None:
    model = station.initial_model()
    text = (FOLDER / "task.json").read_text()
    fields = {**json.loads(text), "model": model.digest}
    task = TaskConfig.model_validate(fields, strict=False)
    assert task.profiles[0].compressor.layout(model.spec)
    assert f"{4 * model.spec.size:,}" in (FOLDER / "README.md").read_text()


def test_the_conditions_are_asked_in_their_order(tmp_path: Path, station: ModuleType) -> None:
    station.write_battery(tmp_path, 39)
    hours, battery, _ = station.conditions(tmp_path, 5.0, ["03:00-03:01"])
    assert isinstance(hours, Hours)
    assert isinstance(battery(), Refusal)
    station.write_battery(tmp_path, 41)
    assert battery() is True
