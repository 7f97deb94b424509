"""Codes for signed integers, from quantizers with more than 256 levels and from sums.

Folded onto 0, 1, 2, ... (0, -1, 1, -2, ...) they are coded in buckets. If more than half are zero,
the positions and values of the others are coded (gaps).
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from fedpress_compression.coding.bits import Ints, Reader, pack
from fedpress_compression.coding.exp_golomb import MAX_MANTISSA, plan_numbers, read_numbers
from fedpress_compression.coding.positions import plan_positions, read_positions
from fedpress_compression.coding.sequences import SMALL, Candidate, smallest
from fedpress_compression.errors import DecodingError

Integers32 = npt.NDArray[np.int32]


class _Mode(IntEnum):
    STORED = 0
    BUCKETS = 1
    GAPS = 2


_PARAMETER_SHIFT = 3


def plan_integers(values: Ints, bound: int, nested: bool = False) -> Candidate:
    """Plan values in [-bound, bound], 1 <= bound < 2**31; those `nested` in gaps have no gaps."""
    if not values.size:
        return Candidate(0, bytes)
    candidates = [_headed(_Mode.STORED, 0, _plan_stored(values, bound))]
    folded = fold(values)
    for mantissa in range(0 if values.size <= SMALL else 2, MAX_MANTISSA + 1):
        buckets = plan_numbers(folded, 2 * bound + 1, mantissa)
        candidates.append(_headed(_Mode.BUCKETS, mantissa, buckets))
    where = np.flatnonzero(values)
    if not nested and 2 * where.size <= values.size:
        candidates.append(_headed(_Mode.GAPS, 0, _plan_gaps(values, where, bound)))
    return smallest(candidates)


def read_integers(reader: Reader, bound: int, num: int, nested: bool = False) -> Ints:
    """Read `num` values in [-bound, bound]. The caller must bound `num`."""
    if not num:
        return np.zeros(0, np.int64)
    head = reader.read(8)
    mode, parameter = head & 7, head >> _PARAMETER_SHIFT
    match mode:
        case _Mode.STORED if not parameter:
            values = reader.fields(num, (2 * bound).bit_length()).astype(np.int64) - bound
            reader.align()
        case _Mode.BUCKETS if parameter <= MAX_MANTISSA:
            values = unfold(read_numbers(reader, num, 2 * bound + 1, parameter)[0])
        case _Mode.GAPS if not parameter and not nested:
            values = _read_gaps(reader, bound, num)
        case _:
            raise DecodingError(f"integers in mode {mode} with parameter {parameter}")
    largest = int(np.abs(values).max())
    if largest > bound:
        raise DecodingError(f"an integer of magnitude {largest}, at most {bound}")
    return values


def fold(values: Ints) -> Ints:
    """0, 1, 2, ... for 0, -1, 1, -2, ..."""
    return np.where(values < 0, -2 * values - 1, 2 * values)


def unfold(numbers: Ints) -> Ints:
    half = (numbers + 1) >> 1
    return np.where(numbers & 1, -half, half)


def _headed(mode: _Mode, parameter: int, body: Candidate) -> Candidate:
    head = bytes((mode | parameter << _PARAMETER_SHIFT,))
    return Candidate(1 + body.size, lambda: head + body.write())


def _plan_stored(values: Ints, bound: int) -> Candidate:
    width = (2 * bound).bit_length()
    num_bits = values.size * width
    return Candidate(-(-num_bits // 8), lambda: pack(values + bound, np.full(values.size, width)))


def _plan_gaps(values: Ints, where: Ints, bound: int) -> Candidate:
    """Plan the positions of nonzero values, and the values, the positive ones minus 1."""
    others = values[where]
    positions = plan_positions(where, values.size)
    which = plan_integers(others - (others > 0), bound, nested=True)
    return Candidate(positions.size + which.size, lambda: positions.write() + which.write())


def _read_gaps(reader: Reader, bound: int, num: int) -> Ints:
    where = read_positions(reader, num, num // 2)
    others = read_integers(reader, bound, where.size, nested=True)
    values = np.zeros(num, np.int64)
    values[where] = others + (others >= 0)
    return values
