"""Huffman codes as machine code: the same lengths, tables and bytes as `huffman_reference`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fedpress_protocols.errors import DecodingError
from fedpress_protocols.kernels import huffman_reference
from fedpress_protocols.kernels.machine import (
    kernel,
    leading_zeros,
    load64,
    store16,
    store64,
    trailing_zeros,
)
from fedpress_protocols.kernels.numbers_compiled import digits_of
from fedpress_protocols.kernels.scratch import scratch
from fedpress_protocols.kernels.wire import (
    ALONE,
    BLOCK,
    FIRST_GUESS,
    GUARD,
    MAX_LENGTH,
    MAX_TABLES,
    ROUNDS,
    STREAMS,
    Ints,
    Octets,
)

_WINDOW = 1 << MAX_LENGTH
_IMPOSSIBLE = 1 << 17
_PAIRS_PAY = 6.5
"""Mean bits of a code below which two symbols are looked up at once."""
_RUNS_ON, _PADDED, _LEFT_OVER = 1, 2, 3

_U = np.uint64
_MASK, _BYTE, _TOP = _U(_WINDOW - 1), _U(255), _U(1 << 63)
_REFILL = _U(4 * MAX_LENGTH)
_1, _2, _3, _7, _8, _16, _24, _32, _63, _64 = (_U(n) for n in (1, 2, 3, 7, 8, 16, 24, 32, 63, 64))


# Codes.


def code_lengths(histogram: Ints, limit: int = MAX_LENGTH) -> Octets:
    lengths = np.empty(histogram.size, np.uint8)
    _code_lengths(np.ascontiguousarray(histogram, np.int64), limit, lengths)
    return lengths


@kernel
def _sort(keys, num):
    """Shell sort of the first `num` uint64, with Ciura's gaps."""
    for gap in (132, 57, 23, 10, 4, 1):
        for i in range(gap, num):
            key = keys[i]
            j = i
            while j >= gap and keys[j - gap] > key:
                keys[j] = keys[j - gap]
                j -= gap
            keys[j] = key


@kernel
def _code_lengths(histogram, limit, lengths):
    """Package-merge; see the reference. Symbols come before pairs of the same weight."""
    keys = np.empty(histogram.size, np.uint64)
    used = 0
    for symbol in range(histogram.size):
        lengths[symbol] = 0
        if histogram[symbol] > 0:
            keys[used] = (_U(histogram[symbol]) << _8) | _U(symbol)
            used += 1
    if used <= 1:
        if used == 1:
            lengths[keys[0] & _BYTE] = ALONE
        return
    _sort(keys, used)
    below = np.empty(2 * used, np.int64)
    merged = np.empty(2 * used, np.int64)
    pairs_among = np.empty((limit, 2 * used), np.int16)
    num = 0
    for level in range(limit):
        num_pairs = num >> 1
        leaf = pair = 0
        while leaf < used or pair < num_pairs:
            weight = below[2 * pair] + below[2 * pair + 1] if pair < num_pairs else -1
            own = np.int64(keys[leaf] >> _8) if leaf < used else -1
            if weight < 0 or (own >= 0 and own <= weight):
                merged[leaf + pair] = own
                leaf += 1
            else:
                merged[leaf + pair] = weight
                pair += 1
            pairs_among[level, leaf + pair - 1] = pair
        num = leaf + pair
        below, merged = merged, below
    lightest = 2 * used - 2
    for level in range(limit - 1, -1, -1):
        num_pairs = pairs_among[level, lightest - 1] if lightest else 0
        for leaf in range(lightest - num_pairs):
            lengths[keys[leaf] & _BYTE] += 1
        lightest = 2 * num_pairs


@kernel
def _codes(lengths, coded):
    """For each symbol its code, first bit lowest, in the uppermost bits; in the lowest its bits."""
    code = 0
    for length in range(1, MAX_LENGTH + 1):
        for symbol in range(lengths.size):
            if lengths[symbol] == length:
                turned, rest = 0, code
                for _ in range(length):
                    turned = (turned << 1) | (rest & 1)
                    rest >>= 1
                coded[symbol] = (_U(turned) << _U(64 - length)) | _U(length)
                code += 1
        code <<= 1


