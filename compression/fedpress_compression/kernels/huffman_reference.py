"""Huffman codes in numpy: code lengths, tables shared by blocks, encoding and decoding of streams.

A code's end is only known after its lookup, so decoding a stream is sequential. The lengths of the
codes starting at every bit are looked up in parallel first. Decoding a stream then adds lengths, in
many streams in parallel or, for few, in plain Python; the symbols are looked up together at the
end.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from fedpress_compression.errors import DecodingError
from fedpress_compression.kernels.numbers_reference import gather, pack, split, ungroup
from fedpress_compression.kernels.wire import (
    ALONE,
    BLOCK,
    FIRST_GUESS,
    MAX_LENGTH,
    MAX_TABLES,
    ROUNDS,
    STREAMS,
    Ints,
    Octets,
    Words,
)

_WINDOW = 1 << MAX_LENGTH
_MASK = np.uint32(_WINDOW - 1)
_NEAREST = {0: (0b0, 1), 1: (0b001, 3), -1: (0b101, 3), 2: (0b0011, 4), -2: (0b1011, 4)}
_UNUSED, _OTHER = (0b0111, 4), (0b1111, 4)
_IMPOSSIBLE = 1 << 17  # bits, for a symbol that a table does not have; more than a block can take
_BLOCKS_AT_ONCE = 64
_TABLE_AT_MOST = 1024  # bytes; items take 27 bits at most
_FEWEST_LANES = 64
_BEYOND = 2  # bytes after the last stream, at which every step is 0


# Codes.


def code_lengths(histogram: npt.NDArray[np.integer], limit: int = MAX_LENGTH) -> Octets:
    """The lengths in [1, limit] of an optimal prefix code for the symbols counted in `histogram`.

    Package-merge (Larmore and Hirschberg 1990, JACM 37(3)): at each level, the symbols and the
    pairs of the level below in rising weight; the 2n - 2 lightest of the last level, followed back
    down, meet a symbol as often as its code has bits. Weights carry a last bit that is 0 for a
    symbol, so that of equals the symbols come first and can be told from pairs.
    """
    lengths = np.zeros(histogram.size, np.uint8)
    used = np.flatnonzero(histogram)
    if used.size <= 1:
        lengths[used] = ALONE
        return lengths
    order = used[np.argsort(histogram[used], kind="stable")]
    leaves = (2 * histogram[order]).tolist()
    merged: list[int] = []
    levels = []
    for _ in range(limit):
        pairs = [(a & ~1) + (b & ~1) | 1 for a, b in zip(merged[::2], merged[1::2], strict=False)]
        merged = sorted(leaves + pairs)
        levels.append(merged)
    met = np.zeros(used.size, np.int64)
    lightest = 2 * used.size - 2
    for level in reversed(levels):
        num_pairs = sum(weight & 1 for weight in level[:lightest])
        met[: lightest - num_pairs] += 1
        lightest = 2 * num_pairs
    lengths[order] = met
    return lengths


def code_bits(lengths: Octets) -> Ints:
    """The code length of each symbol in bits [alphabet]."""
    return np.where(lengths == ALONE, 0, lengths).astype(np.int64)


def codes(lengths: Octets) -> Words:
    """The code of each symbol [alphabet], first bit lowest.

    Canonical: by length, then by symbol, codes count upwards when read first bit highest.
    """
    result = np.zeros(lengths.size, np.uint64)
    code = 0
    for length in range(1, MAX_LENGTH + 1):
        for symbol in np.flatnonzero(lengths == length).tolist():
            result[symbol] = int(f"{code:0{length}b}"[::-1], 2)
            code += 1
        code <<= 1
    return result


def lookup(lengths: Octets) -> tuple[Octets, Octets]:
    """By window of 12 bits: its first symbol and the length of that symbol's code."""
    alone = np.flatnonzero(lengths == ALONE)
    if alone.size:
        return np.full(_WINDOW, alone[0], np.uint8), np.zeros(_WINDOW, np.uint8)
    symbols, bits = np.zeros(_WINDOW, np.uint8), np.zeros(_WINDOW, np.uint8)
    for symbol, code in enumerate(codes(lengths).tolist()):
        if lengths[symbol]:
            every = slice(code, None, 1 << int(lengths[symbol]))
            symbols[every], bits[every] = symbol, lengths[symbol]
    return symbols, bits


