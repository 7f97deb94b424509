"""Noise correlated over rounds: matrix factorisation with a banded strategy.

    round t's noise  v_t = z_t + d_1 z_(t-1) + ... + d_(t-1) z_1

The z_t are independent Gaussian vectors, drawn again from their seeds in each round, so nothing but
seeds is kept. The d_i, negative from d_1 on, are the first column of the inverse of a
lower-triangular Toeplitz matrix C: what one round adds later rounds take away again, and the noise
in a model, the sum over rounds, grows slowly.

With D the inverse of C, sums x with noise are D (C x + z): a Gaussian mechanism whose sensitivity
is that of C, also where x is chosen in view of earlier results (Denisov et al. 2022,
arXiv:2202.08312). A column of C has no more entries than rounds lie between a device's
participations, so that its columns have no row in common: each participation costs one column's
norm, in any direction and whatever the others do (Choquette-Choo et al. 2023, arXiv:2306.08153,
Section 4). Rounds that begin the noise again set entries of C to zero, which lowers the norm.

A column begins as that of the square root of all prefix sums (Fichtenberger, Henzinger and Upadhyay
2022, arXiv:2202.11205), with a weight below the diagonal and a decay: at their best within 0.5 % of
the least noise of any such strategy, see benchmarks/correlated_noise.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, model_validator

Floats = npt.NDArray[np.float64]

MAX_ROUNDS = 2048
"""Maximum number of rounds whose draws are in one round's noise."""
MAX_SEPARATION = 2**20
_SLACK = 1e-9
"""Relative, for the arithmetic of float64."""
_WEIGHTS, _TILTS = (0.0, 1.9), (-1.0, 3.0)
_SWEEPS, _TOLERANCE = 4, 2e-3
"""Of the search for the best weight and tilt: more of either is worth less than 0.01 %."""
_GOLDEN = (math.sqrt(5) - 1) / 2


class Correlation(BaseModel):
    """The strategy C of noise that is correlated over rounds.

    A device takes part again `separation` rounds after a participation at the earliest. The noise
    begins again after `rounds` rounds. A column of C is 1, and below that `weight` s_k `decay`^k
    with s_k = s_(k-1) (k - 1/2) / k and s_0 = 1, for k below both.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    separation: Annotated[int, Field(ge=2, le=MAX_SEPARATION)]
    rounds: Annotated[int, Field(ge=2, le=MAX_ROUNDS)]
    weight: Annotated[float, Field(ge=0, le=2)]
    decay: Annotated[float, Field(gt=0, le=2)]

    @model_validator(mode="after")
    def _is_stable(self) -> Correlation:
        largest = float(np.abs(self.noising).max())
        if not largest <= 1:
            raise ValueError(
                f"a weight of {self.weight:g} and a decay of {self.decay:g} multiply the noise of "
                f"earlier rounds by up to {largest:.3g}, more than 1; take both from fedpress "
                "privacy plan"
            )
        return self

    @property
    def column(self) -> Floats:
        """The first column of C, without the zeros at its end."""
        return _column(min(self.separation, self.rounds), self.weight, self.decay)

    @property
    def noising(self) -> Floats:
        """The d_i [rounds]; d_0 is 1. The same bits on every machine."""
        return _inverse(min(self.separation, self.rounds), self.rounds, self.weight, self.decay)

    @property
    def sensitivity(self) -> float:
        """The most that one participation with an update of norm 1 moves C x, in the L2 norm. What
        several move is orthogonal."""
        return float(np.linalg.norm(self.column)) * (1 + _SLACK)

    @property
    def gain(self) -> float:
        """The most that C multiplies the L2 norm of a sequence by."""
        return float(self.column.sum()) * (1 + _SLACK)

    def prefix_error(self, rounds: int) -> float:
        """The root mean square, over `rounds` rounds, of the noise in the sum of all rounds up to
        one, by the deviation of z."""
        return _prefix_error(self.noising, rounds)


def independent_error(rounds: int) -> float:
    """As `Correlation.prefix_error`, of noise that each round draws for itself."""
    return _prefix_error(np.ones(1), rounds)


@lru_cache(maxsize=64)
def best(separation: int, rounds: int, max_rounds: int = MAX_ROUNDS) -> Correlation:
    """The correlation by which models of a task of so many rounds have the least noise at a given
    epsilon, with the draws of `max_rounds` rounds in one at most.

    How often a device takes part does not matter. The weight and the tilt are found by golden
    sections, in turn.
    """
    together = max(2, min(rounds, max_rounds, MAX_ROUNDS))
    length = min(separation, together)

    def noise(weight: float, tilt: float) -> float:
        decay = math.exp(-tilt / length)
        norm = float(np.linalg.norm(_column(length, weight, decay)))
        return norm * _prefix_error(_inverse(length, together, weight, decay), rounds)

    weight, tilt = 1.0, 0.0
    for _ in range(_SWEEPS):
        weight = _least(partial(noise, tilt=tilt), *_WEIGHTS)
        tilt = _least(partial(noise, weight), *_TILTS)
    return Correlation(
        separation=separation,
        rounds=together,
        weight=float(f"{weight:.6g}"),
        decay=float(f"{math.exp(-tilt / length):.9g}"),
    )


def _least(function: Callable[[float], float], low: float, high: float) -> float:
    """The least point of a function that falls and then rises, to `_TOLERANCE`."""
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = function(left), function(right)
    while high - low > _TOLERANCE:
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = function(right)
    return (low + high) / 2


@lru_cache(maxsize=32)
def _column(length: int, weight: float, decay: float) -> Floats:
    steps = np.arange(1, length)
    with np.errstate(over="ignore"):
        below = weight * np.cumprod((steps - 0.5) / steps * decay)
    return _frozen(np.concatenate([[1.0], below]))


@lru_cache(maxsize=32)
def _inverse(length: int, rounds: int, weight: float, decay: float) -> Floats:
    """The first column [rounds] of the inverse of C, by forward substitution in one order of
    additions."""
    below = _column(length, weight, decay)[1:]
    rest = np.zeros(rounds + below.size)
    rest[0] = 1.0
    with np.errstate(over="ignore", invalid="ignore"):
        for index in range(rounds):
            rest[index + 1 : index + 1 + below.size] -= rest[index] * below
    return _frozen(rest[:rounds])


def _prefix_error(noising: Floats, rounds: int) -> float:
    errors = np.cumsum(np.cumsum(noising) ** 2)  # the squared error after each round
    whole, rest = divmod(rounds, errors.size)
    after_whole = errors.size * whole * (whole - 1) / 2 + rest * whole
    total = whole * errors.sum() + errors[:rest].sum() + after_whole * errors[-1]
    return math.sqrt(float(total) / rounds)


def _frozen(values: Floats) -> Floats:
    values.flags.writeable = False
    return values
