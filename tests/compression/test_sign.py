"""Sign compression: memory by the update's size, and zeros drawn at random."""

from __future__ import annotations

import tracemalloc

import numpy as np

from fedpress_compression.compressor import Public
from fedpress_compression.compressors.sign import Sign
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.tensors import ModelSpec, TensorSpec

SPEC = ModelSpec((TensorSpec("w", (1000,)),))
PUBLIC = Public(SPEC, PublicRandomness(bytes(32)))


def test_a_chunk_longer_than_the_update_takes_no_more_memory() -> None:
    made, update = Sign(chunk=2**26), np.full(SPEC.size, -0.5, np.float32)
    Sign().compress(update, None, PUBLIC, np.random.default_rng(0))  # loads what is loaded once
    tracemalloc.start()
    try:
        symbols, _ = made.compress(update, None, PUBLIC, np.random.default_rng(0))
        values = made.decompress(symbols, PUBLIC).dense()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(values, update)
    assert peak < 2**20


def test_chunks_have_their_own_means_and_zeros_a_random_sign() -> None:
    made = Sign(chunk=300)
    update = np.arange(SPEC.size, dtype=np.float32) - 500.5
    update[:300] = 0
    symbols, _ = made.compress(update, None, PUBLIC, np.random.default_rng(0))
    assert 100 < symbols[0][:300].sum() < 200
    values = made.decompress(symbols, PUBLIC).dense()
    assert not values[:300].any()
    for chunk in (slice(300, 600), slice(600, 900), slice(900, 1000)):
        mean = np.abs(update[chunk]).mean()
        np.testing.assert_allclose(values[chunk], mean * np.sign(update[chunk]), rtol=1e-3)
