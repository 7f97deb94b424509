"""Sketches: the golden vectors, a second implementation from the text, and bodies' lengths."""

from __future__ import annotations

import json
import runpy
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpress_compression import sketches
from fedpress_compression.compressor import Public
from fedpress_compression.errors import DecodingError
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.tensors import ModelSpec, TensorSpec
from tests.compression.coding_vectors import FOLDER
from tests.protocols import spec_sketches

VECTORS = json.loads((FOLDER / "sketches.json").read_text())


def update_of(case: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
    update = np.zeros(case["size"], np.float32)
    update[case["indices"]] = case["values"]
    return update


@pytest.mark.parametrize("case", VECTORS, ids=lambda case: case["name"])
def test_golden_sketches_are_made_and_read(case: dict[str, Any]) -> None:
    spec = ModelSpec((TensorSpec("w", (case["size"],)),))
    assert spec.digest == case["digest"]
    public = Public(spec, PublicRandomness(bytes.fromhex(case["public_seed"])))
    cells = sketches.sketch(update_of(case), case["sketch"], public.stream(sketches.LABEL))
    assert cells.astype("<f4").tobytes().hex() == case["rotated"]
    sent = sketches.to_bytes(cells)
    assert sent.hex() == case["sketched"]
    assert len(sent) == sketches.num_bytes(case["sketch"])
    read = sketches.from_bytes(sent, case["sketch"])
    assert float(read @ cells) == pytest.approx(float(cells @ cells), rel=1e-6)


@pytest.mark.parametrize("case", VECTORS, ids=lambda case: case["name"])
def test_golden_sketches_are_those_of_the_text(case: dict[str, Any]) -> None:
    values, seed = update_of(case).tolist(), bytes.fromhex(case["public_seed"])
    cells = spec_sketches.rotated(values, case["sketch"], seed, case["digest"])
    assert np.array(cells, "<f4").tobytes().hex() == case["rotated"]
    assert spec_sketches.coded(cells).hex() == case["sketched"]


@given(
    values=st.lists(st.integers(-(2**8), 2**8), max_size=100),
    num_cells=st.sampled_from([64, 128]),
    seed=st.binary(min_size=32, max_size=32),
)
def test_any_sketch_is_that_of_the_text(values: list[int], num_cells: int, seed: bytes) -> None:
    stream = PublicRandomness(seed).stream("sketch a")
    cells = sketches.sketch(np.array(values, np.float32), num_cells, stream)
    due = spec_sketches.rotated([float(value) for value in values], num_cells, seed, "a")
    assert cells.tolist() == [float(cell) for cell in due]
    assert sketches.to_bytes(cells) == spec_sketches.coded(due)


@pytest.mark.parametrize(
    ("data", "num_cells"),
    [
        (bytes(19), 64),
        (bytes(21), 64),
        (struct.pack("<f", -1.0) + bytes(16), 64),
        (struct.pack("<f", float("nan")) + bytes(16), 64),
        (struct.pack("<f", float("inf")) + bytes(16), 64),
    ],
)
def test_what_is_no_sketch_is_refused(data: bytes, num_cells: int) -> None:
    with pytest.raises(DecodingError):
        sketches.from_bytes(data, num_cells)


def test_the_vectors_are_what_their_script_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = FOLDER / "make_sketch_vectors.py"
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path)])
    runpy.run_path(str(script), run_name="__main__")
    assert (tmp_path / "sketches.json").read_text() == (FOLDER / "sketches.json").read_text()
