"""Bernoulli sparsification: each coordinate by itself, with probability p (Konečný and Richtárik
2018, arXiv:1611.07555, Section 3; Khirirat et al. 2018, arXiv:1806.06573, Section III)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import numpy as np

from fedpress_compression.coding.fields import Alphabet, Layout, Positions, Symbols
from fedpress_compression.compressor import Properties, Public, Stateless, check_finite, compressor
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Indices, Piece, Update
from fedpress_compression.values import LARGEST, check_share, from_planes, to_planes


@compressor("bernoulli")
@dataclass(frozen=True, slots=True)
class Bernoulli(Stateless):
    """Keep each coordinate with `probability`, scaled by 1 / probability: unbiased.

    Each client draws by itself, so that what the clients lose averages out; positions travel, and
    values as float32 by their four bytes, of which the coder shortens the signs and exponents. Up
    to a probability of 0.5 the scaled values lose as much as there was or more, which rules out
    error feedback. How many are kept varies:
    a draw of more than eight deviations above the mean, which is less likely than a broken
    machine, is drawn again, so that the plan can bound the upload.
    """

    probability: float = 0.01

    def __post_init__(self) -> None:
        check_share("probability", self.probability)

    @property
    def properties(self) -> Properties:
        return Properties(
            rate="probability * (log2(1 / probability) + 1.4 + 32)",
            unbiased=True,
            contractive=self.probability > 0.5,
            contracts_with="a probability above 0.5",
            source="Konečný and Richtárik 2018, Section 3",
        )

    def layout(self, spec: ModelSpec) -> Layout:
        return Positions(spec.size, self._at_most(spec.size)), *(Alphabet(256) for _ in range(4))

    def compress(
        self, update: Vector, state: None, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, None]:
        check_finite(update, public.spec)
        at_most = self._at_most(update.size)
        where = np.flatnonzero(rng.random(update.size) < self.probability)
        while where.size > at_most:
            where = np.flatnonzero(rng.random(update.size) < self.probability)
        where = where[update[where] != 0]
        with np.errstate(over="ignore"):
            scaled = update[where] / np.float32(self.probability)
        return (where, *to_planes(np.clip(scaled, -LARGEST, LARGEST))), None

    def decompress(self, symbols: Symbols, public: Public, num_summands: int = 1) -> Update:
        where = cast(Indices, symbols[0])
        return Update(public.spec.size, (Piece(where, from_planes(symbols[1:])),))

    def _at_most(self, size: int) -> int:
        mean = size * self.probability
        return min(size, math.ceil(mean + 8 * math.sqrt(mean * (1 - self.probability)) + 32))
