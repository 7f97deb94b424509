"""What is frozen in protocols/vectors/masking stays as it is."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpress_compression import kernels
from fedpress_protocols.masking import shamir
from fedpress_protocols.masking.graph import (
    Parameters,
    distances,
    neighbours,
    neighbours_of,
    parameters,
    second_eigenvalue,
)
from fedpress_protocols.masking.keys import ChannelKey, MaskKey, commitment, self_mask
from fedpress_protocols.masking.keystream import add_keystream
from fedpress_protocols.masking.ring import Bounded, Packing

VECTORS = Path(__file__).parents[3] / "protocols" / "vectors"
FOLDER = VECTORS / "masking"


def of(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("vector", json.loads((FOLDER / f"{name}.json").read_text()))


@of("graph")
def test_graphs(vector: dict[str, Any]) -> None:
    shape = vector["n"], vector["degree"], bytes.fromhex(vector["seed"])
    rows = neighbours(*shape)
    assert hashlib.sha256(rows.astype("<i4").tobytes()).hexdigest() == vector["sha256"]
    for slot, row in vector["rows"].items():
        assert neighbours_of(int(slot), *shape).tolist() == row


@of("spread_graph")
def test_spread_graphs(vector: dict[str, Any]) -> None:
    n, degree, seed = vector["n"], vector["degree"], bytes.fromhex(vector["seed"])
    found = parameters(n, corrupt=0.1, dropout=0.05, adversary="malicious")
    assert found == Parameters(degree, vector["threshold"], vector["honest"])
    assert second_eigenvalue(n, degree) == vector["second_eigenvalue"]
    assert distances(n, degree).tolist() == vector["distances"]
    rows = neighbours(n, degree, seed, is_spread=True)
    assert hashlib.sha256(rows.astype("<i4").tobytes()).hexdigest() == vector["sha256"]
    for slot, row in vector["rows"].items():
        assert neighbours_of(int(slot), n, degree, seed, is_spread=True).tolist() == row


@of("shamir")
def test_shares(vector: dict[str, Any]) -> None:
    threshold, xs = vector["threshold"], np.array(vector["holders"], np.uint64)
    shares = np.stack([shamir.from_bytes(bytes.fromhex(share)) for share in vector["shares"]])
    found = kernels.evaluate(np.array(vector["coefficients"], np.uint64), xs)
    assert (found == shares).all()
    for kept in (slice(threshold), slice(xs.size - threshold, None)):
        assert shamir.combine(xs[kept], shares[kept], threshold).hex() == vector["secret"]


@of("keystream")
def test_masks(vector: dict[str, Any]) -> None:
    words = np.zeros(len(vector["words"]), np.uint64)
    material = bytes.fromhex(vector["material"])
    add_keystream(words, material, vector["suite"], -1, vector["offset"])
    assert [-word % 2**64 for word in words.tolist()] == vector["words"]


@of("keys")
def test_keys(vector: dict[str, Any]) -> None:
    hybrid, (low, high) = vector["hybrid"], vector["slots"]
    taken = {name: bytes.fromhex(found) for name, found in vector.items() if isinstance(found, str)}
    sid, cfg, introduction = taken["sid"], taken["cfg_hash"], taken["introduction"]
    masks = [MaskKey(bytes.fromhex(each), hybrid=hybrid) for each in vector["mask_secrets"]]
    assert [mask.public.hex() for mask in masks] == vector["mask_publics"]
    first = masks[0].pair_mask(masks[1].public, sid=sid, cfg_hash=cfg, own=low, peer=high)
    second = masks[1].pair_mask(
        masks[0].public, sid=sid, cfg_hash=cfg, own=high, peer=low, introduction=introduction
    )
    assert first == second == taken["pair_mask"]
    assert self_mask(taken["seed"], sid=sid, slot=low) == taken["self_mask"]
    assert commitment(taken["seed"], sid=sid, slot=low) == taken["commitment"]
    channels = [
        ChannelKey(bytes.fromhex(each), hybrid=hybrid) for each in vector["channel_secrets"]
    ]
    assert [channel.public.hex() for channel in channels] == vector["channel_publics"]
    context = {"sid": sid, "associated": introduction}
    opened = channels[1].open(channels[0].public, taken["sealed"], own=high, peer=low, **context)
    assert opened == taken["message"]
    if not hybrid:
        sealed = channels[0].seal(channels[1].public, opened, own=low, peer=high, **context)
        assert sealed == taken["sealed"]


@of("packing")
def test_packed_words(vector: dict[str, Any]) -> None:
    packing = Packing.of([Bounded(*each) for each in vector["vectors"]], vector["n"])
    assert vector["segments"] == [
        {"base": each.base, "digits": each.digits, "word_bits": each.word_bits}
        for each in packing.segments
    ]
    values = {name: np.array(integers) for name, integers in vector["values"].items()}
    words = packing.pack(values)
    assert words.tolist() == vector["words"]
    body = bytes.fromhex(vector["body"])
    assert packing.to_bytes(words) == body
    found = packing.unpack(packing.from_bytes(body))
    assert {name: sums.tolist() for name, sums in found.items()} == vector["values"]


def test_the_script_writes_these_files_again(tmp_path: Path) -> None:
    folder = tmp_path / "masking"
    shutil.copytree(FOLDER, folder)
    script = VECTORS / "make_masking_vectors.py"
    subprocess.run([sys.executable, str(script), str(folder)], check=True)
    for file in FOLDER.iterdir():
        assert (folder / file.name).read_bytes() == file.read_bytes()
