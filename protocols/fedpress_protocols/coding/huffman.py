"""Canonical Huffman codes of at most 12 bits, and the few bits that describe one.

A code is given by its lengths alone, uint8 [alphabet], 0 for a symbol that does not occur. Where
only one symbol occurs, its code has no bits: the lengths say so with `ALONE`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from fedpress_protocols.coding.bits import Reader
from fedpress_protocols.errors import DecodingError

MAX_LENGTH = 12
ALONE = 255
"""Stands in the place of a length for a symbol that is the only one."""

_WINDOW = 1 << MAX_LENGTH
_FIRST_GUESS = 5
_NEAREST = {0: (0b0, 1), 1: (0b001, 3), -1: (0b101, 3), 2: (0b0011, 4), -2: (0b1011, 4)}
_UNUSED, _OTHER = (0b0111, 4), (0b1111, 4)

Lengths = npt.NDArray[np.uint8]


def code_lengths(histogram: npt.NDArray[np.integer]) -> Lengths:
    """The lengths in [1, 12] of an optimal prefix code for the symbols counted in `histogram`.

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
    for _ in range(MAX_LENGTH):
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


def code_bits(lengths: Lengths) -> npt.NDArray[np.int64]:
    """How many bits each symbol takes [alphabet]."""
    return np.where(lengths == ALONE, 0, lengths).astype(np.int64)


def codes(lengths: Lengths) -> npt.NDArray[np.uint64]:
    """The code of each symbol [alphabet], first bit lowest.

    Canonical: by length, then by symbol, codes count upwards when read first bit highest.
    """
    found = np.zeros(lengths.size, np.uint64)
    code = 0
    for length in range(1, MAX_LENGTH + 1):
        for symbol in np.flatnonzero(lengths == length).tolist():
            found[symbol] = int(f"{code:0{length}b}"[::-1], 2)
            code += 1
        code <<= 1
    return found


def lookup(lengths: Lengths) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """For each window of the next 12 bits, the symbol it begins with and that symbol's bits."""
    alone = np.flatnonzero(lengths == ALONE)
    if alone.size:
        return np.full(_WINDOW, alone[0], np.uint8), np.zeros(_WINDOW, np.uint8)
    symbols, bits = np.zeros(_WINDOW, np.uint8), np.zeros(_WINDOW, np.uint8)
    for symbol, code in enumerate(codes(lengths).tolist()):
        if lengths[symbol]:
            every = slice(code, None, 1 << int(lengths[symbol]))
            symbols[every], bits[every] = symbol, lengths[symbol]
    return symbols, bits


def table(lengths: Lengths) -> list[tuple[int, int]]:
    """The (value, width) pairs that describe a code; see `read_table`."""
    return list(_table(lengths))


def _table(lengths: Lengths) -> Iterator[tuple[int, int]]:
    used = np.flatnonzero(lengths).tolist()
    if len(used) == 1:
        yield 1, 1
        yield used[0], (lengths.size - 1).bit_length()
        return
    yield 0, 1
    before, length = -1, _FIRST_GUESS
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


def read_table(reader: Reader, alphabet: int) -> Lengths:
    """Read the lengths of a code [alphabet], 1 <= alphabet <= 256.

    First a bit: 1, and the only symbol follows in the bits that `alphabet` takes; or 0, and one
    item for each symbol in turn until the code is complete, that is until its lengths l satisfy
    sum 2**-l = 1 (Kraft). Raises DecodingError on a sum beyond 1, on lengths outside [1, 12], and
    on what could be said in fewer bits.
    """
    lengths = np.zeros(alphabet, np.uint8)
    if reader.read(1):
        symbol = reader.read((alphabet - 1).bit_length())
        if symbol >= alphabet:
            raise DecodingError(f"the only symbol is {symbol}, outside [0, {alphabet})")
        lengths[symbol] = ALONE
        return lengths
    symbol, length, room, after_run = 0, _FIRST_GUESS, _WINDOW, False
    while room:
        step = _ones(reader, 4)
        if step == 3:
            if after_run:
                raise DecodingError("a run of unused symbols goes on in another run")
            symbol += _run(reader, alphabet)
            after_run = True
            continue
        if symbol >= alphabet:
            raise DecodingError(f"a Huffman table goes past its {alphabet} symbols")
        if step == 4:
            given = reader.read(4)
            if abs(given - length) <= 2:
                raise DecodingError(f"length {given} after {length} is written out")
            length = given
        elif step:
            length += -step if reader.read(1) else step
        if not 1 <= length <= MAX_LENGTH:
            raise DecodingError(f"a code of {length} bits outside [1, {MAX_LENGTH}]")
        lengths[symbol] = length
        room -= _WINDOW >> length
        if room < 0:
            raise DecodingError("a Huffman table whose Kraft sum exceeds 1")
        symbol, after_run = symbol + 1, False
    return lengths


def _ones(reader: Reader, at_most: int) -> int:
    """How many ones come before a zero, which is read too; no zero follows `at_most` ones."""
    for count in range(at_most):
        if not reader.read(1):
            return count
    return at_most


def _run(reader: Reader, alphabet: int) -> int:
    """A run of unused symbols, Elias gamma; at most 7 zeros in front."""
    zeros = 0
    while not reader.read(1):
        zeros += 1
        if zeros > 7:
            raise DecodingError(f"a run of unused symbols beyond the {alphabet} there are")
    return 1 << zeros | reader.read(zeros)
