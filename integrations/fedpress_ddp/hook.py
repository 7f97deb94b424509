"""Training across data centres: a gradient hook for DistributedDataParallel, and local SGD.

    model = DistributedDataParallel(net)
    state = HookState(ErrorFeedback(TopK(fraction=0.001)), sites=Sites.of(8))
    model.register_comm_hook(state, comm_hook)

compresses every step's gradients between sites of 8 processes and sends them whole inside a site.
`LocalSGD` instead lets every site take many steps of its own optimizer, under FSDP or ZeRO if need
be, and exchanges the resulting change of the parameters. Neither talks to a fedpress server: the
processes trust each other.
"""

# No `from __future__ import annotations`: torch looks at a hook's annotations as objects.

import copy
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

from fedpress_compression.compressor import Compressor, to_config
from fedpress_compression.compressors.dgc import Dgc
from fedpress_compression.compressors.none import Uncompressed
from fedpress_compression.tensors import ModelSpec, TensorSpec
from fedpress_ddp.arguments import check_shapes, check_state, digest, trainable, whole
from fedpress_ddp.collectives import Group, ProcessLost, Turn
from fedpress_ddp.exchange import (
    Exchange,
    Reduction,
    Sites,
    check_exchange,
    check_steps,
    warn_of_bias,
)
from fedpress_ddp.metrics import (
    BiasWarning,
    DivergenceWarning,
    DivergenceWatch,
    Measured,
    Sent,
    StepMetrics,
)
from fedpress_ddp.on_device import lies_on_device
from fedpress_protocols.errors import ConfigurationError, MissingExtra
from fedpress_protocols.schedule import Period

try:
    import torch
    from torch.distributed import GradBucket  # type: ignore[attr-defined]
    from torch.distributed.tensor import DTensor
    from torch.optim.optimizer import register_optimizer_step_pre_hook
except ModuleNotFoundError as exc:
    raise MissingExtra("fedpress.ddp needs PyTorch", hint="pip install fedpress[torch]") from exc

__all__ = [
    "BiasWarning",
    "DivergenceWarning",
    "Exchange",
    "HookState",
    "LocalSGD",
    "ProcessLost",
    "Sent",
    "Sites",
    "StepMetrics",
    "comm_hook",
]


