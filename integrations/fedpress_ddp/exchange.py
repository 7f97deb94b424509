"""The mean of a vector over a process group, compressed: what data-parallel training exchanges.

Three ways, by what the compressor is. Uncompressed numbers and symbols that commute with the sum
are all-reduced. PowerSGD takes its two trips, an all-reduce each. Everything else is coded,
gathered from all (the bytes differ in length) and decoded by all in the order of ranks: every
process ends with the same bits. Between sites only one process of each takes part; inside, numbers
go whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedpress_compression import coding
from fedpress_compression.coding.fields import Symbols
from fedpress_compression.compressor import Compressor, Public, check_inner
from fedpress_compression.compressors.dgc import Dgc
from fedpress_compression.compressors.error_feedback import ErrorFeedback, check_feedback
from fedpress_compression.compressors.none import Uncompressed
from fedpress_compression.compressors.powersgd import PowerSGD
from fedpress_compression.contexts import contexts_of
from fedpress_compression.matrices import Matrix, orthonormal, views
from fedpress_compression.randomness import PublicRandomness, PublicStream
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan, MissingExtra

try:
    import torch
    import torch.distributed as dist
except ModuleNotFoundError as exc:
    raise MissingExtra(
        "exchanging gradients needs PyTorch", hint="pip install fedpress[torch]"
    ) from exc

Group = dist.ProcessGroup
_NOT_FINITE = -1
_DEAD = 1e-9


@dataclass(frozen=True, slots=True)
class Sites:
    """Processes in sites of one size: `inside` is this one's, `between` holds the first process of
    every site and is None in the others; `leader` is the first of this site, by its global rank."""

    inside: Group
    between: Group | None
    leader: int

    @classmethod
    def of(cls, size: int) -> Sites:
        """Sites of `size` consecutive ranks; every process of the world must call this alike."""
        world, rank = dist.get_world_size(), dist.get_rank()
        if size < 1 or world % size:
            raise ConfigurationError(f"{world} processes do not make sites of {size}")
        leaders = list(range(0, world, size))
        groups = [dist.new_group(list(range(first, first + size))) for first in leaders]
        between = dist.new_group(leaders)
        leader = rank - rank % size
        return cls(groups[rank // size], between if rank == leader else None, leader)


@dataclass(slots=True)
class Sent:
    """What this process put into collectives: `num_bytes` compressed (between sites, if there are
    any), `whole_bytes` inside its site, `plain_bytes` what float32 would have been."""

    num_bytes: int = 0
    whole_bytes: int = 0
    plain_bytes: int = 0


class Exchange:
    """Means over `group`, or over all `sites`, under `compressor`, and what it keeps between them.

    With ErrorFeedback around the compressor, what a process did not get across is added to its next
    vector: over n processes, sum of means = sum of inputs / n - sum of residuals. What is kept goes
    by the names of tensors; a tensor keeps its residual if it moves to another vector. To a
    compressor `previous` is the last mean. `seed` must be the same everywhere. `dtype` is what
    uncompressed numbers travel in, float16 or float32.

    Not thread-safe. If a vector holds NaN or infinity anywhere, all processes get NaN, as a plain
    all-reduce would give them, and nothing else changes.
    """

    def __init__(
        self,
        compressor: Compressor[Any],
        *,
        group: Group | None = None,
        sites: Sites | None = None,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if group is not None and sites is not None:
            raise ConfigurationError("give a group or sites, not both")
        if dtype not in (torch.float16, torch.float32):
            raise ConfigurationError(f"numbers travel in float16 or float32, not {dtype}")
        if isinstance(compressor, Dgc):
            raise IncompatiblePlan(
                "dgc keeps velocities, which an exchange has no place for",
                hint="use error_feedback, and leave momentum to the optimizer",
            )
        check_feedback(compressor)
        self._feedback = compressor if isinstance(compressor, ErrorFeedback) else None
        self._lossy = self._feedback.inner if self._feedback else compressor
        check_inner(self._lossy, "exchange")
        strange = sorted(self._lossy.needs - {"previous"})
        if strange:
            raise IncompatiblePlan(
                f"{self._lossy} reads {', '.join(strange)}, which a group of processes lacks",
                hint="it has the last mean alone",
            )
        self._group, self._sites = group, sites
        self._seed, self._dtype = seed, dtype
        self._residuals: dict[str, Vector] = {}
        self._kept: dict[str, _Kept] = {}
        self.sent = Sent()

    # What is kept

    def residual(self, spec: ModelSpec) -> Vector:
        """What is yet to be sent [spec.size], in units of the mean; zeros without feedback."""
        parts = [self._residuals.get(t.name, np.zeros(t.size, np.float32)) for t in spec.trained]
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    def state_dict(self) -> dict[str, Any]:
        """All that is kept, as plain data and tensors: what `torch.save` writes safely."""
        kept = {
            key: {
                "round": held.round,
                "previous": None if held.previous is None else torch.from_numpy(held.previous),
                "rights": [torch.from_numpy(right) for right in held.rights],
            }
            for key, held in self._kept.items()
        }
        residuals = {name: torch.from_numpy(part) for name, part in self._residuals.items()}
        return {"kept": kept, "residuals": residuals}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._residuals = {name: part.numpy() for name, part in state["residuals"].items()}
        self._kept = {
            key: _Kept(
                round=held["round"],
                previous=None if held["previous"] is None else held["previous"].numpy(),
                rights=tuple(right.numpy() for right in held["rights"]),
            )
            for key, held in state["kept"].items()
        }

    # The mean

    def mean(self, spec: ModelSpec, values: torch.Tensor) -> torch.Tensor:
        """The mean over all processes of their `values` [spec.size], on their device, float32.

        Every process must call it in the same order with the same `spec`.
        """
        if not isinstance(self._lossy, PowerSGD) and _remembers(self._lossy.init(spec)):
            raise IncompatiblePlan(
                f"{self._lossy} keeps a state of its own, which an exchange has no place for",
                hint="put error_feedback around a compressor without one, or around powersgd",
            )
        flat = values.detach().to(torch.float32)
        if self._sites is None:
            return self._between(spec, flat, self._group)
        inside, between = self._sites.inside, self._sites.between
        whole = flat / dist.get_world_size(inside)
        dist.all_reduce(whole, group=inside)
        self.sent.whole_bytes += whole.nbytes
        if between is not None:
            whole = self._between(spec, whole, between)
        dist.broadcast(whole, self._sites.leader, group=inside)
        return whole

    def _between(self, spec: ModelSpec, values: torch.Tensor, group: Group | None) -> torch.Tensor:
        trip = _Trip(group, values.device, self.sent)
        self.sent.plain_bytes += values.nbytes
        if isinstance(self._lossy, Uncompressed) and self._feedback is None:
            return trip.total(values.to(self._dtype) / trip.size).to(torch.float32)
        whole = (values / trip.size).cpu().numpy()
        if self._feedback is not None:
            whole = whole + self.residual(spec)
        if not trip.all_finite(whole):
            return torch.full_like(values, torch.nan)
        agreed, own = self._agreed(spec, whole, trip)
        if self._feedback is not None:
            left = whole - own
            for tensor in spec.trained:
                self._residuals[tensor.name] = left[spec.slices[tensor.name]]
        return torch.from_numpy(agreed).to(values.device)

    def _agreed(self, spec: ModelSpec, whole: Vector, trip: _Trip) -> tuple[Vector, Vector]:
        """The sum of what all processes sent of their `whole`, and what this one sent."""
        held = self._kept.get(spec.digest, _Kept())
        words = f"fedpress exchange v1|{self._seed}|{held.round}"
        public = Public(
            spec,
            PublicRandomness(hashlib.sha256(words.encode()).digest()),
            previous=np.zeros(spec.size, np.float32) if held.previous is None else held.previous,
            round=held.round,
        )
        if isinstance(self._lossy, Uncompressed):
            sent = torch.from_numpy(whole).to(self._dtype)
            own = sent.to(torch.float32).numpy()
            agreed = trip.total(sent.to(trip.device)).to("cpu", torch.float32).numpy()
            rights = held.rights
        elif isinstance(self._lossy, PowerSGD):
            agreed, rights = _two_trips(self._lossy, whole, held.rights, public, trip)
            own = agreed / np.float32(trip.size)
        else:
            private = np.random.default_rng([self._seed, trip.rank, held.round])
            symbols, _ = self._lossy.compress(whole, self._lossy.init(spec), public, private)
            own = self._lossy.decompress(symbols, public).dense()
            rights = held.rights
            if self._lossy.commutes_with_sum:
                summed = tuple(trip.whole_numbers(array) for array in symbols)
                agreed = self._lossy.decompress(summed, public, trip.size).dense()
            else:
                agreed = _gathered(self._lossy, symbols, public, trip)
        self._kept[spec.digest] = _Kept(held.round + 1, agreed, rights)
        return agreed, own


@dataclass(frozen=True, slots=True)
class _Kept:
    round: int = 1
    previous: Vector | None = None
    rights: tuple[Matrix, ...] = ()


def _remembers(state: Any) -> bool:
    return any(map(_remembers, state)) if isinstance(state, tuple) else state is not None


@dataclass(frozen=True, slots=True)
class _Trip:
    """Collectives over one group, on the device its backend wants, with their bytes counted."""

    group: Group | None
    near: torch.device
    """Where the values are."""
    sent: Sent

    @property
    def device(self) -> torch.device:
        is_gpu_only = dist.get_backend(self.group) == "nccl"
        return self.near if is_gpu_only else torch.device("cpu")

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the group, in `tensor`'s own dtype."""
        there = tensor.contiguous().clone()
        dist.all_reduce(there, group=self.group)
        self.sent.num_bytes += there.nbytes
        return there

    def all_finite(self, values: Vector) -> bool:
        flag = torch.tensor([not np.isfinite(values).all()], dtype=torch.int32, device=self.device)
        dist.all_reduce(flag, group=self.group)
        return not flag.item()

    def matrices(self, parts: list[Matrix], width: int) -> list[Matrix]:
        """The sums of several matrices in one trip, at `width` bytes a number."""
        dtype = torch.float16 if width == 2 else torch.float32
        flat = np.concatenate([part.ravel() for part in parts]) if parts else np.zeros(0)
        total = self.total(torch.from_numpy(flat).to(self.device, dtype))
        summed = total.to("cpu", torch.float64).numpy()
        cuts = np.cumsum([part.size for part in parts])[:-1]
        return [
            piece.reshape(p.shape) for piece, p in zip(np.split(summed, cuts), parts, strict=True)
        ]

    def whole_numbers(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The sum of integer symbols, in 32 bits where all processes' fit and in 64 otherwise."""
        bound = int(np.abs(array.astype(np.int64)).max(initial=0))
        peak = torch.tensor([bound], dtype=torch.int64, device=self.device)
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=self.group)
        fits = int(peak.item()) * self.size < 2**31
        there = torch.from_numpy(array.astype(np.int32 if fits else np.int64)).to(self.device)
        return self.total(there).cpu().numpy().astype(np.int64)

    def gathered(self, body: bytes) -> list[bytes]:
        """Every process's bytes, in the order of ranks."""
        length = torch.tensor([len(body)], dtype=torch.int64, device=self.device)
        lengths = [torch.zeros_like(length) for _ in range(self.size)]
        dist.all_gather(lengths, length, group=self.group)
        longest = max(int(found.item()) for found in lengths)
        padded = np.zeros(longest, np.uint8)
        padded[: len(body)] = np.frombuffer(body, np.uint8)
        mine = torch.from_numpy(padded).to(self.device)
        bodies = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(bodies, mine, group=self.group)
        self.sent.num_bytes += length.nbytes + longest
        return [
            found.cpu().numpy()[: int(count.item())].tobytes()
            for found, count in zip(bodies, lengths, strict=True)
        ]


