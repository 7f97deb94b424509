"""Low-rank methods: what they keep, that public bases are exact, that one-sided sums add up."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpress_compression.coding import check_symbols, decode, encode
from fedpress_compression.compressor import Compressor, Public, from_config
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.lowrank import LowRank
from fedpress_compression.compressors.powersgd import PowerSGD, revived, two_trips
from fedpress_compression.compressors.powersgd_onesided import OneSidedPowerSGD
from fedpress_compression.matrices import Matrix, product, public_basis, views
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.tensors import ModelSpec, TensorSpec, Vector
from fedpress_protocols.errors import IncompatiblePlan

SPEC = ModelSpec(
    (
        TensorSpec("a.weight", (40, 60)),
        TensorSpec("a.bias", (40,)),
        TensorSpec("conv", (16, 8, 3, 3)),
        TensorSpec("thin", (2, 50)),
    )
)
MATRIX_ONLY = SPEC.select(["a.weight"])
RANDOMNESS = PublicRandomness(bytes(32))


def public(previous: Vector | None = None, number: int = 1, spec: ModelSpec = SPEC) -> Public:
    return Public(spec, RANDOMNESS, {} if previous is None else {"previous": previous}, number)


def of_rank(rank: int, seed: int = 0, spec: ModelSpec = SPEC) -> Vector:
    """Every tensor, seen as a matrix, the product of two random ones."""
    rng = np.random.default_rng(seed)
    parts = []
    for tensor in spec.trained:
        rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
        left = rng.standard_normal((rows, rank))
        parts.append((left @ rng.standard_normal((rank, tensor.size // rows))).ravel())
    return np.concatenate(parts).astype(np.float32)


def lost(made: Compressor[Any], update: Vector, known: Public) -> float:
    """The share of the update's squares that does not arrive."""
    rng = np.random.default_rng(0)
    symbols, _ = made.compress(update, made.init(known.spec), known, rng)
    received = made.decompress(symbols, known).dense().astype(np.float64)
    return float(np.square(update - received).sum() / np.square(update.astype(np.float64)).sum())


# Matrices


def test_a_tensor_is_factored_where_it_pays() -> None:
    found, others = views(SPEC, 2, 2.0)
    assert [(view.rows, view.columns, view.rank) for view in found] == [(40, 60, 2), (16, 72, 2)]
    assert others == ("a.bias", "thin")
    assert [view.rows for view in views(SPEC, 2, 7.0)[0]] == [40]
    empty = ModelSpec((TensorSpec("none", (0, 3)), TensorSpec("one", (1,)), TensorSpec("s", ())))
    assert views(empty, 1, 2.0) == ((), ("none", "one", "s"))


@given(st.integers(0, 2**32), st.integers(1, 5))
def test_a_product_adds_its_terms_in_order(seed: int, rank: int) -> None:
    rng = np.random.default_rng(seed)
    left, right, scales = (rng.standard_normal(s) for s in ((4, rank), (3, rank), rank))
    expected = [
        np.float32(sum(float(left[i, j] * right[k, j]) * float(scales[j]) for j in range(rank)))
        for i in range(4)
        for k in range(3)
    ]
    assert product(left, right, scales).tolist() == expected


def exact_basis(known: Matrix, rank: int, bits: list[int]) -> list[list[int]]:
    """`public_basis` with Python's whole numbers, whose sums are exact in any order."""

    def grid(values: list[Any], largest: int) -> list[int]:
        magnitude = float(max(map(abs, values)))
        return [round(float(value) * (largest / magnitude)) if magnitude else 0 for value in values]

    rows, columns = known.shape
    flat = grid(known.ravel().tolist(), 2**14)
    whole = [flat[row * columns : (row + 1) * columns] for row in range(rows)]
    turned = list(map(list, zip(*whole, strict=True)))

    def times(matrix: list[list[int]], vector: list[int]) -> list[int]:
        sums = [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]
        return grid(sums, 2**15)

    def signs(number: int) -> list[int]:
        return [(2 * bits.pop(0) - 1) * 2**15 for _ in range(number)]

    start = [signs(columns) for _ in range(rank)]
    images = [times(whole, column) for column in start]
    for _ in range(2):
        images = [times(whole, times(turned, image)) for image in images]
    basis: list[list[int]] = []
    for image in images:
        column, share = image, 0.0
        while True:
            for attempt in range(2):
                before = max(map(abs, column))
                left = column
                for other in basis:
                    square = float(sum(b * b for b in other))
                    part = float(sum(a * b for a, b in zip(left, other, strict=True))) / square
                    left = [round(a - part * b) for a, b in zip(left, other, strict=True)]
                if not attempt:
                    share = max(map(abs, left)) / before if before else 0.0
                column = grid(left, 2**15)
            if share >= 2**-10:
                break
            column = signs(rows)
        basis.append(column)
    return basis


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("known_rank", [0, 1, 2, 12])
def test_a_public_basis_is_exact_in_whole_numbers(rank: int, known_rank: int) -> None:
    rng = np.random.default_rng(known_rank)
    known = rng.standard_normal((15, known_rank)) @ rng.standard_normal((known_rank, 12))
    basis, lengths = public_basis(known, rank, RANDOMNESS.stream("basis"))
    bits = RANDOMNESS.stream("basis")
    drawn = bits.bits(12 * rank).tolist()
    for _ in range(20):  # what is drawn later begins with a word of its own
        drawn += bits.bits(15).tolist()
    assert basis.T.tolist() == exact_basis(known, rank, drawn)
    unit = basis / lengths
    assert np.abs(unit.T @ unit - np.eye(rank)).max() < 1e-3


