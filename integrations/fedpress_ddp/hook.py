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

from collections.abc import Iterable, Mapping
from typing import Any

from fedpress_compression.compressor import Compressor
from fedpress_compression.compressors.none import Uncompressed
from fedpress_compression.tensors import ModelSpec, TensorSpec
from fedpress_ddp.exchange import Exchange, Group, Sent, Sites
from fedpress_protocols.errors import ConfigurationError, MissingExtra

try:
    import torch
    from torch.distributed import GradBucket  # type: ignore[attr-defined]
    from torch.distributed.tensor import DTensor
except ModuleNotFoundError as exc:
    raise MissingExtra("fedpress.ddp needs PyTorch", hint="pip install fedpress[torch]") from exc

__all__ = ["Exchange", "HookState", "LocalSGD", "Sent", "Sites", "comm_hook"]


class HookState:
    """State of `comm_hook` for one model; its arguments must be the same in all processes.

    The first `plain_steps` steps are sent uncompressed: DistributedDataParallel regroups
    gradients after the first, and early gradients change fastest. The rest is Exchange's.
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
    ) -> None:
        if plain_steps < 0:
            raise ConfigurationError(f"plain_steps must be 0 or more, not {plain_steps}")
        self.exchange = Exchange(compressor, group=group, sites=sites, seed=seed, dtype=dtype)
        self._plain = Exchange(Uncompressed(), group=group, sites=sites)
        self._plain.sent = self.exchange.sent
        self._plain_steps = plain_steps
        self._names: dict[int, str] = {}
        self._steps = 0

    @property
    def sent(self) -> Sent:
        """Bytes so far."""
        return self.exchange.sent

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint of this process, as residuals are each process's own."""
        return {"steps": self._steps, **self.exchange.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps = state["steps"]
        self.exchange.load_state_dict(state)

    def mean(self, bucket: GradBucket) -> torch.Tensor:
        """The mean of the bucket's gradients over all processes, in its dtype."""
        is_plain = self._steps < self._plain_steps
        mean = (self._plain if is_plain else self.exchange).mean(
            self._spec(bucket), bucket.buffer()
        )
        self._steps += bucket.is_last()
        return mean.to(bucket.buffer().dtype)

    def _spec(self, bucket: GradBucket) -> ModelSpec:
        """Parameters by the order in which they were first seen, which is the same everywhere."""
        tensors = []
        for parameter in bucket.parameters():
            name = self._names.setdefault(id(parameter), f"parameter {len(self._names)}")
            tensors.append(TensorSpec(name, tuple(parameter.shape)))
        return ModelSpec(tuple(tensors))


def comm_hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """For `DistributedDataParallel.register_comm_hook`; gloo and nccl.

    Compression runs on the host. NaN or infinity in any process's gradients comes out as NaN in
    all, so that a GradScaler skips the step; residuals are as before.
    """
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(state.mean(bucket))
    return done


class LocalSGD:
    """`every` steps of each site's own optimizer, then one exchange of what they came to.

    DiLoCo (Douillard et al. 2023, arXiv:2311.08105, Algorithm 1): the mean way travelled is the
    gradient of an outer SGD with Nesterov momentum, from where all stood at the last exchange.
    With ErrorFeedback around a sparse and coarse compressor it is SparseLoCo (Sarfi et al. 2025,
    arXiv:2508.15706), which drops the outer momentum: `momentum=0, learning_rate=1`.

    `parameters` may be sharded inside a site, as FSDP's are: each process exchanges its shards over
    `group`, the processes that hold the same shards elsewhere (for a mesh of sites x shards,
    `mesh["sites"].get_group()`). Call `step()` after every step of the inner optimizer.
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
    ) -> None:
        if every < 1:
            raise ConfigurationError(f"every must be at least 1, not {every}")
        self._parameters = [p for p in parameters if p.requires_grad]
        if not self._parameters:
            raise ConfigurationError("there is no parameter to train")
        self._exchange = Exchange(compressor, group=group, sites=sites, seed=seed)
        self._every, self._steps = every, 0
        here = [_local(p) for p in self._parameters]
        names = (f"parameter {index}" for index in range(len(here)))
        self._spec = ModelSpec(
            tuple(TensorSpec(n, tuple(p.shape)) for n, p in zip(names, here, strict=True))
        )
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

        True if it did. Raises ConfigurationError if a process brings NaN or infinity.
        """
        self._steps += 1
        if self._steps % self._every:
            return False
        here = [_local(p) for p in self._parameters]
        with torch.no_grad():
            way = [(a - p.float()).ravel() for a, p in zip(self._anchors, here, strict=True)]
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

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint of this process, beside its model's and its optimizer's."""
        return {
            "steps": self._steps,
            "anchors": [anchor.clone() for anchor in self._anchors],
            "outer": self._outer.state_dict(),
            "exchange": self._exchange.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps = state["steps"]
        with torch.no_grad():
            for anchor, saved in zip(self._anchors, state["anchors"], strict=True):
                anchor.copy_(saved)
        self._outer.load_state_dict(state["outer"])
        self._exchange.load_state_dict(state["exchange"])


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """The part of it that this process holds, sharing its memory."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
