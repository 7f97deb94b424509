"""Two processes train a perceptron together: accuracy against the bytes that each puts in.

    python benchmarks/data_parallel_digits.py [--seeds 3] [--only WORD...] [--json FILE]
    python benchmarks/data_parallel_digits.py --tune .001 .003 .01 --only Adam

scikit-learn's handwritten digits, half of them in each process, a perceptron 64-256-128-10 in
DistributedDataParallel over gloo, `fedpress_ddp.hook.comm_hook`. Bytes are what a process puts
into collectives, all steps, the uncompressed ones at the beginning too. A row of local SGD takes
eight local steps between exchanges. Rows of Adam and LAMB have no DistributedDataParallel: their
optimizers, `OneBitAdam` and `OneBitLamb`, exchange the gradients; a falling rate ends at zero. If a
row is measured against another one, the difference is the mean over pairs of one seed, with its
standard error. `--json` is written after every run, and runs that it has with as many epochs are
not repeated.

`--tune` runs each row at each of these rates, on seeds from 100 on, and measures on training images
set aside for that in place of the held-out ones. benchmarks/data_parallel_fashion.py runs another
task in the same way.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
from fedpress_ddp.optimizers import OneBitAdam, OneBitLamb
from fedpress_protocols.plan import Profile
from fedpress_protocols.schedule import Period, sparsity_warm_up

WORLD, RATE, MOMENTUM = 2, 0.1, 0.9
FIRST_TUNING_SEED = 100
FEEDBACK = "error_feedback"
SPARSE_START = [[0.05, 12], [0.0125, 12], [0.004, 12]]
ADAM, LAMB, FALLING = "Adam, float32", "LAMB, float32", "falling rate"
OWN_EXCHANGE = {"adam": OneBitAdam, "lamb": OneBitLamb}
WITH_ADAM = {"id": "none", "optimizer": "adam", "rate": 0.003}
WITH_LAMB = {"id": "none", "optimizer": "lamb"}
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
    ADAM: WITH_ADAM,
    "1-bit Adam, 15 % warm-up": {**WITH_ADAM, "warm_up": 104, "like": ADAM},
    "1-bit Adam, 30 % warm-up": {**WITH_ADAM, "warm_up": 207, "like": ADAM},
    f"{ADAM}, {FALLING}": {**WITH_ADAM, "rate": 0.012, "falls": True},
    f"1-bit Adam, 15 % warm-up, {FALLING}": {
        **WITH_ADAM,
        "rate": 0.006,
        "warm_up": 104,
        "falls": True,
        "like": f"{ADAM}, {FALLING}",
    },
    f"{LAMB}, {FALLING}": {**WITH_LAMB, "rate": 0.024, "falls": True},
    f"1-bit LAMB, 15 % warm-up, {FALLING}": {
        **WITH_LAMB,
        "rate": 0.006,
        "warm_up": 104,
        "falls": True,
        "like": f"{LAMB}, {FALLING}",
    },
}


@dataclass(frozen=True)
class Task:
    """`draw(seed, source)` returns pixels and labels, the first `num_tests` of which are held out.
    With `is_tuning` they are other images than those held out without."""

    network: Callable[[], torch.nn.Module]
    draw: Callable[[int, bool, Path | None], tuple[torch.Tensor, torch.Tensor]]
    num_tests: int
    batch: int
    epochs: int
    rows: Mapping[str, Mapping[str, Any]]
    source: Path | None = None


def perceptron() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(64, 256),
        torch.nn.ReLU(),
        torch.nn.Linear(256, 128),
        torch.nn.ReLU(),
        torch.nn.Linear(128, 10),
    )


def digits(seed: int, is_tuning: bool, source: Path | None) -> tuple[torch.Tensor, torch.Tensor]:
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    if is_tuning:
        order = order[DIGITS.num_tests :]
    return torch.tensor(pixels[order] / 16, dtype=torch.float32), torch.tensor(labels[order])


DIGITS = Task(perceptron, digits, num_tests=360, batch=32, epochs=30, rows=ROWS)


@dataclass(frozen=True)
class Run:
    """`num_bytes` put in, `plain_bytes` in float32; `ratio_after` of both after an optimizer's
    warm-up, 1 without one."""

    accuracy: float
    num_bytes: int
    plain_bytes: int
    ratio_after: float


def train(rank: int, task: Task, config: Mapping[str, Any], seed: int, epochs: int) -> Run:
    """Train by `config`; the accuracy is that on the held-out images."""
    inputs, targets = task.draw(seed, seed >= FIRST_TUNING_SEED, task.source)
    mine = torch.arange(task.num_tests, len(targets))[rank::WORLD]
    mine = mine[: (len(targets) - task.num_tests) // WORLD]
    config = {key: value for key, value in config.items() if key != "like"}
    every = config.pop("every", 0)
    rate, momentum = config.pop("rate", RATE), config.pop("optimizer_momentum", MOMENTUM)
    warm_up, optimizer = config.pop("warm_up", 0), config.pop("optimizer", None)
    sparsities, plain_steps = config.pop("sparsities", []), config.pop("plain_steps", 2)
    falls = config.pop("falls", False)
    dtype = torch.float16 if config.pop("half", False) else torch.float32
    made = from_config(config)
    torch.manual_seed(seed)
    model = task.network()
    size = sum(p.numel() for p in model.parameters())
    run: torch.nn.Module = model
    inner: torch.optim.Optimizer
    outer: LocalSGD | None = None
    if optimizer is not None:
        made_by, steps_of_warm_up = OWN_EXCHANGE[optimizer], warm_up or sys.maxsize
        one_bit = made_by(model.parameters(), rate, warm_up_steps=steps_of_warm_up, seed=seed)
        inner, sent = one_bit, one_bit.sent
    else:
        inner = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
    if every:
        outer = LocalSGD(model.parameters(), made, every=every, learning_rate=1.0, momentum=0.0)
        sent = outer.sent
    elif optimizer is None:
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
    steps = epochs * -(-len(mine) // task.batch)
    left = 1.0 / steps if falls else 0.0
    lowered = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 1 - left * step)
    step = warmed_bytes = 0
    for _ in range(epochs):
        for batch in mine[torch.randperm(len(mine), generator=draw)].split(task.batch):
            inner.zero_grad()
            torch.nn.functional.cross_entropy(run(inputs[batch]), targets[batch]).backward()
            inner.step()
            lowered.step()
            step += 1
            if step == warm_up:
                warmed_bytes = sent.num_bytes
            if outer is not None:
                outer.step()
    with torch.no_grad():
        right = model(inputs[: task.num_tests]).argmax(dim=1) == targets[: task.num_tests]
    after = 1.0
    if optimizer is not None:
        after = 4 * size * (steps - warm_up) / (sent.num_bytes - warmed_bytes)
    return Run(right.float().mean().item(), sent.num_bytes, 4 * steps * size, after)


def _period(made: Dgc, fraction: float, steps: int) -> Period:
    inner = replace(cast(TopK, made.inner), fraction=fraction)
    profile = Profile(name="only", compressor=replace(made, inner=inner))
    return Period(profiles=(profile,), rounds=steps)


def process(
    rank: int, store: str, out: str, task: Task, rows: Mapping[str, Any], seeds: range, epochs: int
) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    file = Path(out)
    done = json.loads(file.read_text()) if file.exists() else {}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    for name, config in rows.items():
        runs = runs_of(done.get(name, {}), epochs)[: len(seeds)]
        for seed in seeds[len(runs) :]:
            runs.append(asdict(train(rank, task, config, seed, epochs)))
            if rank == 0:
                done[name] = row_of(runs, epochs)
                save(done, file)
        if rank == 0:
            print(line(name, done, config), flush=True)
    dist.destroy_process_group()


def runs_of(row: Mapping[str, Any], epochs: int) -> list[dict[str, Any]]:
    """Its runs, in the order of seeds; none if they are of another number of epochs."""
    return list(row.get("runs", ())) if row.get("epochs") == epochs else []


def row_of(runs: Sequence[Mapping[str, Any]], epochs: int) -> dict[str, Any]:
    accuracies = [run["accuracy"] for run in runs]
    return {
        "accuracy": statistics.mean(accuracies),
        "deviation": statistics.pstdev(accuracies),
        "accuracies": accuracies,
        "bytes": statistics.mean(run["num_bytes"] for run in runs),
        "ratio": statistics.mean(run["plain_bytes"] / run["num_bytes"] for run in runs),
        "ratio_after": statistics.mean(run["ratio_after"] for run in runs),
        "seeds": len(runs),
        "epochs": epochs,
        "runs": list(runs),
    }


def line(name: str, rows: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """A row of the table; with the mean difference of its pairs to its row in float32 if any."""
    row = rows[name]
    megabytes, after = row["bytes"] / 1e6, row.get("ratio_after", 1.0)
    text = f"{name:44} {row['accuracy']:10.4f} {megabytes:9.3f} {row['ratio']:11.1f}x {after:6.1f}x"
    like = rows.get(config.get("like", ""), {}).get("accuracies", [])
    own = row.get("accuracies", [])
    if len(like) == len(own) > 1:
        pairs = [100 * (mine - other) for mine, other in zip(own, like, strict=True)]
        error = statistics.stdev(pairs) / len(pairs) ** 0.5
        text += f"  {statistics.mean(pairs):+.2f} points, +- {error:.2f}"
    return text


def main(task: Task, doc: str | None, arguments: Sequence[str] | None = None) -> None:
    command = parser(doc)
    command.add_argument("--seeds", type=int, default=3)
    command.add_argument("--epochs", type=int, default=task.epochs)
    command.add_argument(
        "--only", nargs="+", default=[""], help="only rows with one of these words"
    )
    command.add_argument("--tune", nargs="+", type=float, metavar="RATE", help="see above")
    if task.source is not None:
        command.add_argument("--data", type=Path, required=True, help=f"folder of {task.source}")
    asked = command.parse_args(arguments)
    if task.source is not None:
        task = replace(task, source=asked.data)
    rows = {n: dict(c) for n, c in task.rows.items() if any(word in n for word in asked.only)}
    first = 0
    if asked.tune:
        first = FIRST_TUNING_SEED
        rows = {
            f"{name}, at {rate:g}": {**config, "rate": rate}
            for name, config in rows.items()
            for rate in asked.tune
        }
    print(
        f"{'exchange':44} {'accuracy':>10} {'MB':>9} {'fewer bytes':>12} {'after':>7}", flush=True
    )
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json") if asked.json is None else asked.json
        done = json.loads(out.read_text()) if out.exists() else {}
        missing = {}
        for name, config in rows.items():
            row = done.get(name, {})
            if (row.get("seeds"), row.get("epochs")) == (asked.seeds, asked.epochs):
                print(line(name, done, config), flush=True)
            else:
                missing[name] = config
        if missing:
            seeds = range(first, first + asked.seeds)
            store = str(Path(folder, "store"))
            spawn(process, (store, str(out), task, missing, seeds, asked.epochs), nprocs=WORLD)


if __name__ == "__main__":
    main(DIGITS, __doc__)
