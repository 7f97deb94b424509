"""The compiled range coder: the same bytes as `range_reference`.

numba checks no bounds. Contexts of coordinates are below 64 and there is one for each coordinate;
coordinates rise below the grid's size: the callers see to both. What is read past `stop` is 0.
"""

from __future__ import annotations

import numpy as np

from fedpress_compression.errors import DecodingError
from fedpress_compression.kernels.intrinsics import kernel
from fedpress_compression.kernels.range_model import (
    BITS,
    COLUMN_ROWS,
    DECISIONS,
    FLAG_SHIFT,
    FLAG_SIZES,
    FLAG_WEIGHT,
    LEARNT,
    LEAST_CHANCE,
    LONGER,
    MOST,
    MOST_CHANCE,
    RATES,
    SETS,
    SIGN,
    VALUE_SHIFT,
    VALUE_SIZES,
    VALUE_WEIGHT,
    tables,
)
from fedpress_compression.kernels.wire import Ints, Octets

MODEL = "8174edd980fc650b"
"""The beginning of range_model.py's SHA-256. numba keeps what it compiled for as long as the text
of this file is the same, so a change of the model must change it."""

_CHANCES, _LOGITS = tables()
_CHANCES = np.clip(_CHANCES, LEAST_CHANCE, MOST_CHANCE).astype(np.int32)
_LOGITS = _LOGITS.astype(np.int16)
_U = np.uint64
_RATES = np.array(RATES, np.int64)
_FLAG_STARTS = np.append(0, np.cumsum(FLAG_SIZES)).astype(np.int64)
_START_1, _START_2, _START_3, _START_4, _START_5, _START_6 = (int(n) for n in _FLAG_STARTS[1:7])
_VALUE_STARTS = np.append(0, np.cumsum(VALUE_SIZES) * DECISIONS).astype(np.int64)
_VALUE_SIZES = np.array(VALUE_SIZES, np.int64)
_BUCKETS = np.array([min(n.bit_length(), 9) for n in range(1024)], np.int64)
_FLAG_INPUTS, _VALUE_INPUTS = len(FLAG_SIZES), len(VALUE_SIZES)

_LOW, _RANGE, _AT, _STOP, _OVER = range(5)
"""The coder's state: the interval's beginning, or how far the code lies above it; its width; the
next byte; the byte not to go to; whether an encoder would have had to."""
_HALF = 1 << 31

_BALANCE, _LAST = 1, 2
"""A history: the size of the last magnitude, the balance of the signs, the last sign."""


def encode_flags(
    positions: Ints, size: int, matrices: Ints, contexts: Octets, at_most: int
) -> bytes | None:
    flags = np.zeros(size, np.uint8)
    flags[positions] = 1
    octets = np.empty(at_most, np.uint8)
    end = _flags(flags, positions.size, matrices, contexts, octets, 0, at_most, False)
    return octets[:end].tobytes() if end >= 0 else None


def decode_flags(
    octets: Octets, at: int, stop: int, num: int, size: int, matrices: Ints, contexts: Octets
) -> tuple[Ints, int]:
    flags = np.zeros(size, np.uint8)
    end = _flags(flags, num, matrices, contexts, octets, at, stop, True)
    if end < 0:
        raise DecodingError("a range-coded string with a wrong end")
    return np.flatnonzero(flags), end


def encode_values(
    magnitudes: Ints,
    signs: Octets,
    kind: int,
    most: int,
    where: Ints,
    matrices: Ints,
    contexts: Octets,
    at_most: int,
) -> bytes | None:
    octets = np.empty(at_most, np.uint8)
    end = _values(
        magnitudes, signs, kind, most, where, matrices, contexts, octets, 0, at_most, False
    )
    return octets[:end].tobytes() if end >= 0 else None


def decode_values(
    octets: Octets,
    at: int,
    stop: int,
    kind: int,
    most: int,
    where: Ints,
    matrices: Ints,
    contexts: Octets,
) -> tuple[Ints, Octets, int]:
    magnitudes = np.zeros(where.size, np.int64)
    signs = np.zeros(where.size, np.uint8)
    end = _values(magnitudes, signs, kind, most, where, matrices, contexts, octets, at, stop, True)
    if end < 0:
        raise DecodingError("a range-coded string with a wrong end")
    return magnitudes, signs, end


@kernel
def _next(coder, octets):
    """The next input byte, or 0 after the end."""
    at = coder[_AT]
    coder[_AT] = at + 1
    return np.int64(octets[at]) if at < coder[_STOP] else np.int64(0)


