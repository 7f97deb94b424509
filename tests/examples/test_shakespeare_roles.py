"""Devices that are roles of a play: each has what its role says, and all learn together."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.messages import TaskConfig
from fedpress_protocols.model import Model
from tests.examples.joining import fedpress, join
from tests.system.server_process import ServerProcess

torch = pytest.importorskip("torch")

FOLDER = Path(__file__).parents[2] / "examples" / "shakespeare-roles"
PLAY = "".join(
    f"{name}:\n{line * times}\n\n"
    for name, line, times in (
        ("First Citizen", "Before we proceed any further, hear me speak.\n", 8),
        ("All", "Speak, speak.\n", 2),
        ("First Citizen", "You are all resolved rather to die than to famish?\n", 1),
        ("Menenius", "What work's, my countrymen, in hand? where go you\n", 12),
    )
)


@pytest.fixture
def roles(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return __import__("roles")


def test_the_scene_has_six_roles_who_say_more_or_less(roles: ModuleType) -> None:
    scene = roles.roles(roles.SCENE)
    assert list(scene) == ["Oberon", "Titania", "Puck", "Helena", "Fairy", "Demetrius"]
    assert len(scene["Oberon"]) > 3 * len(scene["Demetrius"])
    assert scene["Puck"].startswith("How now, spirit! whither wander you?\n")
    assert scene["Puck"].endswith("Fear not, my lord, your servant shall do so.\n")
    for text in scene.values():
        assert set(text) <= set(roles.LETTERS)


def test_examples_follow_one_another_and_the_next_letter_is_the_target(roles: ModuleType) -> None:
    text = roles.roles(roles.SCENE)["Fairy"]
    rows = roles.pieces(text)
    assert rows.shape[1] == roles.LENGTH + 1
    assert (rows[1:, 0] == rows[:-1, -1]).all()
    spelt = "".join(roles.LETTERS[code] for code in rows[:, :-1].flatten())
    assert spelt == text[: len(spelt)]
    assert len(text) - len(spelt) <= roles.LENGTH


def test_another_play_has_roles_of_its_own(
    roles: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play = tmp_path / "play.txt"
    play.write_text(PLAY)
    own = roles.roles(play)
    assert list(own) == ["Menenius", "First Citizen"]  # the others say too little
    assert own["First Citizen"].endswith("rather to die than to famish?\n")
    monkeypatch.setenv("PLAYS", str(play))
    monkeypatch.setenv("DEVICE", "1")
    assert roles.trainer().evaluate(roles.device(0, 2).initial_model()).num_examples == 2
    for number, message in (("2", "device 2 has no role"), ("x", "DEVICE is 'x'")):
        monkeypatch.setenv("DEVICE", number)
        with pytest.raises(ConfigurationError, match=message):
            roles.trainer()


def test_a_text_without_roles_is_named(roles: ModuleType, tmp_path: Path) -> None:
    play = tmp_path / "prose.txt"
    play.write_text("It was the best of times.\n" * 100)
    with pytest.raises(ConfigurationError, match=r"prose\.txt has no role"):
        roles.roles(play)
    with pytest.raises(ConfigurationError, match=r"cannot read .*none\.txt"):
        roles.roles(tmp_path / "none.txt")


def test_both_tasks_differ_in_compression_alone(roles: ModuleType) -> None:
    model = roles.device(0, 6).initial_model()
    ours, plain = (
        TaskConfig.model_validate(
            {**json.loads((FOLDER / name).read_text()), "model": model.digest}
        )
        for name in ("task.json", "float32.json")
    )
    for each in ("rounds", "training", "cohort", "evaluation"):
        assert getattr(ours, each) == getattr(plain, each)
    assert f"`{ours.task}`" in (FOLDER / "README.md").read_text()


@pytest.mark.slow
def test_two_roles_learn_together(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path)
    server.start()
    try:
        begun, ended = tmp_path / "model.safetensors", tmp_path / "trained.safetensors"
        subprocess.run([sys.executable, "roles.py", str(begun)], cwd=FOLDER, check=True)
        task = json.loads((FOLDER / "task.json").read_text())
        task |= {"rounds": 2, "cohort": {"size": 2, "minimum": 2}}
        (tmp_path / "task.json").write_text(json.dumps(task))
        fedpress("task", "create", tmp_path / "task.json", begun, url=server.url)
        devices = {tmp_path / number: {"DEVICE": number} for number in ("0", "5")}
        for printed in join(FOLDER, "roles:trainer", server.url, devices):
            assert "2 uploads included, 0 not, 0 pending" in printed
        fedpress("task", "model", "roles", ended, url=server.url)
    finally:
        server.stop()
    assert (
        Model.from_bytes(ended.read_bytes()).digest != Model.from_bytes(begun.read_bytes()).digest
    )
