"""Checks of the arguments of hooks and optimizers: their kinds, and that all processes agree."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import TYPE_CHECKING, Any

from fedpress_ddp.collectives import Group, device_of, naming_lost
from fedpress_protocols.errors import ConfigurationError, MissingExtra

try:
    import torch
    import torch.distributed as dist
except ModuleNotFoundError as exc:
    raise MissingExtra(
        "exchanging gradients needs PyTorch", hint="pip install fedpress[torch]"
    ) from exc

if TYPE_CHECKING:
    from fedpress_ddp.exchange import Sites


def whole(name: str, value: object, least: int, most: int | None = None, *, hint: str = "") -> int:
    """`value`; raises ConfigurationError unless it is a whole number from `least` to `most`."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        number = int(value)
        if least <= number and (most is None or number <= most):
            return number
    end = "on" if most is None else f"to {most}"
    raise ConfigurationError(
        f"{name} must be a whole number from {least} {end}, not {value!r}", hint=hint
    )


def trainable(parameters: Any) -> list[torch.nn.Parameter]:
    """Those of `parameters` that need a gradient; raises ConfigurationError if there is none, or if
    something else is among them."""
    given = list(parameters) if isinstance(parameters, Iterable) else [parameters]
    for each in given:
        if not isinstance(each, torch.Tensor):
            raise ConfigurationError(
                f"parameters must be tensors, not {type(each).__name__}",
                hint="give model.parameters(); for groups of parameters, make one for each group",
            )
    trained = [each for each in given if each.requires_grad]
    if not trained:
        raise ConfigurationError("there is no parameter to train")
    return trained


# Between processes


def digest(values: Iterable[torch.Tensor]) -> str:
    """Of the bits of all `values`, in their order."""
    found = hashlib.sha256()
    for each in values:
        found.update(each.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()[:16]


def differing(
    values: Mapping[str, object], near: torch.device, group: Group | None, sites: Sites | None
) -> list[str]:
    """The names of `values` that have not the same `repr` in all processes of `group` or `sites`.

    Every process must call it with the same names at the same point. nccl computes on `near`.
    """
    hashes = [
        int.from_bytes(hashlib.sha256(repr(each).encode()).digest()[:7]) for each in values.values()
    ]
    there = torch.tensor([*hashes, *(-each for each in hashes)], dtype=torch.int64)
    inside = group if sites is None else sites.inside
    there = there.to(device_of(inside, near))
    with naming_lost(inside):
        dist.all_reduce(there, dist.ReduceOp.MAX, group=inside)
        if sites is not None:
            if sites.between is not None:
                dist.all_reduce(there, dist.ReduceOp.MAX, group=sites.between)
            dist.broadcast(there, sites.leader, group=inside)
    largest, negated = there.view(2, -1).tolist()
    return [name for name, high, low in zip(values, largest, negated, strict=True) if high != -low]


def check_alike(
    values: Mapping[str, object], near: torch.device, group: Group | None, sites: Sites | None
) -> None:
    """Raise ConfigurationError, in all processes, unless `differing` finds nothing."""
    strange = differing(values, near, group, sites)
    if strange:
        own = ", ".join(f"{name} (here {repr(values[name])[:_MOST_SHOWN]})" for name in strange)
        raise ConfigurationError(
            f"settings differ between the processes of the group: {own}",
            hint="give all processes the same settings, and start them with the same parameters: "
            "one torch.manual_seed before the model is made, or their checkpoints of one step",
        )


_MOST_SHOWN = 300


# States


def process() -> dict[str, int]:
    """Of whom a state is: nothing before torch's process group is there."""
    if not dist.is_initialized():
        return {}
    return {"rank": dist.get_rank(), "world_size": dist.get_world_size()}


def check_state(state: Any, *names: str) -> None:
    """Raise ConfigurationError unless `state` has `names`, and is this process's own if it says
    whose it is, which earlier releases did not write."""
    is_mapping = isinstance(state, Mapping)
    missing = [name for name in names if not is_mapping or name not in state]
    if missing:
        raise ConfigurationError(
            f"a {type(state).__name__} without {', '.join(missing)} is no such state",
            hint="load what state_dict() of the same class returned",
        )
    own = process()
    found = {name: state.get(name, expected) for name, expected in own.items()}
    if found != own:
        raise ConfigurationError(
            f"this state was saved by process {found['rank']} of {found['world_size']}, "
            f"and this is process {own['rank']} of {own['world_size']}",
            hint="save a state in each process, and load its own, as each has a residual; for "
            "another number of processes start without one",
        )


def check_shapes(found: Mapping[str, list[int]], due: Mapping[str, list[int]]) -> None:
    """Raise ConfigurationError unless a state's tensors have the shapes that are due, by name."""
    for name in {**due, **found}:
        there, here = (each.get(name, "no tensor") for each in (found, due))
        if there != here:
            raise ConfigurationError(
                f"the loaded state is of another model: its {name} is {there}, and this one's is "
                f"{here}",
                hint="load the state that was saved with this model, or start without one",
            )
