"""The tensors of a model: names, shapes and dtypes, and how they form one flat vector."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from fedpress_compression.errors import ConfigurationError

Vector = npt.NDArray[np.float32]
"""A flat float32 vector over the trained tensors of a spec, in its order."""

TRAINED_DTYPES = ("float32", "float16", "bfloat16")
_STORED_AS = {
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<u2",
    "float64": "<f8",
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "i1",
    "uint64": "<u8",
    "uint32": "<u4",
    "uint16": "<u2",
    "uint8": "u1",
    "bool": "?",
}
_FROZEN = "frozen"
MAX_TENSORS = 32_768
MAX_NAME_BYTES = 512
"""Of a tensor's name in UTF-8."""
_MAX_RANK = 32
_MAX_EXTENTS = 2**48
"""The product of a tensor's extents, those of zero left out."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor's name, shape and dtype (numpy's names, and bfloat16).

    A `frozen` tensor of a dtype that is trained otherwise is carried from model to model instead:
    no update is over it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    frozen: bool = False

    def __post_init__(self) -> None:
        _check_name(self.name)
        if self.dtype not in _STORED_AS:
            known = ", ".join(_STORED_AS)
            raise ConfigurationError(f"tensor {self.name!r} is {self.dtype}; known are {known}")
        if self.frozen and self.dtype not in TRAINED_DTYPES:
            raise ConfigurationError(
                f"tensor {self.name!r} is {self.dtype}, which is never trained, and called frozen; "
                f"only {', '.join(TRAINED_DTYPES)} can be"
            )
        if any(extent < 0 for extent in self.shape):
            raise ConfigurationError(f"tensor {self.name!r} has shape {self.shape}")
        if len(self.shape) > _MAX_RANK:
            raise ConfigurationError(
                f"tensor {self.name!r} has {len(self.shape)} dimensions; at most {_MAX_RANK} are "
                "supported"
            )
        if math.prod(extent or 1 for extent in self.shape) > _MAX_EXTENTS:
            raise ConfigurationError(
                f"tensor {self.name!r} has shape {list(self.shape)}; the product of its extents, "
                "zeros left out, must be at most 2**48"
            )

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_trained(self) -> bool:
        return self.dtype in TRAINED_DTYPES and not self.frozen

    @property
    def num_bytes(self) -> int:
        return self.size * np.dtype(_STORED_AS[self.dtype]).itemsize


@dataclass(frozen=True)
class ModelSpec:
    """The tensors of a model, in order; equal specs have equal digests."""

    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        if len(self.tensors) > MAX_TENSORS:
            raise ConfigurationError(
                f"a model of {len(self.tensors)} tensors; at most {MAX_TENSORS} are supported: "
                "stack small ones into one"
            )
        names = [tensor.name for tensor in self.tensors]
        if len(set(names)) != len(names):
            raise ConfigurationError("two tensors of the model have one name")

    @cached_property
    def trained(self) -> tuple[TensorSpec, ...]:
        return tuple(tensor for tensor in self.tensors if tensor.is_trained)

    @cached_property
    def untrained(self) -> tuple[TensorSpec, ...]:
        return tuple(tensor for tensor in self.tensors if not tensor.is_trained)

    @cached_property
    def size(self) -> int:
        """d, the number of trained values."""
        return sum(tensor.size for tensor in self.trained)

    @cached_property
    def slices(self) -> Mapping[str, slice]:
        """The slice of the flat vector that each trained tensor has."""
        by_name, start = {}, 0
        for tensor in self.trained:
            by_name[tensor.name] = slice(start, start + tensor.size)
            start += tensor.size
        return by_name

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of `to_json`."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """The names, shapes and dtypes in order, and which are frozen, as JSON without spaces."""
        rows = [
            [t.name, list(t.shape), t.dtype, *([_FROZEN] if t.frozen else [])] for t in self.tensors
        ]
        return json.dumps(rows, separators=(",", ":"), ensure_ascii=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> ModelSpec:
        """Parse the text of `to_json`; raises ConfigurationError for any other text."""
        try:
            rows = json.loads(text)
            tensors = tuple(
                TensorSpec(name, tuple(int(extent) for extent in shape), dtype, mark == [_FROZEN])
                for name, shape, dtype, *mark in rows
            )
            if any(tensor.name.encode() == b"__metadata__" for tensor in tensors):
                raise ValueError("a tensor by the name of a safetensors file's metadata")
            spec = cls(tensors)
            is_same = spec.to_json().encode() == (text.encode() if isinstance(text, str) else text)
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as exc:
            raise ConfigurationError(f"no list of tensors: {exc}") from exc
        if not is_same:
            raise ConfigurationError("a list of tensors that is not in its one form")
        return spec

    def select(self, names: Iterable[str]) -> ModelSpec:
        """The spec of the trained tensors named, in this spec's order."""
        wanted = set(names)
        return ModelSpec(tuple(t for t in self.trained if t.name in wanted))

    def flatten(self, tensors: Mapping[str, npt.NDArray[Any]]) -> Vector:
        """Trained `tensors` as one float32 vector; raises ConfigurationError on a wrong shape."""
        flat = np.empty(self.size, np.float32)
        for tensor in self.trained:
            array = tensors.get(tensor.name)
            if array is None or tuple(array.shape) != tensor.shape:
                problem = "missing" if array is None else f"of shape {tuple(array.shape)}"
                raise ConfigurationError(
                    f"tensor {tensor.name!r} is {problem}, expected shape {tensor.shape}"
                )
            flat[self.slices[tensor.name]] = np.asarray(array, np.float32).ravel()
        return flat

    def unflatten(self, flat: Vector) -> dict[str, npt.NDArray[np.float32]]:
        """Views of `flat` [d], one for each trained tensor, in its shape."""
        if flat.shape != (self.size,):
            raise ConfigurationError(f"a vector of shape {flat.shape}, expected ({self.size},)")
        return {t.name: flat[self.slices[t.name]].reshape(t.shape) for t in self.trained}

    def part(self, flat: Vector, chosen: ModelSpec) -> Vector:
        """The values [chosen.size] in `flat` [d] of the tensors of `chosen`, a `select` of this."""
        if chosen.size == self.size:
            return flat
        return np.concatenate([flat[self.slices[tensor.name]] for tensor in chosen.trained])

    def with_part(self, flat: Vector, chosen: ModelSpec, values: Vector) -> Vector:
        """`flat` [d] with `values` [chosen.size] in the place of its `part`."""
        if chosen.size == self.size:
            return values
        whole = flat.copy()
        for tensor in chosen.trained:
            whole[self.slices[tensor.name]] = values[chosen.slices[tensor.name]]
        return whole


