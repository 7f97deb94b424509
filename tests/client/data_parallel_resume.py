"""Four processes train; one is killed; all start again from their checkpoints.

python data_parallel_resume.py FOLDER
"""

# No `from __future__ import annotations`: torch looks at a hook's annotations as objects.

import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fedpress_compression.compressor import Compressor
from fedpress_compression.compressors.dgc import Dgc
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.powersgd import PowerSGD
from fedpress_compression.compressors.topk import TopK
from fedpress_ddp.hook import HookState, comm_hook
from tests.client.data_parallel_process import WORLD, batches, network

STEPS, SAVED, KILLED, VICTIM = 7, 4, 5, 2
METHODS: dict[str, Compressor[Any]] = {
    "topk": ErrorFeedback(TopK(0.05)),
    "powersgd": ErrorFeedback(PowerSGD(rank=1)),
    "dgc": Dgc(TopK(0.05), max_norm=1.0),
}


def train(rank: int, name: str, folder: Path, *, resume: bool, kill: bool) -> np.ndarray:
    """The parameters at the end; checkpoints go to `folder`."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = DistributedDataParallel(net, bucket_cap_mb=0.005)
    state = HookState(METHODS[name], plain_steps=1)
    file = folder / f"{name}.{rank}.pt"
    if resume:
        saved = torch.load(file, weights_only=True)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        state.load_state_dict(saved["hook"])
    model.register_comm_hook(state, comm_hook)
    for step, (inputs, labels) in enumerate(batches(rank, STEPS)):
        if resume and step < SAVED:
            continue
        if kill and step == KILLED and rank == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        if not resume and step == SAVED - 1:
            parts: dict[str, Any] = {"net": net, "optimizer": optimizer, "hook": state}
            torch.save({key: each.state_dict() for key, each in parts.items()}, file)
    return torch.cat([p.detach().ravel() for p in net.parameters()]).numpy()


def main(rank: int, kind: str, folder: Path) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder / f'store-{kind}'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)
    try:
        for name in METHODS if kind != "killed" else ("topk",):
            whole = train(rank, name, folder, resume=kind == "resumed", kill=kind == "killed")
            np.save(folder / f"{kind}.{name}.{rank}.npy", whole)
    except Exception as exc:
        (folder / f"{kind}.{rank}.txt").write_text(f"{type(exc).__name__}: {exc}")
        os._exit(3)
    dist.barrier()
    dist.destroy_process_group()


def run(kind: str, folder: Path) -> list[int | None]:
    """The exit codes; None for a process that had to be stopped."""
    torch_is_here = multiprocessing.get_context("fork")  # imported once for all of them
    running = [
        torch_is_here.Process(target=main, args=(rank, kind, folder), daemon=True)
        for rank in range(WORLD)
    ]
    for process in running:
        process.start()
    for process in running:
        process.join(90)
    return [process.exitcode for process in running]


if __name__ == "__main__":
    out = Path(sys.argv[1])
    codes = {kind: run(kind, out) for kind in ("whole", "killed", "resumed")}
    survivor, dead = 3, -signal.SIGKILL
    due = [dead if rank == VICTIM else survivor for rank in range(WORLD)]
    if codes != {"whole": [0] * WORLD, "killed": due, "resumed": [0] * WORLD}:
        sys.exit(f"the processes ended with {codes}")
