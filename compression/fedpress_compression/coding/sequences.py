"""Sequences of symbols under Huffman codes, optionally with raw bits for each symbol.

A sequence of up to 2048 symbols is one string of bits: table, codes, raw bits. A longer one is cut
into blocks of 8192, which share up to 4 tables:

    tables      2 bits: how many, less 1; then each table; zeros to the byte
    directory   one row per block
    streams     4 per block, each a quarter of its symbols and padded to a byte
    raw bits    one string per block, padded to a byte

Blocks can be decoded independently, and the four streams of a block in parallel, so that lookups
overlap (Zstandard, RFC 8878, Section 3.1.1.3.1.6, has four as well).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedpress_compression import kernels
from fedpress_compression.coding import huffman
from fedpress_compression.coding.bits import Ints, Octets, Reader, bit_string, pack
from fedpress_compression.errors import DecodingError
from fedpress_compression.kernels.wire import BLOCK, MAX_TABLES, STREAMS

SMALL = 2048
_TABLE_SHIFT = 12  # in the first stream's length, which needs 12 bits at most
_LONGEST_STREAM = BLOCK // STREAMS * huffman.MAX_LENGTH // 8


class Candidate(NamedTuple):
    """A candidate encoding: its length in bytes, and a function that produces the bytes."""

    size: int
    write: Callable[[], bytes]


def smallest(candidates: Sequence[Candidate]) -> Candidate:
    """The shortest candidate, the first of equal ones."""
    return min(candidates, key=lambda candidate: candidate.size)


def plan(
    symbols: Octets, raw_widths: Ints, raw: Ints | None = None, anchors: Ints | None = None
) -> Candidate:
    """Plan one or more symbols in [0, len(raw_widths)), each with the raw bits of its width.

    `raw` has these bits, one number for each symbol, and may be left out if no symbol has any.
    `anchors` [blocks] are numbers below 2**32 for the directory, if there is one.
    """
    if symbols.size <= SMALL:
        return _plan_small(symbols, raw_widths, raw)
    histograms = kernels.count_streams(symbols, raw_widths.size)
    return plan_counted(histograms, raw_widths, lambda: (symbols, raw), anchors)


def read(
    reader: Reader, num: int, raw_widths: Ints, anchored: bool = False
) -> tuple[Octets, Ints | None, Ints | None]:
    """Read the symbols, raw bits and anchors of `plan`; None for absent ones.

    Memory and work are O(num), so the caller must bound a `num` from the wire.
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
    lengths = huffman.read_table(reader, raw_widths.size)
    symbols, end = kernels.read_string(reader.octets, reader.at, reader.end, num, lengths)
    reader.skip(end - reader.at)
    raw = _read_raw(reader, symbols, raw_widths) if raw_widths.any() else None
    reader.align()
    return symbols, raw


def _read_raw(reader: Reader, symbols: Octets, raw_widths: Ints) -> Ints:
    raw, end = kernels.read_raw(reader.octets, reader.at, reader.end, symbols, raw_widths)
    reader.skip(end - reader.at)
    return raw


def _row(raw_widths: Ints, anchored: bool) -> np.dtype[np.void]:
    """A row of the directory: the bytes in each stream, 4096 times the table's index added to the
    first; the bytes of raw bits, where symbols have any; the anchor, if asked for."""
    columns: list[tuple[str, str] | tuple[str, str, int]] = [("streams", "<u2", STREAMS)]
    if raw_widths.any():
        columns.append(("raw", "<u2"))
    if anchored:
        columns.append(("anchor", "<u4"))
    return np.dtype(columns)


def plan_counted(
    histograms: Ints,
    raw_widths: Ints,
    drawn: Callable[[], tuple[Octets, Ints | None]],
    anchors: Ints | None = None,
) -> Candidate:
    """`plan` of more than 2048 symbols, of which there are as many in each stream as `histograms`
    [blocks, 4, len(raw_widths)] say; `drawn` gives them and their raw bits, if they are wanted."""
    lengths, of_block = kernels.choose_tables(histograms, MAX_TABLES)
    num_bytes = kernels.stream_bytes(histograms, lengths, of_block)
    has_raw = bool(raw_widths.any())
    raw_bytes = (histograms.sum(axis=1) @ raw_widths + 7) // 8 if has_raw else np.zeros(1, np.int64)
    head = -(-(2 + kernels.table_bits(lengths)) // 8)
    rows = np.zeros(of_block.size, _row(raw_widths, anchors is not None))
    rows["streams"] = num_bytes
    rows["streams"][:, 0] += (of_block << _TABLE_SHIFT).astype(np.uint16)
    if has_raw:
        rows["raw"] = raw_bytes
    if anchors is not None:
        rows["anchor"] = anchors

    def write() -> bytes:
        symbols, raw = drawn()
        streams = kernels.write_streams(symbols, lengths, of_block, num_bytes)
        tables = kernels.write_tables(lengths)
        parts: list[bytes | memoryview] = [tables, rows.tobytes(), streams.data]
        if raw is not None:
            blocks = [slice(start, start + BLOCK) for start in range(0, symbols.size, BLOCK)]
            parts += [kernels.write_raw(symbols[b], raw[b], raw_widths) for b in blocks]
        return b"".join(parts)

    return Candidate(head + rows.nbytes + int(num_bytes.sum() + raw_bytes.sum()), write)


class Blocks(NamedTuple):
    """Streams in the `octets` of a body, with validated structure but not content; see
    `kernels`."""

    octets: Octets
    start: int
    num: int
    num_bytes: Ints
    of_block: Ints
    lengths: Octets

    def read(self) -> Octets:
        return kernels.read_streams(*self)


def find_blocks(reader: Reader, num: int, alphabet: int) -> Blocks:
    """Skip a sequence of more than 2048 symbols without raw bits."""
    return _find_blocks(reader, num, np.zeros(alphabet, np.int64), False)[0]


def _find_blocks(
    reader: Reader, num: int, raw_widths: Ints, anchored: bool
) -> tuple[Blocks, npt.NDArray[np.void]]:
    """Skip tables, directory and streams, and validate all except the content of the streams."""
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
    start = reader.skip(8 * int(lengths.sum())) >> 3
    return Blocks(reader.octets, start, num, lengths, of_block, np.stack(tables)), rows


def _read_blocks(
    reader: Reader, num: int, raw_widths: Ints, anchored: bool
) -> tuple[Octets, Ints | None, Ints | None]:
    blocks, rows = _find_blocks(reader, num, raw_widths, anchored)
    symbols = blocks.read()
    raw = None
    if raw_widths.any():
        raw = np.empty(num, np.int64)
        for block, num_bytes in enumerate(rows["raw"].tolist()):
            part = slice(block * BLOCK, (block + 1) * BLOCK)
            begin = reader.at
            raw[part] = _read_raw(reader, symbols[part], raw_widths)
            reader.align()
            if reader.at - begin != 8 * num_bytes:
                num_read = (reader.at - begin) // 8
                raise DecodingError(f"{num_read} bytes of raw bits, but {num_bytes} are declared")
    return symbols, raw, rows["anchor"].astype(np.int64) if anchored else None