def test_a_public_basis_lies_where_the_known_matrix_does() -> None:
    rng = np.random.default_rng(1)
    known = rng.standard_normal((50, 3)) @ rng.standard_normal((3, 70))
    known += 1e-3 * rng.standard_normal(known.shape)
    basis, lengths = public_basis(known, 3, RANDOMNESS.stream("basis"))
    kept = np.linalg.norm((basis / lengths).T @ known) ** 2
    assert kept > 0.9999 * np.linalg.norm(known) ** 2


def test_a_matrix_too_long_for_exact_sums_is_refused() -> None:
    with pytest.raises(IncompatiblePlan, match="exact up to 8388608"):
        public_basis(np.zeros((2**23 + 1, 1)), 1, RANDOMNESS.stream("basis"))


# Own basis


@pytest.mark.parametrize(("rank", "bits", "at_most"), [(1, 4, 0.02), (2, 4, 0.03), (4, 8, 1e-3)])
def test_an_update_of_low_rank_arrives(rank: int, bits: int, at_most: float) -> None:
    assert lost(LowRank(rank, bits), of_rank(rank), public()) < at_most


def test_rounding_comes_near_the_best_of_that_rank() -> None:
    update = np.random.default_rng(2).standard_normal(MATRIX_ONLY.size).astype(np.float32)
    best = np.square(np.linalg.svd(update.reshape(40, 60), compute_uv=False))
    known = public(spec=MATRIX_ONLY)
    assert lost(LowRank(4, 8, 8), update, known) < 1.02 * best[4:].sum() / best.sum()


@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(2, 8))
def test_lowrank_never_loses_more_than_there_is(seed: int, rank: int, bits: int) -> None:
    rng = np.random.default_rng(seed)
    update = (rng.standard_normal(SPEC.size) ** 5).astype(np.float32)
    assert lost(LowRank(rank, bits), update, public()) < 1


# PowerSGD


@pytest.mark.parametrize("width", [2, 4])
def test_powersgd_comes_nearer_from_round_to_round(width: Any) -> None:
    made = PowerSGD(2, width)
    update = of_rank(2) + of_rank(30, 1) * np.float32(0.2)
    state, rng, losses = made.init(SPEC), np.random.default_rng(0), []
    for _ in range(6):
        symbols, state = made.compress(update, state, public(), rng)
        layout = made.layout(SPEC)
        received = made.decompress(decode(encode(symbols, layout), layout), public()).dense()
        losses.append(float(np.linalg.norm(update - received)))
    assert losses[-1] < losses[0]
    assert losses[-1] == pytest.approx(losses[-2], rel=0.05)


def test_powersgd_sends_both_factors_of_the_last_right_one() -> None:
    made = PowerSGD(2)
    update, known = of_rank(20, 3, MATRIX_ONLY), public(spec=MATRIX_ONLY)
    rng = np.random.default_rng(0)
    _, state = made.compress(update, made.init(MATRIX_ONLY), known, rng)
    other = of_rank(20, 4, MATRIX_ONLY)
    symbols, after = made.compress(other, state, known, rng)
    expected, right = two_trips([other.reshape(40, 60).astype(np.float64)], state.rights[0])
    assert made.decompress(symbols, known).dense() == pytest.approx(expected.ravel(), abs=1e-4)
    assert np.abs(after.rights[0]) == pytest.approx(np.abs(right), abs=1e-6)


