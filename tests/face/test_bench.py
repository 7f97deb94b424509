"""`fedpress bench codec` and `fedpress client warmup`; only bytes are held to anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from fedpress.bench.codec import DEFAULTS, run
from fedpress.cli import app
from fedpress_compression import kernels
from fedpress_protocols.errors import ConfigurationError


def test_the_codec_is_measured_with_the_users_own_compressor(tmp_path: Path) -> None:
    file = tmp_path / "codec.json"
    asked = ["--values", "5003", "--compressor", "topk:fraction=0.1", "--json", str(file)]
    done = CliRunner().invoke(app, ["bench", "codec", "--quick", *asked])
    assert done.exit_code == 0, done.output
    figures = json.loads(file.read_text())
    (row,) = figures["rows"]
    assert (row["compressor"], figures["values"]) == ("topk:fraction=0.1", 5003)
    assert row["config"]["id"] == "error_feedback"
    assert 500 * 4 / 8 < row["bytes"] < 4 * 5003 / 8
    assert row["compressor"] in done.output


def test_a_sparse_and_a_dense_method_are_measured_by_default() -> None:
    lines = run(None, True, 2000).splitlines()
    assert [line.split()[0] for line in lines[2:]] == list(DEFAULTS)


def test_an_update_without_values_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--values must be at least 1, not 0"):
        run(None, True, 0)


def test_warming_up_says_which_kernels_are_ready() -> None:
    done = CliRunner().invoke(app, ["client", "warmup"])
    assert done.exit_code == 0, done.output
    assert done.output == f"{kernels.CHOSEN} kernels are ready\n"
