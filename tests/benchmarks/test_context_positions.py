"""The benchmark of contexts runs; within a few rounds they take a fifth off whole uploads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_contexts_take_a_fifth_off_sparse_ternary_uploads() -> None:
    script = ROOT / "benchmarks" / "context_positions.py"
    answer = subprocess.run(
        [sys.executable, script, "--rounds", "12"],
        env={"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    sizes = dict(re.findall(r"^(\S.*?)  +([\d.]+) bytes", answer.stdout, re.MULTILINE))
    assert len(sizes) == 5, answer.stdout
    previous = float(sizes["range coder, contexts: previous"])
    assert previous <= 0.8 * float(sizes["static codes"])
    assert previous < float(sizes["range coder, contexts: drift"]) < float(sizes["range coder"])
    activity = float(sizes["range coder, contexts: activity"])
    assert activity <= 0.8 * float(sizes["static codes"])
    of_map = re.search(r"the map of activity ([\d.]+) on", answer.stdout)
    assert of_map is not None
    assert 0 < float(of_map[1]) < 50826 / 8
