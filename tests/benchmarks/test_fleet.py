"""The fleet of simulated devices goes through a whole round of the real server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = str(Path(__file__).parents[2] / "benchmarks" / "fleet.py")


@pytest.mark.slow
def test_a_small_fleet_is_measured_once_and_its_row_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "fleet.json"
    amounts = ["--devices", "6", "--rounds", "1", "--check-ins", "8", "--json", str(file)]
    command = [sys.executable, SCRIPT, *amounts]
    first = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert first.returncode == 0, first.stderr
    before = file.read_bytes()
    (row,) = json.loads(before)["rows"]
    assert row["devices"] == 6
    assert row["empty"]["rate / bare"] > 0
    assert set(row["phases"]) == {"check-in", "download", "upload", "aggregation", "receipt"}
    again = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert again.returncode == 0, again.stderr
    assert json.loads(file.read_bytes())["rows"] == [row]