@pytest.mark.parametrize("width", [2, 4])
def test_two_trips_apart_come_to_two_trips_together(width: Any) -> None:
    """From the last step instead of the last right factor, which spans the same."""
    made, tolerance = PowerSGD(2, width, trips=2), 1e-3 if width == 4 else 3e-3
    step: np.ndarray = np.zeros(MATRIX_ONLY.size, np.float32)
    right = None
    for number in range(1, 5):
        known = public(step, number, MATRIX_ONLY)
        updates = [of_rank(20, 10 * number + client, MATRIX_ONLY) for client in range(3)]
        layout, images = made.first_layout(MATRIX_ONLY), []
        for update in updates:
            told = made.first(update, known)
            check_symbols(told, layout)
            images.append(made.images(decode(encode(told, layout), layout), MATRIX_ONLY))
        basis = made.basis(np.sum(images, axis=0), MATRIX_ONLY)
        assert basis.size == made.basis_size(MATRIX_ONLY)
        known = dataclasses.replace(known, knowledge={**known.knowledge, "basis": basis})
        received = []
        for update in updates:
            symbols, _ = made.compress(
                update, made.init(MATRIX_ONLY), known, np.random.default_rng(0)
            )
            check_symbols(symbols, made.layout(MATRIX_ONLY))
            received.append(made.decompress(symbols, known).dense())
        step = np.stack(received).mean(axis=0, dtype=np.float64).astype(np.float32)
        if right is None:
            begun, lengths = public_basis(np.zeros((60, 40)), 2, known.stream("powersgd"))
            right = begun / lengths
        matrices = [update.reshape(40, 60).astype(np.float64) for update in updates]
        expected, right = two_trips(matrices, right)
        assert step == pytest.approx(expected.ravel(), abs=tolerance * np.abs(expected).max())


def test_a_member_of_two_trips_is_its_update_projected_on_the_basis() -> None:
    made, update = PowerSGD(2, trips=2), of_rank(20, 3, MATRIX_ONLY)
    other = of_rank(20, 4, MATRIX_ONLY)
    known = public(np.zeros(MATRIX_ONLY.size, np.float32), spec=MATRIX_ONLY)
    basis = made.basis(made.images(made.first(other, known), MATRIX_ONLY), MATRIX_ONLY)
    known = dataclasses.replace(known, knowledge={**known.knowledge, "basis": basis})
    symbols, _ = made.compress(update, made.init(MATRIX_ONLY), known, np.random.default_rng(0))
    left = basis.reshape(2, 40).T.astype(np.float64)
    due = left @ (left.T @ update.reshape(40, 60))
    assert made.decompress(symbols, known).dense() == pytest.approx(due.ravel(), abs=1e-4)


def test_what_is_not_factored_goes_on_the_second_trip() -> None:
    made, update = PowerSGD(2, trips=2), of_rank(20, 3)
    known = public(np.zeros(SPEC.size, np.float32))
    basis = made.basis(made.images(made.first(update, known), SPEC), SPEC)
    known = dataclasses.replace(known, knowledge={**known.knowledge, "basis": basis})
    symbols, state = made.compress(update, made.init(SPEC), known, np.random.default_rng(0))
    received = made.decompress(symbols, known).dense()
    _, others = views(SPEC, 2, 2.0)
    assert others
    for name in others:
        where = SPEC.slices[name]
        assert (received[where] == update[where]).all()
    assert state.rights == ()


def test_dead_columns_are_drawn_anew() -> None:
    columns = np.array([[1.0, 1e-12, 3.0], [2.0, 0.0, 4.0]])
    after = revived(columns, np.random.default_rng(0))
    assert (after[:, [0, 2]] == columns[:, [0, 2]]).all()
    assert np.linalg.norm(after[:, 1]) > 0.01


# One side


def test_one_side_is_sent_in_turn_and_projects() -> None:
    previous, update = of_rank(4, 5, MATRIX_ONLY), of_rank(30, 6, MATRIX_ONLY)
    made = OneSidedPowerSGD(4, bits=16)
    matrix = update.reshape(40, 60).astype(np.float64)
    left, _, right = np.linalg.svd(previous.reshape(40, 60).astype(np.float64))
    for number, expected in (
        (2, matrix @ right[:4].T @ right[:4]),
        (3, left[:, :4] @ left[:, :4].T @ matrix),
    ):
        known = public(previous, number, MATRIX_ONLY)
        symbols, _ = made.compress(update, None, known, np.random.default_rng(0))
        assert np.count_nonzero(symbols[0]) <= 4 * (40 if number == 2 else 60)
        received = made.decompress(symbols, known).dense()
        assert np.linalg.norm(received - expected.ravel()) < 0.02 * np.linalg.norm(expected)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_symbols_of_one_side_add_up(number: int) -> None:
    made = OneSidedPowerSGD(2)
    known = public(of_rank(6, 7), number)
    weights, updates = (3, 1, 4), [of_rank(9, seed) for seed in (8, 9, 10)]
    told = [made.compress(u, None, known, np.random.default_rng(0))[0][0] for u in updates]
    summed = np.sum([w * t.astype(np.int64) for w, t in zip(weights, told, strict=True)], axis=0)
    whole = sum(
        w * made.decompress((t,), known).dense().astype(np.float64)
        for w, t in zip(weights, told, strict=True)
    )
    received = made.decompress((summed,), known, sum(weights)).dense()
    assert received == pytest.approx(whole, rel=1e-5, abs=1e-4)


