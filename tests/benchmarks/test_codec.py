"""benchmarks/codec.py prints what its page describes; no figure is held to anything."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import codec
import cold_start
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = codec.measure
    monkeypatch.setattr(codec, "measure", lambda quick: whole(quick, size=20_000))
    monkeypatch.setattr(cold_start, "_seconds", lambda code: 0.5)
    monkeypatch.setattr(codec, "_trained", dict)  # half a minute of torch


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_the_benchmark_prints_tables_and_writes_what_its_page_describes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "codec.json"
    monkeypatch.setattr(sys, "argv", ["codec.py", "--quick", "--json", str(file)])
    codec.main()
    printed = capsys.readouterr().out
    figures = json.loads(file.read_text())
    page = (ROOT / "docs" / "bench-codec.md").read_text()
    for key in figures:
        assert f"`{key}" in page
    for case in figures["speeds"]["20,000"]["seconds"]:
        assert f"`{case}`" in page or case.split("_")[0] + "_..." in page
    assert {row["name"] for row in figures["targets"]} <= set(codec.TARGETS)
    for row in figures["targets"]:
        assert row["name"] in printed
    body = figures["bytes"]["synthetic 20,000"]
    assert body["positions"]["ratio_to_log2C"] > 0.99
    assert figures["entropy"]["dense_4bit"] > 1
