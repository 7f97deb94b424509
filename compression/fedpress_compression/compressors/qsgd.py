"""QSGD: random levels of a bucket's norm (Alistarh et al. 2017, arXiv:1610.02132, Section 3.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedpress_compression.coding.fields import Alphabet, Layout, Reals, Symbols
from fedpress_compression.compressor import Properties, Public, Stateless, check_finite, compressor
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Update
from fedpress_compression.values import LARGEST, check_whole, from_symbols, rounded


@compressor("qsgd")
@dataclass(frozen=True, slots=True)
class Qsgd(Stateless):
    """Round |x| / norm to one of `levels` + 1 levels at random, the mean kept; send sign and level.

    The norm is the L2 norm of each `bucket` of coordinates, the last one maybe shorter. Unbiased,
    with variance at most min(n / levels^2, sqrt(n) / levels) * norm^2 in a bucket of n: few levels
    want small buckets. Most symbols are zero where levels < sqrt(n), and the coder lives on that.
    No value loses more than (norm / levels)^2 / 4, so it contracts where n < 4 * levels^2; else it
    can lose more than there was, which rules out error feedback.
    """

    sends_all: ClassVar[bool] = True

    levels: int = 4
    bucket: int = 512

    def __post_init__(self) -> None:
        check_whole("levels", self.levels, 1, 127)
        check_whole("bucket", self.bucket, 1, 2**31)

    @property
    def properties(self) -> Properties:
        return Properties(
            rate="log2(2 * levels + 1) + 32 / bucket, before coding",
            unbiased=True,
            contractive=self.bucket < 4 * self.levels**2,
            contracts_with="a bucket of less than 4 * levels^2",
            source="Alistarh et al. 2017, Section 3.1",
        )

    def layout(self, spec: ModelSpec) -> Layout:
        return Alphabet(2 * self.levels + 1, spec.size), Reals(-(-spec.size // self.bucket))

    def compress(
        self, update: Vector, state: None, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, None]:
        check_finite(update, public.spec)
        wide = update.astype(np.float64)
        starts = np.arange(0, update.size, self.bucket)
        norms = np.sqrt(np.add.reduceat(wide * wide, starts)) if update.size else wide
        sent = np.minimum(norms, LARGEST).astype("<f4")
        spread = self._spread(sent.astype(np.float64), update.size)
        with np.errstate(divide="ignore", invalid="ignore"):
            scaled = np.where(spread > 0, wide / spread * self.levels, 0.0)
        whole = np.clip(rounded(scaled, "stochastic", rng), -self.levels, self.levels)
        return ((whole + self.levels).astype(np.uint8), sent), None

    def decompress(self, symbols: Symbols, public: Public, num_summands: int = 1) -> Update:
        shares = from_symbols(symbols[0], np.float32(1), self.levels) / np.float32(self.levels)
        norms = symbols[1].astype(np.float32)
        return Update.from_dense(shares * self._spread(norms, public.spec.size))

    def _spread(self, norms: Vector, size: int) -> Vector:
        """Each bucket's norm at each of its coordinates [size]."""
        return np.repeat(norms, self.bucket)[:size]
