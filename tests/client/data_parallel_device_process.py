"""Four processes exchange gradients that lie where the kernels of FEDPRESS_KERNELS run; the results
and a checkpoint of each go to FOLDER. With OTHER, they train on from OTHER's checkpoints.

    python data_parallel_device_process.py FOLDER NAME [OTHER]
"""

# No `from __future__ import annotations`: torch looks at a hook's annotations as objects.

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fedpress_compression import kernels
from fedpress_compression.compressor import to_config
from fedpress_compression.compressors.dgc import Dgc
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.topk import TopK
from fedpress_compression.tensors import ModelSpec, TensorSpec
from fedpress_ddp import on_device
from fedpress_ddp.hook import Exchange, HookState, Sites, StepMetrics, comm_hook
from fedpress_protocols.errors import FedpressError
from fedpress_protocols.schedule import Period
from tests.client.data_parallel_process import run_together

WORLD, STEPS, SAVED = 4, 7, 4
SPEC = ModelSpec((TensorSpec("weight", (30, 40)), TensorSpec("bias", (41,))))
COUNT = 60
METHODS = {
    "levels": TopK(0.05),
    "tensors": TopK(0.05, scope="tensor"),
    "ternary": TopK(0.02, magnitude_bits=0),
    "count": TopK(count=COUNT, magnitude_bits=4),
    "chunks": TopK(0.05, chunk=100),
}


def vectors(rank: int, steps: int) -> Iterator[torch.Tensor]:
    """Values with ties, zeros, and subnormal numbers."""
    draw = np.random.default_rng(rank)
    for _ in range(steps):
        values = np.round(draw.standard_t(3, SPEC.size), 1).astype(np.float32)
        values[::11] = draw.integers(-9, 9, values[::11].size) * np.float32(1e-45)
        yield torch.from_numpy(values).to(device())


def device() -> torch.device:
    if kernels.CHOSEN != "triton":
        return torch.device("cpu")
    from fedpress_compression.kernels.on_device import DEVICE

    return DEVICE


def exchanged(rank: int, exchange: Exchange) -> dict[str, np.ndarray]:
    means, residuals = [], []
    for vector in vectors(rank, 3):
        means.append(exchange.mean(SPEC, vector).cpu().numpy())
        residuals.append(exchange.residual(SPEC))
    sent = exchange.sent
    return {
        "means": np.stack(means),
        "residuals": np.stack(residuals),
        "bytes": np.array([sent.num_bytes, sent.whole_bytes, sent.plain_bytes]),
    }


def refused(rank: int) -> dict[str, np.ndarray]:
    """A step with NaN in one process, one whose sum with the residual overflows in one, and a
    vector that is too short in one; then one that all can take."""
    exchange = Exchange(ErrorFeedback(TopK(0.05)))
    (vector,) = vectors(rank, 1)
    exchange.mean(SPEC, vector)
    before, bad, large = exchange.residual(SPEC), vector.clone(), vector.clone()
    bad[7] = torch.nan if rank == 1 else 1
    means = [exchange.mean(SPEC, bad)]
    if rank == 2:
        state = exchange.state_dict()
        state["residuals"]["bias"] = torch.full((41,), 3e38)
        exchange.load_state_dict(state)
        large[-1] = 3e38
        before = exchange.residual(SPEC)
    means.append(exchange.mean(SPEC, large))
    after = exchange.residual(SPEC)
    says = ""
    try:
        exchange.mean(SPEC, vector[:-1] if rank == 3 else vector)
    except FedpressError as exc:
        says = f"{type(exc).__name__}: {exc}"
    return {
        "means": np.stack([mean.cpu().numpy() for mean in means]),
        "before": before,
        "after": after,
        "says": np.array(says),
        "next": exchange.mean(SPEC, vector).cpu().numpy(),
    }


