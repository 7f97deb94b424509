"""Two processes train a perceptron together: accuracy against the bytes that each puts in.

    python benchmarks/data_parallel_digits.py [--seeds 3] [--epochs 30] [--json FILE]

scikit-learn's handwritten digits, half of them in each process, a perceptron 64-256-128-10 in
DistributedDataParallel over gloo, `fedpress_ddp.hook.comm_hook`. Bytes are what a process puts
into collectives, all steps, the uncompressed ones at the beginning too. The last row takes eight
local steps between exchanges.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from harness import parser, save
from sklearn.datasets import load_digits
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from fedpress_compression.compressor import from_config
from fedpress_compression.compressors.dgc import Dgc
from fedpress_ddp.hook import HookState, LocalSGD, comm_hook
from fedpress_protocols.schedule import sparsity_warm_up

WORLD, TEST_IMAGES, BATCH, RATE, MOMENTUM = 2, 360, 32, 0.1, 0.9
FEEDBACK = "error_feedback"
ROWS: dict[str, dict[str, Any]] = {
    "float32": {"id": "none"},
    "top-k 1 % of 2 bits, EF": {"id": FEEDBACK, "inner": {"id": "topk", "fraction": 0.01}},
    "top-k .2 % ternary, EF": {
        "id": FEEDBACK,
        "inner": {"id": "topk", "fraction": 0.002, "magnitude_bits": 0},
    },
    "dgc, top-k 1 % of 2 bits": {
        "id": "dgc",
        "inner": {"id": "topk", "fraction": 0.01},
        "optimizer_momentum": 0.0,
    },
    "dgc, top-k .2 %, warm-up": {
        "id": "dgc",
        "inner": {"id": "topk", "fraction": 0.002},
        "optimizer_momentum": 0.0,
        "warm_up": 23,
    },
    "PowerSGD rank 1, EF": {"id": FEEDBACK, "inner": {"id": "powersgd", "rank": 1}},
    "local SGD, top-k 1 % of 2 bits, EF": {
        "id": FEEDBACK,
        "inner": {"id": "topk", "fraction": 0.01},
        "every": 8,
    },
}


def perceptron(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 256),
        torch.nn.ReLU(),
        torch.nn.Linear(256, 128),
        torch.nn.ReLU(),
        torch.nn.Linear(128, 10),
    )


def train(rank: int, config: dict[str, Any], seed: int, epochs: int) -> tuple[float, int, int]:
    """The accuracy on the held-out images, bytes put in, bytes that float32 would have been."""
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    inputs = torch.tensor(pixels[order] / 16, dtype=torch.float32)
    targets = torch.tensor(labels[order])
    mine = torch.arange(TEST_IMAGES, len(labels))[rank::WORLD]
    mine = mine[: (len(labels) - TEST_IMAGES) // WORLD]
    config = dict(config)
    every = config.pop("every", 0)
    momentum = config.pop("optimizer_momentum", MOMENTUM)
    warm_up = config.pop("warm_up", 0)
    made = from_config(config)
    model = perceptron(seed)
    inner = torch.optim.SGD(model.parameters(), lr=RATE, momentum=momentum)
    if every:
        outer = LocalSGD(model.parameters(), made, every=every, learning_rate=1.0, momentum=0.0)
        run, sent = model, outer.sent
    else:
        run = DistributedDataParallel(model)
        dgc = made if warm_up and isinstance(made, Dgc) else None
        schedule = () if dgc is None else sparsity_warm_up(dgc, rounds=warm_up)
        state = HookState(made, seed=seed, schedule=schedule)
        run.register_comm_hook(state, comm_hook)
        outer, sent = None, state.sent
    draw = torch.Generator().manual_seed(1000 * seed + rank)
    steps = 0
    for _ in range(epochs):
        for batch in mine[torch.randperm(len(mine), generator=draw)].split(BATCH):
            inner.zero_grad()
            torch.nn.functional.cross_entropy(run(inputs[batch]), targets[batch]).backward()
            inner.step()
            steps += 1
            if outer is not None:
                outer.step()
    with torch.no_grad():
        right = model(inputs[:TEST_IMAGES]).argmax(dim=1) == targets[:TEST_IMAGES]
    plain = 4 * steps * sum(p.numel() for p in model.parameters())
    return right.float().mean().item(), sent.num_bytes, plain


def process(rank: int, store: str, out: str, seeds: int, epochs: int) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    found = {
        name: [train(rank, config, seed, epochs) for seed in range(seeds)]
        for name, config in ROWS.items()
    }
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--seeds", type=int, default=3)
    command.add_argument("--epochs", type=int, default=30)
    asked = command.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        arguments = (str(Path(folder, "store")), str(out), asked.seeds, asked.epochs)
        spawn(process, arguments, nprocs=WORLD)
        found = json.loads(out.read_text())
    print(f"{'exchange':36} {'accuracy':>10} {'MB':>9} {'fewer bytes':>12}")
    rows = {}
    for name, runs in found.items():
        accuracy = statistics.mean(run[0] for run in runs)
        num_bytes = statistics.mean(run[1] for run in runs)
        ratio = statistics.mean(run[2] / run[1] for run in runs)
        rows[name] = {"accuracy": accuracy, "bytes": num_bytes, "ratio": ratio}
        print(f"{name:36} {accuracy:10.4f} {num_bytes / 1e6:9.3f} {ratio:11.1f}x")
    save(rows, asked.json)


if __name__ == "__main__":
    main()
