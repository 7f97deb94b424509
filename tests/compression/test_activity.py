"""The map of how much each coordinate has moved of late."""

from __future__ import annotations

import json
import math
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpress_compression import activity
from fedpress_compression.compressor import Public
from fedpress_compression.compressors.coded import Coded
from fedpress_compression.compressors.none import Uncompressed
from fedpress_compression.compressors.per_tensor import PerTensor
from fedpress_compression.compressors.topk import TopK
from fedpress_compression.contexts import contexts_of, ranks
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.tensors import ModelSpec, TensorSpec, Vector
from fedpress_protocols.errors import DecodingError
from fedpress_protocols.model import Model
from fedpress_protocols.plan import RoundPlan
from fedpress_protocols.upload import Upload
from tests.client.fake_server import make_plan
from tests.protocols import spec_reader

VECTORS = Path(__file__).parents[2] / "protocols" / "vectors"
MODEL = Model.from_tensors({"w": np.zeros((20, 12), np.float32), "b": np.zeros(12, np.float32)})
SPEC = MODEL.spec


def steps(seed: int, num: int) -> list[Vector]:
    rng = np.random.default_rng(seed)
    scale = rng.gamma(0.3, 1, SPEC.size)
    return [(scale * rng.standard_normal(SPEC.size)).astype(np.float32) for _ in range(num)]


def average_of(moves: list[Vector]) -> Vector:
    average = None
    for step in moves:
        average = activity.averaged(average, step)
    assert average is not None
    return average


def test_the_average_forgets_at_its_decay() -> None:
    moves = steps(0, 6)
    due = sum(0.2 * 0.8**age * np.abs(step) for age, step in enumerate(reversed(moves)))
    average = average_of(moves)
    assert average.dtype == np.float32
    np.testing.assert_allclose(average, due, rtol=1e-6)


def test_a_map_tells_octaves_of_rank_from_the_eighth_up() -> None:
    average = average_of(steps(1, 3))
    found = activity.from_bytes(activity.to_bytes(average, SPEC), SPEC)
    order = np.argsort(-average, kind="stable")
    due = np.zeros(SPEC.size)
    for c in range(3, 11):
        due[order[: SPEC.size >> c]] = c - 2
    np.testing.assert_array_equal(found, due)


def test_what_never_moved_has_the_lowest_class() -> None:
    average = np.zeros(SPEC.size, np.float32)
    average[7] = 1e-30
    found = activity.from_bytes(activity.to_bytes(average, SPEC), SPEC)
    assert found[7] > 0
    assert np.count_nonzero(found) == 1


def test_contexts_rank_as_the_average_did() -> None:
    average = average_of(steps(2, 3))
    found = activity.from_bytes(activity.to_bytes(average, SPEC), SPEC)
    layout = Coded(TopK(0.1), contexts="activity").layout(SPEC)
    public = plan_of(Coded(TopK(0.1), contexts="activity")).public(SPEC, {"activity": found})
    known = contexts_of(layout, public)[0]
    assert known is not None
    due = ranks(average)
    np.testing.assert_array_equal(known & 15, np.where(due >= 3, due, 0))


def test_members_of_per_tensor_see_their_own_part_of_the_map() -> None:
    made = PerTensor(Coded(TopK(0.1), contexts="activity"), Uncompressed(), min_size=100)
    classes = np.arange(SPEC.size, dtype=np.float32)
    public = plan_of(made).public(SPEC, {"activity": classes})
    (known,) = [c for c in contexts_of(made.layout(SPEC), public) if c is not None]
    where = SPEC.slices["w"]
    np.testing.assert_array_equal(known & 15, ranks(classes[where]))


@pytest.mark.parametrize("spec", [SPEC, ModelSpec((TensorSpec("a", (1,)),))])
def test_a_map_is_no_longer_than_its_bound(spec: ModelSpec) -> None:
    rng = np.random.default_rng(0)
    for average in (rng.random(spec.size), np.zeros(spec.size), np.ones(spec.size)):
        data = activity.to_bytes(average.astype(np.float32), spec)
        assert len(data) <= activity.max_bytes(spec)


