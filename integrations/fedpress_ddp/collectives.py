"""Collectives of one exchange: in an agreed order, with their bytes and seconds counted, and with a
failure of one process known to all.

A channel stands for the way to the other processes, see `Compressor.send`. All of its collectives
are in one section `with trip.turn`, which a process enters in the order in which its exchanges were
begun: so every process calls them in the same order, however its threads run.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fedpress_compression import coding
from fedpress_compression.coding.fields import Contexts, Symbols
from fedpress_compression.compressor import Compressor, Public, to_config
from fedpress_compression.compressors.error_feedback import fused_sum
from fedpress_compression.contexts import contexts_of
from fedpress_compression.errors import DecodingError
from fedpress_compression.kernels.buffer_pool import pooled
from fedpress_compression.matrices import Matrix
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Update
from fedpress_ddp.metrics import Measured, square
from fedpress_protocols.errors import ConfigurationError, InvalidUpdate, MissingExtra
from fedpress_strategies.adasum import Pairs

try:
    import torch
    import torch.distributed as dist
except ModuleNotFoundError as exc:
    raise MissingExtra(
        "exchanging gradients needs PyTorch", hint="pip install fedpress[torch]"
    ) from exc

Group = dist.ProcessGroup


def device_of(group: Group | None, near: torch.device) -> torch.device:
    """Where the group's backend takes values that lie on `near`."""
    return near if dist.get_backend(group) == "nccl" else torch.device("cpu")


READY, NOT_FINITE, FAILED = 0, 1, 2
"""A process's status in an exchange; FAILED + rank says which one failed. The largest counts."""
_LENGTH_BYTES = 8


class NotFinite(Exception):
    """A process brought NaN or infinity."""


class ProcessLost(RuntimeError):
    """A process of the group is gone, or does not answer; nothing of this step was applied."""


@contextmanager
def naming_lost(group: Group | None) -> Iterator[None]:
    """Turn gloo's errors into ProcessLost, which names the processes whose connections broke.

    A process that stops for this reason says so in the group's store first, so that those who lose
    their connection to it later do not name it.
    """
    try:
        yield
    except RuntimeError as exc:
        if "gloo" not in str(exc):
            raise
        lost = _lost(group)
        named = ", ".join(str(rank) for rank in lost)
        says = (
            f"process {named} of the group is gone: its connection broke"
            if lost
            else "a process of the group does not answer, and no connection broke"
        )
        raise ProcessLost(
            f"{says}. Stop all processes, and start them again from their last checkpoints"
        ) from exc


def _lost(some: Group | None) -> list[int]:
    """The global ranks behind broken connections, less those that have stopped for another's sake.

    gloo refuses at once to receive over a broken connection.
    """
    group = dist.group.WORLD if some is None else some
    if group is None:
        return []  # destroyed meanwhile
    broken = []
    for rank in range(group.size()):
        if rank == group.rank():
            continue
        try:
            group.recv([torch.empty(1)], rank, _PROBE_TAG)
        except RuntimeError:
            broken.append(rank)
    try:
        store = group.get_group_store()
        lost = [rank for rank in broken if not store.check([f"{_STOPPED} {rank}"])]
        store.set(f"{_STOPPED} {group.rank()}", "1")
    except RuntimeError:  # the process that had the store is gone as well
        lost = broken
    return [dist.get_global_rank(group, rank) for rank in lost]


_PROBE_TAG = 7_041
_STOPPED = "fedpress stopped"