@kernel
def _put(coder, octets, byte):
    at = coder[_AT]
    if at >= coder[_STOP]:
        coder[_OVER] = 1
    else:
        octets[at] = byte
        coder[_AT] = at + 1


@kernel
def _carry(coder, octets):
    """Add 1 to the number that is written."""
    at = coder[_AT] - 1
    while at >= 0 and octets[at] == 255:
        octets[at] = 0
        at -= 1
    if at >= 0:
        octets[at] += 1


@kernel
def _begin(coder, octets, at, stop, decoding):
    coder[_LOW], coder[_RANGE], coder[_AT], coder[_STOP], coder[_OVER] = (
        0,
        (1 << 32) - 1,
        at,
        stop,
        0,
    )
    if decoding:
        for _ in range(4):
            coder[_LOW] = coder[_LOW] << 8 | _next(coder, octets)


@kernel
def _bit(coder, octets, chance, bit, decoding):
    """Code `bit`, or find it; `chance` is that of a 1, in 1/65536."""
    part = coder[_RANGE] * chance >> 16
    if decoding:
        bit = np.int64(1 if coder[_LOW] < part else 0)
    if bit:
        coder[_RANGE] = part
    else:
        coder[_LOW] += -part if decoding else part
        coder[_RANGE] -= part
    if coder[_RANGE] < 1 << 24:
        _widen(coder, octets, decoding)
    return bit


@kernel
def _widen(coder, octets, decoding):
    """Shift out the bytes that a narrow interval has determined."""
    while coder[_RANGE] < 1 << 24:
        coder[_RANGE] <<= 8
        if decoding:
            coder[_LOW] = coder[_LOW] << 8 | _next(coder, octets)
        else:
            if coder[_LOW] >> 32:
                _carry(coder, octets)
            _put(coder, octets, coder[_LOW] >> 24 & 255)
            coder[_LOW] = coder[_LOW] << 8 & (1 << 32) - 1


@kernel
def _finish(coder, octets, decoding):
    """The end of the string, or -1 where it does not fit or is not as it should be."""
    num_bytes = 1 if coder[_RANGE] >= 1 << 25 else 2
    unit = 1 << 32 - 8 * num_bytes
    if decoding:
        end = coder[_AT] - 4 + num_bytes
        # What was read after the end must not matter.
        first = coder[_LOW]
        for place in range(4 - num_bytes):
            at = end + place
            if at < coder[_STOP]:
                first -= np.int64(octets[at]) << 8 * (3 - num_bytes - place)
        return end if end <= coder[_STOP] and first >= 0 and first + unit <= coder[_RANGE] else -1
    if coder[_LOW] >> 32:
        _carry(coder, octets)
    low = coder[_LOW] & (1 << 32) - 1
    rounded = (low + unit - 1) // unit * unit
    if rounded >> 32:
        _carry(coder, octets)
    for place in range(num_bytes):
        _put(coder, octets, rounded >> 24 - 8 * place & 255)
    return -1 if coder[_OVER] else coder[_AT]


@kernel
def _learn(cells, cell, bit):
    """Move an estimate towards `bit`, at first fast."""
    before = cells[_U(cell)]
    seen = before & 255
    chance = before >> 8
    chance += ((bit << 32) - chance) * _RATES[_U(seen)] >> 16
    chance = min(max(chance, 1 << 16), (1 << 32) - (1 << 16))
    cells[_U(cell)] = chance << 8 | min(seen + 1, LEARNT)


@kernel
def _logit(cells, cell):
    return np.int64(_LOGITS[_U(cells[_U(cell)] >> 24)])


@kernel
def _chance(logit):
    """As it is coded, in 1/65536."""
    return np.int64(_CHANCES[_U(min(max(logit, -MOST), MOST) + MOST)])


@kernel
def _mix(cells, used, weights, first, num, logits, base):
    """The chance of a 1 by the estimates `used`, mixed under the weights from `first` on."""
    total = np.int64(0)
    for k in range(num):
        logits[_U(k)] = _logit(cells, used[_U(k)]) - base
        total += weights[_U(first + k)] * logits[_U(k)]
    return _chance(base + (total >> 16))


@kernel
def _adapt(cells, used, weights, first, num, logits, chance, bit, shift):
    error = (bit << 16) - chance
    for k in range(num):
        weights[_U(first + k)] += logits[_U(k)] * error + (1 << shift - 1) >> shift
        _learn(cells, used[_U(k)], bit)


@kernel
def _bits(number):
    count = np.int64(0)
    while number:
        number >>= 1
        count += 1
    return count


@kernel
def _moved(weight, logit, error):
    return weight + (logit * error + (1 << FLAG_SHIFT - 1) >> FLAG_SHIFT)


