"""No compression: float32 as it is, the yardstick of every ratio."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedpress_compression.coding.fields import Layout, Reals, Symbols
from fedpress_compression.compressor import Properties, Public, Stateless, check_finite, compressor
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Update


@compressor("none")
@dataclass(frozen=True, slots=True)
class Uncompressed(Stateless):
    """Send every value, four bytes each, and lose nothing."""

    sends_all: ClassVar[bool] = True

    @property
    def properties(self) -> Properties:
        return Properties(rate="32", unbiased=True, contractive=True, source="none")

    def layout(self, spec: ModelSpec) -> Layout:
        return (Reals(spec.size),)

    def compress(
        self, update: Vector, state: None, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, None]:
        check_finite(update, public.spec)
        return (update.astype("<f4"),), None

    def decompress(self, symbols: Symbols, public: Public, num_summands: int = 1) -> Update:
        return Update.from_dense(symbols[0].astype(np.float32))