def table(lengths: Octets) -> list[tuple[int, int]]:
    """The (value, width) pairs that describe a code; SPEC-coding.md, Prefix codes."""
    return list(_table(lengths))


def _table(lengths: Octets) -> Iterator[tuple[int, int]]:
    used = np.flatnonzero(lengths).tolist()
    if len(used) == 1:
        yield 1, 1
        yield used[0], (lengths.size - 1).bit_length()
        return
    yield 0, 1
    before, length = -1, FIRST_GUESS
    for symbol in used:
        if symbol - before > 1:
            yield _UNUSED
            run = symbol - before - 1
            zeros = run.bit_length() - 1
            yield 1 << zeros, zeros + 1
            yield run - (1 << zeros), zeros
        step = int(lengths[symbol]) - length
        if step in _NEAREST:
            yield _NEAREST[step]
        else:
            yield _OTHER
            yield int(lengths[symbol]), 4
        before, length = symbol, int(lengths[symbol])


def table_bits(lengths: Octets) -> int:
    """The number of bits that describe the codes [tables, alphabet]."""
    return sum(width for row in lengths for _, width in table(row))


def write_tables(lengths: Octets) -> bytes:
    """Write the number of codes [tables, alphabet] minus 1 in 2 bits, then the codes, padded."""
    pairs = [(len(lengths) - 1, 2), *(pair for row in lengths for pair in table(row))]
    values, widths = zip(*pairs, strict=True)
    return pack(np.array(values, np.uint64), np.array(widths, np.int64))


class _Bits:
    """The bits of a table, one after the other; zeros after the last."""

    def __init__(self, octets: Octets, at: int, stop: int) -> None:
        self.at, self.stop = at, stop
        self._whole = int.from_bytes(
            octets[at >> 3 : (at >> 3) + _TABLE_AT_MOST].tobytes(), "little"
        )
        self._first = at & ~7

    def read(self, num_bits: int) -> int:
        value = self._whole >> (self.at - self._first) & ((1 << num_bits) - 1)
        self.at += num_bits
        if self.at > self.stop:
            raise DecodingError("the body ends within a Huffman table")
        return value

    def ones(self, at_most: int) -> int:
        """Read ones up to a zero, which is consumed; no zero follows `at_most` ones."""
        for count in range(at_most):
            if not self.read(1):
                return count
        return at_most

    def run(self, alphabet: int) -> int:
        """A run of unused symbols, Elias gamma; at most 7 zeros in front."""
        zeros = 0
        while not self.read(1):
            zeros += 1
            if zeros > 7:
                raise DecodingError(f"a run of unused symbols beyond the alphabet of {alphabet}")
        return 1 << zeros | self.read(zeros)


def read_table(octets: Octets, at: int, stop: int, alphabet: int) -> tuple[Octets, int]:
    """The lengths of a code [alphabet] described from bit `at` on, and the bit where that ends.

    First a bit: 1, and the only symbol follows in the bits that `alphabet` takes; or 0, and one
    item for each symbol in turn until the code is complete, that is until its lengths l satisfy
    sum 2**-l = 1 (Kraft). Raises DecodingError on a sum beyond 1, on lengths outside [1, 12], on
    what could be said in fewer bits, and where bits run out.
    """
    bits = _Bits(octets, at, stop)
    lengths = np.zeros(alphabet, np.uint8)
    if bits.read(1):
        symbol = bits.read((alphabet - 1).bit_length())
        if symbol >= alphabet:
            raise DecodingError(f"the only symbol is {symbol}, outside [0, {alphabet})")
        lengths[symbol] = ALONE
        return lengths, bits.at
    symbol, length, room, after_run = 0, FIRST_GUESS, _WINDOW, False
    while room:
        step = bits.ones(4)
        if step == 3:
            if after_run:
                raise DecodingError("a run of unused symbols goes on in another run")
            symbol += bits.run(alphabet)
            after_run = True
            continue
        if symbol >= alphabet:
            raise DecodingError(f"a Huffman table goes past its {alphabet} symbols")
        if step == 4:
            explicit = bits.read(4)
            if abs(explicit - length) <= 2:
                raise DecodingError(f"length {explicit} after {length} is written out")
            length = explicit
        elif step:
            length += -step if bits.read(1) else step
        if not 1 <= length <= MAX_LENGTH:
            raise DecodingError(f"a code of {length} bits outside [1, {MAX_LENGTH}]")
        lengths[symbol] = length
        room -= _WINDOW >> length
        if room < 0:
            raise DecodingError("a Huffman table whose Kraft sum exceeds 1")
        symbol, after_run = symbol + 1, False
    return lengths, bits.at


