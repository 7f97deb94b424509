"""Write the golden vectors of sketches.

    python protocols/vectors/make_sketch_vectors.py [folder]

A row of `sketches.json` has the plan's `public_seed`, the `digest` of the spec, the number of cells
m (`sketch`), and the values of an update of `size` at `indices`, zeros elsewhere. They are whole
multiples of a power of two such that every sum is exact, in whatever order: `rotated`, float32, is
then the same in every implementation, and so is `sketched`, what the body has. A vector never
changes once it was released.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedpress_compression import sketches
from fedpress_compression.compressor import Public
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.tensors import ModelSpec, TensorSpec

SEED = bytes(range(32))
Row = dict[str, Any]


def vector(name: str, num_cells: int, size: int, values: dict[int, float]) -> Row:
    spec = ModelSpec((TensorSpec("w", (size,)),))
    update = np.zeros(size, np.float32)
    update[list(values)] = list(values.values())
    public = Public(spec, PublicRandomness(SEED))
    cells = sketches.sketch(update, num_cells, public.stream(sketches.LABEL))
    return {
        "name": name,
        "public_seed": SEED.hex(),
        "digest": spec.digest,
        "sketch": num_cells,
        "size": size,
        "indices": list(values),
        "values": list(values.values()),
        "rotated": cells.astype("<f4").tobytes().hex(),
        "sketched": sketches.to_bytes(cells).hex(),
    }


def vectors() -> Iterator[Row]:
    yield vector("zeros", 64, 100, {})
    yield vector("one value", 64, 100, {17: -0.75})
    yield vector(
        "fewer values than cells", 256, 31, {i: (i * 29 % 31 - 15) / 64 for i in range(31)}
    )
    few = {i: (i * 59 % 149 - 74) / 512 for i in range(149)}
    yield vector("more values than cells", 64, 149, few)
    spread = {i: (i % 17 - 8) / 32 for i in range(5, 2**18 + 300, 10_007)}
    yield vector("more values than 2^18", 64, 2**18 + 300, {**spread, 2**18 + 299: 0.5})


def main(folder: Path) -> None:
    (folder / "sketches.json").write_text(json.dumps(list(vectors()), indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
