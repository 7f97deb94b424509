"""Models in a random subspace: K trained weights stand for a change of a base of any size.

Experimental: names and meaning may change in any release. Such a model has one trained tensor,
WEIGHTS [K]. The tensors of its base are frozen; MOVED has a 1 for each of those that are moved, and
SEED the 32 bytes that signs are drawn from. With the moved tensors' values counted through, in the
order of the spec, value i is

    base[i] + sign[i] * weights[i mod K]

in float32, then rounded to the tensor's dtype. So the K directions have disjoint supports and
entries of 1 and -1; FedKSeed's (Qin et al. 2023, arXiv:2312.06353) are K dense vectors, whose sum
takes K times the time. A sign is exact and there is one addition, so every machine has the same
bits, whatever part it computes at a time. SPEC.md, "Models in a subspace".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fedpress_compression.errors import ConfigurationError
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.tensors import TRAINED_DTYPES, ModelSpec, TensorSpec, Vector
from fedpress_protocols.model import Model, Zeros

WEIGHTS = "fedpress.subspace.weights"
SEED = "fedpress.subspace.seed"
MOVED = "fedpress.subspace.moved"
SEED_BYTES = 32
_BLOCK = 2**18
"""Values or signs that are made at a time, a multiple of 64."""


@dataclass(frozen=True)
class Subspace:
    """The frozen tensors that are `moved`, `num_weights` K and the 32 bytes of the `seed`."""

    moved: tuple[TensorSpec, ...]
    num_weights: int
    seed: bytes

    def __post_init__(self) -> None:
        for tensor in self.moved:
            if tensor.dtype not in TRAINED_DTYPES:
                raise ConfigurationError(
                    f"tensor {tensor.name!r} is {tensor.dtype} and cannot be moved; "
                    f"{', '.join(TRAINED_DTYPES)} can",
                    hint="convert it: float32 in the place of float64",
                )
        if not 1 <= self.num_weights <= self.size:
            raise ConfigurationError(
                f"a subspace of {self.num_weights} weights for {self.size} moved values; it needs "
                "at least one weight, and at most one for each value"
            )
        if len(self.seed) != SEED_BYTES:
            raise ConfigurationError(f"a seed of {len(self.seed)} bytes, expected {SEED_BYTES}")

    @classmethod
    def of(cls, model: Model) -> Subspace:
        """The subspace that `model` is in; raises ConfigurationError for any other model."""
        tensors = {tensor.name: tensor for tensor in model.spec.tensors}
        if not {WEIGHTS, SEED, MOVED}.issubset(tensors):
            raise ConfigurationError(
                f"the model is in no subspace: it lacks {WEIGHTS!r}, {SEED!r} or {MOVED!r}",
                hint="begin the task with the initial_model() of a ZerothOrderTrainer",
            )
        rest = others(model.spec)
        weights = tensors[WEIGHTS]
        expected = {
            WEIGHTS: ("float32", weights.shape[:1]),
            SEED: ("uint8", (SEED_BYTES,)),
            MOVED: ("uint8", (len(rest),)),
        }
        for name, (dtype, shape) in expected.items():
            tensor = tensors[name]
            if (tensor.dtype, tensor.shape) != (dtype, shape) or not tensor.shape:
                raise ConfigurationError(
                    f"{name!r} is {tensor.dtype}{list(tensor.shape)}, expected "
                    f"{dtype}{list(shape) or '[K]'}"
                )
        if model.spec.trained != (weights,):
            raise ConfigurationError(f"a model in a subspace trains {WEIGHTS!r} and nothing else")
        marks = model.buffers[MOVED]
        if (marks > 1).any():
            raise ConfigurationError(f"{MOVED!r} has a mark of {int(marks.max())}, not 0 or 1")
        moved = tuple(tensor for tensor, mark in zip(rest, marks, strict=True) if mark)
        return cls(moved, weights.size, model.buffers[SEED].tobytes())

    @property
    def size(self) -> int:
        """The number of moved values."""
        return sum(tensor.size for tensor in self.moved)

    @cached_property
    def negative(self) -> npt.NDArray[np.uint8]:
        """A bit for each moved value, 1 if its sign is negative; each byte from its lowest bit up.

        [8 ceil(size / 64)], drawn in blocks.
        """
        count = -(-self.size // 64)
        bits = np.empty(8 * count, np.uint8)
        stream = PublicRandomness(self.seed).stream("subspace")
        for start in range(0, count, _BLOCK // 64):
            words = stream.words(min(_BLOCK // 64, count - start))
            bits[8 * start :][: 8 * words.size] = words.astype("<u8").view(np.uint8)
        return bits


def others(spec: ModelSpec) -> tuple[TensorSpec, ...]:
    """The tensors that MOVED has a mark for, in order."""
    return tuple(t for t in spec.tensors if t.name not in (WEIGHTS, SEED, MOVED))


def materialised(model: Model, zeros: Zeros = np.zeros, *, block: int = _BLOCK) -> Model:
    """The model that a `model` in a subspace stands for, with its moved tensors trained.

    Computed `block` values at a time; any block gives the same bits. Raises ConfigurationError for
    a model in no subspace.
    """
    subspace = Subspace.of(model)
    names = {tensor.name for tensor in subspace.moved}
    tensors = tuple(
        replace(tensor, frozen=tensor.name not in names and tensor.frozen)
        for tensor in others(model.spec)
    )
    spec = ModelSpec(tensors)
    parameters = zeros(spec.size, np.float32)
    block = min(block, max(tensor.size for tensor in subspace.moved))
    change = _Change(subspace, model.parameters, block)
    start = 0
    for tensor in subspace.moved:
        values, base = parameters[spec.slices[tensor.name]], model.buffers[tensor.name].reshape(-1)
        for first in range(0, tensor.size, block):
            part = slice(first, min(first + block, tensor.size))
            values[part] = base[part].astype(np.float32) + change(start + first, start + part.stop)
        start += tensor.size
    buffers = {t.name: model.buffers[t.name] for t in tensors if not t.is_trained}
    return Model(spec, parameters, buffers)


class _Change:
    """sign[i] * weights[i mod K] for up to `block` values i in a row."""

    def __init__(self, subspace: Subspace, weights: Vector, block: int) -> None:
        self._subspace = subspace
        self._tiled = np.resize(weights, block + weights.size)

    def __call__(self, start: int, stop: int) -> Vector:
        weights = self._tiled[start % self._subspace.num_weights :][: stop - start]
        packed = self._subspace.negative[start // 8 : -(-stop // 8)]
        bits = np.unpackbits(packed, bitorder="little")[start % 8 :][: stop - start]
        return np.where(bits, -weights, weights)
