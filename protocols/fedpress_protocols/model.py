"""Models: their tensors, the values, and the safetensors file that holds them.

A model travels as one safetensors file, addressed by the SHA-256 of its bytes. Its trained tensors
(float32, float16 or bfloat16, and not frozen) form one flat float32 vector in the order of the
spec; everything else (frozen tensors, BatchNorm's counter, integer tables) is copied from model to
model and never averaged.
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

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
    from_bfloat16,
    stored_dtype,
    to_bfloat16,
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
_ZIP = b"PK\x03\x04"
_METADATA = "__metadata__"
_BLOCK = 2**18
"""Values that are looked at or converted at a time."""
Buffer = bytes | memoryview | mmap.mmap
Zeros = Callable[[int, npt.DTypeLike], npt.NDArray[Any]]
"""Makes zeros [size] of a dtype, in memory or elsewhere."""
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
        _check_trainable(self.spec)
        for name, place in self.spec.slices.items():
            _check_finite(self.parameters[place], name)
        expected = {tensor.name for tensor in self.spec.untrained}
        if set(self.buffers) != expected:
            raise ConfigurationError(f"buffers {sorted(self.buffers)}, expected {sorted(expected)}")

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, npt.NDArray[Any]], *, frozen: Collection[str] = ()
    ) -> Model:
        """Build a model from numpy arrays; all float32 and float16 arrays are trained, except those
        named in `frozen`. Raises ConfigurationError for what is no array, and for one of float64
        that is not in `frozen`: it would not be trained."""
        for name, array in tensors.items():
            if not isinstance(array, np.ndarray | np.generic):
                raise ConfigurationError(
                    f"tensor {name!r} is a {type(array).__name__}, expected a numpy array",
                    hint="numpy.asarray(values, numpy.float32) makes one",
                )
            if array.dtype == np.float64 and name not in frozen:
                raise ConfigurationError(
                    f"tensor {name!r} is float64, which is never trained",
                    hint="cast it with .astype(numpy.float32), or name it in frozen",
                )
        unknown = sorted(set(frozen).difference(tensors))
        if unknown:
            raise ConfigurationError(
                f"frozen names no tensor of the model: {', '.join(map(repr, unknown))}"
            )
        spec = ModelSpec(
            tuple(
                TensorSpec(
                    name,
                    tuple(a.shape),
                    a.dtype.name,
                    name in frozen and a.dtype != np.float64,  # which never trains
                )
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
        return _serialized(self.spec.tensors, self.tensors(), self._names)

    def write(self, path: Path, zeros: Zeros = np.zeros) -> None:
        """Write the bytes of `to_bytes` to a file; raises OSError. Copies in a tensor's dtype are
        of `zeros`."""
        stored = _stored(self.spec.tensors, self.tensors(), zeros)
        _write(path, _entries_of(self.spec.tensors, stored), _metadata(self._names))

    @property
    def _names(self) -> list[str] | dict[str, list[str]]:
        order = [t.name for t in self.spec.tensors]
        frozen = [t.name for t in self.spec.tensors if t.frozen]
        return {"order": order, "frozen": frozen} if frozen else order

    @cached_property
    def base(self) -> Base:
        """Every tensor that is not trained, which all models of a task have in common."""
        return Base(self.spec.untrained, self.buffers)

    @classmethod
    def from_bytes(cls, data: Buffer) -> Model:
        """Parse a safetensors file, whichever program wrote it; raises ConfigurationError.

        Tensors are in the order of fedpress's metadata, without it in the order of their names.
        """
        entries, order, frozen = _parsed(data)
        spec = ModelSpec(_tensors(entries, order, frozen))
        arrays = _arrays(data, entries, spec.untrained)
        buffers = {name: array.copy() for name, array in arrays.items()}
        return cls(spec, _flat(data, entries, spec, np.zeros), buffers)

    @classmethod
    def from_buffer(cls, data: Buffer, zeros: Zeros) -> Model:
        """Like `from_bytes`, of a file that is mapped into memory: arrays are views of it where
        they can be, and the parameters are of `zeros` where they cannot."""
        entries, order, frozen = _parsed(data)
        spec = ModelSpec(_tensors(entries, order, frozen))
        flat = _flat_in(data, entries, spec)
        if flat is None:
            flat = _flat(data, entries, spec, zeros)
        return cls(spec, flat, _arrays(data, entries, spec.untrained))


def spec_of(data: Buffer) -> ModelSpec:
    """The spec of the model in a safetensors file, whose values are not read; raises
    ConfigurationError."""
    entries, order, frozen = _parsed(data)
    return ModelSpec(_tensors(entries, order, frozen))


def check_model(data: Buffer) -> ModelSpec:
    """The spec of a model, whose values are read but not kept; raises as `Model.from_bytes`."""
    entries, order, frozen = _parsed(data)
    spec = ModelSpec(_tensors(entries, order, frozen))
    _check_trainable(spec)
    for tensor in spec.trained:
        stored = _stored_in(data, entries[tensor.name])
        for start in range(0, tensor.size, _BLOCK):
            _check_finite(from_stored(tensor, stored[start : start + _BLOCK]), tensor.name)
    return spec


def _check_trainable(spec: ModelSpec) -> None:
    if not spec.size:
        raise ConfigurationError(
            f"no tensor of the model is trainable: {_kinds(spec) or 'there is none'}; trainable "
            f"are {', '.join(TRAINED_DTYPES)}, unless they are frozen"
        )


def _kinds(spec: ModelSpec) -> str:
    kinds = Counter(("frozen " if t.frozen else "") + t.dtype for t in spec.tensors)
    return ", ".join(f"{number} {kind}" for kind, number in kinds.items())


def _check_finite(values: npt.NDArray[np.floating[Any]], name: str) -> None:
    for start in range(0, values.size, _BLOCK):
        if not np.isfinite(values[start : start + _BLOCK]).all():
            raise ConfigurationError(f"the model holds NaN or infinity, in tensor {name!r}")


def write_arrays(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write a safetensors file of contiguous `arrays`; raises OSError."""
    tensors = [TensorSpec(name, each.shape, each.dtype.name) for name, each in arrays.items()]
    _write(path, _entries_of(tensors, list(arrays.values())), None)


