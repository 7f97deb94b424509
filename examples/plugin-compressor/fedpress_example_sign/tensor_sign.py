"""The scaled sign of each tensor (Karimireddy et al. 2019, arXiv:1901.09847, Section 4)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedpress.compressors import (
    Alphabet,
    Layout,
    ModelSpec,
    Properties,
    Public,
    Reals,
    Stateless,
    Symbols,
    Update,
    check_finite,
    compressor,
)


@compressor("fedpress_example_sign.tensor_sign")
@dataclass(frozen=True, slots=True)
class TensorSign(Stateless):
    """Send the sign of each value, and the mean magnitude of each tensor as its scale.

    It contracts: a tensor x of n values loses the factor 1 - (sum |x|)^2 / (n * ||x||^2) of its
    squared norm, so error feedback may go around it.
    """

    @property
    def properties(self) -> Properties:
        return Properties(
            rate="1 + 32 / (values of a tensor)",
            contractive=True,
            source="Karimireddy et al. 2019, Section 4",
        )

    def layout(self, spec: ModelSpec) -> Layout:
        return Alphabet(2, spec.size), Reals(len(spec.trained))

    def compress(
        self,
        update: npt.NDArray[np.float32],
        state: None,
        public: Public,
        rng: np.random.Generator,
    ) -> tuple[Symbols, None]:
        check_finite(update, public.spec)
        parts = [update[public.spec.slices[tensor.name]] for tensor in public.spec.trained]
        scales = [np.abs(part, dtype=np.float64).mean() if part.size else 0.0 for part in parts]
        return ((update < 0).astype(np.uint8), np.array(scales, "<f4")), None

    def decompress(self, symbols: Symbols, public: Public, num_summands: int = 1) -> Update:
        is_negative, scales = symbols
        values = np.where(is_negative == 1, np.float32(-1), np.float32(1))
        for tensor, scale in zip(public.spec.trained, scales, strict=True):
            values[public.spec.slices[tensor.name]] *= np.float32(scale)
        return Update.from_dense(values)
