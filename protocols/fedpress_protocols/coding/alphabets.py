"""Coded symbols of a small alphabet: stored, or under Huffman codes in one of three guises.

A code has whole bits, so symbols that carry less than a few go together, several to a byte, before
they are coded (grouped); where one symbol is far more frequent than all others, what is coded is
where the others are and which (gaps). Few symbols of a large alphabet cannot pay for its table, so
there only their magnitudes' buckets are coded (buckets).
"""

from __future__ import annotations

from enum import IntEnum
from typing import cast

import numpy as np

from fedpress_protocols.coding import sequences
from fedpress_protocols.coding.bits import Ints, Octets, Reader
from fedpress_protocols.coding.exp_golomb import MAX_MANTISSA, plan_numbers, read_numbers
from fedpress_protocols.coding.positions import plan_positions, read_positions
from fedpress_protocols.coding.sequences import Candidate, smallest
from fedpress_protocols.errors import DecodingError


class _Mode(IntEnum):
    STORED = 0
    GROUPED = 1
    BUCKETS = 2
    GAPS = 3


_PARAMETER_SHIFT = 3
_FOLDED = 4
_MOST_BUCKETED = 1 << 16
_MANY = 1 << 15
_TABLE_IS_CHEAP = 16


def plan_alphabet(symbols: Octets, size: int, nested: bool = False) -> Candidate:
    """Symbols in [0, size), 1 <= size <= 256; what is `nested` in gaps has no gaps itself."""
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
    counts = np.bincount(symbols, minlength=size)
    if not nested and 2 * int(counts.max()) >= symbols.size:
        gaps = _plan_gaps(symbols, size, int(counts.argmax()))
        candidates.append(_headed(_Mode.GAPS, 0, gaps))
    return smallest(candidates)


def read_alphabet(reader: Reader, size: int, num: int, nested: bool = False) -> Octets:
    """`num` symbols in [0, size). The caller has bounded `num`."""
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
            return _ungroup(sequences.read(reader, groups, raw_widths)[0], size, parameter, num)
        case _Mode.BUCKETS if parameter <= MAX_MANTISSA | _FOLDED and num <= _MOST_BUCKETED:
            numbers, _ = read_numbers(reader, num, size, parameter & MAX_MANTISSA)
            if int(numbers.max()) >= size:
                raise DecodingError(f"number {numbers.max()} outside [0, {size})")
            values = _unfold(numbers, size) if parameter & _FOLDED else numbers
            return values.astype(np.uint8)
        case _Mode.GAPS if not parameter and not nested:
            return _read_gaps(reader, size, num)
    raise DecodingError(f"symbols in mode {mode} with parameter {parameter}")


def _headed(mode: _Mode, parameter: int, body: Candidate) -> Candidate:
    head = bytes((mode | parameter << _PARAMETER_SHIFT,))
    return Candidate(1 + body.size, lambda: head + body.write())


# Several symbols in a byte.


def _most_per_group(size: int) -> int:
    """How many symbols fit into a byte, as digits of a number to the base `size`."""
    return max(digits for digits in range(1, 9) if size**digits <= 256)


def _groupings(num: int, size: int) -> list[int]:
    """The group sizes worth a try: the largest, or where a table weighs, all with small tables."""
    most = _most_per_group(size)
    if num > _MANY:
        return [most]
    return [n for n in range(1, most + 1) if n == 1 or size**n * n <= 2 * num]


def _group(symbols: Octets, size: int, per_group: int) -> Octets:
    """Bytes whose digits to the base `size` are the symbols, the first lowest; zeros fill up."""
    filled = np.zeros(-(-symbols.size // per_group) * per_group, np.uint8)
    filled[: symbols.size] = symbols
    digits = filled.reshape(-1, per_group)
    groups = digits[:, -1].copy()
    for place in range(per_group - 2, -1, -1):
        groups *= np.uint8(size)
        groups += digits[:, place]
    return groups


def _ungroup(groups: Octets, size: int, per_group: int, num: int) -> Octets:
    places = size ** np.arange(per_group)
    digits = (np.arange(size**per_group)[:, np.newaxis] // places % size).astype(np.uint8)
    symbols = digits[groups].ravel()
    if symbols[num:].any():
        raise DecodingError("symbols after the last are not zero")
    return symbols[:num]


def _plan_grouped(symbols: Octets, size: int, per_group: int) -> Candidate:
    return sequences.plan(_group(symbols, size, per_group), np.zeros(size**per_group, np.int64))


def _stored_as_digits(size: int) -> bool:
    """Whether digits in a byte take fewer bits a symbol than a binary number does: 3, 5 and 6."""
    return _most_per_group(size) * (size - 1).bit_length() > 8


def _plan_stored(symbols: Octets, size: int) -> Candidate:
    if _stored_as_digits(size):
        per_group = _most_per_group(size)
        num_groups = -(-symbols.size // per_group)
        return Candidate(num_groups, lambda: _group(symbols, size, per_group).tobytes())
    width = (size - 1).bit_length()

    def write() -> bytes:
        rows = np.unpackbits(symbols[:, np.newaxis], axis=1, count=width, bitorder="little")
        return np.packbits(rows, bitorder="little").tobytes()

    return Candidate(-(-symbols.size * width // 8), write)


def _read_stored(reader: Reader, size: int, num: int) -> Octets:
    if _stored_as_digits(size):
        per_group = _most_per_group(size)
        num_groups = -(-num // per_group)
        start = reader.skip(8 * num_groups) >> 3
        groups = reader.octets[start : start + num_groups]
        if int(groups.max()) >= size**per_group:
            raise DecodingError(f"{groups.max()} is not {per_group} digits to the base {size}")
        return _ungroup(groups, size, per_group, num)
    width = (size - 1).bit_length()
    start = reader.skip(num * width) >> 3
    reader.align()
    octets = reader.octets[start : reader.at >> 3]
    rows = np.unpackbits(octets, count=num * width, bitorder="little").reshape(num, width)
    symbols = np.packbits(rows, axis=1, bitorder="little").ravel()
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


def _plan_gaps(symbols: Octets, size: int, common: int) -> Candidate:
    """The most frequent symbol, the positions of the others, the others."""
    where = np.flatnonzero(symbols != common)
    others = symbols[where]
    others -= others > common
    positions = plan_positions(where, symbols.size)
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
