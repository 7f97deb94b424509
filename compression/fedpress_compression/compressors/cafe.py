"""Client-aided feedback: what is compressed is the difference to a prediction that both ends have
(CAFe, Ortega et al. 2024, arXiv:2412.04538 and arXiv:2512.22623)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedpress_compression.coding.fields import Alphabet, Layout, Symbols
from fedpress_compression.compressor import (
    Compressor,
    Knowledge,
    Properties,
    Public,
    Wrapper,
    check_finite,
    check_inner,
    compressor,
    properties,
)
from fedpress_compression.compressors.topk import TopK
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Update


@compressor("cafe")
@dataclass(frozen=True, slots=True)
class Cafe(Wrapper):
    """Compress update - factor * previous with `inner`; the server adds factor * previous again.

    No state of its own, so that a client that takes part once is served as well as any other. What
    no upload touches goes on by `factor` from round to round, as under server momentum: compare it
    with a baseline that has its momentum tuned.

    At factor 1 nothing ever brings such coordinates to rest, and a run was seen to collapse. Two
    things stand against that. `factor` below 1 lets them decay. And a client to whose update the
    prediction is a stranger, ||update - factor * previous|| > guard * ||update||, leaves it out and
    says so in one symbol: steps that the clients no longer ask for end with the next round. With
    guard 1 no upload loses more than with `inner` alone, but predictions that help the model are
    refused too, since a single client's update is mostly noise. None sends no such symbol. Error
    feedback around it wants that guard of 1: what a prediction gets wrong else comes back through
    the residual and the next prediction, and grows.
    """

    inner: Compressor[Any] = field(default_factory=TopK)
    factor: float = 0.9
    guard: float | None = 2.0

    def __post_init__(self) -> None:
        check_inner(self.inner, "cafe")
        if not 0 < self.factor <= 1:
            raise ValueError(f"factor must lie in (0, 1], not {self.factor}")
        if self.guard is not None and not 0 < self.guard < math.inf:
            raise ValueError(f"guard must be positive, not {self.guard}")

    @property
    def needs(self) -> frozenset[Knowledge]:
        return self.inner.needs | {"previous"}

    @property
    def properties(self) -> Properties:
        inner = properties(self.inner)
        return Properties(
            rate=inner.rate,
            unbiased=inner.unbiased,
            contractive=inner.contractive and self.guard is not None and self.guard <= 1,
            contracts_with="a guard of 1 or less",
            client_state=inner.client_state,
            server_state="previous model",
            source="Ortega et al. 2024, Algorithm 1",
        )

    def layout(self, spec: ModelSpec) -> Layout:
        says = () if self.guard is None else (Alphabet(2, 1),)
        return (*self.inner.layout(spec), *says)

    def compress(
        self, update: Vector, state: Any, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, Any]:
        check_finite(update, public.spec)
        with np.errstate(over="ignore"):  # the inner compressor refuses infinity
            rest = update - self._prediction(public, 1)
        if self.guard is None:
            return self.inner.compress(rest, state, public, rng)
        far = _norm(rest) > self.guard * _norm(update)
        symbols, after = self.inner.compress(update if far else rest, state, public, rng)
        return (*symbols, np.array([0 if far else 1], np.uint8)), after

    def decompress(self, symbols: Symbols, public: Public, num_summands: int = 1) -> Update:
        if self.guard is None:
            told, predicted = symbols, num_summands
        else:
            told, predicted = symbols[:-1], int(symbols[-1][0])
        sent = self.inner.decompress(told, public, num_summands)
        if not predicted:
            return sent
        whole = self._prediction(public, predicted)
        with np.errstate(over="ignore"):  # forged symbols; Update.check refuses what comes of them
            sent.add_to(whole)
        return Update.from_dense(whole)

    def _prediction(self, public: Public, times: int) -> Vector:
        """`times` factor * previous [size], in float32."""
        return np.float32(self.factor * times) * public.known("previous")


def _norm(vector: Vector) -> float:
    return float(np.linalg.norm(vector.astype(np.float64)))
