"""Whatever way a device comes by a model, it is the same file; and no bytes do harm."""

from __future__ import annotations

import hashlib
import json
import math
import runpy
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpress_compression import coding
from fedpress_compression.coding.bits import uvarint
from fedpress_compression.tensors import ModelSpec, TensorSpec
from fedpress_protocols.downlink import (
    MOST_EXPONENT,
    DownlinkCoder,
    decode_difference,
    decode_model,
    decode_trained,
    encode_difference,
    encode_model,
    encode_trained,
    exponent_of,
    finest,
    multiples,
    on_grid,
)
from fedpress_protocols.errors import (
    BodyTooLarge,
    ConfigurationError,
    DecodingError,
)
from fedpress_protocols.model import Base, Model
from tests.lengths import examples
from tests.protocols import spec_reader

SCRIPT = Path(__file__).parents[2] / "protocols" / "vectors" / "make_downlink_vectors.py"
VECTORS: dict[str, dict[str, str]] = json.loads((SCRIPT.parent / "downlink.json").read_text())
PLENTY = 10**6
CODERS: tuple[DownlinkCoder, ...] = ("huffman", "auto")


def model_of(seed: int, bits: int = 12, scale: float = 0.05) -> Model:
    rng = np.random.default_rng(seed)
    made = Model.from_tensors(
        {
            "w": (scale * rng.standard_normal((40, 30))).astype(np.float32),
            "n": np.array(seed, np.int64),
            "b": np.zeros(30, np.float32),
            "k": (scale * rng.standard_normal((4, 3, 5))).astype(np.float32),
        }
    )
    return rounded(made, bits)


def rounded(model: Model, bits: int) -> Model:
    tensors = zip(model.spec.trained, model.spec.slices.values(), strict=True)
    parts = [on_grid(tensor, model.parameters[where], bits) for tensor, where in tensors]
    return model.with_parameters(np.concatenate(parts))


def test_golden_bytes_have_not_changed() -> None:
    assert runpy.run_path(str(SCRIPT))["vectors"]() == VECTORS


@pytest.mark.parametrize("name", VECTORS)
def test_every_vector_decodes_to_its_file(name: str) -> None:
    vector = {key: bytes.fromhex(value) for key, value in VECTORS[name].items()}
    if "base" in vector:
        found = decode_difference(vector["coded"], Model.from_bytes(vector["base"]))
    elif "over" in vector:
        found = decode_trained(vector["coded"], Base.from_bytes(vector["over"]), PLENTY)
    else:
        found = decode_model(vector["coded"], PLENTY)
    assert found.to_bytes() == vector["file"]


@pytest.mark.parametrize("name", [name for name in VECTORS if name.endswith(("huffman", "plain"))])
def test_the_text_is_enough_to_read_every_vector(name: str) -> None:
    vector = VECTORS[name]
    due = Model.from_bytes(bytes.fromhex(vector["file"]))
    body = spec_reader.Body(bytes.fromhex(vector["coded"]))
    values = np.zeros(due.spec.size)
    spec = due.spec
    if "base" in vector:
        assert body.number(8) == (5 if name.startswith("pooled") else 2)
        values = Model.from_bytes(bytes.fromhex(vector["base"])).parameters.astype(np.float64)
    else:
        form = body.number(8)
        assert form == (1 if "over" not in vector else 3 if name.endswith("plain") else 4)
        text = bytes(octets(body, body.uvarint()))
        assert hashlib.sha256(text).hexdigest() == spec.digest
        rows = json.loads(text)
        widths = {"int64": 8, "bool": 1, "float32": 4, "float16": 2, "bfloat16": 2}
        idle = [row for row in rows if row[2] in ("int64", "bool") or row[3:] == ["frozen"]]
        file = bytes.fromhex(vector["over"] if form > 1 else vector["file"])
        carried = b"".join(tensor_bytes(file, row[0]) for row in idle)
        if form == 1:
            num_bytes = sum(widths[row[2]] * math.prod(row[1]) for row in idle)
            assert bytes(octets(body, num_bytes)) == carried
        if form == 3:
            whole = bytes.fromhex(vector["file"])
            rest = b"".join(tensor_bytes(whole, row[0]) for row in rows if row not in idle)
            assert body.data[body.at >> 3 :] == rest
            return
    if name.startswith("pooled"):
        read_pooled(body, spec, values)
        assert values.astype(np.float32).tobytes() == due.parameters.tobytes()
        return
    assert body.uvarint() == len(spec.trained)
    heads = []
    for tensor in spec.trained:
        bound = body.uvarint()
        h, shift = (body.number(8), body.number(8)) if bound else (0, 0)
        heads.append((tensor.name, bound, h - 256 if h > 127 else h, shift))
    layout = [
        {"integers": {"bound": bound, "count": spec.select([name]).size}}
        for name, bound, _, _ in heads
        if bound
    ]
    moves = iter(spec_reader.read(body.data[body.at >> 3 :], layout))
    for name, bound, h, shift in heads:
        if bound:
            where = spec.slices[name]
            steps = np.rint(values[where] * 2.0**h) + np.array(next(moves)) * 2.0**shift
            values[where] = steps * 2.0**-h
    assert values.astype(np.float32).tobytes() == due.parameters.tobytes()


