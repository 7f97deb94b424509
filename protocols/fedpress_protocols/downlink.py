"""Coding of models for download: whole, as the difference to one that the device has, or without
the tensors that are not trained, which the device has.

In a model on a grid, every trained tensor holds whole multiples of some power of two. Those whole
numbers are coded, so both forms are exact: by either way, a device gets the same file to the last
bit, and so the same digest. SPEC-downlink.md, has the
bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedpress_compression import coding
from fedpress_compression.coding.bits import Reader, uvarint
from fedpress_compression.coding.fields import Alphabet, Coder, Integers, Layout
from fedpress_compression.contexts import grid_of
from fedpress_compression.tensors import ModelSpec, TensorSpec, Vector, stored_dtype
from fedpress_protocols.errors import BodyTooLarge, ConfigurationError, DecodingError
from fedpress_protocols.model import Base, Model, from_stored, rounded_to_stored, to_stored

Whole = npt.NDArray[np.int64]

LEAST_EXPONENT, MOST_EXPONENT = -100, 120
"""A grid's step is 2**-exponent: a normal float32, and so is every multiple below `_BEYOND`."""
_BEYOND = 2**24
"""Bound on the magnitude of multiples of a step: below it they are exact in float32."""
_MOST_SHIFT = 24
_MOST_SPEC = 2**20
"""Maximum bytes of a spec; enough for more than 10,000 tensors."""
_MODEL, _DIFFERENCE, _PLAIN_TRAINED, _CODED_TRAINED, _POOLED = 1, 2, 3, 4, 5
_MOST_MOVE = 2**31
_BOTH = 2**20
"""Up to so many values both forms of a difference are tried; more take one table for each tensor,
which costs little there."""
_ANY: Coder = "auto"
DownlinkCoder = Literal["huffman", "auto"]


def exponent_of(values: Vector) -> int | None:
    """The smallest h such that all `values` are whole multiples of 2**-h, within the bounds of the
    format; None for zeros. Raises ConfigurationError if no h fits."""
    others = values[values != 0]
    if np.signbit(values[values == 0]).any():
        raise ConfigurationError("a model with a negative zero is on no grid")
    if not others.size:
        return None
    fraction, power = np.frexp(others)
    odd = np.ldexp(fraction, 24).astype(np.int64)  # float32 has 24 bits
    _, lowest = np.frexp((odd & -odd).astype(np.float32))
    exponent = int((24 - power - (lowest - 1)).max())
    exponent = max(exponent, LEAST_EXPONENT)
    largest = float(np.abs(others).max()) * 2.0**exponent
    if exponent > MOST_EXPONENT or largest >= _BEYOND:
        raise ConfigurationError(
            f"values up to {np.abs(others).max():g} in steps of 2**-{exponent} are on no grid of "
            f"less than {_BEYOND} steps",
            hint="only models published by a task with a downlink can be coded",
        )
    return exponent


def multiples(values: Vector, exponent: int) -> Whole:
    """`values` in steps of 2**-exponent, ties to the even one; exact for values on that grid.

    Raises DecodingError for values of 2**31 steps and more.
    """
    with np.errstate(over="ignore"):
        scaled = np.rint(values * np.float32(2.0**exponent))
    if not (np.abs(scaled).max(initial=0.0) < 2.0**31):
        raise DecodingError(f"a value of 2**31 steps of 2**-{exponent} or more")
    whole: Whole = scaled.astype(np.int64)
    return whole


def valued(whole: Whole, exponent: int) -> Vector:
    """The values of `whole` steps of 2**-exponent; raises DecodingError beyond 2**24 steps."""
    if np.abs(whole).max(initial=0) >= _BEYOND:
        raise DecodingError(f"{_BEYOND} steps of a grid or more")
    return whole.astype(np.float32) * np.float32(2.0**-exponent)


@dataclass(frozen=True, slots=True)
class _Part:
    """One trained tensor as coded: whole numbers up to `bound`, in steps of 2**(shift - exponent)
    of the tensor's grid of 2**-exponent; nothing is coded where `bound` is 0."""

    tensor: TensorSpec
    where: slice
    exponent: int
    shift: int
    bound: int

    def field(self, coder: Coder) -> Integers:
        spec = ModelSpec((self.tensor,))
        return Integers(self.bound, self.tensor.size, coder, grid_of(spec))

    def head(self) -> bytes:
        if not self.bound:
            return uvarint(0)
        return uvarint(self.bound) + bytes((self.exponent & 0xFF, self.shift))


