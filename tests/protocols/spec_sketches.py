"""A second implementation of sketches, written from the chapter "Sketches" of protocols/SPEC.md
alone, one value at a time.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np

from tests.protocols.spec_compressors import bits, hadamard, stream_of

f32 = np.float32


def rotated(values: list[float], m: int, public_seed: bytes, digest: str) -> list[Any]:
    """The m cells that the values add up to, divided by m and rotated; float32."""
    words = stream_of(public_seed, f"sketch {digest}")
    cells = [0.0] * m
    for value in values:
        word = next(words)
        cells[(word >> 32) * m >> 32] += -value if word & 1 else value
    row = [f32(cell / m) for cell in cells]
    for signs in (bits(words, m), bits(words, m)):
        row = hadamard([-x if sign else x for x, sign in zip(row, signs, strict=True)])
    return row


def coded(row: list[Any]) -> bytes:
    """The bytes of a sketch of these cells, as SPEC.md says that a client makes them."""
    cells = [float(x) for x in row]
    square = math.fsum(x * x for x in cells)
    step = math.sqrt(square / len(cells))
    codes = [min(3, max(0, math.floor(x / step) + 2)) if step else 2 for x in cells]
    along = math.fsum((code - 1.5) * x for code, x in zip(codes, cells, strict=True))
    packed = bytearray(len(cells) // 4)
    for i, code in enumerate(codes):
        packed[i // 4] |= code << 2 * (i % 4)
    return struct.pack("<f", square / along if along else 0.0) + bytes(packed)
