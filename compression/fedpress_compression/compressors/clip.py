"""Clipping by norm before compression (Pascanu et al. 2013, arXiv:1211.5063, Section 3.2; of whole
updates, McMahan et al. 2018, arXiv:1710.06963, Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedpress_compression.coding.fields import Symbols
from fedpress_compression.compressor import (
    Compressor,
    Properties,
    Public,
    Wrapper,
    check_finite,
    check_inner,
    compressor,
    properties,
)
from fedpress_compression.compressors.topk import TopK
from fedpress_compression.linear import LinearMap, Numbers, as_linear, restricts, support_of
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Indices, Update
from fedpress_compression.values import check_positive


@compressor("clip")
@dataclass(frozen=True, slots=True)
class Clip(Wrapper):
    """Scale the update to an L2 norm of `max_norm` if it is longer, then compress it by `inner`.

    With error feedback around it what is clipped off joins the residual, like all that was not
    sent; without, it is discarded, and reported as such. What is clipped under feedback is the
    update with the residual, so a client whose updates are larger than `max_norm` in every round
    piles up residual: choose a norm that few exceed. This bounds what is compressed; that what is
    decompressed keeps the bound depends on `inner`, so it is no privacy guarantee.
    """

    inner: Compressor[Any] = field(default_factory=TopK)
    max_norm: float = 1.0

    def __post_init__(self) -> None:
        check_inner(self.inner, "clip")
        check_positive("max_norm", self.max_norm)

    @property
    def properties(self) -> Properties:
        inner = properties(self.inner)
        return Properties(
            rate=inner.rate,
            non_expansive=inner.suits_feedback,
            contracts_with=inner.contracts_with,
            client_state=inner.client_state,
            server_state=inner.server_state,
            source="Pascanu et al. 2013, Section 3.2",
        )

    def compress(
        self, update: Vector, state: Any, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, Any]:
        check_finite(update, public.spec)
        return self.inner.compress(self.clipped(update), state, public, rng)

    @property
    def restricts(self) -> bool:
        return restricts(self.inner)

    def support(self, public: Public) -> Indices | None:
        return support_of(self.inner, public)

    def linear_map(self, public: Public) -> LinearMap:
        return _OfClipped(self, as_linear(self.inner).linear_map(public), public.spec)

    def clipped(self, update: Vector) -> Vector:
        """`update`, no longer than `max_norm`."""
        norm = float(np.linalg.norm(update.astype(np.float64)))
        if norm > self.max_norm:
            return (update * (self.max_norm / norm)).astype(np.float32)
        return update


@dataclass(frozen=True)
class _OfClipped:
    """`inner`, of updates that are clipped before."""

    clip: Clip
    inner: LinearMap
    spec: ModelSpec

    @property
    def spread(self) -> Numbers:
        return self.inner.spread

    def project(self, update: Vector) -> Numbers:
        check_finite(update, self.spec)
        return self.inner.project(self.clip.clipped(update))

    def lift(self, numbers: Numbers) -> Update:
        return self.inner.lift(numbers)
