"""Hard-threshold sparsification (Sahu et al. 2021, arXiv:2108.00951, Section 3, on why an absolute
threshold serves error feedback better than a count; the threshold is that of Strom 2015,
Interspeech, Section 2, who sends -tau and tau where this sends magnitudes)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import numpy as np

from fedpress_compression.coding.fields import Alphabet, Layout, Positions, Reals, Symbols
from fedpress_compression.compressor import Properties, Public, Stateless, check_finite, compressor
from fedpress_compression.compressors.topk import fit_levels, largest
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Indices, Piece, Update
from fedpress_compression.values import check_positive, check_share, check_whole


@compressor("threshold")
@dataclass(frozen=True, slots=True)
class Threshold(Stateless):
    """Keep the entries with |x| >= `value`: positions, signs, few-bit magnitudes fitted to them.

    A round in which little happened costs little, and one in which much did costs more: the error
    is below `value` in every coordinate rather than a share of the norm, so the method is not
    contractive, and a `value` too large sends nothing. Meant for error feedback. More than
    `at_most`, a fraction of the coordinates, are never sent: then the largest of them, ties to the
    lower index. The levels are those of `topk`.
    """

    value: float = 0.01
    at_most: float = 0.1
    magnitude_bits: int = 2

    def __post_init__(self) -> None:
        check_positive("value", self.value)
        check_share("at_most", self.at_most)
        check_whole("magnitude_bits", self.magnitude_bits, 0, 4)

    @property
    def properties(self) -> Properties:
        return Properties(
            non_expansive=True,
            rate="kept * (log2(1 / kept) + 1.4 + 1 + magnitude_bits), kept <= at_most",
            source="Sahu et al. 2021, Section 3",
        )

    def layout(self, spec: ModelSpec) -> Layout:
        levels = 2**self.magnitude_bits
        magnitudes = (Alphabet(levels),) if self.magnitude_bits else ()
        return (
            Positions(spec.size, self._at_most(spec.size)),
            Alphabet(2),
            *magnitudes,
            Reals(levels, width=2),
            Reals(1),
        )

    def compress(
        self, update: Vector, state: None, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, None]:
        check_finite(update, public.spec)
        magnitudes = np.abs(update)
        where = np.flatnonzero(magnitudes >= np.float32(self.value))
        at_most = self._at_most(update.size)
        if where.size > at_most:
            where = where[largest(magnitudes[where], at_most)]
        levels, ratios, scale = fit_levels(magnitudes[where], 2**self.magnitude_bits)
        signs = (update[where] < 0).astype(np.uint8)
        fields = (where, signs, *((levels,) if self.magnitude_bits else ()))
        return (*fields, ratios, np.array([scale], "<f4")), None

    def decompress(self, symbols: Symbols, public: Public, num_summands: int = 1) -> Update:
        where = cast(Indices, symbols[0])
        magnitudes = symbols[2] if self.magnitude_bits else np.zeros(where.size, np.uint8)
        with np.errstate(over="ignore"):  # a forged scale; Update.check refuses what comes of it
            levels = symbols[-2].astype(np.float32) * symbols[-1].astype(np.float32)
        values = levels[magnitudes]
        return Update(public.spec.size, (Piece(where, np.where(symbols[1] == 1, -values, values)),))

    def _at_most(self, size: int) -> int:
        return math.ceil(self.at_most * size)
