"""Vectors of float32: their largest entries, their values rounded, their fixed-point sums; as
machine code."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedpress_protocols.kernels.machine import at_least16, kernel, nearest, prefetch, trailing_zeros
from fedpress_protocols.kernels.scratch import scratch
from fedpress_protocols.kernels.wire import Ints, Octets, Reals

_U, _N = np.uint64, np.uint32
_MAGNITUDE = _N(0x7FFFFFFF)
_SAMPLES = 1 << 14
_SAMPLED_FROM = 1 << 16
"""Below so many entries, all are candidates."""
_CHUNK = 4096
_LAST = _U(1 << 63)
_BIN_SHIFT = 15
_BINS = 1 << (31 - _BIN_SHIFT)
_AHEAD = 24


# The largest entries: a threshold from a sample that a few more than k reach, those that do, and
# the k largest of them. Which entries are drawn does not matter to what comes out.


def largest(vector: Reals, k: int) -> tuple[Ints, Reals]:
    if not k:
        return np.empty(0, np.int64), np.empty(0, np.float32)
    entries = np.ascontiguousarray(vector).view(np.uint32)
    least, room = 1, vector.size  # all but zeros
    if k < vector.size and vector.size >= _SAMPLED_FROM:
        sample = np.empty(_SAMPLES, np.uint32)
        _sample(entries, sample)
        where, values = _room(k)
        found = _reach(entries, _guess(sample, k, vector.size), where, values)
        if found >= k:
            return _refined(where[:found], values[:found], k)
        # The sample misled: too many reach the threshold, or too few. So count them all.
        bins = np.zeros(_BINS, np.int64)
        _count_magnitudes(entries, bins)
        reaching = np.cumsum(bins[::-1])
        last = min(int(np.searchsorted(reaching, k)), _BINS - 1)
        least, room = max(1, (_BINS - 1 - last) << _BIN_SHIFT), int(reaching[last])
    where, values = np.empty(room + 64, np.int64), np.empty(room + 64, np.uint32)
    found = _reach(entries, least, where, values)
    return _refined(where[:found], values[:found], k)


def add_largest(vector: Reals, other: Reals, k: int, total: Reals) -> tuple[Ints, Reals]:
    if not 0 < k < vector.size or vector.size < _SAMPLED_FROM:
        np.add(vector, other, out=total)
        return largest(total, k)
    sample = np.empty(_SAMPLES, np.uint32)
    _sample_sums(vector, other, sample)
    where, values = _room(k)
    least = _guess(sample, k, vector.size)
    found = _add_and_reach(vector, other, total, least, where, values)
    if found < k:
        return largest(total, k)
    return _refined(where[:found], values[:found], k)


def _room(k: int) -> tuple[Ints, npt.NDArray[np.uint32]]:
    room = 2 * k + 4096
    return scratch("where", room, np.int64), scratch("entries", room, np.uint32)


def _guess(sample: npt.NDArray[np.uint32], k: int, size: int) -> int:
    """A magnitude that k entries reach, or almost surely more, by a tenth or so."""
    share = sample.size * k / size
    rank = min(sample.size, int(1.1 * share + 3 * share**0.5) + 4)
    return max(1, int(np.partition(sample, sample.size - rank)[sample.size - rank]))


def _refined(where: Ints, entries: npt.NDArray[np.uint32], k: int) -> tuple[Ints, Reals]:
    if where.size <= k:
        return where.copy(), entries.view(np.float32).copy()
    threshold = np.partition(entries & _MAGNITUDE, where.size - k)[where.size - k]
    chosen, values = np.empty(k + 1, np.int64), np.empty(k + 1, np.uint32)
    _refine(where, entries, threshold, chosen, values)
    return chosen[:k], values[:k].view(np.float32)


@kernel
def _drawn(i, stride):
    """One of each `stride` entries, here and there, lest the sample follow the layout."""
    mixed = _N(_N(i) * _N(0x9E3779B9))
    mixed = _N(mixed ^ (mixed >> _N(16)))
    mixed = _N(mixed * _N(0x85EBCA6B))
    mixed = _N(mixed ^ (mixed >> _N(13)))
    return i * stride + np.int64((_U(mixed) * _U(stride)) >> _U(32))


@kernel
def _sample(entries, sample):
    stride = entries.size // sample.size
    for i in range(sample.size):
        sample[i] = entries[_drawn(i, stride)] & _MAGNITUDE


@kernel
def _sample_sums(vector, other, sample):
    stride = vector.size // sample.size
    sums = sample.view(np.float32)
    for i in range(sample.size):
        at = _drawn(i, stride)
        sums[i] = vector[at] + other[at]
    for i in range(sample.size):
        sample[i] &= _MAGNITUDE


@kernel
def _reach_in(entries, begin, end, least, where, found_entries, found):
    """Append the entries of up to 4096 that reach `least`; -1 if there may be no room for them.

    First a mask for each 64, and the masks that are not empty side by side; then what they stand
    for, two at a time: few branches, since which way they went would be anyone's guess.
    """
    masks, begins = np.empty(65, np.uint64), np.empty(65, np.int64)
    num = 0
    at = begin
    while at + 64 <= end:
        masks[num] = (
            at_least16(entries, at, least)
            | (at_least16(entries, at + 16, least) << _U(16))
            | (at_least16(entries, at + 32, least) << _U(32))
            | (at_least16(entries, at + 48, least) << _U(48))
        )
        begins[num] = at
        num += np.int64(masks[num] != _U(0))
        at += 64
    for block in range(num):
        if found + 64 > where.size:
            return -1
        mask, first = masks[block], begins[block]
        while mask:
            i = first + np.int64(trailing_zeros(mask))
            mask &= mask - _U(1)
            where[found] = i
            found_entries[found] = entries[_U(i)]
            second = np.int64(mask != _U(0))
            i = first + np.int64(trailing_zeros(mask | _LAST))
            mask &= mask - _U(second)
            where[found + 1] = i
            found_entries[found + 1] = entries[_U(i)]
            found += 1 + second
    while at < end:
        if (entries[at] & _MAGNITUDE) >= least:
            if found >= where.size:
                return -1
            where[found] = at
            found_entries[found] = entries[at]
            found += 1
        at += 1
    return found


@kernel
def _reach(entries, least, where, found_entries):
    found = 0
    for begin in range(0, entries.size, _CHUNK):
        end = min(begin + _CHUNK, entries.size)
        found = _reach_in(entries, begin, end, _N(least), where, found_entries, found)
        if found < 0:
            break
    return found


@kernel
def _add(vector, other, total):
    for i in range(total.size):
        total[i] = vector[i] + other[i]


@kernel
def _add_and_reach(vector, other, total, least, where, found_entries):
    """The sum in chunks, each searched while it is in the cache; all of it, even without room."""
    entries = total.view(np.uint32)
    found = 0
    for begin in range(0, total.size, _CHUNK):
        end = min(begin + _CHUNK, total.size)
        _add(vector[begin:end], other[begin:end], total[begin:end])
        if found >= 0:
            found = _reach_in(entries, begin, end, _N(least), where, found_entries, found)
    return found


@kernel
def _count_magnitudes(entries, bins):
    for i in range(entries.size):
        bins[(entries[i] & _MAGNITUDE) >> _N(_BIN_SHIFT)] += 1


@kernel
def _refine(where, entries, threshold, chosen, values):
    """Those above the threshold and, in their order, as many at it as there is room for.

    The one more place at the end takes what comes after them.
    """
    above = 0
    for i in range(entries.size):
        above += np.int64((entries[i] & _MAGNITUDE) > threshold)
    ties = chosen.size - 1 - above
    at = 0
    for i in range(entries.size):
        magnitude = entries[i] & _MAGNITUDE
        tie = np.int64(magnitude == threshold)
        chosen[at] = where[i]
        values[at] = entries[i]
        at += np.int64(magnitude > threshold) | (tie & np.int64(ties > 0))
        ties -= tie


def peak(vector: Reals) -> float:
    bits = _peak(np.ascontiguousarray(vector).view(np.uint32))
    return float(np.uint32(bits).view(np.float32))


@kernel
def _peak(entries):
    most = _N(0)
    for i in range(entries.size):
        magnitude = _N(entries[i] & _MAGNITUDE)
        most = magnitude if magnitude > most else most
    return most


# Values rounded.


def nearest_levels(magnitudes: Reals, middles: Reals) -> Octets:
    symbols = np.zeros(magnitudes.size, np.uint8)
    _nearest_levels(magnitudes, middles, symbols)
    return symbols


@kernel
def _nearest_levels(magnitudes, middles, symbols):
    for begin in range(0, symbols.size, _CHUNK):
        some, found = magnitudes[begin : begin + _CHUNK], symbols[begin : begin + _CHUNK]
        for middle in middles:
            for i in range(found.size):
                found[i] += np.uint8(some[i] >= middle)


def quantise(
    vector: Reals, step: float, levels: int, noise: npt.NDArray[np.float64] | None
) -> Octets:
    symbols = np.empty(vector.size, np.uint8)
    if not step > 0:
        symbols.fill(levels)
    elif noise is None:
        _round(vector, step, levels, symbols)
    else:
        _round_at_random(vector, step, levels, noise, symbols)
    return symbols


@kernel
def _round(vector, step, levels, symbols):
    bound = np.float64(levels)
    for i in range(symbols.size):
        rounded = nearest(np.float64(vector[i]) / step)
        rounded = min(max(rounded, -bound), bound)
        symbols[i] = np.uint8(np.int32(rounded + bound))


@kernel
def _round_at_random(vector, step, levels, noise, symbols):
    bound = np.float64(levels)
    for i in range(symbols.size):
        scaled = np.float64(vector[i]) / step
        rounded = np.floor(scaled)
        if noise[i] < scaled - rounded:
            rounded += 1.0
        rounded = min(max(rounded, -bound), bound)
        symbols[i] = np.uint8(np.int32(rounded + bound))


# Sums.


def add_scaled(total: Ints, vector: Reals, scale: float, weight: int) -> None:
    _add_scaled(total, np.ascontiguousarray(vector), float(scale), weight)


@kernel
def _add_scaled(total, vector, scale, weight):
    for i in range(vector.size):
        total[i] += np.int64(nearest(np.float64(vector[i]) * scale)) * weight


def add_scaled_at(total: Ints, where: Ints, vector: Reals, scale: float, weight: int) -> None:
    _add_scaled_at(total, where, np.ascontiguousarray(vector), float(scale), weight)


@kernel
def _add_scaled_at(total, where, vector, scale, weight):
    size = _U(total.size)
    for i in range(vector.size):
        if i + _AHEAD < vector.size:
            prefetch(total, where[i + _AHEAD])
        if _U(where[i]) < size:
            total[_U(where[i])] += np.int64(nearest(np.float64(vector[i]) * scale)) * weight


def add_table_at(total: Ints, where: Ints, symbols: Octets, table: Ints) -> None:
    _add_table_at(total, where, symbols, np.resize(table, 256))


@kernel
def _add_table_at(total, where, symbols, table):
    size = _U(total.size)
    for i in range(symbols.size):
        if i + _AHEAD < symbols.size:
            prefetch(total, where[i + _AHEAD])
        if _U(where[i]) < size:
            total[_U(where[i])] += table[symbols[i]]


def add_at(vector: Reals, where: Ints, values: Reals, sign: float) -> None:
    _add_at(vector, where, np.ascontiguousarray(values), np.float32(sign))


@kernel
def _add_at(vector, where, values, sign):
    size = _U(vector.size)
    for i in range(values.size):
        if i + _AHEAD < values.size:
            prefetch(vector, where[i + _AHEAD])
        if _U(where[i]) < size:
            vector[_U(where[i])] += np.float32(sign * values[i])
