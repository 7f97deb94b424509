"""Compressed reduce-scatter of gradients for FSDP2 (`fully_shard`).

    for module in (*layers, model):
        fully_shard(module)
        module.set_custom_reduce_scatter(CompressedReduceScatter(ErrorFeedback(TopK(0.01))))

For every other process, each compresses the part of its gradient that the other holds, and sends it
there alone: its traffic does not grow with the number of processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedpress_compression import coding
from fedpress_compression.coding.fields import Symbols
from fedpress_compression.compressor import Compressor, Public, to_config
from fedpress_compression.contexts import contexts_of
from fedpress_compression.plain_states import plain, restored
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.tensors import ModelSpec, TensorSpec, Vector
from fedpress_compression.update import Update
from fedpress_ddp.arguments import check_alike, check_state, process, whole
from fedpress_ddp.collectives import (
    FAILED,
    NOT_FINITE,
    READY,
    Group,
    NotFinite,
    Trip,
    Turns,
    received,
)
from fedpress_ddp.exchange import arrays, check_exchange, check_steps, tensors, warn_of_bias
from fedpress_ddp.metrics import Measured, Sent
from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan, MissingExtra

try:
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter  # has no public name
except ModuleNotFoundError as exc:
    raise MissingExtra("fedpress.ddp needs PyTorch", hint="pip install fedpress[torch]") from exc


class CompressedReduceScatter(ReduceScatter):
    """For `set_custom_reduce_scatter` of one FSDP module: make one for each module.

    `compressor` is one whose bodies are gathered in a hook, with or without error feedback; an
    error feedback keeps a residual of the module's whole gradient in every process, on the host, in
    float32. A gradient of NaN or infinity in any process comes out as NaN in all, and changes
    nothing else.
    """

    def __init__(self, compressor: Compressor[Any], *, seed: int = 0) -> None:
        check_exchange(compressor)
        check_steps(compressor)
        if hasattr(compressor.lossy, "group_sum"):
            raise IncompatiblePlan(
                f"{compressor.lossy} sums factors over all processes, which a reduce-scatter of "
                "parts has no place for",
                hint="use topk, sign or another method whose bodies are gathered",
            )
        warn_of_bias(compressor)
        self._made, self._seed = compressor, whole("seed", seed, 0)
        self._is_checked = False
        self._states: list[Any] = []
        self._steps = 0
        self.sent = Sent()

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A buffer for FSDP."""
        return torch.empty(*size, dtype=dtype, device=device)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint of this process, as residuals are each process's own."""
        states = [tensors(plain(each)) for each in self._states]
        return {"steps": self._steps, "states": states, **process()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigurationError if it was saved by another process."""
        check_state(state, "steps", "states")
        self._is_checked = False
        self._steps = state["steps"]
        self._states = [arrays(each) for each in state["states"]]

    @torch.no_grad()
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Group,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Set `output_tensor` [d / n] to this process's part of the sum or the mean, by `op`, of
        all `input_tensor` [d]; complete on return."""
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ConfigurationError(
                f"a compressed reduce-scatter sums or averages, and cannot do {op}",
                hint="remove set_gradient_divide_factor",
            )
        if not self._is_checked:
            settings = {
                "compressor": to_config(self._made),
                "seed": self._seed,
                "steps so far": self._steps,
            }
            check_alike(settings, input_tensor.device, group, None)
            self._is_checked = True
        measured = Measured()
        trip = Trip(group, input_tensor.device, measured, Turns().take())
        scale = 1 / trip.size if op == dist.ReduceOp.AVG else 1.0
        parts = (input_tensor.float() * scale).cpu().numpy().reshape(trip.size, -1)
        try:
            own = self._exchanged(parts, trip)
            output_tensor.copy_(torch.from_numpy(own).view_as(output_tensor))
        except NotFinite:
            output_tensor.fill_(torch.nan)
        except Exception:
            if not trip.has_agreed:  # the others would wait for this process
                with trip.collectives():
                    trip.agree(FAILED)
            raise
        finally:
            measured.sent.plain_bytes += (trip.size - 1) * parts[0].nbytes
            self.sent.add(measured.sent)

    def _exchanged(self, parts: Vector, trip: Trip) -> Vector:
        """This process's part of the sum of all processes' `parts` [n, d / n]."""
        if not np.isfinite(parts).all():
            with trip.collectives():
                trip.agree(NOT_FINITE)
        made = self._made
        spec = ModelSpec((TensorSpec("part", (parts.shape[1],)),))
        publics = [self._public(spec, rank) for rank in range(trip.size)]
        layout = made.lossy.layout(spec)
        contexts = [contexts_of(layout, public) for public in publics]
        start = made.init(spec)
        channels, after, bodies = [], [], []
        for rank, (part, public) in enumerate(zip(parts, publics, strict=True)):
            state = restored(self._states[rank], start) if self._states else start
            channel = _Own(made.lossy)
            private = np.random.default_rng([self._seed, trip.rank, rank, self._steps])
            symbols, state, mark = made.send(channel, part, state, public, private)
            state = made.commit(state, mark, channel.own)
            after.append(state._replace(lost=()) if made.keeps_residual else state)
            channels.append(channel)
            is_own = rank == trip.rank
            bodies.append(b"" if is_own else coding.encode(symbols, layout, contexts[rank]))
        with trip.collectives():
            longest = trip.agree(READY, max(len(body) for body in bodies))
            bodies = trip.scattered(bodies, longest)
        self._states, self._steps = [plain(each) for each in after], self._steps + 1
        total = np.zeros(parts.shape[1], np.float32)
        for rank, body in enumerate(bodies):
            if rank == trip.rank:
                channels[rank].own.add_to(total)
                continue
            own = publics[trip.rank]
            received(body, rank, made.lossy, own, contexts[trip.rank]).add_to(total)
        return total

    def _public(self, spec: ModelSpec, rank: int) -> Public:
        """The state that all processes share for the part of process `rank`."""
        words = f"fedpress reduce-scatter v1|{self._seed}|{self._steps}|{rank}"
        zeros = np.zeros(spec.size, np.float32)
        randomness = PublicRandomness(hashlib.sha256(words.encode()).digest())
        return Public(spec, randomness, {"previous": zeros}, self._steps + 1)


class _Own:
    """A channel, see `Compressor.send`, that keeps what this process sent."""

    def __init__(self, lossy: Compressor[Any]) -> None:
        self._lossy = lossy
        self.own = Update.from_dense(np.zeros(0, np.float32))

    def compress(
        self, update: Vector, state: Any, public: Public, rng: np.random.Generator
    ) -> tuple[Symbols, Any]:
        symbols, after = self._lossy.compress(update, state, public, rng)
        self.own = self._lossy.decompress(symbols, public)
        return symbols, after

    def decompress(self, symbols: Symbols, public: Public, num_summands: int = 1) -> Update:
        return self.own
