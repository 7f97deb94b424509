"""The options and the report that all benchmarks share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import parser, report, seed_list, shuffled_medians


def test_json_goes_to_a_file_beside_the_text_or_alone_to_the_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    report("a table", {"rows": [1]}, file)
    assert capsys.readouterr().out == "a table\n"
    assert json.loads(file.read_text()) == {"rows": [1]}
    report("a table", {"rows": [1]}, Path("-"))
    assert json.loads(capsys.readouterr().out) == {"rows": [1]}


def test_a_quick_run_takes_one_seed() -> None:
    command = parser("A title.\n\nMore.", quick="little", seeds="0,1,2")
    assert command.description == "A title."
    assert seed_list(command.parse_args(["--seeds", "3,4"])) == [3, 4]
    assert seed_list(command.parse_args(["--quick"])) == [0]


def test_every_case_is_timed_after_a_warm_up() -> None:
    calls = {"one": 0, "two": 0}

    def case(name: str) -> None:
        calls[name] += 1

    medians = shuffled_medians({"one": lambda: case("one"), "two": lambda: case("two")}, 3)
    assert set(medians) == {"one", "two"}
    assert calls == {"one": 5, "two": 5}
