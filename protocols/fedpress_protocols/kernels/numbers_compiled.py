"""Numbers as bits, as buckets, as gaps and as groups of digits, as machine code."""

from __future__ import annotations

import numpy as np

from fedpress_protocols.errors import DecodingError
from fedpress_protocols.kernels.machine import (
    kernel,
    leading_zeros,
    load64,
    store64,
    trailing_zeros,
)
from fedpress_protocols.kernels.wire import GUARD, Ints, Octets, Words

_U = np.uint64
_ONE, _3, _7, _56, _63, _64 = (_U(n) for n in (1, 3, 7, 56, 63, 64))


# Bits. A word is held until it has 8 bits or more; then its whole bytes are written.


def pack(values: Words, widths: Ints) -> bytes:
    out = np.empty((int(widths.sum()) + 7) // 8 + GUARD, np.uint8)
    return out[: _pack(values, widths, out)].tobytes()


@kernel
def _put(held, num_held, value, width, out, at):
    """Append `width` bits, 63 at most; store what is held; bits that do not fit stay."""
    held |= value << num_held
    store64(out, at, held)
    total = num_held + width
    if total < _64:
        held >>= total & _56
        return held, total & _7, at + (total >> _3)
    return value >> (_64 - num_held), total - _64, at + _U(8)


@kernel
def _pack(values, widths, out):
    held, num_held, at = _U(0), _U(0), _U(0)
    for i in range(values.size):
        held, num_held, at = _put(held, num_held, values[i], _U(widths[i]), out, at)
    store64(out, at, held)
    return np.int64(at + ((num_held + _7) >> _3))


def read_fields(octets: Octets, at: int, num: int, width: int) -> Ints:
    found = np.empty(num, np.int64)
    _read_fields(octets, at, width, found)
    return found


@kernel
def _read_fields(octets, start, width, found):
    """The caller has seen that the fields are there, and that 8 bytes follow."""
    at, mask = _U(start), (_ONE << _U(width)) - _ONE
    for i in range(found.size):
        found[i] = np.int64((load64(octets, at >> _3) >> (at & _7)) & mask)
        at += _U(width)


def write_octets(symbols: Octets, width: int) -> bytes:
    out = np.empty((symbols.size * width + 7) // 8 + GUARD, np.uint8)
    return out[: _write_octets(symbols, width, out)].tobytes()


@kernel
def _write_octets(symbols, width, out):
    """Eight symbols take as many bytes as one takes bits."""
    at, bits = 0, _U(width)
    for first in range(0, symbols.size, 8):
        held = _U(0)
        for i in range(min(8, symbols.size - first)):
            held |= _U(symbols[_U(first + i)]) << (_U(i) * bits)
        store64(out, at, held)
        at += width
    return (symbols.size * width + 7) >> 3


def read_octets(octets: Octets, start: int, num: int, width: int) -> Octets:
    symbols = np.empty(num, np.uint8)
    _read_octets(octets, start, width, symbols)
    return symbols


@kernel
def _read_octets(octets, start, width, symbols):
    """The caller has seen that the bits are there, and that 8 bytes follow."""
    bits, mask = _U(width), (_ONE << _U(width)) - _ONE
    for first in range(0, symbols.size, 8):
        held = load64(octets, start)
        for i in range(min(8, symbols.size - first)):
            symbols[_U(first + i)] = np.uint8((held >> (_U(i) * bits)) & mask)
        start += width


def write_raw(symbols: Octets, raw: Ints, raw_widths: Ints) -> bytes:
    out = np.empty(4 * symbols.size + GUARD, np.uint8)
    return out[: _write_raw(symbols, raw, raw_widths, out)].tobytes()


@kernel
def _write_raw(symbols, raw, raw_widths, out):
    """Raw bits are 32 at most, so that a word of 64 takes one more with up to 7 held."""
    held, num_held, at = _U(0), _U(0), _U(0)
    for i in range(symbols.size):
        held |= _U(raw[i]) << num_held
        num_held += _U(raw_widths[symbols[i]])
        store64(out, at, held)
        at += num_held >> _3
        held >>= num_held & _56
        num_held &= _7
    store64(out, at, held)
    return np.int64(at + ((num_held + _7) >> _3))


def read_raw(
    octets: Octets, at: int, stop: int, symbols: Octets, raw_widths: Ints
) -> tuple[Ints, int]:
    raw = np.empty(symbols.size, np.int64)
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
    buckets, raw = np.empty(values.size, np.uint8), np.empty(values.size, np.int64)
    _split(values, mantissa, buckets, raw)
    return buckets, raw


@kernel
def _split(values, mantissa, buckets, raw):
    m = _U(mantissa)
    for i in range(values.size):
        shifted = _U(values[i]) + (_ONE << m)
        width = _63 - leading_zeros(shifted) - m
        leading = shifted >> width
        buckets[i] = np.uint8((width << m) + leading - (_ONE << m))
        raw[i] = np.int64(shifted - (leading << width))


def join(buckets: Octets, raw: Ints, mantissa: int) -> Ints:
    values = np.empty(buckets.size, np.int64)
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
    gaps = np.empty(positions.size, np.int64)
    _gaps_of(positions, gaps)
    return gaps


@kernel
def _gaps_of(positions, gaps):
    if positions.size:
        gaps[0] = positions[0]
    for i in range(1, positions.size):
        gaps[i] = positions[i] - positions[i - 1] - 1


def positions_of(gaps: Ints) -> Ints:
    positions = np.empty(gaps.size, np.int64)
    _positions_of(gaps, positions)
    return positions


@kernel
def _positions_of(gaps, positions):
    last = -1
    for i in range(gaps.size):
        last += gaps[i] + 1
        positions[i] = last


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
    held, num_held, at = _U(0), _U(0), _U(0)
    mask, width = (_ONE << _U(parameter)) - _ONE, _U(parameter)
    for i in range(gaps.size):
        held, num_held, at = _put(held, num_held, _U(gaps[i]) & mask, width, out, at)
    for i in range(gaps.size):
        zeros = _U(gaps[i]) >> width
        while zeros > _U(32):
            held, num_held, at = _put(held, num_held, _U(0), _U(32), out, at)
            zeros -= _U(32)
        held, num_held, at = _put(held, num_held, _ONE << zeros, zeros + _ONE, out, at)
    store64(out, at, held)
    return np.int64(at + ((num_held + _7) >> _3))


def read_unary(octets: Octets, at: int, stop: int, num: int) -> tuple[Ints, int]:
    found = np.empty(num, np.int64)
    count, end = _read_unary(octets, at, min(stop, at + 3 * num), found)
    return found[:count], end


@kernel
def _read_unary(octets, start, end, found):
    """Ones before bit `end`, a window of up to 57 bits at a time; windows begin before it."""
    count, last, at = 0, start - 1, start
    while at < end and count < found.size:
        bits = min(57, end - at)
        window = load64(octets, _U(at) >> _3) >> (_U(at) & _7)
        window &= (_ONE << _U(bits)) - _ONE
        while window and count < found.size:
            one = at + np.int64(trailing_zeros(window))
            found[count] = one - last - 1
            last = one
            count += 1
            window &= window - _ONE
        at += bits
    return count, last + 1


# Several symbols in a byte.


def group(symbols: Octets, size: int, per_group: int) -> Octets:
    groups = np.empty(-(-symbols.size // per_group), np.uint8)
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
    symbols = np.empty(num, np.uint8)
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
    """What is left over after the last symbol."""
    digits = np.zeros((256, 8), np.uint8)
    digits_of(size, per_group, digits)
    words = digits.reshape(2048).view(np.uint64)
    at, i = 0, 0
    while at + 8 <= symbols.size and i < groups.size:
        store64(symbols, at, words[groups[i]])
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
