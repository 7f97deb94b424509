"""Updates in 16 bits: the nearest values, of any size, in the bytes that they take."""

from __future__ import annotations

import numpy as np
import pytest

from fedpress_compression.coding import decode, encode
from fedpress_compression.compressor import Public
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.half import Dtype, Half
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.tensors import ModelSpec, TensorSpec, Vector

SPEC = ModelSpec((TensorSpec("w", (300, 40)), TensorSpec("tiny", (40,)), TensorSpec("zero", (3,))))
PUBLIC = Public(SPEC, PublicRandomness(bytes(32)))
NO_RNG = np.random.default_rng(0)


def an_update(seed: int = 0) -> Vector:
    update = np.random.default_rng(seed).standard_normal(SPEC.size).astype(np.float32)
    update[SPEC.slices["tiny"]] *= np.float32(1e-9)  # below all of unscaled float16
    update[SPEC.slices["zero"]] = 0
    return update


def through(made: Half, update: Vector) -> tuple[bytes, Vector]:
    symbols, _ = made.compress(update, None, PUBLIC, NO_RNG)
    body = encode(symbols, made.layout(SPEC))
    return body, made.decompress(decode(body, made.layout(SPEC)), PUBLIC).dense()


@pytest.mark.parametrize(("dtype", "bits", "most"), [("bfloat16", 8, 11.0), ("float16", 11, 14.0)])
def test_values_keep_their_significant_bits_in_fewer_bytes(
    dtype: Dtype, bits: int, most: float
) -> None:
    update = an_update()
    body, decoded = through(Half(dtype), update)
    assert np.abs(decoded - update).max() > 0
    largest = np.repeat(
        [np.abs(update[where]).max() for where in SPEC.slices.values()],
        [tensor.size for tensor in SPEC.tensors],
    )
    assert (np.abs(decoded - update) <= 2.0**-bits * np.abs(update) + 2.0**-39 * largest).all()
    assert 8 * len(body) < most * SPEC.size
    _, again = through(Half(dtype), decoded)
    np.testing.assert_array_equal(again, decoded)


def test_the_update_of_a_bfloat16_model_arrives_as_it_is() -> None:
    """Where values move by less than a factor of two their difference is in bfloat16, too."""
    steps = np.random.default_rng(0).integers(-8, 8, SPEC.size)
    update = (steps * 2.0**-12).astype(np.float32)
    np.testing.assert_array_equal(through(Half(), update)[1], update)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_largest_and_the_smallest_float32_stay_finite(dtype: Dtype) -> None:
    for extreme in (np.finfo(np.float32).max, np.finfo(np.float32).tiny, 1e-44):
        update = np.full(SPEC.size, extreme, np.float32)
        update[1::2] *= np.float32(-0.75)
        decoded = through(Half(dtype), update)[1]
        assert np.isfinite(decoded).all()
        if extreme > 1e-40:
            np.testing.assert_allclose(decoded, update, rtol=2.0**-7)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_under_feedback_what_rounding_leaves_out_follows(dtype: Dtype) -> None:
    made = ErrorFeedback(Half(dtype))
    update, state = an_update(), made.init(SPEC)
    total = np.zeros(SPEC.size)
    for _ in range(64):
        symbols, state = made.compress(update, state, PUBLIC, NO_RNG)
        total += made.decompress(symbols, PUBLIC).dense()
    rounded = 64 * through(Half(dtype), update)[1].astype(np.float64)
    exact = 64 * update.astype(np.float64)
    assert np.linalg.norm(total - exact) < 0.05 * np.linalg.norm(rounded - exact)
    assert state.residual is not None
    np.testing.assert_allclose(total + state.residual, exact, rtol=1e-5, atol=1e-6)


def test_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match="dtype is bfloat16 or float16, not 'int8'"):
        Half("int8")  # type: ignore[arg-type]
