"""A count sketch knows which cells a coordinate falls into."""

from __future__ import annotations

import numpy as np

from fedpress_compression.compressors.count_sketch import CountSketch
from fedpress_compression.randomness import PublicRandomness

SIZE = 300


def test_what_is_touched_is_what_values_there_change() -> None:
    made, randomness = CountSketch(fraction=0.4, rows=3), PublicRandomness(bytes(32))
    rng = np.random.default_rng(0)
    chosen = np.zeros(SIZE, bool)
    chosen[rng.choice(SIZE, 7, replace=False)] = True
    values = np.where(chosen, rng.random(SIZE) + 1, 0)  # positive: their signs alone can cancel
    touched = made.touched(chosen, randomness)
    assert touched.shape == (3, made.columns(SIZE))
    assert (touched.sum(axis=1) <= 7).all()
    assert touched.sum() > 14
    assert not made.sketch(values, randomness)[~touched].any()
    for coordinate in np.flatnonzero(chosen):
        alone = np.eye(1, SIZE, int(coordinate))[0]
        assert touched[made.sketch(alone, randomness) != 0].all()
    assert not made.touched(np.zeros(SIZE, bool), randomness).any()