@kernel
def _lookup(lengths, singles):
    """For each window the bits of the code it begins with; above them, from 8 up, its symbol."""
    coded = np.zeros(lengths.size, np.uint64)
    _codes(lengths, coded)
    for symbol in range(lengths.size):
        if lengths[symbol] == ALONE:
            singles[:] = np.uint16(symbol << 8)
        elif lengths[symbol]:
            entry = np.uint16((symbol << 8) | np.int64(lengths[symbol]))
            step = 1 << np.int64(lengths[symbol])
            code = np.int64(coded[symbol] >> _U(64 - np.int64(lengths[symbol])))
            for window in range(code, _WINDOW, step):
                singles[window] = entry


@kernel
def _lookup_pairs(singles, pairs):
    """For each window the bits of two codes, or of one; from 8 up their symbols; from 24 up how
    many they are."""
    for window in range(_WINDOW):
        first = np.int64(singles[window])
        bits = first & 255
        second = np.int64(singles[window >> bits])
        both = bits + (second & 255)
        if both <= MAX_LENGTH:
            pairs[window] = both | (first & 0xFF00) | ((second & 0xFF00) << 8) | (2 << 24)
        else:
            pairs[window] = first | (1 << 24)


@kernel
def _mean_bits(lengths):
    """Of a code, for the symbols that it is best for."""
    total = 0.0
    for symbol in range(lengths.size):
        if 0 < lengths[symbol] <= MAX_LENGTH:
            total += np.float64(lengths[symbol]) / np.float64(1 << np.int64(lengths[symbol]))
    return total


@kernel
def _table_bits(lengths):
    """How many bits describe a code; SPEC-coding.md, Prefix codes."""
    used, only = 0, 0
    for symbol in range(lengths.size):
        if lengths[symbol]:
            used += 1
    if used == 1:
        while (1 << only) < lengths.size:
            only += 1
        return 1 + only
    bits, before, length = 1, -1, FIRST_GUESS
    for symbol in range(lengths.size):
        if not lengths[symbol]:
            continue
        run = symbol - before - 1
        if run:
            bits += 5
            while run > 1:
                bits += 2
                run >>= 1
        step = abs(np.int64(lengths[symbol]) - length)
        bits += (1, 3, 4)[step] if step <= 2 else 8
        before, length = symbol, np.int64(lengths[symbol])
    return bits


def read_table(octets: Octets, at: int, stop: int, alphabet: int) -> tuple[Octets, int]:
    lengths = np.zeros(alphabet, np.uint8)
    end = _read_table(octets, at, stop, lengths)
    if end < 0:  # what is wrong with it, the reference says
        return huffman_reference.read_table(octets, at, stop, alphabet)
    return lengths, end


@kernel
def _read_table(octets, start, stop, lengths):
    """The bit where the table ends, or -1. An item takes 4 + 4 bits or, of a run, 4 + 15."""
    at, alphabet = _U(start), lengths.size
    end = _U(stop)
    window = load64(octets, at >> _3) >> (at & _7)
    if window & _1:
        width = 0
        while (1 << width) < alphabet:
            width += 1
        symbol = np.int64((window >> _1) & ((_1 << _U(width)) - _1))
        if symbol >= alphabet or start + 1 + width > stop:
            return -1
        lengths[symbol] = ALONE
        return start + 1 + width
    at += _1
    symbol, length, room, after_run = 0, FIRST_GUESS, _WINDOW, False
    while room > 0:
        if at >= end:
            return -1
        window = load64(octets, at >> _3) >> (at & _7)
        step = np.int64(trailing_zeros(~window | _U(16)))
        if step == 3:
            window >>= _U(4)
            zeros = trailing_zeros(window | _U(256))
            if after_run or zeros > _7:
                return -1
            symbol += np.int64(_1 << zeros | ((window >> (zeros + _1)) & ((_1 << zeros) - _1)))
            at += _U(5) + zeros + zeros
            after_run = True
            continue
        if symbol >= alphabet:
            return -1
        if step == 4:
            given = np.int64((window >> _U(4)) & _U(15))
            if abs(given - length) <= 2:
                return -1
            length = given
            at += _8
        elif step:
            length += -step if (window >> _U(step + 1)) & _1 else step
            at += _U(step + 2)
        else:
            at += _1
        if not 1 <= length <= MAX_LENGTH:
            return -1
        lengths[symbol] = length
        room -= _WINDOW >> length
        symbol, after_run = symbol + 1, False
    return np.int64(at) if room == 0 and at <= end else -1


