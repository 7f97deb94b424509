"""Write the golden vector of a map of activity.

python protocols/vectors/make_activity_vector.py [folder]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from make_coding_vectors import Draw

from fedpress_compression import activity
from fedpress_compression.contexts import ranks
from fedpress_compression.tensors import ModelSpec, TensorSpec, Vector

SPEC = ModelSpec((TensorSpec("w", (24, 20)), TensorSpec("b", (20,)), TensorSpec("k", (4, 3, 5))))


def steps(draw: Draw, num: int) -> list[Vector]:
    """Moves that are large in some rows, in eighths, some of them exactly zero."""
    busy = [draw.below(6) == 0 for _ in range(SPEC.size // 20)]
    return [
        np.array(
            [draw.bell(30 if busy[at // 20] else 3) / 8 for at in range(SPEC.size)], np.float32
        )
        for _ in range(num)
    ]


def vector() -> dict[str, Any]:
    moves = steps(Draw(21), 3)
    average = np.zeros(SPEC.size, np.float32)
    for step in moves:
        average = activity.averaged(average, step)
    body = activity.to_bytes(average, SPEC)
    classes = activity.from_bytes(body, SPEC)
    return {
        "spec": [[t.name, list(t.shape), t.dtype] for t in SPEC.tensors],
        "steps": [as_hex(step) for step in moves],
        "average": as_hex(average),
        "body": body.hex(),
        "classes": classes.astype(int).tolist(),
        "contexts": [int(rank) + 16 * (rank > 0) for rank in ranks(classes).tolist()],
    }


def as_hex(values: Vector) -> str:
    return values.astype("<f4").tobytes().hex()


def main(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "activity.json").write_text(json.dumps(vector()) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