# Blocks and the tables that they share.


def edges(num: int) -> Ints:
    """The start of each stream, and the end [4 * blocks + 1].

    Stream j of a block of m symbols is the block's symbols m * j // 4 to m * (j + 1) // 4.
    """
    begins = np.arange(0, num, BLOCK, dtype=np.int64)
    sizes = np.minimum(BLOCK, num - begins)
    quarters = sizes[:, np.newaxis] * np.arange(STREAMS) // STREAMS
    return np.append(begins[:, np.newaxis] + quarters, num)


def count(symbols: Octets, alphabet: int) -> Ints:
    """The histogram of symbols [alphabet]."""
    return np.bincount(symbols, minlength=alphabet)


def count_streams(symbols: Octets, alphabet: int) -> Ints:
    """The histograms of symbols by stream [blocks, 4, alphabet]."""
    bounds = edges(symbols.size).tolist()
    counts = [np.bincount(symbols[a:b], minlength=alphabet) for a, b in pairwise(bounds)]
    return np.stack(counts).reshape(-1, STREAMS, alphabet)


def count_buckets(values: Ints, mantissa: int, alphabet: int) -> Ints:
    """`count_streams` of the buckets that `split` gives."""
    return count_streams(split(values, mantissa)[0], alphabet)


def stream_bytes(histograms: Ints, lengths: Octets, of_block: Ints) -> Ints:
    """The length in bytes of each stream under the table of its block [blocks, 4]."""
    bits = np.stack([code_bits(row) for row in lengths])
    return cast(Ints, (np.einsum("bsa,ba->bs", histograms, bits[of_block]) + 7) // 8)


def choose_tables(histograms: Ints, at_most: int = MAX_TABLES) -> tuple[Octets, Ints]:
    """The code lengths [tables, alphabet] and the table of each block [blocks]: one table, or as
    many, up to `at_most`, as make tables and streams the smallest.

    The blocks are ranked by their mean code length under a common table and cut into equal groups,
    which a few rounds of k-means improve; all in integers, so every machine chooses alike.
    """
    of_blocks = histograms.sum(axis=1)
    best = common = _grouped(of_blocks, np.zeros(len(of_blocks), np.int64))
    smallest = _size(histograms, *best)
    means = of_blocks @ code_bits(common[0][0]) * BLOCK // of_blocks.sum(axis=1)
    ranks = np.argsort(np.argsort(means, kind="stable"), kind="stable")
    for num_tables in range(2, min(at_most, len(of_blocks)) + 1):
        tables = _grouped(of_blocks, ranks * num_tables // len(of_blocks))
        for _ in range(ROUNDS):
            tables = _grouped(of_blocks, _cheapest(of_blocks, tables[0]))
        size = _size(histograms, *tables)
        if size < smallest:
            best, smallest = tables, size
    return best


def _grouped(of_blocks: Ints, of_block: Ints) -> tuple[Octets, Ints]:
    """Best codes for histograms [blocks, alphabet] grouped as `of_block` [blocks] says."""
    groups, index = np.unique(of_block, return_inverse=True)
    sums = [of_blocks[of_block == group].sum(axis=0) for group in groups]
    return np.stack([code_lengths(histogram) for histogram in sums]), index


def _cheapest(of_blocks: Ints, lengths: Octets) -> Ints:
    """The table that codes each block shortest, the first of equals."""
    bits = np.stack([code_bits(row) for row in lengths])
    return cast(Ints, (of_blocks @ np.where(lengths == 0, _IMPOSSIBLE, bits).T).argmin(axis=1))


def _size(histograms: Ints, lengths: Octets, of_block: Ints) -> int:
    head = -(-(2 + table_bits(lengths)) // 8)
    return head + int(stream_bytes(histograms, lengths, of_block).sum())


# Streams.


def write_streams(symbols: Octets, lengths: Octets, of_block: Ints, num_bytes: Ints) -> Octets:
    """All streams in order, `num_bytes` [blocks, 4] long. The last code of each is widened so that
    it ends on a byte. What is returned may be written over by the next call in this thread."""
    of_tables = np.stack([codes(row) for row in lengths])
    bits = np.stack([code_bits(row) for row in lengths])
    parts = []
    for block in range(0, of_block.size, _BLOCKS_AT_ONCE):
        tables = of_block[block : block + _BLOCKS_AT_ONCE]
        part = symbols[block * BLOCK : (block + tables.size) * BLOCK].astype(np.int64)
        bounds = edges(part.size)
        part += np.repeat(tables * of_tables.shape[1], np.diff(bounds[::STREAMS]))
        filled = np.flatnonzero(np.diff(bounds))
        widths = bits.ravel()[part]
        widths[bounds[filled + 1] - 1] += -np.add.reduceat(widths, bounds[filled]) % 8
        parts.append(pack(of_tables.ravel()[part], widths))
    return np.frombuffer(b"".join(parts), np.uint8)


def read_streams(
    octets: Octets, start: int, num: int, num_bytes: Ints, of_block: Ints, lengths: Octets
) -> Octets:
    """The `num` symbols of all streams, which begin at byte `start` and are `num_bytes` [blocks, 4]
    long, each block under the table `of_block` [blocks] of `lengths` [tables, alphabet].

    Raises DecodingError unless each stream ends in its last byte, and that in zeros. The caller has
    seen that the streams lie within `octets`, less their guard, and that the tables are complete.
    """
    each = num_bytes.ravel()
    bounds = 8 * (start + np.append(0, np.cumsum(each)))
    tables = np.repeat(of_block, STREAMS)
    lookup = Lookup.of(lengths)
    between = edges(num)
    symbols = np.empty(num, np.uint8)
    full = STREAMS * (num // BLOCK)
    cuts = [*range(0, full, STREAMS * _BLOCKS_AT_ONCE), full, each.size]
    for first, stop in pairwise(cuts):
        if first == stop:
            continue
        counts = np.diff(between[first : stop + 1])
        lanes = Lanes(bounds[first:stop], counts, tables[first:stop])
        part, ends = follow(octets, int(bounds[stop]), lanes, lookup)
        spare = bounds[first + 1 : stop + 1] - ends
        if int(spare.min()) < 0 or int(spare.max()) > 7:
            raise DecodingError("a stream that does not end in its last byte")
        if gather(octets, ends, spare).any():
            raise DecodingError("padding after a stream is not zero")
        symbols[between[first] : between[stop]] = part
    return symbols


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
    """Add up what the symbols of `total.size` coordinates stand for, `per_group` to each of the
    `num` that `read_streams` reads: tables[t, symbol] in the tensor t that ends before ends[t].

    Raises DecodingError as `read_streams` and `ungroup` do, and then nothing was added.
    """
    groups = read_streams(octets, start, num, num_bytes, of_block, lengths)
    symbols = ungroup(groups, tables.shape[1], per_group, total.size)
    for begin, end, table_ in zip(np.append(0, ends), ends, tables, strict=False):
        total[begin:end] += table_[symbols[begin:end]]


def read_string(
    octets: Octets, at: int, stop: int, num: int, lengths: Octets
) -> tuple[Octets, int]:
    """`num` symbols whose codes begin at bit `at`, and the bit where they end.

    Codes that run on past bit `stop` are said to end beyond it; their symbols mean nothing.
    """
    lane = Lanes(*(np.array([number], np.int64) for number in (at, num, 0)))
    stop = min(stop, at + num * MAX_LENGTH)
    symbols, ends = follow(octets, stop, lane, Lookup.of(lengths[np.newaxis]))
    return symbols, int(ends[0])


class Lookup(NamedTuple):
    """For each table and each window of 12 bits, the first symbol and its bits [tables * 4096]."""

    symbols: Octets
    bits: Octets

    @classmethod
    def of(cls, lengths: Octets) -> Lookup:
        pairs = [lookup(row) for row in lengths]
        return cls(np.concatenate([s for s, _ in pairs]), np.concatenate([b for _, b in pairs]))


class Lanes(NamedTuple):
    """Streams one after the other: the bit at which each begins, how many symbols it holds, the
    index of its table; all [lanes]."""

    begins: Ints
    counts: Ints
    tables: Ints


def follow(octets: Octets, stop: int, lanes: Lanes, lookup: Lookup) -> tuple[Octets, Ints]:
    """Decode `lanes`, which end by bit `stop`: their symbols in order, the bit where each ends.

    Never fails: a stream whose codes run on comes to rest after bit `stop` and is said to end
    beyond that. `octets` goes on for 8 bytes after `stop`.
    """
    first = int(lanes.begins[0]) >> 3
    num_bytes = (stop + 7 >> 3) - first
    windows = np.ndarray((octets.size - 3,), "<u4", octets, 0, (1,))[first:]
    several = lookup.bits.size > _WINDOW
    table_at: npt.NDArray[np.uint32] | int = 0
    if several:
        lane_bytes = np.diff(np.append(lanes.begins >> 3, first + num_bytes))
        table_at = np.repeat(lanes.tables << MAX_LENGTH, lane_bytes).astype(np.uint32)
    steps = np.zeros((num_bytes + _BEYOND, 8), np.uint8)
    for bit in range(8):
        ahead = (windows[:num_bytes] >> np.uint32(bit)) & _MASK
        steps[:num_bytes, bit] = lookup.bits[ahead + table_at]
    # A code of no bits waits where steps are 0: in a lane of no bytes they are those of the next.
    still = lookup.bits[lanes.tables << MAX_LENGTH] == 0
    begins = np.where(still, 8 * num_bytes, lanes.begins - 8 * first)
    count = int(lanes.counts[0])
    if begins.size >= _FEWEST_LANES and (lanes.counts == count).all():
        begun = _side_by_side(steps.ravel(), begins, count)
    else:
        begun = _one_by_one(steps.tobytes(), begins.tolist(), lanes.counts.tolist())
    at = (windows[begun >> 3] >> (begun & 7).astype(np.uint32)) & _MASK
    if several:
        at += np.repeat(lanes.tables << MAX_LENGTH, lanes.counts).astype(np.uint32)
    # The end is that of the last code, looked up again: where steps are 0, codes still have bits.
    ends = lanes.begins.copy()
    moved = (lanes.counts > 0) & ~still
    last = np.cumsum(lanes.counts)[moved] - 1
    ends[moved] = begun[last] + lookup.bits[at[last]] + 8 * first
    return lookup.symbols[at], ends


def _side_by_side(steps: Octets, begins: Ints, count: int) -> Ints:
    """The starting bit of each of `count` codes in each lane [lanes * count]."""
    begun = np.empty((count, begins.size), np.int64)
    at = begins.copy()
    step = np.empty(begins.size, np.uint8)
    for row in begun:
        row[:] = at
        steps.take(at, out=step, mode="clip")
        at += step
    return begun.T.ravel()


def _one_by_one(steps: bytes, begins: list[int], counts: list[int]) -> Ints:
    begun: list[int] = []
    for at, count in zip(begins, counts, strict=True):
        for _ in range(count):
            begun.append(at)
            at += steps[at]
    return np.array(begun, np.int64)
