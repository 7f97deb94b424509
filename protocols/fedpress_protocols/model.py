"""A model as both ends see it: what its tensors are, their values, and the file that holds them.

A model travels as one safetensors file, addressed by the SHA-256 of its bytes. Its trained tensors
(float32, float16, bfloat16) form one flat float32 vector in the order of the spec; everything else
(BatchNorm's counter, integer tables) is carried from model to model and never averaged.
"""

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
import safetensors

from fedpress_protocols.errors import ConfigurationError

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
_FROM_SAFETENSORS = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
_ORDER_KEY = "fedpress.order"
MAX_TENSORS = 32_768
MAX_NAME_BYTES = 512
"""Of a tensor's name in UTF-8."""
_MAX_RANK = 32
_MAX_EXTENTS = 2**48
"""The product of a tensor's extents, those of zero left out."""
_MAX_HEADER_BYTES = 16 * 2**20
_MAX_HEADER_VALUES = 32 * MAX_TENSORS


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor's name, shape and dtype (numpy's names, and bfloat16)."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        _check_name(self.name)
        if self.dtype not in _STORED_AS:
            known = ", ".join(_STORED_AS)
            raise ConfigurationError(f"tensor {self.name!r} is {self.dtype}; known are {known}")
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
        return self.dtype in TRAINED_DTYPES

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
    def size(self) -> int:
        """d, the number of trained values."""
        return sum(tensor.size for tensor in self.trained)

    @cached_property
    def slices(self) -> Mapping[str, slice]:
        """Where each trained tensor lies in the flat vector."""
        found, start = {}, 0
        for tensor in self.trained:
            found[tensor.name] = slice(start, start + tensor.size)
            start += tensor.size
        return found

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of `to_json`."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """The names, shapes and dtypes in order, as JSON without spaces."""
        rows = [[t.name, list(t.shape), t.dtype] for t in self.tensors]
        return json.dumps(rows, separators=(",", ":"), ensure_ascii=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> ModelSpec:
        """What `to_json` was called on; raises ConfigurationError for any other text."""
        try:
            rows = json.loads(text)
            tensors = tuple(
                TensorSpec(name, tuple(int(extent) for extent in shape), dtype)
                for name, shape, dtype in rows
            )
            if any(name.encode() == b"__metadata__" for name, _, _ in rows):
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
                found = "missing" if array is None else f"of shape {tuple(array.shape)}"
                raise ConfigurationError(
                    f"tensor {tensor.name!r} is {found} where shape {tensor.shape} is due"
                )
            flat[self.slices[tensor.name]] = np.asarray(array, np.float32).ravel()
        return flat

    def unflatten(self, flat: Vector) -> dict[str, npt.NDArray[np.float32]]:
        """Views of `flat` [d], one for each trained tensor, in its shape."""
        if flat.shape != (self.size,):
            raise ConfigurationError(f"a vector of shape {flat.shape} where ({self.size},) is due")
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


@dataclass(frozen=True)
class Model:
    """The values of a model: `parameters` [spec.size] and every tensor that is not trained."""

    spec: ModelSpec
    parameters: Vector
    buffers: Mapping[str, npt.NDArray[Any]]

    def __post_init__(self) -> None:
        if self.parameters.shape != (self.spec.size,) or self.parameters.dtype != np.float32:
            raise ConfigurationError(
                f"parameters are {self.parameters.dtype}{list(self.parameters.shape)} where "
                f"float32[{self.spec.size}] is due"
            )
        if not self.spec.size:
            raise ConfigurationError(
                f"no tensor of the model is trained; trained are {', '.join(TRAINED_DTYPES)}"
            )
        if not np.isfinite(self.parameters).all():
            raise ConfigurationError("the model holds NaN or infinity")
        due = {tensor.name for tensor in self.spec.tensors if not tensor.is_trained}
        if set(self.buffers) != due:
            raise ConfigurationError(f"buffers {sorted(self.buffers)} where {sorted(due)} are due")

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, npt.NDArray[Any]]) -> Model:
        """A model of numpy arrays; every float32 and float16 array is trained."""
        spec = ModelSpec(
            tuple(TensorSpec(name, tuple(a.shape), a.dtype.name) for name, a in tensors.items())
        )
        buffers = {t.name: tensors[t.name] for t in spec.tensors if not t.is_trained}
        return cls(spec, spec.flatten(tensors), buffers)

    def with_parameters(self, parameters: Vector) -> Model:
        return Model(self.spec, parameters, self.buffers)

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """Every tensor by name: the trained as float32 views, the buffers as they are."""
        trained = self.spec.unflatten(self.parameters)
        return {
            t.name: trained[t.name] if t.is_trained else self.buffers[t.name]
            for t in self.spec.tensors
        }

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of `to_bytes()`: the model's address."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def to_bytes(self) -> bytes:
        """The safetensors file; trained tensors are rounded to their dtype, ties to even."""
        entries = {}
        kept = []  # safetensors takes addresses, so the arrays must outlive the call
        for tensor, array in zip(self.spec.tensors, self.tensors().values(), strict=True):
            if tensor.dtype == "bfloat16":
                array = _to_bfloat16(np.asarray(array, np.float32))
            with np.errstate(over="ignore"):
                stored = np.ascontiguousarray(array, _STORED_AS[tensor.dtype])
            if tensor.dtype == "float16" and not np.isfinite(stored).all():
                raise ConfigurationError(f"tensor {tensor.name!r} outgrew float16's 65504")
            kept.append(stored)
            entries[tensor.name] = safetensors.TensorSpec(
                dtype=tensor.dtype,
                shape=tensor.shape,
                data_ptr=stored.ctypes.data,
                data_len=stored.nbytes,
            )
        order = json.dumps([t.name for t in self.spec.tensors], separators=(",", ":"))
        # One metadata key only: safetensors keeps several in no particular order, and equal models
        # must have equal bytes.
        return bytes(safetensors.serialize(entries, {_ORDER_KEY: order}))

    @classmethod
    def from_bytes(cls, data: bytes) -> Model:
        """Parse a safetensors file, ours or another's; raises ConfigurationError.

        Without our order of tensors in its metadata the order is that of the names.
        """
        try:
            header = _header(data)
            entries = dict(safetensors.deserialize(data))  # type: ignore[no-untyped-call]
            order = _order(header, entries)
            spec = ModelSpec(
                tuple(
                    TensorSpec(
                        name,
                        tuple(entries[name]["shape"]),
                        _FROM_SAFETENSORS[entries[name]["dtype"]],
                    )
                    for name in order
                )
            )
        except (safetensors.SafetensorError, KeyError, ValueError, TypeError) as exc:
            raise ConfigurationError(f"not a safetensors model: {exc}") from exc
        arrays = {}
        for tensor in spec.tensors:
            stored = np.frombuffer(entries[tensor.name]["data"], _STORED_AS[tensor.dtype])
            array = _from_bfloat16(stored) if tensor.dtype == "bfloat16" else stored
            arrays[tensor.name] = array.reshape(tensor.shape)
        buffers = {t.name: arrays[t.name] for t in spec.tensors if not t.is_trained}
        return cls(spec, spec.flatten(arrays), buffers)


def stored_dtype(tensor: TensorSpec) -> np.dtype[Any]:
    """As numpy calls what a file holds of `tensor`; bfloat16 lies there as uint16."""
    return np.dtype(_STORED_AS[tensor.dtype])


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


def _header(data: bytes) -> dict[str, Any]:
    """Parse the header of a safetensors file in memory bounded by MAX_TENSORS.

    Raises ValueError for one that is too long, has too many values or repeats a key; whether it
    describes tensors, and just the bytes after it, safetensors finds out.
    """
    length = int.from_bytes(data[:8], "little")
    if length > min(_MAX_HEADER_BYTES, len(data) - 8):
        raise ValueError(f"a header of {length} bytes in a file of {len(data)}")
    text = data[8 : 8 + length]
    if sum(text.count(mark) for mark in (b"{", b"[", b",")) > _MAX_HEADER_VALUES:
        raise ValueError(f"a header of more values than {MAX_TENSORS} tensors need")
    try:
        header = json.loads(text, object_pairs_hook=_unrepeated)
    except RecursionError as exc:
        raise ValueError("a header of too many levels") from exc
    if not isinstance(header, dict):
        raise ValueError("a header that is no JSON object")
    if len(header) > MAX_TENSORS + 1:
        raise ValueError(f"{len(header)} tensors; at most {MAX_TENSORS} are supported")
    return header


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice in the header")
    return found


def _order(header: Mapping[str, Any], entries: Mapping[str, Any]) -> list[str]:
    """The names in the order that the file's metadata tells; ValueError if it is not theirs."""
    metadata = header.get("__metadata__", {})
    if _ORDER_KEY not in metadata:
        return sorted(entries)
    try:
        order = json.loads(metadata[_ORDER_KEY])
    except RecursionError as exc:
        raise ValueError("an order of too many levels") from exc
    if sorted(order) != sorted(entries):
        raise ValueError("the order in its metadata names other tensors")
    return [str(name) for name in order]


def _to_bfloat16(array: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The upper half of each float32, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(array).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def _from_bfloat16(stored: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
