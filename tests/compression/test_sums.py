"""Updates, shared randomness and the fixed-point sum: exact, bounded, the same everywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpress_compression.fixed_point import Accumulator, FixedPoint
from fedpress_compression.randomness import PublicRandomness, PublicStream
from fedpress_compression.update import Piece, Update
from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan, InvalidUpdate

FIXED = FixedPoint.widest(max_abs=256.0, max_weight=1000)


def sparse(size: int, entries: dict[int, float]) -> Update:
    where = np.array(sorted(entries), np.int64)
    values = np.array([entries[i] for i in sorted(entries)], np.float32)
    return Update(size, (Piece(where, values),))


def test_an_update_is_the_same_dense_and_sparse() -> None:
    update = sparse(5, {1: 2.0, 4: -1.0})
    assert update.dense().tolist() == [0, 2, 0, 0, -1]
    assert update.num_values == 2
    flat = np.ones(5, np.float32)
    update.add_to(flat, sign=-1.0)
    assert flat.tolist() == [1, -1, 1, 1, 2]
    assert update.pieces[0].indices().tolist() == [1, 4]
    assert Update.from_dense(flat).pieces[0].indices().tolist() == [0, 1, 2, 3, 4]


def test_parts_find_their_place_in_the_whole() -> None:
    slices = (slice(2, 4), slice(7, 10))
    assert sparse(5, {0: 1.0, 3: 2.0}).placed(slices, 10).dense().tolist() == [
        0, 0, 1, 0, 0, 0, 0, 0, 2, 0,
    ]  # fmt: skip
    dense = Update.from_dense(np.arange(1, 6, dtype=np.float32))
    assert dense.placed(slices, 10).dense().tolist() == [0, 0, 1, 2, 0, 0, 0, 3, 4, 5]
    middle = Update(5, (Piece(slice(1, 3), np.array([8, 9], np.float32)),))
    assert middle.placed(slices, 10).dense().tolist() == [0, 0, 0, 8, 0, 0, 0, 9, 0, 0]


@given(st.lists(st.integers(0, 6), max_size=8), st.data())
def test_parts_have_the_norms_of_the_whole_vector_s(sizes: list[int], data: st.DataObject) -> None:
    """In pieces that are ranges or coordinates, across the parts' ends, or missing."""
    size = sum(sizes)
    ends = data.draw(st.lists(st.integers(0, size), max_size=5).map(sorted))
    values = np.random.default_rng(len(ends)).standard_normal(size).astype(np.float32)
    pieces = []
    for start, stop in zip([0, *ends], [*ends, size], strict=True):
        kind = data.draw(st.sampled_from(["range", "coordinates", "missing"]))
        if kind == "missing":
            values[start:stop] = 0
        elif kind == "range":
            pieces.append(Piece(slice(start, stop), values[start:stop].copy()))
        else:
            taken = sorted(data.draw(st.sets(st.integers(start, stop - 1)))) if start < stop else []
            left = sorted(set(range(start, stop)).difference(taken))
            values[left] = 0
            pieces.append(Piece(np.array(taken, np.int64), values[taken]))
    update = Update(size, tuple(pieces))
    parts = np.split(update.dense().astype(np.float64), np.cumsum(sizes)[:-1]) if sizes else []
    assert update.norms(sizes) == pytest.approx(np.array([np.linalg.norm(part) for part in parts]))
    assert update.norm == pytest.approx(np.linalg.norm(values.astype(np.float64)))


@given(st.permutations(range(8)))
def test_the_sum_does_not_depend_on_order(order: list[int]) -> None:
    def total(numbers: Any) -> bytes:
        accumulator = Accumulator(40, FIXED)
        for number in numbers:
            values = np.random.default_rng(number).standard_normal(40).astype(np.float32)
            accumulator.add(Update.from_dense(values), 1 + number)
        return accumulator.mean().tobytes()

    assert total(order) == total(range(8))


def test_the_mean_is_weighted_and_exact_to_the_step() -> None:
    accumulator = Accumulator(2, FIXED)
    accumulator.add(Update.from_dense(np.array([0.1, 100.0], np.float32)), 1)
    accumulator.add(sparse(2, {0: 0.5}), 3)
    expected = [(float(np.float32(0.1)) + 3 * 0.5) / 4, 25.0]
    assert accumulator.mean() == pytest.approx(expected, abs=2.0**-FIXED.scale_bits)
    assert Accumulator(2, FIXED).mean().tolist() == [0, 0]


@pytest.mark.parametrize(
    ("update", "weight", "says"),
    [
        (sparse(3, {0: 1.0}), 1, "an update of 3 values, expected 2"),
        (sparse(2, {0: 1.0}), 0, "weight 0"),
        (sparse(2, {0: 1.0}), 1000, "weight 1000 on top of 1"),
        (sparse(2, {0: 1.0, 1: 257.0}), 1, "holds 257, larger"),
        (sparse(2, {0: 1.0, 1: float("nan")}), 1, "NaN or infinity"),
        (sparse(2, {0: float("-inf")}), 1, "NaN or infinity"),
    ],
)
def test_what_the_bounds_do_not_admit_changes_nothing(
    update: Update, weight: int, says: str
) -> None:
    accumulator = Accumulator(2, FIXED)
    accumulator.add(sparse(2, {0: 1.0}), 1)
    before = accumulator.total.copy()
    with pytest.raises(InvalidUpdate, match=says):
        accumulator.add(update, weight)
    assert (accumulator.total == before).all()
    assert accumulator.weight == 1


