"""Random-k sparsification by a seed: values alone are sent (Konečný et al. 2016, arXiv:1610.05492,
Section 2, "random mask"; Stich et al. 2018, arXiv:1809.07599, Definition 2.1)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedpress_compression.coding.fields import Alphabet, Layout, Reals, Symbols
from fedpress_compression.compressor import Properties, Public, Stateless, check_finite, compressor
from fedpress_compression.linear import Coordinates, LinearMap
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Indices, Piece, Update
from fedpress_compression.values import (
    LARGEST,
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

_SEED_BYTES = 4


@compressor("randomk")
@dataclass(frozen=True, slots=True)
class RandomK(Stateless):
    """Send the values at k coordinates that a seed picks; no positions travel.

    k is `count`, or else `fraction` of the coordinates rounded up. With `shared` the whole cohort
    picks the same coordinates by the round's seed; otherwise each client picks its own and sends
    a seed of 4 bytes, so that what the clients lose averages out.

    Scaled by d / k the method is `unbiased` and belongs on its own; unscaled it is contractive and
    belongs into error feedback. Never both: the scaled one loses more than there was.

    By default values are float32. With `bits` they are whole steps of `clip` / L, clipped to
    -`clip` .. `clip`: the same grid in every client, so that, with `shared`, symbols may be summed
    before they are decompressed. `unbiased` then asks for stochastic rounding.
    """

    fraction: float = 0.01
    count: int | None = None
    unbiased: bool = False
    shared: bool = True
    bits: int | None = None
    clip: float = 0.1
    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        check_share("fraction", self.fraction)
        if self.count is not None:
            check_whole("count", self.count, 1, 2**32)
        if self.bits is not None:
            check_whole("bits", self.bits, 2, 8)
            if self.unbiased and self.rounding != "stochastic":
                raise ValueError("unbiased with bits takes stochastic rounding")
        if not isinstance(self.unbiased, bool) or not isinstance(self.shared, bool):
            raise ValueError("unbiased and shared are true or false")
        check_positive("clip", self.clip)
        check_rounding(self.rounding)

    @property
    def commutes_with_sum(self) -> bool:
        return self.shared and self.bits is not None

    @property
    def properties(self) -> Properties:
        keeps_half = self.count is None and self.fraction > 0.5
        return Properties(
            rate="fraction * bits, or * 32",
            unbiased=self.unbiased,
            contractive=self.bits is None and (not self.unbiased or keeps_half),
            non_expansive=not self.unbiased,
            contracts_with="unbiased false, which leaves values as they are",
            source="Konečný et al. 2016, Section 2",
        )

    def layout(self, spec: ModelSpec) -> Layout:
        k = self._k(spec)
        seed = () if self.shared else (Alphabet(256, _SEED_BYTES),)
        if self.bits is None:
            return *seed, Reals(k)
        return *seed, Alphabet(2 * levels_of(self.bits) + 1, k)

    def compress(
        self, update: Vector, state: None, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, None]:
        check_finite(update, public.spec)
        seed = () if self.shared else (rng.integers(0, 256, _SEED_BYTES, np.uint8),)
        values = update[self._where(seed, public)]
        if self.bits is not None:
            levels = levels_of(self.bits)
            step = shared_step(self.clip, levels)
            return (*seed, to_symbols(values, step, levels, self.rounding, rng)), None
        if self.unbiased:
            with np.errstate(over="ignore"):
                values = np.clip(values * self._gain(public.spec), -LARGEST, LARGEST)
        return (*seed, values.astype("<f4")), None

    def decompress(self, symbols: Symbols, public: Public, num_summands: int = 1) -> Update:
        where = self._where(symbols[:-1], public)
        if self.bits is None:
            values = symbols[-1].astype(np.float32)
        else:
            levels = levels_of(self.bits)
            step = shared_step(self.clip, levels)
            if self.unbiased:
                step = step * self._gain(public.spec)
            values = from_symbols(symbols[-1], step, levels, num_summands)
        return Update(public.spec.size, (Piece(where, values),))

    @property
    def restricts(self) -> bool:
        return self.shared

    def linear_map(self, public: Public) -> LinearMap:
        gain = float(self._gain(public.spec)) if self.unbiased else 1.0
        return Coordinates(public, self.support(public), gain)

    def support(self, public: Public) -> Indices:
        """The k coordinates that the whole cohort picks, rising."""
        return self._where((), public)

    def _k(self, spec: ModelSpec) -> int:
        wanted = math.ceil(self.fraction * spec.size) if self.count is None else self.count
        return min(spec.size, wanted)

    def _gain(self, spec: ModelSpec) -> np.float32:
        """d / k, what makes the mean right."""
        return np.float32(spec.size / max(1, self._k(spec)))

    def _where(self, seed: Symbols, public: Public) -> Indices:
        own = seed[0].tobytes().hex() if seed else ""
        return public.stream("randomk", own).distinct(public.spec.size, self._k(public.spec))
