"""What a hook adds to a step: each method beside a step without hook, as ratios.

    python benchmarks/data_parallel_overhead.py [--only WORD...] [--workers 2] [--json FILE]

Two processes on gloo over loopback, one thread each for torch, eight square layers (8.4M
parameters) and batches of 64. Two models, one with the hook and one without, take steps in turn, so
that other load of the machine meets both. `step` is the median of the ratios of such pairs, in wall
time; `cpu` that of CPU seconds, of all threads of a process. `exposed` is the share of a step
without hook that `backward()` waits for the exchange, and `compress` what all buckets' threads
spend on compression, in steps without hook: it bounds what overlap can hide. A link costs next to
nothing here, so no hook can be faster than none.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import parser, save
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from fedpress_compression.compressor import from_config
from fedpress_ddp.hook import HookState, comm_hook
from fedpress_ddp.methods import METHODS

WORLD, LAYERS, BATCH, BUCKET_MB, WARM_UP = 2, 8, 64, 4, 4
FEEDBACK = "error_feedback"
SPARSE = {"id": "topk", "fraction": 0.001}
ROWS: dict[str, dict[str, Any]] = {
    "torch fp16": {},
    "float32": {"id": "none"},
    **{name: dict(config) for name, config in METHODS.items()},
    "top-k .1 %, feedback, Adasum": {"id": FEEDBACK, "inner": SPARSE, "reduction": "adasum"},
    "threshold, feedback": {"id": FEEDBACK, "inner": {"id": "threshold"}},
    "dgc, top-k .1 %": {"id": "dgc", "inner": SPARSE},
    "quantize, feedback": {"id": FEEDBACK, "inner": {"id": "quantize"}},
    "qsgd": {"id": "qsgd"},
    "terngrad": {"id": "terngrad"},
    "eden, feedback": {"id": FEEDBACK, "inner": {"id": "eden"}},
    "count sketch": {"id": "count_sketch"},
    "shared support, feedback": {"id": FEEDBACK, "inner": {"id": "shared_support"}},
}


def network(width: int) -> torch.nn.Module:
    torch.manual_seed(0)
    parts = [(torch.nn.Linear(width, width), torch.nn.ReLU()) for _ in range(LAYERS)]
    return torch.nn.Sequential(*(module for part in parts for module in part))


def step(model: torch.nn.Module, inputs: torch.Tensor) -> tuple[float, float]:
    """Wall and CPU seconds."""
    model.zero_grad()
    dist.barrier()
    start = time.perf_counter(), time.process_time()
    model(inputs).square().mean().backward()
    return time.perf_counter() - start[0], time.process_time() - start[1]


def hooked(name: str, model: DistributedDataParallel, workers: int) -> HookState | None:
    config = dict(ROWS[name])
    if not config:
        model.register_comm_hook(None, fp16_compress_hook)
        return None
    options: dict[str, Any] = {"plain_steps": 2, "workers": workers}
    options["reduction"] = config.pop("reduction", "mean")
    state = HookState(from_config(config), **options)
    model.register_comm_hook(state, comm_hook)
    return state


def measured(name: str, width: int, steps: int, workers: int) -> dict[str, float]:
    without = DistributedDataParallel(network(width), bucket_cap_mb=BUCKET_MB)
    model = DistributedDataParallel(network(width), bucket_cap_mb=BUCKET_MB)
    state = hooked(name, model, workers)
    draw = torch.Generator().manual_seed(dist.get_rank())
    plain, pairs, exposed, compress, sizes = [], [], [], [], []
    for number in range(steps + WARM_UP):
        inputs = torch.randn(BATCH, width, generator=draw)
        before, after = step(without, inputs), step(model, inputs)
        if number < WARM_UP:
            continue
        plain.append(before[0])
        pairs.append((after[0] / before[0], after[1] / before[1]))
        if state is not None and state.metrics is not None:
            exposed.append(state.metrics.exposed_seconds / before[0])
            compress.append(state.metrics.compress_seconds / before[0])
            sizes.append(state.metrics.num_bytes)
    size = sum(parameter.numel() for parameter in model.parameters())
    median: Callable[[Sequence[float]], float] = statistics.median
    row = {"step": median([pair[0] for pair in pairs]), "cpu": median([pair[1] for pair in pairs])}
    row |= {"plain_ms": 1e3 * median(plain), "bytes": median(sizes) if sizes else 2.0 * size}
    if exposed:
        row |= {"exposed": median(exposed), "compress": median(compress)}
    return row | {"parameters": size, "workers": workers, "load": os.getloadavg()[0]}


def process(rank: int, store: str, out: str, names: list[str], options: dict[str, int]) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    rows = {}
    for name in names:
        rows[name] = row = measured(name, **options)
        if rank == 0:
            save(rows, Path(out))
            shares = " ".join(f"{row.get(key, float('nan')):9.2f}" for key in COLUMNS)
            print(f"{name:30} {shares} {row['bytes']:12,.0f} {row['load']:6.1f}", flush=True)
    dist.destroy_process_group()


COLUMNS = ("step", "cpu", "exposed", "compress")


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--width", type=int, default=1024)
    command.add_argument("--steps", type=int, default=8)
    command.add_argument("--workers", type=int, default=2)
    command.add_argument(
        "--only", nargs="+", default=[""], help="only rows with one of these words"
    )
    asked = command.parse_args()
    names = [name for name in ROWS if any(word in name for word in asked.only)]
    heads = " ".join(f"{key:>9}" for key in COLUMNS)
    print(f"{'method':30} {heads} {'bytes':>12} {'load':>6}", flush=True)
    options = {"width": asked.width, "steps": asked.steps, "workers": asked.workers}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json") if asked.json is None else asked.json
        spawn(process, (str(Path(folder, "store")), str(out), names, options), nprocs=WORLD)


if __name__ == "__main__":
    main()