def encode_model(model: Model, coder: DownlinkCoder = "huffman") -> bytes:
    """Encode a model on a grid; the bytes are a function of the model and `coder`.

    Raises ConfigurationError for a model that is on none, or holds values that its file does not.
    """
    coded_buffers = _coded_octets(_buffers(model))
    head = bytes((_MODEL,)) + _coded_spec(model.spec)
    head += uvarint(len(coded_buffers)) + coded_buffers
    return head + _from_zeros(model, coder)


def decode_model(data: bytes, max_bytes: int) -> Model:
    """Decode the bytes of `encode_model`.

    Raises DecodingError, or BodyTooLarge if the tensors are longer than `max_bytes`; both before
    anything of that size is allocated.
    """
    reader = Reader(data)
    _expect_form(reader, _MODEL)
    spec = _spec(reader, max_bytes)
    others = [tensor for tensor in spec.tensors if not tensor.is_trained]
    raw = _octets(reader, sum(tensor.num_bytes for tensor in others)).tobytes()
    try:
        model = Model(spec, np.zeros(spec.size, np.float32), _split(raw, others))
        model.tensors()  # which refuses shapes that no array has
    except (ConfigurationError, ValueError) as exc:
        raise DecodingError(f"no model: {exc}") from exc
    _decode(reader, data, spec, model.parameters)
    return model


def encode_difference(
    base: Model, model: Model, coder: DownlinkCoder = "huffman", *, by_tensor: bool = False
) -> bytes:
    """Encode the difference from `base` to `model`; a function of the two and of `coder`.

    It has one field for each tensor or, where that is shorter and not `by_tensor`, one for all.
    Raises ConfigurationError for models with different specs or buffers, or on no grid.
    """
    spec = model.spec
    if base.spec != spec or not np.array_equal(_buffers(base), _buffers(model)):
        raise ConfigurationError("the models differ in more than their trained values")
    parts, moves = _parts(spec, base.parameters, model.parameters)
    apart = bytes((_DIFFERENCE,)) + _encode(spec, parts, moves, coder)
    if by_tensor or spec.size > _BOTH:
        return apart
    pooled = _encode_pooled(base, parts, moves, coder)
    return apart if pooled is None or len(pooled) >= len(apart) else pooled


def decode_difference(data: bytes, base: Model) -> Model:
    """Apply the bytes of `encode_difference` to `base`; raises DecodingError.

    Another base gives another model, so the caller checks the digest.
    """
    reader = Reader(data)
    form = reader.read(8)
    if form not in (_DIFFERENCE, _POOLED):
        raise DecodingError(f"form {form}, expected {_DIFFERENCE} or {_POOLED}")
    parameters = base.parameters.copy()
    (_decode_pooled if form == _POOLED else _decode)(reader, data, base.spec, parameters)
    return base.with_parameters(parameters)


def encode_trained(model: Model, coder: DownlinkCoder | None) -> bytes:
    """Encode all of a model but its base: a function of the model and `coder`.

    Without a coder the trained tensors are as in the model's file. With one they are coded as in
    `encode_model`, whose errors it raises.
    """
    if coder is not None:
        return bytes((_CODED_TRAINED,)) + _coded_spec(model.spec) + _from_zeros(model, coder)
    values = model.tensors()
    stored = (to_stored(tensor, values[tensor.name]).tobytes() for tensor in model.spec.trained)
    return bytes((_PLAIN_TRAINED,)) + _coded_spec(model.spec) + b"".join(stored)


