"""`fedpress bench rate-distortion` on the committed update: real bytes, and the figures due."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from fedpress.bench.rate_distortion import measured, run
from fedpress.cli import app
from fedpress.update_file import Updates
from fedpress_compression.compressor import compressors
from fedpress_protocols.errors import ConfigurationError


@pytest.mark.slow
def test_ecsq_under_the_range_coder_needs_at_most_0_36_bits_at_nmse_0_3(
    record_property: Callable[[str, object], None],
) -> None:
    rows = [row for row in measured("ecsq", Updates.load("fixture")) if "0.3" in row.method]
    best = {row.coder: row for row in rows}
    figures = ", ".join(f"{row.coder} {row.bits_per_value:.3f}" for row in rows)
    record_property("figure", f"ecsq at NMSE 0.3, bits a value of whole bodies: {figures}")
    assert all(abs(row.nmse - 0.3) < 0.002 for row in rows)
    assert best["auto"].bits_per_value <= 0.36
    assert best["auto+previous"].bytes < best["auto"].bytes < 0.75 * best["huffman"].bytes


def test_methods_are_measured_from_the_command_line(tmp_path: Path) -> None:
    written = tmp_path / "rows.json"
    asked = ["bench", "rate-distortion", "--only", "stc", "--json", str(written)]
    answer = CliRunner().invoke(app, asked)
    assert answer.exit_code == 0, answer.output
    rows = json.loads(written.read_text())["rows"]
    assert {row["coder"] for row in rows} == {"huffman", "auto", "auto+previous"}
    assert len(answer.output.splitlines()) == 1 + len(rows) == 10
    assert [row["config"]["fraction"] for row in rows[::3]] == [0.001, 0.01, 0.05]


def test_what_goes_around_no_coder_is_measured_with_its_own() -> None:
    rows = list(measured("per_tensor", Updates.load("fixture")))
    assert [row.coder for row in rows] == ["huffman"]


def test_an_update_of_ones_own_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    np.savez(path, updates=np.random.default_rng(0).standard_normal(500).astype(np.float32))
    assert Updates.load(str(path)).spec.size == 500
    table = run(str(path), only="topk")
    assert "auto+previous" not in table
    assert "topk fraction=0.1" in table


def test_every_method_is_measured_by_default(tmp_path: Path) -> None:
    path, rng = tmp_path / "small.npz", np.random.default_rng(0)
    updates, previous = rng.standard_normal((2, 2, 136)).astype(np.float32)
    np.savez(path, updates=updates, previous=previous[0], names=["w", "b"], shapes=["16,8", "8"])
    answer = CliRunner().invoke(app, ["bench", "rate-distortion", "--update", str(path)])
    assert answer.exit_code == 0, answer.output
    rows = {line.split()[0] for line in answer.output.splitlines()[1:]}
    assert rows == compressors().keys() - {"coded"}


def test_methods_that_read_what_a_file_lacks_are_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    np.savez(path, updates=np.random.default_rng(0).standard_normal(64).astype(np.float32))
    lines = run(str(path)).splitlines()
    assert "not measured, since the file has no previous: cafe" in lines
    assert any(line.startswith("topk") for line in lines)
    with pytest.raises(ConfigurationError, match=r"cafe reads previous, which .* does not have"):
        run(str(path), only="cafe")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no archive"])
def test_a_file_of_no_updates_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.npz"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match="is not a file of updates"):
        Updates.load(str(path))
    with pytest.raises(ConfigurationError, match=r"there is no file .*none\.npz"):
        Updates.load(str(tmp_path / "none.npz"))


def test_tensors_that_do_not_fit_the_updates_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.npz"
    np.savez(path, updates=np.zeros((1, 6), np.float32), names=["a"], shapes=["2,4"])
    with pytest.raises(ConfigurationError, match="its tensors have 8 values, its updates 6"):
        Updates.load(str(path))


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no method 'zip'"):
        run("fixture", only="zip")