def read_pooled(body: spec_reader.Body, spec: ModelSpec, values: np.ndarray) -> None:
    """Apply the rest of a difference with one field for all tensors."""
    factor, exponent, bound, num = body.uvarint(), body.number(8), body.uvarint(), body.uvarint()
    exponent -= 256 * (exponent > 127)
    index = -1
    for _ in range(num):
        index += 1 + body.uvarint()
        h = body.number(8)
        h -= 256 * (h > 127)
        where = spec.slices[spec.trained[index].name]
        values[where] = np.rint(values[where] * 2.0**h) * 2.0**-h
    layout = [{"integers": {"bound": bound, "count": spec.size}}]
    (moves,) = spec_reader.read(body.data[body.at >> 3 :], layout)
    values += np.array(moves) * float(factor) * 2.0**-exponent


def tensor_bytes(file: bytes, name: str) -> bytes:
    """A tensor's bytes in a safetensors file."""
    length = int.from_bytes(file[:8], "little")
    first, end = json.loads(file[8 : 8 + length])[name]["data_offsets"]
    return file[8 + length + first : 8 + length + end]


def octets(body: spec_reader.Body, num: int) -> list[int]:
    length = body.uvarint()
    coded = bytes(body.number(8) for _ in range(length))
    (found,) = spec_reader.read(coded, [{"alphabet": {"size": 256, "count": num}}])
    return list(found)


@settings(deadline=None, max_examples=examples(12, 40))
@given(st.data())
def test_any_path_of_differences_and_wholes_comes_to_the_same_file(data: st.DataObject) -> None:
    """Models on finer and coarser grids, that grow and shrink, reached in any way."""
    line = [model_of(data.draw(st.integers(0, 9)))]
    for _ in range(data.draw(st.integers(1, 5))):
        rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
        scale = 2.0 ** data.draw(st.integers(-14, 3))
        step = scale * rng.standard_normal(line[0].spec.size)
        step[rng.random(step.size) < 0.8] = 0
        target = (line[-1].parameters + step).astype(np.float32)
        line.append(rounded(line[-1].with_parameters(target), data.draw(st.integers(4, 14))))
    at = data.draw(st.integers(0, len(line) - 1))
    held = line[at]
    for _ in range(6):
        to = data.draw(st.integers(0, len(line) - 1))
        coder = data.draw(st.sampled_from(CODERS))
        if data.draw(st.booleans()):
            held = decode_model(encode_model(line[to], coder), PLENTY)
        else:
            held = decode_difference(encode_difference(held, line[to], coder), held)
        assert held.to_bytes() == line[to].to_bytes()


