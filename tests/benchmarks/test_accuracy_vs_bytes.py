"""benchmarks/accuracy_vs_bytes.py: the page has its table, and it runs; no figure is held to
anything."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from tests.benchmarks.scripts import printed

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "accuracy_vs_bytes.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("--table",),
        ("--table", "--work"),
        ("--table", "--links"),
        ("--table", "--tuned"),
        ("--table", "--tuned", "--held-out"),
        ("--table", "--longer", "--tasks", "digits,shakespeare,dna,austen"),
        ("--table", "--rates", "--held-out"),
    ],
)
def test_the_page_has_the_table_of_the_kept_runs(
    options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # which it sets
    monkeypatch.setattr(sys, "argv", [SCRIPT.name, *options])
    importlib.import_module(SCRIPT.stem).main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 4
    page = (ROOT / "docs" / "bench-auto.md").read_text().splitlines()
    tables = [page[at : at + len(lines)] for at, line in enumerate(page) if line == lines[0]]
    assert lines in tables, "print it again with --table"


@pytest.mark.slow
def test_a_quick_run_measures_the_default_beside_float32() -> None:
    lines = printed(SCRIPT, "--quick")
    assert [line.split()[:2] for line in lines[:2]] == [["digits", "auto"], ["digits", "fedavg"]]
    assert lines[-1].startswith("| digits | newest | 1 |")


@pytest.mark.slow
def test_a_small_cohort_with_other_momentum_has_a_table_of_its_own(tmp_path: Path) -> None:
    recipes = "tuned fedavg;tuned auto, momentum .5"
    task = ["--tasks", "digits", "--seeds", "0", "--rounds", "2", "--cohort", "2", "--clients", "3"]
    lines = printed(SCRIPT, *task, "--recipes", recipes, "--momentum", "--store", str(tmp_path))
    *_, head, _, row = lines
    assert head.split(" | ")[1:3] == ["fedavg", "auto, momentum .8"]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[0] == "digits"
    assert [bool(cell) for cell in cells[1:]] == [True, False, True, False]
    assert len(list(tmp_path.iterdir())) == 2
