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
    rounds, separation, participations = SETTING
    best = own.best_banded(separation, rounds)
    least, rng = noise(best), np.random.default_rng(3)
    for _ in range(200):
        other = best + rng.normal(0, 0.02, best.size) * (np.arange(best.size) > 0)
        assert noise(other) >= least * (1 - 1e-9)
    row = own.row_of(*SETTING)
    noising = dense(own.correlated.coefficients(row.bands))
    device = linalg.inv(noising)[:, ::separation][:, :participations].sum(axis=1)
    ours = np.linalg.norm(device) * np.linalg.norm(np.tri(rounds) @ noising) / math.sqrt(rounds)
    assert row.ours == pytest.approx(ours / least, rel=0.02)
    assert row.ours >= ours / least * (1 - 1e-9), "what is claimed holds for tasks of any length"
    for length, ratio in ((rounds, row.buffered), (separation, row.buffered_banded)):
        column = own.buffered_column(*own.best_buffered(*SETTING, length), length)
        assert ratio == pytest.approx(noise(column) / least, rel=1e-9)
        assert ratio >= 1 - 1e-6


@pytest.mark.parametrize("length", [SETTING[0], SETTING[1]], ids=["whole", "cut"])
def test_no_buffers_near_the_best_have_less_noise_and_columns_fall(length: int) -> None:
    own = importlib.import_module("correlated_noise")
    weights, decays = own.best_buffered(*SETTING, length)
    column = own.buffered_column(weights, decays, length)
    assert (np.diff(column) <= 0).all()
    assert (column > 0).all()
    least, rng = noise(column), np.random.default_rng(4)
    for _ in range(200):
        heavier = weights * np.exp(rng.normal(0, 0.03, weights.size))
        faster = decays ** np.exp(rng.normal(0, 0.03, decays.size))
        near = own.buffered_column(heavier, faster, length)
        assert noise(near) >= least * (1 - 1e-6)


def test_more_buffers_do_not_keep_columns_from_overlapping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = importlib.import_module("correlated_noise")
    rounds, best = SETTING[0], noise(own.best_banded(SETTING[1], SETTING[0]))
    ratios = []
    for buffers in (2, 3, 5):
        monkeypatch.setattr(own, "BUFFERS", buffers)
        column = own.buffered_column(*own.best_buffered(*SETTING, rounds), rounds)
        ratios.append(noise(column) / best)
    assert min(ratios) > 1.03
    assert max(ratios) < 1.001 * min(ratios)


@pytest.mark.parametrize("is_cut", [False, True])
def test_noise_of_buffers_streams_in_so_many_draws_and_vectors_as_the_page_says(
    is_cut: bool,
) -> None:
    """A run of the sequence keeps a vector for each buffer, and draws one in each round. Where the
    columns are cut, what leaves its sums is the noise of the run one separation behind it."""
    own = importlib.import_module("correlated_noise")
    rounds, separation, participations = SETTING
    length = separation if is_cut else rounds
    weights, decays = own.best_buffered(*SETTING, length)
    drawn = np.random.default_rng(5).normal(size=rounds)
    runs = participations if is_cut else 1
    kept, last = np.zeros((runs, own.BUFFERS)), np.zeros(runs)
    leaving = decays ** (separation - 1)
    outputs = []
    for number in range(rounds):
        behind = 0.0  # the noise of the run one separation behind
        for run in reversed(range(runs)):
            at = number - run * separation
            if at < 0:
                continue
            kept[run] = decays * kept[run] + last[run] - leaving * behind
            last[run] = behind = drawn[at] - weights @ kept[run]
        outputs.append(behind)
    expected = linalg.solve(dense(own.buffered_column(weights, decays, length)), drawn)
    np.testing.assert_allclose(outputs, expected, rtol=0, atol=1e-12)
