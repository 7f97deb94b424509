"""Codes for symbols of a small alphabet: stored, or Huffman codes in one of four forms.

A Huffman code has whole bits, so symbols with little information are first combined, several to a
byte (grouped); if one symbol is far more frequent than the others, the positions and values of the
others are coded (gaps). Few symbols of a large alphabet do not justify its table, so only the
buckets of their magnitudes are coded (buckets). Two symbols with long runs are coded by the lengths
of the runs (runs).
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple, cast

import numpy as np

from fedpress_compression import kernels
from fedpress_compression.coding import sequences
from fedpress_compression.coding.bits import Ints, Octets, Reader, uvarint
from fedpress_compression.coding.exp_golomb import MAX_MANTISSA, plan_numbers, read_numbers
from fedpress_compression.coding.positions import plan_positions, read_positions
from fedpress_compression.coding.sequences import Candidate, smallest
from fedpress_compression.errors import DecodingError


class _Mode(IntEnum):
    STORED = 0
    GROUPED = 1
    BUCKETS = 2
    GAPS = 3
    RUNS = 6


_PARAMETER_SHIFT = 3
_FOLDED = 4
_SECOND_FIRST = 4
_MOST_BUCKETED = 1 << 16
_MANY = 1 << 15
_TABLE_IS_CHEAP = 16


def plan_alphabet(symbols: Octets, size: int, nested: bool = False) -> Candidate:
    """Plan symbols in [0, size), 1 <= size <= 256; symbols `nested` in gaps have no gaps
    themselves."""
    if not symbols.size or size == 1:
        return Candidate(0, bytes)
    candidates = [_headed(_Mode.STORED, 0, _plan_stored(symbols, size))]
    for per_group in _groupings(symbols.size, size):
        grouped = _plan_grouped(symbols, size, per_group)
        candidates.append(_headed(_Mode.GROUPED, per_group, grouped))
    if size > _TABLE_IS_CHEAP and symbols.size <= _MOST_BUCKETED:
        for folded in (0, _FOLDED):
            values = symbols.astype(np.int64)
            numbers = _fold(values, size) if folded else values
            for mantissa in range(MAX_MANTISSA + 1):
                buckets = plan_numbers(numbers, size, mantissa)
                candidates.append(_headed(_Mode.BUCKETS, mantissa | folded, buckets))
    counts = kernels.count(symbols, size)
    if not nested and 2 * int(counts.max()) >= symbols.size:
        gaps = _plan_gaps(symbols, size, int(counts.argmax()), smallest(candidates).size)
        candidates.append(_headed(_Mode.GAPS, 0, gaps))
    if size == 2:
        candidates.extend(_plan_runs(symbols))
    return smallest(candidates)


class Grouped(NamedTuple):
    """`num` symbols in groups that have not been read yet."""

    blocks: sequences.Blocks
    size: int
    per_group: int
    num: int

    def read(self) -> Octets:
        return kernels.ungroup(self.blocks.read(), self.size, self.per_group, self.num)

    def add_to(self, total: Ints, ends: Ints, tables: Ints) -> None:
        """Add tables[tensor, symbol] to `total` for each tensor, which ends before ends[tensor].

        Raises DecodingError without adding anything.
        """
        kernels.add_streams(*self.blocks, self.per_group, total, ends, tables)


def find_alphabet(reader: Reader, size: int, num: int) -> Octets | Grouped:
    """Like `read_alphabet`, but leave long sequences in groups unread, for direct summation."""
    head = int(reader.octets[reader.at >> 3])
    mode, per_group = head & 7, head >> _PARAMETER_SHIFT
    in_groups = size > 1 and mode == _Mode.GROUPED and 1 <= per_group <= _most_per_group(size)
    if not in_groups or -(-num // per_group) <= sequences.SMALL:
        return read_alphabet(reader, size, num)
    reader.skip(8)
    blocks = sequences.find_blocks(reader, -(-num // per_group), size**per_group)
    return Grouped(blocks, size, per_group, num)


def read_alphabet(reader: Reader, size: int, num: int, nested: bool = False) -> Octets:
    """Read `num` symbols in [0, size). The caller must bound `num`."""
    if not num or size == 1:
        return np.zeros(num, np.uint8)
    head = reader.read(8)
    mode, parameter = head & 7, head >> _PARAMETER_SHIFT
    match mode:
        case _Mode.STORED if not parameter:
            return _read_stored(reader, size, num)
        case _Mode.GROUPED if 1 <= parameter <= _most_per_group(size):
            groups = -(-num // parameter)
            raw_widths = np.zeros(size**parameter, np.int64)
            return kernels.ungroup(
                sequences.read(reader, groups, raw_widths)[0], size, parameter, num
            )
        case _Mode.BUCKETS if parameter <= MAX_MANTISSA | _FOLDED and num <= _MOST_BUCKETED:
            numbers, _ = read_numbers(reader, num, size, parameter & MAX_MANTISSA)
            if int(numbers.max()) >= size:
                raise DecodingError(f"number {numbers.max()} outside [0, {size})")
            values = _unfold(numbers, size) if parameter & _FOLDED else numbers
            return values.astype(np.uint8)
        case _Mode.GAPS if not parameter and not nested:
            return _read_gaps(reader, size, num)
        case _Mode.RUNS if parameter <= MAX_MANTISSA | _SECOND_FIRST and size == 2:
            return _read_runs(reader, parameter, num)
    raise DecodingError(f"symbols in mode {mode} with parameter {parameter}")


def _headed(mode: _Mode, parameter: int, body: Candidate) -> Candidate:
    head = bytes((mode | parameter << _PARAMETER_SHIFT,))
    return Candidate(1 + body.size, lambda: head + body.write())


# Several symbols in a byte.


def _most_per_group(size: int) -> int:
    """The number of symbols that fit into a byte, as digits to the base `size`."""
    return max(digits for digits in range(1, 9) if size**digits <= 256)


def _groupings(num: int, size: int) -> list[int]:
    """The group sizes to try: the largest, or if the table is significant, all with small
    tables."""
    most = _most_per_group(size)
    if num > _MANY:
        return [most]
    return [n for n in range(1, most + 1) if n == 1 or size**n * n <= 2 * num]


def _plan_grouped(symbols: Octets, size: int, per_group: int) -> Candidate:
    return sequences.plan(
        kernels.group(symbols, size, per_group), np.zeros(size**per_group, np.int64)
    )


def _stored_as_digits(size: int) -> bool:
    """Whether digits in a byte take fewer bits per symbol than binary numbers: sizes 3, 5 and 6."""
    return _most_per_group(size) * (size - 1).bit_length() > 8


def _plan_stored(symbols: Octets, size: int) -> Candidate:
    if _stored_as_digits(size):
        per_group = _most_per_group(size)
        num_groups = -(-symbols.size // per_group)
        return Candidate(num_groups, lambda: kernels.group(symbols, size, per_group).tobytes())
    width = (size - 1).bit_length()

    num_bytes = -(-symbols.size * width // 8)
    return Candidate(num_bytes, lambda: kernels.write_octets(symbols, width))


def _read_stored(reader: Reader, size: int, num: int) -> Octets:
    if _stored_as_digits(size):
        per_group = _most_per_group(size)
        num_groups = -(-num // per_group)
        start = reader.skip(8 * num_groups) >> 3
        groups = reader.octets[start : start + num_groups]
        if int(groups.max()) >= size**per_group:
            raise DecodingError(f"{groups.max()} is not {per_group} digits to the base {size}")
        return kernels.ungroup(groups, size, per_group, num)
    width = (size - 1).bit_length()
    start = reader.skip(num * width) >> 3
    reader.align()
    symbols = kernels.read_octets(reader.octets, start, num, width)
    if int(symbols.max()) >= size:
        raise DecodingError(f"symbol {symbols.max()} outside [0, {size})")
    return symbols


# Magnitudes.


def _fold(values: Ints, size: int) -> Ints:
    """0, 1, 2, ... for the centre c = size // 2, c - 1, c + 1, c - 2, ...; onto [0, size)."""
    distance = values - size // 2
    return np.where(distance < 0, -2 * distance - 1, 2 * distance)


