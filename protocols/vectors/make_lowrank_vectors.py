"""Write the golden vectors of low-rank, sketching and feedback compressors.

    python protocols/vectors/make_lowrank_vectors.py [folder]

As make_compressor_vectors.py does for the others, and with the round. The matrices are of about
rank 2, from a generator of their own. A vector never changes once it was released.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedpress_compression.coding import encode
from fedpress_compression.compressor import Compressor, Knowledge, Public, to_config
from fedpress_compression.compressors.cafe import Cafe
from fedpress_compression.compressors.count_sketch import CountSketch
from fedpress_compression.compressors.delta import Delta
from fedpress_compression.compressors.ef21 import EF21
from fedpress_compression.compressors.lowrank import LowRank
from fedpress_compression.compressors.powersgd import PowerSGD
from fedpress_compression.compressors.powersgd_onesided import OneSidedPowerSGD
from fedpress_compression.compressors.quantize import Quantize
from fedpress_compression.compressors.topk import TopK
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.tensors import ModelSpec, TensorSpec, Vector

SPEC = ModelSpec(
    (
        TensorSpec("a.weight", (14, 11)),
        TensorSpec("a.bias", (14,)),
        TensorSpec("conv", (6, 2, 3, 3)),
        TensorSpec("gain", ()),
    )
)
SEED = bytes(range(32))


class Draw:
    """Knuth's MMIX generator, the upper 32 bits of each state."""

    def __init__(self, seed: int) -> None:
        self._state = seed

    def below(self, bound: int) -> int:
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self._state >> 32) * bound >> 32

    def bell(self) -> float:
        """About normal, in steps of 2**-16."""
        return (sum(self.below(2**16) for _ in range(12)) - 6 * 2**16) / 2**16


def low_rank(seed: int) -> Vector:
    """Matrices of about rank 2, and noise."""
    draw, parts = Draw(seed), []
    for tensor in SPEC.trained:
        rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
        columns = tensor.size // rows
        left = np.array([[draw.bell() for _ in range(2)] for _ in range(rows)])
        right = np.array([[draw.bell() for _ in range(2)] for _ in range(columns)])
        noise = np.array([[draw.bell() / 8 for _ in range(columns)] for _ in range(rows)])
        terms = np.einsum("ir,kr->ikr", left, right)
        parts.append((terms[:, :, 0] + terms[:, :, 1] + noise).ravel())
    return np.concatenate(parts).astype(np.float32)


def cases() -> Iterator[tuple[str, Compressor[Any], int, bool, bool]]:
    """Name, compressor, round, whether there was a step before, and whether the client draws in
    private, or rounds what its own linear algebra made."""
    yield "cafe", Cafe(TopK(0.1)), 2, True, False
    yield "cafe-left-out", Cafe(TopK(0.1), guard=0.01), 2, True, False
    yield "cafe-no-guard", Cafe(TopK(0.1), factor=0.5, guard=None), 2, True, False
    yield "ef21", EF21(TopK(0.1)), 2, True, False
    yield "ef21-part", EF21(TopK(0.1), participation=0.1), 2, True, False
    yield "delta", Delta(TopK(0.1)), 2, False, False
    rest, rate = Quantize(4), 1.5
    yield "lowrank-4-bits", LowRank(1, 4, min_compression_rate=rate, rest=rest), 1, False, True
    yield "lowrank-8-bits", LowRank(2, 8, min_compression_rate=rate, rest=rest), 1, False, True
    yield "lowrank-nothing", LowRank(2, 8, min_compression_rate=9.0), 1, False, True
    yield "powersgd", PowerSGD(2, min_compression_rate=rate), 1, False, True
    yield "powersgd-float16", PowerSGD(1, 2, min_compression_rate=rate, rest=rest), 1, False, True
    yield "powersgd-two-trips", PowerSGD(2, min_compression_rate=rate, trips=2), 2, True, True
    one_sided = OneSidedPowerSGD(2, min_compression_rate=rate)
    yield "powersgd-onesided-first", one_sided, 1, False, True
    yield "powersgd-onesided-even", one_sided, 2, True, True
    yield "powersgd-onesided-odd", one_sided, 3, True, True
    beyond = OneSidedPowerSGD(5, min_compression_rate=1.0)
    yield "powersgd-onesided-beyond", beyond, 4, True, True
    yield "count-sketch", CountSketch(3, 0.5), 1, False, False
    median = CountSketch(3, 0.5, recover="median", keep=0.1)
    yield "count-sketch-median", median, 1, False, False
    seeded = CountSketch(4, 0.9, 12, recover="median", keep=0.05, seed=7)
    yield "count-sketch-seed", seeded, 1, False, False


def vectors() -> Iterator[tuple[str, dict[str, Any]]]:
    update = low_rank(1)
    for name, compressor, number, stepped, drawn in cases():
        previous = low_rank(2) if stepped else np.zeros(SPEC.size, np.float32)
        own = low_rank(3) if "own" in compressor.needs else None
        knowledge: dict[Knowledge, Vector] = {"previous": previous}
        if own is not None:
            knowledge["own"] = own
        public = Public(SPEC, PublicRandomness(SEED), knowledge, number)
        between = {}
        if isinstance(compressor, PowerSGD) and compressor.trips == 2:
            told = compressor.first(update, public)
            basis = compressor.basis(compressor.images(told, SPEC), SPEC)
            public = replace(public, knowledge={**knowledge, "basis": basis})
            first = encode(told, compressor.first_layout(SPEC))
            between = {"first": first.hex(), "basis": as_hex(basis)}
        rng = np.random.default_rng(0)
        symbols, _ = compressor.compress(update, compressor.init(SPEC), public, rng)
        yield (
            name,
            {
                "config": to_config(compressor),
                "spec": [[t.name, list(t.shape), t.dtype] for t in SPEC.tensors],
                "public_seed": SEED.hex(),
                "round": number,
                "previous": as_hex(previous) if compressor.needs & {"previous"} else None,
                **({} if own is None else {"own": as_hex(own)}),
                **between,
                "update": as_hex(update),
                "drawn": drawn,
                "body": encode(symbols, compressor.layout(SPEC)).hex(),
                "decoded": as_hex(compressor.decompress(symbols, public).dense()),
            },
        )


def as_hex(values: Vector) -> str:
    return values.astype("<f4").tobytes().hex()


def main(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name, found in vectors():
        (folder / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    here = Path(__file__).parent / "compressors"
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else here)
