"""The overhead of the hook in a training step: wall and CPU time of each method beside no hook.

    python benchmarks/hook_overhead.py [--pairs 9] [--batch 16] [--only WORD...] [--json FILE]
    python benchmarks/hook_overhead.py --only "top-k .1 %" --trace FILE

Two processes on gloo over loopback, which limits nothing, so that a method can only lose. 8.4
million parameters in eight square layers (`--width`), one thread of torch in each process. A step
is forward, backward and exchange; steps with a hook and without one alternate, and the ratios are
medians over such pairs, in process 0. `cpu` counts all threads of the process; `added` is the
median difference. `one process` is the CPU time that a hook adds to a step of one process, without
a network, and that of decoding the other's body, as `fedpress plan --ddp` measures them. If
two processes with threads share fewer cores than they have threads, compression takes time from
the backward pass that it runs beside: look at the CPU time then.

`--trace` writes a trace of one step of process 0 under the first method, for Perfetto or
chrome://tracing: "fedpress exchange" of the first buckets lies beside AddmmBackward0.
"""

# No `from __future__ import annotations`: torch looks at a hook's annotations as objects.

import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from data_parallel_links import network, spec_of
from harness import machine, parser, report
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from fedpress.planning.data_parallel import measure
from fedpress_compression.compressor import from_config
from fedpress_ddp.hook import HookState, comm_hook
from fedpress_ddp.methods import METHODS

WORLD, PLAIN_STEPS, WARM_UP = 2, 1, 3
SPARSE = {"id": "topk", "fraction": 0.001}
CASES: Mapping[str, Mapping[str, Any]] = {
    "float16": {"compressor": {"id": "none"}, "dtype": torch.float16},
    **{name: {"compressor": config} for name, config in METHODS.items()},
    "dgc, top-k .1 %": {"compressor": {"id": "dgc", "inner": SPARSE}},
    "Adasum, top-k .1 %": {
        "compressor": {"id": "error_feedback", "inner": SPARSE},
        "reduction": "adasum",
    },
    "quantize 4 bits, feedback": {
        "compressor": {"id": "error_feedback", "inner": {"id": "quantize", "bits": 4}}
    },
    "qsgd": {"compressor": {"id": "qsgd"}},
    "random-k 1 %, unbiased": {"compressor": {"id": "randomk", "fraction": 0.01, "unbiased": True}},
}


@dataclass(frozen=True)
class Overhead:
    """Ratios to a step without a hook; milliseconds otherwise."""

    wall_ratio: float
    cpu_ratio: float
    plain_wall: float
    plain_cpu: float
    added_wall: float
    added_cpu: float
    exposed: float
    num_bytes: float


class Stepping:
    """A model and the time that its steps take."""

    def __init__(self, width: int, batch: int, state: HookState | None) -> None:
        self._model = DistributedDataParallel(network(width))
        if state is not None:
            self._model.register_comm_hook(state, comm_hook)
        self._draw = torch.Generator().manual_seed(dist.get_rank())
        self._shape = (batch, width)

    def step(self) -> tuple[float, float]:
        """Seconds of wall and of CPU time."""
        inputs = torch.randn(self._shape, generator=self._draw)
        self._model.zero_grad()
        dist.barrier()
        start, start_cpu = time.perf_counter(), time.process_time()
        self._model(inputs).square().mean().backward()
        return time.perf_counter() - start, time.process_time() - start_cpu


def state_of(case: Mapping[str, Any]) -> HookState:
    options = {key: value for key, value in case.items() if key != "compressor"}
    return HookState(from_config(dict(case["compressor"])), plain_steps=PLAIN_STEPS, **options)


def overhead(width: int, batch: int, case: Mapping[str, Any], pairs: int) -> Overhead:
    state = state_of(case)
    plain, hooked = Stepping(width, batch, None), Stepping(width, batch, state)
    taken: list[tuple[tuple[float, float], tuple[float, float]]] = []
    exposed, num_bytes = [], []
    for _ in range(WARM_UP + pairs):
        taken.append((plain.step(), hooked.step()))
        assert state.metrics is not None
        exposed.append(state.metrics.exposed_seconds)
        num_bytes.append(state.metrics.num_bytes)

    def middle(values: Sequence[float]) -> float:
        return statistics.median(values[WARM_UP:])

    return Overhead(
        wall_ratio=middle([b[0] / a[0] for a, b in taken]),
        cpu_ratio=middle([b[1] / a[1] for a, b in taken]),
        plain_wall=1e3 * middle([a[0] for a, _ in taken]),
        plain_cpu=1e3 * middle([a[1] for a, _ in taken]),
        added_wall=1e3 * middle([b[0] - a[0] for a, b in taken]),
        added_cpu=1e3 * middle([b[1] - a[1] for a, b in taken]),
        exposed=1e3 * middle(exposed),
        num_bytes=middle(num_bytes),
    )


def write_trace(width: int, batch: int, case: Mapping[str, Any], file: Path) -> None:
    """Of one step of process 0, all threads."""
    stepping = Stepping(width, batch, state_of(case))
    for _ in range(WARM_UP):
        stepping.step()
    if dist.get_rank():
        stepping.step()
        return
    threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, experimental_config=threads) as profiler:
        stepping.step()
    profiler.export_chrome_trace(str(file))


def process(rank: int, store: str, out: str, asked: Any, names: list[str]) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    if asked.trace is not None:
        write_trace(asked.width, asked.batch, CASES[names[0]], asked.trace)
    else:
        rows = {}
        for name in names:
            row = overhead(asked.width, asked.batch, CASES[name], asked.pairs)
            rows[name] = asdict(row)
            if rank == 0:
                Path(out).write_text(json.dumps(rows))
    dist.destroy_process_group()


def table(figures: Mapping[str, Any]) -> str:
    """Markdown, a row for each method."""
    lines = [
        "| method | wall, ratio | CPU, ratio | CPU without hook, ms | added CPU, ms "
        "| one process, ms | bytes |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in figures["methods"].items():
        alone = "" if row["exchange"] is None else f"{row['exchange']:.0f}"
        lines.append(
            f"| {name} | {row['wall_ratio']:.2f} | {row['cpu_ratio']:.2f} | {row['plain_cpu']:.0f} "
            f"| {row['added_cpu']:.0f} | {alone} | {row['num_bytes']:,.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--width", type=int, default=1024)
    command.add_argument("--batch", type=int, default=16)
    command.add_argument("--pairs", type=int, default=9)
    command.add_argument("--only", nargs="+", default=[""], help="methods with one of these words")
    command.add_argument("--trace", type=Path, metavar="FILE", help="write a trace, and no table")
    asked = command.parse_args()
    names = [name for name in CASES if any(word in name for word in asked.only)]
    if not names:
        command.error(f"no method has one of these words: {', '.join(asked.only)}")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        spawn(process, (str(Path(folder, "store")), str(out), asked, names), nprocs=WORLD)
        if asked.trace is not None:
            return
        rows = json.loads(out.read_text())
    costs = measure(spec_of(asked.width))
    for name, row in rows.items():
        cost = costs.get(name)
        alone = cost and 1e3 * (cost.compress_seconds + (WORLD - 1) * cost.decode_seconds)
        row["exchange"] = alone
    figures = {"machine": machine(), "world": WORLD, "methods": rows}
    options = {key: getattr(asked, key) for key in ("width", "batch", "pairs")}
    report(table(figures), {**figures, **options}, asked.json)


if __name__ == "__main__":
    main()