def decode_trained(data: bytes, base: Base, max_bytes: int) -> Model:
    """Decode the bytes of `encode_trained`, of a model of this base.

    Raises DecodingError, or BodyTooLarge as `decode_model` does.
    """
    reader = Reader(data)
    form = reader.read(8)
    if form not in (_PLAIN_TRAINED, _CODED_TRAINED):
        raise DecodingError(f"form {form}, expected {_PLAIN_TRAINED} or {_CODED_TRAINED}")
    spec = _spec(reader, max_bytes)
    others = tuple(tensor for tensor in spec.tensors if not tensor.is_trained)
    if others != base.tensors:
        raise DecodingError(f"the model has another base than {base.digest[:12]}")
    try:
        model = Model(spec, np.zeros(spec.size, np.float32), base.buffers)
        model.tensors()  # which refuses shapes that no array has
        if form == _PLAIN_TRAINED:
            stored = _split(data[reader.at >> 3 :], spec.trained)
            return model.with_parameters(spec.flatten(stored))
    except (ConfigurationError, ValueError) as exc:
        raise DecodingError(f"no model: {exc}") from exc
    _decode(reader, data, spec, model.parameters)
    return model


def on_grid(tensor: TensorSpec, values: Vector, bits: int) -> Vector:
    """Round `values` to the finest grid that has them in whole numbers of `bits` bits with sign,
    and then to the dtype of `tensor`, whose values lie on that grid as well.

    Raises ConfigurationError for values too large or too small for a grid or the dtype.
    """
    exponent = finest(values, bits)
    if exponent is None:
        return np.zeros_like(values)
    return rounded_to_stored(tensor, valued(multiples(values, exponent), exponent))


def finest(values: Vector, bits: int) -> int | None:
    """The largest h such that all `values` are below 2**(bits - 1) steps of 2**-h; None for
    zeros."""
    largest = float(np.abs(values).max(initial=0.0))
    if not largest:
        return None
    _, power = np.frexp(largest)  # largest < 2**power
    exponent = bits - 1 - int(power)
    if np.rint(largest * 2.0**exponent) >= 2 ** (bits - 1):
        exponent -= 1
    if exponent < LEAST_EXPONENT:
        raise ConfigurationError(f"a value of {largest:g} is out of range for any grid")
    return min(exponent, MOST_EXPONENT)


def _is_in_file(tensor: TensorSpec, values: Vector) -> bool:
    """Whether the tensor's file holds these very values: float16 and bfloat16 have not all."""
    try:
        return np.array_equal(rounded_to_stored(tensor, values), values)
    except ConfigurationError:
        return False


def _parts(spec: ModelSpec, base: Vector, values: Vector) -> tuple[list[_Part], list[Whole]]:
    """Return how each tensor goes from `base` to `values`, and the integers of those that
    change."""
    parts, moves = [], []
    for tensor, where in zip(spec.trained, spec.slices.values(), strict=True):
        before, after = base[where], values[where]
        if not _is_in_file(tensor, after):
            raise ConfigurationError(
                f"tensor {tensor.name!r} holds values that {tensor.dtype} has not",
                hint="round them to what the file holds",
            )
        exponent = exponent_of(after)
        if before.tobytes() == after.tobytes():
            parts.append(_Part(tensor, where, 0, 0, 0))
            continue
        if exponent is None:  # zeros are on any grid, so also on the grid of the base
            exponent = exponent_of(before) or 0
        try:
            move = multiples(after, exponent) - multiples(before, exponent)
        except DecodingError as exc:
            raise ConfigurationError(f"tensor {tensor.name!r}: {exc.detail}") from exc
        shift = min(_common_zeros(move), _MOST_SHIFT)
        move >>= shift
        bound = int(np.abs(move).max(initial=0))
        if bound >= 2**31:
            raise ConfigurationError(f"tensor {tensor.name!r} moves by {bound} steps")
        # A tensor that changes only by rounding to the new grid still has to be sent.
        parts.append(_Part(tensor, where, exponent, shift, max(bound, 1)))
        moves.append(move)
    return parts, moves


def _common_zeros(whole: Whole) -> int:
    """The number of low bits that are zero in all of `whole`; 0 if all values are zero."""
    union = int(np.bitwise_or.reduce(whole, initial=0))
    return (union & -union).bit_length() - 1 if union else 0


def _encode(
    spec: ModelSpec, parts: Sequence[_Part], moves: Sequence[Whole], coder: DownlinkCoder
) -> bytes:
    coded = [part for part in parts if part.bound]
    symbols = tuple(move.astype(np.int32) for move in moves)
    layout = tuple(part.field(coder) for part in coded)
    heads = b"".join(part.head() for part in parts)
    return uvarint(len(spec.trained)) + heads + coding.encode(symbols, layout)


