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
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fedpress_compression import coding
from fedpress_compression.coding.fields import Symbols
from fedpress_compression.compressor import Compressor, Public
from fedpress_compression.compressors.error_feedback import check_feedback
from fedpress_compression.compressors.none import Uncompressed
from fedpress_compression.contexts import contexts_of
from fedpress_compression.matrices import Matrix
from fedpress_compression.plain_states import State, plain, restored
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Update
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
    """Bytes that this process sent in collectives: `num_bytes` compressed (between sites, if there
    are any), `whole_bytes` inside its site; float32 would have been `plain_bytes`."""

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
        check_feedback(compressor)
        strange = sorted(compressor.needs - {"previous"})
        if strange:
            raise IncompatiblePlan(
                f"{compressor} reads {', '.join(strange)}, which a group of processes lacks",
                hint="it has the last mean alone",
            )
        self._compressor = compressor
        self._group, self._sites = group, sites
        self._seed, self._dtype = seed, dtype
        self._residuals: dict[str, Vector] = {}
        self._kept: dict[str, _Kept] = {}
        self.sent = Sent()

    # What is kept

    def residual(self, spec: ModelSpec) -> Vector:
        """The values not yet sent [spec.size], in units of the mean; zeros without feedback."""
        parts = [self._residuals.get(t.name, np.zeros(t.size, np.float32)) for t in spec.trained]
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    def state_dict(self) -> dict[str, Any]:
        """All that is kept, as plain data and tensors: what `torch.save` writes safely."""
        kept = {
            key: {
                "round": each.round,
                "previous": None if each.previous is None else torch.from_numpy(each.previous),
                "state": _tensors(each.state),
            }
            for key, each in self._kept.items()
        }
        residuals = {name: torch.from_numpy(part) for name, part in self._residuals.items()}
        return {"kept": kept, "residuals": residuals}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._residuals = {name: part.numpy() for name, part in state["residuals"].items()}
        self._kept = {
            key: _Kept(
                round=each["round"],
                previous=None if each["previous"] is None else each["previous"].numpy(),
                state=_arrays(each.get("state")),  # which earlier releases did not write
            )
            for key, each in state["kept"].items()
        }

    # The mean

    def mean(self, spec: ModelSpec, values: torch.Tensor) -> torch.Tensor:
        """The mean over all processes of their `values` [spec.size], on their device, float32.

        Every process must call it in the same order with the same `spec`.
        """
        lossy = self._compressor.lossy
        if not hasattr(lossy, "group_sum") and plain(lossy.init(spec)) is not None:
            raise IncompatiblePlan(
                f"{lossy} keeps a state of its own, which an exchange has no place for",
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
        made = self._compressor
        is_plain = made.lossy == Uncompressed()
        if is_plain and not made.keeps_residual:
            return trip.total(values.to(self._dtype) / trip.size).to(torch.float32)
        whole = (values / trip.size).cpu().numpy()
        kept = self._kept.get(spec.digest, _Kept())
        state, brought = restored(kept.state, made.init(spec)), whole
        if made.keeps_residual:
            residual = self.residual(spec)
            state, brought = state._replace(residual=residual), whole + residual
        if not trip.all_finite(brought):
            return torch.full_like(values, torch.nan)
        words = f"fedpress exchange v1|{self._seed}|{kept.round}"
        zeros = np.zeros(spec.size, np.float32)
        public = Public(
            spec,
            PublicRandomness(hashlib.sha256(words.encode()).digest()),
            {"previous": zeros if kept.previous is None else kept.previous},
            kept.round,
        )
        channel: _Channel
        if is_plain:
            channel = _WholeNumbers(trip, self._dtype)
        elif hasattr(made.lossy, "group_sum"):
            channel = _SeveralSums(trip, made.lossy)
        else:
            channel = _Symbols(trip, made.lossy)
        private = np.random.default_rng([self._seed, trip.rank, kept.round])
        _, after, mark = made.send(channel, whole, state, public, private)
        after = made.commit(after, mark, channel.own)
        if made.keeps_residual:
            for tensor in spec.trained:
                self._residuals[tensor.name] = after.residual[spec.slices[tensor.name]]
            after = after._replace(residual=None)
        self._kept[spec.digest] = _Kept(kept.round + 1, channel.agreed, plain(after))
        return torch.from_numpy(channel.agreed).to(values.device)


@dataclass(frozen=True, slots=True)
class _Kept:
    round: int = 1
    previous: Vector | None = None
    state: State = None
    """Of the compressor, without a residual."""


def _tensors(state: State) -> Any:
    match state:
        case np.ndarray():
            return torch.from_numpy(state)
        case dict():
            return {key: _tensors(item) for key, item in state.items()}
        case list():
            return [_tensors(item) for item in state]
    return state


def _arrays(stored: Any) -> State:
    match stored:
        case torch.Tensor():
            return stored.numpy()
        case dict():
            return {key: _arrays(item) for key, item in stored.items()}
        case list():
            return [_arrays(item) for item in stored]
    return stored


@dataclass(frozen=True, slots=True)
class _Trip:
    """Collectives over one group, on the device its backend wants, with their bytes counted."""

    group: Group | None
    near: torch.device
    """The device of the values."""
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


class _Channel:
    """A collective in place of the compressor, see `Compressor.send`: `agreed` [size] is the sum of
    what all processes sent, `own` what this one did."""

    agreed: Vector
    own: Update

    def decompress(self, symbols: Symbols, public: Public, num_summands: int = 1) -> Update:
        return self.own


@dataclass(slots=True)
class _WholeNumbers(_Channel):
    trip: _Trip
    dtype: torch.dtype
    agreed: Vector = field(init=False)
    own: Update = field(init=False)

    def compress(
        self, update: Vector, state: Any, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, Any]:
        sent = torch.from_numpy(update).to(self.dtype)
        self.own = Update.from_dense(sent.to(torch.float32).numpy())
        agreed = self.trip.total(sent.to(self.trip.device))
        self.agreed = agreed.to("cpu", torch.float32).numpy()
        return (), state


@dataclass(slots=True)
class _SeveralSums(_Channel):
    trip: _Trip
    lossy: Any
    agreed: Vector = field(init=False)
    own: Update = field(init=False)

    def compress(
        self, update: Vector, state: Any, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, Any]:
        self.agreed, after = self.lossy.group_sum(update, state, public, self.trip.matrices)
        self.own = Update.from_dense(self.agreed / np.float32(self.trip.size))
        return (), after


@dataclass(slots=True)
class _Symbols(_Channel):
    """Summed where they commute with the sum, else gathered."""

    trip: _Trip
    lossy: Compressor[Any]
    agreed: Vector = field(init=False)
    own: Update = field(init=False)

    def compress(
        self, update: Vector, state: Any, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, Any]:
        symbols, after = self.lossy.compress(update, state, public, rng)
        self.own = self.lossy.decompress(symbols, public)
        if self.lossy.commutes_with_sum:
            summed = tuple(self.trip.whole_numbers(array) for array in symbols)
            self.agreed = self.lossy.decompress(summed, public, self.trip.size).dense()
        else:
            self.agreed = self._gathered(symbols, public)
        return symbols, after

    def _gathered(self, symbols: Symbols, public: Public) -> Vector:
        layout = self.lossy.layout(public.spec)
        contexts = contexts_of(layout, public)
        total = np.zeros(public.spec.size, np.float32)
        for body in self.trip.gathered(coding.encode(symbols, layout, contexts)):
            decoded = coding.decode(body, layout, contexts)
            self.lossy.decompress(decoded, public).add_to(total)
        return total
