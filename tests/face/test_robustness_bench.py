"""`fedpress bench robustness`: its table, its JSON, and what it is there to show, in short."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from fedpress.bench import robustness
from fedpress.cli import app


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(robustness, "run", partial(robustness.run, seeds=(0,), rounds=1))


@pytest.mark.usefixtures("short")
def test_every_strategy_meets_every_attack(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    table = CliRunner().invoke(app, ["bench", "robustness", "--json", str(file)])
    assert table.exit_code == 0, table.output
    lines = table.output.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == [s["id"] for s in robustness.STRATEGIES]
    assert all(name in lines[0] for name in robustness.ATTACKS)

    found = json.loads(file.read_text())
    printed = CliRunner().invoke(app, ["bench", "robustness", "--json", "-"]).output
    assert json.loads(printed) == found
    assert found["setting"]["rounds"] == 1
    assert len(found["rows"]) == len(robustness.STRATEGIES) * len(robustness.ATTACKS)
    page = robustness.__doc__ or ""
    for key in ("setting", "rows", *found["rows"][0]):
        assert f"`{key}`" in page
    for row in found["rows"]:
        assert 0 <= row["accuracy"] <= 1
        assert row["lost"] == 0 or row["attack"] != "none"


@pytest.mark.parametrize("attack", ["sign flip x10", "label flip x10"])
def test_an_attack_that_ruins_the_mean_leaves_robust_rules_alone(attack: str) -> None:
    ruined, *held = (
        robustness.federated({"id": name}, attack, seed=0, rounds=15)
        for name in ("fedavg", "trimmed_mean", "geometric_median")
    )
    assert ruined < 0.5
    assert min(held) > 0.8