def arrays_in(data: Buffer) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a safetensors file, as views of it; raises ConfigurationError."""
    entries, order, _ = _parsed(data)
    return _arrays(data, entries, _tensors(entries, order, ()))


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
        floating = {name for name in order if entries[name].tensor.dtype in TRAINED_DTYPES}
        tensors = _tensors(entries, order, floating)
        arrays = _arrays(data, entries, tensors)
        return cls(tensors, {name: each.copy() for name, each in arrays.items()})


def _serialized(
    tensors: Sequence[TensorSpec],
    values: Mapping[str, npt.NDArray[Any]],
    names: list[str] | dict[str, list[str]],
) -> bytes:
    stored = _stored(tensors, values, np.zeros)
    return bytes(safetensors.serialize(_entries_of(tensors, stored), _metadata(names)))


def _stored(
    tensors: Sequence[TensorSpec], values: Mapping[str, npt.NDArray[Any]], zeros: Zeros
) -> list[npt.NDArray[Any]]:
    """The arrays that the file holds, of `zeros` where they are not the values themselves."""
    arrays = []
    for tensor in tensors:
        whole, dtype = np.asarray(values[tensor.name]), stored_dtype(tensor)
        if whole.dtype == dtype and whole.flags.c_contiguous:
            arrays.append(whole)
            continue
        flat, stored = whole.reshape(-1), zeros(tensor.size, dtype)
        for start in range(0, tensor.size, _BLOCK):
            here = slice(start, start + _BLOCK)
            stored[here] = to_stored(tensor, flat[here])
        arrays.append(stored)
    return arrays


def _entries_of(
    tensors: Sequence[TensorSpec], stored: Sequence[npt.NDArray[Any]]
) -> dict[str, safetensors.TensorSpec]:
    """The tensors as safetensors writes them: by address, so `stored` must outlive the call."""
    return {
        tensor.name: safetensors.TensorSpec(
            dtype=tensor.dtype,
            shape=tensor.shape,
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
        for tensor, array in zip(tensors, stored, strict=True)
    }


def _write(
    path: Path, entries: dict[str, safetensors.TensorSpec], metadata: dict[str, str] | None
) -> None:
    try:
        safetensors.serialize_file(entries, path, metadata)
    except safetensors.SafetensorError as exc:
        raise OSError(errno.EIO, f"cannot be written: {exc}", str(path)) from exc


def _metadata(names: list[str] | dict[str, list[str]]) -> dict[str, str]:
    """One key only: safetensors keeps several in no particular order, and equal models must have
    equal bytes."""
    return {_ORDER_KEY: json.dumps(names, separators=(",", ":"))}


def _parsed(data: Buffer) -> tuple[dict[str, _Entry], list[str], set[str]]:
    """The entries of a safetensors file, their order and which are frozen; raises
    ConfigurationError."""
    try:
        header, start = _header(data)
        entries = _entries(header, start, len(data))
        return entries, *_order(header, entries)
    except (KeyError, ValueError, TypeError) as exc:
        is_zip = bytes(data[: len(_ZIP)]) == _ZIP
        raise ConfigurationError(
            f"not a safetensors model: {'a zip file, as torch.save writes' if is_zip else exc}",
            hint="save it with safetensors, or write a trainer's initial_model().to_bytes()",
        ) from exc


class _Entry(NamedTuple):
    """A tensor in a file, and the offset of its first byte."""

    tensor: TensorSpec
    start: int


def _entries(header: Mapping[str, Any], begin: int, end: int) -> dict[str, _Entry]:
    """The entries of the `header` of a file whose values lie in [begin, end), every byte in one of
    them; raises ConfigurationError, KeyError, ValueError or TypeError."""
    metadata, places = header.get(_METADATA, {}), []
    if not isinstance(metadata, dict) or not all(type(v) is str for v in metadata.values()):
        raise ValueError("metadata that are not texts by names")
    for name, each in header.items():
        if name == _METADATA:
            continue
        (start, stop), shape = each["data_offsets"], tuple(each["shape"])
        if not all(type(n) is int and 0 <= n < 2**63 for n in (start, stop, *shape)):
            raise ValueError(f"tensor {name!a} has a shape or offsets that are no sizes")
        dtype = _FROM_SAFETENSORS.get(each["dtype"])
        if dtype is None:
            raise ValueError(f"tensor {name!a} is {ascii(each['dtype'])[:40]}")
        places.append((start, stop, TensorSpec(name, shape, dtype)))
    reached, entries = 0, {}
    for start, stop, tensor in sorted(places, key=lambda place: place[:2]):
        if start != reached or stop - start != tensor.num_bytes:
            raise ValueError(
                f"tensor {tensor.name!a} has bytes {start} to {stop}, expected {reached} to "
                f"{reached + tensor.num_bytes}"
            )
        reached, entries[tensor.name] = stop, _Entry(tensor, begin + start)
    if begin + reached != end:
        raise ValueError(f"tensors of {reached} bytes, where the file has {end - begin}")
    return entries


def _tensors(
    entries: Mapping[str, _Entry], order: Sequence[str], frozen: Collection[str]
) -> tuple[TensorSpec, ...]:
    """Their specs, those of the names in `frozen` frozen; raises ConfigurationError."""
    return tuple(
        replace(entries[name].tensor, frozen=True) if name in frozen else entries[name].tensor
        for name in order
    )


def _stored_in(data: Buffer, entry: _Entry) -> npt.NDArray[Any]:
    """A view of the tensor's values [size] as the file holds them."""
    return np.frombuffer(data, stored_dtype(entry.tensor), entry.tensor.size, entry.start)


