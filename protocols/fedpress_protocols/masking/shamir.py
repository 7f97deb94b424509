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
    _check(points, values, threshold)
    weights = _weights(points[:threshold].tobytes())
    used = values[:, :threshold].copy()  # numba compiles again for a read-only array
    return [_secret(limbs) for limbs in kernels.weighted_sums(weights, used)]


def wrong_places(xs: npt.ArrayLike, shares: npt.ArrayLike, threshold: int) -> frozenset[int] | None:
    """The places of the wrong ones of `shares` [m, 5] of the holders `xs` [m], m >= threshold.

    Exact: all other shares lie on polynomials of degree threshold - 1, one for each limb, and these
    are the only ones that at most (m - threshold) // 2 shares miss. None if there are no such
    polynomials. Decoding of Reed-Solomon codes: Massey 1969, doi 10.1109/TIT.1969.1054260.
    """
    points, values = _points(xs, InvalidShare), np.asarray(shares)
    _check(points, values[np.newaxis], threshold)
    checks = _parity_checks(points.tobytes(), threshold)
    wrong: set[int] = set()
    for limb in values.T:
        syndromes = kernels.weighted_sums(limb.copy(), checks)[0].tolist()
        locator = _shortest_recurrence(syndromes)
        # Its roots are the points of the wrong shares, if it has as many as its degree.
        roots = kernels.evaluate(np.array(locator, np.uint64)[:, np.newaxis], points)[:, 0] == 0
        if np.count_nonzero(roots) != len(locator) - 1:
            return None
        wrong.update(np.flatnonzero(roots).tolist())
    return frozenset(wrong) if 2 * len(wrong) <= points.size - threshold else None


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


def _check(points: Words, values: npt.NDArray[np.generic], threshold: int) -> None:
    if values.dtype != np.uint64 or values.shape[1:] != (points.size, LIMBS):
        raise InvalidShare(
            f"shares of {values.dtype} {values.shape}, expected uint64 [secrets, {points.size}, "
            f"{LIMBS}]"
        )
    if not 1 <= threshold <= points.size:
        raise InvalidShare(f"{points.size} shares, at least {threshold} are required")
    if (values >= _P).any():
        raise InvalidShare(f"a share with a limb outside [0, {PRIME})")


@lru_cache(maxsize=64)
def _weights(points: bytes) -> Words:
    return kernels.lagrange(np.frombuffer(points, np.uint64).copy())


@lru_cache(maxsize=64)
def _parity_checks(points: bytes, threshold: int) -> Words:
    """[1, m, m - threshold]: weights of the m shares in sums, their syndromes, that are 0 if the
    shares lie on a polynomial of degree threshold - 1.

    A wrong share of x adds a geometric sequence of ratio x to the syndromes.
    """
    xs: list[int] = np.frombuffer(points, np.uint64).tolist()
    column: list[int] = _weights(points).tolist()
    checks = np.empty((1, len(xs), len(xs) - threshold), np.uint64)
    for place in range(checks.shape[2]):
        column = [weight * x % PRIME for weight, x in zip(column, xs, strict=True)]
        checks[0, :, place] = column
    return checks


def _shortest_recurrence(sequence: Sequence[int]) -> list[int]:
    """The coefficients c, the last of which is 1, of a shortest linear recurrence in `sequence`:
    the sum of c[i] * sequence[at + i] is 0 at every place. Massey 1969."""
    current, before = [1], [1]  # the coefficients from the last to the first
    length, last, since = 0, 1, 1
    for at, value in enumerate(sequence):
        terms = zip(current[1:], reversed(sequence[at - length : at]), strict=False)
        gap = (value + sum(c * s for c, s in terms)) % PRIME
        if not gap:
            since += 1
            continue
        factor, kept = gap * pow(last, -1, PRIME) % PRIME, current
        current = current + [0] * (len(before) + since - len(current))
        for i, each in enumerate(before, since):
            current[i] = (current[i] - factor * each) % PRIME
        if 2 * length <= at:
            length, before, last, since = at + 1 - length, kept, gap, 1
        else:
            since += 1
    return (current + [0] * (length + 1 - len(current)))[length::-1]


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
