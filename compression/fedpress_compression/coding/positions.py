"""Codes for positions: increasing coordinates as the gaps between them.

Large entries of real updates cluster, so a Huffman code over the sizes of the gaps is well below
log2 C(d, k), the bound for a random support. For a random support, Rice codes (Rice 1979) are close
to that bound without a table. A bitmap is never smaller: Rice codes of parameter 0 are a bitmap
without its trailing zeros.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from fedpress_compression import kernels
from fedpress_compression.coding.bits import Ints, Reader, pack, uvarint
from fedpress_compression.coding.exp_golomb import MAX_MANTISSA, plan_numbers, read_numbers
from fedpress_compression.coding.sequences import SMALL, Candidate, smallest
from fedpress_compression.errors import DecodingError
from fedpress_compression.kernels.wire import BLOCK


class _Mode(IntEnum):
    STORED = 0
    RICE = 1
    BUCKETS = 2


_ABSENT = 4
_PARAMETER_SHIFT = 3
_LARGE = 63
_LEAST_ROW = 12  # bytes: the lengths of four streams, the anchor


def plan_positions(positions: Ints, size: int, below: int | None = None) -> Candidate:
    """Plan strictly increasing coordinates in [0, size), size <= 2**32. A result of `below` bytes
    or more will be discarded, and need not be the shortest form."""
    if 2 * positions.size <= size:
        return _plan(positions, size, 0, below)
    absent = np.ones(size, np.bool_)
    absent[positions] = False
    return _plan(np.flatnonzero(absent), size, _ABSENT, below)


def read_positions(reader: Reader, size: int, at_most: int) -> Ints:
    """Read the output of `plan_positions`, at most `at_most` coordinates.

    A coded coordinate takes at least a bit, so a short body cannot cause much work, unless the
    layout allows more than half of all coordinates: then the absent ones may be coded.
    """
    head = reader.read(8)
    num = reader.uvarint()
    count = size - num if head & _ABSENT else num
    if not 0 <= count <= min(size, at_most):
        raise DecodingError(f"{count} coordinates outside [0, {min(size, at_most)}]")
    if bool(head & _ABSENT) != (2 * count > size):
        raise DecodingError(f"{count} of {size} coordinates, but the smaller part must be coded")
    if num > reader.left:
        raise DecodingError(f"{num} coordinates in {reader.left} bits")
    coded = _read(reader, head & 3, head >> _PARAMETER_SHIFT, num, size)
    if not head & _ABSENT:
        return coded
    present = np.ones(size, np.bool_)
    present[coded] = False
    return np.flatnonzero(present)


def _plan(positions: Ints, size: int, absent: int, below: int | None) -> Candidate:
    num = positions.size

    def headed(mode: _Mode, parameter: int, body: Candidate) -> Candidate:
        head = bytes((mode | absent | parameter << _PARAMETER_SHIFT,)) + uvarint(num)
        return Candidate(len(head) + body.size, lambda: head + body.write())

    if not num:
        return headed(_Mode.STORED, 0, Candidate(0, bytes))
    gaps = kernels.gaps_of(positions)
    parameter, rice_bits = _best_parameter(gaps)
    candidates = [
        headed(_Mode.STORED, 0, _plan_stored(positions, size)),
        headed(_Mode.RICE, parameter, _plan_rice(gaps, parameter, rice_bits)),
    ]
    best = smallest(candidates)
    if below is not None and num > SMALL and best.size >= below <= _least_in_buckets(gaps):
        return best
    anchors = np.append(0, positions[BLOCK - 1 : -1 : BLOCK] + 1)
    for mantissa in range(0 if num <= SMALL else 2, MAX_MANTISSA + 1):
        buckets = plan_numbers(gaps, size, mantissa, anchors)
        if 8 * buckets.size >= num:  # otherwise read_positions would refuse it
            candidates.append(headed(_Mode.BUCKETS, mantissa, buckets))
    return smallest(candidates)


def _least_in_buckets(gaps: Ints) -> int:
    """A lower bound on the bytes of buckets of more than 2048 gaps: with one table, the gaps of a
    block take at least their order-0 entropy, even with all large ones merged; and a block has a
    row in the directory."""
    counts = kernels.count_streams(np.minimum(gaps, _LARGE).astype(np.uint8), _LARGE + 1)
    of_blocks = counts.sum(axis=1, dtype=np.int64)
    totals = of_blocks.sum(axis=1)
    bits = float((totals * np.log2(totals)).sum())
    bits -= float((of_blocks * np.log2(np.maximum(of_blocks, 1))).sum())
    return int(bits) // 8 + _LEAST_ROW * len(totals) - 1


def _read(reader: Reader, mode: int, parameter: int, num: int, size: int) -> Ints:
    """Read `num` increasing coordinates below `size`."""
    match mode:
        case _Mode.STORED if not parameter:
            positions = _read_stored(reader, num, size)
        case _Mode.RICE if num:
            positions = _read_rice(reader, parameter, num)
        case _Mode.BUCKETS if num and parameter <= MAX_MANTISSA:
            positions = _read_buckets(reader, parameter, num, size)
        case _:
            raise DecodingError(f"positions in mode {mode} with parameter {parameter}")
    if num and int(positions[-1]) >= size:
        raise DecodingError(f"coordinate {positions[-1]} outside [0, {size})")
    return positions


def _stored_width(size: int) -> int:
    return max(1, (size - 1).bit_length())


def _plan_stored(positions: Ints, size: int) -> Candidate:
    width = _stored_width(size)
    num_bits = positions.size * width
    return Candidate(-(-num_bits // 8), lambda: pack(positions, np.full(positions.size, width)))


def _read_stored(reader: Reader, num: int, size: int) -> Ints:
    positions = reader.fields(num, _stored_width(size))
    reader.align()
    if (positions[1:] <= positions[:-1]).any():
        raise DecodingError("stored coordinates are not strictly increasing")
    return positions


def _best_parameter(gaps: Ints) -> tuple[int, int]:
    """The parameter of the shortest Rice code, near log2 of the mean gap, and its bits."""
    near = (int(gaps.sum()) // gaps.size).bit_length()
    first, last = max(0, near - 3), min(31, near + 2)
    tails = kernels.rice_sums(gaps, first, last)
    bits = tails + gaps.size * np.arange(first + 1, last + 2)
    best = int(bits.argmin())
    return first + best, int(bits[best])


def _plan_rice(gaps: Ints, parameter: int, num_bits: int) -> Candidate:
    """Plan Rice codes: the low `parameter` bits of every gap, then its other bits as a number in
    unary: that many zeros and a one."""
    return Candidate(-(-num_bits // 8), lambda: kernels.write_rice(gaps, parameter))


def _read_rice(reader: Reader, parameter: int, num: int) -> Ints:
    """Read Rice codes. The unary parts have at most two zeros per one: with more, the next
    parameter would have been shorter."""
    start = reader.skip(num * parameter)
    positions, end = kernels.read_rice(reader.octets, start, reader.end, num, parameter)
    if positions.size < num:
        raise DecodingError(f"{positions.size} unary codes, expected {num}")
    reader.skip(end - reader.at)
    reader.align()
    return positions


def _read_buckets(reader: Reader, mantissa: int, num: int, size: int) -> Ints:
    """Read positions from gaps in buckets. With blocks, each anchor is the least possible
    coordinate of its block, so that a block can be decoded without the previous ones."""
    gaps, anchors = read_numbers(reader, num, size, mantissa, anchored=True)
    if anchors is not None:
        spans = np.add.reduceat(gaps + 1, np.arange(0, num, BLOCK))[:-1]
        if anchors[0] or (np.diff(anchors) != spans).any():
            raise DecodingError("an anchor that is not the end of the previous block")
    return kernels.positions_of(gaps)