class Given(torch.nn.Module):
    """Three parameters whose gradients are parts of what forward is given."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(20, 30), (600,), (41,)]
        self._all = torch.nn.ParameterList(torch.zeros(shape) for shape in shapes)

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        parts = torch.split(gradient, [p.numel() for p in self._all])
        pairs = zip(self._all, parts, strict=True)
        return torch.stack([(p.ravel() * part).sum() for p, part in pairs]).sum()


def schedule() -> list[Period]:
    """Two steps that stay on the device, and one that does not."""
    methods = ErrorFeedback(TopK(0.2)), Dgc(TopK(0.1), momentum=0.0)
    return [
        Period(profiles=({"name": "a", "compressor": to_config(made)},), rounds=rounds)
        for made, rounds in zip(methods, (2, 1), strict=True)
    ]


def trained(rank: int, file: Path, other: Path | None = None) -> dict[str, np.ndarray]:
    """All steps of a hook, with a checkpoint in `file`, or those after the checkpoint `other`."""
    seen: list[StepMetrics] = []
    state = HookState(
        ErrorFeedback(TopK(0.05)), plain_steps=1, schedule=schedule(), on_step=seen.append
    )
    first = 0
    if other is not None:
        state.load_state_dict(torch.load(other, weights_only=True))
        first = SAVED
    model = DistributedDataParallel(Given().to(device()), bucket_cap_mb=0.002)
    model.register_comm_hook(state, comm_hook)
    found = []
    for number, vector in enumerate(vectors(rank, STEPS)):
        if number < first:
            continue
        if number == SAVED and other is None:
            torch.save(state.state_dict(), file)
        model.zero_grad()
        model(vector).backward()
        gradients = [p.grad.ravel() for p in model.parameters() if p.grad is not None]
        found.append(torch.cat(gradients).cpu().numpy())
    return {
        "means": np.stack(found),
        "residual": np.concatenate(list(state.exchange.residuals().values())),
        "bytes": np.array([each.num_bytes for each in seen]),
        "metrics": np.array(
            [(m.nmse or 0, m.residual_ratio or 0, m.gradient_norm or 0) for m in seen]
        ),
    }


@contextmanager
def watched(seen: list[int], crossed: dict[str, int]) -> Iterator[None]:
    """The sizes of tensors that fedpress's modules move or turn to arrays, and the bytes that cross
    by its two ways over the bus."""
    names = ["numpy", "cpu", "tolist", "__array__"]
    own = {name: getattr(torch.Tensor, name) for name in names}
    ways = {name: getattr(on_device, name) for name in ("_to_host", "_to_device")}

    def watching(name: str) -> Any:
        def call(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            if sys._getframe(1).f_globals["__name__"].startswith("fedpress"):
                seen.append(tensor.numel())
            return own[name](tensor, *args, **options)

        return call

    def counting(name: str) -> Any:
        def call(values: Any, *args: Any) -> Any:
            crossed[name] = crossed.get(name, 0) + values.nbytes
            return ways[name](values, *args)

        return call

    for name in names:
        setattr(torch.Tensor, name, watching(name))
    for name in ways:
        setattr(on_device, name, counting(name))
    try:
        yield
    finally:
        for name in names:
            setattr(torch.Tensor, name, own[name])
        for name, way in ways.items():
            setattr(on_device, name, way)


def crossing(rank: int) -> dict[str, np.ndarray]:
    """What crosses in the second step."""
    exchange = Exchange(ErrorFeedback(TopK(count=COUNT)))
    seen, crossed = list[int](), dict[str, int]()
    first, second = vectors(rank, 2)
    exchange.mean(SPEC, first)
    with watched(seen, crossed):
        exchange.mean(SPEC, second)
    down, up = crossed.get("_to_host", 0), crossed.get("_to_device", 0)
    return {"largest": np.array(max(seen)), "bytes": np.array([down, up])}


def main(rank: int, folder: Path, name: str, other: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder / name}.store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)
    made, file = ErrorFeedback(TopK(0.05)), folder / f"{name}.{rank}.pt"
    three, sites = dist.new_group([0, 1, 2]), Sites.of(2)
    scenarios = {
        method: exchanged(rank, Exchange(ErrorFeedback(lossy))) for method, lossy in METHODS.items()
    }
    scenarios |= {
        "sites": exchanged(rank, Exchange(made, sites=sites)),
        "adasum": exchanged(rank, Exchange(made, reduction="adasum")),
        "refused": refused(rank),
        "hook": trained(rank, file),
        "crossing": crossing(rank),
    }
    if rank < 3:
        scenarios["three"] = exchanged(rank, Exchange(made, group=three))
    if other:
        scenarios["resumed"] = trained(rank, file, folder / f"{other}.{rank}.pt")
    found: dict[str, Any] = {
        f"{scenario}.{key}": v for scenario, all_ in scenarios.items() for key, v in all_.items()
    }
    np.savez(folder / f"{name}.{rank}.npz", **found)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    folder, name, *others = sys.argv[1:]
    run_together(main, [(rank, Path(folder), name, "".join(others)) for rank in range(WORLD)])