def stored_dtype(tensor: TensorSpec) -> np.dtype[Any]:
    """As numpy calls what a file holds of `tensor`; bfloat16 lies there as uint16."""
    return np.dtype(_STORED_AS[tensor.dtype])


def array_dtype(tensor: TensorSpec) -> np.dtype[Any]:
    """As numpy calls the array of `tensor` in memory; bfloat16, which it lacks, is float32."""
    return np.dtype("float32" if tensor.dtype == "bfloat16" else tensor.dtype)


def to_bfloat16(array: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The upper half of each float32, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(array).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def from_bfloat16(stored: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Invert `to_bfloat16`; exact."""
    return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _check_name(name: str) -> None:
    """Raise ConfigurationError for a tensor's name that a log, a terminal or a folder would not
    show as it is."""
    if not name:
        raise ConfigurationError("a tensor has no name")
    if not name.isprintable():
        raise ConfigurationError(
            f"tensor {ascii(name)[:200]} has a control or invisible character in its name; use "
            "printable ones"
        )
    if len(name.encode()) > MAX_NAME_BYTES:
        raise ConfigurationError(
            f"tensor {name[:64]!r}... has a name of {len(name.encode())} bytes; at most "
            f"{MAX_NAME_BYTES} are supported"
        )
    if ".." in name.replace("\\", "/").split("/"):
        raise ConfigurationError(f"tensor {name!r} has '..' as a part of its name, like a path")
