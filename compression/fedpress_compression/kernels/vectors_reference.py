"""Vectors of float32: their largest entries, their values rounded, their fixed-point sums; in
numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedpress_compression.kernels.wire import Ints, Octets, Reals

_MAGNITUDE = np.int32(0x7FFFFFFF)


def largest(vector: Reals, k: int) -> tuple[Ints, Reals]:
    """The rising indices of the k entries largest in magnitude, ties to the lower index, zeros left
    out; and these entries.

    Magnitudes are compared as integers, in which order NaN and infinity come last: if there are
    any, and k >= 1, then there are some among the entries returned.
    """
    magnitudes = vector.view(np.int32) & _MAGNITUDE
    where = np.flatnonzero(magnitudes)
    if not k:
        where = where[:0]
    elif where.size > k:
        threshold = np.partition(magnitudes, magnitudes.size - k)[magnitudes.size - k]
        above = np.flatnonzero(magnitudes > threshold)
        ties = np.flatnonzero(magnitudes == threshold)[: k - above.size]
        where = np.sort(np.concatenate([above, ties]))
    return where, vector[where]


def add_largest(
    vector: Reals, other: Reals, k: int, total: Reals, scale: float = 1.0
) -> tuple[Ints, Reals]:
    """Write `scale` * `vector` + `other` to `total`, and find its `largest`; the scale is a power
    of two, so that the product has one value wherever it is rounded."""
    np.add(vector if scale == 1 else np.float32(scale) * vector, other, out=total)
    return largest(total, k)


def peak(vector: Reals) -> float:
    """The largest magnitude; NaN if there is one, 0 of nothing."""
    return float(np.abs(vector).max(initial=0.0))


def lloyd(rising: Reals, edges: Ints, steps: int) -> npt.NDArray[np.float64]:
    """The centres of the groups of `rising` values that Lloyd's iteration arrives at, from groups
    between the `edges` [groups + 1], in `steps` at most; that of a group without values stays, or
    is that of the group before."""
    ordered = rising.astype(np.float64)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    centres = np.zeros(edges.size - 1)
    for _ in range(steps):
        counts = np.diff(edges)
        means = np.diff(sums[edges]) / np.maximum(counts, 1)
        centres = np.maximum.accumulate(np.where(counts > 0, means, centres))
        inner = np.searchsorted(ordered, (centres[1:] + centres[:-1]) / 2)
        moved = np.concatenate([[0], inner, [ordered.size]])
        if (moved == edges).all():
            break
        edges = moved
    return centres


def nearest_levels(magnitudes: Reals, middles: Reals) -> Octets:
    """The number of the increasing `middles` that each magnitude reaches."""
    return np.searchsorted(middles, magnitudes, side="right").astype(np.uint8)


def quantise(
    vector: Reals, step: float, levels: int, noise: npt.NDArray[np.float64] | None
) -> Octets:
    """Each entry in steps, as levels + a whole number in [-levels, levels].

    Rounded to the nearest, halves to even; or, with `noise` in [0, 1), up where what is left over
    exceeds it. A step of 0 makes everything 0.
    """
    scaled = vector.astype(np.float64) / step if step > 0 else np.zeros(vector.size)
    if noise is None:
        rounded = np.rint(scaled)
    else:
        rounded = np.floor(scaled)
        rounded += noise < scaled - rounded
    return (np.clip(rounded, -levels, levels) + levels).astype(np.uint8)


def add_scaled(total: Ints, vector: Reals, scale: float, weight: int) -> None:
    """total += weight * rint(vector * scale), in int64."""
    total += np.rint(vector.astype(np.float64) * scale).astype(np.int64) * np.int64(weight)


def add_scaled_at(total: Ints, where: Ints, vector: Reals, scale: float, weight: int) -> None:
    """total[where] += weight * rint(vector * scale), in int64; `where` rises within `total`."""
    total[where] += np.rint(vector.astype(np.float64) * scale).astype(np.int64) * np.int64(weight)


def add_table_at(total: Ints, where: Ints, symbols: Octets, table: Ints) -> None:
    """total[where] += table[symbols]; `where` rises within `total`, symbols lie in `table`."""
    total[where] += table[symbols]


def add_at(vector: Reals, where: Ints, values: Reals, sign: float) -> None:
    """vector[where] += sign * values; `where` rises within `vector`."""
    vector[where] += np.float32(sign) * values