class Turns:
    """Hands out turns; a turn begins once all earlier ones have ended."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next, self._current = 0, 0

    def take(self) -> Turn:
        turn = Turn(self, self._next)
        self._next += 1
        return turn

    def wait(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._current == number)

    def end(self) -> None:
        with self._changed:
            self._current += 1
            self._changed.notify_all()


class Turn:
    """The section of one exchange that may call collectives; ends when it is first left."""

    def __init__(self, turns: Turns, number: int) -> None:
        self._turns, self._number = turns, number
        self._depth, self._is_over = 0, False

    def __enter__(self) -> None:
        if self._is_over:
            raise RuntimeError("an exchange calls collectives after its turn")
        if not self._depth:
            self._turns.wait(self._number)
        self._depth += 1

    def __exit__(self, *exc: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._is_over = True
            self._turns.end()

    def finish(self) -> None:
        """End a turn that was never begun, once it is due."""
        if not self._is_over:
            with self:
                pass


@dataclass(slots=True)
class Trip:
    """Collectives over one group, on the device its backend wants, with their bytes counted."""

    group: Group | None
    near: torch.device
    """The device of the values."""
    measured: Measured
    turn: Turn
    has_agreed: bool = False

    @property
    def device(self) -> torch.device:
        return device_of(self.group, self.near)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @contextmanager
    def collectives(self) -> Iterator[None]:
        """The turn, with its seconds counted from where it begins."""
        with self.turn:
            start = time.perf_counter()
            try:
                with (
                    naming_lost(self.group),
                    torch.profiler.record_function("fedpress collectives"),
                ):
                    yield
            finally:
                self.measured.exchange_seconds += time.perf_counter() - start

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the group, in `tensor`'s own dtype."""
        there = tensor.contiguous().clone()
        dist.all_reduce(there, group=self.group)
        self.measured.sent.num_bytes += there.nbytes
        return there

    def agree(self, status: int, largest: int = 0) -> int:
        """The largest `largest` of all; the first collective of every exchange.

        Raises NotFinite if a process has that status, InvalidUpdate if another one failed.
        """
        self.has_agreed = True
        own = status + self.rank if status == FAILED else status
        head = torch.tensor([own, largest], dtype=torch.int64, device=self.device)
        dist.all_reduce(head, dist.ReduceOp.MAX, group=self.group)
        self.measured.sent.num_bytes += head.nbytes
        worst, agreed = (int(number) for number in head.tolist())
        if worst >= FAILED and status != FAILED:
            raise InvalidUpdate(
                f"process {worst - FAILED} of the group could not compress its gradients",
                hint="its own error says why; no process has applied this step",
            )
        if worst == NOT_FINITE:
            raise NotFinite
        return agreed

    def finite_square(self, vector: Vector | torch.Tensor) -> float:
        """The squared norm of `vector`. Raises NotFinite, in all processes, if it holds NaN or
        infinity, which no sum of squares of float32 comes to otherwise."""
        length = square(vector)
        if not math.isfinite(length):
            with self.collectives():
                self.agree(NOT_FINITE)
        return length

    def matrices(self, parts: list[Matrix], width: int) -> list[Matrix]:
        """The sums of several matrices in one trip, at `width` bytes a number."""
        if not parts:
            return []
        dtype = torch.float16 if width == 2 else torch.float32
        flat = np.concatenate([part.ravel() for part in parts])
        total = self.total(torch.from_numpy(flat).to(self.device, dtype))
        summed = total.to("cpu", torch.float64).numpy()
        cuts = np.cumsum([part.size for part in parts])[:-1]
        return [
            piece.reshape(p.shape) for piece, p in zip(np.split(summed, cuts), parts, strict=True)
        ]

    def whole_numbers(self, array: npt.NDArray[Any], largest: int) -> npt.NDArray[Any]:
        """The sum of integer symbols, in 32 bits where all processes' fit and in 64 otherwise."""
        fits = largest * self.size < 2**31
        there = torch.from_numpy(array.astype(np.int32 if fits else np.int64)).to(self.device)
        return self.total(there).cpu().numpy().astype(np.int64)

    def gathered(self, body: bytes, longest: int) -> Iterable[bytes]:
        """Every process's bytes, `longest` at most, in the order of ranks."""
        padded = _padded(body, longest)
        mine = torch.from_numpy(padded).to(self.device)
        bodies = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(bodies, mine, group=self.group)
        self.measured.sent.num_bytes += padded.size
        return [_unpadded(each.cpu().numpy().tobytes()) for each in bodies]

    def scattered(self, bodies: list[bytes], longest: int) -> list[bytes]:
        """Send each process its one of `bodies`, `longest` at most; the bytes from all."""
        padded = np.concatenate([_padded(body, longest) for body in bodies])
        mine = torch.from_numpy(padded).to(self.device)
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine, group=self.group)
        self.measured.sent.num_bytes += padded.size // self.size * (self.size - 1)
        return [_unpadded(each.tobytes()) for each in np.split(theirs.cpu().numpy(), self.size)]


