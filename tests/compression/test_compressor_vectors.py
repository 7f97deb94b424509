"""The golden vectors: every method decodes as it did when it was released."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpress_compression.coding import decode, encode
from fedpress_compression.compressor import Knowledge, Public, from_config
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.tensors import ModelSpec, TensorSpec
from tests.protocols.spec_compressors import Known, decompressed

SCRIPT = Path(__file__).parents[2] / "protocols" / "vectors" / "make_compressor_vectors.py"
FOLDER = SCRIPT.parent / "compressors"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))


def load(name: str) -> dict[str, Any]:
    vector: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return vector


def public_of(vector: dict[str, Any]) -> Public:
    tensors = (TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in vector["spec"])
    kinds: tuple[Knowledge, ...] = ("previous", "own", "basis")
    return Public(
        ModelSpec(tuple(tensors)),
        PublicRandomness(bytes.fromhex(vector["public_seed"])),
        {
            kind: np.frombuffer(bytes.fromhex(vector[kind]), "<f4")
            for kind in kinds
            if vector.get(kind) is not None
        },
        round=vector.get("round", 1),
    )


@pytest.mark.parametrize("name", NAMES)
def test_golden_bodies_decode_to_the_same_bits(name: str) -> None:
    vector = load(name)
    made, public = from_config(vector["config"]), public_of(vector)
    symbols = decode(bytes.fromhex(vector["body"]), made.layout(public.spec))
    decoded = made.decompress(symbols, public).dense()
    assert decoded.astype("<f4").tobytes().hex() == vector["decoded"]


@pytest.mark.parametrize("name", [name for name in NAMES if not load(name)["drawn"]])
def test_what_is_not_drawn_encodes_to_the_same_bytes(name: str) -> None:
    vector = load(name)
    made, public = from_config(vector["config"]), public_of(vector)
    update = np.frombuffer(bytes.fromhex(vector["update"]), "<f4").astype(np.float32)
    rng = np.random.default_rng(1)
    symbols, _ = made.compress(update, made.init(public.spec), public, rng)
    assert encode(symbols, made.layout(public.spec)).hex() == vector["body"]


def test_the_script_writes_the_vectors_that_are_there(tmp_path: Path) -> None:
    runpy.run_path(str(SCRIPT))["main"](tmp_path / "new")
    written = list((tmp_path / "new").glob("*.json"))
    assert len(written) > 30
    for path in written:
        assert path.read_text() == (FOLDER / path.name).read_text(), path.name


@pytest.mark.parametrize("name", NAMES)
def test_the_text_is_enough_to_decompress_every_vector(name: str) -> None:
    vector = load(name)
    made = from_config(vector["config"])
    symbols = decode(bytes.fromhex(vector["body"]), made.layout(public_of(vector).spec))
    previous, own, basis = (
        None if hexed is None else list(np.frombuffer(bytes.fromhex(hexed), "<f4"))
        for hexed in (vector["previous"], vector.get("own"), vector.get("basis"))
    )
    seed, number = bytes.fromhex(vector["public_seed"]), vector.get("round", 1)
    known = Known(vector["spec"], seed, previous, own, number, basis)
    fields = [
        [int(x) if np.issubdtype(field.dtype, np.integer) else x for x in field]
        for field in symbols
    ]
    values = decompressed(vector["config"], fields, known)
    assert np.array(values, "<f4").tobytes().hex() == vector["decoded"]
