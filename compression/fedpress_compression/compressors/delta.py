"""Differences to a client's own last upload, for cohorts of always the same clients
(Mishchenko et al. 2019, arXiv:1901.09269, DIANA, with a step of 1)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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
)
from fedpress_compression.compressors.topk import TopK
from fedpress_compression.tensors import Vector
from fedpress_compression.update import Update


@compressor("delta")
@dataclass(frozen=True, slots=True)
class Delta(Wrapper):
    """Send C(update - own), which stands for own + C(update - own).

    `own` is what this client's last included upload stood for, zeros before the first. The server
    keeps it for every client, a model's size each, on its disk, and every assignment names it by
    digest; so the task has to name its members. `ef21` sends the same symbols and asks the server
    for the mean alone. Either is an account of what was not sent; error feedback around it would
    count that twice, and diverges at low rates.
    """

    inner: Compressor[Any] = field(default_factory=TopK)

    def __post_init__(self) -> None:
        check_inner(self.inner, "delta")

    @property
    def commutes_with_sum(self) -> bool:
        return False

    @property
    def needs(self) -> frozenset[Knowledge]:
        return self.inner.needs | {"own"}

    @property
    def properties(self) -> Properties:
        return Properties(
            rate=properties(self.inner).rate,
            client_state="last upload",
            server_state="every client's last upload",
            source="Mishchenko et al. 2019",
        )

    def compress(
        self, update: Vector, state: Any, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, Any]:
        check_finite(update, public.spec)
        with np.errstate(over="ignore"):  # the inner compressor refuses infinity
            rest = update - public.known("own")
        return self.inner.compress(rest, state, public, rng)

    def decompress(self, symbols: Symbols, public: Public, num_summands: int = 1) -> Update:
        whole = public.known("own").copy()
        with np.errstate(over="ignore"):  # forged symbols; Update.check refuses what comes of them
            self.inner.decompress(symbols, public, num_summands).add_to(whole)
        return Update.from_dense(whole)
