"""A model is its tensors, its file and its address; each gives the others back."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from fedpress_compression.tensors import MAX_TENSORS, ModelSpec, TensorSpec, array_dtype
from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.model import (
    Base,
    Model,
    arrays_in,
    check_model,
    spec_of,
    write_arrays,
)
from tests.hostile_models import file_of

MIXED: dict[str, npt.NDArray[Any]] = {
    "conv.weight": np.arange(24, dtype=np.float32).reshape(2, 3, 4) / 7,
    "bn.num_batches_tracked": np.array(12, np.int64),
    "half": np.array([1.5, -2.25], np.float16),
    "empty": np.zeros((0, 4), np.float32),
    "mask": np.array([True, False]),
}


def test_a_model_survives_its_file_byte_for_byte() -> None:
    model = Model.from_tensors(MIXED)
    again = Model.from_bytes(model.to_bytes())
    assert again.spec == model.spec
    assert again.digest == model.digest
    for name, array in MIXED.items():
        assert (again.tensors()[name] == array).all()


def test_only_floating_tensors_of_up_to_32_bits_are_trained() -> None:
    spec = Model.from_tensors(MIXED).spec
    assert [tensor.name for tensor in spec.trained] == ["conv.weight", "half", "empty"]
    assert spec.size == 26
    assert spec.slices["half"] == slice(24, 26)
    assert spec.select(["half", "mask"]).size == 2


def test_buffers_are_carried_as_they_are() -> None:
    model = Model.from_tensors(MIXED)
    moved = model.with_parameters(model.parameters + np.float32(1))
    assert moved.buffers["bn.num_batches_tracked"] == 12
    assert moved.digest != model.digest


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=20))
def test_bfloat16_rounds_to_nearest_even(values: list[float]) -> None:
    spec = ModelSpec((TensorSpec("x", (len(values),), "bfloat16"),))
    ours = Model.from_bytes(Model(spec, np.array(values, np.float32), {}).to_bytes())
    torch = pytest.importorskip("torch")
    theirs = torch.tensor(values, dtype=torch.float32).to(torch.bfloat16).to(torch.float32)
    assert (ours.parameters == theirs.numpy()).all()


def test_a_buffer_has_the_type_of_its_tensor_where_numpy_has_it() -> None:
    model = Model.from_tensors(MIXED)
    for name, array in model.buffers.items():
        [tensor] = [each for each in model.spec.tensors if each.name == name]
        assert array.dtype == array_dtype(tensor)
    assert array_dtype(TensorSpec("x", (2,), "bfloat16")) == np.float32


def test_another_tools_file_is_read_in_the_order_of_names() -> None:
    foreign = save({"b": np.ones(2, np.float32), "a": np.zeros(3, np.float32)})
    assert [tensor.name for tensor in Model.from_bytes(foreign).spec.tensors] == ["a", "b"]


def test_the_digest_of_a_spec_tells_names_shapes_dtypes_and_order() -> None:
    first = ModelSpec((TensorSpec("a", (2,)), TensorSpec("b", (3,))))
    others = [
        ModelSpec((TensorSpec("b", (3,)), TensorSpec("a", (2,)))),
        ModelSpec((TensorSpec("a", (2,)), TensorSpec("b", (3, 1)))),
        ModelSpec((TensorSpec("a", (2,)), TensorSpec("b", (3,), "float16"))),
        ModelSpec((TensorSpec("a", (2,)), TensorSpec("c", (3,)))),
    ]
    assert len({spec.digest for spec in [first, *others]}) == 5
    assert first.tensors[0].num_bytes == 8


FROZEN = ModelSpec(
    (
        TensorSpec("a", (2,)),
        TensorSpec("full", (3,), "float32", frozen=True),
        TensorSpec("half", (3,), "float16", frozen=True),
        TensorSpec("brain", (3,), "bfloat16", frozen=True),
        TensorSpec("b", (), "bfloat16"),
    )
)


def partly_frozen() -> Model:
    """Values of frozen tensors that the trained may not have, NaN and infinity, among them."""
    values = np.array([1.5, -np.inf, np.nan], np.float32)
    buffers: dict[str, np.ndarray] = {
        "full": values,
        "half": values.astype(np.float16),
        "brain": values,
    }
    return Model(FROZEN, np.arange(3, dtype=np.float32), buffers)


def test_frozen_tensors_survive_their_file_byte_for_byte() -> None:
    model = partly_frozen()
    again = Model.from_bytes(model.to_bytes())
    assert again.spec == FROZEN
    assert again.to_bytes() == model.to_bytes()
    assert again.spec.slices == {"a": slice(0, 2), "b": slice(2, 3)}
    for name, array in model.buffers.items():
        np.testing.assert_array_equal(again.buffers[name], array)
        assert again.buffers[name].dtype == array.dtype


def test_new_parameters_leave_frozen_tensors_alone() -> None:
    model = partly_frozen()
    moved = Model.from_bytes(model.with_parameters(model.parameters + np.float32(1)).to_bytes())
    for name in ("full", "half", "brain"):
        np.testing.assert_array_equal(moved.tensors()[name], model.tensors()[name])
    assert moved.tensors()["a"].tolist() == [1, 2]


def test_what_is_frozen_is_in_the_one_form_of_a_spec() -> None:
    text = FROZEN.to_json()
    assert json.loads(text)[1] == ["full", [3], "float32", "frozen"]
    assert ModelSpec.from_json(text) == FROZEN
    thawed = ModelSpec(tuple(TensorSpec(t.name, t.shape, t.dtype) for t in FROZEN.tensors))
    assert "frozen" not in thawed.to_json()
    assert thawed.digest != FROZEN.digest
    assert thawed.size == 12
    assert ModelSpec.from_json(thawed.to_json()) == thawed


@pytest.mark.parametrize("mark", ['"thawed"', "true", "null", '"frozen","frozen"'])
def test_another_mark_in_a_spec_is_refused(mark: str) -> None:
    with pytest.raises(ConfigurationError, match="not in its one form"):
        ModelSpec.from_json(f'[["a",[1],"float32",{mark}]]')


def test_the_digest_and_the_file_of_a_model_without_frozen_tensors_stay() -> None:
    model = Model.from_tensors({"a": np.ones(2, np.float32), "n": np.array(3, np.int64)})
    text = b'[["a",[2],"float32"],["n",[],"int64"]]'
    assert model.spec.digest == hashlib.sha256(text).hexdigest()
    assert b'{"fedpress.order":"[\\"a\\",\\"n\\"]"}' in model.to_bytes()


def test_arrays_are_frozen_by_name() -> None:
    arrays = {"a": np.ones(2, np.float32), "b": np.ones(3, np.float32)}
    model = Model.from_tensors(arrays, frozen=["b"])
    assert [tensor.name for tensor in model.spec.trained] == ["a"]
    assert Model.from_bytes(model.to_bytes()).spec == model.spec
    with pytest.raises(ConfigurationError, match="frozen names no tensor of the model: 'c'"):
        Model.from_tensors(arrays, frozen=["c"])
    with pytest.raises(ConfigurationError, match="unless they are frozen"):
        Model.from_tensors(arrays, frozen=["a", "b"])


def test_all_tensors_of_the_largest_model_but_one_are_frozen() -> None:
    """As many as a file may have; comparing each name with each would take minutes."""
    names = [f"t{number}" for number in range(MAX_TENSORS)]
    arrays = dict.fromkeys(names, np.zeros(1, np.float32))
    data = Model.from_tensors(arrays, frozen=names[1:]).to_bytes()
    assert [each.name for each in Model.from_bytes(data).spec.trained] == names[:1]


def reordered(order: Any) -> bytes:
    """A file whose metadata claims `order` for its one tensor `a`."""
    return save({"a": np.zeros(1, np.float32)}, {"fedpress.order": json.dumps(order)})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 40,
        Model.from_tensors(MIXED).to_bytes()[:-1],
        Model.from_tensors(MIXED).to_bytes() + b"x",
        reordered(["b"]),
        reordered(3),
        reordered({"order": ["a"]}),
        reordered({"order": ["a"], "frozen": []}),
        reordered({"order": ["a"], "frozen": ["b"]}),
        reordered({"order": ["a"], "frozen": ["a", "a"]}),
        reordered({"order": ["a"], "frozen": "a"}),
        reordered({"order": ["a"], "frozen": [["a"]]}),
        reordered({"order": ["a"], "frozen": ["a"], "more": 1}),
        reordered({"order": ["b"], "frozen": ["b"]}),
        reordered({"order": 3, "frozen": ["a"]}),
        save({"a": np.zeros(1, np.complex64)}),
    ],
)
def test_a_file_that_is_no_model_is_refused(data: bytes) -> None:
    with pytest.raises(ConfigurationError, match="not a safetensors model"):
        Model.from_bytes(data)


def test_a_file_of_torch_save_is_named() -> None:
    with pytest.raises(
        ConfigurationError, match=r"a zip file, as torch\.save writes \(save it with"
    ):
        Model.from_bytes(b"PK\x03\x04" + bytes(100))


def make(dtype: str = "float32", size: int = 2, **changes: Any) -> Model:
    fields = {
        "spec": ModelSpec((TensorSpec("x", (size,), dtype),)),
        "parameters": np.ones(size, np.float32),
        "buffers": {},
    }
    return Model(**{**fields, **changes})


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: TensorSpec("", (1,)), "no name"),
        (lambda: TensorSpec("x", (1,), "complex64"), "known are"),
        (lambda: TensorSpec("x", (1,), "int64", frozen=True), "never trained, and called frozen"),
        (lambda: TensorSpec("x", (-1,)), "has shape"),
        (lambda: ModelSpec((TensorSpec("x", ()), TensorSpec("x", ()))), "one name"),
        (lambda: make(parameters=np.ones(3, np.float32)), r"expected float32\[2\]"),
        (lambda: make(parameters=np.array([1, np.nan], np.float32)), "infinity, in tensor 'x'"),
        (lambda: make(buffers={"y": np.ones(1)}), "buffers"),
        (lambda: make(size=0), "no tensor of the model is trainable"),
        (
            lambda: make("float16", parameters=np.full(2, 1e5, np.float32)).to_bytes(),
            "beyond float16",
        ),
        (lambda: Model.from_tensors({"x": np.ones(2, np.int64)}), "is trainable: 1 int64; train"),
        (lambda: Model.from_tensors({"x": np.ones(2)}), "'x' is float64, which is never trained"),
        (
            lambda: Model.from_tensors(cast(Any, {"x": [1.0]})),
            "'x' is a list, expected a numpy array",
        ),
        (lambda: make().spec.flatten({}), "missing, expected shape"),
        (lambda: make().spec.flatten({"x": np.ones(3)}), r"of shape \(3,\), expected"),
        (lambda: make().spec.unflatten(np.ones(5, np.float32)), r"expected \(2,\)"),
    ],
)
def test_what_is_no_model_says_why(build: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        build()


def test_a_base_is_what_no_training_changes() -> None:
    model = partly_frozen()
    base = model.base
    assert {tensor.name for tensor in base.tensors} == set(model.buffers)
    again = Base.from_bytes(base.to_bytes())
    assert again.to_bytes() == base.to_bytes()
    assert again.digest == base.digest == hashlib.sha256(base.to_bytes()).hexdigest()
    assert again.tensors == base.tensors
    moved = model.with_parameters(model.parameters + np.float32(1))
    assert moved.base.digest == base.digest
    name = next(tensor.name for tensor in model.spec.tensors if tensor.frozen)
    other = {**model.buffers, name: np.array(model.buffers[name]) + 1}
    assert Model(model.spec, model.parameters, other).base.digest != base.digest


def test_a_base_is_read_from_its_own_file_alone() -> None:
    with pytest.raises(ConfigurationError, match="a model, where the file of a base is expected"):
        Base.from_bytes(partly_frozen().to_bytes())
    with pytest.raises(ConfigurationError, match="not a safetensors model"):
        Base.from_bytes(b"nonsense")
    header = b'{"x":{"dtype":"F8_E4M3","shape":[1],"data_offsets":[0,1]}}'
    foreign = len(header).to_bytes(8, "little") + header + b"\0"
    with pytest.raises(ConfigurationError, match="not a safetensors model"):
        Base.from_bytes(foreign)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("is_ordered", [True, False])
def test_a_model_in_a_file_is_the_one_in_memory(
    tmp_path: Path, dtype: str, is_ordered: bool
) -> None:
    """A view of the file where its values are one float32 vector there, and a vector made of them
    elsewhere."""
    tensors = [TensorSpec("b", (300, 1000), dtype), TensorSpec("a", (2,), dtype)]
    frozen = TensorSpec("table", (3,), dtype, frozen=True)
    spec = ModelSpec((*(reversed(tensors) if is_ordered else tensors), frozen))
    values = np.arange(spec.size, dtype=np.float32) / np.float32(1000)
    model = Model(spec, values, {"table": np.array([1, 2, 3], array_dtype(frozen))})
    path, made = tmp_path / "model", list[int]()

    def zeros(size: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        made.append(size)
        return np.zeros(size, dtype)

    model.write(path, zeros)
    assert path.read_bytes() == model.to_bytes()
    converted = {"float32": (), "float16": spec.trained, "bfloat16": spec.tensors}[dtype]
    assert made == [tensor.size for tensor in converted]
    made.clear()
    data = path.read_bytes()
    again = Model.from_buffer(memoryview(data), zeros)
    assert made == ([] if dtype == "float32" and is_ordered else [spec.size])
    assert again.digest == model.digest
    assert again.spec == spec == spec_of(data) == check_model(data)
    with pytest.raises(OSError, match="cannot be written"):
        model.write(tmp_path / "none" / "model")


def test_a_file_is_checked_without_a_model() -> None:
    whole = Model.from_tensors({"w": np.ones(5, np.float32)}).to_bytes()
    with pytest.raises(ConfigurationError, match="NaN"):
        check_model(whole[:-4] + np.array([np.nan], np.float32).tobytes())
    with pytest.raises(ConfigurationError, match="no tensor of the model is trainable"):
        check_model(save({"counter": np.ones(5, np.int64)}))
    assert spec_of(save({"counter": np.ones(5, np.int64)})).size == 0


def test_arrays_survive_their_file(tmp_path: Path) -> None:
    arrays: dict[str, npt.NDArray[Any]] = {
        "rounds": np.array([3], np.int64),
        "first": np.arange(5.0),
        "flags": np.frombuffer(b"{}", np.uint8),
    }
    path = tmp_path / "arrays"
    write_arrays(path, arrays)
    assert path.read_bytes() == save(arrays)
    again = arrays_in(path.read_bytes())
    assert {name: each.tolist() for name, each in again.items()} == {
        name: each.tolist() for name, each in arrays.items()
    }


def tensor(start: Any = 0, stop: Any = 4, shape: Any = (1,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ({"w": tensor(stop=8)}, "bytes 0 to 8, expected 0 to 4"),
        ({"w": tensor(1, 5)}, "bytes 1 to 5, expected 0 to 4"),
        ({"w": tensor(), "v": tensor()}, "expected 4 to 8"),
        ({"w": tensor(stop=2, dtype="F16")}, "tensors of 2 bytes, where the file has 4"),
        ({"w": tensor(), "v": tensor(4, 8)}, "tensors of 8 bytes, where the file has 4"),
        ({"w": tensor(dtype="F8_E4M3")}, "is 'F8_E4M3'"),
        ({"w": tensor(dtype="\u202e")}, "u202e"),
        ({"w": tensor(shape=[True])}, "no sizes"),
        ({"w": tensor(-4, 0)}, "no sizes"),
        ({"w": tensor(shape=[2**70])}, "no sizes"),
        ({"w": tensor(shape="1")}, "no sizes"),
        ({"w": tensor(), "__metadata__": {"n": 1}}, "metadata"),
        ({"w": tensor(), "__metadata__": []}, "metadata"),
        ({"w": 5}, "not a safetensors model"),
        ({"w": {"shape": [1], "data_offsets": [0, 4]}}, "not a safetensors model"),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, "not a safetensors model"),
        ({"w": tensor(dtype=[])}, "not a safetensors model"),
    ],
)
def test_a_header_that_does_not_describe_its_file_is_refused(
    header: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigurationError, match=says):
        Model.from_bytes(file_of(header, bytes(4)))


def test_a_header_in_another_encoding_is_refused() -> None:
    text = json.dumps({"w": tensor()}).encode("utf-16")
    data = len(text).to_bytes(8, "little") + text + bytes(4)
    with pytest.raises(ConfigurationError, match="not a safetensors model"):
        Model.from_bytes(data)
