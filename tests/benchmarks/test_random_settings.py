"""benchmarks/random_settings.py: a setting runs, and the page has the table of the kept runs."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from tests.benchmarks.scripts import printed

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "random_settings.py"
DIGITS = 10
"""The first setting whose data, the digits, come with scikit-learn."""


@pytest.mark.slow
def test_the_page_has_the_tables_of_the_kept_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # which it sets
    page = (ROOT / "docs" / "bench-auto.md").read_text()
    for settings in ("0:78", "78:103", "103:118", "1000:1024"):
        monkeypatch.setattr(sys, "argv", [SCRIPT.name, "--table", "--settings", settings])
        importlib.import_module(SCRIPT.stem).main()
        for table in capsys.readouterr().out.strip().split("\n\n"):
            assert table in page, f"print it again with --table --settings {settings}"


@pytest.mark.slow
def test_a_setting_runs_once_and_is_kept(tmp_path: Path) -> None:
    options = ["--settings", f"{DIGITS}:{DIGITS + 1}", "--store", str(tmp_path / "kept.jsonl")]
    lines = printed(SCRIPT, *options)
    assert lines[0].split()[:4] == [str(DIGITS), "digits", "momentum", "3"]
    assert any(line.startswith("| all | 1 |") for line in lines)
    assert printed(SCRIPT, *options) == lines[1:]
