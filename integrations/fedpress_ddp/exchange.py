"""The mean of a vector over a process group, compressed: what data-parallel training exchanges.

Three ways, by what the compressor is. Uncompressed numbers and symbols that commute with the sum
are all-reduced. PowerSGD takes its two trips, an all-reduce each. Everything else is coded,
gathered from all (the bytes differ in length) and decoded by all in the order of ranks: every
process ends with the same bits. Between sites only one process of each takes part; inside, numbers
go whole.
"""

from __future__ import annotations

import hashlib
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from fedpress_compression.bias import MOST_NEVER_SENT, never_sent
from fedpress_compression.compressor import (
    Compressor,
    Knowledge,
    Public,
    members,
    properties,
    to_config,
)
from fedpress_compression.compressors.dgc import Dgc
from fedpress_compression.compressors.error_feedback import ErrorFeedback, check_feedback
from fedpress_compression.compressors.none import Uncompressed
from fedpress_compression.compressors.randomk import RandomK
from fedpress_compression.compressors.topk import TopK
from fedpress_compression.kernels.buffer_pool import pooled
from fedpress_compression.plain_states import State, plain, restored
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Update
from fedpress_ddp import on_device
from fedpress_ddp.arguments import check_alike, check_state, process, whole
from fedpress_ddp.collectives import (
    FAILED,
    Channel,
    Combine,
    Gathered,
    Group,
    NotFinite,
    SeveralSums,
    Summed,
    Trip,
    Turn,
    Turns,
    WholeNumbers,
    adasum,
    added,
    naming_lost,
)
from fedpress_ddp.metrics import BiasWarning, Measured, Sent, square
from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan, MissingExtra

try:
    import torch
    import torch.distributed as dist
except ModuleNotFoundError as exc:
    raise MissingExtra(
        "exchanging gradients needs PyTorch", hint="pip install fedpress[torch]"
    ) from exc


