"""Local training by forward passes alone: the loss at two points a step, and no gradient of it.

Experimental. A step draws a direction at random, of 1 and -1, and takes the slope of the loss along
it from two forward passes for the gradient (SPSA; MeZO, Malladi et al. 2023, arXiv:2305.17333). The
directions are of a random subspace, so a model of any size travels as K weights
(`fedpress_protocols.subspace`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fedpress_client.torch_trainer import Batch, Data, Loss, TorchTrainer
from fedpress_compression.tensors import TRAINED_DTYPES, TensorSpec
from fedpress_protocols.errors import ConfigurationError, InvalidUpdate
from fedpress_protocols.model import Model
from fedpress_protocols.subspace import MOVED, SEED, SEED_BYTES, WEIGHTS, Subspace

_BLOCK = 2**20
"""Values that are computed at a time."""


class SubspaceModule(nn.Module):
    """A module whose state is its base, the values at the start, and the weights of a subspace.

    The subspace moves the parameters of `inner` that require gradients. It is always in evaluation
    mode: dropout would drown the difference of two losses.
    """

    moved: torch.Tensor
    seed: torch.Tensor
    negative: torch.Tensor

    def __init__(self, inner: nn.Module, num_weights: int, seed: int) -> None:
        super().__init__()
        state = inner.state_dict(keep_vars=True)
        names = {id(tensor): name for name, tensor in reversed(state.items())}
        self._names = [name for name, tensor in state.items() if names[id(tensor)] == name]
        tensors = [state[name] for name in self._names]
        moved = [
            _spec(name, tensor)
            for name, tensor in zip(self._names, tensors, strict=True)
            if tensor.requires_grad
        ]
        self.subspace = Subspace(tuple(moved), num_weights, seed.to_bytes(SEED_BYTES, "little"))
        self.inner = inner
        self.base = nn.ParameterList(
            nn.Parameter(tensor.detach().clone(), requires_grad=False) for tensor in tensors
        )
        self.weights = nn.Parameter(torch.zeros(num_weights))
        marks = [tensor.requires_grad for tensor in tensors]
        self.register_buffer("moved", torch.tensor(marks, dtype=torch.uint8))
        named = bytearray(self.subspace.seed)
        self.register_buffer("seed", torch.frombuffer(named, dtype=torch.uint8))
        self.register_buffer("negative", torch.from_numpy(self.subspace.negative))

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.inner(*inputs, **named)

    def train(self, mode: bool = True) -> SubspaceModule:
        return super().train(False)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The tensors that travel, of which the weights alone are trained."""
        for name, tensor in zip(self._names, self.base, strict=True):
            yield f"{prefix}{name}", tensor
        yield f"{prefix}{WEIGHTS}", self.weights

    def state_dict(  # type: ignore[override]
        self, *_: Any, keep_vars: bool = False, **__: Any
    ) -> dict[str, Any]:
        """The base, the weights and what names the subspace."""
        own = {MOVED: self.moved, SEED: self.seed, WEIGHTS: self.weights}
        state = {**dict(zip(self._names, self.base, strict=True)), **own}
        return state if keep_vars else {name: each.detach() for name, each in state.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], *_: Any, **__: Any) -> Any:
        """Take over base and weights; `enter` writes what they stand for."""
        inner = self.inner.state_dict()
        with torch.no_grad():
            for name, tensor in self.state_dict().items():
                tensor.copy_(state_dict[name])
                if name in inner:
                    inner[name].copy_(state_dict[name])

    def enter(self, subspace: Subspace) -> None:
        """Write the values that the weights stand for in `subspace`, one of these very tensors."""
        if subspace != self.subspace:
            self.subspace = subspace
            self.negative = torch.from_numpy(subspace.negative).to(self.weights.device)
        self.move_to(self.weights)

    @torch.no_grad()
    def move_to(self, weights: torch.Tensor) -> None:
        """Write base + sign * weights to the parameters of `inner`, a block at a time."""
        size = weights.numel()
        block = min(_BLOCK, max(spec.size for spec in self.subspace.moved))
        tiled = weights.detach().repeat(1 + -(-block // size))
        shifts = torch.arange(8, dtype=torch.uint8, device=weights.device)
        bases, inner = self.state_dict(), self.inner.state_dict()
        start = 0
        for spec in self.subspace.moved:
            base, target = bases[spec.name].reshape(-1), inner[spec.name]
            flat = target.view(-1) if target.is_contiguous() else torch.empty_like(base)
            for first in range(0, base.numel(), block):
                last = min(first + block, base.numel())
                begin, end = start + first, start + last
                packed = self.negative[begin // 8 : -(-end // 8), None]
                bits = ((packed >> shifts) & 1).view(-1)[begin % 8 :][: end - begin].bool()
                change = tiled[begin % size :][: end - begin]
                change = torch.where(bits, -change, change)
                flat[first:last] = base[first:last].float() + change
            if not target.is_contiguous():
                target.copy_(flat.view(target.shape))
            start += base.numel()


class ZerothOrderTrainer(TorchTrainer):
    """Trains `model` by forward passes alone, and sends `num_weights` values, whatever its size.

    Experimental. Takes the memory of inference, the base once more, and a bit for each value. The
    parameters that require gradients are moved, in a random subspace that `seed` names; those of
    the task's model rule. It needs the base once, which it offers itself if it has it.

    A step takes the loss at two points, `perturbation` times a random direction of 1 and -1 to both
    sides, and gives `optimizer` the slope times the direction for a gradient of the weights. Its
    learning rate has to be small, as the direction has an entry for every value. The module is in
    evaluation mode throughout. `options`, data and loss are as in TorchTrainer.

    Raises InvalidUpdate for a loss that is NaN or infinite.
    """

    model: SubspaceModule

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
        data: Data,
        *,
        num_weights: int = 4096,
        seed: int = 0,
        perturbation: float = 1e-3,
        **options: Any,
    ) -> None:
        if not 0 < perturbation < math.inf:
            raise ConfigurationError(f"perturbation must be positive, not {perturbation}")
        if not 0 <= seed < 2**63:
            raise ConfigurationError(f"seed must lie in [0, 2**63), not {seed}")
        self._perturbation = perturbation
        super().__init__(SubspaceModule(model, num_weights, seed), loss, optimizer, data, **options)

    def _load(self, model: Model) -> None:
        subspace = Subspace.of(model)
        super()._load(model)
        self.model.enter(subspace)

    @torch.no_grad()
    def _backward(self, batches: list[Batch], scaler: torch.amp.GradScaler) -> torch.Tensor:
        """Set the gradient of the weights to the slope along a random direction, times it."""
        weights = self.model.weights
        signs = 1.0 - 2.0 * torch.randint(2, weights.shape).float()
        direction = signs.to(weights.device)
        losses = []
        for length in (self._perturbation, -self._perturbation):
            self.model.move_to(weights + length * direction)
            losses.append(sum(loss for loss in self._shares(batches)))
        ahead, behind = map(float, losses)
        if not math.isfinite(ahead + behind):
            raise InvalidUpdate(
                f"the loss is {ahead} ahead and {behind} behind, along a direction of length "
                f"{self._perturbation} at each value; expected finite numbers",
                hint="lower the learning rate, or the perturbation if it is so in the first step",
            )
        slope = torch.tensor((ahead - behind) / (2 * self._perturbation), device=weights.device)
        weights.grad = scaler.scale(slope) * direction
        return torch.tensor((ahead + behind) / 2, device=weights.device)


def _spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(name, tuple(tensor.shape), dtype, dtype in TRAINED_DTYPES)
