"""Vectors of float32: their largest entries, their values rounded, their fixed-point sums; as
machine code."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from fedpress_compression.kernels.buffer_pool import pooled, thread_buffer
from fedpress_compression.kernels.intrinsics import (
    add16,
    at_least16,
    kernel,
    nearest,
    prefetch,
    trailing_zeros,
)
from fedpress_compression.kernels.wire import Ints, Octets, Reals
from fedpress_compression.kernels.workers import each, parts

Entries = npt.NDArray[np.uint32]
"""The bits of float32."""

_U, _N = np.uint64, np.uint32
_MAGNITUDE = _N(0x7FFFFFFF)
_SAMPLES = 1 << 14
_SAMPLES_AHEAD = 24
_SAMPLED_FROM = 1 << 16
"""Below so many entries, all are candidates."""
_CHUNK = 1 << 14
_SOON = 4096
"""Entries that are read next, and so long before they are."""
_LONG = 1 << 20
"""Entries from which a vector is worth another thread."""
_MANY = 1 << 16
"""Coordinates from which those in no order in memory are."""
_SPARE = _CHUNK + 64
"""Room that a chunk's search may need beyond what it finds."""
_LAST = _U(1 << 63)
_BIN_SHIFT = 15
_BINS = 1 << (31 - _BIN_SHIFT)
_AHEAD = 192
"""The prefetch distance, so that many memory accesses overlap."""


# The largest entries: a threshold from a sample that a few more than k reach, those that do, and
# the k largest of them. Which entries are drawn does not matter to what comes out.


def largest(vector: Reals, k: int) -> tuple[Ints, Reals]:
    if not k:
        return np.empty(0, np.int64), np.empty(0, np.float32)
    entries = np.ascontiguousarray(vector).view(np.uint32)
    least, room = 1, vector.size  # all but zeros
    if k < vector.size and vector.size >= _SAMPLED_FROM:
        sample = thread_buffer("sample", _SAMPLES, np.uint32)
        _sample(entries, sample)
        least = _guess(sample, k, vector.size)
        gathered = _gathered(vector.size, k, lambda *part: _reach(entries, least, *part))
        if gathered is not None:
            return _refined(*gathered, k)
        # The sample misled: too many reach the threshold, or too few. So count them all.
        bins = np.zeros(_BINS, np.int64)
        _count_magnitudes(entries, bins)
        reaching = np.cumsum(bins[::-1])
        last = min(int(np.searchsorted(reaching, k)), _BINS - 1)
        least, room = max(1, (_BINS - 1 - last) << _BIN_SHIFT), int(reaching[last])
    where, values = np.empty(room + _SPARE, np.int64), np.empty(room + _SPARE, np.uint32)
    num = _reach(entries, least, 0, vector.size, where, values)
    return _refined(where[:num], values[:num], k)


def add_largest(
    vector: Reals, other: Reals, k: int, total: Reals, scale: float = 1.0
) -> tuple[Ints, Reals]:
    if not 0 < k < vector.size or vector.size < _SAMPLED_FROM:
        np.add(vector if scale == 1 else np.float32(scale) * vector, other, out=total)
        return largest(total, k)
    factor = np.float32(scale)
    sample = thread_buffer("sample", _SAMPLES, np.uint32)
    _sample_sums(vector, factor, other, sample)
    least = _guess(sample, k, vector.size)
    gathered = _gathered(
        vector.size, k, lambda *part: _add_and_reach(vector, factor, other, total, least, *part)
    )
    return largest(total, k) if gathered is None else _refined(*gathered, k)


def _gathered(
    size: int, k: int, reach: Callable[[int, int, Ints, Entries], int]
) -> tuple[Ints, Entries] | None:
    """The entries that `reach` selects in each part of `size` entries, in order; None if they are
    fewer than k, or do not fit."""
    among, room = parts(size, _LONG, _CHUNK), 2 * k + _SPARE
    where = thread_buffer("where", len(among) * room, np.int64)
    entries = thread_buffer("entries", len(among) * room, np.uint32)
    places = {begin: slice(i * room, (i + 1) * room) for i, (begin, _) in enumerate(among)}
    counts = each(
        lambda begin, end: reach(begin, end, where[places[begin]], entries[places[begin]]), among
    )
    if min(counts) < 0 or sum(counts) < k:
        return None
    if len(among) == 1:
        return where[: counts[0]], entries[: counts[0]]
    starts = [place.start for place in places.values()]
    filled = [slice(s, s + num) for s, num in zip(starts, counts, strict=True)]
    return (
        np.concatenate([where[one] for one in filled]),
        np.concatenate([entries[one] for one in filled]),
    )


