"""Two processes train a perceptron together: accuracy against the bytes that each puts in.

    python benchmarks/data_parallel_digits.py [--seeds 3] [--only WORD...] [--json FILE]

scikit-learn's handwritten digits, half of them in each process, a perceptron 64-256-128-10 in
DistributedDataParallel over gloo, `fedpress_ddp.hook.comm_hook`. Bytes are what a process puts
into collectives, all steps, the uncompressed ones at the beginning too. The last row takes eight
local steps between exchanges. Rows of Adam have no DistributedDataParallel: `OneBitAdam` exchanges
the gradients itself. `--json` is written after every row, and rows that it has with as many seeds
and epochs are not run again.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from harness import parser, save
from sklearn.datasets import load_digits
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from fedpress_compression.compressor import from_config
from fedpress_compression.compressors.dgc import Dgc
from fedpress_compression.compressors.topk import TopK
from fedpress_ddp.hook import HookState, LocalSGD, comm_hook
from fedpress_ddp.methods import METHODS
from fedpress_ddp.optimizers import OneBitAdam
from fedpress_protocols.plan import Profile
from fedpress_protocols.schedule import Period, sparsity_warm_up

WORLD, TEST_IMAGES, BATCH, RATE, MOMENTUM = 2, 360, 32, 0.1, 0.9
FEEDBACK = "error_feedback"
SPARSE_START = [[0.05, 12], [0.0125, 12], [0.004, 12]]
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
    "float32, rate .05": {"id": "none", "rate": 0.05},
    "float32, rate .2": {"id": "none", "rate": 0.2},
    "torch fp16": {"id": "none", "half": True},
    **{name: dict(config) for name, config in METHODS.items()},
    "sign, feedback": {**METHODS["sign, feedback"], "rate": 0.02},
    "dgc, top-k .2 % of 0 bits, short warm-up": {
        "id": "dgc",
        "inner": {"id": "topk", "fraction": 0.002, "magnitude_bits": 0},
        "optimizer_momentum": 0.0,
        "sparsities": SPARSE_START,
        "plain_steps": 0,
    },
    "Adam, float32": {"id": "none", "adam": 0.003},
    "1-bit Adam, 15 % warm-up": {"id": "none", "adam": 0.003, "warm_up": 104},
    "1-bit Adam, 30 % warm-up": {"id": "none", "adam": 0.003, "warm_up": 207},
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
    rate, momentum = config.pop("rate", RATE), config.pop("optimizer_momentum", MOMENTUM)
    warm_up, adam = config.pop("warm_up", 0), config.pop("adam", 0.0)
    sparsities, plain_steps = config.pop("sparsities", []), config.pop("plain_steps", 2)
    dtype = torch.float16 if config.pop("half", False) else torch.float32
    made = from_config(config)
    model = perceptron(seed)
    run: torch.nn.Module = model
    inner: torch.optim.Optimizer
    outer: LocalSGD | None = None
    if adam:
        steps_of_warm_up = warm_up or sys.maxsize
        one_bit = OneBitAdam(model.parameters(), adam, warm_up_steps=steps_of_warm_up, seed=seed)
        inner, sent = one_bit, one_bit.sent
    else:
        inner = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
    if every:
        outer = LocalSGD(model.parameters(), made, every=every, learning_rate=1.0, momentum=0.0)
        sent = outer.sent
    elif not adam:
        run = DistributedDataParallel(model)
        schedule: tuple[Period, ...] = ()
        if isinstance(made, Dgc):
            schedule = sparsity_warm_up(made, rounds=warm_up) if warm_up else ()
            schedule += tuple(_period(made, *each) for each in sparsities)
        # Without threads, which the bits do not depend on and a small model does not need.
        options = {"seed": seed, "plain_steps": plain_steps, "dtype": dtype, "workers": 0}
        state = HookState(made, schedule=schedule, **options)
        run.register_comm_hook(state, comm_hook)
        sent = state.sent
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


def _period(made: Dgc, fraction: float, steps: int) -> Period:
    inner = replace(cast(TopK, made.inner), fraction=fraction)
    profile = Profile(name="only", compressor=replace(made, inner=inner))
    return Period(profiles=(profile,), rounds=steps)


def process(rank: int, store: str, out: str, names: list[str], seeds: int, epochs: int) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    file = Path(out)
    for name in names:
        runs = [train(rank, ROWS[name], seed, epochs) for seed in range(seeds)]
        if rank == 0:
            rows = json.loads(file.read_text()) if file.exists() else {}
            accuracies = [run[0] for run in runs]
            rows[name] = {
                "accuracy": statistics.mean(accuracies),
                "deviation": statistics.pstdev(accuracies),
                "bytes": statistics.mean(run[1] for run in runs),
                "ratio": statistics.mean(run[2] / run[1] for run in runs),
                "seeds": seeds,
                "epochs": epochs,
            }
            save(rows, file)
            print(line(name, rows[name]), flush=True)
    dist.destroy_process_group()


def line(name: str, row: dict[str, float]) -> str:
    megabytes = row["bytes"] / 1e6
    return f"{name:40} {row['accuracy']:10.4f} {megabytes:9.3f} {row['ratio']:11.1f}x"


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--seeds", type=int, default=3)
    command.add_argument("--epochs", type=int, default=30)
    command.add_argument(
        "--only", nargs="+", default=[""], help="only rows with one of these words"
    )
    asked = command.parse_args()
    print(f"{'exchange':40} {'accuracy':>10} {'MB':>9} {'fewer bytes':>12}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json") if asked.json is None else asked.json
        rows = json.loads(out.read_text()) if out.exists() else {}
        names = []
        for name in (each for each in ROWS if any(word in each for word in asked.only)):
            row = rows.get(name, {})
            if (row.get("seeds"), row.get("epochs")) == (asked.seeds, asked.epochs):
                print(line(name, row), flush=True)
            else:
                names.append(name)
        if names:
            arguments = (str(Path(folder, "store")), str(out), names, asked.seeds, asked.epochs)
            spawn(process, arguments, nprocs=WORLD)


if __name__ == "__main__":
    main()
