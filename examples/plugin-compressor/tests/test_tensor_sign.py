"""The claims of every compressor, tested for this one; run `pytest` in this folder."""

from __future__ import annotations

import fedpress_example_sign as plugin
import numpy as np
import pytest

from fedpress import FedpressError
from fedpress.compressors import (
    ModelSpec,
    Public,
    PublicRandomness,
    TensorSpec,
    compressors,
    decode,
    encode,
    from_config,
    to_config,
)

SPEC = ModelSpec((TensorSpec("w", (3, 4)), TensorSpec("b", (3,)), TensorSpec("none", (0,))))
PUBLIC = Public(SPEC, PublicRandomness(bytes(32)))
MADE = plugin.TensorSign()


def sent(update: np.ndarray) -> tuple[bytes, np.ndarray]:
    """The body of an update, and what a server makes of it."""
    symbols, _ = MADE.compress(update, None, PUBLIC, np.random.default_rng(0))
    body = encode(symbols, MADE.layout(SPEC))
    return body, MADE.decompress(decode(body, MADE.layout(SPEC)), PUBLIC).dense()


def test_the_package_is_found_by_its_entry_point() -> None:
    assert compressors()["fedpress_example_sign.tensor_sign"] is plugin.TensorSign
    assert from_config(to_config(MADE)) == MADE


def test_golden_bytes_never_change() -> None:
    update = np.array([(-1.0) ** i * i / 8 for i in range(SPEC.size)], np.float32)
    body, received = sent(update)
    assert body.hex() == "00aa2a0000303f0000d03f00000000"
    assert received[:3].tolist() == [0.6875, -0.6875, 0.6875]
    assert received[12:].tolist() == [1.625, -1.625, 1.625]


def test_what_is_lost_is_less_than_the_update() -> None:
    for seed in range(20):
        update = np.random.default_rng(seed).standard_t(3, SPEC.size).astype(np.float32)
        lost = update - sent(update)[1]
        assert np.square(lost).sum() < np.square(update).sum()


def test_nan_is_refused() -> None:
    with pytest.raises(FedpressError, match="NaN or infinity"):
        sent(np.full(SPEC.size, np.nan, np.float32))
