"""Compiled kernels for prefix codes: lengths, coded tables, and lookup tables."""

from __future__ import annotations

import numpy as np

from fedpress_compression.kernels import huffman_reference
from fedpress_compression.kernels.intrinsics import kernel, load64, store64, trailing_zeros
from fedpress_compression.kernels.numbers_compiled import put
from fedpress_compression.kernels.wire import ALONE, FIRST_GUESS, GUARD, MAX_LENGTH, Ints, Octets

_WINDOW = 1 << MAX_LENGTH
_U = np.uint64
_BYTE = _U(255)
_0, _1, _2, _3, _7, _8 = (_U(n) for n in (0, 1, 2, 3, 7, 8))
_FAR = np.int64(1 << 62)
"""Beyond every weight; what comes before all is -1."""


# Lengths.


def code_lengths(histogram: Ints, limit: int = MAX_LENGTH) -> Octets:
    lengths = np.empty(histogram.size, np.uint8)
    order = np.arange(histogram.size).astype(np.uint8)
    lengths_of(np.ascontiguousarray(histogram, np.int64), limit, order, lengths)
    return lengths


@kernel
def sort(keys, num):
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
def lengths_of(histogram, limit, order, lengths):
    """The lengths that package-merge gives, see the reference, by Huffman's algorithm if it can be.

    Two queues, of symbols and of pairs in the order they are made, of equals the symbol first (van
    Leeuwen 1976). The items in the order in which they are taken are what package-merge's lists
    come to: that of level l, the first at 1, begins as they do, up to the first that is more than l
    levels high. So where no code exceeds `limit`, the lengths are the same; and where one does,
    only what comes after that item is merged, level by level.

    `order` [alphabet] holds every symbol and is left in the order of their counts: where the next
    histogram is like this one, there is little to sort.
    """
    num_symbols = histogram.size
    keys = np.empty(num_symbols, np.uint64)
    unused = 0
    for i in range(num_symbols):
        count = histogram[order[i]]
        unused += np.int64(count == 0)
        keys[i] = (_U(count) << _8) | _U(order[i])
        lengths[i] = 0
    sort(keys, num_symbols)
    for i in range(num_symbols):
        order[i] = keys[i] & _BYTE
    used = num_symbols - unused
    if used <= 1:
        if used == 1:
            lengths[order[unused]] = ALONE
        return
    leaves, pairs = np.empty(used + 2, np.int64), np.empty(used + 2, np.int64)
    leaves[0], leaves[used + 1], pairs[0], pairs[used + 1] = -1, _FAR, -1, _FAR
    for i in range(used):
        leaves[i + 1] = np.int64(keys[unused + i] >> _8)
        pairs[i + 1] = _FAR
    items, heights = np.empty(2 * used, np.int64), np.empty(2 * used, np.uint8)
    among = np.empty((limit + 1, 2 * used + 1), np.int16)
    _pair_up(leaves, pairs, items, heights, among[limit])
    lightest = 2 * used - 2
    cuts = np.zeros(used + 1, np.uint8)
    alike = np.empty(limit, np.int64)
    for level in range(limit):
        alike[level] = lightest
    level = limit
    if max(heights[lightest - 1], heights[lightest - 2]) > limit:
        _merge_levels(leaves, pairs, items, heights, among, alike)
    while lightest:
        level -= 1
        # Within the limit, levels are as many as the highest item has.
        row = limit if level < 0 or lightest <= alike[level] else level
        num_leaves = np.int64(among[row, lightest])
        cuts[num_leaves] += np.uint8(1)
        lightest = 2 * (lightest - num_leaves)
    length = np.uint8(0)
    for i in range(used - 1, -1, -1):
        length = np.uint8(length + cuts[i + 1])
        lengths[order[unused + i]] = length


@kernel
def _pair_up(leaves, pairs, items, heights, among):
    """All items but the root, lightest first, two at a time, which are then a pair; how many levels
    each has; how many leaves are among the first so many. A height of the root may wrap around."""
    taller = np.empty(pairs.size, np.uint8)
    leaf = pair = _0
    for made in range(leaves.size - 3):
        at = _U(2 * made)
        among[at] = leaf
        own, weight = leaves[leaf + _1], pairs[pair + _1]
        is_leaf = own <= weight
        first = own if is_leaf else weight
        height = np.uint8(1) if is_leaf else taller[pair]
        items[at], heights[at] = first, height
        leaf += _U(is_leaf)
        at += _1
        pair = at - leaf
        among[at] = leaf
        own, weight = leaves[leaf + _1], pairs[pair + _1]
        is_leaf = own <= weight
        second = own if is_leaf else weight
        height_too = np.uint8(1) if is_leaf else taller[pair]
        items[at], heights[at] = second, height_too
        leaf += _U(is_leaf)
        pair = at + _1 - leaf
        pairs[made + 1] = first + second
        taller[made] = np.uint8(max(height, height_too) + np.uint8(1))
    among[2 * leaves.size - 6] = leaf


