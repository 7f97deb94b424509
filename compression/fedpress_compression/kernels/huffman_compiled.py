"""Streams of Huffman codes as machine code: the same bytes as `huffman_reference`."""

from __future__ import annotations

import numpy as np

from fedpress_compression.errors import DecodingError
from fedpress_compression.kernels.buffer_pool import pooled, thread_buffer
from fedpress_compression.kernels.codes_compiled import codes_of, lookup_of
from fedpress_compression.kernels.intrinsics import (
    add_two,
    kernel,
    leading_zeros,
    load64,
    prefetch,
    store64,
)
from fedpress_compression.kernels.numbers_compiled import digits_of
from fedpress_compression.kernels.wire import ALONE, BLOCK, GUARD, MAX_LENGTH, STREAMS, Ints, Octets
from fedpress_compression.kernels.workers import each, parts

_WINDOW = 1 << MAX_LENGTH
_STREAM = BLOCK // STREAMS
_LINE = 64
_SUMS_AHEAD = 32
"""Places by which a stream's sums are asked for before they are added to."""
_BLOCKS = (1 << 19) // BLOCK
"""Blocks from which a sequence is worth another thread."""
_RUNS_ON, _PADDED, _LEFT_OVER = 1, 2, 3

_U = np.uint64
_MASK, _BYTE, _TOP = _U(_WINDOW - 1), _U(255), _U(1 << 63)
_REFILL = _U(4 * MAX_LENGTH)
_0, _1, _2, _3, _4, _7, _8, _63, _64 = (_U(n) for n in (0, 1, 2, 3, 4, 7, 8, 63, 64))


# Streams.


def write_streams(symbols: Octets, lengths: Octets, of_block: Ints, num_bytes: Ints) -> Octets:
    among = parts(of_block.size, _BLOCKS)
    ends = np.append(0, np.cumsum(num_bytes.sum(axis=1))).tolist()
    out = thread_buffer("streams", ends[-1] + GUARD * len(among), np.uint8)
    # A word that is stored may go on past the end of a part, so each has a guard after it at first.
    spares = {begin: GUARD * index for index, (begin, _) in enumerate(among)}

    def write_part(begin: int, end: int) -> None:
        at = ends[begin] + spares[begin]
        _write_streams(symbols, begin, lengths, of_block[begin:end], out, at)

    each(write_part, among)
    for begin, end in among[1:]:
        moved = ends[begin] + spares[begin]
        out[ends[begin] : ends[end]] = out[moved : moved + ends[end] - ends[begin]]
    return out[: ends[-1]]


@kernel
def _write_stream(symbols, begin, end, coded, out, at):
    """The codes come in at the top of a word, whose upper bits are thus the last ones written; what
    an entry has below its code falls out at the other end. Four codes, 48 bits at most, a store."""
    buffered, bits = _U(0), _U(0)
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
        buffered = (buffered >> (added & _63)) | (early >> (of_late & _63)) | late
        bits = (bits + added) & _63
        store64(out, where, buffered >> ((_64 - bits) & _63))
        where += bits >> _3
        bits &= _7
        i += _U(4)
    while i < _U(end):
        w = coded[symbols[i]]
        buffered = (buffered >> (w & _63)) | w
        bits = (bits + w) & _63
        i += _U(1)
    if bits:
        store64(out, where, buffered >> (_64 - bits))
        where += (bits + _7) >> _3
    return np.int64(where)


@kernel
def _write_streams(symbols, first_block, lengths, of_block, out, at):
    coded = np.zeros((lengths.shape[0], 256), np.uint64)
    for table in range(lengths.shape[0]):
        codes_of(lengths[table], coded[table])
    for block in range(of_block.size):
        begin = (first_block + block) * BLOCK
        size = min(BLOCK, symbols.size - begin)
        alone = False
        for length in lengths[of_block[block]]:
            alone |= length == ALONE
        if alone:
            continue  # no bits, and no bytes
        codes = coded[of_block[block]]
        for stream in range(STREAMS):
            first, last = size * stream // STREAMS, size * (stream + 1) // STREAMS
            for line in range(begin + first, begin + last, _LINE):
                prefetch(symbols, line + 2 * _STREAM)
            at = _write_stream(symbols, begin + first, begin + last, codes, out, at)
    return at


