"""EDEN: rotate at random, quantise to the best levels for a normal value, scale to be unbiased
(Vargaftik et al. 2022, arXiv:2108.08842, Algorithm 1; with 1 bit it is DRIVE, Vargaftik et al.
2021, arXiv:2105.08339)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedpress_compression.coding.fields import Alphabet, Layout, Reals, Symbols
from fedpress_compression.compressor import Properties, Public, Stateless, check_finite, compressor
from fedpress_compression.hadamard import SHORTEST, Rotation, blocks, padded
from fedpress_compression.randomness import PublicStream
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Indices, Update
from fedpress_compression.values import LARGEST, check_whole

_SEED_BYTES = 4
_POSITIVE = {
    1: (0.7978846,),
    2: (0.4527800, 1.5104176),
    3: (0.2450942, 0.7560053, 1.3439093, 2.1519457),
    4: (
        *(0.1283950, 0.3880483, 0.6567591, 0.9423405),
        *(1.2562312, 1.6180464, 2.0690172, 2.7325896),
    ),
}
LEVELS = {
    bits: np.array([*(-level for level in reversed(upper)), *upper], np.float32)
    for bits, upper in _POSITIVE.items()
}
"""The Lloyd-Max levels of N(0, 1), rising, by bits (Max 1960, Table I)."""


@compressor("eden")
@dataclass(frozen=True, slots=True)
class Eden(Stateless):
    """Send each block rotated at random, `bits` a value, and one float32 scale a block.

    `bits` is 1, 2, 3 or 4, or between 0 and 1: then ceil(bits * n) of a block's n rotated values
    are drawn, and sent with 1 bit. After the rotation every block looks normal, so the error is
    the same for any update: 0.571, 0.133, 0.036 and 0.0096 of its squared norm at 1 to 4 bits. It
    is lost on heavy-tailed updates, where `ecsq` needs less, but it is small in the worst case.

    The `unbiased` scale makes the mean right, for use on its own; `mmse` loses least, for use in
    error feedback. Below 1 bit the unbiased scale can lose more than there was. Blocks
    have 2**`log2_block` coordinates, and the rest is cut into powers of two down to 64, so that
    next to nothing is padded. Each client draws its own rotation and sends its seed of 4 bytes:
    with one in common, what clients that agree lose would not average out. The rotation is two
    randomised Hadamard transforms: after one, an update with few large values is not unbiased.
    """

    bits: float = 1
    scale: Literal["unbiased", "mmse"] = "unbiased"
    log2_block: int = 12

    def __post_init__(self) -> None:
        if self.bits not in LEVELS and not 0 < self.bits < 1:
            raise ValueError(f"bits is 1, 2, 3, 4 or between 0 and 1, not {self.bits}")
        if self.scale not in ("unbiased", "mmse"):
            raise ValueError(f"scale is unbiased or mmse, not {self.scale!r}")
        check_whole("log2_block", self.log2_block, 10, 14)

    @property
    def properties(self) -> Properties:
        return Properties(
            rate="bits + 32 / block",
            unbiased=self.scale == "unbiased",
            contractive=self.scale == "mmse" or self.bits >= 1,
            contracts_with="scale mmse, or bits of 1 or more",
            source="Vargaftik et al. 2022, Algorithm 1",
        )

    def layout(self, spec: ModelSpec) -> Layout:
        num_rows, num_sent = 0, 0
        for where, length in blocks(_padded_size(spec.size), self.log2_block):
            rows = (where.stop - where.start) // length
            num_rows += rows
            num_sent += rows * self._sent(length)
        return Alphabet(256, _SEED_BYTES), Alphabet(self._levels.size, num_sent), Reals(num_rows)

    def compress(
        self, update: Vector, state: None, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, None]:
        check_finite(update, public.spec)
        seed = rng.integers(0, 256, _SEED_BYTES, np.uint8)
        stream = public.stream("eden", seed.tobytes().hex())
        whole = padded(update, _padded_size(update.size))
        rotation = Rotation(stream, whole.size)
        symbols, scales = [np.empty(0, np.uint8)], [np.empty(0, "<f4")]
        for where, length in blocks(whole.size, self.log2_block):
            rows = whole[where].reshape(-1, length)
            peaks = np.abs(rows).max(axis=1).astype(np.float64)
            with np.errstate(divide="ignore", invalid="ignore"):
                unit = np.where(peaks[:, None] > 0, rows / peaks[:, None], 0).astype(np.float32)
            chosen, units = self._quantised(unit, rotation.forward(unit, where), stream)
            symbols.append(chosen.ravel())
            # Far beyond any plan's max_abs, so that what is received stays finite.
            limit = LARGEST / (3 * length**1.5)
            scales.append(np.minimum(units * peaks, limit).astype("<f4"))
        return (seed, np.concatenate(symbols), np.concatenate(scales)), None

    def decompress(self, symbols: Symbols, public: Public, num_summands: int = 1) -> Update:
        stream = public.stream("eden", symbols[0].astype(np.uint8).tobytes().hex())
        flat = np.empty(_padded_size(public.spec.size), np.float32)
        rotation = Rotation(stream, flat.size)
        scales = symbols[2].astype(np.float32)
        taken, row = 0, 0
        for where, length in blocks(flat.size, self.log2_block):
            rows, sent = (where.stop - where.start) // length, self._sent(length)
            levels = self._levels[symbols[1][taken : taken + rows * sent].astype(np.intp)]
            levels = levels.reshape(rows, sent)
            if sent < length:
                rotated = np.zeros((rows, length), np.float32)
                np.put_along_axis(rotated, self._drawn(stream, rows, length), levels, axis=1)
                levels = rotated
            with np.errstate(over="ignore"):  # a forged scale; Update.check refuses what comes
                back = rotation.back(levels, where) * scales[row : row + rows, None]
            flat[where] = back.ravel()
            taken, row = taken + rows * sent, row + rows
        return Update.from_dense(flat[: public.spec.size])

    def _quantised(
        self, unit: Vector, rotated: Vector, stream: PublicStream
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float64]]:
        """Symbols [rows, sent] of `rotated` and the scale that brings them back to `unit`."""
        rows, length = unit.shape
        values = rotated.astype(np.float64)
        energy = np.square(unit, dtype=np.float64).sum(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            normal = np.where(energy[:, None] > 0, values / np.sqrt(length * energy)[:, None], 0)
        edges = (self._levels[1:].astype(np.float64) + self._levels[:-1]) / 2
        symbols = np.searchsorted(edges, normal, side="right").astype(np.uint8)
        sent = self._sent(length)
        drawn = self._drawn(stream, rows, length) if sent < length else None
        chosen = symbols if drawn is None else np.take_along_axis(symbols, drawn, axis=1)
        if self.scale == "unbiased":
            above = energy * (length / sent)
            below = (values * self._levels[symbols]).sum(axis=1)
        else:
            levels = self._levels[chosen].astype(np.float64)
            kept = values if drawn is None else np.take_along_axis(values, drawn, axis=1)
            above = (kept * levels).sum(axis=1)
            below = float(length) ** 2 * (levels * levels).sum(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            return chosen, np.where(below > 0, above / below, 0.0)

    @property
    def _levels(self) -> Vector:
        return LEVELS[max(1, math.ceil(self.bits))]

    def _sent(self, length: int) -> int:
        """The number of rotated values of a block that are sent."""
        return min(length, math.ceil(self.bits * length))

    def _drawn(self, stream: PublicStream, rows: int, length: int) -> Indices:
        """The indices of those that are sent, in each row [rows, sent]."""
        return np.stack([stream.distinct(length, self._sent(length)) for _ in range(rows)])


def _padded_size(size: int) -> int:
    return -(-size // SHORTEST) * SHORTEST
