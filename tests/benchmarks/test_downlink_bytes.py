"""The benchmark of the downlink runs, and what it prints keeps the promise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_models_go_down_in_a_tenth_to_those_who_follow_and_in_half_to_others() -> None:
    script = ROOT / "benchmarks" / "downlink_bytes.py"
    answer = subprocess.run(
        [sys.executable, script, "--rounds", "9", "--seeds", "1", "--only", "bits"],
        env={"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    rows = re.findall(r"^(steps, rate 0.5, \d+ bits) (.*)$", answer.stdout, re.MULTILINE)
    assert len(rows) == 4, answer.stdout
    for _, cells in rows:
        _, _, previous, *_, whole, _, fleet = map(float, cells.replace(",", "").split())
        assert 0 < previous <= 10
        assert previous < fleet <= whole <= 50
