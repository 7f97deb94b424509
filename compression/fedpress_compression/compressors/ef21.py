"""EF21: every client follows its own update with an estimate, and sends what moves the estimate
(Richtárik et al. 2021, arXiv:2106.05203, Algorithm 2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from fedpress_compression.coding.fields import Symbols
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
    state_name,
)
from fedpress_compression.compressors.topk import TopK
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Update
from fedpress_compression.values import check_share


class Estimate(NamedTuple):
    """`own` [spec.size] is what the included uploads of this client sum to, g_i in the paper.

    `inner` has the state of the inner compressor under its key: another one begins anew, and `own`
    stays, as the server's mean of all `own` does.
    """

    own: Vector
    inner: Mapping[str, Any]


@compressor("ef21")
@dataclass(frozen=True, slots=True)
class EF21(Wrapper):
    """Send C(update - g_i); then g_i moves by what was sent.

    The server needs the mean g of all g_i and no g_i itself. Under plain averaging at learning rate
    1, g is the step that the model made last, which both ends know (`previous`): what an upload
    stands for is g + participation * C(update - g_i), and the mean of these is the next g. So the
    server keeps nothing for it. `participation` is the share of all clients, by their weights, in a
    round (Fatkhullin et al. 2021, arXiv:2110.03294, EF21-PP); with less than all of them in every
    round, or a client that loses its state, g is the mean of estimates some of which are old. A
    task that has stopped continues from its own last model, whose step is g, and from no other.
    """

    inner: Compressor[Any] = field(default_factory=TopK)
    participation: float = 1.0

    def __post_init__(self) -> None:
        check_inner(self.inner, "ef21")
        check_share("participation", self.participation)

    @property
    def needs(self) -> frozenset[Knowledge]:
        return self.inner.needs | {"previous"}

    @property
    def properties(self) -> Properties:
        return Properties(
            rate=properties(self.inner).rate,
            client_state="estimate of its update",
            server_state="previous model",
            source="Richtárik et al. 2021, Algorithm 2",
        )

    @property
    def needs_plain_mean(self) -> bool:
        return True

    @property
    def state_key(self) -> str:
        return "ef21"

    def init(self, spec: ModelSpec) -> Estimate:
        return Estimate(np.zeros(spec.size, np.float32), self._init_inner(spec))

    def compress(
        self, update: Vector, state: Estimate, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, Estimate]:
        check_finite(update, public.spec)
        with np.errstate(over="ignore"):  # the inner compressor refuses infinity
            rest = update - state.own
        before = {**self._init_inner(public.spec), **state.inner}[self._inner_key]
        symbols, inner = self.inner.compress(rest, before, public, rng)
        own = state.own.copy()
        self.inner.decompress(symbols, public).add_to(own)
        return symbols, Estimate(own, {self._inner_key: inner})

    def commit(self, state: Estimate, mark: Estimate | None, sent: Update) -> Estimate:
        return state if mark is None else mark

    def roll_back(self, state: Estimate, sent: Update) -> Estimate:
        return state

    def decompress(self, symbols: Symbols, public: Public, num_summands: int = 1) -> Update:
        sent = self.inner.decompress(symbols, public, num_summands)
        whole = np.float32(num_summands) * public.known("previous")
        with np.errstate(over="ignore"):  # forged symbols; Update.check refuses what comes of them
            sent.add_to(whole, self.participation)
        return Update.from_dense(whole)

    @property
    def _inner_key(self) -> str:
        return state_name(self.inner)

    def _init_inner(self, spec: ModelSpec) -> dict[str, Any]:
        return {self._inner_key: self.inner.init(spec)}
