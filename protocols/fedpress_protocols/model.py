"""Models: their tensors, the values, and the safetensors file that holds them.

A model travels as one safetensors file, addressed by the SHA-256 of its bytes. Its trained tensors
(float32, float16 or bfloat16, and not frozen) form one flat float32 vector in the order of the
spec; everything else (frozen tensors, BatchNorm's counter, integer tables) is copied from model to
model and never averaged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors

from fedpress_compression.errors import ConfigurationError
from fedpress_compression.tensors import (
    MAX_TENSORS,
    TRAINED_DTYPES,
    ModelSpec,
    TensorSpec,
    Vector,
    stored_dtype,
)

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
_MAX_HEADER_BYTES = 16 * 2**20
_MAX_HEADER_VALUES = 32 * MAX_TENSORS


@dataclass(frozen=True)
class Model:
    """The values of a model: `parameters` [spec.size] and every tensor that is not trained.

    A frozen tensor of bfloat16 is float32 in `buffers`.
    """

    spec: ModelSpec
    parameters: Vector
    buffers: Mapping[str, npt.NDArray[Any]]

    def __post_init__(self) -> None:
        if self.parameters.shape != (self.spec.size,) or self.parameters.dtype != np.float32:
            raise ConfigurationError(
                f"parameters are {self.parameters.dtype}{list(self.parameters.shape)}, "
                f"expected float32[{self.spec.size}]"
            )
        if not self.spec.size:
            raise ConfigurationError(
                f"no tensor of the model is trainable; trainable are {', '.join(TRAINED_DTYPES)}, "
                "unless they are frozen"
            )
        if not np.isfinite(self.parameters).all():
            raise ConfigurationError("the model holds NaN or infinity")
        expected = {tensor.name for tensor in self.spec.tensors if not tensor.is_trained}
        if set(self.buffers) != expected:
            raise ConfigurationError(f"buffers {sorted(self.buffers)}, expected {sorted(expected)}")

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, npt.NDArray[Any]], *, frozen: Collection[str] = ()
    ) -> Model:
        """Build a model from numpy arrays; all float32 and float16 arrays are trained, except those
        named in `frozen`."""
        unknown = sorted(set(frozen).difference(tensors))
        if unknown:
            raise ConfigurationError(
                f"frozen names no tensor of the model: {', '.join(map(repr, unknown))}"
            )
        spec = ModelSpec(
            tuple(
                TensorSpec(name, tuple(a.shape), a.dtype.name, name in frozen)
                for name, a in tensors.items()
            )
        )
        buffers = {t.name: tensors[t.name] for t in spec.tensors if not t.is_trained}
        return cls(spec, spec.flatten(tensors), buffers)

    def with_parameters(self, parameters: Vector) -> Model:
        return Model(self.spec, parameters, self.buffers)

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """All tensors by name: trained ones as float32 views, buffers unchanged."""
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
        names: list[str] | dict[str, list[str]] = [t.name for t in self.spec.tensors]
        if frozen := [t.name for t in self.spec.tensors if t.frozen]:
            names = {"order": [t.name for t in self.spec.tensors], "frozen": frozen}
        return _serialized(self.spec.tensors, self.tensors(), names)

    @cached_property
    def base(self) -> Base:
        """Every tensor that is not trained, which all models of a task have in common."""
        untrained = tuple(tensor for tensor in self.spec.tensors if not tensor.is_trained)
        return Base(untrained, self.buffers)

    @classmethod
    def from_bytes(cls, data: bytes) -> Model:
        """Parse a safetensors file, whichever program wrote it; raises ConfigurationError.

        Tensors are in the order of fedpress's metadata, without it in the order of their names.
        """
        entries, order, frozen = _parsed(data)
        spec = ModelSpec(_tensors(entries, order, frozen))
        arrays = _arrays(entries, spec.tensors)
        buffers = {t.name: arrays[t.name] for t in spec.tensors if not t.is_trained}
        return cls(spec, spec.flatten(arrays), buffers)


@dataclass(frozen=True)
class Base:
    """The tensors of a model that are not trained, in the model's order, and their values.

    A base is a safetensors file as well, addressed by the SHA-256 of its bytes.
    """

    tensors: tuple[TensorSpec, ...]
    buffers: Mapping[str, npt.NDArray[Any]]

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of `to_bytes()`."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @property
    def num_bytes(self) -> int:
        """The bytes of the values."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    def to_bytes(self) -> bytes:
        """The safetensors file, whose metadata lists the names in order."""
        return _serialized(self.tensors, self.buffers, [t.name for t in self.tensors])

    @classmethod
    def from_bytes(cls, data: bytes) -> Base:
        """Parse the bytes of `to_bytes`; its floating tensors are frozen. Raises
        ConfigurationError."""
        entries, order, frozen = _parsed(data)
        if frozen:
            raise ConfigurationError("a model, where the file of a base is expected")
        floating = {
            n for n in order if _FROM_SAFETENSORS.get(entries[n]["dtype"]) in TRAINED_DTYPES
        }
        tensors = _tensors(entries, order, floating)
        return cls(tensors, _arrays(entries, tensors))