def _arrays(
    data: Buffer, entries: Mapping[str, _Entry], tensors: Iterable[TensorSpec]
) -> dict[str, npt.NDArray[Any]]:
    """The tensors, as views of `data` where numpy has their dtype."""
    return {
        tensor.name: from_stored(tensor, _stored_in(data, entries[tensor.name])).reshape(
            tensor.shape
        )
        for tensor in tensors
    }


def _flat(data: Buffer, entries: Mapping[str, _Entry], spec: ModelSpec, zeros: Zeros) -> Vector:
    """The values [spec.size] of the trained tensors, in an array of `zeros`."""
    flat = zeros(spec.size, np.float32)
    for tensor in spec.trained:
        values, stored = flat[spec.slices[tensor.name]], _stored_in(data, entries[tensor.name])
        for start in range(0, tensor.size, _BLOCK):
            here = slice(start, start + _BLOCK)
            values[here] = from_stored(tensor, stored[here])
    return flat


def _flat_in(data: Buffer, entries: Mapping[str, _Entry], spec: ModelSpec) -> Vector | None:
    """The same as a view of `data`; None where they do not lie there as one float32 vector."""
    if any(tensor.dtype != "float32" for tensor in spec.trained):
        return None
    starts = [entries[tensor.name].start for tensor in spec.trained]
    places = [starts[0] + 4 * each.start for each in spec.slices.values()] if starts else []
    if not starts or starts != places or starts[0] % 4:
        return None
    return np.frombuffer(data, "<f4", spec.size, starts[0])


