"""Seeds and generators of one client: all from its seed, or from the operating system."""

from __future__ import annotations

import secrets

import numpy as np

from fedpress_protocols.masking.payload import SECRET_BYTES
from fedpress_protocols.messages import Assignment


def compression_rng(seed: int | None, assignment: Assignment) -> np.random.Generator:
    """The compressor's private randomness for one assignment."""
    if seed is None:
        return np.random.default_rng()
    plan, turn = assignment.plan, (0, assignment.turn) if assignment.turn else ()
    return np.random.default_rng([seed, plan.round, plan.attempt, *turn])


def rounding_secret(seed: int | None, assignment: Assignment) -> bytes | None:
    """Randomness of rounding in the masked lane; None: the ledger takes the system's, as it should
    for anybody but a test."""
    if seed is None:
        return None
    plan = assignment.plan
    return np.random.default_rng([seed, plan.round, plan.attempt, 2]).bytes(SECRET_BYTES)


def training_seed(seed: int | None, round_: int, attempt: int, turn: int = 0) -> int:
    """The seed in [0, 2**63) of one training."""
    if seed is None:
        return secrets.randbits(63)
    sequence = np.random.SeedSequence([seed, round_, attempt, 1, *((turn,) if turn else ())])
    return int(sequence.generate_state(1, np.uint64)[0]) >> 1
