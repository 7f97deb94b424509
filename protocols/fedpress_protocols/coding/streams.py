"""Following Huffman codes through a bit string in numpy.

Where a code ends is known only once it is looked up, so a stream is sequential. What comes first is
not: the length of the code that would begin at every bit, looked up for all bits at once. To follow
a stream is then to add lengths, in many streams side by side or, where they are few, in plain
Python; and the symbols are looked up together at the end.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedpress_protocols.coding import huffman
from fedpress_protocols.coding.bits import Ints, Octets

_FEWEST_LANES = 64
_MASK = np.uint32((1 << huffman.MAX_LENGTH) - 1)
_BEYOND = 2  # bytes after the last stream, at which every step is 0


class Lookup(NamedTuple):
    """For each table and each window of 12 bits, the first symbol and its bits [tables * 4096]."""

    symbols: Octets
    bits: Octets

    @classmethod
    def of(cls, tables: list[huffman.Lengths]) -> Lookup:
        pairs = [huffman.lookup(lengths) for lengths in tables]
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
    several = lookup.bits.size > _MASK + 1
    table_at: npt.NDArray[np.uint32] | int = 0
    if several:
        lane_bytes = np.diff(np.append(lanes.begins >> 3, first + num_bytes))
        table_at = np.repeat(lanes.tables << huffman.MAX_LENGTH, lane_bytes).astype(np.uint32)
    steps = np.zeros((num_bytes + _BEYOND, 8), np.uint8)
    for bit in range(8):
        ahead = (windows[:num_bytes] >> np.uint32(bit)) & _MASK
        steps[:num_bytes, bit] = lookup.bits[ahead + table_at]
    # A code of no bits waits where steps are 0: in a lane of no bytes they are those of the next.
    still = lookup.bits[lanes.tables << huffman.MAX_LENGTH] == 0
    begins = np.where(still, 8 * num_bytes, lanes.begins - 8 * first)
    count = int(lanes.counts[0])
    if begins.size >= _FEWEST_LANES and (lanes.counts == count).all():
        codes = _side_by_side(steps.ravel(), begins, count)
    else:
        codes = _one_by_one(steps.tobytes(), begins.tolist(), lanes.counts.tolist())
    found = (windows[codes >> 3] >> (codes & 7).astype(np.uint32)) & _MASK
    if several:
        found += np.repeat(lanes.tables << huffman.MAX_LENGTH, lanes.counts).astype(np.uint32)
    # The end is that of the last code, looked up anew: where steps are 0, codes still have bits.
    ends = lanes.begins.copy()
    moved = (lanes.counts > 0) & ~still
    last = np.cumsum(lanes.counts)[moved] - 1
    ends[moved] = codes[last] + lookup.bits[found[last]] + 8 * first
    return lookup.symbols[found], ends


def _side_by_side(steps: Octets, begins: Ints, count: int) -> Ints:
    """Where each of `count` codes begins in each lane [lanes * count]."""
    codes = np.empty((count, begins.size), np.int64)
    at = begins.copy()
    step = np.empty(begins.size, np.uint8)
    for row in codes:
        row[:] = at
        steps.take(at, out=step, mode="clip")
        at += step
    return codes.T.ravel()


def _one_by_one(steps: bytes, begins: list[int], counts: list[int]) -> Ints:
    codes: list[int] = []
    for at, count in zip(begins, counts, strict=True):
        for _ in range(count):
            codes.append(at)
            at += steps[at]
    return np.array(codes, np.int64)
