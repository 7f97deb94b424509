"""Files of real updates, which `fedpress bench rate-distortion` and `fedpress plan` measure on.

An .npz with `updates` [clients, values] and, where known, `names` and `shapes` of the tensors
("256,64"), `previous`, the model's last step, and `drift` [values].
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedpress_compression.compressor import Knowledge, Public
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.tensors import ModelSpec, TensorSpec, Vector
from fedpress_protocols.errors import ConfigurationError

FIXTURE = Path(__file__).parents[1] / "benchmarks" / "fixtures" / "digits_mlp_round30.npz"
"""Four updates of a small network; in a source tree only."""

_HINT = "numpy.savez(FILE, updates=ARRAY) writes one; ARRAY is float32 [clients, values]"
_UNREADABLE = (OSError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile)


@dataclass(frozen=True)
class Updates:
    """The clients' updates [clients, spec.size], and what is public about them."""

    spec: ModelSpec
    updates: Vector
    public: Public

    @classmethod
    def load(cls, name: str) -> Updates:
        """The file `name`, or the fixture of the source tree; raises ConfigurationError."""
        path = FIXTURE if name == "fixture" else Path(name)
        try:
            with path.open("rb") as opened, np.load(opened) as file:
                arrays = {key: file[key] for key in file.files}
        except FileNotFoundError as exc:
            raise ConfigurationError(f"there is no file {path}", hint=_HINT) from exc
        except _UNREADABLE as exc:
            raise ConfigurationError(
                f"{path} is not a file of updates: it is not an .npz", hint=_HINT
            ) from exc
        if "updates" not in arrays:
            raise ConfigurationError(
                f"{path} is not a file of updates: it has no array [clients, values] `updates`",
                hint=_HINT,
            )
        try:
            updates = np.atleast_2d(arrays["updates"].astype(np.float32))
            spec = _spec(arrays, updates.shape[1])
            earlier: tuple[Knowledge, ...] = ("previous", "drift")
            knowledge = {
                kind: arrays[kind].astype(np.float32) for kind in earlier if kind in arrays
            }
        except _UNREADABLE as exc:
            raise ConfigurationError(f"{path} is not a file of updates: {exc}", hint=_HINT) from exc
        knowledge["own"] = np.zeros(spec.size, np.float32)  # of the client's first upload
        return cls(spec, updates, Public(spec, PublicRandomness(bytes(32)), knowledge))


def _spec(arrays: Mapping[str, Any], size: int) -> ModelSpec:
    """The tensors that the file names, or one of `size` values; raises ValueError."""
    if "names" not in arrays:
        return ModelSpec((TensorSpec("update", (size,)),))
    pairs = zip(arrays["names"].tolist(), arrays["shapes"].tolist(), strict=True)
    tensors = (TensorSpec(n, tuple(int(e) for e in s.split(",") if e)) for n, s in pairs)
    spec = ModelSpec(tuple(tensors))
    if spec.size != size:
        raise ValueError(f"its tensors have {spec.size} values, its updates {size}")
    return spec
