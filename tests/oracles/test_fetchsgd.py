"""Count sketches and FetchSGD against a few plain lines, and what they recover."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpress_compression.compressor import Public
from fedpress_compression.compressors.count_sketch import CountSketch
from fedpress_compression.fixed_point import FixedPoint
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.tensors import ModelSpec, TensorSpec, Vector
from fedpress_strategies import from_config

SIZE = 2000
SPEC = ModelSpec((TensorSpec("w", (SIZE,)),))
PUBLIC = Public(SPEC, PublicRandomness(bytes(range(32))))
SKETCH = CountSketch(rows=5, fraction=0.25, scale_bits=12, recover="median", seed=3)
Doubles = npt.NDArray[np.float64]


def symbols(values: npt.NDArray[np.floating], made: CountSketch = SKETCH) -> Doubles:
    told, _ = made.compress(values.astype(np.float32), None, PUBLIC, np.random.default_rng(0))
    return told[0].astype(np.float64)


def tables(made: CountSketch = SKETCH) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Cell and sign of every coordinate, read off the sketches of unit vectors' sum, plainly."""
    columns, randomness = made.columns(SIZE), made.randomness(PUBLIC)
    cells, signs = [], []
    for row in range(made.rows):
        words = [int(word) for word in randomness.stream(f"count_sketch {row}").words(SIZE)]
        cells.append([(word >> 32) * columns >> 32 for word in words])
        signs.append([1 - 2 * (word & 1) for word in words])
    return np.array(cells), np.array(signs)


def heavy(seed: int, number: int = 12, size: int = SIZE) -> tuple[Vector, set[int]]:
    """`number` large coordinates in noise."""
    rng = np.random.default_rng(seed)
    vector = 0.02 * rng.standard_normal(size)
    where = rng.choice(size, number, replace=False)
    vector[where] = rng.choice([-1, 1], number) * rng.uniform(1, 2, number)
    return vector.astype(np.float32), set(where.tolist())


def test_a_sketch_is_its_definition() -> None:
    vector = heavy(0)[0]
    cells, signs = tables()
    steps = np.rint(vector.astype(np.float64) * 2**12)
    expected = np.zeros((SKETCH.rows, SKETCH.columns(SIZE)))
    for row in range(SKETCH.rows):
        for coordinate in range(SIZE):
            expected[row, cells[row, coordinate]] += signs[row, coordinate] * steps[coordinate]
    assert (symbols(vector).reshape(expected.shape) == expected).all()
    told = [signs[row] * expected[row, cells[row]] for row in range(SKETCH.rows)]
    received = CountSketch(5, 0.25, 12, recover="median", keep=1.0, seed=3).decompress(
        (symbols(vector).astype(np.int32),), PUBLIC
    )
    assert received.dense() == pytest.approx(np.median(told, axis=0) / 2**12)


@given(st.integers(0, 2**32), st.integers(0, 2**32), st.integers(1, 1000))
def test_sketches_add_up_exactly_in_whole_numbers(first: int, second: int, weight: int) -> None:
    """S(a) + weight * S(b) = S(a + weight * b), every cell, for whole steps a and b."""
    a, b = (np.random.default_rng(s).integers(-99, 99, SIZE) for s in (first, second))
    both = symbols((a + weight * b) / 2**12)
    assert (symbols(a / 2**12) + weight * symbols(b / 2**12) == both).all()


@pytest.mark.parametrize("seed", range(5))
def test_heavy_hitters_are_recovered(seed: int) -> None:
    """Six coordinates of 20,000, from seven rows of 401 cells."""
    vector, where = heavy(seed, 6, 20_000)
    spec = ModelSpec((TensorSpec("w", (20_000,)),))
    public = Public(spec, PUBLIC.randomness)
    made = CountSketch(7, 0.14, 12, recover="median", keep=6 / 20_000, seed=seed)
    told, _ = made.compress(vector, None, public, np.random.default_rng(0))
    (piece,) = made.decompress(told, public).pieces
    assert told[0].size == 7 * 401
    assert set(piece.indices().tolist()) == where
    assert np.abs(piece.values - vector[piece.where]).max() < 0.3


def test_fetchsgd_is_its_recurrence() -> None:
    """V = rho V + S; E += eta V; apply the top of E's medians; zero the cells they touch."""
    rate, momentum, k, shape = 0.7, 0.8, 8, (SKETCH.rows, SKETCH.columns(SIZE))
    strategy = from_config(
        {
            "id": "fetchsgd",
            "learning_rate": rate,
            "momentum": momentum,
            "fraction": k / SIZE,
            "rows": SKETCH.rows,
            "sketch_fraction": SKETCH.fraction,
            "scale_bits": SKETCH.scale_bits,
            "seed": SKETCH.seed,
        }
    )
    assert strategy.symbol_aggregator is not None
    linear = CountSketch(SKETCH.rows, SKETCH.fraction, SKETCH.scale_bits, seed=SKETCH.seed)
    cells, signs = tables()
    rows = np.arange(SKETCH.rows)[:, np.newaxis]
    parameters = np.zeros(SIZE, np.float32)
    state = strategy.optimizer.init(parameters)
    expected, velocity, error = np.zeros(SIZE), np.zeros(shape), np.zeros(shape)
    for number in range(8):
        fixed = FixedPoint.widest(max_abs=16.0, max_weight=100)
        aggregator = strategy.symbol_aggregator(linear, PUBLIC, fixed)
        mean = np.zeros(shape)
        for client, weight in enumerate((3, 5, 2)):
            told = symbols(heavy(10 * number + client)[0], linear)
            aggregator.add((told.astype(np.int32),), weight)
            mean += weight * told.reshape(shape) / 10 / 2**12
        parameters, state = strategy.optimizer.apply(parameters, aggregator.result(), state)
        velocity = momentum * velocity + mean
        error = error + rate * velocity
        medians = np.median(signs * error[rows, cells], axis=0)
        chosen = np.argsort(-np.abs(medians), kind="stable")[:k]
        expected[chosen] += medians[chosen]
        for table in (velocity, error):
            table[rows, cells[:, chosen]] = 0
        assert parameters == pytest.approx(expected, abs=1e-5)
    assert np.count_nonzero(expected) > k


def test_fetchsgd_finds_what_no_single_round_shows() -> None:
    """A coordinate below the noise of every round comes out of the accumulated error."""
    strategy = from_config(
        {"id": "fetchsgd", "momentum": 0.0, "fraction": 1 / SIZE, "sketch_fraction": 1.0}
    )
    assert strategy.symbol_aggregator is not None
    made = CountSketch(5, 1.0, seed=0)
    rng = np.random.default_rng(6)
    parameters = np.zeros(SIZE, np.float32)
    state = strategy.optimizer.init(parameters)
    for _ in range(30):
        aggregator = strategy.symbol_aggregator(
            made, PUBLIC, FixedPoint.widest(max_abs=16.0, max_weight=1)
        )
        vector = rng.standard_normal(SIZE).astype(np.float32)
        vector[77] += 2
        told, _ = made.compress(vector, None, PUBLIC, rng)
        aggregator.add(told, 1)
        parameters, state = strategy.optimizer.apply(parameters, aggregator.result(), state)
    assert int(np.abs(parameters).argmax()) == 77
