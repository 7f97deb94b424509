"""Successive refinement: a second compressor sends what the first one leaves (Equitz and Cover
1991, IEEE Trans. Inf. Theory 37(2); of quantisers in stages, Juang and Gray 1982)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedpress_compression.coding.fields import Layout, Symbols
from fedpress_compression.compressor import (
    Compressor,
    Knowledge,
    Properties,
    Public,
    Stateless,
    check_finite,
    check_inner,
    compressor,
    properties,
)
from fedpress_compression.compressors.ecsq import Ecsq
from fedpress_compression.compressors.lowrank import LowRank
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Update


@compressor("successive_refinement")
@dataclass(frozen=True, slots=True)
class SuccessiveRefinement(Stateless):
    """`first` compresses the update, `second` what the first one lost; both go in one upload, which
    stands for the sum of the two.

    For an update that is structure and detail: its low-rank part and the rest, or its outliers by
    top-k and the bulk by few levels. A target of `second` is about what `first` leaves: `ecsq` at
    an nmse of .5 halves the error once more. Each stage costs its bytes whether it helps or not:
    measure with `fedpress bench rate-distortion` before choosing. The stages keep no state, and
    where both draw in public they draw the same; feedback, clipping and the coder go around both.
    """

    first: Compressor[Any] = field(default_factory=LowRank)
    second: Compressor[Any] = field(default_factory=Ecsq)

    def __post_init__(self) -> None:
        for name, stage in (("first", self.first), ("second", self.second)):
            check_inner(stage, "successive_refinement")
            state = properties(stage).client_state
            if state != "none" or stage.needs & {"own", "basis"}:
                keeps = state if state != "none" else "what its own uploads stood for"
                raise ValueError(
                    f"{name} is {getattr(stage, 'wire_id', '')!r}, which keeps {keeps} from round"
                    " to round: a stage must keep nothing (topk, lowrank, ecsq, quantize ...)"
                )

    @property
    def needs(self) -> frozenset[Knowledge]:
        return self.first.needs | self.second.needs

    @property
    def properties(self) -> Properties:
        first, second = properties(self.first), properties(self.second)
        suited = first.suits_feedback and second.suits_feedback
        return Properties(
            rate="the sum of both stages",
            contractive=suited and (first.contractive or second.contractive),
            non_expansive=suited,
            source="Equitz and Cover 1991; Juang and Gray 1982",
        )

    def layout(self, spec: ModelSpec) -> Layout:
        return (*self.first.layout(spec), *self.second.layout(spec))

    def compress(
        self, update: Vector, state: None, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, None]:
        check_finite(update, public.spec)
        coarse, _ = self.first.compress(update, self.first.init(public.spec), public, rng)
        rest = update.copy()
        self.first.decompress(coarse, public).add_to(rest, -1.0)
        fine, _ = self.second.compress(rest, self.second.init(public.spec), public, rng)
        return (*coarse, *fine), None

    def decompress(self, symbols: Symbols, public: Public, num_summands: int = 1) -> Update:
        fields = len(self.first.layout(public.spec))
        whole = self.first.decompress(symbols[:fields], public).dense()
        with np.errstate(over="ignore", invalid="ignore"):  # forged; Update.check refuses it
            self.second.decompress(symbols[fields:], public).add_to(whole)
        return Update.from_dense(whole)
