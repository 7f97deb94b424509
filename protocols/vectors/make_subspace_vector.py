"""Write the golden vector of a model in a subspace: its signs, and the model that it stands for.

python protocols/vectors/make_subspace_vector.py [folder]
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedpress_protocols.model import Model
from fedpress_protocols.subspace import MOVED, SEED, WEIGHTS, Subspace, materialised

Arrays = dict[str, npt.NDArray[Any]]


def vector() -> dict[str, str]:
    base: Arrays = {
        "layer.weight": np.arange(-24, 24, dtype=np.float32).reshape(8, 6) / 8,
        "layer.bias": np.arange(-9, 9, dtype=np.float16) / 4,
        "norm.mean": np.array([0.5, 1.5], np.float32),
        "norm.count": np.array(3, np.int64),
    }
    own: Arrays = {
        SEED: np.arange(32, dtype=np.uint8),
        MOVED: np.array([1, 1, 0, 0], np.uint8),
        WEIGHTS: np.array([0.1, -0.2, 0.3, 0.0, 1e-3, -5.0, 2**-30], np.float32),
    }
    frozen = ["layer.weight", "layer.bias", "norm.mean"]
    model = Model.from_tensors({**base, **own}, frozen=frozen)
    whole = materialised(model).to_bytes()
    return {
        "model": model.to_bytes().hex(),
        "negative": Subspace.of(model).negative.tobytes().hex(),
        "materialised": whole.hex(),
        "sha256": hashlib.sha256(whole).hexdigest(),
    }


def main(folder: Path) -> None:
    (folder / "subspace.json").write_text(json.dumps(vector(), indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
