"""Constants of the wire format for the kernels, as in protocols/SPEC-coding.md."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Octets = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]
Reals = npt.NDArray[np.float32]
Tables = npt.NDArray[np.uint16]

MAX_LENGTH = 12
"""Bits of the longest Huffman code."""
ALONE = 255
"""Stands in the place of a code's length for a symbol that is the only one."""
FIRST_GUESS = 5
"""The length that a table's first one is told against."""

BLOCK = 8192
STREAMS = 4
MAX_TABLES = 4
ROUNDS = 3
"""Rounds of k-means that improve the choice of tables."""

GUARD = 8
"""Zero bytes after a body, so that a 64-bit window may begin at any of its bytes."""

LANES = 32
"""Lanes that share a string of words."""
LANE_BITS = 12
"""Frequencies of a table sum to 2**LANE_BITS."""
LEAST_STATE = 1 << 16
"""States of lanes are at least this; a lane's first, where the last symbol is encoded, is this."""
