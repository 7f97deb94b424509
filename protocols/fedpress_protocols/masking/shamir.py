"""Shares of a 32-byte secret: any `threshold` of them give it back, fewer say nothing about it.

Shamir 1979, over GF(p) with p = 2**61 - 1. A secret is five limbs of 52 bits, little-endian, each
the value at 0 of a polynomial of degree threshold - 1 with random coefficients; the share of x is
the five values there. x is the holder's slot + 1.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from fedpress_compression import kernels
from fedpress_protocols.errors import ConfigurationError, InvalidShare

Words = npt.NDArray[np.uint64]

PRIME = 2**61 - 1
LIMBS = 5
SHARE_BYTES = 8 * LIMBS

_LIMB_BITS = 52
_SECRET_BYTES = 32
_P = np.uint64(PRIME)
_HOLDERS = 2**32


def split(secret: bytes | bytearray, threshold: int, xs: npt.ArrayLike) -> Words:
    """[len(xs), 5]: the shares of `secret` (32 bytes) for the holders `xs`, distinct in
    [1, 2**32).

    Coefficients come from the operating system's randomness and from nowhere else. Raises
    ConfigurationError, also if there are fewer holders than `threshold`.
    """
    if len(secret) != _SECRET_BYTES:
        raise ConfigurationError(f"a secret of {len(secret)} bytes where {_SECRET_BYTES} are due")
    points = _points(xs, ConfigurationError)
    if not 1 <= threshold <= points.size:
        raise ConfigurationError(f"a threshold of {threshold} for {points.size} shares")
    coefficients = np.empty((threshold, LIMBS), np.uint64)
    coefficients[0] = _limbs(secret)
    coefficients[1:] = _random_elements((threshold - 1) * LIMBS).reshape(-1, LIMBS)
    return kernels.evaluate(coefficients, points)


def combine(xs: npt.ArrayLike, shares: npt.ArrayLike, threshold: int) -> bytes:
    """The secret of which `shares` [m, 5] were dealt to the holders `xs` [m], m >= threshold.

    The first `threshold` are used. Raises InvalidShare if there are too few, if one is not a share
    at all, or if together they are shares of no 32-byte secret. Shares that were tampered with may
    still give some other secret: hold it to a commitment or a public key.
    """
    return combine_many(xs, np.asarray(shares)[np.newaxis], threshold)[0]


def combine_many(xs: npt.ArrayLike, shares: npt.ArrayLike, threshold: int) -> list[bytes]:
    """`combine` of many secrets, `shares` [secrets, m, 5], whose holders are the same."""
    points, values = _points(xs, InvalidShare), np.asarray(shares)
    if values.dtype != np.uint64 or values.shape[1:] != (points.size, LIMBS):
        raise InvalidShare(
            f"shares of {values.dtype} {values.shape}, not uint64 [secrets, {points.size}, {LIMBS}]"
        )
    if not 1 <= threshold <= points.size:
        raise InvalidShare(f"{points.size} shares where {threshold} are needed")
    if (values >= _P).any():
        raise InvalidShare(f"a share with a limb outside [0, {PRIME})")
    weights = _weights(points[:threshold].tobytes())
    used = values[:, :threshold].copy()  # numba compiles anew for an array that is read-only
    return [_secret(limbs) for limbs in kernels.weighted_sums(weights, used)]


def agree(xs: npt.ArrayLike, shares: npt.ArrayLike, threshold: int) -> bool:
    """Whether `shares` [m, 5] of the holders `xs` [m], m >= threshold, are of one secret, whichever
    it is: each limb's all lie on one polynomial of degree threshold - 1."""
    points, values = _points(xs, InvalidShare), np.asarray(shares, np.uint64)
    first = range(threshold)
    found = []
    for place in range(threshold - 1, points.size):
        # In the place of the last of the first: it agrees with the others as to the value at 0.
        chosen = [*first[:-1], place]
        weights = kernels.lagrange(points[chosen].copy())
        found.append(kernels.weighted_sums(weights, values[np.newaxis, chosen].copy())[0])
    return all((limbs == found[0]).all() for limbs in found)


def to_bytes(share: Words) -> bytes:
    """The 40 bytes of a share: five little-endian words."""
    return share.astype("<u8").tobytes()


def from_bytes(data: bytes) -> Words:
    """[5], the share in 40 bytes; raises InvalidShare for other lengths or a limb beyond the
    field."""
    if len(data) != SHARE_BYTES:
        raise InvalidShare(f"a share of {len(data)} bytes where {SHARE_BYTES} are due")
    share = np.frombuffer(data, "<u8").astype(np.uint64)
    if (share >= _P).any():
        raise InvalidShare(f"a share with a limb outside [0, {PRIME})")
    return share


def _points(xs: npt.ArrayLike, error: type[ConfigurationError | InvalidShare]) -> Words:
    points = np.asarray(xs)
    if points.ndim != 1 or points.dtype.kind not in "iu":
        raise error(f"holders of {points.dtype} {points.shape}, not a row of integers")
    if points.size and (int(points.min()) < 1 or int(points.max()) >= _HOLDERS):
        raise error(f"a holder outside [1, {_HOLDERS})")
    if np.unique(points).size != points.size:
        raise error("two shares of one holder")
    return points.astype(np.uint64)


@lru_cache(maxsize=64)
def _weights(points: bytes) -> Words:
    return kernels.lagrange(np.frombuffer(points, np.uint64).copy())


def _limbs(secret: bytes | bytearray) -> Words:
    number = int.from_bytes(secret, "little")
    limbs = [number >> _LIMB_BITS * i & (2**_LIMB_BITS - 1) for i in range(LIMBS)]
    return np.array(limbs, np.uint64)


def _secret(limbs: Words) -> bytes:
    numbers: Sequence[int] = limbs.tolist()
    number = sum(limb << _LIMB_BITS * i for i, limb in enumerate(numbers))
    if max(numbers) >> _LIMB_BITS or number >> 8 * _SECRET_BYTES:
        raise InvalidShare("these are shares of no 32-byte secret")
    return number.to_bytes(_SECRET_BYTES, "little")


def _random_elements(count: int) -> Words:
    """Uniform in [0, p), by rejection."""
    found = _draw(count)
    while (beyond := found == _P).any():
        found[beyond] = _draw(int(beyond.sum()))
    return found


def _draw(count: int) -> Words:
    return np.frombuffer(os.urandom(8 * count), np.uint64) & _P
