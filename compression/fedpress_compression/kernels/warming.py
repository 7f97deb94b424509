"""Warm-up: run every kernel once on small data with production argument types, so that numba
compiles and caches all of them."""

from __future__ import annotations

import numpy as np

from fedpress_compression import kernels
from fedpress_compression.kernels.wire import GUARD, Octets


def warm_up() -> None:
    """Fill numba's cache; takes half a minute the first time, almost nothing afterwards."""
    _warm_codes()
    _warm_numbers()
    _warm_vectors()
    _warm_fields()
    _warm_range_coder()
    _warm_lanes()


def _padded(data: bytes | Octets) -> Octets:
    return np.concatenate([np.frombuffer(bytes(data), np.uint8), np.zeros(GUARD, np.uint8)])


def _warm_codes() -> None:
    symbols = (np.arange(9000) % 7 % 4).astype(np.uint8)
    histograms = kernels.count_streams(symbols, 4)
    lengths, of_block = kernels.choose_tables(histograms, 4)
    num_bytes = kernels.stream_bytes(histograms, lengths, of_block)
    octets = _padded(kernels.write_streams(symbols, lengths, of_block, num_bytes))
    kernels.read_streams(octets, 0, symbols.size, num_bytes, of_block, lengths)
    total, tables = np.zeros(2 * symbols.size, np.int64), np.ones((1, 2), np.int64)
    ends = np.array([total.size])
    kernels.add_streams(
        octets, 0, symbols.size, num_bytes, of_block, lengths, 2, total, ends, tables
    )
    kernels.read_string(octets, 0, 80, 10, lengths[0])
    kernels.code_lengths(histograms[0, 0].astype(np.int64), 12)
    described = _padded(kernels.write_tables(lengths))
    kernels.read_table(described, 2, 8 * described.size - 8 * GUARD, 4)
    kernels.table_bits(lengths)
    kernels.count(symbols, 4)
    kernels.count_buckets(symbols.astype(np.int64), 2, 4)


def _warm_numbers() -> None:
    gaps = kernels.gaps_of(kernels.positions_of(np.arange(20)))
    buckets, raw = kernels.split(gaps, 2)
    widths = np.arange(64, dtype=np.int64) >> 2
    octets = _padded(kernels.write_raw(buckets, raw, widths))
    kernels.read_raw(octets, 0, 8 * (octets.size - GUARD), buckets, widths)
    kernels.join(buckets, raw, 2)
    kernels.rice_sums(gaps, 0, 3)
    octets = _padded(kernels.write_rice(gaps, 3))
    kernels.read_fields(octets, 0, 20, 3)
    kernels.read_rice(octets, 0, 8 * (octets.size - GUARD), 20, 3)
    kernels.pack(gaps.astype(np.uint64), np.full(20, 5))
    symbols = (gaps % 2).astype(np.uint8)
    kernels.read_octets(_padded(kernels.write_octets(symbols, 1)), 0, 20, 1)
    kernels.others(symbols, 1)
    kernels.ungroup(kernels.group(symbols, 2, 4), 2, 4, 20)
    for values in (gaps, gaps.astype(np.int32)):
        kernels.unpack_lanes(kernels.pack_lanes(values, 21), 21, gaps.size)


def _warm_vectors() -> None:
    vector = np.arange(1 << 17, dtype=np.float32)
    where, values = kernels.largest(vector, 10)
    kernels.largest(np.where(vector < 100, vector, 1), 1 << 15)  # the sample misleads
    kernels.add_largest(vector, vector, 10, np.empty_like(vector))
    kernels.peak(vector)
    kernels.lloyd(vector[:20], np.array([0, 10, 20]), 2)
    symbols = kernels.nearest_levels(values, values[:3])
    for noise in (None, np.zeros(10)):
        kernels.quantise(values, 1.0, 7, noise)
    total = np.zeros(vector.size, np.int64)
    kernels.add_scaled(total, vector, 1.0, 1)
    kernels.add_scaled_at(total, where, values, 1.0, 1)
    kernels.add_table_at(total, where, symbols, np.ones(4, np.int64))
    kernels.add_at(vector, where, values, -1.0)


def _warm_fields() -> None:
    points = np.arange(1, 4, dtype=np.uint64)
    shares = kernels.evaluate(np.ones((3, 5), np.uint64), points)
    kernels.weighted_sums(kernels.lagrange(points), shares[np.newaxis])


def _warm_range_coder() -> None:
    matrices, contexts = np.array([[8, 8]], np.int64), np.zeros(0, np.uint8)
    where = np.array([3, 17, 40])
    data = kernels.encode_flags(where, 64, matrices, contexts, 1000)
    octets = _padded(data or b"")
    kernels.decode_flags(octets, 0, octets.size - GUARD, 3, 64, matrices, contexts)
    data = kernels.encode_values(
        np.array([1, 2, 0]), np.array([0, 1, 0], np.uint8), 1, 3, where, matrices, contexts, 1000
    )
    octets = _padded(data or b"")
    kernels.decode_values(octets, 0, octets.size - GUARD, 1, 3, where, matrices, contexts)


def _warm_lanes() -> None:
    symbols, tables = np.arange(20).astype(np.uint8) % 2, np.full((1, 2), 2048, np.uint16)
    contexts = np.zeros(20, np.uint8)
    num_words, stream = kernels.encode_lanes(symbols, contexts, tables, 4)
    memory = np.zeros(2, np.uint8)
    kernels.decode_lanes(_padded(stream), 0, num_words, contexts, memory, tables, 4)
