"""The example plug-in is installed, found by its entry point, and missed by its name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "plugin-compressor"
WIRE_ID = "fedpress_example_sign.tensor_sign"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example installed as pip installs any package."""
    folder = tmp_path_factory.mktemp("plugin")
    offline = ("--no-index", "--no-build-isolation", "--no-deps", "--disable-pip-version-check")
    command = [sys.executable, "-m", "pip", "install", "--quiet", *offline]
    subprocess.run([*command, "--target", folder / "site", EXAMPLE], check=True, timeout=120)
    return folder / "site"


def python(*arguments: str, site: Path | None = None) -> subprocess.CompletedProcess[str]:
    path = [*([str(site)] if site else []), *filter(None, sys.path)]
    return subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_command_line_finds_it(installed: Path) -> None:
    shown = python("-m", "fedpress", "compressors", "show", WIRE_ID, site=installed)
    assert shown.returncode == 0, shown.stderr
    assert "Karimireddy" in shown.stdout
    measured = python(
        *("-m", "fedpress", "bench", "codec", "--quick", "--values", "4000"),
        *("--compressor", WIRE_ID),
        site=installed,
    )
    assert measured.returncode == 0, measured.stderr
    assert WIRE_ID in measured.stdout


def test_the_picture_shows_it_beside_those_of_fedpress(installed: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        {"config": {"id": wire_id}, "coder": coder, "bytes": 900.0 * number, "nmse": 1 / number}
        for wire_id in (WIRE_ID, "sign", "eden", "quantize", "topk", "ecsq")
        for coder in ("huffman", "auto")
        for number in (1, 2)
    ]
    rates, picture = tmp_path / "rates.json", tmp_path / "result.svg"
    rates.write_text(json.dumps({"values": 50826, "rows": rows}))
    drawn = python(str(EXAMPLE / "draw.py"), str(rates), str(picture), site=installed)
    assert drawn.returncode == 0, drawn.stderr
    for words in ("tensor_sign, this plug-in", "ecsq", "50,826 values", "1 kB"):
        assert words in picture.read_text()
    rates.write_text(json.dumps({"values": 50826, "rows": rows[4:]}))
    drawn = python(str(EXAMPLE / "draw.py"), str(rates), str(picture), site=installed)
    assert drawn.returncode == 1
    assert "install this folder and measure again" in drawn.stderr


@pytest.mark.slow
def test_its_own_tests_pass(installed: Path, tmp_path: Path) -> None:
    options = ("-q", "-p", "no:cacheprovider", "--import-mode=importlib", f"--rootdir={tmp_path}")
    done = python("-m", "pytest", *options, "-c", os.devnull, str(EXAMPLE), site=installed)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout


def test_an_end_that_lacks_it_names_the_package() -> None:
    done = python("-m", "fedpress", "bench", "codec", "--compressor", WIRE_ID)
    assert done.returncode == 2
    assert f"'{WIRE_ID}' is of the package fedpress-example-sign" in done.stderr
    assert "pip install fedpress-example-sign" in done.stderr
    assert done.stderr.splitlines()[1:] == ["  see `fedpress explain incompatible-plan`"]
