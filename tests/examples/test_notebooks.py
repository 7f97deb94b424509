"""The notebooks run from top to bottom; their stored outputs are small and current."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))
NEEDS = {"compression-by-hand.ipynb": ("sklearn",), "simulation.ipynb": ("sklearn", "flwr")}
_MOST_BYTES = 100_000


def code_cells(name: str) -> list[dict[str, Any]]:
    document = json.loads((FOLDER / name).read_text())
    return [cell for cell in document["cells"] if cell["cell_type"] == "code"]


def words(cells: list[dict[str, Any]]) -> list[list[str]]:
    """What each cell prints, without its figures: these differ in the last bits of a processor."""
    printed = [
        "".join(each["text"] for each in cell.get("outputs", []) if each.get("name") == "stdout")
        for cell in cells
    ]
    return [re.findall(r"[^\W\d]+", text) for text in printed]


def test_every_notebook_says_what_it_needs() -> None:
    assert list(NEEDS) == NOTEBOOKS
    listed = (FOLDER / "README.md").read_text()
    assert all(f"]({name})" in listed for name in NOTEBOOKS)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_is_stored_as_it_ran_with_one_picture(name: str) -> None:
    assert (FOLDER / name).stat().st_size < _MOST_BYTES
    cells = code_cells(name)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1
    for output in outputs:  # of the machine that it ran on, nothing
        assert output["output_type"] in ("stream", "display_data", "execute_result")
        assert output.get("name") != "stderr"
        assert "/home" not in json.dumps(output)
        assert "/tmp" not in json.dumps(output)


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_runs_from_top_to_bottom(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("matplotlib", *NEEDS[name]):
        pytest.importorskip(module)
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    notebook = nbformat.read(FOLDER / name, as_version=4)
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3", resources=place).execute()
    assert words(notebook.cells) == words(nbformat.read(FOLDER / name, as_version=4).cells)
