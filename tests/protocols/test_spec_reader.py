"""The second decoder, written from the text alone, agrees with the golden vectors and the first."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpress_compression.coding import decode
from fedpress_protocols.errors import DecodingError
from tests.compression.coding_vectors import layout_of
from tests.protocols import spec_reader

FOLDER = Path(__file__).parents[2] / "protocols" / "vectors" / "coding"
VECTORS = sorted(path.stem for path in FOLDER.glob("*.json") if path.stem != "malformed")
MALFORMED = json.loads((FOLDER / "malformed.json").read_text())
CASES = 1500


def load(name: str) -> dict[str, Any]:
    vector: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return vector


def little_endian(values: list[Any], field: dict[str, Any]) -> bytes:
    [(kind, given)] = field.items()
    code = {"positions": "q", "alphabet": "B", "integers": "i"}
    code["reals"] = "f" if given.get("width") == 4 else "e"
    return struct.pack(f"<{len(values)}{code[kind]}", *values)


@pytest.mark.parametrize("name", VECTORS)
def test_the_text_is_enough_to_read_every_vector(name: str) -> None:
    vector = load(name)
    fields = spec_reader.read(bytes.fromhex(vector["body"]), vector["layout"])
    for found, due, field in zip(fields, vector["symbols"], vector["layout"], strict=True):
        if isinstance(due, dict):
            assert len(found) == due["num"]
            digest = hashlib.sha256(little_endian(found, field)).hexdigest()
            assert digest == due["sha256"]
        else:
            assert found == due


@pytest.mark.parametrize("case", MALFORMED, ids=lambda case: case["reason"])
def test_the_text_refuses_every_malformed_body(case: dict[str, Any]) -> None:
    with pytest.raises(spec_reader.Refused):
        spec_reader.read(bytes.fromhex(case["body"]), case["layout"])


def test_both_decoders_refuse_and_read_the_same_damaged_bodies() -> None:
    rng = np.random.default_rng(0)
    small = [v for v in map(load, VECTORS) if 0 < len(v["body"]) < 800]
    read = 0
    for case in range(CASES):
        vector = small[case % len(small)]
        data = bytearray.fromhex(vector["body"])
        for bit in rng.integers(0, 8 * len(data), int(rng.integers(1, 4))).tolist():
            # Half of the damage goes to the first bytes: heads, counts, tables.
            bit = bit % 64 if rng.integers(0, 2) else bit
            data[(bit >> 3) % len(data)] ^= 1 << (bit & 7)
        try:
            due = spec_reader.read(bytes(data), vector["layout"])
        except spec_reader.Refused:
            with pytest.raises(DecodingError):
                decode(bytes(data), layout_of(vector["layout"]))
            continue
        found = decode(bytes(data), layout_of(vector["layout"]))
        assert [array.tolist() for array in found] == due
        read += 1
    assert 0 < read < CASES / 2
