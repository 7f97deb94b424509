"""benchmarks/lora_on_text.py: the page has its table, and adapters keep to the claimed bytes."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import lora_on_text as benchmark

ROOT = Path(__file__).parents[2]


def times_less(name: str) -> tuple[float, float]:
    """How many times fewer bytes than float16 LoRA's a device sends and receives until the loss is
    reached, the means over three seeds."""
    measured = json.loads(benchmark.KEPT.read_text())["seeds"]
    assert len(measured) == 3
    ratios = []
    for curves in measured.values():
        target = curves[benchmark.FIRST][-1][0] + benchmark.TOLERANCE
        whole = benchmark.until(curves[benchmark.FIRST], target)
        ours = benchmark.until(curves[name], target)
        assert whole is not None
        assert ours is not None
        ratios.append((whole[1] / ours[1], whole[2] / ours[2]))
    up, down = zip(*ratios, strict=True)
    return statistics.mean(up), statistics.mean(down)


def test_the_page_has_the_table_of_the_kept_figures() -> None:
    answer = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "lora_on_text.py", "--table"],
        env={"PYTHONPATH": os.pathsep.join(sys.path), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    lines = answer.stdout.splitlines()
    assert len(lines) == 3 + len(benchmark.METHODS)
    page = (ROOT / "docs" / "adapters.md").read_text().splitlines()
    start = page.index(lines[0])
    assert page[start : start + len(lines)] == lines, "print it again with --table"


def test_both_ways_take_a_thirtieth_of_the_bytes_of_float16() -> None:
    up, down = times_less("fedpress, .25 bit both ways, epsilon .003")
    assert up >= 30
    assert down >= 30


def test_masked_adapters_take_an_eighth() -> None:
    up, _ = times_less("fedpress, masked, 25 % in 7 levels")
    assert up >= 8
