"""Cost of a hook and of an exchange of gradients, measured in one process without a network."""

# No `from __future__ import annotations`: torch looks at a hook's annotations as objects.

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from fedpress_compression.compressor import Compressor
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_ddp.collectives import NOT_FINITE, Group, NotFinite, Trip, Turns
from fedpress_ddp.exchange import Exchange
from fedpress_ddp.metrics import Measured
from fedpress_protocols.errors import MissingExtra

try:
    import torch
    import torch.distributed as dist
    from torch.distributed import HashStore  # type: ignore[attr-defined]
    from torch.nn.parallel import DistributedDataParallel
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


Register = Callable[[DistributedDataParallel, Group], None]
"""Registers a hook for a model, in this group."""

_WARM_UP, _PAIRS = 3, 9


def hook_seconds(spec: ModelSpec, gradient: Vector, register: Register) -> float:
    """Seconds that a hook adds to a step of one process: CPU time of all its threads, the median of
    pairs of a step with it and one without.

    What a step costs whatever the size of the model is in it: threads, collectives, memory that a
    backward pass has used in between. `gradient` [spec.size] is the same in each step.
    """
    with _group_of_one() as group:
        plain, hooked = (_model(spec, gradient, group) for _ in range(2))
        register(hooked, group)
        added = [_step_seconds(hooked) - _step_seconds(plain) for _ in range(_WARM_UP + _PAIRS)]
    return max(0.0, median(added[_WARM_UP:]))


class _Linear(torch.nn.Module):
    """A model of tensors `spec` whose gradient is `gradient`."""

    def __init__(self, spec: ModelSpec, gradient: Vector) -> None:
        super().__init__()
        parts = [torch.from_numpy(gradient[spec.slices[t.name]]) for t in spec.trained]
        self._gradients = [
            part.reshape(t.shape) for part, t in zip(parts, spec.trained, strict=True)
        ]
        self._all = torch.nn.ParameterList(torch.zeros(t.shape) for t in spec.trained)

    def forward(self) -> torch.Tensor:
        pairs = zip(self._all, self._gradients, strict=True)
        return torch.stack([(p * g).sum() for p, g in pairs]).sum()


def _model(spec: ModelSpec, gradient: Vector, group: Group) -> DistributedDataParallel:
    return DistributedDataParallel(_Linear(spec, gradient), process_group=group)


def _step_seconds(model: DistributedDataParallel) -> float:
    model.zero_grad()
    start = time.process_time()
    model().backward()
    return time.process_time() - start


@contextmanager
def _group_of_one() -> Iterator[Group]:
    """Only this process, on gloo; torch's default group is created if there is none."""
    is_first = not dist.is_initialized()
    if is_first:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    group = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    try:
        yield group
    finally:
        if is_first:
            dist.destroy_process_group()
        else:
            dist.destroy_process_group(group)


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
