"""Optimizers that exchange one bit per value: 1-bit Adam and 1-bit LAMB for data parallelism.

Their arithmetic is that of the server's strategies of the same names: what goes through the network
is the gradient under error feedback, not the momentum, which all processes compute alike from what
they receive. Adam's second moment, and LAMB's coefficients, settle in a warm-up of float32 steps
and are then frozen.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Generic, TypeVar, overload

import numpy as np

from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.none import Uncompressed
from fedpress_compression.compressors.sign import Sign
from fedpress_compression.tensors import ModelSpec, TensorSpec
from fedpress_ddp.arguments import (
    check_shapes,
    check_state,
    differing,
    digest,
    trainable,
    whole,
)
from fedpress_ddp.collectives import Group
from fedpress_ddp.exchange import Exchange, Sites
from fedpress_ddp.metrics import Sent
from fedpress_protocols.errors import ConfigurationError, MissingExtra
from fedpress_strategies import onebit_adam, onebit_lamb
from fedpress_strategies.frozen import FrozenMoments
from fedpress_strategies.strategy import Delta, OptimizerState, Tally

try:
    import torch
    import torch.distributed as dist
except ModuleNotFoundError as exc:
    raise MissingExtra("fedpress.ddp needs PyTorch", hint="pip install fedpress[torch]") from exc

RuleT = TypeVar("RuleT", onebit_adam.OneBitAdam, onebit_lamb.OneBitLamb)


class _OneBit(torch.optim.Optimizer, Generic[RuleT]):
    """Exchange, then the rule's step, in every process alike."""

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        rule: RuleT,
        warm_up_steps: int,
        floor: float,
        group: Group | None,
        sites: Sites | None,
        seed: int,
    ) -> None:
        if not 0 <= floor <= 1:
            raise ConfigurationError(f"floor must lie in [0, 1], not {floor}")
        self._warm_up_steps = whole("warm_up_steps", warm_up_steps, 1, hint=_SETTLES)
        self._steps = 0
        trained = trainable(parameters)
        super().__init__(trained, {"lr": rule.learning_rate})
        self._rule: RuleT = rule
        self._floor = floor
        self._spec = ModelSpec(
            tuple(TensorSpec(f"parameter {i}", tuple(p.shape)) for i, p in enumerate(trained))
        )
        made = ErrorFeedback(Sign(chunk=rule.moments.chunk))
        self._group, self._sites = group, sites
        self._exchange = Exchange(made, group=group, sites=sites, seed=seed)
        self._moments: OptimizerState = rule.init(np.zeros(self._spec.size, np.float32))

    @property
    def sent(self) -> Sent:
        """Bytes so far."""
        return self._exchange.sent

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.param_groups:
            raise ConfigurationError(
                f"{type(self).__name__} has one group of parameters, and its moments their size",
                hint="give all parameters to one optimizer, or make one for each group",
            )
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Exchange this process's gradients and step; a mean of NaN or infinity changes nothing.

        The first step raises ConfigurationError, in all processes, if their parameters or settings
        differ, and warns if their gradients do not.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        trained = self.param_groups[0]["params"]
        zero = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        gradient = torch.cat([each.detach().to(torch.float32).ravel() for each in zero])
        if not self._exchange.is_checked:
            self._exchange.check_alike(gradient.device, self._settings())
            self._warn_of_one_gradient(gradient)
        is_warming = self._steps < self._warm_up_steps
        compressor = Uncompressed() if is_warming else None
        mean = self._exchange.mean(self._spec, gradient, compressor=compressor).cpu().numpy()
        if not np.isfinite(mean).all():
            return loss
        flat = torch.cat([p.detach().to(torch.float32).ravel() for p in trained]).cpu().numpy()
        if self._steps == self._warm_up_steps:
            self._moments = {**self._moments, "second": self._raised(self._moments["second"])}
        rule = replace(self._rule, learning_rate=float(self.param_groups[0]["lr"]))
        tally = replace(Tally(), warming=is_warming, spec=self._spec)
        after, self._moments = rule.apply(flat, -mean.astype(np.float64), self._moments, tally)
        self._steps += 1
        parts = torch.from_numpy(after).split([p.numel() for p in trained])
        for parameter, part in zip(trained, parts, strict=True):
            parameter.copy_(part.view_as(parameter))
        return loss

    def _settings(self) -> dict[str, object]:
        group = self.param_groups[0]
        return {
            "rule": replace(self._rule, learning_rate=float(group["lr"])),
            "warm_up_steps": self._warm_up_steps,
            "floor": self._floor,
            "steps so far": self._steps,
            "parameters": digest(group["params"]),
        }

    def _warn_of_one_gradient(self, gradient: torch.Tensor) -> None:
        values = {"gradients": digest([gradient])}
        differ = differing(values, gradient.device, self._group, self._sites)
        if not differ and dist.get_world_size(self._group) > 1 and gradient.any():
            name = type(self).__name__
            warnings.warn(
                f"all processes bring the same gradient to {name}: either they have the same data, "
                "or DistributedDataParallel has averaged it already, uncompressed. Give "
                f"{name} the parameters of a model that is not in DistributedDataParallel, or use "
                "its no_sync()",
                stacklevel=3,
            )

    def _raised(self, second: Delta) -> Delta:
        """`second` with at least the share floor**2 of the mean of its chunk, and of its parameter.

        Signs of one scale move all coordinates of a chunk alike: one that had hardly a gradient in
        the warm-up, and so a root near zero, would take a step without bounds. So would a whole
        chunk, such as the weights of a unit that was never active; and a whole parameter, which
        is held to the mean of the model, by a tenth of floor, as parameters differ in size.
        """
        chunk = self._rule.moments.chunk
        starts = np.arange(0, second.size, chunk)
        sizes = np.minimum(chunk, second.size - starts)
        means = np.add.reduceat(second, starts) / sizes
        least = np.maximum(means.repeat(sizes), second.mean() / 100)
        for part in self._spec.slices.values():
            np.maximum(least[part], second[part].mean(), out=least[part])
        return np.asarray(np.maximum(second, self._floor**2 * least))

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint of this process, as residuals are each process's own."""
        return {
            **super().state_dict(),
            "steps": self._steps,
            "moments": {key: torch.from_numpy(each) for key, each in self._moments.items()},
            "exchange": self._exchange.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises ConfigurationError if it was saved by another process or of another model."""
        check_state(state_dict, "state", "param_groups", "steps", "moments", "exchange")
        sizes = {"gradient": [len(state_dict["moments"]["first"])]}
        check_shapes(sizes, {"gradient": [self._spec.size]})
        self._exchange.load_state_dict(state_dict["exchange"])
        self._exchange.is_checked = False
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        self._steps = state_dict["steps"]
        self._moments = {key: each.numpy() for key, each in state_dict["moments"].items()}


_SETTLES = "the second moment settles in them; the paper takes 15 to 20 % of all steps"


class OneBitAdam(_OneBit[onebit_adam.OneBitAdam]):
    """1-bit Adam (Tang et al. 2021, arXiv:2102.02888, Algorithm 1).

    Give it the parameters of a model that is *not* in DistributedDataParallel, or step under its
    `no_sync()`: the optimizer exchanges the gradients. `warm_up_steps` steps are Adam in float32;
    then the second moment is frozen, and a gradient is sent as signs with a scale for each `chunk`
    of coordinates, under error feedback. The root of a frozen moment is at least `floor` times the
    root of its chunk's mean and of its parameter's, and a tenth of `floor` times the model's: with
    0, as in the paper, coordinates that hardly had a gradient in the warm-up diverge. All arguments
    must be the same in all processes, and so must the parameters be at the start. Lower `lr` with a
    scheduler, as the papers do.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        warm_up_steps: int,
        chunk: int = 256,
        floor: float = 0.3,
        group: Group | None = None,
        sites: Sites | None = None,
        seed: int = 0,
    ) -> None:
        rule = onebit_adam.OneBitAdam(FrozenMoments(*betas, eps, False, chunk), lr)
        super().__init__(parameters, rule, warm_up_steps, floor, group, sites, seed)


class OneBitLamb(_OneBit[onebit_lamb.OneBitLamb]):
    """1-bit LAMB (Li et al. 2021, arXiv:2104.06069, Algorithm 1); a layer is a parameter.

    As OneBitAdam; the coefficients of layers, averaged by `beta3` in the warm-up, are frozen as
    well, and then change by at most the share `factor_change` a step.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        warm_up_steps: int,
        beta3: float = 0.9,
        factor_change: float = 0.1,
        chunk: int = 256,
        floor: float = 0.3,
        group: Group | None = None,
        sites: Sites | None = None,
        seed: int = 0,
    ) -> None:
        moments = FrozenMoments(*betas, eps, False, chunk)
        rule = onebit_lamb.OneBitLamb(moments, lr, beta3, factor_change)
        super().__init__(parameters, rule, warm_up_steps, floor, group, sites, seed)
