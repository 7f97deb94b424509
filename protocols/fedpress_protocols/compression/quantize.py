"""Uniform quantisation of every value (Alistarh et al. 2017, arXiv:1610.02132, Section 3.1, with
the maximum for a norm; nearest rounding as in Seide et al. 2014 generalised to b bits)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
import numpy.typing as npt

from fedpress_protocols.coding.fields import Alphabet, Layout, Reals, Symbols
from fedpress_protocols.compression.compressor import Public, Stateless, check_finite, compressor
from fedpress_protocols.model import ModelSpec, Vector
from fedpress_protocols.update import Update


@compressor("quantize")
@dataclass(frozen=True, slots=True)
class Quantize(Stateless):
    """Round each tensor to 2**bits - 1 evenly spaced values around zero, its largest at the end.

    `nearest` (for use with error feedback) is contractive; `stochastic` is unbiased.
    """

    bits: int = 8
    rounding: Literal["nearest", "stochastic"] = "nearest"

    def __post_init__(self) -> None:
        if not isinstance(self.bits, int) or not 2 <= self.bits <= 8:
            raise ValueError(f"bits must be a whole number from 2 to 8, not {self.bits}")
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(f"rounding is nearest or stochastic, not {self.rounding!r}")

    @property
    def levels(self) -> int:
        """L: symbols stand for -L .. L times a tensor's step."""
        return int(2 ** (self.bits - 1) - 1)

    def layout(self, spec: ModelSpec) -> Layout:
        return Alphabet(2 * self.levels + 1, spec.size), Reals(len(spec.trained))

    def compress(
        self, update: Vector, state: None, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, None]:
        check_finite(update, public.spec)
        steps = self._steps(update, public.spec)
        wide = _spread(steps, public.spec).astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            scaled = np.where(wide > 0, update.astype(np.float64) / wide, 0.0)
        if self.rounding == "nearest":
            rounded = np.rint(scaled)
        else:
            floor = np.floor(scaled)
            rounded = floor + (rng.random(update.size) < scaled - floor)
        symbols = np.clip(rounded, -self.levels, self.levels) + self.levels
        return (symbols.astype(np.uint8), steps.astype("<f4")), None

    def decompress(self, symbols: Symbols, public: Public, num_summands: int = 1) -> Update:
        signed = symbols[0].astype(np.float32) - np.float32(self.levels * num_summands)
        steps = cast("npt.NDArray[np.float32]", symbols[1].astype(np.float32))
        with np.errstate(over="ignore"):  # a forged step; Update.check refuses what comes of it
            return Update.from_dense(signed * _spread(steps, public.spec))

    def _steps(self, update: Vector, spec: ModelSpec) -> Vector:
        """Each tensor's step, float32 [number of tensors]; L of them never exceed float32."""
        largest = [float(np.abs(update[s]).max(initial=0.0)) for s in spec.slices.values()]
        steps = np.array(largest, np.float64) / self.levels
        rounded = steps.astype(np.float32)
        # Rounded down where it rounds up, so that L steps stay in range at float32's very end.
        return np.where(rounded > steps, np.nextafter(rounded, np.float32(0)), rounded)


def _spread(steps: Vector, spec: ModelSpec) -> Vector:
    """Each tensor's step at each of its coordinates [spec.size]."""
    return np.repeat(steps, [tensor.size for tensor in spec.trained])