def _serialized(
    tensors: Sequence[TensorSpec],
    values: Mapping[str, npt.NDArray[Any]],
    names: list[str] | dict[str, list[str]],
) -> bytes:
    entries = {}
    arrays = []  # safetensors takes addresses, so the arrays must outlive the call
    for tensor in tensors:
        stored = to_stored(tensor, values[tensor.name])
        arrays.append(stored)
        entries[tensor.name] = safetensors.TensorSpec(
            dtype=tensor.dtype,
            shape=tensor.shape,
            data_ptr=stored.ctypes.data,
            data_len=stored.nbytes,
        )
    order = json.dumps(names, separators=(",", ":"))
    # One metadata key only: safetensors keeps several in no particular order, and equal models
    # must have equal bytes.
    return bytes(safetensors.serialize(entries, {_ORDER_KEY: order}))


def _parsed(data: bytes) -> tuple[Mapping[str, Any], list[str], set[str]]:
    """The entries of a safetensors file, their order and which are frozen; raises
    ConfigurationError."""
    try:
        header = _header(data)
        entries = dict(safetensors.deserialize(data))  # type: ignore[no-untyped-call]
        return entries, *_order(header, entries)
    except (safetensors.SafetensorError, KeyError, ValueError, TypeError) as exc:
        raise ConfigurationError(f"not a safetensors model: {exc}") from exc


def _tensors(
    entries: Mapping[str, Any], order: Sequence[str], frozen: Collection[str]
) -> tuple[TensorSpec, ...]:
    """Their specs, those of the names in `frozen` frozen; raises ConfigurationError."""
    try:
        return tuple(
            TensorSpec(
                name,
                tuple(entries[name]["shape"]),
                _FROM_SAFETENSORS[entries[name]["dtype"]],
                name in frozen,
            )
            for name in order
        )
    except (KeyError, ValueError, TypeError) as exc:
        raise ConfigurationError(f"not a safetensors model: {exc}") from exc


def _arrays(
    entries: Mapping[str, Any], tensors: Iterable[TensorSpec]
) -> dict[str, npt.NDArray[Any]]:
    arrays = {}
    for tensor in tensors:
        stored = np.frombuffer(entries[tensor.name]["data"], stored_dtype(tensor))
        arrays[tensor.name] = from_stored(tensor, stored).reshape(tensor.shape)
    return arrays


def to_stored(tensor: TensorSpec, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Convert `array` to the stored form of `tensor`, contiguous; raises ConfigurationError for a
    number beyond float16."""
    if tensor.dtype == "bfloat16":
        array = _to_bfloat16(np.asarray(array, np.float32))
    with np.errstate(over="ignore"):
        stored = np.ascontiguousarray(array, stored_dtype(tensor))
    if tensor.dtype == "float16" and (np.isinf(stored) & np.isfinite(array)).any():
        raise ConfigurationError(
            f"tensor {tensor.name!r} has a value beyond float16's maximum, 65504"
        )
    return stored


def from_stored(tensor: TensorSpec, stored: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Invert `to_stored`."""
    return _from_bfloat16(stored) if tensor.dtype == "bfloat16" else stored


def rounded_to_stored(tensor: TensorSpec, values: Vector) -> Vector:
    """`values` [tensor.size] as they come back from the file; raises ConfigurationError.

    Nothing changes in float32. float16 and bfloat16 keep 11 and 8 significant bits, ties to even,
    and no negative zero is left of what is too small for them.
    """
    if tensor.dtype == "float32":
        return values
    stored = from_stored(tensor, to_stored(tensor, values)).astype(np.float32)
    return stored + np.float32(0)


def _header(data: bytes) -> dict[str, Any]:
    """Parse the header of a safetensors file in memory bounded by MAX_TENSORS.

    Raises ValueError for one that is too long, has too many values or repeats a key; safetensors
    checks that it describes tensors, and exactly the bytes after it.
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
        raise ValueError("a header nested too deeply") from exc
    if not isinstance(header, dict):
        raise ValueError("a header that is not a JSON object")
    if len(header) > MAX_TENSORS + 1:
        raise ValueError(f"{len(header)} tensors; at most {MAX_TENSORS} are supported")
    return header


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a name occurs twice in the header")
    return members


def _order(header: Mapping[str, Any], entries: Mapping[str, Any]) -> tuple[list[str], set[str]]:
    """The names in the order of the file's metadata, and the names of frozen tensors.

    Raises ValueError if they are not the names in the file, or if frozen names are unknown or out
    of order.
    """
    metadata = header.get("__metadata__", {})
    if _ORDER_KEY not in metadata:
        return sorted(entries), set()
    try:
        order = json.loads(metadata[_ORDER_KEY], object_pairs_hook=_unrepeated)
    except RecursionError as exc:
        raise ValueError("an order nested too deeply") from exc
    frozen: list[str] = []
    if isinstance(order, dict):
        if set(order) != {"order", "frozen"}:
            raise ValueError("the order in its metadata has other members than order and frozen")
        order, frozen = order["order"], order["frozen"]
        if not frozen or frozen != [name for name in order if name in set(frozen)]:
            raise ValueError("the frozen names in its metadata are not some of its order's, in it")
    if sorted(order) != sorted(entries):
        raise ValueError("the order in its metadata names other tensors")
    return [str(name) for name in order], set(frozen)


def _to_bfloat16(array: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The upper half of each float32, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(array).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def _from_bfloat16(stored: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