def _padded(body: bytes, longest: int) -> npt.NDArray[np.uint8]:
    padded = np.zeros(_LENGTH_BYTES + longest, np.uint8)
    padded[:_LENGTH_BYTES] = np.frombuffer(len(body).to_bytes(_LENGTH_BYTES), np.uint8)
    padded[_LENGTH_BYTES : _LENGTH_BYTES + len(body)] = np.frombuffer(body, np.uint8)
    return padded


def _unpadded(padded: bytes) -> bytes:
    end = _LENGTH_BYTES + int.from_bytes(padded[:_LENGTH_BYTES])
    return padded[_LENGTH_BYTES:end]


@dataclass(slots=True)
class Channel(ABC):
    """A collective in place of the compressor, see `Compressor.send`: `agreed` [size] is the sum of
    what all processes sent, `own` what this one did."""

    trip: Trip
    agreed: Vector = field(init=False)
    own: Update = field(init=False)

    def compress(
        self, update: Vector, state: Any, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, Any]:
        self.trip.measured.brought += self.trip.finite_square(update)
        return self.exchange(update, state, public, rng)

    @abstractmethod
    def exchange(
        self, update: Vector, state: Any, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, Any]:
        """Compress, send to all others and set `agreed` and `own`; returns as `compress`."""

    def decompress(self, symbols: Symbols, public: Public, num_summands: int = 1) -> Update:
        return self.own


Combine = Callable[[Iterable[Update], ModelSpec], Vector]
"""Each process's share of a mean, in the order of ranks, to what all of them apply [size]."""


def added(updates: Iterable[Update], spec: ModelSpec) -> Vector:
    """The sum, which is the mean: each process has divided by their number."""
    total: Vector = pooled(spec.size, np.float32)
    total.fill(0)
    for update in updates:
        update.add_to(total)
    return total


def adasum(updates: Iterable[Update], spec: ModelSpec) -> Vector:
    """Adasum of the undivided vectors, by tensors and in pairs (Maleki et al. 2021,
    arXiv:2006.02924, Sections 3 and 4): the sum if they are orthogonal, the mean if equal."""
    size, pairs = 0, {tensor.name: Pairs() for tensor in spec.tensors}
    for update in updates:
        size += 1
        whole = update.dense().astype(np.float64)
        for name, part in pairs.items():
            part.add(whole[spec.slices[name]])
    total = np.zeros(spec.size)
    for name, part in pairs.items():
        total[spec.slices[name]] = part.result()
    return (size * total).astype(np.float32)


@dataclass(slots=True)
class WholeNumbers(Channel):
    """Uncompressed numbers of `dtype`: all-reduced, or gathered if another `combine` than the sum
    has to see each process's."""

    dtype: torch.dtype
    combine: Combine

    def exchange(
        self, update: Vector, state: Any, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, Any]:
        sent = torch.from_numpy(update).to(self.dtype)
        self.own = Update.from_dense(sent.to(torch.float32).numpy())
        with self.trip.collectives():
            if self.combine is added:
                self.trip.agree(READY)
                agreed = self.trip.total(sent.to(self.trip.device))
                self.agreed = agreed.to("cpu", torch.float32).numpy()
                return (), state
            body = sent.view(torch.uint8).numpy().tobytes()
            bodies = self.trip.gathered(body, self.trip.agree(READY, len(body)))
        numbers = (torch.frombuffer(bytearray(each), dtype=self.dtype) for each in bodies)
        shares = (Update.from_dense(each.to(torch.float32).numpy()) for each in numbers)
        self.agreed = self.combine(shares, public.spec)
        return (), state