def read_streams(
    octets: Octets, start: int, num: int, num_bytes: Ints, of_block: Ints, lengths: Octets
) -> Octets:
    symbols = pooled(num, np.uint8)
    lookup = np.empty((len(lengths), _WINDOW), np.uint16)
    _lookups(lengths, lookup)
    starts = _starts(start, num_bytes)

    def read_part(begin: int, end: int) -> int:
        part = symbols[begin * BLOCK : end * BLOCK]
        streams = (starts[begin:end], num_bytes[begin:end], of_block[begin:end])
        return int(_read_streams(octets, *streams, lookup, part))

    check(max(each(read_part, parts(of_block.size, _BLOCKS, 2))))
    return symbols


def _starts(start: int, num_bytes: Ints) -> Ints:
    """The offset of each block's streams."""
    sizes = num_bytes.sum(axis=1)
    starts: Ints = start + np.cumsum(sizes) - sizes
    return starts


def check(outcome: int) -> None:
    """Raise the error of a kernel's result code."""
    if outcome == _RUNS_ON:
        raise DecodingError("a stream that does not end in its last byte")
    if outcome == _PADDED:
        raise DecodingError("padding after a stream is not zero")


@kernel
def _lookups(lengths, singles):
    for table in range(lengths.shape[0]):
        lookup_of(lengths[table], singles[table])


@kernel
def _window(octets, at):
    """The 57 bits or more from bit `at` on, and a one above them: it sinks as bits are taken, so
    that they need no count of their own."""
    return (load64(octets, at >> _3) >> (at & _7)) | _TOP


@kernel
def _take(window, singles, target, wide, place):
    """Look up the symbol that the window begins with; the window without its bits.

    target[place] becomes the symbol or, where there is a `wide`, the two numbers at the symbol's
    place in it are added to the two at `place` in `target`.
    """
    entry = _U(singles[window & _MASK])
    if wide is None:
        target[place] = np.uint8(entry >> _8)
    else:
        add_two(target, place << _1, wide, (entry >> _8) << _1)
    return window >> (entry & _63)


@kernel
def _follow(octets, at, end, singles, target, wide, place, stop):
    """One stream from bit `at` on, code by code, for the places up to `stop`; the bit where they
    end. Reads nothing past bit `end` but the 8 bytes from its byte on: where bits run out, all
    stops."""
    while place < stop and at <= end:
        window = load64(octets, at >> _3) >> (at & _7)
        at += _U(singles[window & _MASK]) & _BYTE
        _take(window, singles, target, wide, place)
        place += _U(1)
    return at


@kernel
def _finish(octets, at, end, singles, target, wide, place, stop):
    """The rest of one stream, and what there is to say of its end."""
    at = _follow(octets, at, end, singles, target, wide, place, stop)
    if at > end or end - at > _7:
        return _RUNS_ON
    if (load64(octets, at >> _3) >> (at & _7)) & ((_U(1) << (end - at)) - _U(1)):
        return _PADDED
    return 0


@kernel
def _refills(a, b, c, d):
    """The number of refills of all four streams that need no bounds check, from the bits left."""
    return min(min(a, b), min(c, d)) // _REFILL