# Blocks and the tables that they share.


def count_streams(symbols: Octets, alphabet: int) -> Ints:
    num_blocks = -(-symbols.size // BLOCK)
    histograms: npt.NDArray[Any] = np.empty((num_blocks, STREAMS, alphabet), np.int32)
    _count_streams(symbols, histograms)
    return histograms


@kernel
def _count(symbols, begin, end, counts, histogram):
    """Four counters for each symbol, so that runs of one do not wait for themselves."""
    counts[:] = 0
    at = begin
    while at + 8 <= end:
        word = load64(symbols, at)
        counts[0, word & _BYTE] += 1
        counts[1, (word >> _8) & _BYTE] += 1
        counts[2, (word >> _16) & _BYTE] += 1
        counts[3, (word >> _24) & _BYTE] += 1
        word >>= _32
        counts[0, word & _BYTE] += 1
        counts[1, (word >> _8) & _BYTE] += 1
        counts[2, (word >> _16) & _BYTE] += 1
        counts[3, word >> _24] += 1
        at += 8
    while at < end:
        counts[0, symbols[at]] += 1
        at += 1
    for symbol in range(histogram.size):
        histogram[symbol] = (
            counts[0, symbol] + counts[1, symbol] + counts[2, symbol] + counts[3, symbol]
        )


@kernel
def _count_streams(symbols, histograms):
    counts = np.empty((4, 256), np.int32)
    for block in range(histograms.shape[0]):
        begin = block * BLOCK
        size = min(BLOCK, symbols.size - begin)
        for stream in range(STREAMS):
            first, last = size * stream // STREAMS, size * (stream + 1) // STREAMS
            _count(symbols, begin + first, begin + last, counts, histograms[block, stream])


def stream_bytes(histograms: Ints, lengths: Octets, of_block: Ints) -> Ints:
    found = np.empty(histograms.shape[:2], np.int64)
    _stream_bytes(histograms.astype(np.int32, copy=False), lengths, of_block, found)
    return found


@kernel
def _stream_bytes(histograms, lengths, of_block, found):
    bits = np.empty(lengths.shape[1], np.int32)
    total = 0
    at = -1
    for block in range(histograms.shape[0]):
        if of_block[block] != at:
            at = of_block[block]
            for symbol in range(bits.size):
                length = np.int64(lengths[at, symbol])
                bits[symbol] = 0 if length == ALONE else length
        for stream in range(STREAMS):
            sum_of_bits = np.int32(0)
            for symbol in range(bits.size):
                sum_of_bits = np.int32(
                    sum_of_bits + np.int32(histograms[block, stream, symbol] * bits[symbol])
                )
            found[block, stream] = (np.int64(sum_of_bits) + 7) >> 3
            total += found[block, stream]
    return total


def choose_tables(histograms: Ints, at_most: int = MAX_TABLES) -> tuple[Octets, Ints]:
    lengths = np.zeros((MAX_TABLES, histograms.shape[2]), np.uint8)
    of_block = np.zeros(histograms.shape[0], np.int64)
    counts = histograms.astype(np.int32, copy=False)
    num_tables = _choose_tables(counts, at_most, lengths, of_block)
    return lengths[:num_tables], of_block


@kernel
def _grouped(of_blocks, of_block, lengths):
    """Number the groups in use anew, without gaps, and make each its code; how many there are."""
    num_blocks, alphabet = of_blocks.shape
    sums = np.zeros((MAX_TABLES, alphabet), np.int64)
    filled = np.zeros(MAX_TABLES, np.int64)
    for block in range(num_blocks):
        table = of_block[block]
        filled[table] += 1
        for symbol in range(alphabet):
            sums[table, symbol] += of_blocks[block, symbol]
    num_tables = 0
    for table in range(MAX_TABLES):
        if filled[table]:
            filled[table] = num_tables
            _code_lengths(sums[table], MAX_LENGTH, lengths[num_tables])
            num_tables += 1
    for block in range(num_blocks):
        of_block[block] = filled[of_block[block]]
    return num_tables


@kernel
def _cheapest(of_blocks, lengths, num_tables, of_block):
    """Each block goes to the table that codes it shortest; whether any moved."""
    num_blocks, alphabet = of_blocks.shape
    costs = np.empty((MAX_TABLES, alphabet), np.int32)
    for table in range(num_tables):
        for symbol in range(alphabet):
            length = np.int32(lengths[table, symbol])
            cost = np.int32(0) if length == ALONE else length
            costs[table, symbol] = cost if length else np.int32(_IMPOSSIBLE)
    moved = False
    for block in range(num_blocks):
        best, fewest = 0, np.int32(0x7FFFFFFF)
        for table in range(num_tables):
            bits = np.int32(0)
            for symbol in range(alphabet):
                bits = np.int32(bits + np.int32(of_blocks[block, symbol] * costs[table, symbol]))
            if bits < fewest:
                best, fewest = table, bits
        moved |= of_block[block] != best
        of_block[block] = best
    return moved


@kernel
def _size(histograms, lengths, num_tables, of_block, found):
    bits = 2
    for table in range(num_tables):
        bits += _table_bits(lengths[table])
    return ((bits + 7) >> 3) + _stream_bytes(histograms, lengths, of_block, found)


@kernel
def _choose_tables(histograms, at_most, best_lengths, best_of_block):
    num_blocks, _, alphabet = histograms.shape
    of_blocks = np.empty((num_blocks, alphabet), np.int32)
    for block in range(num_blocks):
        for symbol in range(alphabet):
            total = np.int64(0)
            for stream in range(STREAMS):
                total += histograms[block, stream, symbol]
            of_blocks[block, symbol] = total
    found = np.empty((num_blocks, STREAMS), np.int64)
    num_best = _grouped(of_blocks, best_of_block, best_lengths)
    smallest = _size(histograms, best_lengths, num_best, best_of_block, found)
    if min(at_most, num_blocks) == 1:
        return num_best
    # Rank the blocks by their mean bits under the common table, of equals the first first.
    means = np.empty(num_blocks, np.uint64)
    for block in range(num_blocks):
        bits, count = 0, 0
        for symbol in range(alphabet):
            length = np.int64(best_lengths[0, symbol])
            bits += of_blocks[block, symbol] * (0 if length == ALONE else length)
            count += of_blocks[block, symbol]
        means[block] = (_U(bits * BLOCK // count) << _U(32)) | _U(block)
    _sort(means, num_blocks)
    lengths = np.zeros((MAX_TABLES, alphabet), np.uint8)
    of_block = np.empty(num_blocks, np.int64)
    for num_tables in range(2, min(at_most, num_blocks) + 1):
        for rank in range(num_blocks):
            of_block[np.int64(means[rank] & _U(0xFFFFFFFF))] = rank * num_tables // num_blocks
        used = _grouped(of_blocks, of_block, lengths)
        for _ in range(ROUNDS):
            if not _cheapest(of_blocks, lengths, used, of_block):
                break  # the same groups have the same codes
            used = _grouped(of_blocks, of_block, lengths)
        size = _size(histograms, lengths, used, of_block, found)
        if size < smallest:
            smallest, num_best = size, used
            best_lengths[:] = lengths
            best_of_block[:] = of_block
    return num_best


# Streams.


def write_streams(symbols: Octets, lengths: Octets, of_block: Ints, num_bytes: Ints) -> Octets:
    out = scratch("streams", int(num_bytes.sum()) + GUARD, np.uint8)
    end = _write_streams(symbols, lengths, of_block, out)
    return out[:end]


@kernel
def _write_stream(symbols, begin, end, coded, out, at):
    """The codes come in at the top of a word, whose upper bits are thus the last ones written; what
    an entry has below its code falls out at the other end. Four codes, 48 bits at most, a store."""
    held, bits = _U(0), _U(0)
    where, i = _U(at), _U(begin)
    fours = _U(begin + ((end - begin) & ~3))
    while i < fours:
        w = coded[symbols[i]]
        x = coded[symbols[i + _U(1)]]
        y = coded[symbols[i + _U(2)]]
        z = coded[symbols[i + _U(3)]]
        early = (w >> (x & _63)) | x
        late = (y >> (z & _63)) | z
        of_late = y + z
        added = w + x + of_late
        held = (held >> (added & _63)) | (early >> (of_late & _63)) | late
        bits = (bits + added) & _63
        store64(out, where, held >> ((_64 - bits) & _63))
        where += bits >> _3
        bits &= _7
        i += _U(4)
    while i < _U(end):
        w = coded[symbols[i]]
        held = (held >> (w & _63)) | w
        bits = (bits + w) & _63
        i += _U(1)
    if bits:
        store64(out, where, held >> (_64 - bits))
        where += (bits + _7) >> _3
    return np.int64(where)


@kernel
def _write_streams(symbols, lengths, of_block, out):
    coded = np.zeros((lengths.shape[0], 256), np.uint64)
    for table in range(lengths.shape[0]):
        _codes(lengths[table], coded[table])
    at = 0
    for block in range(of_block.size):
        begin = block * BLOCK
        size = min(BLOCK, symbols.size - begin)
        if lengths[of_block[block]].max() == ALONE:
            continue  # no bits, and no bytes
        codes = coded[of_block[block]]
        for stream in range(STREAMS):
            first, last = size * stream // STREAMS, size * (stream + 1) // STREAMS
            at = _write_stream(symbols, begin + first, begin + last, codes, out, at)
    return at


def read_streams(
    octets: Octets, start: int, num: int, num_bytes: Ints, of_block: Ints, lengths: Octets
) -> Octets:
    symbols = np.empty(num, np.uint8)
    singles = np.empty((len(lengths), _WINDOW), np.uint16)
    pairs = np.empty((len(lengths), _WINDOW), np.uint32)
    pays = np.empty(len(lengths), np.bool_)
    _lookups(lengths, singles, pairs, pays)
    check(_read_streams(octets, start, num_bytes, of_block, singles, pairs, pays, symbols))
    return symbols


def check(outcome: int) -> None:
    """Raise what a kernel has found."""
    if outcome == _RUNS_ON:
        raise DecodingError("a stream that does not end in its last byte")
    if outcome == _PADDED:
        raise DecodingError("padding after a stream is not zero")


@kernel
def _lookups(lengths, singles, pairs, pays):
    for table in range(lengths.shape[0]):
        _lookup(lengths[table], singles[table])
        pays[table] = _mean_bits(lengths[table]) < _PAIRS_PAY
        if pays[table]:
            _lookup_pairs(singles[table], pairs[table])


@kernel
def _finish(octets, at, end, singles, symbols, place, stop):
    """The rest of one stream, code by code, and what there is to say of its end.

    Reads nothing past bit `end` but the 8 bytes from its byte on.
    """
    while place < stop:
        if at > end:
            return _RUNS_ON
        entry = singles[(load64(octets, at >> _3) >> (at & _7)) & _MASK]
        symbols[place] = np.uint8(entry >> np.uint16(8))
        at += _U(entry) & _BYTE
        place += _U(1)
    if at > end or end - at > _7:
        return _RUNS_ON
    if (load64(octets, at >> _3) >> (at & _7)) & ((_U(1) << (end - at)) - _U(1)):
        return _PADDED
    return 0


@kernel
def _refills(a, b, c, d):
    """How often all four streams can be refilled without a look at their ends, from bits left."""
    return np.int64(min(min(a, b), min(c, d)) // _REFILL)


@kernel
def _read_block(octets, start, num_bytes, singles, pairs, pays, symbols, begin, size):
    """Four streams side by side into symbols[begin : begin + size].

    A refill gives each stream the 57 bits from its place on, of which four lookups take 48 at
    most; as many refills go without a check as 48 bits fit into what is left of the shortest
    stream. A one in bit 63 sinks as bits are taken, so that they need no count of their own.
    """
    a = _U(start) << _3
    b = a + (_U(num_bytes[0]) << _3)
    c = b + (_U(num_bytes[1]) << _3)
    d = c + (_U(num_bytes[2]) << _3)
    a_end, b_end, c_end = b, c, d
    d_end = d + (_U(num_bytes[3]) << _3)
    i = _U(begin)
    j = i + _U(size // 4)
    k = i + _U(size // 2)
    m = i + _U(size * 3 // 4)
    i_stop, j_stop, k_stop, m_stop = j, k, m, _U(begin + size)
    while True:
        if a > a_end or b > b_end or c > c_end or d > d_end:
            return _RUNS_ON
        rounds = _refills(a_end - a, b_end - b, c_end - c, d_end - d)
        room = min(min(i_stop - i, j_stop - j), min(k_stop - k, m_stop - m))
        rounds = min(rounds, np.int64(room >> (_3 if pays else _2)))
        if not rounds:
            break
        if pays:
            for _ in range(rounds):
                w = (load64(octets, a >> _3) >> (a & _7)) | _TOP
                x = (load64(octets, b >> _3) >> (b & _7)) | _TOP
                y = (load64(octets, c >> _3) >> (c & _7)) | _TOP
                z = (load64(octets, d >> _3) >> (d & _7)) | _TOP
                for _ in range(4):
                    p = _U(pairs[w & _MASK])
                    q = _U(pairs[x & _MASK])
                    r = _U(pairs[y & _MASK])
                    s = _U(pairs[z & _MASK])
                    w >>= p & _63
                    x >>= q & _63
                    y >>= r & _63
                    z >>= s & _63
                    store16(symbols, i, np.uint16(p >> _8))
                    store16(symbols, j, np.uint16(q >> _8))
                    store16(symbols, k, np.uint16(r >> _8))
                    store16(symbols, m, np.uint16(s >> _8))
                    i += p >> _24
                    j += q >> _24
                    k += r >> _24
                    m += s >> _24
                a += leading_zeros(w)
                b += leading_zeros(x)
                c += leading_zeros(y)
                d += leading_zeros(z)
            continue
        for _ in range(rounds):
            w = (load64(octets, a >> _3) >> (a & _7)) | _TOP
            x = (load64(octets, b >> _3) >> (b & _7)) | _TOP
            y = (load64(octets, c >> _3) >> (c & _7)) | _TOP
            z = (load64(octets, d >> _3) >> (d & _7)) | _TOP
            for n in range(4):
                p = _U(singles[w & _MASK])
                q = _U(singles[x & _MASK])
                r = _U(singles[y & _MASK])
                s = _U(singles[z & _MASK])
                w >>= p & _63
                x >>= q & _63
                y >>= r & _63
                z >>= s & _63
                symbols[i + _U(n)] = np.uint8(p >> _8)
                symbols[j + _U(n)] = np.uint8(q >> _8)
                symbols[k + _U(n)] = np.uint8(r >> _8)
                symbols[m + _U(n)] = np.uint8(s >> _8)
            a += leading_zeros(w)
            b += leading_zeros(x)
            c += leading_zeros(y)
            d += leading_zeros(z)
            i += _U(4)
            j += _U(4)
            k += _U(4)
            m += _U(4)
    outcome = _finish(octets, a, a_end, singles, symbols, i, i_stop)
    if not outcome:
        outcome = _finish(octets, b, b_end, singles, symbols, j, j_stop)
    if not outcome:
        outcome = _finish(octets, c, c_end, singles, symbols, k, k_stop)
    if not outcome:
        outcome = _finish(octets, d, d_end, singles, symbols, m, m_stop)
    return outcome


@kernel
def _read_streams(octets, start, num_bytes, of_block, singles, pairs, pays, symbols):
    for block in range(of_block.size):
        begin = block * BLOCK
        size = min(BLOCK, symbols.size - begin)
        table = of_block[block]
        outcome = _read_block(
            octets,
            start,
            num_bytes[block],
            singles[table],
            pairs[table],
            pays[table],
            symbols,
            begin,
            size,
        )
        if outcome:
            return outcome
        for stream in range(STREAMS):
            start += num_bytes[block, stream]
    return 0


def add_streams(
    octets: Octets,
    start: int,
    num: int,
    num_bytes: Ints,
    of_block: Ints,
    lengths: Octets,
    per_group: int,
    total: Ints,
    ends: Ints,
    tables: Ints,
) -> None:
    singles = np.empty((len(lengths), _WINDOW), np.uint16)
    pairs = np.empty((len(lengths), _WINDOW), np.uint32)
    pays = np.empty(len(lengths), np.bool_)
    _lookups(lengths, singles, pairs, pays)

    def add(blocks: int, given: Ints) -> tuple[int, int]:
        added, outcome = _add_streams(
            octets,
            start,
            num,
            num_bytes,
            of_block[:blocks],
            singles,
            pairs,
            pays,
            per_group,
            total,
            ends,
            given,
        )
        return int(added), int(outcome)

    added, outcome = add(of_block.size, tables)
    if outcome:
        add(added, -tables)  # the blocks before the bad one: integers leave no trace
        check(outcome)
        raise DecodingError("symbols after the last are not zero")


@kernel
def _add_wide(groups, wide, per_group, total):
    """Whole groups of one tensor."""
    if per_group == 1:
        for i in range(groups.size):
            total[i] += wide[groups[i], 0]
    elif per_group == 2:
        at = _U(0)
        for i in range(groups.size):
            total[at] += wide[groups[i], 0]
            total[at + _1] += wide[groups[i], 1]
            at += _2
    else:
        at = _U(0)
        for i in range(groups.size):
            for place in range(per_group):
                total[at + _U(place)] += wide[groups[i], place]
            at += _U(per_group)


@kernel
def _add_streams(
    octets,
    start,
    num,
    num_bytes,
    of_block,
    singles,
    pairs,
    pays,
    per_group,
    total,
    ends,
    tables,
):
    """Block by block, each still in the cache when it is added; how many blocks were, and what
    was wrong with the next."""
    size = tables.shape[1]
    digits = np.zeros((256, 8), np.uint8)
    digits_of(size, per_group, digits)
    wide = np.zeros((256, 8), np.int64)
    groups = np.empty(BLOCK, np.uint8)
    tensor, is_wide = 0, -1
    for block in range(of_block.size):
        count = min(BLOCK, num - block * BLOCK)
        at = block * BLOCK * per_group
        table = of_block[block]
        outcome = _read_block(
            octets,
            start,
            num_bytes[block],
            singles[table],
            pairs[table],
            pays[table],
            groups,
            0,
            count,
        )
        if outcome:
            return block, outcome
        for place in range(per_group):
            if (
                at + (count - 1) * per_group + place >= total.size
                and digits[groups[count - 1], place]
            ):
                return block, _LEFT_OVER
        for stream in range(STREAMS):
            start += num_bytes[block, stream]
        i = 0
        while i < count and at < total.size:
            while ends[tensor] <= at:
                tensor += 1
            whole = min(count - i, (ends[tensor] - at) // per_group)
            if whole:
                if is_wide != tensor:
                    for byte in range(256):
                        for place in range(per_group):
                            wide[byte, place] = tables[tensor, digits[byte, place]]
                    is_wide = tensor
                part = total[at : at + whole * per_group]
                _add_wide(groups[i : i + whole], wide, per_group, part)
                i += whole
                at += whole * per_group
                continue
            for place in range(per_group):
                if at < total.size:
                    while ends[tensor] <= at:
                        tensor += 1
                    total[at] += tables[tensor, digits[groups[i], place]]
                    at += 1
            i += 1
    return of_block.size, 0


def read_string(
    octets: Octets, at: int, stop: int, num: int, lengths: Octets
) -> tuple[Octets, int]:
    symbols = np.empty(num, np.uint8)
    return symbols, _read_string(octets, at, stop, lengths, symbols)


@kernel
def _read_string(octets, start, end, lengths, symbols):
    singles = np.empty(_WINDOW, np.uint16)
    _lookup(lengths, singles)
    at, stop = _U(start), _U(end)
    for place in range(symbols.size):
        if at > stop:
            break
        entry = singles[(load64(octets, at >> _3) >> (at & _7)) & _MASK]
        symbols[place] = np.uint8(entry >> np.uint16(8))
        at += _U(entry) & _BYTE
    return np.int64(at)
