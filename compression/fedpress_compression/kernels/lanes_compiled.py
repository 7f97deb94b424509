"""Compiled rANS in interleaved lanes: the same bytes as `lanes_reference`."""

from __future__ import annotations

import numpy as np

from fedpress_compression.errors import DecodingError
from fedpress_compression.kernels.intrinsics import kernel
from fedpress_compression.kernels.wire import (
    LANE_BITS,
    LANES,
    LEAST_STATE,
    Ints,
    Octets,
    Tables,
)

_MASK = (1 << LANE_BITS) - 1
_FULL = 32 - LANE_BITS


def encode_lanes(
    symbols: Octets, contexts: Octets, tables: Tables, num_lanes: int
) -> tuple[Ints, Octets]:
    num_words = np.zeros(-(-num_lanes // LANES), np.int64)
    states = np.empty(num_lanes, np.int64)
    words = np.empty(symbols.size, np.uint16)
    start = _encode(symbols, contexts, tables, states, num_words, words)
    head, rest = states.astype("<u4").view(np.uint8), words[start:].astype("<u2").view(np.uint8)
    return num_words, np.concatenate([head, rest])


def decode_lanes(
    octets: Octets,
    at: int,
    num_words: Ints,
    classes: Octets,
    memory: Octets,
    tables: Tables,
    num_lanes: int,
) -> Octets:
    symbols = np.empty(classes.size, np.uint8)
    per_class = int(memory.max()) + 1
    if not _decode(octets, at, num_words, classes, memory, per_class, tables, num_lanes, symbols):
        raise DecodingError("lanes that do not end as they began, or need more words")
    return symbols


@kernel
def _encode(symbols, contexts, tables, states, num_words, words):
    """Fill `words` from its end on; returns where they begin."""
    num, num_lanes, at = symbols.size, states.size, words.size
    sums = np.zeros((tables.shape[0], tables.shape[1]), np.int64)
    for row in range(tables.shape[0]):
        for symbol in range(1, tables.shape[1]):
            sums[row, symbol] = sums[row, symbol - 1] + np.int64(tables[row, symbol - 1])
    for lane in range(num_lanes):
        states[lane] = LEAST_STATE
    for group in range(num_words.size - 1, -1, -1):
        first, after = group * LANES, min(num_lanes, (group + 1) * LANES)
        end = at
        for step in range((num - 1) // num_lanes, -1, -1):
            for lane in range(after - 1, first - 1, -1):
                place = num * lane // num_lanes + step
                if place >= num * (lane + 1) // num_lanes:
                    continue
                row, symbol = np.int64(contexts[place]), np.int64(symbols[place])
                chance, x = np.int64(tables[row, symbol]), states[lane]
                if x >= chance << _FULL:
                    at -= 1
                    words[at] = x & 0xFFFF
                    x >>= 16
                states[lane] = (x // chance << LANE_BITS) + x % chance + sums[row, symbol]
        num_words[group] = end - at
    return at


@kernel
def _decode(octets, at, num_words, classes, memory, per_class, tables, num_lanes, symbols):
    """Whether the lanes end as they began, with the words that there are."""
    num = symbols.size
    num_rows, alphabet = tables.shape
    slots = np.empty((num_rows, 1 << LANE_BITS), np.uint8)
    sums = np.zeros((num_rows, alphabet), np.int64)
    for row in range(num_rows):
        total = 0
        for symbol in range(alphabet):
            sums[row, symbol] = total
            for slot in range(total, total + np.int64(tables[row, symbol])):
                slots[row, slot] = symbol
            total += np.int64(tables[row, symbol])
    states = np.empty(LANES, np.int64)
    last = np.empty(LANES, np.int64)
    starts = np.empty(LANES + 1, np.int64)
    word = at + 4 * num_lanes
    for group in range(num_words.size):
        first, count = group * LANES, min(num_lanes - group * LANES, LANES)
        for lane in range(count):
            where = at + 4 * (first + lane)
            states[lane] = 0
            for byte in range(4):
                states[lane] |= np.int64(octets[where + byte]) << 8 * byte
            last[lane] = 0
        for lane in range(count + 1):
            starts[lane] = num * (first + lane) // num_lanes
        end = word + 2 * num_words[group]
        for step in range((num - 1) // num_lanes + 1):
            for lane in range(count):
                place = starts[lane] + step
                if place >= starts[lane + 1]:
                    continue
                row = np.int64(classes[place]) * per_class + np.int64(memory[last[lane]])
                x = states[lane]
                slot = x & _MASK
                symbol = np.int64(slots[row, slot])
                x = np.int64(tables[row, symbol]) * (x >> LANE_BITS) + slot - sums[row, symbol]
                if x < LEAST_STATE:
                    if word >= end:
                        return False
                    x = x << 16 | np.int64(octets[word]) | np.int64(octets[word + 1]) << 8
                    word += 2
                states[lane], last[lane], symbols[place] = x, symbol, symbol
        if word != end:
            return False
        for lane in range(count):
            if states[lane] != LEAST_STATE:
                return False
    return True
