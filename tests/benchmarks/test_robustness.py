"""benchmarks/robustness.py: its table, its JSON, and what it is there to show, in short."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import robustness


def test_every_strategy_meets_every_attack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    arguments = ["robustness.py", "--seeds", "0", "--rounds", "1", "--json"]
    monkeypatch.setattr(sys, "argv", [*arguments, str(file)])
    robustness.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == [s["id"] for s in robustness.STRATEGIES]
    assert all(name in lines[0] for name in robustness.ATTACKS)

    found = json.loads(file.read_text())
    monkeypatch.setattr(sys, "argv", [*arguments, "-"])
    robustness.main()
    assert json.loads(capsys.readouterr().out) == found
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