class HookState:
    """State of `comm_hook` for one model; its arguments must be the same in all processes.

    They are compared before the first exchange; where one differs, all processes raise
    ConfigurationError, which names it.

    The first `plain_steps` steps are sent uncompressed: DistributedDataParallel regroups
    gradients after the first, and early gradients change fastest. `schedule` then names the
    compressors of the next steps, by periods of `rounds` steps each, for example
    `schedule.sparsity_warm_up(Dgc(), rounds=100)`; `compressor` comes after them. `dtype` is that
    of plain steps as well. The rest is Exchange's.

    Up to `workers` threads compress and exchange buckets while the backward pass continues; their
    collectives run in the order of buckets. Without `group` and `sites` they have a group of their
    own; nothing else may use the given ones in a backward pass. With 0 workers, and for
    gradients on a GPU, the backward pass waits for each bucket; the bits are the same. An error of
    an exchange is raised by the `backward()` it belongs to.

    `metrics` are those of the last step, `on_step` is called with each step's. DivergenceWarning
    says when they show that training does not converge.

    Random-k under error feedback is refused, since coordinates wait too long, unless
    `allow_delays`. `reduction` is `"mean"` or `"adasum"`, see Exchange. Under `dgc` the first step
    of an optimizer with momentum of its own is refused. BiasWarning says if a compressor without
    error feedback never sends the most of a gradient.
    """

    def __init__(
        self,
        compressor: Compressor[Any],
        *,
        group: Group | None = None,
        sites: Sites | None = None,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        plain_steps: int = 2,
        workers: int = 2,
        schedule: Sequence[Period] = (),
        allow_delays: bool = False,
        reduction: Reduction = "mean",
        on_step: Callable[[StepMetrics], None] | None = None,
    ) -> None:
        self._plain_steps = whole("plain_steps", plain_steps, 0)
        self._workers = whole("workers", workers, 0, _MAX_WORKERS)
        if sites is not None and not isinstance(sites, Sites):
            raise ConfigurationError(
                f"sites must be Sites, not {sites!r}", hint="Sites.of(8) has 8 processes a site"
            )
        self._schedule = [(_steps_of(period), _compressor_of(period)) for period in schedule]
        used = (compressor, *(made for _, made in self._schedule))
        for made in used:
            check_exchange(made, reduction=reduction)
            if not allow_delays:
                check_steps(made)
            if isinstance(made, Dgc):
                if made.max_norm is not None and not plain_steps:
                    raise ConfigurationError(
                        "dgc clips by the size of the model, which a plain step measures",
                        hint="set plain_steps to 1 or more, or max_norm to null",
                    )
                if made.momentum:
                    _watch_optimizers()
                    _with_momentum.add(self)
        sends_numbers = self._plain_steps or any(made.lossy == Uncompressed() for made in used)
        if dtype != torch.float32 and not sends_numbers:
            raise ConfigurationError(
                f"dtype={dtype} has no effect: there is no plain step, and what "
                f"{to_config(compressor)['id']} sends has a type of its own",
                hint="leave dtype out, or set plain_steps to 1 or more",
            )
        for _, made in self._schedule:
            warn_of_bias(made)
        self._compressor = compressor
        over: dict[str, Any] = {
            "group": group,
            "sites": sites,
            "reduction": reduction,
            "dtype": dtype,
        }
        self.exchange = Exchange(compressor, seed=seed, **over)
        self._plain = Exchange(Uncompressed(), **over)
        self._plain.sent = self.exchange.sent
        self._pool: ThreadPoolExecutor | None = None
        self._names: dict[int, str] = {}
        self._shapes: dict[str, list[int]] = {}
        self._loaded_shapes: dict[str, list[int]] = {}
        """Of the model of a state that was loaded; empty once gradients of it have come."""
        self._steps = 0
        self._size = 0
        self._exchanges: list[_BucketExchange] = []
        self._restored_buckets: list[list[str]] = []
        self._watch = DivergenceWatch()
        self._on_step = on_step
        self.metrics: StepMetrics | None = None

    @property
    def sent(self) -> Sent:
        """Bytes so far."""
        return self.exchange.sent

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint of this process, as residuals are each process's own."""
        model_size = self.exchange.model_size
        return {
            "steps": self._steps,
            "model_size": model_size,
            "shapes": dict(self._shapes or self._loaded_shapes),
            "buckets": [each.spec_names for each in self._exchanges] or self._restored_buckets,
            **self.exchange.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigurationError if it was saved by another process, as does the next step if it
        is of another model."""
        check_state(state, "steps")
        self.exchange.load_state_dict(state)
        self.exchange.is_checked = False
        self._steps = state["steps"]
        self.exchange.model_size = state.get("model_size")
        self._restored_buckets = state.get("buckets", [])  # which earlier releases did not write,
        self._loaded_shapes = state.get("shapes", {})  # nor this

    def mean(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The mean of the bucket's gradients over all processes, in its dtype, once it is there."""
        values = bucket.buffer()
        # In a process without batches, DistributedDataParallel.join calls hooks with zeros.
        is_backward = torch._C._current_graph_task_id() != -1
        if bucket.index() == 0:
            if not self.exchange.is_checked:
                self.exchange.check_alike(values.device, self._settings())
            self._exchanges, self._size = [], 0
            if is_backward:
                torch.autograd.Variable._execution_engine.queue_callback(self._end_step)
        self._size += values.numel()
        is_plain = self._steps < self._plain_steps
        exchange = self._plain if is_plain else self.exchange
        overlaps = self._workers > 0 and values.is_cpu and not lies_on_device(values)
        if overlaps and self._pool is None:
            self._pool = ThreadPoolExecutor(self._workers, "fedpress-exchange")
            self.exchange.separate()
            self._plain.use_group_of(self.exchange)
        parts = self._parts(bucket)
        begun = [
            _BucketExchange(
                exchange,
                spec,
                part,
                None if is_plain else self._compressor_now(),
                exchange.take_turn(),
            )
            for spec, part in parts
        ]
        self._exchanges += begun
        if bucket.is_last():
            self._steps += 1
            self.exchange.model_size = self._size
            self._restored_buckets = []
        for each in begun:
            if overlaps and self._pool is not None:
                self._pool.submit(each.run)
                continue
            each.run()
            each.exposed_seconds = each.seconds
            if each.error is not None:
                raise each.error
        if bucket.is_last() and not is_backward:
            self._end_step()
        spec = self._spec(bucket)
        return begun[0].future if begun[0].spec == spec else _joined(spec, begun)

    def _parts(self, bucket: GradBucket) -> list[tuple[ModelSpec, torch.Tensor]]:
        """The bucket; in the first step after a checkpoint, whose single bucket has all gradients,
        the buckets of the steps before it, since results depend on them."""
        spec, values = self._spec(bucket), bucket.buffer()
        if self._loaded_shapes:
            self._check_loaded(is_last=bucket.is_last())
        tensors = {tensor.name: tensor for tensor in spec.tensors}
        names = [name for each in self._restored_buckets for name in each]
        if not (bucket.index() == 0 and bucket.is_last()) or sorted(names) != sorted(tensors):
            return [(spec, values)]
        parts = []
        for each in self._restored_buckets:
            part = [values[spec.slices[name]] for name in each]
            parts.append((ModelSpec(tuple(tensors[name] for name in each)), torch.cat(part)))
        return parts

    def _settings(self) -> dict[str, object]:
        """What all processes must have alike, beside what Exchange compares."""
        return {
            "plain_steps": self._plain_steps,
            "schedule": [(length, to_config(made)) for length, made in self._schedule],
            "workers > 0": self._workers > 0,
            "steps so far": self._steps,
            "shapes in the loaded state": self._loaded_shapes,
        }

    def _check_loaded(self, *, is_last: bool) -> None:
        """Raise ConfigurationError if the loaded state is of another model than the gradients seen,
        which are all of them after the last bucket."""
        loaded = self._loaded_shapes.items()
        check_shapes({n: s for n, s in loaded if is_last or n in self._shapes}, self._shapes)
        if is_last:
            self._loaded_shapes = {}

    def _compressor_now(self) -> Compressor[Any]:
        step = self._steps - self._plain_steps
        for length, made in self._schedule:
            if step < length:
                return made
            step -= length
        return self._compressor

    def _end_step(self) -> None:
        """Wait for the exchanges of this backward pass; raise the first error of any."""
        start = time.perf_counter()
        for each in self._exchanges:
            each.done.wait()
        exposed = time.perf_counter() - start
        for each in self._exchanges:
            if each.error is not None:
                raise each.error
        measured = Measured()
        for each in self._exchanges:
            measured.add(each.measured)
            exposed += each.exposed_seconds
        self.metrics = measured.metrics(self._steps, exposed)
        self._watch.saw(measured, to_config(self._compressor.lossy)["id"])
        if self._on_step is not None:
            self._on_step(self.metrics)

    def _spec(self, bucket: GradBucket) -> ModelSpec:
        """Parameters by the order in which they were first seen, which is the same everywhere."""
        tensors = []
        for parameter in bucket.parameters():
            name = self._names.setdefault(id(parameter), f"parameter {len(self._names)}")
            tensors.append(TensorSpec(name, tuple(parameter.shape)))
            self._shapes[name] = list(parameter.shape)
        return ModelSpec(tuple(tensors))

    def has(self, parameter: torch.Tensor) -> bool:
        """Whether a gradient of `parameter` has been exchanged."""
        return id(parameter) in self._names


def comm_hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """For `DistributedDataParallel.register_comm_hook`; gloo and nccl.

    Compression runs on the host, but for what Exchange leaves on a GPU. NaN or infinity in any
    process's gradients comes out as NaN in all, so that a GradScaler skips the step; residuals are
    as before.
    """
    return state.mean(bucket)


_MAX_WORKERS = 64


class _BucketExchange:
    """One bucket's exchange, in whichever thread runs it."""

    def __init__(
        self,
        exchange: Exchange,
        spec: ModelSpec,
        values: torch.Tensor,
        compressor: Compressor[Any] | None,
        turn: Turn,
    ) -> None:
        self._exchange, self.spec, self._values = exchange, spec, values
        self._compressor, self._turn = compressor, turn
        self.future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self.measured = Measured()
        self.done = threading.Event()
        self.error: Exception | None = None
        self.seconds = self.exposed_seconds = 0.0

    @property
    def spec_names(self) -> list[str]:
        return [tensor.name for tensor in self.spec.tensors]

    def run(self) -> None:
        start = time.perf_counter()
        try:
            with torch.no_grad(), torch.profiler.record_function("fedpress exchange"):
                mean = self._exchange.mean(
                    self.spec,
                    self._values,
                    compressor=self._compressor,
                    turn=self._turn,
                    measured=self.measured,
                ).to(self._values.dtype)
            self.future.set_result(mean)
        except Exception as exc:
            self.error = exc
            self.future.set_exception(exc)  # type: ignore[arg-type]  # as its documentation says
        finally:
            self.seconds = time.perf_counter() - start
            self.done.set()


def _joined(
    spec: ModelSpec, begun: Sequence[_BucketExchange]
) -> torch.futures.Future[torch.Tensor]:
    """All their means, as one bucket of `spec`."""

    def assemble(
        done: torch.futures.Future[list[torch.futures.Future[torch.Tensor]]],
    ) -> torch.Tensor:
        means = [each.value() for each in done.value()]
        whole = torch.empty(spec.size, dtype=means[0].dtype, device=means[0].device)
        for part, mean in zip(begun, means, strict=True):
            for name in part.spec_names:
                whole[spec.slices[name]] = mean[part.spec.slices[name]]
        return whole

    return torch.futures.collect_all([each.future for each in begun]).then(assemble)


def _steps_of(period: Period) -> int:
    if period.rounds is None:
        raise ConfigurationError(
            "a period of a hook's schedule has a budget, and needs rounds: a number of steps"
        )
    return period.rounds


def _compressor_of(period: Period) -> Compressor[Any]:
    if len(period.profiles) != 1:
        raise ConfigurationError(
            f"a period of a hook's schedule has one profile, not {len(period.profiles)}"
        )
    made: Compressor[Any] = period.profiles[0].compressor
    return made


_with_momentum: weakref.WeakSet[HookState] = weakref.WeakSet()
"""States under dgc whose optimizer has not taken a step yet."""


def _refuse_second_momentum(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise ConfigurationError at the first step of an optimizer if it has momentum and its
    gradients are dgc's, which have theirs."""
    for state in tuple(_with_momentum):
        own = [g for g in optimizer.param_groups if any(state.has(p) for p in g["params"])]
        if not own:
            continue
        _with_momentum.discard(state)
        momentum = max(group.get("momentum", 0.0) for group in own)
        if momentum:
            raise ConfigurationError(
                f"dgc applies momentum to the gradients, and {type(optimizer).__name__} has "
                f"momentum {momentum:g} of its own: together they multiply, and training diverges",
                hint="set the optimizer's momentum to 0, or dgc's",
            )


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_refuse_second_momentum)


class LocalSGD:
    """`every` steps of each site's own optimizer, then one exchange of what they came to.

    DiLoCo (Douillard et al. 2023, arXiv:2311.08105, Algorithm 1): the mean way travelled is the
    gradient of an outer SGD with Nesterov momentum, from where all stood at the last exchange.
    With ErrorFeedback around a sparse and coarse compressor it is SparseLoCo (Sarfi et al. 2025,
    arXiv:2508.15706), which drops the outer momentum: `momentum=0, learning_rate=1`.

    `parameters` may be sharded inside a site, as FSDP's are: each process exchanges its shards over
    `group`, the processes that hold the same shards elsewhere (for a mesh of sites x shards,
    `mesh["sites"].get_group()`). Call `step()` after every step of the inner optimizer. All
    processes must have the same arguments, and the same parameters when they make it; the first
    `step()` compares them, and raises ConfigurationError in all if they differ.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        compressor: Compressor[Any],
        *,
        every: int,
        learning_rate: float = 0.7,
        momentum: float = 0.9,
        group: Group | None = None,
        sites: Sites | None = None,
        seed: int = 0,
        allow_delays: bool = False,
    ) -> None:
        self._every, self._steps = whole("every", every, 1), 0
        if not learning_rate > 0:
            raise ConfigurationError(f"learning_rate must be positive, not {learning_rate}")
        if not 0 <= momentum < 1:
            raise ConfigurationError(f"momentum must lie in [0, 1), not {momentum}")
        self._parameters = trainable(parameters)
        self._exchange = Exchange(compressor, group=group, sites=sites, seed=seed)
        if not allow_delays:
            check_steps(compressor)
        here = [_local(p) for p in self._parameters]
        self._spec = ModelSpec(tuple(TensorSpec(n, tuple(s)) for n, s in _shapes(here).items()))
        self._anchors = [p.detach().to(torch.float32).clone() for p in here]
        self._outer = torch.optim.SGD(
            self._anchors, lr=learning_rate, momentum=momentum, nesterov=momentum > 0
        )

    @property
    def sent(self) -> Sent:
        """Bytes so far."""
        return self._exchange.sent

    def step(self) -> bool:
        """Count a step; at each `every`-th, exchange and move all processes to one point.

        True if it did. Raises ConfigurationError if a process brings NaN or infinity, and at the
        first step if processes started at different points or with other settings.
        """
        if not self._exchange.is_checked:
            self._exchange.check_alike(self._anchors[0].device, self._settings())
        self._steps += 1
        if self._steps % self._every:
            return False
        here = [_local(p) for p in self._parameters]
        with torch.no_grad():
            # Training began at the rounded anchor: what rounding took off is none of its doing.
            way = [
                (anchor.to(p.dtype).float() - p.float()).ravel()
                for anchor, p in zip(self._anchors, here, strict=True)
            ]
            mean = self._exchange.mean(self._spec, torch.cat(way))
            if not torch.isfinite(mean).all():
                raise ConfigurationError(
                    f"after {self._steps} steps a process holds NaN or infinity",
                    hint="lower the inner learning rate, or go back to a checkpoint",
                )
            parts = torch.split(mean, [anchor.numel() for anchor in self._anchors])
            for anchor, part in zip(self._anchors, parts, strict=True):
                anchor.grad = part.view_as(anchor)
            self._outer.step()
            for anchor, parameter in zip(self._anchors, here, strict=True):
                parameter.copy_(anchor)
                anchor.grad = None
        return True

    def _settings(self) -> dict[str, object]:
        outer = self._outer.param_groups[0]
        return {
            "every": self._every,
            "learning_rate": float(outer["lr"]),
            "momentum": float(outer["momentum"]),
            "steps so far": self._steps,
            "parameters": digest(self._anchors),
        }

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint of this process, beside its model's and its optimizer's."""
        return {
            "steps": self._steps,
            "anchors": [anchor.clone() for anchor in self._anchors],
            "outer": copy.deepcopy(self._outer.state_dict()),
            "exchange": self._exchange.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigurationError if it was saved by another process or of other parameters."""
        check_state(state, "steps", "anchors", "outer", "exchange")
        check_shapes(_shapes(state["anchors"]), _shapes(self._anchors))
        self._exchange.load_state_dict(state["exchange"])
        self._exchange.is_checked = False
        self._steps = state["steps"]
        with torch.no_grad():
            for anchor, saved in zip(self._anchors, state["anchors"], strict=True):
                anchor.copy_(saved)
        self._outer.load_state_dict(copy.deepcopy(state["outer"]))


def _shapes(parameters: Sequence[torch.Tensor]) -> dict[str, list[int]]:
    return {f"parameter {index}": list(each.shape) for index, each in enumerate(parameters)}


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """The part of it that this process holds, sharing its memory."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