def _decode(reader: Reader, data: bytes, spec: ModelSpec, parameters: Vector) -> None:
    """Add the decoded differences from `reader` to `parameters` [spec.size]."""
    if reader.uvarint() != len(spec.trained):
        raise DecodingError(f"not of the model's {len(spec.trained)} trained tensors")
    parts = [part for part in _heads(reader, spec) if part.bound]
    layout: Layout = tuple(part.field(_ANY) for part in parts)
    moves = coding.decode(memoryview(data)[reader.at >> 3 :], layout)
    for part, move in zip(parts, moves, strict=True):
        whole = multiples(parameters[part.where], part.exponent)
        whole += move.astype(np.int64) << part.shift
        values = valued(whole, part.exponent)
        if not _is_in_file(part.tensor, values):
            raise DecodingError(
                f"tensor {part.tensor.name!r}: a value that {part.tensor.dtype} has not"
            )
        parameters[part.where] = values


def _encode_pooled(
    base: Model, parts: Sequence[_Part], moves: Sequence[Whole], coder: DownlinkCoder
) -> bytes | None:
    """The moves of all tensors in multiples of one number; None if they have none in common."""
    spec = base.spec
    coded = [part for part in parts if part.bound]
    finest_step = max((part.exponent - part.shift for part in coded), default=0)
    whole = np.zeros(spec.size, np.int64)
    for part, move in zip(coded, moves, strict=True):
        times = finest_step - part.exponent + part.shift
        if part.bound << times >= _MOST_MOVE:
            return None
        whole[part.where] = move << times
    factor = max(1, int(np.gcd.reduce(whole)))
    twos = _common_zeros(np.array([factor]))
    exponent = finest_step - twos
    if exponent < LEAST_EXPONENT:
        return None
    whole //= factor
    bound = max(1, int(np.abs(whole).max(initial=0)))
    rounded = [
        (index, part)
        for index, part in enumerate(parts)
        if part.bound and not _is_on(base.parameters[part.where], part.exponent)
    ]
    head = bytes((_POOLED,)) + uvarint(factor >> twos) + bytes((exponent & 0xFF,))
    head += uvarint(bound) + uvarint(len(rounded))
    before = -1
    for index, part in rounded:
        head += uvarint(index - before - 1) + bytes((part.exponent & 0xFF,))
        before = index
    field = Integers(bound, spec.size, coder, grid_of(spec))
    return head + coding.encode((whole.astype(np.int32),), (field,))


def _is_on(values: Vector, exponent: int) -> bool:
    return np.array_equal(
        np.ldexp(multiples(values, exponent).astype(np.float64), -exponent), values
    )


def _decode_pooled(reader: Reader, data: bytes, spec: ModelSpec, parameters: Vector) -> None:
    """Add the decoded difference from `reader` to `parameters` [spec.size]."""
    factor, exponent = reader.uvarint(), _exponent(reader)
    bound, num = reader.uvarint(), reader.uvarint()
    if not 0 < factor * bound < _MOST_MOVE or num > len(spec.trained):
        raise DecodingError(f"factor {factor}, bound {bound}, {num} tensors on a coarser grid")
    index = -1
    for _ in range(num):
        index += reader.uvarint() + 1
        if index >= len(spec.trained):
            raise DecodingError(f"tensor {index} of {len(spec.trained)}")
        where, grid = spec.slices[spec.trained[index].name], _exponent(reader)
        parameters[where] = valued(multiples(parameters[where], grid), grid)
    field = Integers(bound, spec.size, _ANY, grid_of(spec))
    (moves,) = coding.decode(memoryview(data)[reader.at >> 3 :], (field,))
    for tensor, where in zip(spec.trained, spec.slices.values(), strict=True):
        exact = parameters[where] + np.ldexp(moves[where].astype(np.float64) * factor, -exponent)
        with np.errstate(over="ignore"):
            values = exact.astype(np.float32)
        if not np.array_equal(values, exact) or not _is_in_file(tensor, values):
            raise DecodingError(f"tensor {tensor.name!r}: a value that {tensor.dtype} has not")
        parameters[where] = values


def _exponent(reader: Reader) -> int:
    """Read h, of a grid of 2**-h."""
    exponent = (reader.read(8) ^ 0x80) - 0x80
    if not LEAST_EXPONENT <= exponent <= MOST_EXPONENT:
        raise DecodingError(f"steps of 2**{-exponent}")
    return exponent


