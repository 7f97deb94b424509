"""One of two processes that train together under torch's own PowerSGD hook.

    python powersgd_process.py RANK STORE OUT MATRIX_RANK

What went into the hook and what came out of it, step by step, lies in OUT afterwards.
"""

# No `from __future__ import annotations`: torch looks at the hook's annotations as objects.

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

STEPS = 7
PLAIN_STEPS = 2
SEED = 5
MIN_COMPRESSION_RATE = 1.5


def network() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Conv2d(2, 12, 3),
        torch.nn.Tanh(),
        torch.nn.Flatten(),
        torch.nn.Linear(12 * 16, 20),
        torch.nn.Tanh(),
        torch.nn.Linear(20, 3),
    )


def main(rank: int, store: str, out: str, matrix_rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = DistributedDataParallel(network())
    names = {id(p): name for name, p in model.module.named_parameters()}
    state = PowerSGDState(
        None,
        matrix_approximation_rank=matrix_rank,
        start_powerSGD_iter=PLAIN_STEPS,
        min_compression_rate=MIN_COMPRESSION_RATE,
        random_seed=SEED,
    )
    found: dict[str, np.ndarray] = {}
    step = 0

    def hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        found[f"order.{step}"] = np.array([names[id(p)] for p in bucket.parameters()])
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            found[f"local.{step}.{names[id(parameter)]}"] = gradient.numpy().copy()
        return powerSGD_hook(state, bucket)

    model.register_comm_hook(state, hook)
    draw = torch.Generator().manual_seed(10 + rank)
    for step in range(STEPS):
        inputs = torch.randn(16, 2, 6, 6, generator=draw)
        labels = torch.randint(0, 3, (16,), generator=draw)
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        with torch.no_grad():
            for name, parameter in model.module.named_parameters():
                found[f"mean.{step}.{name}"] = parameter.grad.numpy().copy()
                parameter -= 0.2 * parameter.grad
    np.savez(Path(out), allow_pickle=False, **found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
