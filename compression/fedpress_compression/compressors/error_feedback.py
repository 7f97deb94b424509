"""Error feedback: what compression lost is added to the next update.

Karimireddy et al. 2019, arXiv:1901.09847, Algorithm 1. The residual is in units of the update,
never weighted, and is taken from the client's own decoded symbols, rounding included. Decay by
staleness as in Li and Li 2023 (arXiv:2207.09057, Section 4, partial participation).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from fedpress_compression.coding.fields import Layout, Symbols
from fedpress_compression.compressor import (
    Compressor,
    Knowledge,
    Properties,
    Public,
    compressor,
    members,
    properties,
    to_config,
)
from fedpress_compression.compressors.topk import TopK
from fedpress_compression.errors import IncompatiblePlan
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Update


class Feedback(NamedTuple):
    """`residual` [spec.size], everything computed and not yet sent, and the inner state.

    `round` is that of the newest update, 0 before the first; `discarded` [spec.size] what decay and
    cap took away before it was compressed, None if they took nothing.
    """

    residual: Vector
    inner: Any
    round: int = 0
    discarded: Vector | None = None

    def take_back(self, update: Update) -> Feedback:
        """The state once an upload came to nothing: what it carried is unsent again."""
        residual = self.residual.copy()
        update.add_to(residual)
        return self._replace(residual=residual)


def check_feedback(made: Any) -> None:
    """Raise IncompatiblePlan where `made` is error feedback around a compressor that can lose more
    than it is given: each round's residual would then be larger than the last.

    For whoever makes a new plan. Plans that were made before are read as they are.
    """
    if not isinstance(made, ErrorFeedback) or properties(made.inner).suits_feedback:
        return
    around, culprit = to_config(made)["id"], _expansive(made.inner)
    name, better = culprit.wire_id, properties(culprit).contracts_with
    settings = f"; {name} contracts with {better}" if better else ""
    raise IncompatiblePlan(
        f"{around} around {name}, which does not contract: it can lose more than the whole "
        "update, and what is lost would grow from round to round until training diverges",
        hint=f"use {name} without {around}, or a method that contracts, such as topk, ecsq "
        f"or quantize{settings}",
    )


def _expansive(made: Any) -> Any:
    """The innermost compressor that makes `made` unfit."""
    unfit = (member for member in members(made) if not properties(member).suits_feedback)
    inner = next(unfit, None)
    return made if inner is None else _expansive(inner)


@compressor("error_feedback")
@dataclass(frozen=True, slots=True)
class ErrorFeedback:
    """Wraps any compressor; on the wire there is `inner` alone.

    What waits in the residual grows stale while a device sits rounds out. It is multiplied by
    `decay` for every round sat out, then scaled down to at most `max_ratio` times the new update's
    norm. By default nothing is; what either takes away is lost to the model, and reported.
    """

    inner: Compressor[Any] = field(default_factory=TopK)
    decay: float = 1.0
    max_ratio: float | None = None

    keeps_residual = True

    def __post_init__(self) -> None:
        if not hasattr(self.inner, "wire_id") or isinstance(self.inner, ErrorFeedback):
            raise ValueError(f"inner must be a compressor other than this, not {self.inner!r}")
        if not 0 <= self.decay <= 1:
            raise ValueError(f"decay must lie in [0, 1], not {self.decay}")
        if self.max_ratio is not None and not 0 <= self.max_ratio < math.inf:
            raise ValueError(f"max_ratio must be 0 or more, not {self.max_ratio}")

    @property
    def commutes_with_sum(self) -> bool:
        return self.inner.commutes_with_sum

    @property
    def needs(self) -> frozenset[Knowledge]:
        return self.inner.needs

    @property
    def properties(self) -> Properties:
        inner = properties(self.inner)
        return Properties(
            rate=inner.rate,
            contractive=inner.contractive,
            non_expansive=inner.non_expansive,
            client_state="residual",
            server_state=inner.server_state,
            source="Karimireddy et al. 2019, Algorithm 1",
        )

    def layout(self, spec: ModelSpec) -> Layout:
        return self.inner.layout(spec)

    def init(self, spec: ModelSpec) -> Feedback:
        return Feedback(np.zeros(spec.size, np.float32), self.inner.init(spec))

    def compress(
        self, update: Vector, state: Feedback, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, Feedback]:
        residual = self.tended(state.residual, update, public.round - state.round)
        discarded = None if residual is state.residual else state.residual - residual
        if isinstance(self.inner, TopK):
            corrected, symbols = self.inner.compress_sum(update, residual, public)
            inner = state.inner
        else:
            corrected = update + residual
            symbols, inner = self.inner.compress(corrected, state.inner, public, rng)
        self.inner.decompress(symbols, public).add_to(corrected, sign=-1.0)
        round_ = max(state.round, public.round)
        return symbols, Feedback(corrected, inner, round_, discarded)

    def decompress(self, symbols: Symbols, public: Public, num_summands: int = 1) -> Update:
        return self.inner.decompress(symbols, public, num_summands)

    def tended(self, residual: Vector, update: Vector, rounds: int) -> Vector:
        """What decay and cap leave of `residual`, `rounds` after the last; itself, if all."""
        factor = self.decay ** max(0, rounds - 1)
        if self.max_ratio is not None:
            norm = factor * float(np.linalg.norm(residual.astype(np.float64)))
            at_most = self.max_ratio * float(np.linalg.norm(update.astype(np.float64)))
            if norm > at_most:
                factor *= at_most / norm
        return residual if factor == 1 else residual * np.float32(factor)
