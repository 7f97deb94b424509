"""benchmarks/correlated_noise.py: the page has its table, and its strategies are the best ones."""

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


SETTING = (60, 12, 5)
"""Rounds, separation, participations."""


def dense(column: np.ndarray) -> np.ndarray:
    """The lower-triangular Toeplitz matrix [rounds, rounds] of a first column."""
    whole = np.zeros(SETTING[0])
    whole[: column.size] = column
    return np.asarray(linalg.toeplitz(whole, np.zeros(SETTING[0])))


def noise(column: np.ndarray) -> float:
    """Sensitivity times error of noise C^-1 z, by dense matrices; the sensitivity is the norm of
    the sum of the columns of one device that takes part as closely as it may."""
    rounds, separation, participations = SETTING
    matrix = dense(column)
    device = matrix[:, ::separation][:, :participations].sum(axis=1)
    error = np.linalg.norm(np.tri(rounds) @ linalg.inv(matrix)) / math.sqrt(rounds)
    return float(np.linalg.norm(device) * error)


def test_the_best_strategy_is_no_worse_than_any_near_it() -> None:
    own = importlib.import_module("correlated_noise")
    rounds, separation, _ = SETTING
    best = own.best_banded(separation, rounds)
    least, rng = noise(best), np.random.default_rng(3)
    for _ in range(200):
        other = best + rng.normal(0, 0.02, best.size) * (np.arange(best.size) > 0)
        assert noise(other) >= least * (1 - 1e-9)
    row, ours = own.row_of(*SETTING), own.correlated.best(separation, rounds)
    assert row.ours == pytest.approx(noise(ours.column) / least, rel=1e-8)
    assert row.independent == pytest.approx(noise(ours.column) / noise(np.ones(1)), rel=1e-8)
    column = own.buffered_column(*own.best_buffered(*SETTING), rounds)
    assert row.buffered == pytest.approx(noise(column) / least, rel=1e-9)
    assert row.buffered >= 1 - 1e-6


def test_no_buffers_near_the_best_have_less_noise_and_columns_fall() -> None:
    own = importlib.import_module("correlated_noise")
    weights, decays = own.best_buffered(*SETTING)
    column = own.buffered_column(weights, decays, SETTING[0])
    assert (np.diff(column) <= 0).all()
    assert (column > 0).all()
    least, rng = noise(column), np.random.default_rng(4)
    for _ in range(200):
        heavier = weights * np.exp(rng.normal(0, 0.03, weights.size))
        faster = decays ** np.exp(rng.normal(0, 0.03, decays.size))
        near = own.buffered_column(heavier, faster, SETTING[0])
        assert noise(near) >= least * (1 - 1e-6)


def test_more_buffers_do_not_keep_columns_from_overlapping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = importlib.import_module("correlated_noise")
    rounds, best = SETTING[0], noise(own.best_banded(SETTING[1], SETTING[0]))
    ratios = []
    for buffers in (2, 3, 5):
        monkeypatch.setattr(own, "BUFFERS", buffers)
        column = own.buffered_column(*own.best_buffered(*SETTING), rounds)
        ratios.append(noise(column) / best)
    assert min(ratios) > 1.03
    assert max(ratios) < 1.001 * min(ratios)