def to_stored(tensor: TensorSpec, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Convert `array` to the stored form of `tensor`, contiguous; raises ConfigurationError for a
    number beyond float16."""
    if tensor.dtype == "bfloat16":
        array = to_bfloat16(np.asarray(array, np.float32))
    with np.errstate(over="ignore"):
        stored = np.ascontiguousarray(array, stored_dtype(tensor))
    if tensor.dtype == "float16" and (np.isinf(stored) & np.isfinite(array)).any():
        raise ConfigurationError(
            f"tensor {tensor.name!r} has a value beyond float16's maximum, 65504"
        )
    return stored


def from_stored(tensor: TensorSpec, stored: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Invert `to_stored`."""
    return from_bfloat16(stored) if tensor.dtype == "bfloat16" else stored


def rounded_to_stored(tensor: TensorSpec, values: Vector) -> Vector:
    """`values` [tensor.size] as they come back from the file; raises ConfigurationError.

    Nothing changes in float32. float16 and bfloat16 keep 11 and 8 significant bits, ties to even,
    and no negative zero is left of what is too small for them.
    """
    if tensor.dtype == "float32":
        return values
    stored = from_stored(tensor, to_stored(tensor, values)).astype(np.float32)
    return stored + np.float32(0)


def _header(data: Buffer) -> tuple[dict[str, Any], int]:
    """Parse the header of a safetensors file in memory bounded by MAX_TENSORS; returns the offset
    of the values too.

    Raises ValueError for one that is too long, has too many values or repeats a key.
    """
    length = int.from_bytes(data[:8], "little")
    if length > min(_MAX_HEADER_BYTES, len(data) - 8):
        raise ValueError(f"a header of {length} bytes in a file of {len(data)}")
    text = bytes(data[8 : 8 + length])
    if sum(text.count(mark) for mark in (b"{", b"[", b",")) > _MAX_HEADER_VALUES:
        raise ValueError(f"a header of more values than {MAX_TENSORS} tensors need")
    try:
        header = json.loads(text.decode(), object_pairs_hook=_unrepeated)
    except RecursionError as exc:
        raise ValueError("a header nested too deeply") from exc
    if not isinstance(header, dict):
        raise ValueError("a header that is not a JSON object")
    if len(header) > MAX_TENSORS + 1:
        raise ValueError(f"{len(header)} tensors; at most {MAX_TENSORS} are supported")
    return header, 8 + length


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
    metadata = header.get(_METADATA, {})
    if _ORDER_KEY not in metadata:
        return sorted(entries), set()
    try:
        order = json.loads(metadata[_ORDER_KEY], object_pairs_hook=_unrepeated)
    except RecursionError as exc:
        raise ValueError("an order nested too deeply") from exc
    frozen: list[str] = []
    is_marked = isinstance(order, dict)
    if is_marked:
        if set(order) != {"order", "frozen"}:
            raise ValueError("the order in its metadata has other members than order and frozen")
        order, frozen = order["order"], order["frozen"]
    if sorted(order) != sorted(entries):
        raise ValueError("the order in its metadata names other tensors")
    names = set(frozen)
    if is_marked and (not names or frozen != [name for name in order if name in names]):
        raise ValueError("the frozen names in its metadata are not some of its order's, in it")
    return list(order), names
