"""Canonical Huffman codes of at most 12 bits, and the few bits that describe one.

A code is represented by its lengths, uint8 [alphabet], 0 for an unused symbol. If only one symbol
occurs, its code has no bits, and its length is `ALONE`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedpress_compression import kernels
from fedpress_compression.coding.bits import Octets, Reader
from fedpress_compression.kernels.huffman_reference import code_bits, codes, lookup, table
from fedpress_compression.kernels.wire import ALONE, MAX_LENGTH

__all__ = [
    "ALONE",
    "MAX_LENGTH",
    "code_bits",
    "code_lengths",
    "codes",
    "lookup",
    "read_table",
    "table",
]

Lengths = Octets


def code_lengths(histogram: npt.NDArray[np.integer]) -> Lengths:
    """The lengths in [1, 12] of an optimal prefix code for the symbols counted in `histogram`."""
    return kernels.code_lengths(histogram.astype(np.int64, copy=False), MAX_LENGTH)


def read_table(reader: Reader, alphabet: int) -> Lengths:
    """Read the lengths of a code [alphabet], 1 <= alphabet <= 256; SPEC-coding.md, Prefix codes.

    Raises DecodingError unless the code is complete and its description minimal.
    """
    lengths, end = kernels.read_table(reader.octets, reader.at, reader.end, alphabet)
    reader.skip(end - reader.at)
    return lengths
