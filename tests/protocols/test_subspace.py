"""Models in a subspace: the same bits in any block, bounded memory, and what is refused."""

from __future__ import annotations

import hashlib
import json
import runpy
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpress_compression.errors import ConfigurationError
from fedpress_protocols.model import Model
from fedpress_protocols.subspace import MOVED, SEED, WEIGHTS, Subspace, materialised

VECTORS = Path(__file__).parents[2] / "protocols" / "vectors"
VECTOR = VECTORS / "subspace.json"


def model(
    sizes: tuple[int, ...] = (130, 7), num_weights: int = 16, dtype: str = "float32"
) -> Model:
    rng = np.random.default_rng(1)
    base = {f"t{index}": rng.normal(size=size).astype(dtype) for index, size in enumerate(sizes)}
    tensors = {
        **base,
        "table": np.arange(5),
        "still": np.ones(3, np.float32),
        SEED: np.arange(32, dtype=np.uint8),
        MOVED: np.array([*[1] * len(sizes), 0, 0], np.uint8),
        WEIGHTS: rng.normal(size=num_weights).astype(np.float32),
    }
    return Model.from_tensors(tensors, frozen=[*base, "still"])


@given(
    sizes=st.lists(st.integers(0, 150), min_size=1, max_size=4),
    num_weights=st.integers(1, 200),
    block=st.integers(1, 300),
)
def test_any_block_gives_the_same_bits(sizes: list[int], num_weights: int, block: int) -> None:
    num_weights = min(num_weights, max(1, sum(sizes)))
    made = model((*sizes, 1), num_weights)
    assert materialised(made, block=block).to_bytes() == materialised(made).to_bytes()


def test_a_value_is_its_base_and_a_weight_with_a_sign() -> None:
    made = model()
    signs = np.unpackbits(Subspace.of(made).negative, bitorder="little")[:137]
    base = np.concatenate([made.buffers["t0"], made.buffers["t1"]])
    whole = materialised(made)
    expected = (
        base + np.where(signs, -1, 1).astype(np.float32) * made.parameters[np.arange(137) % 16]
    )
    assert np.array_equal(whole.parameters, expected)
    assert 40 < signs.sum() < 97
    assert [tensor.name for tensor in whole.spec.trained] == ["t0", "t1"]
    assert np.array_equal(whole.buffers["table"], np.arange(5))
    assert [tensor.name for tensor in whole.spec.tensors if tensor.frozen] == ["still"]


def test_signs_do_not_depend_on_the_blocks_they_are_drawn_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = Subspace.of(model((1000,))).negative
    monkeypatch.setattr("fedpress_protocols.subspace._BLOCK", 64)
    assert np.array_equal(Subspace.of(model((1000,))).negative, drawn)


def test_memory_is_the_model_a_bit_for_each_value_and_a_block() -> None:
    size = 2**21
    made = model((size,), 4096)
    tracemalloc.start()
    materialised(made, block=2**12)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * size + size // 8 + 2**20


def test_the_vector_is_met() -> None:
    vector = json.loads(VECTOR.read_text())
    made = Model.from_bytes(bytes.fromhex(vector["model"]))
    assert Subspace.of(made).negative.tobytes().hex() == vector["negative"]
    whole = materialised(made).to_bytes()
    assert hashlib.sha256(whole).hexdigest() == vector["sha256"]
    assert whole.hex() == vector["materialised"]


def test_the_script_writes_the_golden_model_that_is_there(tmp_path: Path) -> None:
    script = runpy.run_path(str(VECTORS / "make_subspace_vector.py"))
    script["main"](tmp_path)
    assert (tmp_path / "subspace.json").read_text() == VECTOR.read_text()


def changed(name: str, value: Any) -> Model:
    made = model()
    tensors = {**made.tensors(), name: value}
    frozen = [tensor.name for tensor in made.spec.tensors if tensor.frozen]
    return Model.from_tensors(tensors, frozen=frozen)


def without(name: str) -> Model:
    made = model()
    tensors = {each: array for each, array in made.tensors().items() if each != name}
    frozen = [tensor.name for tensor in made.spec.tensors if tensor.frozen]
    return Model.from_tensors(tensors, frozen=frozen)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (without(SEED), "in no subspace"),
        (changed(SEED, np.zeros(31, np.uint8)), r"uint8\[31\], expected uint8\[32\]"),
        (changed(MOVED, np.ones(3, np.uint8)), r"uint8\[3\], expected uint8\[4\]"),
        (changed(MOVED, np.array([1, 2, 0, 0], np.uint8)), "a mark of 2"),
        (changed(MOVED, np.zeros(4, np.uint8)), "16 weights for 0 moved values"),
        (changed(MOVED, np.array([1, 1, 1, 0], np.uint8)), "'table' is int64 and cannot be moved"),
        (changed(WEIGHTS, np.ones(138, np.float32)), "138 weights for 137 moved values"),
        (changed(WEIGHTS, np.ones((2, 3), np.float32)), r"float32\[2, 3\], expected float32\[2\]"),
        (changed(WEIGHTS, np.float32(1)), r"float32\[\], expected float32\[K\]"),
        (changed("more", np.ones(2, np.float32)), "expected uint8.5."),
    ],
)
def test_a_model_that_is_in_no_subspace_is_refused(made: Model, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        materialised(made)


def test_nothing_but_the_weights_is_trained() -> None:
    made = model()
    loose = Model.from_tensors(made.tensors(), frozen=["still"])
    with pytest.raises(ConfigurationError, match=r"trains '.*weights' and nothing else"):
        Subspace.of(loose)


def test_a_seed_has_32_bytes() -> None:
    subspace = Subspace.of(model())
    with pytest.raises(ConfigurationError, match="a seed of 3 bytes, expected 32"):
        Subspace(subspace.moved, 16, b"abc")
