"""torch's communication hooks and fedpress's in one run: time and bytes per step of each.

torchrun --nproc-per-node 2 hooks.py --width 1000 --layers 8 --steps 12

`--width` squared times `--layers` is about the number of parameters. Times are medians over the
steps after the first five, of forward, backward and exchange, in process 0. Bytes are those that
one process contributes to collectives, as fedpress counts them; for torch's hooks they are computed
from the sizes of the tensors that they reduce.
"""

# No `from __future__ import annotations`: torch looks at a hook's annotations as objects.

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from fedpress.compressors import ErrorFeedback, PowerSGD, Sign, TopK
from fedpress.ddp import HookState, comm_hook

WARM_UP = 5
TORCH_START = 2
Bytes = Callable[[], float]


def network(width: int, layers: int) -> torch.nn.Module:
    torch.manual_seed(0)
    parts = [(torch.nn.Linear(width, width), torch.nn.ReLU()) for _ in range(layers)]
    return torch.nn.Sequential(*(module for part in parts for module in part))


def of_torch(name: str, model: DistributedDataParallel, size: int) -> Bytes:
    """Register a hook of torch's; its bytes per step."""
    if name == "torch, no hook":
        return lambda: 4 * size
    if name == "torch PowerSGD, rank 2":
        state = PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=TORCH_START, warm_start=True
        )
        model.register_comm_hook(state, powerSGD_hook)
        return lambda: 4 * size / state.compression_stats()[0]
    model.register_comm_hook(None, getattr(default_hooks, name.removeprefix("torch ")))
    return lambda: 2 * size


def of_fedpress(made: Any, model: DistributedDataParallel) -> Bytes:
    state = HookState(made, plain_steps=TORCH_START)
    model.register_comm_hook(state, comm_hook)
    return lambda: state.metrics.num_bytes if state.metrics else 0


OURS: dict[str, Any] = {
    "fedpress top-k 1 %, feedback": ErrorFeedback(TopK(fraction=0.01)),
    "fedpress sign, feedback": ErrorFeedback(Sign()),
    "fedpress PowerSGD, rank 2, feedback": ErrorFeedback(PowerSGD(rank=2)),
}
TORCHS = ["torch, no hook", "torch fp16_compress_hook", "torch PowerSGD, rank 2"]


def measured(name: str, asked: argparse.Namespace) -> tuple[float, float]:
    """The median seconds and the bytes of a step."""
    net = network(asked.width, asked.layers)
    size = sum(parameter.numel() for parameter in net.parameters())
    # torch's PowerSGD hook hangs on gloo with several buckets (2.13): it has one.
    bucket_mb = 4000 if name == "torch PowerSGD, rank 2" else 4
    model = DistributedDataParallel(net, bucket_cap_mb=bucket_mb)
    own = OURS.get(name)
    num_bytes = of_torch(name, model, size) if own is None else of_fedpress(own, model)
    draw = torch.Generator().manual_seed(dist.get_rank())
    seconds = []
    for _ in range(asked.steps + WARM_UP):
        inputs = torch.randn(asked.batch, asked.width, generator=draw)
        model.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        model(inputs).square().mean().backward()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[WARM_UP:]), num_bytes()


def main() -> None:
    command = argparse.ArgumentParser(description=__doc__)
    command.add_argument("--width", type=int, default=350)
    command.add_argument("--layers", type=int, default=8)
    command.add_argument("--batch", type=int, default=64)
    command.add_argument("--steps", type=int, default=10)
    asked = command.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in [*TORCHS, *OURS]:
        seconds, num_bytes = measured(name, asked)
        if dist.get_rank() == 0:
            print(f"{name:36} {1e3 * seconds:9.1f} ms {num_bytes:14,.0f} bytes", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