@settings(deadline=None, max_examples=examples(20, 60))
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=30),
    st.integers(4, 14),
)
def test_what_is_rounded_lies_on_its_grid(values: list[float], bits: int) -> None:
    given_values = np.array(values, np.float32)
    tensor = TensorSpec("w", (len(values),))
    try:
        found = on_grid(tensor, given_values, bits)
    except ConfigurationError:
        assert np.abs(given_values).max() > 2.0**100
        return
    exponent = finest(given_values, bits)
    if exponent is None:
        assert not given_values.any()
        return
    assert np.abs(multiples(found, exponent)).max() < 2 ** (bits - 1)
    assert np.abs(found.astype(np.float64) - given_values).max() <= 2.0 ** -(exponent + 1)
    assert exponent == MOST_EXPONENT or (
        np.rint(np.abs(given_values).max() * 2.0 ** (exponent + 1)) >= 2 ** (bits - 1)
    )
    assert on_grid(tensor, found, bits).tobytes() == found.tobytes()
    least = exponent_of(found)
    assert least is None or least <= exponent


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.floats(-60000, 60000, width=32), min_size=1, max_size=30),
    st.sampled_from(["float16", "bfloat16"]),
    st.integers(4, 24),
)
def test_half_precision_is_coded_exactly(values: list[float], dtype: str, bits: int) -> None:
    tensor = TensorSpec("w", (len(values),), dtype)
    spec = ModelSpec((tensor,))
    rounded_values = on_grid(tensor, np.array(values, np.float32), bits)
    model = Model(spec, rounded_values, {})
    assert np.array_equal(Model.from_bytes(model.to_bytes()).parameters, rounded_values)
    assert decode_model(encode_model(model), PLENTY).to_bytes() == model.to_bytes()
    base = model.with_parameters(np.zeros_like(rounded_values))
    assert decode_difference(encode_difference(base, model), base).to_bytes() == model.to_bytes()


@pytest.mark.parametrize("bits", [8, 12, 14])
def test_a_whole_model_is_less_than_half_of_its_file_whatever_its_values(bits: int) -> None:
    rng = np.random.default_rng(0)
    model = Model.from_tensors({"w": rng.uniform(-1, 1, (200, 100)).astype(np.float32)})
    coded = encode_model(rounded(model, bits))
    assert len(coded) <= len(model.to_bytes()) * (bits + 0.1) / 32
    assert len(coded) < len(model.to_bytes()) / 2


