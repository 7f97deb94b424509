"""A sketch of an update: few numbers whose products tell those of whole updates.

Every coordinate is added, with a random sign, to one of `num_cells` cells (Charikar et al. 2002; as
a projection that keeps products, Weinberger et al. 2009, arXiv:0902.2206, Section 2). The product
of two sketches of a round is that of the updates, with an error of their norms' product over the
root of `num_cells`. The cells are rotated, so that they are nearly normal even where few
coordinates are all that moves, and go as one of four levels; what these take off is each client's
own, so it cancels in the products of different clients.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from fedpress_compression.errors import DecodingError
from fedpress_compression.hadamard import SHORTEST, Rotation
from fedpress_compression.randomness import PublicStream
from fedpress_compression.tensors import Vector
from fedpress_compression.update import Update

Cells = npt.NDArray[np.float64]

LABEL = "sketch"
"""Of the public stream that places the coordinates."""
LEAST_CELLS, MOST_CELLS = SHORTEST, 2**16
"""Powers of two in between are numbers of cells."""
_BLOCK = 2**18
_PER_BYTE = 4
_SCALE_BYTES = 4


def hashed(
    stream: PublicStream, size: int, num_cells: int
) -> Iterator[tuple[slice, npt.NDArray[np.int64], npt.NDArray[np.int8]]]:
    """Cell and sign of each of `size` coordinates, a block of them at a time."""
    for start in range(0, size, _BLOCK):
        block = slice(start, min(start + _BLOCK, size))
        words = stream.words(block.stop - start)
        cells = ((words >> np.uint64(32)) * np.uint64(num_cells)) >> np.uint64(32)
        yield block, cells.astype(np.int64), 1 - 2 * (words & np.uint64(1)).astype(np.int8)


def sketch(values: Vector, num_cells: int, stream: PublicStream) -> Cells:
    """The cells [num_cells] that `values` [size] add up to, in the order of the coordinates, and
    then rotated; their norm is that of `values` in the mean."""
    total = np.zeros(num_cells)
    for block, cells, signs in hashed(stream, values.size, num_cells):
        np.add.at(total, cells, signs * values[block].astype(np.float64))
    return _rotated(total, Rotation(stream, num_cells))


class Places:
    """The cell and the sign of each coordinate, for many updates of a round: three bytes each."""

    def __init__(self, size: int, num_cells: int, stream: PublicStream) -> None:
        self._num_cells = num_cells
        self._cells, self._signs = np.empty(size, np.uint16), np.empty(size, np.int8)
        for block, cells, signs in hashed(stream, size, num_cells):
            self._cells[block], self._signs[block] = cells, signs
        self._rotation = Rotation(stream, num_cells)

    def sketch(self, update: Update) -> Cells:
        """As `sketch` of the whole vector, for work by the values that there are."""
        total = np.zeros(self._num_cells)
        for piece in update.pieces:
            signed = self._signs[piece.where] * piece.values.astype(np.float64)
            np.add.at(total, self._cells[piece.where], signed)
        return _rotated(total, self._rotation)


def _rotated(total: Cells, rotation: Rotation) -> Cells:
    small = (total / total.size).astype(np.float32)  # since the rotation makes it as much longer
    made: Cells = rotation.forward(small[None], slice(0, total.size))[0].astype(np.float64)
    return made


def num_bytes(num_cells: int) -> int:
    """The length of `to_bytes`."""
    return _SCALE_BYTES + num_cells // _PER_BYTE


def to_bytes(cells: Cells) -> bytes:
    """A float32 scale, then two bits a cell from the lowest up: code - 1.5 times the scale, such
    that the product with the cells themselves is their squared norm."""
    step = math.sqrt(float(cells @ cells) / cells.size)
    codes = np.clip(np.floor(cells / (step or 1.0)) + 2, 0, 3).astype(np.uint8)
    along = float((codes - 1.5) @ cells)
    scale = float(cells @ cells) / along if along else 0.0
    packed = np.zeros(codes.size // _PER_BYTE, np.uint8)
    for place in range(_PER_BYTE):
        packed |= codes[place::_PER_BYTE] << np.uint8(2 * place)
    return struct.pack("<f", scale) + packed.tobytes()


def from_bytes(data: bytes, num_cells: int) -> Cells:
    """The cells as they were sent; raises DecodingError for a scale that is negative or not finite,
    or another length."""
    if len(data) != num_bytes(num_cells):
        raise DecodingError(f"a sketch of {len(data)} bytes, expected {num_bytes(num_cells)}")
    (scale,) = struct.unpack_from("<f", data)
    if not 0 <= scale < math.inf:
        raise DecodingError(f"a sketch with a scale of {scale:g}, expected 0 or more")
    packed = np.frombuffer(data, np.uint8, offset=_SCALE_BYTES)
    shifts = np.arange(0, 2 * _PER_BYTE, 2, dtype=np.uint8)
    codes = ((packed[:, None] >> shifts) & np.uint8(3)).ravel()
    sent: Cells = (codes.astype(np.float64) - 1.5) * scale
    return sent
