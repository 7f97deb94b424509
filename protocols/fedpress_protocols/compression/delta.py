"""Differences to a client's own last upload, for cohorts of always the same clients
(Mishchenko et al. 2019, arXiv:1901.09269, DIANA, with a step of 1)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from fedpress_protocols.coding.fields import Layout, Symbols
from fedpress_protocols.compression.compressor import (
    Compressor,
    Knowledge,
    Properties,
    Public,
    check_finite,
    check_inner,
    compressor,
    properties,
)
from fedpress_protocols.compression.topk import TopK
from fedpress_protocols.model import ModelSpec, Vector
from fedpress_protocols.update import Update


class Last(NamedTuple):
    """`decoded` [spec.size], what the last included upload stood for; the same at both ends."""

    decoded: Vector
    inner: Any


@compressor("delta")
@dataclass(frozen=True, slots=True)
class Delta:
    """Send C(update - last), which stands for last + C(update - last).

    The receiver has to remember `last` for every client, a model's size each, and to know which
    uploads the client takes for included. So it is for groups in one process, with `receive` at
    their other end; a plan refuses it, since a server that streams keeps no client's upload. `ef21`
    sends the same symbols and asks the server for the mean alone.

    `decompress` gives the difference, all that the symbols tell without that memory.
    """

    inner: Compressor[Any] = field(default_factory=TopK)

    def __post_init__(self) -> None:
        check_inner(self.inner, "delta")

    @property
    def commutes_with_sum(self) -> bool:
        return self.inner.commutes_with_sum

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

    def layout(self, spec: ModelSpec) -> Layout:
        return self.inner.layout(spec)

    def init(self, spec: ModelSpec) -> Last:
        return Last(np.zeros(spec.size, np.float32), self.inner.init(spec))

    def compress(
        self, update: Vector, state: Last, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, Last]:
        check_finite(update, public.spec)
        with np.errstate(over="ignore"):  # the inner compressor refuses infinity
            rest = update - state.decoded
        symbols, inner = self.inner.compress(rest, state.inner, public, rng)
        return symbols, Last(self.receive(symbols, state.decoded, public), inner)

    def receive(self, symbols: Symbols, last: Vector, public: Public) -> Vector:
        """What an upload of the client that `last` came from stands for; its next `last`."""
        decoded = last.copy()
        self.inner.decompress(symbols, public).add_to(decoded)
        return decoded

    def decompress(self, symbols: Symbols, public: Public, num_summands: int = 1) -> Update:
        return self.inner.decompress(symbols, public, num_summands)