def test_least_exponents_are_exact() -> None:
    assert exponent_of(np.array([0.75, 8, 0], np.float32)) == 2
    assert exponent_of(np.array([-96, 32], np.float32)) == -5
    assert exponent_of(np.zeros(3, np.float32)) is None
    assert exponent_of(np.array([2.0**120], np.float32)) == -100


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([-0.0, 1.0], "negative zero"),
        ([1.0, 2.0**-30], "no grid"),
        ([2.0**-121], "no grid"),
    ],
)
def test_values_on_no_grid_are_refused(values: list[float], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        exponent_of(np.array(values, np.float32))


def test_models_without_a_coded_form_are_refused() -> None:
    half = Model.from_tensors({"w": np.ones(3, np.float16)})
    with pytest.raises(ConfigurationError, match="float16 has not"):
        encode_model(half.with_parameters(np.full(3, 1 + 2.0**-12, np.float32)))
    with pytest.raises(ConfigurationError, match="float16 has not"):
        encode_model(half.with_parameters(np.full(3, 2.0**17, np.float32)))
    with pytest.raises(ConfigurationError, match="more than their trained values"):
        encode_difference(model_of(1), model_of(2))
    one = Model.from_tensors({"w": np.ones(3, np.float32)})
    with pytest.raises(ConfigurationError, match="more than their trained values"):
        encode_difference(half, one)
    far = one.with_parameters(np.full(3, 2.0**90, np.float32))
    with pytest.raises(ConfigurationError, match="or more"):
        encode_difference(far, one)
    away = one.with_parameters(np.array([-(2.0**31) + 128, 0, 0], np.float32))
    near = one.with_parameters(np.array([2.0**24 - 1, 3, 1], np.float32))
    with pytest.raises(ConfigurationError, match="moves by"):
        encode_difference(away, near)
    names = {f"tensor-{index:060d}": np.ones(1, np.float32) for index in range(14000)}
    with pytest.raises(ConfigurationError, match="a spec of"):
        encode_model(Model.from_tensors(names))
    with pytest.raises(ConfigurationError, match="out of range for any grid"):
        on_grid(TensorSpec("w", (1,)), np.array([3e38], np.float32), 12)


@pytest.mark.parametrize(
    "kind",
    ["model-huffman", "difference-few-huffman", "difference-most-auto", "pooled-coarser-auto"],
)
def test_damaged_bytes_are_refused_or_come_to_another_model(kind: str) -> None:
    """Never another error, a crash or much memory: the digest tells the rest."""
    vector = {key: bytes.fromhex(value) for key, value in VECTORS[kind].items()}
    base = Model.from_bytes(vector["base"]) if "base" in vector else None
    rng = np.random.default_rng(1)
    refused = 0
    for case in range(600):
        data = bytearray(vector["coded"])
        if case % 3 == 0:
            data = data[: rng.integers(0, len(data))]
        elif case % 3 == 1:
            data += bytes(rng.integers(0, 256, 1 + case % 5).astype(np.uint8))
        for _ in range(int(rng.integers(0 if case % 3 < 2 else 1, 4))):
            at = int(rng.integers(0, min(len(data), 60) if case % 2 else len(data)) if data else 0)
            if data:
                data[at] ^= 1 << int(rng.integers(0, 8))
        if bytes(data) == vector["coded"]:
            continue
        try:
            found = read(bytes(data), base)
        except (DecodingError, BodyTooLarge):
            refused += 1
        else:
            assert found.to_bytes() != vector["file"] or case % 3 == 2
    assert refused > 300


def read(data: bytes, base: Model | None) -> Model:
    return decode_model(data, PLENTY) if base is None else decode_difference(data, base)


def header(text: bytes, rest: bytes = b"", carried: bytes = b"\x00") -> bytes:
    """A whole model with any text for its spec."""
    layout = (coding.Alphabet(256, len(text)),)
    coded = coding.encode((np.frombuffer(text, np.uint8),), layout)
    return b"\x01" + uvarint(len(text)) + uvarint(len(coded)) + coded + carried + rest


def move(bound: int, exponent: int, shift: int, whole: list[int]) -> bytes:
    """A tensor's head and field, for a model of one."""
    field = coding.Integers(bound, len(whole))
    coded = coding.encode((np.array(whole, np.int32),), (field,))
    return uvarint(bound) + bytes((exponent, shift)) + coded


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "bits left"),
        (b"\x02", "form 2"),
        (b"\x01\xff\xff\xff\x7f", "a spec of"),
        (header(b"[]x"), "not a model spec"),
        (header(b'[["a",[1],"float16"]]', b"\x01" + move(2**12 + 1, 0, 0, [2**12 + 1])), "has not"),
        (header(b'[["a",[1],"float16"]]', b"\x01" + move(1, 0, 16, [1])), "has not"),
        (header(b'[["a",[1],"bfloat16"]]', b"\x01" + move(257, 0, 0, [257])), "has not"),
        (header(b'[["a",[1],"float32","still"]]'), "not in its one form"),
        (header(b'[["a",[1],"int64","frozen"]]'), "called frozen"),
        (header(b'[["a",[1],"float32"]]', b"\x02"), "trained tensors"),
        (header(b'[["a",[1],"float32"]]', b"\x01\xff\xff\xff\xff\x0f\x00\x00"), "bound"),
        (header(b'[["a",[1],"float32"]]', b"\x01\x01\x00\x19"), "shift 25"),
        (header(b'[["a",[1],"float32"]]', b"\x01\x01\x7f\x00"), "steps of 2"),
        (header(b'[["a",[0],"float32"],["b",[1],"float32"]]', b"\x02\x01\x00\x00"), "bound 1"),
        (header(b'[["a",[0,9223372036854775808],"float32"]]', b""), r"at most 2\*\*48"),
        (header(b'[["a",[0],"int64"]]', b""), "no tensor of the model is trainable"),
        (
            header(b'[["a",[1],"float32"]]', b"\x01" + move(2, 0, 24, [1])),
            "steps of a grid or more",
        ),
    ],
)
def test_forged_models_are_refused(data: bytes, reason: str) -> None:
    with pytest.raises(DecodingError, match=reason):
        decode_model(data, PLENTY)


