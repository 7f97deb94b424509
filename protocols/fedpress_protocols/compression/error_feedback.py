"""Error feedback: what compression lost is added to the next update.

Karimireddy et al. 2019, arXiv:1901.09847, Algorithm 1. The residual is in units of the update,
never weighted, and is taken from the client's own decoded symbols, rounding included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fedpress_protocols.coding.fields import Layout, Symbols
from fedpress_protocols.compression.compressor import Compressor, Knowledge, Public, compressor
from fedpress_protocols.model import ModelSpec, Vector
from fedpress_protocols.update import Update


class Feedback(NamedTuple):
    """`residual` [spec.size], everything computed and not yet sent, and the inner state."""

    residual: Vector
    inner: Any

    def take_back(self, update: Update) -> Feedback:
        """The state once an upload came to nothing: what it carried is unsent again."""
        residual = self.residual.copy()
        update.add_to(residual)
        return Feedback(residual, self.inner)


@compressor("error_feedback")
@dataclass(frozen=True, slots=True)
class ErrorFeedback:
    """Wraps any compressor; on the wire there is `inner` alone."""

    inner: Compressor[Any]

    def __post_init__(self) -> None:
        if not hasattr(self.inner, "wire_id") or isinstance(self.inner, ErrorFeedback):
            raise ValueError(f"inner must be a compressor other than this, not {self.inner!r}")

    @property
    def commutes_with_sum(self) -> bool:
        return self.inner.commutes_with_sum

    @property
    def needs(self) -> frozenset[Knowledge]:
        return self.inner.needs

    def layout(self, spec: ModelSpec) -> Layout:
        return self.inner.layout(spec)

    def init(self, spec: ModelSpec) -> Feedback:
        return Feedback(np.zeros(spec.size, np.float32), self.inner.init(spec))

    def compress(
        self, update: Vector, state: Feedback, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, Feedback]:
        corrected = update + state.residual
        symbols, inner = self.inner.compress(corrected, state.inner, public, rng)
        self.inner.decompress(symbols, public).add_to(corrected, sign=-1.0)
        return symbols, Feedback(corrected, inner)

    def decompress(self, symbols: Symbols, public: Public, num_summands: int = 1) -> Update:
        return self.inner.decompress(symbols, public, num_summands)