@kernel
def _flags(flags, num, matrices, contexts, octets, at, stop, decoding):
    """Code a flag for each coordinate, until `num` of them are 1; see SPEC-coding.md, Flags.

    Everything is in variables of its own, and what follows a flag is written once for a 0 and once
    for a 1: most flags are foreseen, so the next is begun before this one is known.
    """
    coder = np.empty(5, np.int64)
    _begin(coder, octets, at, stop, decoding)
    density = (num << 32) // flags.size
    plain = max(density, 1 << 16)
    base, start = np.int64(_LOGITS[plain >> 16]), density >> 16
    cells = np.empty(_FLAG_STARTS[_FLAG_INPUTS], np.int64)
    for k in range(_FLAG_INPUTS):
        for cell in range(_FLAG_STARTS[k], _FLAG_STARTS[k + 1]):
            cells[cell] = (plain if 1 <= k <= 3 else _HALF) << 8 | 1
    w0 = w1 = w2 = w3 = w4 = w5 = w6 = np.int64(FLAG_WEIGHT)
    widest = 0
    for t in range(matrices.shape[0]):
        widest = max(widest, matrices[t, 1])
    columns = np.empty(widest, np.int64)
    above = np.zeros(widest + 2, np.uint8)
    here = np.zeros(widest + 2, np.uint8)
    count = np.int64(0)
    i = _U(0)
    low, wide = coder[_LOW], coder[_RANGE]
    for t in range(matrices.shape[0]):
        height, width = matrices[t, 0], matrices[t, 1]
        columns[:width] = start
        above[:] = 0
        for row in range(height):
            here[:] = 0
            dense = start
            ones = np.int64(0)
            before = np.int64(0)
            rate = _RATES[min(row, COLUMN_ROWS)]
            for column in range(width):
                if count == num:
                    coder[_LOW], coder[_RANGE] = low, wide
                    return _finish(coder, octets, decoding)
                c = _U(column)
                context = np.int64(contexts[i]) & 15 if contexts.size else np.int64(0)
                thick = columns[c]
                a = _BUCKETS[_U(dense >> 6)]
                b = _BUCKETS[_U(thick >> 6)]
                near = before | np.int64(above[c + _U(1)]) << 2
                near |= np.int64(above[c] | above[c + _U(2)]) << 3
                u0 = context * 16 + min(t, 15)
                u1 = _START_1 + a * 16 + min(ones, 15)
                u2 = _START_2 + b * 16 + min(row, 15)
                u3 = _START_3 + near * 10 + (a + b >> 1)
                u4 = _START_4 + (context * 10 + a) * 10 + b
                u5 = _START_5 + context * 10 + a
                u6 = _START_6 + context * 10 + b
                l0, l1 = _logit(cells, u0) - base, _logit(cells, u1) - base
                l2, l3 = _logit(cells, u2) - base, _logit(cells, u3) - base
                l4, l5 = _logit(cells, u4) - base, _logit(cells, u5) - base
                l6 = _logit(cells, u6) - base
                mixed = w0 * l0 + w1 * l1 + w2 * l2 + w3 * l3 + w4 * l4 + w5 * l5 + w6 * l6
                chance = _chance(base + (mixed >> 16))
                part = wide * chance >> 16
                if low < part if decoding else flags[i] != 0:
                    wide = part
                    error = 65536 - chance
                    if decoding:
                        flags[i] = 1
                    for cell in (u0, u1, u2, u3, u4, u5, u6):
                        _learn(cells, cell, 1)
                    dense += 65536 - dense >> 4
                    columns[c] = thick + ((65536 - thick) * rate >> 16)
                    before = (before << 1 | 1) & 3
                    here[c + _U(1)] = 1
                    ones += 1
                    count += 1
                else:
                    low += -part if decoding else part
                    wide -= part
                    error = -chance
                    for cell in (u0, u1, u2, u3, u4, u5, u6):
                        _learn(cells, cell, 0)
                    dense += -dense >> 4
                    columns[c] = thick + (-thick * rate >> 16)
                    before = before << 1 & 3
                w0, w1 = _moved(w0, l0, error), _moved(w1, l1, error)
                w2, w3 = _moved(w2, l2, error), _moved(w3, l3, error)
                w4, w5 = _moved(w4, l4, error), _moved(w5, l5, error)
                w6 = _moved(w6, l6, error)
                if wide < 1 << 24:
                    coder[_LOW], coder[_RANGE] = low, wide
                    _widen(coder, octets, decoding)
                    low, wide = coder[_LOW], coder[_RANGE]
                i += _U(1)
            above, here = here, above
    coder[_LOW], coder[_RANGE] = low, wide
    return _finish(coder, octets, decoding) if count == num else -1