@given(st.floats(1e-6, 1e9), st.integers(1, 2**40))
def test_no_admitted_sum_overflows(max_abs: float, max_weight: int) -> None:
    try:
        fixed = FixedPoint.widest(max_abs=max_abs, max_weight=max_weight)
    except IncompatiblePlan:
        return
    accumulator = Accumulator(2, fixed)
    largest = np.nextafter(np.float32(max_abs), np.float32(0))
    accumulator.add(Update.from_dense(np.array([largest, -largest], np.float32)), max_weight)
    assert accumulator.total[0] == -accumulator.total[1] >= 0


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"scale_bits": 53, "max_abs": 1.0, "max_weight": 1}, "scale_bits of 53"),
        ({"scale_bits": 30, "max_abs": 0.0, "max_weight": 1}, "max_abs of 0 outside"),
        (
            {"scale_bits": 1, "max_abs": 1e30, "max_weight": 1},
            r"max_abs of 1e\+30 outside \(0, 2\*\*52\)",
        ),
        ({"scale_bits": 30, "max_abs": 1.0, "max_weight": 0}, "max_weight of 0"),
        ({"scale_bits": 40, "max_abs": 1024.0, "max_weight": 2**13}, "overflow 63 bits"),
    ],
)
def test_bounds_that_could_overflow_are_refused_by_name(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(IncompatiblePlan, match=says):
        FixedPoint(**fields)


def test_no_scale_at_all_is_refused() -> None:
    with pytest.raises(IncompatiblePlan, match="overflow"):
        FixedPoint.widest(max_abs=2.0**40, max_weight=2**40)


def test_the_shared_stream_is_rfc_8439s() -> None:
    """Appendix A.1, test vector 1: key, nonce and counter all zero."""
    expected = "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
    assert PublicStream(bytes(32)).words(4).astype("<u8").tobytes().hex() == expected


def test_labels_and_seeds_give_streams_of_their_own_and_parts_join() -> None:
    shared = PublicRandomness(bytes(32))
    first = shared.stream("support").words(6)
    again = shared.stream("support")
    assert (np.concatenate([again.words(2), again.words(4)]) == first).all()
    assert (shared.stream("rotation").words(6) != first).all()
    assert (PublicRandomness(b"\x01" * 32).stream("support").words(6) != first).all()


def test_a_known_stream_never_changes() -> None:
    stream = PublicRandomness(bytes(range(32))).stream("golden")
    assert [hex(word) for word in stream.words(2).tolist()] == GOLDEN_WORDS
    assert stream.below(10, 8).tolist() == GOLDEN_DIGITS


GOLDEN_WORDS = ["0xbb0c8a1a9f3e0a8c", "0xb57f18894eea5cd5"]
GOLDEN_DIGITS = [5, 7, 0, 5, 7, 9, 7, 4]


@pytest.mark.parametrize("bound", [1, 2, 3, 1000, 2**32, 2**62 + 1, 2**63 - 1])
def test_integers_below_a_bound_are_below_it_and_uniform(bound: int) -> None:
    drawn = PublicRandomness(bytes(32)).stream("below").below(bound, 4000)
    assert drawn.size == 4000
    assert drawn.min() >= 0
    assert drawn.max() < bound
    spread = bound / np.sqrt(12 * 4000)
    assert abs(drawn.astype(np.float64).mean() - (bound - 1) / 2) <= 5 * spread


def test_what_gives_no_stream_says_why() -> None:
    with pytest.raises(ConfigurationError, match="3 bytes, expected 32"):
        PublicRandomness(b"abc")
    stream = PublicRandomness(bytes(32)).stream("x")
    assert stream.below(5, 0).size == 0
    for bound in (0, 2**63):
        with pytest.raises(ConfigurationError, match="outside"):
            stream.below(bound, 1)


def test_sums_of_parts_come_to_the_sum_of_all() -> None:
    rng = np.random.default_rng(0)
    updates = [Update.from_dense(rng.standard_normal(9).astype(np.float32)) for _ in range(4)]
    whole, first, second = (Accumulator(9, FIXED) for _ in range(3))
    for number, update in enumerate(updates, start=1):
        whole.add(update, number)
        (first if number < 3 else second).add(update, number)
    first.add_sums(second.total, second.weight)
    first.add_sums(np.zeros(9, np.int64), 0)
    assert first.weight == whole.weight == 10
    assert first.mean().tobytes() == whole.mean().tobytes()
    before = first.total.copy()
    with pytest.raises(InvalidUpdate):
        first.add_sums(second.total, 1000)
    assert first.total.tobytes() == before.tobytes()


@pytest.mark.parametrize("size", [0, 5, 2**18 + 3])
def test_a_mean_may_take_the_place_of_its_sum(size: int) -> None:
    """To the last bit; the sum may lie wherever its zeros do."""
    place = np.zeros(size, np.int64)
    sums = Accumulator(size, FIXED, place)
    for weight in (3, 4):
        values = np.random.default_rng(weight).standard_normal(size).astype(np.float32)
        sums.add(Update.from_dense(values), weight)
    expected = sums.mean()
    mean = sums.into_mean()
    assert (mean == expected).all()
    assert np.shares_memory(mean, place) or not size
    assert not sums.total.size
