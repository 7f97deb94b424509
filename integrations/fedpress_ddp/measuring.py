"""Cost of an exchange of gradients, measured in one process without a network."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fedpress_compression.compressor import Compressor
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_ddp.collectives import NOT_FINITE, NotFinite, Trip, Turns
from fedpress_ddp.exchange import Exchange
from fedpress_ddp.metrics import Measured
from fedpress_protocols.errors import MissingExtra

try:
    import torch
except ModuleNotFoundError as exc:
    raise MissingExtra("fedpress.ddp needs PyTorch", hint="pip install fedpress[torch]") from exc


@dataclass(frozen=True, slots=True)
class ExchangeCost:
    """Of one exchange of one process. `num_bytes` is the body that it sends, or the numbers that it
    brings to `passes` all-reduces, 0 where bodies are gathered. Seconds are CPU time of this
    thread, `decode_seconds` for the body of one other process."""

    num_bytes: int
    passes: int
    compress_seconds: float
    decode_seconds: float


def exchange_costs(
    made: Compressor[Any], spec: ModelSpec, gradients: Sequence[Vector]
) -> list[ExchangeCost]:
    """Exchange `gradients` [spec.size], one after the other, as a hook does under `made`."""
    exchange, costs = Exchange(made), []
    for gradient in gradients:
        trip = Loopback(None, torch.device("cpu"), Measured(), Turns().take())
        start = time.thread_time()
        exchange.mean_over(made, spec, torch.from_numpy(gradient), trip)
        taken, decoding = time.thread_time() - start, trip.decode_seconds
        costs.append(ExchangeCost(trip.num_bytes, trip.passes, taken - decoding, decoding))
    return costs


@dataclass(slots=True)
class Loopback(Trip):
    """Two processes in one: what this one sends is also what the other sends."""

    num_bytes: int = 0
    passes: int = 0
    decode_seconds: float = 0.0

    @property
    def device(self) -> torch.device:
        return self.near

    @property
    def size(self) -> int:
        return 2

    @property
    def rank(self) -> int:
        return 0

    @contextmanager
    def collectives(self) -> Iterator[None]:
        yield

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        self.num_bytes += tensor.nbytes
        return tensor.contiguous().clone()

    def agree(self, status: int, largest: int = 0) -> int:
        self.has_agreed = True
        if status == NOT_FINITE:
            raise NotFinite
        return largest

    def gathered(self, body: bytes, longest: int) -> Iterable[bytes]:
        self.num_bytes += len(body)
        yield body  # this process's, which is not decoded
        start = time.thread_time()
        yield body
        self.decode_seconds = time.thread_time() - start