def _gathered(compressor: Compressor[Any], symbols: Symbols, public: Public, trip: _Trip) -> Vector:
    layout = compressor.layout(public.spec)
    contexts = contexts_of(layout, public)
    total = np.zeros(public.spec.size, np.float32)
    for body in trip.gathered(coding.encode(symbols, layout, contexts)):
        found = coding.decode(body, layout, contexts)
        compressor.decompress(found, public).add_to(total)
    return total


def _two_trips(
    compressor: PowerSGD, whole: Vector, rights: tuple[Matrix, ...], public: Public, trip: _Trip
) -> tuple[Vector, tuple[Matrix, ...]]:
    """Vogels et al. 2019, Algorithm 1; tensors that are not factored go whole, in the first trip.

    The sum of all `whole`s and the next right factors, by which the next step begins.
    """
    spec = public.spec
    matrices, others = views(spec, compressor.rank, compressor.min_compression_rate)
    stream = public.stream("powersgd")
    last = rights or tuple(np.zeros((view.columns, view.rank)) for view in matrices)
    starts = [orthonormal(_revived(right, stream)) for right in last]
    own = [view.of(whole) for view in matrices]
    rest = [whole[spec.slices[name]].astype(np.float64) for name in others]
    images = [matrix @ start for matrix, start in zip(own, starts, strict=True)]
    sums = trip.matrices([*images, *rest], compressor.width)
    lefts = [orthonormal(image) for image in sums[: len(matrices)]]
    nexts = trip.matrices(
        [matrix.T @ left for matrix, left in zip(own, lefts, strict=True)], compressor.width
    )
    agreed = np.empty(spec.size, np.float32)
    for view, left, right in zip(matrices, lefts, nexts, strict=True):
        agreed[view.where] = (left @ right.T).ravel()
    for name, part in zip(others, sums[len(matrices) :], strict=True):
        agreed[spec.slices[name]] = part
    return agreed, tuple(nexts)


def _revived(columns: Matrix, stream: PublicStream) -> Matrix:
    """`columns`, those that are all but zero beside the largest drawn anew, alike everywhere."""
    norms = np.linalg.norm(columns, axis=0)
    dead = norms <= _DEAD * norms.max(initial=0.0)
    signs = 2.0 * stream.bits(columns.size).reshape(columns.shape) - 1.0
    return np.where(dead, signs, columns)
