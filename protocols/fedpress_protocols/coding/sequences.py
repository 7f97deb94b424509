"""Sequences of symbols under Huffman codes, each symbol with a few raw bits of its own if need be.

A sequence of up to 2048 symbols is one string of bits: table, codes, raw bits. A longer one is cut
into blocks of 8192, which share up to 4 tables:

    tables      2 bits: how many, less 1; then each table; zeros to the byte
    directory   one row per block
    streams     4 per block, each a quarter of its symbols and padded to a byte
    raw bits    one string per block, padded to a byte

A block can be decoded by itself, and its four streams side by side, so that one looks up a code
while another still waits for its own (Zstandard, RFC 8878, Section 3.1.1.3.1.6, has four as well).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple, cast

import numpy as np

from fedpress_protocols.coding import huffman, streams
from fedpress_protocols.coding.bits import Ints, Octets, Reader, bit_string, gather, pack
from fedpress_protocols.errors import DecodingError

SMALL = 2048
BLOCK = 8192
STREAMS = 4
MAX_TABLES = 4
_BLOCKS_AT_ONCE = 64
_TABLE_SHIFT = 12  # in the first stream's length, which needs 12 bits at most
_LONGEST_STREAM = BLOCK // STREAMS * huffman.MAX_LENGTH // 8
_ROUNDS = 3
_IMPOSSIBLE = 1 << 20  # bits, for a symbol that a table does not have


class Candidate(NamedTuple):
    """One way to write something: how many bytes it takes, and the bytes when they are wanted."""

    size: int
    write: Callable[[], bytes]


def smallest(candidates: Sequence[Candidate]) -> Candidate:
    """The shortest, the first of equals."""
    return min(candidates, key=lambda candidate: candidate.size)


def plan(
    symbols: Octets, raw_widths: Ints, raw: Ints | None = None, anchors: Ints | None = None
) -> Candidate:
    """One or more symbols in [0, len(raw_widths)), each with as many raw bits as its width says.

    `raw` holds those bits, one number for each symbol, and may be left out if no symbol has any.
    `anchors` [blocks] are numbers below 2**32 that go into the directory, if there is one.
    """
    if symbols.size <= SMALL:
        return _plan_small(symbols, raw_widths, raw)
    return _plan_blocks(symbols, raw_widths, raw, anchors)


def read(
    reader: Reader, num: int, raw_widths: Ints, anchored: bool = False
) -> tuple[Octets, Ints | None, Ints | None]:
    """The symbols, raw bits and anchors of `plan`; None for what is not there.

    Memory and work are O(num), so a `num` that came off the wire is bounded by the caller.
    """
    if num <= SMALL:
        return *_read_small(reader, num, raw_widths), None
    return _read_blocks(reader, num, raw_widths, anchored)


def _plan_small(symbols: Octets, raw_widths: Ints, raw: Ints | None) -> Candidate:
    histogram = np.bincount(symbols, minlength=raw_widths.size)
    lengths = huffman.code_lengths(histogram)
    table, table_widths = bit_string(huffman.table(lengths))
    code_bits = huffman.code_bits(lengths)
    num_bits = sum(table_widths) + int(histogram @ (code_bits + raw_widths))

    def write() -> bytes:
        values = [np.array(table, np.uint64), huffman.codes(lengths)[symbols]]
        widths = [np.array(table_widths, np.int64), code_bits[symbols]]
        if raw is not None:
            values.append(raw.astype(np.uint64))
            widths.append(raw_widths[symbols])
        return pack(np.concatenate(values), np.concatenate(widths))

    return Candidate(-(-num_bits // 8), write)


def _read_small(reader: Reader, num: int, raw_widths: Ints) -> tuple[Octets, Ints | None]:
    lookup = streams.Lookup.of([huffman.read_table(reader, raw_widths.size)])
    lane = streams.Lanes(*(np.array([number], np.int64) for number in (reader.at, num, 0)))
    stop = min(reader.end, reader.at + num * huffman.MAX_LENGTH)
    symbols, ends = streams.follow(reader.octets, stop, lane, lookup)
    reader.skip(int(ends[0]) - reader.at)
    raw = _read_raw(reader, raw_widths[symbols]) if raw_widths.any() else None
    reader.align()
    return symbols, raw


def _read_raw(reader: Reader, widths: Ints) -> Ints:
    """Numbers of these widths, one after the other."""
    ends = np.cumsum(widths)
    start = reader.skip(int(ends[-1]))
    return gather(reader.octets, start + ends - widths, widths).astype(np.int64)


def _row(raw_widths: Ints, anchored: bool) -> np.dtype[np.void]:
    """A row of the directory: the bytes in each stream, 4096 times the table's index added to the
    first; the bytes of raw bits, where symbols have any; the anchor, if asked for."""
    columns: list[tuple[str, str] | tuple[str, str, int]] = [("streams", "<u2", STREAMS)]
    if raw_widths.any():
        columns.append(("raw", "<u2"))
    if anchored:
        columns.append(("anchor", "<u4"))
    return np.dtype(columns)


def _edges(num: int) -> Ints:
    """Where each stream begins, and the end [4 * blocks + 1].

    Stream j of a block of m symbols is the block's symbols m * j // 4 to m * (j + 1) // 4.
    """
    begins = np.arange(0, num, BLOCK, dtype=np.int64)
    sizes = np.minimum(BLOCK, num - begins)
    quarters = sizes[:, np.newaxis] * np.arange(STREAMS) // STREAMS
    return np.append(begins[:, np.newaxis] + quarters, num)


def _plan_blocks(
    symbols: Octets, raw_widths: Ints, raw: Ints | None, anchors: Ints | None
) -> Candidate:
    edges = _edges(symbols.size).tolist()
    counts = [np.bincount(symbols[a:b], minlength=raw_widths.size) for a, b in pairwise(edges)]
    histograms = np.stack(counts).reshape(-1, STREAMS, raw_widths.size)
    of_blocks = histograms.sum(axis=1)
    raw_bytes = (of_blocks @ raw_widths + 7) // 8
    row = _row(raw_widths, anchors is not None)

    def stream_bytes(tables: _Tables) -> Ints:
        bits = np.einsum("bsa,ba->bs", histograms, tables.code_bits[tables.of_block])
        return cast(Ints, (bits + 7) // 8)

    def size(tables: _Tables) -> int:
        fixed = tables.size + row.itemsize * len(of_blocks) + int(raw_bytes.sum())
        return fixed + int(stream_bytes(tables).sum())

    tables = _choose_tables(of_blocks, size)

    def write() -> bytes:
        rows = np.zeros(len(of_blocks), row)
        lengths = stream_bytes(tables)
        lengths[:, 0] += tables.of_block << _TABLE_SHIFT
        rows["streams"] = lengths
        if raw_widths.any():
            rows["raw"] = raw_bytes
        if anchors is not None:
            rows["anchor"] = anchors
        parts = [tables.to_bytes(), rows.tobytes(), *_pack_streams(symbols, tables)]
        if raw is not None:
            parts.extend(_pack_raw(symbols, raw_widths, raw))
        return b"".join(parts)

    return Candidate(size(tables), write)


class _Tables:
    """The codes of a sequence, lengths [tables, alphabet], and which of them each block uses."""

    def __init__(self, of_blocks: Ints, of_block: Ints) -> None:
        """Best codes for histograms [blocks, alphabet] grouped as `of_block` [blocks] says."""
        groups, self.of_block = np.unique(of_block, return_inverse=True)
        grouped = [of_blocks[of_block == group].sum(axis=0) for group in groups]
        self.lengths = [huffman.code_lengths(histogram) for histogram in grouped]
        self.code_bits = np.stack([huffman.code_bits(lengths) for lengths in self.lengths])
        pairs = [pair for lengths in self.lengths for pair in huffman.table(lengths)]
        self._bits = [(len(self.lengths) - 1, 2), *pairs]
        self.size = -(-sum(width for _, width in self._bits) // 8)

    def to_bytes(self) -> bytes:
        return pack(*bit_string(self._bits))

    def regrouped(self, of_blocks: Ints) -> _Tables:
        """Each block goes to the table that codes it shortest, and the codes are made anew."""
        absent = np.stack([lengths == 0 for lengths in self.lengths])
        costs = of_blocks @ np.where(absent, _IMPOSSIBLE, self.code_bits).T
        return _Tables(of_blocks, costs.argmin(axis=1))


def _choose_tables(of_blocks: Ints, size: Callable[[_Tables], int]) -> _Tables:
    """One table, or as many as make the whole smallest.

    The blocks are ranked by their mean code length under a common table and cut into equal groups,
    which a few rounds of k-means improve; all in integers, so every machine chooses alike.
    """
    best = common = _Tables(of_blocks, np.zeros(len(of_blocks), np.int64))
    means = of_blocks @ common.code_bits[0] * BLOCK // of_blocks.sum(axis=1)
    ranks = np.argsort(np.argsort(means, kind="stable"), kind="stable")
    for num_tables in range(2, min(MAX_TABLES, len(of_blocks)) + 1):
        tables = _Tables(of_blocks, ranks * num_tables // len(of_blocks))
        for _ in range(_ROUNDS):
            tables = tables.regrouped(of_blocks)
        if size(tables) < size(best):
            best = tables
    return best


def _pack_streams(symbols: Octets, tables: _Tables) -> list[bytes]:
    """All streams in order. The last code of each is widened so that it ends on a byte."""
    codes = np.stack([huffman.codes(lengths) for lengths in tables.lengths])
    parts = []
    for block in range(0, tables.of_block.size, _BLOCKS_AT_ONCE):
        of_block = tables.of_block[block : block + _BLOCKS_AT_ONCE]
        part = symbols[block * BLOCK : (block + of_block.size) * BLOCK].astype(np.int64)
        edges = _edges(part.size)
        part += np.repeat(of_block * codes.shape[1], np.diff(edges[::STREAMS]))
        filled = np.flatnonzero(np.diff(edges))
        widths = tables.code_bits.ravel()[part]
        widths[edges[filled + 1] - 1] += -np.add.reduceat(widths, edges[filled]) % 8
        parts.append(pack(codes.ravel()[part], widths))
    return parts


def _pack_raw(symbols: Octets, raw_widths: Ints, raw: Ints) -> list[bytes]:
    blocks = [slice(start, start + BLOCK) for start in range(0, symbols.size, BLOCK)]
    return [pack(raw[block], raw_widths[symbols[block]]) for block in blocks]


def _read_blocks(
    reader: Reader, num: int, raw_widths: Ints, anchored: bool
) -> tuple[Octets, Ints | None, Ints | None]:
    num_tables = 1 + reader.read(2)
    tables = [huffman.read_table(reader, raw_widths.size) for _ in range(num_tables)]
    reader.align()
    row = _row(raw_widths, anchored)
    num_blocks = -(-num // BLOCK)
    start = reader.skip(8 * row.itemsize * num_blocks) >> 3
    rows = np.frombuffer(reader.octets, row, num_blocks, start)
    lengths = rows["streams"].astype(np.int64)
    of_block = lengths[:, 0] >> _TABLE_SHIFT
    lengths[:, 0] &= (1 << _TABLE_SHIFT) - 1
    if int(of_block.max()) >= num_tables:
        raise DecodingError(f"a block under table {int(of_block.max())} of {num_tables}")
    if int(lengths.max()) > _LONGEST_STREAM:
        raise DecodingError(f"a stream of {lengths.max()} bytes, at most {_LONGEST_STREAM}")
    lookup = streams.Lookup.of(tables)
    symbols = _read_streams(reader, num, lengths.ravel(), np.repeat(of_block, STREAMS), lookup)
    raw = None
    if raw_widths.any():
        raw = np.empty(num, np.int64)
        for block, num_bytes in enumerate(rows["raw"].tolist()):
            part = slice(block * BLOCK, (block + 1) * BLOCK)
            begin = reader.at
            raw[part] = _read_raw(reader, raw_widths[symbols[part]])
            reader.align()
            if reader.at - begin != 8 * num_bytes:
                found = (reader.at - begin) // 8
                raise DecodingError(f"{found} bytes of raw bits where {num_bytes} are declared")
    return symbols, raw, rows["anchor"].astype(np.int64) if anchored else None


def _read_streams(
    reader: Reader, num: int, num_bytes: Ints, tables: Ints, lookup: streams.Lookup
) -> Octets:
    """The symbols of all streams; `num_bytes` and `tables` [4 * blocks] are the streams'."""
    bounds = reader.skip(8 * int(num_bytes.sum())) + 8 * np.append(0, np.cumsum(num_bytes))
    edges = _edges(num)
    symbols = np.empty(num, np.uint8)
    full = STREAMS * (num // BLOCK)
    cuts = [*range(0, full, STREAMS * _BLOCKS_AT_ONCE), full, num_bytes.size]
    for first, stop in pairwise(cuts):
        if first == stop:
            continue
        lanes = streams.Lanes(
            bounds[first:stop], np.diff(edges[first : stop + 1]), tables[first:stop]
        )
        part, ends = streams.follow(reader.octets, int(bounds[stop]), lanes, lookup)
        spare = bounds[first + 1 : stop + 1] - ends
        if int(spare.min()) < 0 or int(spare.max()) > 7:
            raise DecodingError("a stream that does not end in its last byte")
        if gather(reader.octets, ends, spare).any():
            raise DecodingError("padding after a stream is not zero")
        symbols[edges[first] : edges[stop]] = part
    return symbols
