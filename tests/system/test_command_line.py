"""A task from the README's steps alone: serve, task create, token create, join, model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedpress_protocols.model import Model
from tests.system.server_process import ADMIN_TOKEN, ServerProcess

EXAMPLES = Path(__file__).parents[2] / "client_sdk" / "examples"
sys.path.insert(0, str(EXAMPLES))
from numpy_softmax import initial_model  # noqa: E402


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path)
    process.start()
    yield process
    assert process.stop() == 0


class Shell:
    """Runs `fedpress` as an operator's or a device's shell would."""

    def __init__(self, server: ServerProcess, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "FEDPRESS_URL": server.url,
            "FEDPRESS_ADMIN_TOKEN": ADMIN_TOKEN,
        }

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "fedpress", *arguments],
            cwd=EXAMPLES,
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, **environment: str) -> tuple[int, str, str]:
        process = self.start(*arguments, **environment)
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err


def write_task(folder: Path, rounds: int, size: int) -> list[str]:
    """The two files that `fedpress task create` takes."""
    config = {
        "task": "clouds",
        "rounds": rounds,
        "profiles": [
            {
                "name": "device",
                "compressor": {"id": "error_feedback", "inner": {"id": "quantize", "bits": 4}},
            }
        ],
        "cohort": {"size": size, "minimum": size},
    }
    (folder / "task.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(initial_model().to_bytes())
    return [str(folder / "task.json"), str(folder / "model.safetensors")]


def join(shell: Shell, url: str, index: int, token: str = "") -> subprocess.Popen[str]:
    state = str(shell.folder / f"device-{index}")
    arguments = ["client", "join", url, "--app", "numpy_softmax:make_trainer", "--state-dir", state]
    return shell.start(*arguments, **({"FEDPRESS_TOKEN": token} if token else {}))


@pytest.mark.slow
def test_a_task_from_the_command_line_alone(server: ServerProcess, tmp_path: Path) -> None:
    shell = Shell(server, tmp_path)
    code, out, err = shell.run("task", "create", *write_task(tmp_path, rounds=4, size=2), "--json")
    assert code == 0, err
    assert json.loads(out)["state"] == "running"
    code, token, err = shell.run(
        "devices", "token", "create", "--uses", "2", "--note", "two devices"
    )
    assert code == 0, err
    devices = [join(shell, server.url, index, token.strip()) for index in range(2)]
    for device in devices:
        out, err = device.communicate(timeout=120)
        assert device.returncode == 0, err
        assert "task clouds finished: 4 uploads included, 0 not, 0 pending" in out
        assert "round 1.1" in err
        assert "HTTP Request" not in err, "each request is logged with --verbose only"
    assert shell.run("task", "list")[1].splitlines()[1].split()[:3] == ["clouds", "finished", "4/4"]
    listed = json.loads(shell.run("round", "list", "clouds", "--json")[1])
    assert [each["round"] for each in listed] == [4, 3, 2, 1]
    assert {each["state"] for each in listed} == {"committed"}
    saved = tmp_path / "out.safetensors"
    code, out, err = shell.run("task", "model", "clouds", str(saved))
    assert code == 0, err
    assert Model.from_bytes(saved.read_bytes()).digest in out


@pytest.mark.slow
def test_a_device_that_is_stopped_goes_on_from_there(server: ServerProcess, tmp_path: Path) -> None:
    shell = Shell(server, tmp_path)
    shell.run("task", "create", *write_task(tmp_path, rounds=2, size=2))
    token = shell.run("devices", "token", "create", "--uses", "2")[1].strip()
    alone = join(shell, server.url, 0, token)
    with server.operator() as operator:
        give_up = time.monotonic() + 60
        while not operator.rounds("clouds")[0].received and time.monotonic() < give_up:
            time.sleep(0.05)
    alone.send_signal(signal.SIGTERM)
    _, err = alone.communicate(timeout=30)
    assert alone.returncode == 130, err
    assert "stopped; run the same command to resume" in err
    again = [join(shell, server.url, 0), join(shell, server.url, 1, token)]
    for device in again:
        out, err = device.communicate(timeout=120)
        assert device.returncode == 0, err
        assert "2 uploads included, 0 not, 0 pending" in out


@pytest.mark.slow
def test_wrong_input_is_refused_with_a_sentence(server: ServerProcess, tmp_path: Path) -> None:
    shell = Shell(server, tmp_path)
    device = join(shell, server.url, 0, "no such token")
    _, err = device.communicate(timeout=60)
    assert device.returncode == 4
    assert "ask the operator for a new token" in err
    code, _, err = shell.run("task", "list", FEDPRESS_ADMIN_TOKEN="a token of nobody at all")
    assert code == 4
    assert "token" in err
    config, model = write_task(tmp_path, rounds=0, size=2)
    code, _, err = shell.run("task", "create", config, model)
    assert code == 2
    assert "rounds: must be 1 or more, not 0" in err
    rest = write_task(tmp_path, rounds=2, size=2)
    assert shell.run("task", "create", *rest)[0] == 0
    code, _, err = shell.run("task", "continue", "clouds", "--rounds", "9" * 20)
    assert (code, err.splitlines()) == (
        2,
        [
            f"fedpress: rounds: must be less than 1073741824, not {'9' * 20}",
            "  see `fedpress explain configuration`",
        ],
    )
    code, _, err = shell.run("task", "create", config, config)
    assert code == 2
    assert "not a safetensors model" in err
    assert "Traceback" not in err
