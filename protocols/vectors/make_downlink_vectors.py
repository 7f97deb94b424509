"""Write the golden vectors of models on the way down.

python protocols/vectors/make_downlink_vectors.py [folder]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).parent))
from make_coding_vectors import Draw

from fedpress_compression.tensors import ModelSpec, TensorSpec, Vector
from fedpress_protocols.downlink import (
    DownlinkCoder,
    encode_difference,
    encode_model,
    encode_trained,
    multiples,
    on_grid,
    valued,
)
from fedpress_protocols.model import Model

STEPS = {"nothing": 0, "few": 6, "most": 300}


def first() -> Model:
    """A matrix, a vector of zeros, a scalar, an empty tensor, and two tensors not trained."""
    draw = Draw(31)
    values = np.array([draw.bell(400) for _ in range(24 * 20)], np.float32) / np.float32(512)
    model = Model.from_tensors(
        {
            "w": values.reshape(24, 20),
            "seen": np.array(3, np.int64),
            "b": np.zeros(20, np.float32),
            "scale": np.array(-1.25, np.float32),
            "empty": np.zeros((0, 4), np.float32),
            "mask": np.array([True, False, True]),
        }
    )
    return model.with_parameters(each_on_grid(model, 12))


def partly_frozen() -> Model:
    """Between trained tensors of float32, a frozen one of each dtype that is trained elsewhere."""
    draw = Draw(33)
    values = np.array([draw.bell(400) for _ in range(36)], np.float32) / np.float32(512)
    held = np.array([0.5, -1.75, np.inf], np.float32)
    spec = ModelSpec(
        (
            TensorSpec("up", (6, 4)),
            TensorSpec("full", (3,), "float32", frozen=True),
            TensorSpec("half", (3,), "float16", frozen=True),
            TensorSpec("seen", (), "int64"),
            TensorSpec("brain", (3,), "bfloat16", frozen=True),
            TensorSpec("down", (4, 3)),
        )
    )
    buffers: dict[str, npt.NDArray[Any]] = {
        "full": held,
        "half": held.astype(np.float16),
        "seen": np.array(7, np.int64),
        "brain": held,
    }
    model = Model(spec, values, buffers)
    return model.with_parameters(each_on_grid(model, 12))


def of_half_precision() -> Model:
    """Trained tensors of float16, subnormals among them, of bfloat16 and of float32."""
    draw = Draw(34)
    values = np.array([draw.bell(400) for _ in range(48)], np.float32) / np.float32(512)
    values[:4] = [2.0**-24, -(2.0**-20), 3 * 2.0**-24, 1.5]
    spec = ModelSpec(
        (
            TensorSpec("half", (4, 5), "float16"),
            TensorSpec("brain", (16,), "bfloat16"),
            TensorSpec("full", (12,)),
        )
    )
    model = Model(spec, values, {})
    return model.with_parameters(each_on_grid(model, 24))


def each_on_grid(model: Model, bits: int) -> Vector:
    tensors = zip(model.spec.trained, model.spec.slices.values(), strict=True)
    return np.concatenate([on_grid(t, model.parameters[where], bits) for t, where in tensors])


def moved(model: Model, num: int, exponent: int) -> Model:
    """After `num` draws of a coordinate and a move, in steps of 2**-exponent."""
    draw = Draw(32 + num)
    whole = multiples(model.parameters, 12)
    for _ in range(num):
        whole[draw.below(whole.size)] += draw.bell(3) * 2 ** (12 - exponent)
    return model.with_parameters(valued(whole, 12))


def vectors() -> dict[str, Any]:
    model = first()
    coders: tuple[DownlinkCoder, ...] = ("huffman", "auto")
    outgrown = model.with_parameters(model.parameters * np.float32(64))
    found: dict[str, Any] = {
        f"model-{coder}": {
            "file": model.to_bytes().hex(),
            "coded": encode_model(model, coder).hex(),
        }
        for coder in coders
    }
    frozen = partly_frozen()
    found |= {
        f"model-frozen-{coder}": {
            "file": frozen.to_bytes().hex(),
            "coded": encode_model(frozen, coder).hex(),
        }
        for coder in coders
    }
    pairs = {
        "frozen": (frozen, moved(frozen, 6, 8)),
        **{name: (model, moved(model, num, 8)) for name, num in STEPS.items()},
        "coarser": (moved(model, 50, 12), outgrown.with_parameters(each_on_grid(outgrown, 6))),
        "finer": (outgrown, model),
    }
    for name, (base, other) in pairs.items():
        for coder in coders:
            found[f"difference-{name}-{coder}"] = {
                "base": base.to_bytes().hex(),
                "file": other.to_bytes().hex(),
                "coded": encode_difference(base, other, coder, by_tensor=True).hex(),
            }
    halves = of_half_precision()
    after = halves.with_parameters(halves.parameters * np.float32(1.0625) + np.float32(0.01))
    after = after.with_parameters(each_on_grid(after, 20))
    for coder in coders:
        found[f"model-halves-{coder}"] = {
            "file": halves.to_bytes().hex(),
            "coded": encode_model(halves, coder).hex(),
        }
        found[f"difference-halves-{coder}"] = {
            "base": halves.to_bytes().hex(),
            "file": after.to_bytes().hex(),
            "coded": encode_difference(halves, after, coder, by_tensor=True).hex(),
        }
    thrice = multiples(moved(model, 20, 8).parameters, 12) - multiples(model.parameters, 12)
    pooled = {
        "few": (model, moved(model, STEPS["few"], 8)),
        "times-3": (model, model.with_parameters(model.parameters + valued(3 * thrice, 12))),
        "coarser": (model, model.with_parameters(each_on_grid(moved(model, 20, 12), 6))),
        "halves": (halves, halves.with_parameters(each_on_grid(halves, 8))),
    }
    for name, (base, other) in pooled.items():
        for coder in coders:
            coded = encode_difference(base, other, coder)
            if coded[0] != 5:
                raise AssertionError(f"{name}: form {coded[0]}, where 5 is to be shown")
            found[f"pooled-{name}-{coder}"] = {
                "base": base.to_bytes().hex(),
                "file": other.to_bytes().hex(),
                "coded": coded.hex(),
            }
    brain = of_half_precision()
    brain = Model(
        ModelSpec((*brain.spec.tensors, TensorSpec("frozen", (3,), "float16", frozen=True))),
        brain.parameters,
        {"frozen": np.array([0.5, -1.75, np.inf], np.float16)},
    )
    for name, each in (("counters", model), ("frozen", frozen), ("halves", brain)):
        for how in (None, *coders):
            found[f"trained-{name}-{how or 'plain'}"] = {
                "over": each.base.to_bytes().hex(),
                "file": each.to_bytes().hex(),
                "coded": encode_trained(each, how).hex(),
            }
    return found


def main(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "downlink.json").write_text(json.dumps(vectors(), indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