@kernel
def _merge_levels(leaves, pairs, items, heights, among, alike):
    """Package-merge's list of each level in turn: how many of its first items are as in the last,
    unlimited one; how many leaves are among the first so many, in the level's row of `among`."""
    used, levels = leaves.size - 2, alike.size
    first_items = np.empty(2 * used, np.int64)
    for i in range(2 * used - 2):
        first_items[i] = items[i]
    begin, size = 0, 0
    for level in range(levels):
        before = begin
        while heights[begin] <= level + 1:
            begin += 1
        alike[level] = begin
        leaf = _U(among[levels, begin])
        pair = _U(begin) - leaf
        num_pairs = size >> 1
        for i in range(np.int64(pair), num_pairs):
            pairs[i + 1] = items[2 * i] + items[2 * i + 1]
        pairs[num_pairs + 1] = _FAR
        for i in range(before, begin):
            items[i] = first_items[i]
        _merge(leaves, pairs, items, among[level], leaf, pair, _U(used), _U(num_pairs))
        size = used + num_pairs


@kernel
def _merge(leaves, pairs, items, among, leaf, pair, leaf_end, pair_end):
    """Leaves and pairs in rising order, from both ends towards the middle: each step waits for the
    one before it at its end, and for nothing at the other."""
    at, end = leaf + pair, leaf_end + pair_end
    for _ in range((end - at) >> _1):
        own, weight = leaves[leaf + _1], pairs[pair + _1]
        is_leaf = own <= weight
        items[at] = own if is_leaf else weight
        leaf += _U(is_leaf)
        at += _1
        pair = at - leaf
        among[at] = leaf
        among[end] = leaf_end
        own, weight = leaves[leaf_end], pairs[pair_end]
        is_leaf = own > weight
        end -= _1
        items[end] = own if is_leaf else weight
        leaf_end -= _U(is_leaf)
        pair_end = end - leaf_end
    if at < end:
        items[at] = min(leaves[leaf + _1], pairs[pair + _1])
        among[at + _1] = leaf_end


# Codes, and their tables as bits.


@kernel
def codes_of(lengths, coded):
    """By symbol: its code in the uppermost bits, first bit lowest, and its length in the lowest."""
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
def lookup_of(lengths, singles):
    """For each window the bits of the code it begins with; above them, from 8 up, its symbol."""
    coded = np.zeros(lengths.size, np.uint64)
    codes_of(lengths, coded)
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
def bits_of_table(lengths):
    """The number of bits that describe a code; SPEC-coding.md, Prefix codes."""
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


def table_bits(lengths: Octets) -> int:
    return sum(bits_of_table(row) for row in lengths)


def write_tables(lengths: Octets) -> bytes:
    out = np.empty(27 * lengths.size // 8 + 2 * GUARD, np.uint8)
    return out[: _write_tables(lengths, out)].tobytes()


@kernel
def _write_tables(lengths, out):
    word, num_held, at = put(_U(0), _U(0), _U(lengths.shape[0] - 1), _2, out, _U(0))
    for row in range(lengths.shape[0]):
        used, only = 0, 0
        for symbol in range(lengths.shape[1]):
            if lengths[row, symbol]:
                used += 1
                only = symbol
        if used == 1:
            width = 0
            while (1 << width) < lengths.shape[1]:
                width += 1
            item = (_U(only) << _1) | _1
            word, num_held, at = put(word, num_held, item, _U(1 + width), out, at)
            continue
        word, num_held, at = put(word, num_held, _U(0), _1, out, at)
        before, length = -1, FIRST_GUESS
        for symbol in range(lengths.shape[1]):
            due = np.int64(lengths[row, symbol])
            if not due:
                continue
            run = symbol - before - 1
            if run:
                zeros = 0
                while run >> (zeros + 1):
                    zeros += 1
                item = _7 | (_1 << _U(zeros + 4)) | (_U(run - (1 << zeros)) << _U(zeros + 5))
                word, num_held, at = put(word, num_held, item, _U(5 + 2 * zeros), out, at)
            step = due - length
            if step == 0:
                item, width = _U(0), 1
            elif abs(step) == 1:
                item, width = _U(1 if step > 0 else 5), 3
            elif abs(step) == 2:
                item, width = _U(3 if step > 0 else 11), 4
            else:
                item, width = _U(15 | due << 4), 8
            word, num_held, at = put(word, num_held, item, _U(width), out, at)
            before, length = symbol, due
    store64(out, at, word)
    return np.int64(at + ((num_held + _7) >> _3))


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
            explicit = np.int64((window >> _U(4)) & _U(15))
            if abs(explicit - length) <= 2:
                return -1
            length = explicit
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
