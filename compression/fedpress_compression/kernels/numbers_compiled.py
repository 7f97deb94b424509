"""Compiled kernels for numbers: bits, buckets, gaps and groups of digits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedpress_compression.errors import DecodingError
from fedpress_compression.kernels.buffer_pool import pooled
from fedpress_compression.kernels.intrinsics import (
    kernel,
    leading_zeros,
    load64,
    store64,
    trailing_zeros,
)
from fedpress_compression.kernels.wire import GUARD, Ints, Octets, Words
from fedpress_compression.kernels.workers import each, parts

_LONG = 1 << 18
"""Words from which their lanes are worth another thread."""

_U = np.uint64
_ONE, _3, _7, _56, _63, _64 = (_U(n) for n in (1, 3, 7, 56, 63, 64))


# Bits. A word is held until it has 8 bits or more; then its whole bytes are written.


def pack(values: Words, widths: Ints) -> bytes:
    out = np.empty((int(widths.sum()) + 7) // 8 + GUARD, np.uint8)
    return out[: _pack(values, widths, out)].tobytes()


@kernel
def put(buffered, num_held, value, width, out, at):
    """Append `width` bits, 63 at most; store what is held; bits that do not fit stay."""
    buffered |= value << num_held
    store64(out, at, buffered)
    total = num_held + width
    if total < _64:
        buffered >>= total & _56
        return buffered, total & _7, at + (total >> _3)
    return value >> (_64 - num_held), total - _64, at + _U(8)


@kernel
def _pack(values, widths, out):
    buffered, num_held, at = _U(0), _U(0), _U(0)
    for i in range(values.size):
        buffered, num_held, at = put(buffered, num_held, values[i], _U(widths[i]), out, at)
    store64(out, at, buffered)
    return np.int64(at + ((num_held + _7) >> _3))


def read_fields(octets: Octets, at: int, num: int, width: int) -> Ints:
    fields = np.empty(num, np.int64)
    _read_fields(octets, at, width, fields)
    return fields


@kernel
def _read_fields(octets, start, width, fields):
    """Unchecked: the caller guarantees that the fields exist and 8 bytes follow."""
    at, mask = _U(start), (_ONE << _U(width)) - _ONE
    for i in range(fields.size):
        fields[i] = np.int64((load64(octets, at >> _3) >> (at & _7)) & mask)
        at += _U(width)


def write_octets(symbols: Octets, width: int) -> bytes:
    out = np.empty((symbols.size * width + 7) // 8 + GUARD, np.uint8)
    return out[: _write_octets(symbols, width, out)].tobytes()


@kernel
def _write_octets(symbols, width, out):
    """Eight symbols take as many bytes as one takes bits."""
    at, bits = 0, _U(width)
    for first in range(0, symbols.size, 8):
        word = _U(0)
        for i in range(min(8, symbols.size - first)):
            word |= _U(symbols[_U(first + i)]) << (_U(i) * bits)
        store64(out, at, word)
        at += width
    return (symbols.size * width + 7) >> 3


def read_octets(octets: Octets, start: int, num: int, width: int) -> Octets:
    symbols = pooled(num, np.uint8)
    _read_octets(octets, start, width, symbols)
    return symbols


@kernel
def _read_octets(octets, start, width, symbols):
    """Unchecked: the caller guarantees that the bits exist and 8 bytes follow."""
    bits, mask = _U(width), (_ONE << _U(width)) - _ONE
    for first in range(0, symbols.size, 8):
        word = load64(octets, start)
        for i in range(min(8, symbols.size - first)):
            symbols[_U(first + i)] = np.uint8((word >> (_U(i) * bits)) & mask)
        start += width


def write_raw(symbols: Octets, raw: Ints, raw_widths: Ints) -> bytes:
    out = np.empty(4 * symbols.size + GUARD, np.uint8)
    return out[: _write_raw(symbols, raw, raw_widths, out)].tobytes()


@kernel
def _write_raw(symbols, raw, raw_widths, out):
    """Raw bits are 32 at most, so that a word of 64 takes one more with up to 7 held."""
    buffered, num_held, at = _U(0), _U(0), _U(0)
    for i in range(symbols.size):
        buffered |= _U(raw[i]) << num_held
        num_held += _U(raw_widths[symbols[i]])
        store64(out, at, buffered)
        at += num_held >> _3
        buffered >>= num_held & _56
        num_held &= _7
    store64(out, at, buffered)
    return np.int64(at + ((num_held + _7) >> _3))


def read_raw(
    octets: Octets, at: int, stop: int, symbols: Octets, raw_widths: Ints
) -> tuple[Ints, int]:
    raw = pooled(symbols.size, np.int64)
    return raw, _read_raw(octets, at, stop, symbols, raw_widths, raw)


@kernel
def _read_raw(octets, start, end, symbols, raw_widths, raw):
    """Nothing is read from beyond the 8 bytes after bit `end`: where bits run out, all stops."""
    at, stop = _U(start), _U(end)
    for i in range(symbols.size):
        if at > stop:
            break
        width = _U(raw_widths[symbols[i]])
        window = load64(octets, at >> _3) >> (at & _7)
        raw[i] = np.int64(window & ((_ONE << width) - _ONE))
        at += width
    return np.int64(at)


# Buckets.


def split(values: Ints, mantissa: int) -> tuple[Octets, Ints]:
    buckets, raw = pooled(values.size, np.uint8), pooled(values.size, np.int64)
    split_into(values, mantissa, buckets, raw)
    return buckets, raw


@kernel
def split_into(values, mantissa, buckets, raw):
    m = _U(mantissa)
    for i in range(values.size):
        shifted = _U(values[i]) + (_ONE << m)
        width = _63 - leading_zeros(shifted) - m
        leading = shifted >> width
        buckets[i] = np.uint8((width << m) + leading - (_ONE << m))
        raw[i] = np.int64(shifted - (leading << width))


def join(buckets: Octets, raw: Ints, mantissa: int) -> Ints:
    values = pooled(buckets.size, np.int64)
    _join(buckets, raw, mantissa, values)
    return values


@kernel
def _join(buckets, raw, mantissa, values):
    one = np.int64(1) << mantissa
    for i in range(values.size):
        bucket = np.int64(buckets[i])
        values[i] = (((bucket & (one - 1)) + one) << (bucket >> mantissa)) - one + raw[i]


# Gaps between coordinates.


def gaps_of(positions: Ints) -> Ints:
    gaps = pooled(positions.size, np.int64)
    _gaps_of(positions, gaps)
    return gaps


@kernel
def _gaps_of(positions, gaps):
    if positions.size:
        gaps[0] = positions[0]
    for i in range(1, positions.size):
        gaps[i] = positions[i] - positions[i - 1] - 1


def others(symbols: Octets, common: int) -> Ints:
    where = pooled(symbols.size + 1, np.int64)
    return where[: _others(symbols, common, where)]


@kernel
def _others(symbols, common, where):
    """Write the positions of symbols other than `common` to `where`; returns their number."""
    count = _U(0)
    for i in range(symbols.size):
        where[count] = i
        count += _U(symbols[i] != common)
    return np.int64(count)


def positions_of(gaps: Ints) -> Ints:
    positions = pooled(gaps.size, np.int64)
    _positions_of(gaps, positions)
    return positions


@kernel
def _positions_of(gaps, positions):
    last = -1
    for i in range(gaps.size):
        last += gaps[i] + 1
        positions[i] = last


def read_rice(octets: Octets, at: int, stop: int, num: int, parameter: int) -> tuple[Ints, int]:
    positions = pooled(num, np.int64)
    unary = at + num * parameter
    count, end = _read_rice(octets, at, unary, min(stop, unary + 3 * num), parameter, positions)
    return positions[:count], end


@kernel
def _read_rice(octets, start, unary, end, parameter, positions):
    """Ones before bit `end`, a window of up to 57 bits at a time; windows begin before it."""
    low, width, mask = _U(start), _U(parameter), (_ONE << _U(parameter)) - _ONE
    at, stop, before = _U(unary), _U(end), _U(unary)
    place, last = _U(0), _U(0)
    room = _U(positions.size)
    while at < stop and place < room:
        bits = min(_U(57), stop - at)
        window = load64(octets, at >> _3) >> (at & _7)
        window &= (_ONE << bits) - _ONE
        while window and place < room:
            one = at + trailing_zeros(window)
            field = (load64(octets, low >> _3) >> (low & _7)) & mask
            last += ((one - before) << width) + field
            positions[place] = np.int64(last)
            last += _ONE
            before = one + _ONE
            low += width
            place += _ONE
            window &= window - _ONE
        at += bits
    return np.int64(place), np.int64(before)


def rice_sums(gaps: Ints, first: int, last: int) -> Ints:
    sums = np.zeros(last - first + 1, np.int64)
    _rice_sums(gaps, first, sums)
    return sums


@kernel
def _rice_sums(gaps, first, sums):
    for j in range(sums.size):
        total = 0
        for i in range(gaps.size):
            total += gaps[i] >> (first + j)
        sums[j] = total


def write_rice(gaps: Ints, parameter: int) -> bytes:
    most = gaps.size * (parameter + 1) + int(rice_sums(gaps, parameter, parameter)[0])
    out = np.empty((most + 7) // 8 + GUARD, np.uint8)
    return out[: _write_rice(gaps, parameter, out)].tobytes()


@kernel
def _write_rice(gaps, parameter, out):
    """At most 7 bits are held, so that a word takes 56 more."""
    buffered, num_held, at = _U(0), _U(0), _U(0)
    mask, width = (_ONE << _U(parameter)) - _ONE, _U(parameter)
    together = 56 // max(1, parameter)
    for first in range(0, gaps.size, together):
        last = min(gaps.size, first + together)
        fields = _U(0)
        for i in range(last - 1, first - 1, -1):
            fields = (fields << width) | (_U(gaps[_U(i)]) & mask)
        buffered |= fields << num_held
        num_held += _U(last - first) * width
        store64(out, at, buffered)
        at += num_held >> _3
        buffered >>= num_held & _56
        num_held &= _7
    for i in range(gaps.size):
        zeros = _U(gaps[i]) >> width
        while zeros > _U(32):
            buffered, num_held, at = put(buffered, num_held, _U(0), _U(32), out, at)
            zeros -= _U(32)
        buffered |= _ONE << (zeros + num_held)
        num_held += zeros + _ONE
        store64(out, at, buffered)
        at += num_held >> _3
        buffered >>= num_held & _56
        num_held &= _7
    store64(out, at, buffered)
    return np.int64(at + ((num_held + _7) >> _3))


# Several symbols in a byte.


def group(symbols: Octets, size: int, per_group: int) -> Octets:
    groups = pooled(-(-symbols.size // per_group), np.uint8)
    _group(symbols, size, per_group, groups)
    return groups


@kernel
def _group(symbols, size, per_group, groups):
    whole = symbols.size // per_group
    base = np.uint8(size)
    if per_group == 1:
        for i in range(whole):
            groups[i] = symbols[i]
    elif per_group == 2:
        for i in range(whole):
            groups[i] = np.uint8(symbols[2 * i] + np.uint8(base * symbols[2 * i + 1]))
    else:
        for i in range(whole):
            number = np.uint8(0)
            for place in range(per_group - 1, -1, -1):
                number = np.uint8(np.uint8(number * base) + symbols[per_group * i + place])
            groups[i] = number
    if whole < groups.size:
        number = np.uint8(0)
        for at in range(symbols.size - 1, whole * per_group - 1, -1):
            number = np.uint8(np.uint8(number * base) + symbols[at])
        groups[whole] = number


def ungroup(groups: Octets, size: int, per_group: int, num: int) -> Octets:
    symbols = pooled(num, np.uint8)
    if _ungroup(groups, size, per_group, symbols):
        raise DecodingError("symbols after the last are not zero")
    return symbols


@kernel
def digits_of(size, per_group, digits):
    """The symbols of every byte, eight places to each, so that a store of 8 takes them all."""
    for byte in range(256):
        rest = byte
        for place in range(per_group):
            digits[byte, place] = rest % size
            rest //= size


@kernel
def _ungroup(groups, size, per_group, symbols):
    """Return what is left over after the last symbol."""
    digits = np.zeros((256, 8), np.uint8)
    digits_of(size, per_group, digits)
    words = digits.view(np.uint64)
    at, i = 0, 0
    while at + 8 <= symbols.size and i < groups.size:
        store64(symbols, at, words[groups[i], 0])
        at += per_group
        i += 1
    over = 0
    while i < groups.size:
        for place in range(per_group):
            digit = digits[groups[i], place]
            if at < symbols.size:
                symbols[at] = digit
            else:
                over |= np.int64(digit)
            at += 1
        i += 1
    return over


# Signed numbers in lanes of a word.


def pack_lanes(values: npt.NDArray[np.signedinteger], bits: int) -> Words:
    words = pooled(-(-values.size // (64 // bits)), np.uint64)
    lanes = 64 // bits
    each(
        lambda begin, end: _pack_lanes(values[begin * lanes : end * lanes], bits, words[begin:end]),
        parts(words.size, _LONG),
    )
    return words


@kernel
def _pack_lanes(values, bits, words):
    lanes, width = 64 // bits, _U(bits)
    whole = values.size // lanes
    for i in range(words.size):
        word = _U(0)
        last = lanes if i < whole else values.size - whole * lanes
        for lane in range(last - 1, -1, -1):
            word = (word << width) + _U(np.int64(values[_U(i * lanes + lane)]))
        words[i] = word


def unpack_lanes(words: Words, bits: int, num: int) -> Ints:
    values = pooled(num, np.int64)
    lanes = 64 // bits
    each(
        lambda begin, end: _unpack_lanes(
            words[begin:end], bits, values[begin * lanes : end * lanes]
        ),
        parts(words.size, _LONG),
    )
    return values


@kernel
def _unpack_lanes(words, bits, values):
    lanes, width = 64 // bits, _U(bits)
    half, mask, raise_by = np.int64(1) << (bits - 1), (_ONE << width) - _ONE, _U(0)
    for _ in range(lanes):
        raise_by = (raise_by << width) | _U(half)
    whole = values.size // lanes
    for i in range(words.size):
        word = words[i] + raise_by
        last = lanes if i < whole else values.size - whole * lanes
        for lane in range(last):
            digit = np.int64((word >> (_U(lane) * width)) & mask) - half
            values[_U(i * lanes + lane)] = digit
