"""One bit a value: signs, and the mean magnitude for each chunk (Karimireddy et al. 2019,
arXiv:1901.09847, Algorithm 1; signs alone, Bernstein et al. 2018, arXiv:1802.04434)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedpress_compression.coding.fields import Alphabet, Layout, Reals, Symbols
from fedpress_compression.compressor import Properties, Public, Stateless, check_finite, compressor
from fedpress_compression.kernels.buffer_pool import pooled
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Update
from fedpress_compression.values import check_whole


@compressor("sign")
@dataclass(frozen=True, slots=True)
class Sign(Stateless):
    """Send the sign of every value and the mean magnitude of each `chunk` of coordinates.

    Of one scale for both signs the mean magnitude loses least, and makes the method contractive, so
    that error feedback works. The scales travel as float16 ratios of the largest. A zero, which
    real updates are full of, gets a sign at random: one sign for all would push dead coordinates
    one way.

    1-bit SGD (Seide et al. 2014, Interspeech, Section 3), which this is not, sends two means, of
    the values above zero and below: that loses less of values about a mean other than zero.
    """

    chunk: int = 256

    def __post_init__(self) -> None:
        check_whole("chunk", self.chunk, 1, 2**31)

    @property
    def properties(self) -> Properties:
        return Properties(
            rate="1 + 16 / chunk", contractive=True, source="Karimireddy et al. 2019, Algorithm 1"
        )

    def layout(self, spec: ModelSpec) -> Layout:
        return Alphabet(2, spec.size), Reals(-(-spec.size // self.chunk), width=2), Reals(1)

    def compress(
        self, update: Vector, state: None, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, None]:
        check_finite(update, public.spec)
        negative = update < 0
        zeros = np.flatnonzero(update == 0)
        negative[zeros] = rng.random(zeros.size) < 0.5
        means = self._mean_magnitudes(update)
        scale = np.float32(means.max(initial=0.0))
        ratios = means / np.float64(scale) if scale else np.zeros(means.size)
        return (negative.astype(np.uint8), ratios.astype("<f2"), np.array([scale], "<f4")), None

    def _mean_magnitudes(self, update: Vector) -> npt.NDArray[np.float64]:
        """The mean magnitude of each chunk, the last of which may be shorter."""
        magnitudes = np.abs(update, out=pooled(update.size, update.dtype))
        whole = update.size - update.size % self.chunk
        chunks = magnitudes[:whole].reshape(-1, self.chunk)
        means: npt.NDArray[np.float64] = chunks.sum(axis=1, dtype=np.float64) / self.chunk
        if whole < update.size:
            means = np.append(means, magnitudes[whole:].mean(dtype=np.float64))
        return means

    def decompress(self, symbols: Symbols, public: Public, num_summands: int = 1) -> Update:
        with np.errstate(over="ignore"):  # a forged scale; Update.check refuses what comes of it
            scales = symbols[1].astype(np.float32) * symbols[2].astype(np.float32)
        size = public.spec.size
        signs = 1 - 2 * symbols[0].view(np.int8)
        values = pooled(size, np.float32)
        whole = size - size % self.chunk
        rows = (-1, self.chunk)
        chunks = slice(0, whole // self.chunk)
        np.multiply(
            signs[:whole].reshape(rows), scales[chunks, None], out=values[:whole].reshape(rows)
        )
        values[whole:] = signs[whole:] * scales[whole // self.chunk :].repeat(size - whole)
        return Update.from_dense(values)
