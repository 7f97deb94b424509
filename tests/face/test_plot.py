"""`fedpress plot`: histories of every kind, and files that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fedpress.cli.commands import app
from fedpress.plotting import Point, runs_in
from fedpress_protocols.errors import ConfigurationError

pytest.importorskip("matplotlib")


def attempt(number: int, attempt: int = 1, **metrics: float) -> dict[str, Any]:
    return {
        "task": "keyboard",
        "round": number,
        "attempt": attempt,
        "upload_bytes": 10,
        "download_bytes": 90,
        "metrics": metrics,
    }


def row(number: int, accuracy: float) -> dict[str, Any]:
    return {
        "round": number, "up_bytes": 300, "down_bytes": 700, "train": {"loss": 2.0 / number},
        "evaluation": {"accuracy": 0.0}, "test": {"accuracy": accuracy},
    }  # fmt: skip


SIMULATED = {"name": "auto", "history": [row(1, 0.5), row(2, 0.7)]}
DEMO = {
    "tasks": {
        name: {"rounds": [{"round": 1, "accuracy": 0.9, "upload_bytes": up, "download_bytes": 1}]}
        for name, up in (("float32", 1000), ("compressed", 10))
    }
}


def written(path: Path, document: Any) -> Path:
    path.write_text(json.dumps(document))
    return path


def test_each_kind_of_history_is_read(tmp_path: Path) -> None:
    # The newest first, as the command lists them; bytes of attempts that came to nothing count.
    attempts = [attempt(2, accuracy=0.6), attempt(1, 2, accuracy=0.4), attempt(1)]
    (run,) = runs_in(written(tmp_path / "rounds.json", attempts), "accuracy")
    assert run == ("keyboard", [Point(1, 200, 0.4), Point(2, 300, 0.6)])
    (run,) = runs_in(written(tmp_path / "history.json", SIMULATED), "accuracy")
    assert run == ("auto", [Point(1, 1000, 0.5), Point(2, 2000, 0.7)])
    (run,) = runs_in(tmp_path / "history.json", "loss")
    assert [point.value for point in run.points] == [2.0, 1.0]
    sweep = runs_in(written(tmp_path / "sweep.json", [SIMULATED, SIMULATED]), "accuracy")
    assert [run.name for run in sweep] == ["auto", "auto"]
    demo = runs_in(written(tmp_path / "demo.json", DEMO), "accuracy")
    assert demo == [("float32", [Point(1, 1001, 0.9)]), ("compressed", [Point(1, 11, 0.9)])]


def test_several_runs_are_drawn_with_their_names(tmp_path: Path) -> None:
    files = [
        written(tmp_path / "one.json", SIMULATED),
        written(tmp_path / "two.json", SIMULATED),
        written(tmp_path / "three.json", DEMO),
    ]
    out = tmp_path / "plots" / "runs.svg"
    result = CliRunner().invoke(app, ["plot", *map(str, files), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "auto 1: accuracy 0.7 after round 2, 2,000 bytes up and down" in result.output
    text = out.read_text()
    for words in (">auto 1<", ">auto 2<", ">float32<", ">compressed<", ">accuracy<", ">round<"):
        assert words in text
    assert "log scale" in text
    png = tmp_path / "runs.png"
    assert CliRunner().invoke(app, ["plot", str(files[0]), "--out", str(png)]).exit_code == 0
    assert png.read_bytes().startswith(b"\x89PNG")


def test_runs_of_one_name_are_called_by_their_folders(tmp_path: Path) -> None:
    files = []
    for folder in ("compressed", "float32", "again/float32"):
        (tmp_path / folder).mkdir(parents=True)
        files.append(str(written(tmp_path / folder / "history.json", SIMULATED)))
    out = ["--out", str(tmp_path / "plot.svg")]
    two = CliRunner().invoke(app, ["plot", *files[:2], *out])
    assert [line.partition(":")[0] for line in two.output.splitlines()] == [
        "compressed", "float32", "plot",
    ]  # fmt: skip
    three = CliRunner().invoke(app, ["plot", *files, *out])
    assert [line.partition(":")[0] for line in three.output.splitlines()] == [
        "compressed", "auto 2", "auto 3", "plot",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    ["", "{", "7", "null", "{}", '"x"', "[7]", '[{"round": 1}]', '{"history": [{"round": 1}]}',
     '{"tasks": {"a": {}}}', '{"history": 3, "name": "x"}'],
)  # fmt: skip
def test_a_file_that_is_no_history_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=r"wrong\.json is no history of rounds"):
        runs_in(path, "accuracy")


def test_what_is_not_there_is_named_with_what_is(tmp_path: Path) -> None:
    path = written(tmp_path / "history.json", SIMULATED)
    with pytest.raises(ConfigurationError, match="no round with 'speed'") as caught:
        runs_in(path, "speed")
    assert "accuracy, loss" in (caught.value.hint or "")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        runs_in(tmp_path / "none.json", "accuracy")
    with pytest.raises(ConfigurationError, match="no round with"):
        runs_in(written(tmp_path / "empty.json", []), "accuracy")
    result = CliRunner().invoke(app, ["plot", str(path), "--out", "plot.gif"])
    assert isinstance(result.exception, ConfigurationError)
    assert "no known format" in str(result.exception)
