"""The error of a compressor that runs without error feedback: what it never sends, and what many
uploads take out."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedpress_compression.compressor import Compressor, Public, members, properties
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.tensors import ModelSpec, TensorSpec, Vector

TYPICAL = ModelSpec((TensorSpec("weight", (240, 256)), TensorSpec("bias", (256,))))
"""Of `typical_update`."""

MOST_NEVER_SENT = 0.5
"""From here on plans and hooks warn: more than this share of an update's energy never arrives."""

_ROUNDS = 20


def typical_update(seed: int) -> Vector:
    """61,696 cubes of normal values, a third of them 0: heavy tails, as updates have."""
    rng = np.random.default_rng(seed)
    cubes = rng.standard_normal(TYPICAL.size) ** 3 * (rng.random(TYPICAL.size) > 0.33)
    return (0.01 * cubes).astype(np.float32)


def never_sent(made: Compressor[Any]) -> float:
    """The share of an update's energy that does not arrive however often a client sends it, as the
    mean of 20 uploads has it; 0 for what is unbiased, or keeps a residual."""
    if properties(made).unbiased or getattr(made, "keeps_residual", False):
        return 0.0
    update, rng = typical_update(1), np.random.default_rng(0)
    state, last = made.init(TYPICAL), np.zeros(TYPICAL.size, np.float32)
    total = np.zeros(TYPICAL.size)
    for number in range(1, _ROUNDS + 1):
        seed = PublicRandomness(number.to_bytes(32, "little"))
        public = Public(
            TYPICAL,
            seed,
            {"previous": last, "drift": last, "activity": np.abs(last), "own": last},
            round=number,
        )
        symbols, state = made.compress(update, state, public, rng)
        last = made.decompress(symbols, public).dense()
        total += last
    rest = total / _ROUNDS - update
    return float(rest @ rest) / float(np.square(update, dtype=np.float64).sum())


def is_noisy_alone(made: Compressor[Any]) -> bool:
    """Whether one upload may lose more than the whole update by design, since the sum of many comes
    out right: `made`, or a compressor in it, does not contract, and is unbiased or made for sums.

    False for what keeps a residual, which such a loss would make grow.
    """
    if getattr(made, "keeps_residual", False):
        return False
    inner = list(members(made))
    if inner:
        return any(is_noisy_alone(member) for member in inner)
    claimed = properties(made)
    return not claimed.suits_feedback and (claimed.unbiased or made.commutes_with_sum)
