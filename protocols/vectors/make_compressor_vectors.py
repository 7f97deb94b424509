"""Write the golden vectors of the compressors.

    python protocols/vectors/make_compressor_vectors.py [folder]

One file for each form of each method: its configuration, what both ends know, an update, a body
and what that decodes to, bit for bit. Vectors of float32 are the hex of their little-endian bytes.
The update is from a generator of its own. A method that draws in private is `drawn`: its body
stands for many. A vector never changes once it was released: a new form is a new vector.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedpress_compression.coding import encode
from fedpress_compression.compressor import Public, from_config, to_config
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.tensors import ModelSpec, TensorSpec, Vector

SPEC = ModelSpec((TensorSpec("w", (12, 14)), TensorSpec("b", (14,)), TensorSpec("g", ())))
SEED = bytes(range(32))

Config = dict[str, Any]


class Draw:
    """Knuth's MMIX generator, the upper 32 bits of each state."""

    def __init__(self, seed: int) -> None:
        self._state = seed

    def below(self, bound: int) -> int:
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self._state >> 32) * bound >> 32

    def heavy_tailed(self, size: int) -> Vector:
        """Cubes in (-1, 1), three in ten of them zero."""
        drawn = [(self.below(2**16) - 2**15, self.below(10) >= 3) for _ in range(size)]
        return np.array([(x / 2**15) ** 3 * kept for x, kept in drawn], np.float32)


class DrawsForAll(np.random.Generator):
    """Draws for all coordinates of an update and gives those at its zeros: `sign` did so when its
    vector was released. Since then it draws for the zeros alone."""

    def __init__(self, seed: int, update: Vector) -> None:
        super().__init__(np.random.PCG64(seed))
        self._is_zero = update == 0

    def random(self, size: int) -> npt.NDArray[np.float64]:  # type: ignore[override]
        draws: npt.NDArray[np.float64] = super().random(self._is_zero.size)[self._is_zero]
        return draws[:size]


def configs() -> Iterator[tuple[str, Config, bool]]:
    """Name, configuration, and whether the client draws in private."""
    yield "none", {"id": "none"}, False
    for dtype in ("bfloat16", "float16"):
        yield f"half-{dtype}", {"id": "half", "dtype": dtype}, False
    for bits in (1, 2, 8):
        yield f"quantize-{bits}", {"id": "quantize", "bits": bits}, bits == 1
    yield "quantize-affine", {"id": "quantize", "bits": 3, "grid": "affine"}, False
    yield "quantize-clip", {"id": "quantize", "bits": 4, "clip": 0.25}, False
    yield "topk", {"id": "topk", "fraction": 0.1}, False
    yield "topk-chunk", {"id": "topk", "fraction": 0.1, "chunk": 50}, False
    ternary = {"magnitude_bits": 0, "scope": "tensor", "chunk": 100}
    yield "topk-tensor", {"id": "topk", "fraction": 0.1, **ternary}, False
    yield "randomk", {"id": "randomk", "fraction": 0.1}, False
    yield "randomk-most", {"id": "randomk", "fraction": 0.9, "unbiased": True}, False
    yield "randomk-bits", {"id": "randomk", "count": 30, "bits": 4, "clip": 0.5}, False
    own = {"shared": False, "unbiased": True, "bits": 6, "rounding": "stochastic"}
    yield "randomk-own", {"id": "randomk", "fraction": 0.2, "clip": 0.5, **own}, True
    yield "bernoulli", {"id": "bernoulli", "probability": 0.2}, True
    yield "threshold", {"id": "threshold", "value": 0.1, "at_most": 0.3}, False
    yield "threshold-0", {"id": "threshold", "value": 0.1, "magnitude_bits": 0}, False
    yield "stc", {"id": "stc", "fraction": 0.1}, False
    yield "shared-support", {"id": "shared_support", "fraction": 0.2, "clip": 0.5}, False
    yield "structured", {"id": "structured", "bits": 6}, False
    yield "structured-raw", {"id": "structured", "bits": None}, False
    yield "qsgd", {"id": "qsgd", "levels": 3, "bucket": 64}, True
    yield "sign", {"id": "sign", "chunk": 64}, True
    yield "terngrad", {"id": "terngrad"}, True
    for rate in (0.25, 1, 2, 3, 4):
        yield f"eden-{rate}", {"id": "eden", "bits": rate}, True
    yield "simhash", {"id": "simhash", "bits": 0.5}, False
    yield "ecsq", {"id": "ecsq", "control": "nmse", "target": 0.05}, False
    clipped = {"id": "topk", "fraction": 0.05}
    sparse = {"id": "topk", "fraction": 0.1, "scope": "tensor"}
    yield "clip", {"id": "clip", "inner": clipped, "max_norm": 0.5}, False
    rules = [["g", {"id": "none"}]]
    yield "per-tensor", {"id": "per_tensor", "min_size": 10, "rules": rules}, False
    coarse = {"id": "quantize", "bits": 4}
    rules = [["kind:linear", {"id": "lowrank"}], ["b", coarse], ["kind:norm", coarse]]
    yield "per-tensor-kinds", {"id": "per_tensor", "rules": rules}, True
    yield (
        "error-feedback",
        {"id": "error_feedback", "inner": {"id": "topk", "fraction": 0.1}},
        False,
    )
    for coder in ("huffman", "range", "lanes"):
        yield f"coded-{coder}", {"id": "coded", "inner": sparse, "coder": coder}, False
    refined = {"first": sparse, "second": {"id": "ecsq", "control": "nmse", "target": 0.2}}
    yield "successive-refinement", {"id": "successive_refinement", **refined}, False
    yield "dgc", {"id": "dgc", "inner": sparse, "max_norm": 0.5, "cohort": 4}, False


def vectors() -> Iterator[tuple[str, dict[str, Any]]]:
    draw = Draw(1)
    previous = draw.heavy_tailed(SPEC.size)
    update = draw.heavy_tailed(SPEC.size)
    update[28:42] = 0  # a row that was not touched
    public = Public(SPEC, PublicRandomness(SEED), {"previous": previous})
    for name, config, drawn in configs():
        made = from_config(config)
        rng = DrawsForAll(0, update) if name == "sign" else np.random.default_rng(0)
        symbols, _ = made.compress(update, made.init(SPEC), public, rng)
        body = encode(symbols, made.layout(SPEC))
        decoded = made.decompress(symbols, public).dense()
        yield (
            name,
            {
                "config": to_config(made),
                "spec": [[t.name, list(t.shape), t.dtype] for t in SPEC.tensors],
                "public_seed": SEED.hex(),
                "previous": as_hex(previous) if made.needs else None,
                "update": as_hex(update),
                "drawn": drawn,
                "body": body.hex(),
                "decoded": as_hex(decoded),
            },
        )


def as_hex(vector: Vector) -> str:
    return vector.astype("<f4").tobytes().hex()


def main(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name, vector in vectors():
        text = json.dumps(vector, indent=1) + "\n"
        (folder / f"{name}.json").write_text(text)


if __name__ == "__main__":
    here = Path(__file__).parent / "compressors"
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else here)
