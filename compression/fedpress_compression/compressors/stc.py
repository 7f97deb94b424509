"""Sparse ternary compression (Sattler et al. 2019, arXiv:1903.02891, Algorithm 1)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import numpy as np

from fedpress_compression.coding.fields import Alphabet, Layout, Positions, Reals, Symbols
from fedpress_compression.compressor import Properties, Public, Stateless, check_finite, compressor
from fedpress_compression.compressors.topk import largest
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Indices, Piece, Update
from fedpress_compression.values import check_share


@compressor("stc")
@dataclass(frozen=True, slots=True)
class SparseTernary(Stateless):
    """Keep the signs of the `fraction` largest in magnitude, all at their mean magnitude.

    k is `fraction` of the coordinates of the whole vector, rounded up, ties to the lower index,
    zeros never among them. Meant for error feedback, as in the paper; the server's residual and
    the coding of its answer, the other half of the paper, are not here.
    """

    fraction: float = 0.01

    def __post_init__(self) -> None:
        check_share("fraction", self.fraction)

    @property
    def properties(self) -> Properties:
        return Properties(
            rate="fraction * (log2(1 / fraction) + 1.4 + 1)",
            contractive=True,
            source="Sattler et al. 2019, Algorithm 1",
        )

    def layout(self, spec: ModelSpec) -> Layout:
        return Positions(spec.size, self._k(spec.size)), Alphabet(2), Reals(1)

    def compress(
        self, update: Vector, state: None, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, None]:
        check_finite(update, public.spec)
        magnitudes = np.abs(update)
        where = largest(magnitudes, self._k(update.size))
        mean = magnitudes[where].mean(dtype=np.float64) if where.size else 0.0
        return (where, (update[where] < 0).astype(np.uint8), np.array([mean], "<f4")), None

    def decompress(self, symbols: Symbols, public: Public, num_summands: int = 1) -> Update:
        where, mean = cast(Indices, symbols[0]), symbols[2].astype(np.float32)
        return Update(public.spec.size, (Piece(where, np.where(symbols[1] == 1, -mean, mean)),))

    def _k(self, size: int) -> int:
        return math.ceil(self.fraction * size)
