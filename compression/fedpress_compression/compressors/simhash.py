"""SimHash: the signs of random projections (Charikar 2002, STOC, Section 3; by fast projections,
Ailon and Chazelle 2009, SIAM J. Comput. 39(1); projected back as in 1-bit compressed sensing, Plan
and Vershynin 2013, arXiv:1202.1212, Section 1.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedpress_compression.coding.fields import Alphabet, Layout, Reals, Symbols
from fedpress_compression.compressor import Properties, Public, Stateless, check_finite, compressor
from fedpress_compression.hadamard import SHORTEST, Rotation, padded
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Indices, Update
from fedpress_compression.values import LARGEST, check_share


@compressor("simhash")
@dataclass(frozen=True, slots=True)
class SimHash(Stateless):
    """Send the signs of ceil(`bits` * d) projections of the whole update, and one scale.

    The projections are the same in the whole cohort, so the share of signs in which two uploads
    differ is the angle between the updates over pi. What is decompressed, the projections' signs
    projected back at the scale that loses least, is a rough update, at `bits` 1 as good as `eden`
    with 1 bit. Since the projections are in common, what clients that agree lose does not average
    out. Meant for error feedback.
    """

    bits: float = 0.125

    def __post_init__(self) -> None:
        check_share("bits", self.bits)

    @property
    def properties(self) -> Properties:
        return Properties(rate="bits", contractive=True, source="Charikar 2002, Section 3")

    def layout(self, spec: ModelSpec) -> Layout:
        return Alphabet(2, self._num(spec.size)), Reals(1)

    def compress(
        self, update: Vector, state: None, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, None]:
        check_finite(update, public.spec)
        rotation, drawn = self._projections(public)
        peak = float(np.abs(update).max(initial=0.0))
        unit = (update / (np.float64(peak) or 1.0)).astype(np.float32)
        whole = padded(unit, _padded_size(update.size))[np.newaxis]
        signs = (rotation.forward(whole, slice(None))[0, drawn] < 0).astype(np.uint8)
        back = self._back(signs, rotation, drawn, public.spec).astype(np.float64)
        scale = peak * float(unit @ back) / max(float(back @ back), 1.0)
        largest = float(np.abs(back).max(initial=1.0))
        return (signs, np.array([min(scale, 0.99 * float(LARGEST) / largest)], "<f4")), None

    def decompress(self, symbols: Symbols, public: Public, num_summands: int = 1) -> Update:
        rotation, drawn = self._projections(public)
        back = self._back(symbols[0], rotation, drawn, public.spec)
        with np.errstate(over="ignore"):  # a forged scale; Update.check refuses what comes of it
            return Update.from_dense(back * symbols[1].astype(np.float32))

    def _num(self, size: int) -> int:
        return math.ceil(self.bits * size)

    def _projections(self, public: Public) -> tuple[Rotation, Indices]:
        """The rotation of the whole update, and which of the rotated values are projections."""
        stream, size = public.stream("simhash"), _padded_size(public.spec.size)
        return Rotation(stream, size), stream.distinct(size, self._num(public.spec.size))

    def _back(
        self,
        signs: npt.NDArray[np.generic],
        rotation: Rotation,
        drawn: Indices,
        spec: ModelSpec,
    ) -> Vector:
        """The projections' signs, projected back [d]."""
        rotated = np.zeros((1, _padded_size(spec.size)), np.float32)
        rotated[0, drawn] = 1 - 2 * signs.astype(np.float32)
        return rotation.back(rotated, slice(None))[0, : spec.size]


def _padded_size(size: int) -> int:
    """The next power of two, 64 at least."""
    return max(SHORTEST, 1 << max(0, size - 1).bit_length())
