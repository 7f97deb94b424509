"""Uniform quantisation of every value (Alistarh et al. 2017, arXiv:1610.02132, Section 3.1, with
the maximum for a norm; nearest rounding as in Seide et al. 2014 generalised to b bits; the affine
grid as in Jacob et al. 2018, arXiv:1712.05877, Section 2.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import numpy as np
import numpy.typing as npt

from fedpress_compression import kernels
from fedpress_compression.coding.alphabets import Grouped
from fedpress_compression.coding.fields import Alphabet, Layout, Reals, Symbols
from fedpress_compression.compressor import Properties, Public, Stateless, check_finite, compressor
from fedpress_compression.linear import Coordinates, LinearMap
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Tabled, Update
from fedpress_compression.values import (
    Rounding,
    check_positive,
    check_rounding,
    check_whole,
    from_symbols,
    levels_of,
    rounded,
    shared_step,
    to_symbols,
)


@compressor("quantize")
@dataclass(frozen=True, slots=True)
class Quantize(Stateless):
    """Round every value to a grid of its tensor, or to one grid that the plan fixes.

    The `symmetric` grid has 2**bits - 1 evenly spaced values around zero, the tensor's largest at
    the end; zero stays zero. With 1 bit it has the two values -step and step, where step is the
    largest magnitude, or for `nearest` the mean magnitude, since rounding zeros to the largest
    would lose more than it keeps. The `affine` grid has 2**bits values from the tensor's least to
    its largest: finer for values on one side of zero, but zero itself is not on it.

    `nearest` (for use with error feedback) is contractive on the symmetric grid; `stochastic` is
    unbiased on both. With `clip` the grid is -clip .. clip in every tensor of every client, no
    scales are sent, and symbols may be summed before they are decompressed; what lies outside is
    clipped.
    """

    sends_all: ClassVar[bool] = True

    bits: int = 8
    rounding: Rounding = "nearest"
    grid: Literal["symmetric", "affine"] = "symmetric"
    clip: float | None = None

    def __post_init__(self) -> None:
        check_whole("bits", self.bits, 1, 8)
        check_rounding(self.rounding)
        if self.grid not in ("symmetric", "affine"):
            raise ValueError(f"grid is symmetric or affine, not {self.grid!r}")
        if self.clip is not None:
            check_positive("clip", self.clip)
            if self.grid != "symmetric" or self.bits < 2:
                raise ValueError("clip takes the symmetric grid and 2 bits or more")

    @property
    def levels(self) -> int:
        """L: symbols of the symmetric grid stand for -L .. L times a tensor's step."""
        return levels_of(self.bits)

    @property
    def commutes_with_sum(self) -> bool:
        return self.clip is not None

    @property
    def properties(self) -> Properties:
        contractive = self.rounding == "nearest" and self.grid == "symmetric" and self.clip is None
        return Properties(
            rate="bits",
            unbiased=self.rounding == "stochastic",
            contractive=contractive,
            non_expansive=self.clip is not None,
            contracts_with="nearest rounding on the symmetric grid",
            source="Alistarh et al. 2017, Section 3.1",
        )

    def layout(self, spec: ModelSpec) -> Layout:
        tensors = len(spec.trained)
        if self.grid == "affine":
            return Alphabet(2**self.bits, spec.size), Reals(tensors), Reals(tensors)
        size = 2 if self.bits == 1 else 2 * self.levels + 1
        return Alphabet(size, spec.size), *([] if self.clip else [Reals(tensors)])

    def compress(
        self, update: Vector, state: None, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, None]:
        check_finite(update, public.spec)
        if self.grid == "affine":
            return self._on_affine_grid(update, public.spec, rng), None
        if self.clip:
            step = shared_step(self.clip, self.levels)
            return (to_symbols(update, step, self.levels, self.rounding, rng),), None
        steps = self._steps(update, public.spec)
        if self.bits > 1:
            parts = [
                to_symbols(update[tensor], step, self.levels, self.rounding, rng)
                for tensor, step in zip(public.spec.slices.values(), steps, strict=True)
            ]
            several = len(parts) != 1
            symbols = np.concatenate([np.empty(0, np.uint8), *parts]) if several else parts[0]
        else:
            wide = _spread(steps, public.spec)
            # An exact zero, which real updates are full of, must not always go the same way.
            chance = rng.random(update.size)
            with np.errstate(divide="ignore", invalid="ignore"):
                up = np.where(wide > 0, (1 + update / wide.astype(np.float64)) / 2, 0.5)
            sure = (update > 0) | ((update == 0) & (chance < 0.5))
            symbols = (sure if self.rounding == "nearest" else chance < up).astype(np.uint8)
        return (symbols, steps.astype("<f4")), None

    def decompress(self, symbols: Symbols, public: Public, num_summands: int = 1) -> Update:
        if self.grid == "affine":
            lows, highs = (_spread(symbols[i].astype(np.float64), public.spec) for i in (1, 2))
            values = lows + (highs - lows) * symbols[0].astype(np.float64) / (2**self.bits - 1)
            return Update.from_dense(values.astype(np.float32))
        if self.clip:
            step = shared_step(self.clip, self.levels)
            return Update.from_dense(from_symbols(symbols[0], step, self.levels, num_summands))
        wide = _spread(symbols[1].astype(np.float32), public.spec)
        if self.bits == 1:
            return Update.from_dense(np.where(symbols[0] == 1, wide, -wide))
        return Update.from_dense(from_symbols(symbols[0], wide, self.levels))

    def tabled(self, symbols: Sequence[Any], public: Public) -> Tabled | None:
        """The result of `decompress`, as symbols and their values; None if the table would not be
        smaller."""
        if self.grid == "affine" or self.bits == 1 or not isinstance(symbols[0], Grouped):
            return None
        ends = np.cumsum([tensor.size for tensor in public.spec.trained])
        steps = np.full(ends.size, shared_step(self.clip, self.levels)) if self.clip else symbols[1]
        each = np.arange(2 * self.levels + 1, dtype=np.uint8)
        wide = steps.astype(np.float32)[:, np.newaxis]
        tables = np.stack([from_symbols(each, step, self.levels) for step in wide])
        return Tabled(public.spec.size, symbols[0], np.empty(0, np.int64), ends, tables)

    def linear_map(self, public: Public) -> LinearMap:
        return Coordinates(public)

    def _steps(self, update: Vector, spec: ModelSpec) -> Vector:
        """Each tensor's step, float32 [number of tensors]; L of them never exceed float32."""
        parts = [update[s] for s in spec.slices.values()]
        if self.bits == 1 and self.rounding == "nearest":
            means = [np.abs(p).mean(dtype=np.float64) if p.size else 0 for p in parts]
            return np.array(means, np.float32)
        largest = [kernels.peak(part) for part in parts]
        steps = np.array(largest, np.float64) / max(1, self.levels)
        narrow = steps.astype(np.float32)
        # Rounded down where it rounds up, so that L steps stay in range at float32's very end.
        return np.where(narrow > steps, np.nextafter(narrow, np.float32(0)), narrow)

    def _on_affine_grid(self, update: Vector, spec: ModelSpec, rng: np.random.Generator) -> Symbols:
        parts = [update[s] for s in spec.slices.values()]
        lows = np.array([part.min() if part.size else 0 for part in parts], "<f4")
        highs = np.array([part.max() if part.size else 0 for part in parts], "<f4")
        low, high = (_spread(ends.astype(np.float64), spec) for ends in (lows, highs))
        most = 2**self.bits - 1
        with np.errstate(divide="ignore", invalid="ignore"):
            scaled = np.where(high > low, (update - low) / (high - low) * most, 0.0)
        symbols = np.clip(rounded(scaled, self.rounding, rng), 0, most)
        return symbols.astype(np.uint8), lows, highs


def _spread(ends: npt.NDArray[np.floating], spec: ModelSpec) -> Vector:
    """Each tensor's number at each of its coordinates [spec.size]."""
    return cast(Vector, np.repeat(ends, [tensor.size for tensor in spec.trained]))
