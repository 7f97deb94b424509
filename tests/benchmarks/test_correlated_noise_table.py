"""benchmarks/correlated_noise.py: the page has its table, and its best strategy is one."""

from __future__ import annotations

import importlib
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("scipy")

from scipy import linalg

ROOT = Path(__file__).parents[2]
NUMBER = re.compile(r"\d+\.\d+")


def test_the_page_has_the_rows_that_the_command_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["correlated_noise.py", "--quick"])
    importlib.import_module("correlated_noise").main()
    lines = capsys.readouterr().out.splitlines()
    page = (ROOT / "docs" / "privacy.md").read_text().splitlines()
    start = page.index(lines[0])
    for printed, stored in zip(lines[2:], page[start + 2 :], strict=False):
        assert NUMBER.sub("", printed) == NUMBER.sub("", stored)
        for one, other in zip(NUMBER.findall(printed), NUMBER.findall(stored), strict=True):
            assert float(one) == pytest.approx(float(other), abs=0.0015), "print it anew"


def test_the_best_strategy_is_no_worse_than_any_near_it() -> None:
    """By dense matrices, and no other computation of its own: noise C^-1 z, and the norm of the
    columns of one device, which have no row in common."""
    own = importlib.import_module("correlated_noise")
    rounds, separation, participations = 60, 12, 5

    def noise(column: np.ndarray) -> float:
        whole = np.zeros(rounds)
        whole[: column.size] = column
        matrix = linalg.toeplitz(whole, np.zeros(rounds))
        device = matrix[:, ::separation][:, :participations].sum(axis=1)
        error = np.linalg.norm(np.tri(rounds) @ linalg.inv(matrix)) / math.sqrt(rounds)
        return float(np.linalg.norm(device) * error)

    best = own.best_banded(separation, rounds)
    least, rng = noise(best), np.random.default_rng(3)
    for _ in range(200):
        other = best + rng.normal(0, 0.02, best.size) * (np.arange(best.size) > 0)
        assert noise(other) >= least * (1 - 1e-9)
    row = own.row_of(rounds, separation, participations)
    dense = np.zeros(rounds)
    own_terms = own.correlated.coefficients(row.bands)
    dense[: row.bands] = own_terms
    noising = linalg.toeplitz(dense, np.zeros(rounds))
    inverse = linalg.inv(noising)
    device = inverse[:, ::separation][:, :participations].sum(axis=1)
    ours = np.linalg.norm(device) * np.linalg.norm(np.tri(rounds) @ noising) / math.sqrt(rounds)
    assert row.ours == pytest.approx(ours / least, rel=0.02)
    assert row.ours >= ours / least * (1 - 1e-9), "what is claimed holds for tasks of any length"