@dataclass(slots=True)
class SeveralSums(Channel):
    """All-reduces between which a compressor computes: PowerSGD's."""

    lossy: Any

    def exchange(
        self, update: Vector, state: Any, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, Any]:
        with self.trip.collectives():
            self.trip.agree(READY)
            self.agreed, after = self.lossy.group_sum(update, state, public, self.trip.matrices)
        self.own = Update.from_dense(self.agreed / np.float32(self.trip.size))
        return (), after


@dataclass(slots=True)
class Summed(Channel):
    """Symbols that commute with the sum, all-reduced."""

    lossy: Compressor[Any]

    def exchange(
        self, update: Vector, state: Any, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, Any]:
        symbols, after = self.lossy.compress(update, state, public, rng)
        self.own = self.lossy.decompress(symbols, public)
        largest = max(
            (int(np.abs(array.astype(np.int64)).max(initial=0)) for array in symbols), default=0
        )
        with self.trip.collectives():
            largest = self.trip.agree(READY, largest)
            summed = tuple(self.trip.whole_numbers(array, largest) for array in symbols)
        self.agreed = self.lossy.decompress(summed, public, self.trip.size).dense()
        return symbols, after


def received(
    body: bytes,
    rank: int,
    compressor: Compressor[Any],
    public: Public,
    contexts: Contexts,
) -> Update:
    """The update in the `body` of process `rank`; raises ConfigurationError if it is not of the
    same compressor and model."""
    try:
        symbols = coding.decode(body, compressor.layout(public.spec), contexts)
        return compressor.decompress(symbols, public)
    except DecodingError as exc:
        raise ConfigurationError(
            f"the update of process {rank} does not fit {to_config(compressor)}, which this "
            f"process has: {exc.detail}",
            hint="start all processes with the same compressor, schedule and model",
        ) from exc


@dataclass(slots=True)
class Gathered(Channel):
    """Coded symbols, gathered from all, decoded by all and combined in the order of ranks.

    `scale`, a power of two, is what `compress_sum` has still to multiply its update by: TopK alone
    does.
    """

    lossy: Compressor[Any]
    combine: Combine
    scale: float = 1.0

    def exchange(
        self, update: Vector, state: Any, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, Any]:
        symbols, after = self.lossy.compress(update, state, public, rng)
        self.agreed = self.combine(self.gather(symbols, public), public.spec)
        return symbols, after

    def compress_sum(
        self,
        update: Vector,
        other: Vector,
        state: Any,
        public: Public,
        rng: np.random.Generator,
    ) -> tuple[Vector, Symbols, Any]:
        """`scale` * `update` + `other`, and what `compress` returns for it; in one pass over the
        vectors if the compressor can do that."""
        fused = fused_sum(self.lossy)
        options = {} if self.scale == 1 else {"scale": self.scale}
        with np.errstate(over="ignore"):  # a sum that overflows is refused
            if fused is None:
                total = np.add(update, other, out=pooled(update.size, np.float32))
                return total, *self.compress(total, state, public, rng)
            try:
                total, symbols, after = fused(update, other, state, public, rng, **options)
            except InvalidUpdate:  # all processes have to know
                self.trip.finite_square(np.float32(self.scale) * update + other)
                raise
        self.trip.measured.brought += self.trip.finite_square(total)
        self.agreed = self.combine(self.gather(symbols, public), public.spec)
        return total, symbols, after

    def gather(self, symbols: Symbols, public: Public) -> Iterator[Update]:
        """Send `symbols` to all others; the updates of all, in the order of ranks."""
        self.own = self.lossy.decompress(symbols, public)
        layout = self.lossy.layout(public.spec)
        contexts = contexts_of(layout, public)
        body = coding.encode(symbols, layout, contexts)
        with self.trip.collectives():
            bodies = self.trip.gathered(body, self.trip.agree(READY, len(body)))

        def updates() -> Iterator[Update]:
            for rank, each in enumerate(bodies):
                if rank == self.trip.rank:  # decoding returns the very symbols
                    yield self.own
                    continue
                yield received(each, rank, self.lossy, public, contexts)

        return updates()