Reduction = Literal["mean", "adasum"]
_COMBINE: Mapping[str, Combine] = {"mean": added, "adasum": adasum}


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
        size = whole("the size of a site", size, 1)
        if world % size:
            raise ConfigurationError(f"{world} processes do not make sites of {size}")
        leaders = list(range(0, world, size))
        groups = [dist.new_group(list(range(first, first + size))) for first in leaders]
        between = dist.new_group(leaders)
        leader = rank - rank % size
        return cls(groups[rank // size], between if rank == leader else None, leader)


class Exchange:
    """Means over `group`, or over all `sites`, under `compressor`, and what it keeps between them.

    With ErrorFeedback around the compressor, what a process did not get across is added to its next
    vector: over n processes, sum of means = sum of inputs / n - sum of residuals. What is kept goes
    by the names of tensors; a tensor keeps its residual if it moves to another vector. To a
    compressor `previous` is the last mean. All processes must have the same settings, which they
    compare once, before the first exchange. `dtype` is what uncompressed numbers travel in:
    float16, bfloat16 or float32. `model_size`, the values of all
    vectors together, is what dgc clips by; None: each vector is a model.

    With `reduction="adasum"` the vectors, which are then gathered, are combined by Adasum instead
    of the mean, tensor by tensor; so nothing that compressors sum up for the group can be used.

    If a vector holds NaN or infinity anywhere, all processes get NaN, as a plain
    all-reduce would give them, and nothing else changes.

    With FEDPRESS_KERNELS=triton and vectors on its device, ErrorFeedback(TopK(...)) without chunks
    leaves vectors and residuals there (docs/gpu.md); the bits are the same.
    """

    def __init__(
        self,
        compressor: Compressor[Any],
        *,
        group: Group | None = None,
        sites: Sites | None = None,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        reduction: Reduction = "mean",
    ) -> None:
        if reduction not in _COMBINE:
            raise ConfigurationError(f'reduction is "mean" or "adasum", not "{reduction}"')
        if group is not None and sites is not None:
            raise ConfigurationError("give a group or sites, not both")
        if dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise ConfigurationError(f"numbers travel in float16, bfloat16 or float32, not {dtype}")
        check_exchange(compressor, reduction=reduction)
        warn_of_bias(compressor)
        self._compressor, self._reduction = compressor, reduction
        self._group, self._sites = group, sites
        self._seed, self._dtype = whole("seed", seed, 0), dtype
        self.is_checked = False
        """Whether all processes are known to be alike; set it to False where that may change."""
        self._residuals: dict[str, torch.Tensor] = {}
        self._wholes: dict[str, tuple[torch.Tensor, list[tuple[str, torch.Tensor]]]] = {}
        """By the digests of specs, the residual of all their tensors, and its parts by tensor."""
        self._kept: dict[str, _Kept] = {}
        self._turns, self._lock = Turns(), threading.Lock()
        self.sent = Sent()
        self.model_size: int | None = None

    def check_alike(self, near: torch.device, more: Mapping[str, object]) -> None:
        """Raise ConfigurationError, in all processes, unless all have the same settings, and the
        same `more`. Every process must call this at the same point; nccl compares on `near`."""
        own = {
            "compressor": to_config(self._compressor),
            "seed": self._seed,
            "dtype": self._dtype,
            "reduction": self._reduction,
        }
        check_alike({**own, **more}, near, self._group, self._sites)
        self.is_checked = True

    def take_turn(self) -> Turn:
        """The next place in the order of collectives."""
        return self._turns.take()

    def separate(self) -> None:
        """Over all processes, use a group of this exchange's own: then its collectives cannot meet
        others', such as those of SyncBatchNorm in a backward pass. Every process must call this at
        the same point."""
        if self._group is None and self._sites is None:
            self._group = dist.new_group()

    def use_group_of(self, other: Exchange) -> None:
        self._group = other._group

    # What is kept

    def residual(self, spec: ModelSpec) -> Vector:
        """The values not yet sent [spec.size], in units of the mean; zeros without feedback."""
        return self._residual(spec, torch.device("cpu")).numpy()

    def _residual(self, spec: ModelSpec, device: torch.device) -> torch.Tensor:
        """On `device`, wherever the last exchange left it."""
        whole, its_parts = self._wholes.get(spec.digest, (None, []))
        if whole is not None and all(self._residuals.get(n) is part for n, part in its_parts):
            return whole.to(device)  # the tensors' residuals are its parts, side by side: no copy
        parts = [self._residuals.get(t.name, torch.zeros(t.size)).to(device) for t in spec.trained]
        return torch.cat([torch.zeros(0, device=device), *parts])

    def _keep_residual(self, spec: ModelSpec, whole: torch.Tensor) -> None:
        parts = [(tensor.name, whole[spec.slices[tensor.name]]) for tensor in spec.trained]
        self._residuals.update(parts)
        self._wholes[spec.digest] = whole, parts

    def residuals(self) -> dict[str, Vector]:
        """The values not yet sent, by tensor; those that have none are left out."""
        return {name: part.cpu().numpy() for name, part in self._residuals.items()}

    def state_dict(self) -> dict[str, Any]:
        """All that is kept, as plain data and tensors: what `torch.save` writes safely."""
        kept = {
            key: {
                "round": each.round,
                "previous": None if each.previous is None else torch.from_numpy(each.previous()),
                "state": tensors(each.state),
            }
            for key, each in self._kept.items()
        }
        residuals = {name: part.cpu() for name, part in self._residuals.items()}
        return {"kept": kept, "residuals": residuals, **process()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigurationError if it was saved by another process."""
        check_state(state, "kept", "residuals")
        self._wholes = {}
        self._residuals = dict(state["residuals"])
        self._kept = {
            key: _Kept(
                round=each["round"],
                previous=None if each["previous"] is None else each["previous"].numpy,
                state=arrays(each.get("state")),  # which earlier releases did not write
            )
            for key, each in state["kept"].items()
        }

    # The mean

    def mean(
        self,
        spec: ModelSpec,
        values: torch.Tensor,
        *,
        compressor: Compressor[Any] | None = None,
        turn: Turn | None = None,
        measured: Measured | None = None,
    ) -> torch.Tensor:
        """The mean over all processes of their `values` [spec.size], on their device, float32.

        Every process must call it in the same order with the same `spec`. `compressor` replaces the
        exchange's own for this call; residuals continue. Calls from several threads each need a
        `turn`, taken in the same order everywhere, and no two may share a tensor. What the exchange
        cost is added to `measured`. If a process fails, it raises its error, and all others
        InvalidUpdate.
        """
        made = self._compressor if compressor is None else compressor
        check_exchange(made, spec, reduction=self._reduction)
        own = Measured()
        if turn is None:
            if not self.is_checked:
                self.check_alike(values.device, {})
            turn = self._turns.take()
        start = time.perf_counter()
        try:
            return self._sited(made, spec, values.detach().to(torch.float32), turn, own)
        finally:
            turn.finish()
            own.compress_seconds = time.perf_counter() - start - own.exchange_seconds
            with self._lock:
                self.sent.add(own.sent)
            if measured is not None:
                measured.add(own)

    def _sited(
        self,
        made: Compressor[Any],
        spec: ModelSpec,
        flat: torch.Tensor,
        turn: Turn,
        measured: Measured,
    ) -> torch.Tensor:
        if self._sites is None:
            return self.mean_over(made, spec, flat, Trip(self._group, flat.device, measured, turn))
        inside, between = self._sites.inside, self._sites.between
        with turn:
            whole = flat / dist.get_world_size(inside)
            with naming_lost(inside):
                dist.all_reduce(whole, group=inside)
            measured.sent.whole_bytes += whole.nbytes
            try:
                if between is not None:
                    trip = Trip(between, whole.device, measured, turn)
                    whole = self.mean_over(made, spec, whole, trip)
            except Exception:  # the others of the site wait
                dist.broadcast(torch.full_like(flat, torch.nan), self._sites.leader, group=inside)
                raise
            with naming_lost(inside):
                dist.broadcast(whole, self._sites.leader, group=inside)
        return whole

    def mean_over(
        self, made: Compressor[Any], spec: ModelSpec, values: torch.Tensor, trip: Trip
    ) -> torch.Tensor:
        """The mean of `values` [spec.size] over the processes of `trip`, compressed by `made`."""
        trip.measured.sent.plain_bytes += values.nbytes
        is_plain = made.lossy == Uncompressed() and not made.keeps_residual
        if is_plain and self._reduction == "mean":
            with trip.collectives():
                return trip.total(values.to(self._dtype) / trip.size).to(torch.float32)
        trip.measured.is_compressed = not is_plain
        try:
            return self._compressed(made, spec, values, trip)
        except NotFinite:
            trip.measured.is_finite = False
            return torch.full_like(values, torch.nan)
        except Exception:
            if not trip.has_agreed:  # the others would wait for this process
                with trip.collectives():
                    trip.agree(FAILED)
            raise

    def _compressed(
        self, made: Compressor[Any], spec: ModelSpec, values: torch.Tensor, trip: Trip
    ) -> torch.Tensor:
        made = self._clipped(made, spec, trip.size)
        kept = self._kept.get(spec.digest, _Kept())
        state = restored(kept.state, made.init(spec))
        words = f"fedpress exchange v1|{self._seed}|{kept.round}"
        knowledge: dict[Knowledge, Vector] = {}
        if "previous" in made.needs:
            zeros = np.zeros(spec.size, np.float32)
            knowledge["previous"] = zeros if kept.previous is None else kept.previous()
        public = Public(
            spec,
            PublicRandomness(hashlib.sha256(words.encode()).digest()),
            knowledge,
            kept.round,
        )
        previous: Callable[[], Vector]
        lossy = on_device.selection(made, values) if self._reduction == "mean" else None
        if lossy is not None:
            residual = self._residual(spec, values.device)
            mean, residual, updates = on_device.send(lossy, values, residual, public, trip)
            self._keep_residual(spec, residual)
            previous = partial(added, updates, spec)
            after = state._replace(round=public.round, lost=())
        else:
            mean, after = self._sent_by_host(made, values.cpu().numpy(), state, public, trip)
            previous = mean.numpy
        self._kept[spec.digest] = _Kept(kept.round + 1, previous, plain(after))
        return mean.to(values.device)

    def _sent_by_host(
        self, made: Compressor[Any], whole: Vector, state: Any, public: Public, trip: Trip
    ) -> tuple[torch.Tensor, Any]:
        """The mean [spec.size], and the state after it without a residual, which is kept."""
        spec, scale = public.spec, 1 / trip.size
        is_late = _is_scaled_late(made, trip.size)
        if not is_late:
            whole = np.divide(whole, np.float32(trip.size), out=pooled(spec.size, np.float32))
        if made.keeps_residual:
            state = state._replace(residual=self.residual(spec))
        length = trip.finite_square(whole)
        channel: Channel
        combine = _COMBINE[self._reduction]
        if made.lossy == Uncompressed():
            channel = WholeNumbers(trip, self._dtype, combine)
        elif hasattr(made.lossy, "group_sum"):
            channel = SeveralSums(trip, made.lossy)
        elif made.lossy.commutes_with_sum:
            channel = Summed(trip, made.lossy)
        else:
            channel = Gathered(trip, made.lossy, combine, scale if is_late else 1.0)
        private = np.random.default_rng([self._seed, trip.rank, public.round])
        _, after, mark = made.send(channel, whole, state, public, private)
        after = made.commit(after, mark, channel.own)
        trip.measured.gradient += length * scale**2 if is_late else length
        if made.keeps_residual:
            left = _square_left(trip.measured.brought, channel.own, after.residual)
            trip.measured.lost += left
            trip.measured.waiting += left
            self._keep_residual(spec, torch.from_numpy(after.residual))
            after = after._replace(residual=None, lost=())
        else:
            left_over = whole.copy()
            channel.own.add_to(left_over, sign=-1.0)
            trip.measured.lost += square(left_over)
        return torch.from_numpy(channel.agreed), after

    def _clipped(self, made: Compressor[Any], spec: ModelSpec, size: int) -> Compressor[Any]:
        """`made`; for dgc with the paper's threshold of one vector out of N processes' mean, which
        is max_norm / sqrt(N) for the whole model, and for a part of it as much as its share."""
        if not isinstance(made, Dgc) or made.max_norm is None:
            return made
        share = spec.size / max(self.model_size or spec.size, spec.size)
        return replace(made, max_norm=made.max_norm * (share / size) ** 0.5, cohort=1)


def _is_scaled_late(made: Compressor[Any], size: int) -> bool:
    """Whether the division by `size`, the number of processes, is left to the pass in which top-k
    adds the residual: it is exact by a power of two, and nothing else reads the gradient."""
    return (
        type(made) is ErrorFeedback
        and made.max_ratio is None
        and type(made.lossy) is TopK
        and size & (size - 1) == 0
    )


def _square_left(brought: float, sent: Update, residual: Vector) -> float:
    """The squared norm of `residual`, which is a vector of the squared norm `brought` less `sent`.

    Without a pass over it if little was sent, and if enough is left that rounding does not matter.
    """
    left = brought
    for piece in sent.pieces:
        if isinstance(piece.where, slice):
            return square(residual)
        values = piece.values.astype(np.float64)
        left -= float(np.dot(values, 2 * residual[piece.where].astype(np.float64) + values))
    return left if left > _MEASURABLE * brought else square(residual)


_MEASURABLE = 0.01


def check_exchange(
    made: Compressor[Any], spec: ModelSpec | None = None, *, reduction: Reduction = "mean"
) -> None:
    """Raise ConfigurationError if `made` is no compressor, IncompatiblePlan if a group of processes
    cannot exchange gradients by it."""
    if isinstance(made, type) or not hasattr(made, "lossy"):
        raise ConfigurationError(
            f"{made!r} is no compressor",
            hint="give an instance, such as ErrorFeedback(TopK(fraction=0.01))",
        )
    check_feedback(made)
    strange = sorted(made.needs - {"previous"})
    if strange:
        raise IncompatiblePlan(
            f"{made} reads {', '.join(strange)}, which a group of processes lacks",
            hint="it has the last mean alone",
        )
    lossy = made.lossy
    is_summed = hasattr(lossy, "group_sum") or lossy.commutes_with_sum
    if reduction == "adasum" and is_summed and lossy != Uncompressed():
        raise IncompatiblePlan(
            f"{lossy} is summed up in the network, and Adasum needs each process's vector",
            hint='use topk, sign or quantize, or reduction="mean"',
        )
    if spec is not None and not hasattr(lossy, "group_sum") and plain(lossy.init(spec)) is not None:
        raise IncompatiblePlan(
            f"{lossy} keeps a state of its own, which an exchange has no place for",
            hint="put error_feedback around a compressor without one, or around powersgd",
        )


def check_steps(made: Compressor[Any]) -> None:
    """Raise IncompatiblePlan if `made` is error feedback around a compressor that sends few
    coordinates and does not pick them by their values.

    A coordinate then waits 1 / fraction steps on the average, and moves by all its gradients at
    once: as if the learning rate were so many times larger. Digits at a rate that suits top-k go to
    chance with random-k, at 1 % and at 10 %.
    """
    for member in _impatient(made) if made.keeps_residual else ():
        share = f"{member.fraction:g} of the" if member.count is None else f"{member.count}"
        raise IncompatiblePlan(
            f"{to_config(made)['id']} around randomk, which sends {share} coordinates, whatever "
            "their values: each waits many steps and then moves by all its gradients at once, "
            "and training diverges at the learning rates that suit other methods",
            hint="use topk; or randomk with unbiased true, without feedback and with a lower "
            f"learning rate; or randomk of at least {_MOST_PATIENT:g}; or allow_delays=True with "
            "the learning rate times the fraction",
        )


def warn_of_bias(made: Compressor[Any]) -> None:
    """Warn, as a task's check does, of a biased compressor without error feedback that never sends
    the most of a typical gradient: training with it ends short of what it reaches uncompressed."""
    lost = never_sent(made)
    if lost <= MOST_NEVER_SENT:
        return
    name, claimed = to_config(made)["id"], properties(made)
    if any(_impatient(made)):
        advice = "set unbiased to true, with a lower learning rate; or topk with error_feedback"
    elif claimed.suits_feedback:
        advice = "put error_feedback around it"
    else:
        advice = "choose a higher rate"
    warnings.warn(
        f"gradients are exchanged by {name} without error feedback, which never sends {lost:.0%} "
        f"of a typical one; {advice}",
        BiasWarning,
        stacklevel=3,
    )


def _impatient(made: Compressor[Any]) -> Iterator[RandomK]:
    """The members that send fewer than half of the coordinates, whatever their values."""
    for member in _all_members(made.lossy):
        if isinstance(member, RandomK) and (
            member.count is not None or member.fraction < _MOST_PATIENT
        ):
            yield member


def _all_members(made: Any) -> Iterator[Any]:
    yield made
    for member in members(made):
        yield from _all_members(member)


_MOST_PATIENT = 0.5


@dataclass(frozen=True, slots=True)
class _Kept:
    round: int = 1
    previous: Callable[[], Vector] | None = None
    """Gives the last mean."""
    state: State = None
    """Of the compressor, without a residual."""


def tensors(state: State) -> Any:
    """A plain state with tensors for arrays, as `torch.save` writes safely."""
    match state:
        case np.ndarray():
            return torch.from_numpy(state)
        case dict():
            return {key: tensors(item) for key, item in state.items()}
        case list():
            return [tensors(item) for item in state]
    return state


def arrays(stored: Any) -> State:
    """The inverse of `tensors`."""
    match stored:
        case torch.Tensor():
            return stored.numpy()
        case dict():
            return {key: arrays(item) for key, item in stored.items()}
        case list():
            return [arrays(item) for item in stored]
    return stored
