"""Compiled kernels for histograms of blocks and the choice of shared tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fedpress_compression.kernels.buffer_pool import pooled
from fedpress_compression.kernels.codes_compiled import bits_of_table, lengths_of, sort
from fedpress_compression.kernels.intrinsics import kernel, prefetch
from fedpress_compression.kernels.numbers_compiled import split_into
from fedpress_compression.kernels.wire import (
    ALONE,
    BLOCK,
    MAX_LENGTH,
    MAX_TABLES,
    ROUNDS,
    STREAMS,
    Ints,
    Octets,
)
from fedpress_compression.kernels.workers import each, parts

_STREAM = BLOCK // STREAMS
_LONG = 1 << 19
"""Symbols from which a sequence is worth another thread."""
_BLOCKS = _LONG // BLOCK
_ABSENT_SHIFT = 17
"""A symbol that a table does not have counts for 2**17 bits; more than a block can take."""
_LINE = 64

_U = np.uint64
_1, _2, _3, _4 = (_U(n) for n in (1, 2, 3, 4))


# Counts, 8192 at most to a block, so that 16 bits hold them.


def count(symbols: Octets, alphabet: int) -> Ints:
    if alphabet == 2:
        ones = int(np.count_nonzero(symbols))
        return np.array([symbols.size - ones, ones], np.int64)

    def count_part(begin: int, end: int) -> Ints:
        counts, histogram = np.empty((4, 256), np.int64), np.empty(alphabet, np.int64)
        _count(symbols, begin, end, counts, histogram)
        return histogram

    counted: Ints = np.sum(each(count_part, parts(symbols.size, _LONG)), axis=0)
    return counted


def count_streams(symbols: Octets, alphabet: int) -> Ints:
    num_blocks = -(-symbols.size // BLOCK)
    histograms = _histograms(num_blocks, alphabet)
    each(
        lambda begin, end: _count_streams(symbols, begin, histograms[begin:end]),
        parts(num_blocks, _BLOCKS),
    )
    return histograms


@kernel
def _count(symbols, begin, end, counts, histogram):
    """Four counters for each symbol, so that runs of one do not wait for themselves."""
    counts[:] = 0
    at, stop = _U(begin), _U(end)
    while at + _4 <= stop:
        counts[0, symbols[at]] += 1
        counts[1, symbols[at + _1]] += 1
        counts[2, symbols[at + _2]] += 1
        counts[3, symbols[at + _3]] += 1
        at += _4
    while at < stop:
        counts[0, symbols[at]] += 1
        at += _1
    for symbol in range(histogram.size):
        histogram[symbol] = (
            counts[0, symbol] + counts[1, symbol] + counts[2, symbol] + counts[3, symbol]
        )


@kernel
def _count_streams(symbols, first_block, histograms):
    counts = np.empty((4, 256), np.int32)
    for block in range(histograms.shape[0]):
        begin = (first_block + block) * BLOCK
        size = min(BLOCK, symbols.size - begin)
        for stream in range(STREAMS):
            first, last = size * stream // STREAMS, size * (stream + 1) // STREAMS
            for line in range(begin + first, begin + last, _LINE):
                prefetch(symbols, line + 2 * _STREAM)
            _count(symbols, begin + first, begin + last, counts, histograms[block, stream])


def _histograms(num_blocks: int, alphabet: int) -> npt.NDArray[Any]:
    return pooled(num_blocks * STREAMS * alphabet, np.int16).reshape(num_blocks, STREAMS, alphabet)


def count_buckets(values: Ints, mantissa: int, alphabet: int) -> Ints:
    num_blocks = -(-values.size // BLOCK)
    histograms = _histograms(num_blocks, alphabet)
    each(
        lambda begin, end: _count_buckets(values, mantissa, begin, histograms[begin:end]),
        parts(num_blocks, _BLOCKS),
    )
    return histograms


@kernel
def _count_buckets(values, mantissa, first_block, histograms):
    counts = np.empty((4, 256), np.int32)
    buckets, raw = np.empty(_STREAM, np.uint8), np.empty(_STREAM, np.int64)
    for block in range(histograms.shape[0]):
        begin = (first_block + block) * BLOCK
        size = min(BLOCK, values.size - begin)
        for stream in range(STREAMS):
            first, last = size * stream // STREAMS, size * (stream + 1) // STREAMS
            num = last - first
            split_into(values[begin + first : begin + last], mantissa, buckets[:num], raw[:num])
            _count(buckets, 0, num, counts, histograms[block, stream])


def stream_bytes(histograms: Ints, lengths: Octets, of_block: Ints) -> Ints:
    sizes = np.empty(histograms.shape[:2], np.int64)
    _stream_bytes(histograms.astype(np.int16, copy=False), lengths, of_block, sizes)
    return sizes


@kernel
def _product(counts, weights):
    """The sum of counts[i] * weights[i], both int16: an instruction takes 32 of them."""
    total = np.int32(0)
    for i in range(weights.size):
        total = np.int32(total + np.int32(np.int32(counts[i]) * np.int32(weights[i])))
    return total


@kernel
def _stream_bytes(histograms, lengths, of_block, sizes):
    bits = np.empty(lengths.shape[1], np.int16)
    total = 0
    at = -1
    for block in range(histograms.shape[0]):
        if of_block[block] != at:
            at = of_block[block]
            for symbol in range(bits.size):
                length = np.int64(lengths[at, symbol])
                bits[symbol] = 0 if length == ALONE else length
        for stream in range(STREAMS):
            sum_of_bits = np.int64(_product(histograms[block, stream], bits))
            sizes[block, stream] = (sum_of_bits + 7) >> 3
            total += sizes[block, stream]
    return total


def choose_tables(histograms: Ints, at_most: int = MAX_TABLES) -> tuple[Octets, Ints]:
    lengths = np.zeros((MAX_TABLES, histograms.shape[2]), np.uint8)
    of_block = np.zeros(histograms.shape[0], np.int64)
    counts = histograms.astype(np.int16, copy=False)
    num_tables = _choose_tables(counts, at_most, lengths, of_block)
    return lengths[:num_tables], of_block


@kernel
def _grouped(of_blocks, of_block, lengths, order):
    """Renumber the groups in use without gaps, and make each its code; returns their number."""
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
            lengths_of(sums[table], MAX_LENGTH, order, lengths[num_tables])
            num_tables += 1
    for block in range(num_blocks):
        of_block[block] = filled[of_block[block]]
    return num_tables


@kernel
def _cheapest(of_blocks, lengths, num_tables, of_block):
    """Each block goes to the table that codes it shortest; whether any moved."""
    num_blocks, alphabet = of_blocks.shape
    costs = np.zeros((MAX_TABLES, alphabet), np.int16)
    absent = np.zeros((MAX_TABLES, alphabet), np.int16)
    any_absent = False
    for symbol in range(alphabet):
        used = False
        for table in range(num_tables):
            length = np.int16(lengths[table, symbol])
            used |= length != 0
            costs[table, symbol] = np.int16(0) if length == ALONE else length
            absent[table, symbol] = np.int16(length == 0)
        for table in range(num_tables):
            any_absent |= used and absent[table, symbol] != 0
    moved = False
    for block in range(num_blocks):
        best, fewest = 0, np.int32(0x7FFFFFFF)
        for table in range(num_tables):
            bits = _product(of_blocks[block], costs[table])
            if any_absent:
                bits += _product(of_blocks[block], absent[table]) << _ABSENT_SHIFT
            if bits < fewest:
                best, fewest = table, bits
        moved |= of_block[block] != best
        of_block[block] = best
    return moved


@kernel
def _size(histograms, lengths, num_tables, of_block, sizes):
    bits = 2
    for table in range(num_tables):
        bits += bits_of_table(lengths[table])
    return ((bits + 7) >> 3) + _stream_bytes(histograms, lengths, of_block, sizes)


@kernel
def _choose_tables(histograms, at_most, best_lengths, best_of_block):
    num_blocks, _, alphabet = histograms.shape
    of_blocks = np.empty((num_blocks, alphabet), np.int16)
    for block in range(num_blocks):
        for symbol in range(alphabet):
            total = np.int16(0)
            for stream in range(STREAMS):
                total = np.int16(total + histograms[block, stream, symbol])
            of_blocks[block, symbol] = total
    sizes = np.empty((num_blocks, STREAMS), np.int64)
    order = np.empty(alphabet, np.uint8)
    for symbol in range(alphabet):
        order[symbol] = symbol
    num_best = _grouped(of_blocks, best_of_block, best_lengths, order)
    smallest = _size(histograms, best_lengths, num_best, best_of_block, sizes)
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
    sort(means, num_blocks)
    lengths = np.zeros((MAX_TABLES, alphabet), np.uint8)
    of_block = np.empty(num_blocks, np.int64)
    for num_tables in range(2, min(at_most, num_blocks) + 1):
        for rank in range(num_blocks):
            of_block[np.int64(means[rank] & _U(0xFFFFFFFF))] = rank * num_tables // num_blocks
        used = _grouped(of_blocks, of_block, lengths, order)
        for _ in range(ROUNDS):
            if not _cheapest(of_blocks, lengths, used, of_block):
                break  # the same groups have the same codes
            used = _grouped(of_blocks, of_block, lengths, order)
        size = _size(histograms, lengths, used, of_block, sizes)
        if size < smallest:
            smallest, num_best = size, used
            for table in range(used):
                for symbol in range(alphabet):
                    best_lengths[table, symbol] = lengths[table, symbol]
            for block in range(num_blocks):
                best_of_block[block] = of_block[block]
    return num_best