def _unfold(numbers: Ints, size: int) -> Ints:
    half = (numbers + 1) >> 1
    return size // 2 + np.where(numbers & 1, -half, half)


# The most frequent symbol left out.


def _plan_gaps(symbols: Octets, size: int, common: int, below: int) -> Candidate:
    """Plan the most frequent symbol, the positions of the others, and the others; any form if it
    cannot take less than `below` bytes."""
    where = kernels.others(symbols, common)
    others = symbols[where]
    others -= others > common
    positions = plan_positions(where, symbols.size, below)
    which = plan_alphabet(others, size - 1, nested=True)
    size_in_all = 1 + positions.size + which.size
    return Candidate(size_in_all, lambda: bytes((common,)) + positions.write() + which.write())


def _read_gaps(reader: Reader, size: int, num: int) -> Octets:
    common = reader.read(8)
    if common >= size:
        raise DecodingError(f"symbol {common} outside [0, {size})")
    where = read_positions(reader, num, num // 2)
    others = read_alphabet(reader, size - 1, where.size, nested=True)
    symbols = np.full(num, common, np.uint8)
    symbols[where] = others + (others >= common)
    return cast(Octets, symbols)


# Two symbols by turns.


def _plan_runs(symbols: Octets) -> list[Candidate]:
    """Plan the lengths of runs of two symbols, since signs of an update cluster."""
    begins = np.append(0, np.flatnonzero(symbols[1:] != symbols[:-1]) + 1)
    if 9 * begins.size >= 4 * symbols.size:  # at random, a run is of two
        return []
    lengths = np.diff(begins, append=symbols.size) - 1
    head, first = uvarint(begins.size), _SECOND_FIRST * int(symbols[0])

    def candidate(mantissa: int) -> Candidate:
        body = plan_numbers(lengths, symbols.size, mantissa)
        whole = Candidate(len(head) + body.size, lambda: head + body.write())
        return _headed(_Mode.RUNS, mantissa | first, whole)

    least = 0 if begins.size <= sequences.SMALL else MAX_MANTISSA
    return [candidate(mantissa) for mantissa in range(least, MAX_MANTISSA + 1)]


def _read_runs(reader: Reader, parameter: int, num: int) -> Octets:
    count = reader.uvarint()
    if not 1 <= count <= num:
        raise DecodingError(f"{count} runs of {num} symbols")
    lengths = read_numbers(reader, count, num, parameter & MAX_MANTISSA)[0] + 1
    if int(lengths.sum()) != num:
        raise DecodingError(f"runs of {lengths.sum()} symbols, expected {num}")
    turns = np.arange(count, dtype=np.int64) + parameter // _SECOND_FIRST
    symbols: Octets = np.repeat((turns & 1).astype(np.uint8), lengths)
    return symbols
