"""A support that the cohort has in common: where the last aggregate was large, and at random.

Top-k and random-k side by side are those of Barnes et al. 2020, arXiv:2005.10761 (rTop-k). Here the
top is the previous aggregate's, which every client derives from the published models, and values
are integers on one grid, so that secure aggregation can sum them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedpress_compression.coding.fields import Alphabet, Layout, Symbols
from fedpress_compression.compressor import (
    Knowledge,
    Properties,
    Public,
    Stateless,
    check_finite,
    compressor,
)
from fedpress_compression.compressors.topk import largest
from fedpress_compression.linear import Coordinates, LinearMap
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Indices, Piece, Update
from fedpress_compression.values import (
    Rounding,
    check_positive,
    check_rounding,
    check_share,
    check_whole,
    from_symbols,
    levels_of,
    shared_step,
    to_symbols,
)


@compressor("shared_support")
@dataclass(frozen=True, slots=True)
class SharedSupport(Stateless):
    """Send whole steps of `clip` / L at the k coordinates that the whole cohort sends.

    k is `fraction` of the coordinates rounded up. floor(k * (1 - explore)) of them are the largest
    in magnitude of what the last aggregate made of the model, zeros left out, ties to the lower
    index; the rest are drawn from the other coordinates by the round's seed, all of them in the
    first round. Without exploration the support could never move.

    Values beyond `clip` are clipped. Error feedback keeps what was clipped, rounded or not in the
    support; a coordinate is reached by chance if not by size. Choose `clip` near the largest
    |value| of an update, and `bits` such that bits + log2(cohort) fits the lanes of the masks.
    """

    fraction: float = 0.02
    explore: float = 0.5
    bits: int = 8
    clip: float = 0.1
    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        check_share("fraction", self.fraction)
        check_share("explore", self.explore)
        check_whole("bits", self.bits, 2, 8)
        check_positive("clip", self.clip)
        check_rounding(self.rounding)

    @property
    def commutes_with_sum(self) -> bool:
        return True

    @property
    def needs(self) -> frozenset[Knowledge]:
        return frozenset({"previous"})

    @property
    def properties(self) -> Properties:
        return Properties(
            rate="fraction * bits",
            non_expansive=True,
            server_state="previous model",
            source="Barnes et al. 2020",
        )

    def layout(self, spec: ModelSpec) -> Layout:
        return (Alphabet(2 * levels_of(self.bits) + 1, self._k(spec.size)),)

    def compress(
        self, update: Vector, state: None, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, None]:
        check_finite(update, public.spec)
        levels = levels_of(self.bits)
        values = update[self.support(public)]
        step = shared_step(self.clip, levels)
        return (to_symbols(values, step, levels, self.rounding, rng),), None

    def decompress(self, symbols: Symbols, public: Public, num_summands: int = 1) -> Update:
        levels = levels_of(self.bits)
        step = shared_step(self.clip, levels)
        values = from_symbols(symbols[0], step, levels, num_summands)
        return Update(public.spec.size, (Piece(self.support(public), values),))

    @property
    def restricts(self) -> bool:
        return True

    def linear_map(self, public: Public) -> LinearMap:
        return Coordinates(public, self.support(public))

    def support(self, public: Public) -> Indices:
        """The k coordinates of this round, rising."""
        size, k = public.spec.size, self._k(public.spec.size)
        by_size = largest(np.abs(public.known("previous")), math.floor(k * (1 - self.explore)))
        taken = np.zeros(size, bool)
        taken[by_size] = True
        others = np.flatnonzero(~taken)
        drawn = public.stream("shared_support").distinct(others.size, k - by_size.size)
        return np.sort(np.concatenate([by_size, others[drawn]]))

    def _k(self, size: int) -> int:
        return math.ceil(self.fraction * size)