def test_error_feedback_brings_in_what_one_side_leaves_out() -> None:
    """The same update every round: the mean of what arrives comes near it."""
    made = ErrorFeedback(OneSidedPowerSGD(4, bits=16))
    update = np.float32(0.01) * of_rank(6, 11)
    state, previous, total = made.init(SPEC), np.zeros(SPEC.size, np.float32), np.zeros(SPEC.size)
    for number in range(1, 41):
        known = Public(
            SPEC, PublicRandomness(bytes([number] * 32)), {"previous": previous}, round=number
        )
        symbols, state = made.compress(update, state, known, np.random.default_rng(0))
        previous = made.decompress(symbols, known).dense()
        total += previous
    assert np.linalg.norm(total / 40 - update) < 0.15 * np.linalg.norm(update)


def test_what_is_beyond_the_common_range_is_clipped() -> None:
    made = OneSidedPowerSGD(1, bits=4, first_range=0.5)
    update = np.full(SPEC.size, 3, np.float32)
    symbols, _ = made.compress(
        update, None, public(np.zeros(SPEC.size, np.float32)), np.random.default_rng(0)
    )
    assert np.abs(symbols[0]).max() == 7
    received = made.decompress(symbols, public(np.zeros(SPEC.size, np.float32))).dense()
    assert received[SPEC.slices["a.bias"]] == pytest.approx(np.full(40, 0.5))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"id": "lowrank", "rank": 0}, "rank must be a whole number from 1 to 256"),
        ({"id": "lowrank", "bits": 9}, "bits must be a whole number from 2 to 8"),
        ({"id": "lowrank", "rest": {"id": "error_feedback"}}, "goes around lowrank"),
        ({"id": "powersgd", "width": 8}, "width is 2 or 4 bytes, not 8"),
        ({"id": "powersgd", "trips": 3}, "trips must be a whole number from 1 to 2, not 3"),
        ({"id": "powersgd", "trips": True}, "trips must be a whole number from 1 to 2, not True"),
        ({"id": "powersgd", "rest": 1}, "1 is not a compressor"),
        ({"id": "powersgd_onesided", "bits": 30}, "bits must be a whole number from 2 to 24"),
        ({"id": "powersgd_onesided", "headroom": 0}, "headroom must lie"),
        ({"id": "count_sketch", "recover": "mode"}, "recover is mean or median, not 'mode'"),
        ({"id": "count_sketch", "seed": -1}, "seed must be a whole number from 0"),
        ({"id": "count_sketch", "rows": 0}, "rows must be a whole number from 1 to 32"),
    ],
)
def test_a_configuration_that_cannot_work_says_why(config: dict[str, Any], says: str) -> None:
    with pytest.raises(IncompatiblePlan, match=says):
        from_config(config)


@pytest.mark.parametrize("made", [PowerSGD(), PowerSGD(4, 2), PowerSGD(trips=2), LowRank()])
def test_the_largest_values_come_out_finite(made: Compressor[Any]) -> None:
    """A projection of signs at float32's very end has entries beyond it."""
    spec = ModelSpec((TensorSpec("w", (64, 64)),))
    largest = np.finfo(np.float32).max
    for seed in range(20):
        rng = np.random.default_rng(seed)
        update = np.where(rng.random(spec.size) < 0.5, largest, -largest).astype(np.float32)
        zeros = np.zeros(spec.size, np.float32)
        known = Public(spec, PublicRandomness(bytes(32)), {"previous": zeros})
        if isinstance(made, PowerSGD) and made.trips == 2:
            signs = rng.standard_normal(made.basis_size(spec))
            known = dataclasses.replace(
                known, knowledge={**known.knowledge, "basis": made.basis(signs, spec)}
            )
        symbols, _ = made.compress(update, made.init(spec), known, rng)
        received = made.decompress(symbols, known).dense().astype(np.float64)
        assert np.isfinite(received).all()
        assert float(np.abs(received).max()) > 0.1 * float(largest)


def test_a_group_whose_members_agree_sums_what_each_brings() -> None:
    made, update = PowerSGD(2), of_rank(2)

    def total(arrays: list[Matrix], width: int) -> list[Matrix]:
        """Of two members that bring the same."""
        assert width in (2, 4)
        return [2 * array for array in arrays]

    first, state = made.group_sum(update, made.init(SPEC), public(), total)
    second, _ = made.group_sum(update, state, public(number=2), total)
    for agreed in (first, second):
        np.testing.assert_allclose(agreed, 2 * update, atol=1e-4 * float(np.abs(update).max()))