@kernel
def _values(magnitudes, signs, kind, most, where, matrices, contexts, octets, at, stop, decoding):
    """Code the values at the coordinates `where`; see SPEC-coding.md, Values."""
    coder = np.empty(5, np.int64)
    _begin(coder, octets, at, stop, decoding)
    cells = np.full(_VALUE_STARTS[_VALUE_INPUTS], _HALF << 8)
    weights = np.full(SETS * _VALUE_INPUTS, VALUE_WEIGHT)
    used = np.empty(_VALUE_INPUTS, np.int64)
    logits = np.empty(_VALUE_INPUTS, np.int64)
    inputs = np.empty(_VALUE_INPUTS, np.int64)
    widest = np.int64(1)
    for t in range(matrices.shape[0]):
        widest = max(widest, matrices[t, 1])
    across = np.zeros((widest, 3), np.int64)
    along = np.zeros(3, np.int64)
    before = np.zeros(3, np.int64)
    before[_BALANCE] = 3
    longest = _bits(most + 1) - 1
    t, row = -1, np.int64(-1)
    first, last, width = np.int64(0), np.int64(0), np.int64(1)
    for index in range(where.size):
        place = where[index]
        while place >= last:
            t += 1
            first, last, width = last, last + matrices[t, 0] * matrices[t, 1], matrices[t, 1]
            row = -1
            for column in range(width):
                across[column, 0], across[column, _BALANCE], across[column, _LAST] = 0, 3, 0
        if (place - first) // width != row:
            row = (place - first) // width
            along[0], along[_BALANCE], along[_LAST] = 0, 3, 0
        above = across[(place - first) % width]
        context = np.int64(contexts[place]) if contexts.size else np.int64(0)
        inputs[0] = along[0] * 8 + before[0]
        inputs[1] = above[0] * 8 + before[0]
        inputs[2] = context & 15
        inputs[3] = 0
        inputs[4] = (along[0] * 8 + above[0]) * 8 + before[0]
        number = magnitudes[index] + 1
        length, due = np.int64(0), _bits(number) - 1
        while length < longest:
            more = np.int64(1 if length < due else 0)
            mixed = 1 + min(length, 7)
            if not _decide(
                LONGER + length,
                mixed,
                more,
                inputs,
                cells,
                used,
                weights,
                logits,
                coder,
                octets,
                decoding,
            ):
                break
            length += 1
        node = np.int64(1)
        for rest in range(length - 1, -1, -1):
            bit = number >> rest & 1
            if node < 8:
                decision = BITS + 7 * (min(length, 16) - 1) + node - 1
                bit = _decide(
                    decision, 9, bit, inputs, cells, used, weights, logits, coder, octets, decoding
                )
            else:
                bit = _bit(coder, octets, 1 << 15, bit, decoding)
            node = node << 1 | bit
        size = min(length + 1, 7)
        along[0] = above[0] = before[0] = size
        if decoding:
            magnitudes[index] = node - 1
        if kind == 0 or (kind == 1 and node == 1):
            continue
        inputs[0] = along[_BALANCE] * 3 + along[_LAST]
        inputs[1] = above[_BALANCE] * 3 + above[_LAST]
        inputs[2] = context
        inputs[3] = (along[_LAST] * 3 + above[_LAST]) * 3 + before[_LAST]
        inputs[4] = (along[_BALANCE] * 7 + above[_BALANCE]) * 4 + (context >> 4)
        sign = _decide(
            SIGN,
            0,
            np.int64(signs[index]),
            inputs,
            cells,
            used,
            weights,
            logits,
            coder,
            octets,
            decoding,
        )
        if decoding:
            signs[index] = sign
        for history in (along, above, before):
            balance = history[_BALANCE]
            history[_BALANCE] = max(balance - 1, 0) if sign else min(balance + 1, 6)
            history[_LAST] = 1 + sign
    return _finish(coder, octets, decoding)


@kernel
def _decide(decision, mixed, bit, contexts, cells, used, weights, logits, coder, octets, decoding):
    """Code one of the decisions that make up a value."""
    for k in range(_VALUE_INPUTS):
        used[k] = _VALUE_STARTS[k] + decision * _VALUE_SIZES[k] + contexts[k]
    first = mixed * _VALUE_INPUTS
    chance = _mix(cells, used, weights, first, _VALUE_INPUTS, logits, 0)
    bit = _bit(coder, octets, chance, bit, decoding)
    _adapt(cells, used, weights, first, _VALUE_INPUTS, logits, chance, bit, VALUE_SHIFT)
    return bit
