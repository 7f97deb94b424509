"""Error feedback: what compression lost is added to the next update.

Karimireddy et al. 2019, arXiv:1901.09847, Algorithm 1. The residual is in units of the update,
never weighted, and is taken from the client's own decoded symbols, rounding included. Decay by
staleness as in Li and Li 2023 (arXiv:2207.09057, Section 4, partial participation).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import numpy as np

from fedpress_compression.coding.fields import Symbols
from fedpress_compression.compressor import (
    Compressor,
    Lossy,
    Properties,
    Public,
    Wrapper,
    check_shape,
    compressor,
    members,
    properties,
    state_name,
    to_config,
)
from fedpress_compression.compressors.topk import TopK
from fedpress_compression.errors import IncompatiblePlan
from fedpress_compression.kernels.buffer_pool import pooled
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Update


class Feedback(NamedTuple):
    """The state of error feedback; `dgc` shares it, so that each continues from the other's.

    `residual` [spec.size] is everything computed and not yet sent; None: zeros. `inner` has the
    states of inner compressors by their keys: where another one begins, the residual stays. `round`
    is that of the newest update, 0 before the first. `velocity` [spec.size] is dgc's. `lost` is
    what decay and cap took away in the last step.
    """

    residual: Vector | None = None
    inner: Mapping[str, Any] = MappingProxyType({})
    round: int = 0
    velocity: Vector | None = None
    lost: tuple[tuple[str, Vector], ...] = ()


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
class ErrorFeedback(Wrapper):
    """Wraps any compressor; on the wire there is `inner` alone.

    What waits in the residual grows stale while a device sits rounds out. It is multiplied by
    `decay` for every round sat out, then scaled down to at most `max_ratio` times the new update's
    norm. By default nothing is; what either takes away is lost to the model, and reported.
    """

    inner: Compressor[Any] = field(default_factory=TopK)
    decay: float = 1.0
    max_ratio: float | None = None

    def __post_init__(self) -> None:
        if not hasattr(self.inner, "wire_id") or isinstance(self.inner, ErrorFeedback):
            raise ValueError(f"inner must be a compressor other than this, not {self.inner!r}")
        if not 0 <= self.decay <= 1:
            raise ValueError(f"decay must lie in [0, 1], not {self.decay}")
        if self.max_ratio is not None and not 0 <= self.max_ratio < math.inf:
            raise ValueError(f"max_ratio must be 0 or more, not {self.max_ratio}")

    @property
    def keeps_residual(self) -> bool:
        return True

    @property
    def lossy(self) -> Compressor[Any]:
        return self.inner

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

    @property
    def state_key(self) -> str:
        return "error_feedback"

    def init(self, spec: ModelSpec) -> Feedback:
        inner = self.inner.init(spec)
        return Feedback(inner={} if inner is None else {state_name(self.inner): inner})

    def compress(
        self, update: Vector, state: Feedback, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, Feedback]:
        symbols, after, mark = self.send(self.inner, update, state, public, rng)
        return symbols, after if mark is None else _with_inner(after, **mark)

    def send(
        self,
        channel: Lossy[Any],
        update: Vector,
        state: Feedback,
        public: Public,
        rng: np.random.Generator,
    ) -> tuple[Symbols, Feedback, Mapping[str, Any] | None]:
        check_shape(update, public.spec)
        residual, lost = self._limited(state, update, public.round)
        name = state_name(self.inner)
        before = state.inner[name] if name in state.inner else self.inner.init(public.spec)
        if residual is None:
            left = pooled(update.size, np.float32)
            np.copyto(left, update)
            symbols, inner = channel.compress(update, before, public, rng)
        else:
            left, symbols, inner = compress_sum(channel, update, residual, before, public, rng)
        channel.decompress(symbols, public).add_to(left, sign=-1.0)
        after = state._replace(residual=left, round=max(state.round, public.round), lost=lost)
        if inner is None:
            return symbols, after, None
        return symbols, _with_inner(after, name, before), {"name": name, "state": inner}

    def commit(self, state: Feedback, mark: Mapping[str, Any] | None, sent: Update) -> Feedback:
        if mark is None:
            return state
        inner = self.inner.commit(state.inner.get(mark["name"]), mark["state"], sent)
        return _with_inner(state, mark["name"], inner)

    def roll_back(self, state: Feedback, sent: Update) -> Feedback:
        """Add the upload's values to the residual again."""
        name = state_name(self.inner)
        if name in state.inner:
            state = _with_inner(state, name, self.inner.roll_back(state.inner[name], sent))
        if state.residual is None:
            return state._replace(residual=sent.dense())
        residual = state.residual.copy()
        sent.add_to(residual)
        return state._replace(residual=residual)

    def stricter(self, decay: float, max_ratio: float | None) -> Self:
        """The same with the lower of each limit, here and given."""
        ratios = [ratio for ratio in (self.max_ratio, max_ratio) if ratio is not None]
        return replace(self, decay=min(self.decay, decay), max_ratio=min(ratios, default=None))

    def _limited(
        self, state: Feedback, update: Vector, round_: int
    ) -> tuple[Vector | None, tuple[tuple[str, Vector], ...]]:
        """The residual after decay and cap, and the values that each of them removed."""
        residual, lost = state.residual, list[tuple[str, Vector]]()
        sat_out = max(0, round_ - state.round - 1) if state.round else 0
        if residual is not None and self.decay < 1 and sat_out:
            kept = residual * np.float32(self.decay**sat_out)
            lost.append(("decayed", residual - kept))
            residual = kept
        if residual is not None and self.max_ratio is not None:
            norm = float(np.linalg.norm(residual.astype(np.float64)))
            at_most = self.max_ratio * float(np.linalg.norm(update.astype(np.float64)))
            if norm > at_most:
                kept = residual * np.float32(at_most / norm)
                lost.append(("capped", residual - kept))
                residual = kept
        return residual, tuple(lost)


def _with_inner(after: Feedback, name: str, state: Any) -> Feedback:
    return after._replace(inner={**after.inner, name: state})


def compress_sum(
    channel: Lossy[Any],
    update: Vector,
    other: Vector,
    state: Any,
    public: Public,
    rng: np.random.Generator,
) -> tuple[Vector, Symbols, Any]:
    """The sum of `update` and `other`, the symbols that `channel` gives for it, and its state.

    A channel that can do both in one pass over the vectors has a method `compress_sum`.
    """
    fused = fused_sum(channel)
    if fused is not None:
        total, symbols, after = fused(update, other, state, public, rng)
        return total, symbols, after
    with np.errstate(over="ignore"):  # the channel refuses infinity
        total = np.add(update, other, out=pooled(update.size, np.float32))
    symbols, after = channel.compress(total, state, public, rng)
    return total, symbols, after


def fused_sum(channel: Lossy[Any]) -> Callable[..., tuple[Vector, Symbols, Any]] | None:
    """Its `compress_sum`; None if it has none, or only that of a class whose `compress` its own
    class overrides."""
    for each in type(channel).__mro__:
        if "compress_sum" in vars(each):
            fused: Callable[..., tuple[Vector, Symbols, Any]] = channel.compress_sum  # type: ignore[attr-defined]
            return fused
        if "compress" in vars(each):
            break
    return None
