"""benchmarks/private_accuracy.py: the page has its table, a run goes on where it was stopped, and
its figure has every lane; no accuracy is held to anything."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.benchmarks.scripts import printed

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "private_accuracy.py"
STORED = ROOT / "benchmarks" / "results" / "private_accuracy.json"


def test_the_page_has_the_table_and_the_figure_every_lane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = tmp_path / "deep" / "figure.svg"
    options = ("--json", STORED, "--table", "--plot", figure)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # which it sets
    monkeypatch.setattr(sys, "argv", [SCRIPT.name, *map(str, options)])
    importlib.import_module("private_accuracy").main()
    lines = capsys.readouterr().out.splitlines()
    page = (ROOT / "docs" / "privacy.md").read_text().splitlines()
    start = page.index(lines[0])
    assert page[start : start + len(lines)] == lines, "print it anew with --table"
    drawn = figure.read_text()
    names = {row["method"] for row in json.loads(STORED.read_text())}
    assert len(names) > 5
    for name in names:
        assert f">{name}<" in drawn
    assert "epsilon at delta 1e-5, of one device" in drawn
    assert "bits a parameter and round" in drawn


@pytest.mark.slow
def test_a_run_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    rows = json.loads(STORED.read_text())
    kept = [row for row in rows if (row["method"], row["seed"]) != ("without noise", 1)]
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(kept))
    printed(SCRIPT, "--json", file, "--only", "without noise")
    after = json.loads(file.read_text())
    assert after[:-1] == kept
    assert (after[-1]["method"], after[-1]["seed"], after[-1]["epsilon"]) == (
        "without noise",
        1,
        None,
    )
    assert 0.5 < after[-1]["accuracy"] <= 1


def test_settings_are_chosen_by_the_training_that_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # which it sets
    measured = importlib.import_module("private_accuracy")
    chosen = importlib.import_module("private_settings")
    rng = np.random.default_rng(3)
    pixels = rng.random((60, 12), np.float32)
    clients = tuple(np.arange(60).reshape(5, 12))
    data = measured.Data(pixels, rng.integers(0, 10, 60), np.arange(60), clients)
    own = measured.Settings(1.0, 0.0, 0.0, 0.0, 0, steps=4, rate=0.5)
    model = rng.standard_normal(data.spec.size).astype(np.float32)
    together = chosen.Cohort(data).updates(model, own)
    for client, update in enumerate(together):
        np.testing.assert_allclose(update, data.update(model, client, own), atol=1e-6)


def test_a_cohort_chosen_for_learns_without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    measured = importlib.import_module("private_accuracy")
    chosen = importlib.import_module("private_settings")
    digits = measured.Data.digits(Path(), 0)
    data = digits._replace(clients=tuple(rows[:7] for rows in digits.clients))
    own = measured.TASKS["digits"].settings
    cohort = chosen.Cohort(data)
    dense, few, noisy = (
        chosen.accuracy(data, cohort, own, fraction, rounds, noise)
        for fraction, rounds, noise in ((1.0, 8, 0.0), (0.14, 57, 0.0), (1.0, 8, 1e4))
    )
    assert min(dense, few) > 0.85
    assert noisy < 0.4
