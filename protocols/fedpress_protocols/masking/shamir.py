"""Secret sharing: any `threshold` shares reconstruct a 32-byte secret, fewer reveal nothing.

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
    """Split `secret` (32 bytes) into shares [len(xs), 5] for the holders `xs`, distinct in
    [1, 2**32).

    Coefficients come from the operating system's randomness only. Raises ConfigurationError, also
    if there are fewer holders than `threshold`.
    """
    if len(secret) != _SECRET_BYTES:
        raise ConfigurationError(f"a secret of {len(secret)} bytes, expected {_SECRET_BYTES}")
    points = _points(xs, ConfigurationError)
    if not 1 <= threshold <= points.size:
        raise ConfigurationError(
            f"threshold must be in [1, {points.size}], the number of shares, not {threshold}"
        )
    coefficients = np.empty((threshold, LIMBS), np.uint64)
    coefficients[0] = _limbs(secret)
    coefficients[1:] = _random_elements((threshold - 1) * LIMBS).reshape(-1, LIMBS)
    return kernels.evaluate(coefficients, points)


def combine(xs: npt.ArrayLike, shares: npt.ArrayLike, threshold: int) -> bytes:
    """Reconstruct the secret from `shares` [m, 5] of the holders `xs` [m], m >= threshold.

    The first `threshold` shares are used. Raises InvalidShare if there are too few, if one is
    malformed, or if the result is not a 32-byte secret. Modified shares may still give some other
    secret: the caller compares it with a commitment or a public key.
    """
    return combine_many(xs, np.asarray(shares)[np.newaxis], threshold)[0]


def combine_many(xs: npt.ArrayLike, shares: npt.ArrayLike, threshold: int) -> list[bytes]:
    """Like `combine` for many secrets with the same holders: `shares` [secrets, m, 5]."""
    points, values = _points(xs, InvalidShare), np.asarray(shares)
    if values.dtype != np.uint64 or values.shape[1:] != (points.size, LIMBS):
        raise InvalidShare(
            f"shares of {values.dtype} {values.shape}, expected uint64 [secrets, {points.size}, "
            f"{LIMBS}]"
        )
    if not 1 <= threshold <= points.size:
        raise InvalidShare(f"{points.size} shares, at least {threshold} are required")
    if (values >= _P).any():
        raise InvalidShare(f"a share with a limb outside [0, {PRIME})")
    weights = _weights(points[:threshold].tobytes())
    used = values[:, :threshold].copy()  # numba compiles again for a read-only array
    return [_secret(limbs) for limbs in kernels.weighted_sums(weights, used)]


def agree(xs: npt.ArrayLike, shares: npt.ArrayLike, threshold: int) -> bool:
    """Whether `shares` [m, 5] of the holders `xs` [m], m >= threshold, are consistent: all values
    of each limb lie on one polynomial of degree threshold - 1."""
    points, values = _points(xs, InvalidShare), np.asarray(shares, np.uint64)
    first = range(threshold)
    secrets = []
    for place in range(threshold - 1, points.size):
        # Replace the last of the first `threshold` shares: the value at 0 must stay the same.
        chosen = [*first[:-1], place]
        weights = kernels.lagrange(points[chosen].copy())
        secrets.append(kernels.weighted_sums(weights, values[np.newaxis, chosen].copy())[0])
    return all((limbs == secrets[0]).all() for limbs in secrets)


def to_bytes(share: Words) -> bytes:
    """The 40 bytes of a share: five little-endian words."""
    return share.astype("<u8").tobytes()


def from_bytes(data: bytes) -> Words:
    """[5], the share in 40 bytes; raises InvalidShare for other lengths or a limb beyond the
    field."""
    if len(data) != SHARE_BYTES:
        raise InvalidShare(f"a share of {len(data)} bytes, expected {SHARE_BYTES}")
    share = np.frombuffer(data, "<u8").astype(np.uint64)
    if (share >= _P).any():
        raise InvalidShare(f"a share with a limb outside [0, {PRIME})")
    return share


def _points(xs: npt.ArrayLike, error: type[ConfigurationError | InvalidShare]) -> Words:
    points = np.asarray(xs)
    if points.ndim != 1 or points.dtype.kind not in "iu":
        raise error(f"holders of {points.dtype} {points.shape}, expected a vector of integers")
    if points.size and (int(points.min()) < 1 or int(points.max()) >= _HOLDERS):
        raise error(f"a holder outside of [1, {_HOLDERS})")
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
        raise InvalidShare("the shares do not give a 32-byte secret")
    return number.to_bytes(_SECRET_BYTES, "little")


def _random_elements(count: int) -> Words:
    """Uniform in [0, p), by rejection."""
    elements = _draw(count)
    while (beyond := elements == _P).any():
        elements[beyond] = _draw(int(beyond.sum()))
    return elements


def _draw(count: int) -> Words:
    return np.frombuffer(os.urandom(8 * count), np.uint64) & _P