@given(data=st.binary(max_size=200), cut=st.integers(0, 300), flip=st.integers(0, 7))
def test_damaged_maps_are_classes_or_an_error(data: bytes, cut: int, flip: int) -> None:
    whole = bytearray(activity.to_bytes(average_of(steps(3, 2)), SPEC))
    whole[cut % len(whole)] ^= 1 << flip
    for damaged in (data, bytes(whole), bytes(whole[: cut % len(whole)])):
        try:
            found = activity.from_bytes(damaged, SPEC)
        except DecodingError:
            continue
        assert found.shape == (SPEC.size,)
        assert set(found.tolist()) <= set(range(9))


def test_the_map_takes_bytes_off_an_upload() -> None:
    moves = steps(4, 4)
    known = activity.from_bytes(activity.to_bytes(average_of(moves[:-1]), SPEC), SPEC)
    sizes = {}
    for contexts in ("none", "activity"):
        made = Coded(TopK(0.1, magnitude_bits=0), "range", contexts)
        public = plan_of(made).public(SPEC, {"activity": known})
        symbols, _ = made.compress(moves[-1], None, public, np.random.default_rng(0))
        layout = made.layout(SPEC)
        sizes[contexts] = len(Upload(0, 1, symbols).to_bytes(layout, contexts_of(layout, public)))
    assert sizes["activity"] < sizes["none"]


def plan_of(made: Any, round_: int = 1, **sources: Any) -> RoundPlan:
    return make_plan(MODEL, made, round_=round_, **sources)


def test_a_plan_names_the_map_from_the_second_round_on() -> None:
    made = Coded(TopK(0.1), contexts="activity")
    assert plan_of(made).sources == {"activity": None}
    with pytest.raises(ValueError, match="reads activity, but the plan has no digest"):
        plan_of(made, 2)
    assert plan_of(made, 2, activity="0" * 64).sources == {"activity": "0" * 64}


def golden() -> Any:
    return json.loads((VECTORS / "activity.json").read_text())


def test_the_golden_map_is_made_and_read() -> None:
    vector = golden()
    spec = ModelSpec(tuple(TensorSpec(name, tuple(shape)) for name, shape, _ in vector["spec"]))
    moves = [np.frombuffer(bytes.fromhex(step), "<f4") for step in vector["steps"]]
    average = average_of(moves)
    assert average.astype("<f4").tobytes().hex() == vector["average"]
    body = activity.to_bytes(average, spec)
    assert body.hex() == vector["body"]
    classes = activity.from_bytes(body, spec)
    assert classes.tolist() == vector["classes"]
    layout = Coded(TopK(0.1), contexts="activity").layout(spec)
    public = Public(spec, PublicRandomness(bytes(32)), knowledge={"activity": classes})
    known = contexts_of(layout, public)[0]
    assert known is not None
    assert known.tolist() == vector["contexts"]


def test_the_text_is_enough_to_read_the_golden_map() -> None:
    vector = golden()
    matrices = [
        [shape[0], math.prod(shape[1:])] if len(shape) > 1 else [1, shape[0]]
        for _, shape, _ in vector["spec"]
    ]
    size = sum(height * width for height, width in matrices)
    grid = {"matrices": matrices, "known": None}
    layout = [{"alphabet": {"size": 9, "count": size, "coder": "auto", "grid": grid}}]
    assert spec_reader.read(bytes.fromhex(vector["body"]), layout) == [vector["classes"]]
    average = np.frombuffer(bytes.fromhex(vector["average"]), "<f4").tolist()
    ordered = sorted(average, reverse=True)
    for value, found in zip(average, vector["classes"], strict=True):
        larger = sum(value < other for other in ordered)
        c = max((c for c in range(1, 11) if larger < size >> c), default=0) if value else 0
        assert found == max(0, c - 2)


def test_the_script_writes_the_golden_map_that_is_there(tmp_path: Path) -> None:
    script = runpy.run_path(str(VECTORS / "make_activity_vector.py"))
    script["main"](tmp_path)
    assert (tmp_path / "activity.json").read_text() == (VECTORS / "activity.json").read_text()