def test_a_difference_to_a_base_far_off_is_refused() -> None:
    base = Model.from_tensors({"w": np.full(4, 2.0**40, np.float32)})
    with pytest.raises(DecodingError, match="or more"):
        decode_difference(b"\x02\x01" + move(1, 16, 0, [1, 0, 0, 0]), base)
    half = Model.from_tensors({"w": np.ones(3, np.float16)})
    with pytest.raises(DecodingError, match="float16 has not"):
        decode_difference(b"\x02\x01" + move(1, 11, 0, [1, 0, 0]), half)


def pooled(
    factor: int, exponent: int, bound: int, whole: list[int], grids: bytes = b"\x00"
) -> bytes:
    """A difference with one field, for the matrix of a model of one."""
    field = coding.Integers(max(bound, 1), len(whole))
    coded = coding.encode((np.array(whole, np.int32),), (field,))
    return b"\x05" + uvarint(factor) + bytes((exponent,)) + uvarint(bound) + grids + coded


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x03", "form 3, expected 2 or 5"),
        (pooled(0, 0, 1, [0, 0, 0]), "factor 0"),
        (pooled(1, 0, 0, [0, 0, 0]), "bound 0"),
        (pooled(2**16, 0, 2**15, [0, 0, 0]), "bound 32768"),
        (pooled(1, 121, 1, [0, 0, 0]), r"steps of 2\*\*-121"),
        (pooled(1, 0, 1, [0, 0, 0], b"\x02"), "2 tensors on a coarser grid"),
        (pooled(1, 0, 1, [0, 0, 0], b"\x01\x01\x00"), "tensor 1 of 1"),
        (pooled(1, 0, 1, [0, 0, 0], b"\x01\x00\x9b"), r"steps of 2\*\*101"),
        (pooled(1, 0, 1, [0, 0, 0], b"\x01\x00\x18"), "or more"),
        (pooled(1, 30, 1, [0, 0, 1]), "float32 has not"),
        (pooled(2**20, 0x9C, 2**10, [1024, 0, 0]), "float32 has not"),
    ],
)
def test_forged_pooled_differences_are_refused(data: bytes, reason: str) -> None:
    base = Model.from_tensors({"w": np.full(3, 2.0, np.float32)})
    with pytest.raises(DecodingError, match=reason):
        decode_difference(data, base)


def test_a_pooled_difference_to_values_of_no_half_is_refused() -> None:
    base = Model.from_tensors({"w": np.ones(3, np.float16)})
    decode_difference(pooled(3, 10, 1, [1, 0, -1]), base)
    with pytest.raises(DecodingError, match="float16 has not"):
        decode_difference(pooled(1, 11, 1, [1, 0, 0]), base)


def test_an_adapters_difference_has_one_head_and_one_table() -> None:
    """Sixteen tensors, of whose values 4 % move by one step that is no power of two."""
    rng = np.random.default_rng(0)
    tensors = {f"t{i}": rng.standard_normal((32, 16)).astype(np.float32) for i in range(16)}
    base = rounded(Model.from_tensors(tensors), 8)
    moves = rng.integers(-1, 2, base.spec.size) * (rng.random(base.spec.size) < 0.06)
    model = base.with_parameters(base.parameters + (moves * 5 * 2.0**-6).astype(np.float32))
    for coder in CODERS:
        shorter = encode_difference(base, model, coder)
        apart = encode_difference(base, model, coder, by_tensor=True)
        assert (shorter[0], apart[0]) == (5, 2)
        assert len(shorter) < 0.8 * len(apart)
        assert decode_difference(shorter, base).to_bytes() == model.to_bytes()
    one, tiny = np.ones(1, np.float32), np.float32(2.0**-120)
    near = Model.from_tensors({"a": one, "b": one, "c": tiny * one})
    far = near.with_parameters(np.array([2.0**23, 1 + 2.0**-20, tiny], np.float32))
    assert encode_difference(near, far)[0] == 2, "nothing in common below 2**31"
    large = near.with_parameters(np.array([2.0**122, 1, tiny], np.float32))
    larger = near.with_parameters(np.array([2.0**123, 1, tiny], np.float32))
    assert encode_difference(large, larger)[0] == 2, "no step of a signed byte"


