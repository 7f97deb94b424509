"""`fedpress bench codec` and `fedpress warmup` do what they say; no figure is held to anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from fedpress.bench import codec, cold_start
from fedpress.cli import app
from fedpress_compression import kernels

ROOT = Path(__file__).parents[2]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = codec.measure
    monkeypatch.setattr(codec, "measure", lambda quick: whole(quick, size=20_000))
    monkeypatch.setattr(cold_start, "_seconds", lambda code: 0.5)
    monkeypatch.setattr(codec, "_trained", dict)  # half a minute of torch


@pytest.mark.usefixtures("small")
def test_the_bench_prints_tables_and_writes_what_its_page_describes(tmp_path: Path) -> None:
    file = tmp_path / "codec.json"
    done = CliRunner().invoke(app, ["bench", "codec", "--quick", "--json", str(file)])
    assert done.exit_code == 0, done.output
    found = json.loads(file.read_text())
    page = (ROOT / "docs" / "bench-codec.md").read_text()
    for key in found:
        assert f"`{key}" in page
    for case in found["speeds"]["20,000"]["seconds"]:
        assert f"`{case}`" in page or case.split("_")[0] + "_..." in page
    assert {row["name"] for row in found["targets"]} <= set(codec.TARGETS)
    for row in found["targets"]:
        assert row["name"] in done.output
    body = found["bytes"]["synthetic 20,000"]
    assert body["positions"]["ratio_to_log2C"] > 0.99
    assert found["entropy"]["dense_4bit"] > 1


def test_warming_up_says_which_kernels_are_ready() -> None:
    done = CliRunner().invoke(app, ["warmup"])
    assert done.exit_code == 0, done.output
    assert done.output == f"{kernels.CHOSEN} kernels are ready\n"
