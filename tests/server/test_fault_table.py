"""docs/fault-table.md names tests that are there, and every failpoint."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedpress_protocols.errors import ConfigurationError
from fedpress_server import Settings, failpoints

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "fault-table.md").read_text()
ROWS = dict(re.findall(r"^\| (\d+) \| (.*) \|$", PAGE, re.MULTILINE))


@pytest.mark.parametrize("row", [str(number) for number in range(1, 35)])
def test_every_row_names_tests_that_there_are(row: str) -> None:
    named = re.findall(r"`([^`]+\.py)::([^`]+)`", ROWS[row])
    assert named
    for file, test in named:
        tree = ast.parse((TESTS / file).read_text())
        there = {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}
        assert test in there, f"{file} has no {test}"


def test_the_faults_at_load_are_the_kept_ones() -> None:
    command = [sys.executable, "benchmarks/faults.py", "--table"]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=True)
    assert done.stdout in PAGE
    assert " 0 lost, 0 doubled" in done.stdout


def test_every_failpoint_is_told_as_it_is() -> None:
    told = dict(re.findall(r"^\| `([a-z-]+)` \| (.*) \|$", PAGE, re.MULTILINE))
    assert told == dict(failpoints.POINTS)


def test_every_failpoint_is_somewhere_in_the_server() -> None:
    sources = Path(failpoints.__file__).parent.rglob("*.py")
    reached = set(re.findall(r"failpoints\.reach\(\"([^\"]+)\"\)", "".join(map(_read, sources))))
    assert reached == set(failpoints.POINTS)


def _read(path: Path) -> str:
    return path.read_text()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("nowhere:kill", "no failpoint 'nowhere'"),
        ("committed", "is not name:action"),
        ("committed:explode", "is not name:action"),
        ("committed:kill:0", "is not name:action"),
        ("committed:kill:-1", "is not name:action"),
        ("committed:raise,nowhere:kill", "no failpoint 'nowhere'"),
    ],
)
def test_a_failpoint_that_cannot_be_is_refused(text: str, what: str) -> None:
    with pytest.raises(ConfigurationError, match=what):
        Settings.load(None, failpoint=text)


def test_a_failpoint_fails_once_at_its_pass_and_only_while_it_is_armed() -> None:
    failpoints.reach("committed")
    with failpoints.armed("committed:raise:3, file-kept:raise"):
        failpoints.reach("committed")
        failpoints.reach("committed")
        with pytest.raises(failpoints.FailpointReached, match="committed"):
            failpoints.reach("committed")
        failpoints.reach("committed")
        with pytest.raises(failpoints.FailpointReached, match="file-kept"):
            failpoints.reach("file-kept")
    for _ in range(3):
        failpoints.reach("committed")
