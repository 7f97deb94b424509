"""benchmarks/beside_the_field.py: the page has its table, and the updates are the frozen ones."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "fixtures" / "frozen"


def test_the_page_has_the_table_of_the_kept_figures() -> None:
    answer = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "beside_the_field.py", "--table"],
        env={"PYTHONPATH": os.pathsep.join(sys.path), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    lines = answer.stdout.splitlines()
    assert len(lines) == 20
    page = (ROOT / "docs" / "bench-codec.md").read_text().splitlines()
    start = page.index(lines[0])
    assert page[start : start + len(lines)] == lines, "print it anew with --table"


def test_the_updates_are_those_of_the_digests() -> None:
    rows = [line.split() for line in (FOLDER / "SHA256SUMS").read_text().splitlines()]
    assert {name for _, name in rows} == {path.name for path in FOLDER.glob("*.npz")}
    for digest, name in rows:
        assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == digest
