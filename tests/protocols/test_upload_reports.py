"""Numbers that uploads report, and sketches: golden bodies, bounds, and damaged ones."""

from __future__ import annotations

import json
import math
import runpy
import sys
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpress_compression import sketches
from fedpress_compression.coding import Alphabet, Reals
from fedpress_protocols.errors import DecodingError, FedpressError, InvalidUpdate
from fedpress_protocols.messages import UploadFigures
from fedpress_protocols.upload import Upload, check_report
from tests.compression.coding_vectors import FOLDER, layout_of
from tests.protocols import spec_reader

VECTORS = json.loads((FOLDER / "uploads.json").read_text())
MALFORMED = json.loads((FOLDER / "malformed-uploads.json").read_text())
LAYOUT = (Alphabet(4, 6), Reals(2))
SYMBOLS = (np.array([3, 0, 0, 1, 0, 2], np.uint8), np.array([0.5, -1.25], np.float32))


def parsed(case: dict[str, Any]) -> Upload:
    layouts = (layout_of(case["layout"]),) * 256
    body = bytes.fromhex(case["body"])
    names, cells = tuple(case["report"]), case.get("sketch", 0)
    return Upload.from_bytes(body, layouts, case["profile"], report=names, sketch=cells)


@pytest.mark.parametrize("case", VECTORS, ids=lambda case: case["name"])
def test_golden_bodies_are_read_and_written(case: dict[str, Any]) -> None:
    upload, sketch = parsed(case), case.get("sketch", 0)
    assert (upload.num_examples, list(upload.report)) == (case["num_examples"], case["reported"])
    assert [array.tolist() for array in upload.symbols] == case["symbols"]
    body = bytes.fromhex(case["body"])
    assert upload.to_bytes(layout_of(case["layout"])) == body
    assert upload.sketch.hex() == case.get("sketched", "")
    cells = sketches.from_bytes(upload.sketch, sketch).tolist() if sketch else []
    again = spec_reader.upload(body, case["profile"], case["report"], case["layout"], sketch)
    assert again == (case["num_examples"], case["reported"], cells, case["symbols"])
    layouts, names = (layout_of(case["layout"]),) * 256, tuple(case["report"])
    num_examples, told, found = Upload.find(
        body, layouts, case["profile"], report=names, sketch=sketch
    )
    assert (num_examples, told, len(found)) == (upload.num_examples, upload.report, 2)


@pytest.mark.parametrize("case", MALFORMED, ids=lambda case: case["reason"])
def test_malformed_bodies_are_refused(case: dict[str, Any]) -> None:
    with pytest.raises(FedpressError):
        parsed(case)
    body = bytes.fromhex(case["body"])
    with pytest.raises(spec_reader.Refused):
        spec_reader.upload(
            body, case["profile"], case["report"], case["layout"], case.get("sketch", 0)
        )


def test_the_vectors_are_what_their_script_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = FOLDER / "make_upload_vectors.py"
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path)])
    runpy.run_path(str(script), run_name="__main__")
    for name in ("uploads.json", "malformed-uploads.json"):
        assert (tmp_path / name).read_text() == (FOLDER / name).read_text()


def test_without_a_report_bodies_are_as_ever() -> None:
    assert Upload(0, 5, SYMBOLS).to_bytes(LAYOUT)[:3] == b"\1\0\5"
    with_report = Upload(0, 5, SYMBOLS, (1.0,)).to_bytes(LAYOUT)
    assert with_report[:3] + with_report[7:] == Upload(0, 5, SYMBOLS).to_bytes(LAYOUT)


@given(st.lists(st.floats(-(2**24), 2**24, width=32), max_size=16))
def test_reports_survive_their_bytes(values: list[float]) -> None:
    names = tuple(f"n{index}" for index in range(len(values)))
    body = Upload(0, 5, SYMBOLS, tuple(values)).to_bytes(LAYOUT)
    assert Upload.from_bytes(body, (LAYOUT,), 0, report=names).report == tuple(values)


@given(
    body=st.binary(max_size=60),
    names=st.lists(st.sampled_from(["steps", "loss", "x"])),
    sketch=st.sampled_from([0, 64]),
)
def test_any_bytes_are_read_or_refused_as_the_text_says(
    body: bytes, names: list[str], sketch: int
) -> None:
    data = b"\1\0" + body
    fields = [{"alphabet": {"size": 4, "count": 6}}, {"reals": {"count": 2, "width": 4}}]
    try:
        due = spec_reader.upload(data, 0, names, fields, sketch)
    except spec_reader.Refused:
        with pytest.raises(DecodingError):
            Upload.from_bytes(data, (LAYOUT,), 0, report=tuple(names), sketch=sketch)
        return
    found = Upload.from_bytes(data, (LAYOUT,), 0, report=tuple(names), sketch=sketch)
    assert (found.num_examples, list(found.report)) == due[:2]


@pytest.mark.parametrize(
    ("name", "value"),
    [("steps", 0.0), ("loss", -1.0), ("loss", math.nan), ("x", -math.inf), ("x", 2.0**25)],
)
def test_a_number_out_of_bounds_is_named(name: str, value: float) -> None:
    with pytest.raises(InvalidUpdate, match=f"{name} of .* outside"):
        check_report((value,), (name,))


@given(st.floats(min_value=0, max_value=1e30))
def test_figures_of_any_size_survive_the_address(norm: float) -> None:
    sent = UploadFigures(norm=norm, train=1800.0)
    assert "+" not in sent.query  # which stands for a blank there
    arrived = UploadFigures.model_validate_strings(dict(parse_qsl(sent.query)))
    assert arrived.norm == pytest.approx(norm, rel=0.01)
    assert arrived.train == 1800.0


def test_figures_of_earlier_devices_are_read_although_their_address_has_a_plus() -> None:
    arrived = UploadFigures.model_validate_strings(dict(parse_qsl("norm=1.95e+07&train=1.8e+03")))
    assert (arrived.norm, arrived.train) == (1.95e7, 1800.0)