def _guess(sample: Entries, k: int, size: int) -> int:
    """A magnitude that k entries reach, or almost surely more."""
    share = sample.size * k / size
    rank = min(sample.size, int(share + 3 * share**0.5) + 4)
    return max(1, int(np.partition(sample, sample.size - rank)[sample.size - rank]))


def _refined(where: Ints, entries: Entries, k: int) -> tuple[Ints, Reals]:
    if where.size <= k:
        return where.copy(), entries.view(np.float32).copy()
    threshold = np.partition(entries & _MAGNITUDE, where.size - k)[where.size - k]
    chosen, values = pooled(k + 1, np.int64), pooled(k + 1, np.uint32)
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
    """Neighbours in twos: to get at memory is what takes time."""
    stride = entries.size // (sample.size // 2)
    for i in range(sample.size // 2):
        prefetch(entries, _drawn(i + _SAMPLES_AHEAD, stride))
        at = _U(_drawn(i, stride)) | _U(1)
        sample[_U(2 * i)] = entries[at - _U(1)] & _MAGNITUDE
        sample[_U(2 * i + 1)] = entries[at] & _MAGNITUDE


@kernel
def _sample_sums(vector, factor, other, sample):
    stride = vector.size // (sample.size // 2)
    sums = sample.view(np.float32)
    for i in range(sample.size // 2):
        soon = _drawn(i + _SAMPLES_AHEAD, stride)
        prefetch(vector, soon)
        prefetch(other, soon)
        at = _U(_drawn(i, stride)) | _U(1)
        sums[_U(2 * i)] = factor * vector[at - _U(1)] + other[at - _U(1)]
        sums[_U(2 * i + 1)] = factor * vector[at] + other[at]
    for i in range(sample.size):
        sample[i] &= _MAGNITUDE


@kernel
def _append(entry, least, at, where, entries_out, count):
    """Append one entry if it reaches `least`; -1 if there is no room for it."""
    if (entry & _MAGNITUDE) < least:
        return count
    if count >= where.size:
        return -1
    where[count] = at
    entries_out[count] = entry
    return count + 1


@kernel
def _kept(vector, factor, other, i):
    """An entry, or where there is an `other` its sum with `factor` times the entry."""
    if other is None:
        return vector[i]
    else:
        return factor * vector[i] + other[i]


@kernel
def _spread(masks, begins, num, vector, factor, other, where, entries_out, count):
    """Append the places that the masks stand for, and what is kept of them, two at a time: few
    branches, since which way they went would be anyone's guess; -1 if there may be no room."""
    if count + 64 * num + 1 > where.size:
        return -1
    place = _U(count)
    for block in range(num):
        mask, first = masks[block], _U(begins[block])
        while mask:
            i = first + trailing_zeros(mask)
            mask &= mask - _U(1)
            where[place] = np.int64(i)
            entries_out[place] = _kept(vector, factor, other, i)
            second = _U(mask != _U(0))
            i = first + trailing_zeros(mask | _LAST)
            mask &= mask - second
            where[place + _U(1)] = np.int64(i)
            entries_out[place + _U(1)] = _kept(vector, factor, other, i)
            place += _U(1) + second
    return np.int64(place)


@kernel
def _prefetch_soon(entries, at):
    """Ask for 64 entries well after those from `at` on: memory would be idle while what a chunk's
    masks stand for is collected."""
    for line in range(0, 64, 16):
        prefetch(entries, at + line + _SOON)


@kernel
def _reach_in(entries, begin, end, least, masks, begins, where, entries_out, count):
    """Append the entries of a chunk that reach `least`; -1 if there may be no room for them.

    First a mask for each 64, and the masks that are not empty side by side; then what they stand
    for.
    """
    num = 0
    at = begin
    while at + 64 <= end:
        _prefetch_soon(entries, at)
        masks[num] = (
            at_least16(entries, at, least)
            | (at_least16(entries, at + 16, least) << _U(16))
            | (at_least16(entries, at + 32, least) << _U(32))
            | (at_least16(entries, at + 48, least) << _U(48))
        )
        begins[num] = at
        num += np.int64(masks[num] != _U(0))
        at += 64
    count = _spread(masks, begins, num, entries, None, None, where, entries_out, count)
    while at < end and count >= 0:
        count = _append(entries[at], least, at, where, entries_out, count)
        at += 1
    return count


@kernel
def _add_and_reach_in(
    vector, factor, other, total, begin, end, least, masks, begins, where, entries_out, count
):
    """`_reach_in` of the sums of entries, those of `vector` times `factor`, which are written to
    `total`, where `begin` is the beginning of a cache line, in any case."""
    sums = entries_out.view(np.float32)
    num = 0
    at = begin
    while at + 64 <= end:
        _prefetch_soon(vector, at)
        _prefetch_soon(other, at)
        masks[num] = (
            add16(vector, factor, other, total, at, least)
            | (add16(vector, factor, other, total, at + 16, least) << _U(16))
            | (add16(vector, factor, other, total, at + 32, least) << _U(32))
            | (add16(vector, factor, other, total, at + 48, least) << _U(48))
        )
        begins[num] = at
        num += np.int64(masks[num] != _U(0))
        at += 64
    if count >= 0:
        count = _spread(masks, begins, num, vector, factor, other, where, sums, count)
    return _add_each(vector, factor, other, total, at, end, least, where, entries_out, count)


@kernel
def _add_each(vector, factor, other, total, begin, end, least, where, entries_out, count):
    entries = total.view(np.uint32)
    for at in range(begin, end):
        total[at] = factor * vector[at] + other[at]
        if count >= 0:
            count = _append(entries[at], least, at, where, entries_out, count)
    return count


@kernel
def _reach(entries, least, begin, end, where, entries_out):
    masks, begins = np.empty(_CHUNK // 64 + 1, np.uint64), np.empty(_CHUNK // 64 + 1, np.int64)
    count = 0
    for first in range(begin, end, _CHUNK):
        last = min(first + _CHUNK, end)
        count = _reach_in(entries, first, last, _N(least), masks, begins, where, entries_out, count)
        if count < 0:
            break
    return count


@kernel
def _add_and_reach(vector, factor, other, total, least, begin, end, where, entries_out):
    """The sum in chunks, each searched as it is made; all of it, even without room."""
    masks, begins = np.empty(_CHUNK // 64 + 1, np.uint64), np.empty(_CHUNK // 64 + 1, np.int64)
    least = _N(least)
    address = np.int64(total.ctypes.data) + 4 * begin
    first = min(end, begin + (-address % 64) // 4)
    count = _add_each(vector, factor, other, total, begin, first, least, where, entries_out, 0)
    while first < end:
        last = min(first + _CHUNK, end)
        count = _add_and_reach_in(
            vector,
            factor,
            other,
            total,
            first,
            last,
            least,
            masks,
            begins,
            where,
            entries_out,
            count,
        )
        first = last
    return count


@kernel
def _count_magnitudes(entries, bins):
    for i in range(entries.size):
        bins[(entries[i] & _MAGNITUDE) >> _N(_BIN_SHIFT)] += 1


@kernel
def _refine(where, entries, threshold, chosen, values):
    """Those above the threshold and, in their order, as many at it as there is room for.

    The one more place at the end takes what comes after them.
    """
    above = reached = 0
    for i in range(entries.size):
        magnitude = entries[i] & _MAGNITUDE
        above += np.int64(magnitude > threshold)
        reached += np.int64(magnitude >= threshold)
    ties = chosen.size - 1 - above
    at = _U(0)
    if above + ties == reached:
        for i in range(entries.size):
            chosen[at] = where[i]
            values[at] = entries[i]
            at += _U((entries[i] & _MAGNITUDE) >= threshold)
        return
    for i in range(entries.size):
        magnitude = entries[i] & _MAGNITUDE
        tie = np.int64(magnitude == threshold)
        chosen[at] = where[i]
        values[at] = entries[i]
        at += _U(magnitude > threshold) | _U(tie & np.int64(ties > 0))
        ties -= tie


def peak(vector: Reals) -> float:
    entries = np.ascontiguousarray(vector).view(np.uint32)
    peaks = each(lambda begin, end: int(_peak(entries[begin:end])), parts(vector.size, _LONG))
    return float(np.uint32(max(peaks)).view(np.float32))


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
    each(
        lambda begin, end: _nearest_levels(magnitudes[begin:end], middles, symbols[begin:end]),
        parts(symbols.size, _LONG),
    )
    return symbols


def lloyd(rising: Reals, edges: Ints, steps: int) -> npt.NDArray[np.float64]:
    sums = thread_buffer("sums", rising.size + 1, np.float64)
    centres = np.zeros(edges.size - 1)
    _lloyd(np.ascontiguousarray(rising), edges.copy(), steps, sums, centres)
    return centres


@kernel
def _lloyd(rising, edges, steps, sums, centres):
    total = np.float64(0.0)
    sums[0] = total
    for i in range(rising.size):
        total += np.float64(rising[i])
        sums[i + 1] = total
    for _ in range(steps):
        most = -np.inf
        for level in range(centres.size):
            count = edges[level + 1] - edges[level]
            if count > 0:
                centres[level] = (sums[edges[level + 1]] - sums[edges[level]]) / np.float64(count)
            most = max(most, centres[level])
            centres[level] = most
        moved = False
        for level in range(1, centres.size):
            middle = (centres[level] + centres[level - 1]) / 2
            low, high = 0, rising.size
            while low < high:
                half = (low + high) >> 1
                if np.float64(rising[half]) < middle:
                    low = half + 1
                else:
                    high = half
            moved |= edges[level] != low
            edges[level] = low
        if not moved:
            break


@kernel
def _nearest_levels(magnitudes, middles, symbols):
    """Two middles in a pass; where they are odd in number, the last goes with one that no magnitude
    reaches."""
    for begin in range(0, symbols.size, _SOON):
        some, block = magnitudes[begin : begin + _SOON], symbols[begin : begin + _SOON]
        for j in range(0, middles.size, 2):
            middle = middles[j]
            after = middles[j + 1] if j + 1 < middles.size else np.float32(np.nan)
            for i in range(block.size):
                block[i] += np.uint8(some[i] >= middle)
                block[i] += np.uint8(some[i] >= after)


def quantise(
    vector: Reals, step: float, levels: int, noise: npt.NDArray[np.float64] | None
) -> Octets:
    symbols: Octets = pooled(vector.size, np.uint8)

    def round_part(begin: int, end: int) -> None:
        part = slice(begin, end)
        if noise is None:
            _round(vector[part], step, levels, symbols[part])
        else:
            _round_at_random(vector[part], step, levels, noise[part], symbols[part])

    if step > 0:
        each(round_part, parts(vector.size, _LONG))
    else:
        symbols.fill(levels)
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
    values = np.ascontiguousarray(vector)
    each(
        lambda begin, end: _add_scaled(total[begin:end], values[begin:end], float(scale), weight),
        parts(values.size, _LONG),
    )


@kernel
def _add_scaled(total, vector, scale, weight):
    for i in range(vector.size):
        total[i] += np.int64(nearest(np.float64(vector[i]) * scale)) * weight


def add_scaled_at(total: Ints, where: Ints, vector: Reals, scale: float, weight: int) -> None:
    values = np.ascontiguousarray(vector)
    each(
        lambda begin, end: _add_scaled_at(
            total, where[begin:end], values[begin:end], float(scale), weight
        ),
        parts(where.size, _MANY),
    )


@kernel
def _add_scaled_at(total, where, vector, scale, weight):
    size = _U(total.size)
    for i in range(vector.size):
        prefetch(total, where[_U(min(i + _AHEAD, where.size - 1))])
        at = _U(where[_U(i)])
        if at < size:
            total[at] += np.int64(nearest(np.float64(vector[i]) * scale)) * weight


def add_table_at(total: Ints, where: Ints, symbols: Octets, table: Ints) -> None:
    wide = np.resize(table, 256)
    each(
        lambda begin, end: _add_table_at(total, where[begin:end], symbols[begin:end], wide),
        parts(where.size, _MANY),
    )


@kernel
def _add_table_at(total, where, symbols, table):
    size = _U(total.size)
    for i in range(symbols.size):
        prefetch(total, where[_U(min(i + _AHEAD, where.size - 1))])
        at = _U(where[_U(i)])
        if at < size:
            total[at] += table[symbols[i]]


def add_at(vector: Reals, where: Ints, values: Reals, sign: float) -> None:
    numbers = np.ascontiguousarray(values)
    each(
        lambda begin, end: _add_at(vector, where[begin:end], numbers[begin:end], np.float32(sign)),
        parts(where.size, _MANY),
    )


@kernel
def _add_at(vector, where, values, sign):
    size = _U(vector.size)
    for i in range(values.size):
        prefetch(vector, where[_U(min(i + _AHEAD, where.size - 1))])
        at = _U(where[_U(i)])
        if at < size:
            vector[at] += np.float32(sign * values[i])