@kernel
def _read_block(octets, start, num_bytes, singles, symbols, begin, size):
    """Four streams side by side into symbols[begin : begin + size].

    A refill gives each stream the 57 bits from its place on, of which four codes take 48 at most;
    as many refills go without a check as 48 bits fit into what is left of the shortest stream.
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
        rounds = min(rounds, min(min(i_stop - i, j_stop - j), min(k_stop - k, m_stop - m)) >> _2)
        if not rounds:
            break
        for _ in range(rounds):
            w, x = _window(octets, a), _window(octets, b)
            y, z = _window(octets, c), _window(octets, d)
            for n in range(4):
                w = _take(w, singles, symbols, None, i + _U(n))
                x = _take(x, singles, symbols, None, j + _U(n))
                y = _take(y, singles, symbols, None, k + _U(n))
                z = _take(z, singles, symbols, None, m + _U(n))
            a += leading_zeros(w)
            b += leading_zeros(x)
            c += leading_zeros(y)
            d += leading_zeros(z)
            i += _4
            j += _4
            k += _4
            m += _4
    outcome = _finish(octets, a, a_end, singles, symbols, None, i, i_stop)
    if not outcome:
        outcome = _finish(octets, b, b_end, singles, symbols, None, j, j_stop)
    if not outcome:
        outcome = _finish(octets, c, c_end, singles, symbols, None, k, k_stop)
    if not outcome:
        outcome = _finish(octets, d, d_end, singles, symbols, None, m, m_stop)
    return outcome


@kernel
def _lead(octets, at, end, singles, target, wide, begin, stream):
    """The symbols by which a stream is ahead of the last of eight."""
    place = begin + _U(stream * _STREAM)
    return _follow(octets, at, end, singles, target, wide, place, place + _4 * _U(7 - stream))


@kernel
def _read_two(octets, start, num_bytes, first, second, target, wide, begin):
    """Two whole blocks, one after the other, as `_read_block` does one: a lookup waits for the one
    before it in its stream, and eight streams leave no gaps in between. See `_take` for `wide`.

    The streams are too short for the machine to see where it will read and write next. So with each
    refill the bytes are asked for that come as far into the next two blocks; and of sums, those
    that each stream comes to a few refills on.
    """
    a = _U(start) << _3
    b = a + (_U(num_bytes[0, 0]) << _3)
    c = b + (_U(num_bytes[0, 1]) << _3)
    d = c + (_U(num_bytes[0, 2]) << _3)
    e = d + (_U(num_bytes[0, 3]) << _3)
    f = e + (_U(num_bytes[1, 0]) << _3)
    g = f + (_U(num_bytes[1, 1]) << _3)
    h = g + (_U(num_bytes[1, 2]) << _3)
    a_end, b_end, c_end, d_end, e_end, f_end, g_end = b, c, d, e, f, g, h
    h_end = h + (_U(num_bytes[1, 3]) << _3)
    i = _U(begin)
    input_at, input_stride = h_end >> _3, (h_end - a) // _U(8 * _STREAM // 4)
    soon = i + _U(2 * BLOCK)
    lead = _0
    if wide is not None:
        # Sums at places that are a whole number of pages apart would be taken for one another.
        lead = _4
        a = _lead(octets, a, a_end, first, target, wide, i, 0)
        b = _lead(octets, b, b_end, first, target, wide, i, 1)
        c = _lead(octets, c, c_end, first, target, wide, i, 2)
        d = _lead(octets, d, d_end, first, target, wide, i, 3)
        e = _lead(octets, e, e_end, second, target, wide, i, 4)
        f = _lead(octets, f, f_end, second, target, wide, i, 5)
        g = _lead(octets, g, g_end, second, target, wide, i, 6)
    left = _U(_STREAM) - _7 * lead
    while True:
        if a > a_end or b > b_end or c > c_end or d > d_end:
            return _RUNS_ON
        if e > e_end or f > f_end or g > g_end or h > h_end:
            return _RUNS_ON
        rounds = _refills(a_end - a, b_end - b, c_end - c, d_end - d)
        rounds = min(rounds, _refills(e_end - e, f_end - f, g_end - g, h_end - h))
        rounds = min(rounds, left >> _2)
        if not rounds:
            break
        left -= rounds << _2
        for _ in range(rounds):
            prefetch(octets, input_at)
            input_at += input_stride
            if wide is None:
                prefetch(target, soon)
                soon += _U(2 * STREAMS * 4)
            else:
                for n in range(2 * STREAMS):
                    prefetch(target, (i + _U(n * _STREAM + 4 * (7 - n) + _SUMS_AHEAD)) << _1)
            s, t = _window(octets, a), _window(octets, b)
            u, v = _window(octets, c), _window(octets, d)
            w, x = _window(octets, e), _window(octets, f)
            y, z = _window(octets, g), _window(octets, h)
            for n in range(4):
                s = _take(s, first, target, wide, i + _7 * lead + _U(n))
                t = _take(t, first, target, wide, i + _U(6) * lead + _U(n + _STREAM))
                u = _take(u, first, target, wide, i + _U(5) * lead + _U(n + 2 * _STREAM))
                v = _take(v, first, target, wide, i + _U(4) * lead + _U(n + 3 * _STREAM))
                w = _take(w, second, target, wide, i + _U(3) * lead + _U(n + 4 * _STREAM))
                x = _take(x, second, target, wide, i + _U(2) * lead + _U(n + 5 * _STREAM))
                y = _take(y, second, target, wide, i + _U(1) * lead + _U(n + 6 * _STREAM))
                z = _take(z, second, target, wide, i + _U(n + 7 * _STREAM))
            a += leading_zeros(s)
            b += leading_zeros(t)
            c += leading_zeros(u)
            d += leading_zeros(v)
            e += leading_zeros(w)
            f += leading_zeros(x)
            g += leading_zeros(y)
            h += leading_zeros(z)
            i += _4
    begins = (a, b, c, d, e, f, g, h)
    ends = (a_end, b_end, c_end, d_end, e_end, f_end, g_end, h_end)
    for stream in range(2 * STREAMS):
        singles = first if stream < STREAMS else second
        place = i + _U(stream * _STREAM) + _U(7 - stream) * lead
        stop = _U(begin + (stream + 1) * _STREAM)
        outcome = _finish(octets, begins[stream], ends[stream], singles, target, wide, place, stop)
        if outcome:
            return outcome
    return 0


@kernel
def _read_some(octets, starts, num_bytes, of_block, singles, symbols, block, blocks, begin, size):
    """One block, or two whole ones where `blocks` is 2, into symbols[begin : begin + size]."""
    first = singles[of_block[block]]
    if blocks == 2:
        second = singles[of_block[block + 1]]
        both = num_bytes[block : block + 2]
        return _read_two(octets, starts[block], both, first, second, symbols, None, begin)
    return _read_block(octets, starts[block], num_bytes[block], first, symbols, begin, size)


@kernel
def _together(num_bytes, block, left):
    """Return how many blocks to read at once, of `left` symbols: two, where both are whole and not
    of a single symbol, which takes no bits and no refills."""
    if left < 2 * BLOCK or num_bytes[block, 0] < 8 or num_bytes[block + 1, 0] < 8:
        return 1
    return 2


@kernel
def _read_streams(octets, starts, num_bytes, of_block, singles, symbols):
    block = 0
    while block < of_block.size:
        begin = block * BLOCK
        blocks = _together(num_bytes, block, symbols.size - begin)
        size = min(blocks * BLOCK, symbols.size - begin)
        outcome = _read_some(
            octets, starts, num_bytes, of_block, singles, symbols, block, blocks, begin, size
        )
        if outcome:
            return outcome
        block += blocks
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
    lookup = np.empty((len(lengths), _WINDOW), np.uint16)
    _lookups(lengths, lookup)
    starts = _starts(start, num_bytes)

    def add(begin: int, end: int, streams: Ints) -> int:
        first = begin * BLOCK
        part = slice(first * per_group, min(end * BLOCK * per_group, total.size))
        return int(
            _add_streams(
                octets,
                starts[begin:end],
                min(num, end * BLOCK) - first,
                num_bytes[begin:end],
                of_block[begin:end],
                lookup,
                per_group,
                total[part],
                np.clip(ends - part.start, 0, part.stop - part.start),
                streams,
            )
        )

    among = parts(of_block.size, _BLOCKS, 2)
    outcome = max(each(lambda begin, end: add(begin, end, tables), among))
    if outcome:
        # All that was added before it, once more with its sign turned: integers leave no trace.
        each(lambda begin, end: add(begin, end, -tables), among)
        check(outcome)
        raise DecodingError("symbols after the last are not zero")


@kernel
def _add_wide(groups, wide, per_group, total):
    """Whole groups of one tensor."""
    at = _U(0)
    if per_group == 1:
        for i in range(groups.size):
            total[i] += wide[groups[i]]
    elif per_group == 2:
        for i in range(groups.size):
            add_two(total, at, wide, _U(groups[i]) << _1)
            at += _2
    else:
        for i in range(groups.size):
            first = _U(groups[i]) * _U(per_group)
            for place in range(per_group):
                total[at + _U(place)] += wide[first + _U(place)]
            at += _U(per_group)


@kernel
def _add_streams(octets, starts, num, num_bytes, of_block, singles, per_group, total, ends, tables):
    """One block or two at a time, still in the cache when they are added or, two symbols to a group
    and all of one tensor, straight from the streams; what is wrong with one, which ends it.

    What was added until then depends on the streams alone, and not on `tables`.
    """
    digits = np.zeros((256, 8), np.uint8)
    digits_of(tables.shape[1], per_group, digits)
    wide = np.zeros(256 * per_group, np.int64)
    groups = np.empty(2 * BLOCK, np.uint8)
    tensor, is_wide = 0, -1
    block = 0
    while block < of_block.size:
        blocks = _together(num_bytes, block, num - block * BLOCK)
        count = min(blocks * BLOCK, num - block * BLOCK)
        at = block * BLOCK * per_group
        straight = False
        if blocks == 2 and per_group == 2:
            while ends[tensor] <= at:
                tensor += 1
            straight = at + 2 * count <= ends[tensor]
        if straight:
            if is_wide != tensor:
                _widen(tables[tensor], digits, per_group, wide)
                is_wide = tensor
            outcome = _read_two(
                octets,
                starts[block],
                num_bytes[block : block + 2],
                singles[of_block[block]],
                singles[of_block[block + 1]],
                total,
                wide,
                block * BLOCK,
            )
            if outcome:
                return outcome
            block += blocks
            continue
        outcome = _read_some(
            octets, starts, num_bytes, of_block, singles, groups, block, blocks, 0, count
        )
        if outcome:
            return outcome
        for place in range(per_group):
            if (
                at + (count - 1) * per_group + place >= total.size
                and digits[groups[count - 1], place]
            ):
                return _LEFT_OVER
        i = 0
        while i < count and at < total.size:
            while ends[tensor] <= at:
                tensor += 1
            whole = min(count - i, (ends[tensor] - at) // per_group)
            if whole:
                if is_wide != tensor:
                    _widen(tables[tensor], digits, per_group, wide)
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
        block += blocks
    return 0


@kernel
def _widen(table, digits, per_group, wide):
    """By byte: the values of the symbols in it."""
    for byte in range(256):
        for place in range(per_group):
            wide[byte * per_group + place] = table[digits[byte, place]]


def read_string(
    octets: Octets, at: int, stop: int, num: int, lengths: Octets
) -> tuple[Octets, int]:
    symbols = np.empty(num, np.uint8)
    return symbols, _read_string(octets, at, stop, lengths, symbols)


@kernel
def _read_string(octets, start, end, lengths, symbols):
    singles = np.empty(_WINDOW, np.uint16)
    lookup_of(lengths, singles)
    at, stop = _U(start), _U(end)
    for place in range(symbols.size):
        if at > stop:
            break
        entry = singles[(load64(octets, at >> _3) >> (at & _7)) & _MASK]
        symbols[place] = np.uint8(entry >> np.uint16(8))
        at += _U(entry) & _BYTE
    return np.int64(at)
