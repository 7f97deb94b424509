"""Sketches in uploads: which plans ask for them, where they are in a body, and damaged ones."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpress_compression import coding, sketches
from fedpress_compression.coding import Alphabet, Reals
from fedpress_protocols.errors import DecodingError, IncompatiblePlan
from fedpress_protocols.plan import RoundPlan
from fedpress_protocols.upload import Upload, max_body_bytes
from tests.protocols.test_adaptive_clip import TERMS
from tests.protocols.test_masked_payload import made_plan
from tests.protocols.test_plan import SPEC, make_plan

LAYOUT = (Alphabet(4, 6), Reals(2))
SYMBOLS = (np.array([3, 0, 0, 1, 0, 2], np.uint8), np.array([0.5, -1.25], np.float32))
NAMES = ("steps", "loss")
REPORTED = (3.0, 0.5)
CELLS = st.sampled_from([64, 128, 1024])


def sketch_of(num_cells: int, seed: int = 0) -> bytes:
    return sketches.to_bytes(np.random.default_rng(seed).standard_normal(num_cells))


def body_with(num_cells: int, sketch: bytes | None = None) -> bytes:
    sent = sketch_of(num_cells) if sketch is None else sketch
    return Upload(0, 300, SYMBOLS, REPORTED, sent).to_bytes(LAYOUT)


def read(body: bytes, num_cells: int) -> Upload:
    return Upload.from_bytes(body, (LAYOUT,), 0, report=NAMES, sketch=num_cells)


def find(body: bytes, num_cells: int) -> tuple[int, tuple[float, ...], coding.Found]:
    return Upload.find(body, (LAYOUT,), 0, report=NAMES, sketch=num_cells)


@given(CELLS, st.integers(0, 2**32))
def test_a_body_with_a_sketch_is_read_and_found(num_cells: int, seed: int) -> None:
    sketch = sketch_of(num_cells, seed)
    body = body_with(num_cells, sketch)
    upload = read(body, num_cells)
    assert (upload.num_examples, upload.report, upload.sketch) == (300, REPORTED, sketch)
    assert [each.tolist() for each in upload.symbols] == [each.tolist() for each in SYMBOLS]
    assert upload.to_bytes(LAYOUT) == body
    num_examples, report, found = find(body, num_cells)
    assert (num_examples, report, len(found)) == (300, REPORTED, 2)


def test_the_sketch_is_between_the_reported_numbers_and_the_fields() -> None:
    head, sketch = b"\1\0\xac\2" + struct.pack("<2f", *REPORTED), sketch_of(64)
    body, without = body_with(64), body_with(64, b"")
    assert body == head + sketch + without[len(head) :]
    assert read(without, 0).sketch == b""


@given(CELLS)
def test_a_body_that_ends_within_its_sketch_is_refused(num_cells: int) -> None:
    body = body_with(num_cells)
    start = len(b"\1\0\xac\2") + 4 * len(NAMES)
    for length in range(start, start + sketches.num_bytes(num_cells)):
        for reads in (read, find):
            with pytest.raises(DecodingError, match=f"ends within the sketch of {num_cells} cells"):
                reads(body[:length], num_cells)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0])
def test_a_damaged_sketch_is_refused_with_its_body(scale: float) -> None:
    body = body_with(64, struct.pack("<f", scale) + bytes(16))
    for reads in (read, find):
        with pytest.raises(DecodingError, match="a sketch with a scale of"):
            reads(body, 64)


def test_a_body_without_the_sketch_that_is_asked_for_is_refused() -> None:
    with pytest.raises(DecodingError):
        read(body_with(1024, b""), 1024)
    with pytest.raises(DecodingError):
        read(body_with(1024), 0)


# Plans


@given(CELLS)
def test_a_plan_bounds_the_bodies_that_it_asks_for(num_cells: int) -> None:
    plain, plan = make_plan(), make_plan(sketch=num_cells)
    longest = max(max_body_bytes(layout) for layout in plan.layouts(SPEC))
    assert plain.max_body_bytes(SPEC) == longest
    assert plan.max_body_bytes(SPEC) == longest + 4 + num_cells // 4
    update = np.random.default_rng(num_cells).standard_normal(SPEC.size).astype(np.float32)
    public, compressor = plan.public(SPEC), plan.compressor("plain")
    rng = np.random.default_rng(0)
    symbols, _ = compressor.compress(update, compressor.init(SPEC), public, rng)
    upload = Upload(1, 2**32 - 1, symbols, (), sketch_of(num_cells))
    assert len(upload.to_bytes(plan.layouts(SPEC)[1])) <= plan.max_body_bytes(SPEC)


def test_a_plan_without_a_sketch_reads_as_it_always_did() -> None:
    plan = make_plan()
    assert "sketch" not in plan.to_json()
    assert plan == make_plan(sketch=0)
    asks = make_plan(sketch=2048)
    assert '"sketch":2048' in asks.to_json()
    assert RoundPlan.from_json(asks.to_json()) == asks


@pytest.mark.parametrize("num_cells", [1, 32, 63, 100, 2**17, -64])
def test_a_number_of_cells_that_no_rotation_has_is_refused(num_cells: int) -> None:
    with pytest.raises(IncompatiblePlan, match="sketch"):
        make_plan(sketch=num_cells)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "lane": "clear",
            "masking": None,
            "privacy": {**TERMS, "adaptive": None},
            "fixed_point": {"scale_bits": 30, "max_abs": 0.3, "max_examples": 1},
        },
    ],
    ids=["masked", "private"],
)
def test_no_sketch_tells_of_an_update_that_is_to_stay_unknown(changes: dict[str, Any]) -> None:
    compressor = {"id": "quantize", "clip": 0.1}
    assert made_plan(compressor, **changes).sketch == 0
    with pytest.raises(IncompatiblePlan, match="a sketch of each update, which would tell of one"):
        made_plan(compressor, sketch=64, **changes)
