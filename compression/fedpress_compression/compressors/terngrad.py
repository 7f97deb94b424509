"""TernGrad: three values a tensor, at random (Wen et al. 2017, arXiv:1705.07878, Section 3)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedpress_compression.coding.fields import Alphabet, Layout, Reals, Symbols
from fedpress_compression.compressor import Properties, Public, Stateless, check_finite, compressor
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Update
from fedpress_compression.values import check_positive, from_symbols


@compressor("terngrad")
@dataclass(frozen=True, slots=True)
class TernGrad(Stateless):
    """Each value becomes its sign times its tensor's largest magnitude, with probability
    |x| / largest, or else zero: unbiased.

    One outlier makes the whole tensor sparse and loud. The paper therefore first clips to
    `clip_deviations` (2.5 there) times the tensor's root mean square about its mean; that is
    biased, and off by default. Not for error feedback.
    """

    clip_deviations: float | None = None

    def __post_init__(self) -> None:
        if self.clip_deviations is not None:
            check_positive("clip_deviations", self.clip_deviations)

    @property
    def properties(self) -> Properties:
        return Properties(
            rate="log2(3), before coding",
            unbiased=self.clip_deviations is None,
            source="Wen et al. 2017, Section 3",
        )

    def layout(self, spec: ModelSpec) -> Layout:
        return Alphabet(3, spec.size), Reals(len(spec.trained))

    def compress(
        self, update: Vector, state: None, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, None]:
        check_finite(update, public.spec)
        largest = np.array([self._limit(update[s]) for s in public.spec.slices.values()], "<f4")
        wide = np.repeat(largest, [tensor.size for tensor in public.spec.trained])
        chosen = rng.random(update.size) * wide.astype(np.float64) < np.abs(update)
        symbols = 1 + np.where(chosen, np.sign(update), 0)
        return (symbols.astype(np.uint8), largest), None

    def decompress(self, symbols: Symbols, public: Public, num_summands: int = 1) -> Update:
        sizes = [tensor.size for tensor in public.spec.trained]
        wide = np.repeat(symbols[1].astype(np.float32), sizes)
        return Update.from_dense(from_symbols(symbols[0], wide, 1))

    def _limit(self, part: Vector) -> float:
        largest = float(np.abs(part).max(initial=0.0))
        if self.clip_deviations is None or not largest:
            return largest
        deviation = float(part.astype(np.float64).std())
        return min(largest, self.clip_deviations * deviation) if deviation else largest