def test_a_model_longer_than_admitted_is_refused_before_it_is_made() -> None:
    forged = header(b'[["a",[1000000000],"float32"]]', b"\x01\x00")
    tracemalloc.start()
    try:
        with pytest.raises(BodyTooLarge, match="4000000000 bytes"):
            decode_model(forged, 2**30)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_a_difference_between_other_frozen_values_is_refused() -> None:
    spec = ModelSpec((TensorSpec("a", (2,)), TensorSpec("b", (2,), "bfloat16", frozen=True)))
    values = np.array([1, 2], np.float32)
    base = Model(spec, values, {"b": values})
    other = Model(spec, values, {"b": values * np.float32(-1)})
    with pytest.raises(ConfigurationError, match="more than their trained values"):
        encode_difference(base, other)
    assert decode_model(encode_model(other), PLENTY).to_bytes() == other.to_bytes()


def partly_frozen() -> Model:
    rng = np.random.default_rng(8)
    tensors: dict[str, np.ndarray] = {
        "table": rng.standard_normal((50, 20)).astype(np.float32),
        "down": rng.standard_normal((4, 20)).astype(np.float32),
        "seen": np.array(3, np.int64),
    }
    return Model.from_tensors(tensors, frozen=["table"])


def test_values_on_no_grid_go_over_a_base_as_they_are() -> None:
    model = partly_frozen()
    data = encode_trained(model, None)
    assert len(data) < 4 * model.spec.size + 200 < model.base.num_bytes
    assert decode_trained(data, model.base, PLENTY).to_bytes() == model.to_bytes()
    with pytest.raises(ConfigurationError, match="on no grid"):
        encode_trained(model, "huffman")


def trained_head(text: bytes, form: int = 3) -> bytes:
    return bytes((form,)) + header(text, carried=b"")[1:]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x01", "form 1, expected 3 or 4"),
        (b"\x03\xff\xff\xff\x7f", "a spec of"),
        (trained_head(b"[]x"), "not a model spec"),
        (trained_head(b'[["a",[1],"float32"]]') + bytes(4), "another base"),
        (trained_head(b'[["n",[],"int64"]]'), "no tensor of the model is trainable"),
        (trained_head(b'[["n",[],"int64"],["a",[1],"float32"]]') + bytes(3), "3 bytes of tensors"),
        (trained_head(b'[["n",[],"int64"],["a",[1],"float32"]]') + bytes(5), "5 bytes of tensors"),
        (trained_head(b'[["n",[],"int64"],["a",[1],"float32"]]') + b"\0\0\xc0\x7f", "NaN"),
        (trained_head(b'[["n",[],"int64"],["a",[1],"float32"]]', 4) + b"\2", "trained tensors"),
    ],
)
def test_forged_tensors_over_a_base_are_refused(data: bytes, reason: str) -> None:
    base = model_of(1).base
    with pytest.raises(DecodingError, match=reason):
        decode_trained(data, base, PLENTY)


def test_specs_have_one_text() -> None:
    spec = model_of(0).spec
    assert ModelSpec.from_json(spec.to_json()) == spec
    assert ModelSpec.from_json(spec.to_json().encode()) == spec


@pytest.mark.parametrize(
    "text",
    [
        '[["a",[1], "float32"]]',
        '[["a",[Infinity],"float32"]]',
        '[["\\ud800",[1],"float32"]]',
        '[["__metadata__",[1],"float32"]]',
        '[[1,[1],"float32"]]',
        '[["a",[1],["float32"]]]',
        "[" * 100_000,
        "{}",
        '[["a",[true],"float32"]]',
    ],
)
def test_other_texts_are_no_specs(text: str) -> None:
    with pytest.raises(ConfigurationError):
        ModelSpec.from_json(text)