def _heads(reader: Reader, spec: ModelSpec) -> Iterator[_Part]:
    for tensor, where in zip(spec.trained, spec.slices.values(), strict=True):
        bound, exponent, shift = reader.uvarint(), 0, 0
        if bound:
            exponent = (reader.read(8) ^ 0x80) - 0x80
            shift = reader.read(8)
        if bound >= 2**31 or shift > _MOST_SHIFT or not tensor.size >= bool(bound):
            raise DecodingError(f"tensor {tensor.name!r}: bound {bound}, shift {shift}")
        if not LEAST_EXPONENT <= exponent <= MOST_EXPONENT:
            raise DecodingError(f"tensor {tensor.name!r}: steps of 2**{-exponent}")
        yield _Part(tensor, where, exponent, shift, bound)


def _buffers(model: Model) -> npt.NDArray[np.uint8]:
    """The bytes of every untrained tensor, in order."""
    stored = [
        to_stored(tensor, model.buffers[tensor.name]).tobytes()
        for tensor in model.spec.tensors
        if not tensor.is_trained
    ]
    return np.frombuffer(b"".join(stored), np.uint8)


def _split(raw: bytes, tensors: Sequence[TensorSpec]) -> dict[str, npt.NDArray[Any]]:
    """Split the concatenated bytes `raw` into arrays; raises ValueError for another length."""
    expected = sum(tensor.num_bytes for tensor in tensors)
    if len(raw) != expected:
        raise ValueError(f"{len(raw)} bytes of tensors, expected {expected}")
    arrays, at = {}, 0
    for tensor in tensors:
        stored = np.frombuffer(raw, stored_dtype(tensor), tensor.size, at)
        arrays[tensor.name] = from_stored(tensor, stored).reshape(tensor.shape)
        at += tensor.num_bytes
    return arrays


def _coded_spec(spec: ModelSpec) -> bytes:
    text = spec.to_json().encode()
    if len(text) > _MOST_SPEC:
        raise ConfigurationError(f"a spec of {len(text)} bytes; at most {_MOST_SPEC} can be coded")
    described = _coded_octets(np.frombuffer(text, np.uint8))
    return uvarint(len(text)) + uvarint(len(described)) + described


def _spec(reader: Reader, max_bytes: int) -> ModelSpec:
    """Read a spec, of tensors that are no longer than `max_bytes`."""
    length = reader.uvarint()
    if length > _MOST_SPEC:
        raise DecodingError(f"a spec of {length} bytes")
    text = _octets(reader, length).tobytes()
    try:
        spec = ModelSpec.from_json(text)
    except ConfigurationError as exc:
        raise DecodingError(f"not a model spec: {exc.detail}") from exc
    total = sum(tensor.num_bytes for tensor in spec.tensors)
    if total > max_bytes:
        raise BodyTooLarge(f"a model of {total} bytes; at most {max_bytes} are allowed")
    return spec


def _from_zeros(model: Model, coder: DownlinkCoder) -> bytes:
    spec, zeros = model.spec, np.zeros(model.spec.size, np.float32)
    return _encode(spec, *_parts(spec, zeros, model.parameters), coder)


def _coded_octets(octets: npt.NDArray[np.uint8]) -> bytes:
    return coding.encode((octets,), (Alphabet(256, octets.size),))


def _octets(reader: Reader, num: int) -> npt.NDArray[np.uint8]:
    """Read `num` bytes, preceded by the length of their code."""
    length = reader.uvarint()
    start = reader.skip(8 * length) >> 3
    coded = reader.octets[start : start + length].tobytes()
    (octets,) = coding.decode(coded, (Alphabet(256, num),))
    return octets.astype(np.uint8)


def _expect_form(reader: Reader, form: int) -> None:
    actual = reader.read(8)
    if actual != form:
        raise DecodingError(f"form {actual}, expected {form}")


__all__ = [
    "DownlinkCoder",
    "decode_difference",
    "decode_model",
    "decode_trained",
    "encode_difference",
    "encode_model",
    "encode_trained",
    "exponent_of",
    "finest",
    "multiples",
    "on_grid",
    "valued",
]
