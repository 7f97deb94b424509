"""benchmarks/secagg.py plays exact sessions and prints what its page describes; no figure is held
to anything but the bytes, which are the same on every machine."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import secagg

ROOT = Path(__file__).parents[2]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    complete = replace(secagg.COMPLETE, n=12, coordinates=2000, dropped=2)
    sparse = replace(secagg.SPARSE, n=130, coordinates=300, dropped=3)
    monkeypatch.setattr(secagg, "COMPLETE", complete)
    monkeypatch.setattr(secagg, "SPARSE", sparse)
    monkeypatch.setattr(secagg, "SUITES", ("aes-128-ctr",))


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_the_benchmark_prints_tables_and_writes_what_its_page_describes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "secagg.json"
    monkeypatch.setattr(sys, "argv", ["secagg.py", "--json", str(file)])
    secagg.main()
    printed = capsys.readouterr().out
    found = json.loads(file.read_text())
    page = (ROOT / "docs" / "bench-secagg.md").read_text()
    assert set(found) == {"machine", "sessions", "targets"}
    complete, sparse = found["sessions"].values()
    assert (complete["degree"], sparse["degree"] < 129) == (11, True)
    for session in (complete, sparse):
        for party in ("client", "server"):
            for key in (*session[party], *session[party]["seconds"]):
                assert f"`{key}`" in page
        for ratio in session["ratios"]:
            assert f"| `{ratio}` |" in page
    for key in complete:
        assert f"{key}`" in page or f".{key}`" in page
    for row in found["targets"]:
        assert row["name"] in printed


@pytest.mark.usefixtures("small")
def test_masks_and_bytes_are_counted() -> None:
    session = secagg.figures(secagg.COMPLETE)
    assert session["client"]["masks"] == 12
    assert session["server"]["masks"] == 10 + 2 * 10
    assert session["client"]["body_bytes"] == 2000 * 13 // 8  # sums up to 12 * 327
    assert session["client"]["sent_bytes"] > 3250 + 11 * 140
