"""Seconds and bytes of a training step on links of 0.1, 1 and 10 Gbit/s: no hook, torch's, ours.

    python benchmarks/data_parallel_links.py --json benchmarks/results/data_parallel_links.json
    python benchmarks/data_parallel_links.py --table FILE

Each process has a network namespace of its own; their virtual interfaces meet at a bridge, and
Linux's token bucket (`tc qdisc ... tbf`) limits both directions of each to the rate. Nothing is
delayed beyond that. A probe, gloo's all-reduce of 4 MB, measures what the link carries, and one of
16 bytes what a message takes. Cells that
the JSON file has are not run again. Needs Linux with `unshare`, `nsenter`, `ip` and `tc`, and root
or user namespaces.

Times are medians of wall time over the steps after the first four, of forward, backward and
exchange, in process 0. `wire_bytes` are those that its interface sent in a step, with all headers.
`costs` are what `fedpress plan --ddp` measures on this machine. torch refuses its bf16 hook on gloo
("required CUDA 11+ and NCCL 2.10+").
"""

# No `from __future__ import annotations`: torch looks at a hook's annotations as objects.

import argparse
import json
import os
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from harness import machine, save
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from fedpress.planning.data_parallel import measure as measure_costs
from fedpress_compression.compressor import from_config
from fedpress_compression.tensors import ModelSpec, TensorSpec
from fedpress_ddp.hook import HookState, StepMetrics, comm_hook
from fedpress_ddp.methods import METHODS

WORLD, LAYERS, BATCH = 2, 8, 16
WIDTHS = {"1M": 350, "8M": 1024, "100M": 3536}
LINKS = (0.1, 1.0, 10.0)
TORCHS = ("none", "torch fp16", "torch PowerSGD, rank 2")
NAMES = (*TORCHS, *METHODS)
PLAIN_STEPS, WARM_UP, PROBE_VALUES = 2, 4, 2**20
PATIENCE = 3600
"""Seconds for a cell: 100M parameters take 32 s a step at 0.1 Gbit/s without a hook."""
INSIDE = "FEDPRESS_BENCHMARK_NAMESPACE"


# One process


def network(width: int) -> torch.nn.Module:
    torch.manual_seed(0)
    parts = [(torch.nn.Linear(width, width), torch.nn.ReLU()) for _ in range(LAYERS)]
    return torch.nn.Sequential(*(module for part in parts for module in part))


def spec_of(width: int) -> ModelSpec:
    shapes = network(width).state_dict()
    return ModelSpec(tuple(TensorSpec(name, tuple(t.shape)) for name, t in shapes.items()))


def distributed(
    name: str, net: torch.nn.Module, on_step: Callable[[StepMetrics], None]
) -> torch.nn.Module:
    """`net` with the exchange `name`."""
    # torch's PowerSGD hook hangs on gloo with several buckets (2.13): it has one.
    bucket_mb = 4000 if name == "torch PowerSGD, rank 2" else 25
    model = DistributedDataParallel(net, bucket_cap_mb=bucket_mb)
    if name == "torch PowerSGD, rank 2":
        torchs = PowerSGDState(None, 2, start_powerSGD_iter=PLAIN_STEPS, warm_start=True)
        model.register_comm_hook(torchs, powerSGD_hook)
    elif name == "torch fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name != "none":
        state = HookState(from_config(METHODS[name]), plain_steps=PLAIN_STEPS, on_step=on_step)
        model.register_comm_hook(state, comm_hook)
    return model


def bytes_sent() -> int:
    """By this namespace's interface, since it exists."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[8])
    raise RuntimeError("this process has no interface eth0")


def probe() -> tuple[float, float]:
    """Gbit/s that gloo's all-reduce sends, and seconds of a message."""
    values, seconds = torch.ones(PROBE_VALUES), []
    for _ in range(4):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(values)
        seconds.append(time.perf_counter() - start)
    gbit = 8e-9 * 2 * (WORLD - 1) / WORLD * values.nbytes / statistics.median(seconds[1:])
    seconds = []
    for _ in range(50):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(values[:4])
        seconds.append(time.perf_counter() - start)
    return gbit, statistics.median(seconds) / (2 * (WORLD - 1))


def steps(name: str | None, width: int, count: int) -> dict[str, float]:
    """Medians of a step under the exchange `name`; None: without any."""
    net = network(width)
    seen: list[StepMetrics] = []
    model = net if name is None else distributed(name, net, seen.append)
    draw = torch.Generator().manual_seed(dist.get_rank())
    seconds, cpu, sent = [], [], []
    for _ in range(count + WARM_UP):
        inputs = torch.randn(BATCH, width, generator=draw)
        model.zero_grad()
        dist.barrier()
        start, start_cpu, before = time.perf_counter(), time.process_time(), bytes_sent()
        model(inputs).square().mean().backward()
        seconds.append(time.perf_counter() - start)
        cpu.append(time.process_time() - start_cpu)
        sent.append(bytes_sent() - before)
    cell = {
        "seconds": statistics.median(seconds[WARM_UP:]),
        "cpu_seconds": statistics.median(cpu[WARM_UP:]),
        "wire_bytes": statistics.median(sent[WARM_UP:]),
    }
    for key in ("num_bytes", "compress_seconds", "exchange_seconds") if seen else ():
        cell[key] = statistics.median(getattr(each, key) for each in seen[WARM_UP:])
    return cell


def worker(rank: int, store: str) -> None:
    """Answer each line of standard input, a command in JSON, with one of standard output."""
    print("started", flush=True)
    sys.stdin.readline()  # the link is up
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    for line in sys.stdin:
        asked = json.loads(line)
        done: Any = probe() if asked["do"] == "probe" else steps(*asked["steps"])
        print(json.dumps(done), flush=True)


# The namespaces


def run(*words: str) -> None:
    subprocess.run(words, check=True)


class Processes:
    """WORLD processes in namespaces that are joined by a bridge in this one."""

    def __init__(self, folder: Path) -> None:
        run("ip", "link", "set", "lo", "up")
        run("ip", "link", "add", "br0", "type", "bridge")
        run("ip", "link", "set", "br0", "up")
        store = str(folder / f"store-{time.monotonic_ns()}")
        words = ["unshare", "--net", sys.executable, __file__, "--worker"]
        self._all = [
            subprocess.Popen(
                [*words, str(rank), store], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for rank in range(WORLD)
        ]
        for rank, each in enumerate(self._all):
            self._answer(each, 120)
            pid, port = str(each.pid), f"port{rank}"
            peer = ["peer", "name", "eth0", "netns", pid]
            run("ip", "link", "add", port, "type", "veth", *peer)
            run("ip", "link", "set", port, "master", "br0", "up")
            inside = ["nsenter", "--target", pid, "--net"]
            run(*inside, "ip", "address", "add", f"10.0.0.{rank + 1}/24", "dev", "eth0")
            run(*inside, "ip", "link", "set", "eth0", "up")
            run(*inside, "ip", "link", "set", "lo", "up")
        for each in self._all:
            self._say(each, "up")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for each in self._all:
            each.kill()
            each.communicate()
        run("ip", "link", "delete", "br0")
        for rank in range(WORLD):  # gone with its namespace, but maybe not yet
            subprocess.run(["ip", "link", "delete", f"port{rank}"], stderr=subprocess.DEVNULL)

    def shape(self, gbit: float) -> None:
        """Limit what each process sends and receives; the bucket holds 4 ms, 64 KiB at least."""
        burst = max(64 * 1024, round(gbit * 1e9 / 8 * 0.004))
        limit = ["tbf", "rate", f"{gbit * 1000:g}mbit", "burst", f"{burst}b", "latency", "50ms"]
        for rank, each in enumerate(self._all):
            run("tc", "qdisc", "replace", "dev", f"port{rank}", "root", *limit)
            inside = ["nsenter", "--target", str(each.pid), "--net"]
            run(*inside, "tc", "qdisc", "replace", "dev", "eth0", "root", *limit)

    def ask(self, command: dict[str, Any], seconds: float) -> Any:
        """Process 0's answer. Raises TimeoutError."""
        for each in self._all:
            self._say(each, json.dumps(command))
        first, *_ = [json.loads(self._answer(each, seconds)) for each in self._all]
        return first

    @staticmethod
    def _say(process: "subprocess.Popen[str]", line: str) -> None:
        assert process.stdin is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()

    @staticmethod
    def _answer(process: "subprocess.Popen[str]", seconds: float) -> str:
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], seconds)[0]:
            raise TimeoutError(f"no answer within {seconds:g} s")
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process ended with {process.wait()}")
        return line


def measure(asked: argparse.Namespace, file: Path | None) -> dict[str, Any]:
    """All cells that `file` lacks; it is written after each."""
    figures: dict[str, Any] = {"machine": machine(), "world": WORLD, "batch": BATCH, "cells": {}}
    if file is not None and file.exists():
        figures = json.loads(file.read_text())
    cells = figures["cells"]
    for size in asked.sizes:
        missing = [
            (gbit, name)
            for gbit in asked.links
            for name in asked.methods
            if name not in cells.get(size, {}).get(f"{gbit:g}", {}).get("methods", {})
        ]
        if not missing:
            continue
        with tempfile.TemporaryDirectory() as folder, Processes(Path(folder)) as processes:
            width = WIDTHS[size]
            here = cells.setdefault(size, {})
            spec = spec_of(width)
            here["parameters"] = spec.size
            if "costs" not in here:
                costs = measure_costs(spec)
                here["costs"] = {name: asdict(cost) for name, cost in costs.items()}
            shaped = None
            for gbit, name in missing:
                link = here.setdefault(f"{gbit:g}", {"methods": {}})
                if shaped != gbit:
                    processes.shape(gbit)
                    shaped = gbit
                    probed = processes.ask({"do": "probe"}, 300)
                    link["probe_gbit"], link["latency_seconds"] = probed
                    alone = processes.ask({"do": "steps", "steps": [None, width, 8]}, PATIENCE)
                    link["compute_seconds"] = alone["seconds"]
                command = {"do": "steps", "steps": [name, width, asked.steps]}
                cell = processes.ask(command, PATIENCE)
                link["methods"][name] = {**cell, "load": os.getloadavg()[0]}
                print(f"{size:5} {gbit:5g} Gbit/s {name:28} {cell}", flush=True)
                save(figures, file)
    return figures


# The table


def table(figures: dict[str, Any]) -> str:
    """Markdown: milliseconds and megabytes of a step, a row for each size and link."""
    lines = [
        "| parameters | link, probe | " + " | ".join(NAMES) + " |",
        "|---|---|" + "---|" * len(NAMES),
    ]
    for size, links in figures["cells"].items():
        for gbit in (f"{each:g}" for each in LINKS):
            if gbit not in links:
                continue
            link = links[gbit]
            cells = [_cell(link["methods"].get(name)) for name in NAMES]
            lines.append(
                f"| {size} | {gbit} Gbit/s, {link['probe_gbit']:.2g} | {' | '.join(cells)} |"
            )
    return "\n".join(lines)


def _cell(cell: dict[str, float] | None) -> str:
    if cell is None:
        return "-"
    return f"{1e3 * cell['seconds']:,.0f} ms, {cell['wire_bytes'] / 1e6:.3g} MB"


def enter_namespace() -> None:
    """Start this script again, in a network namespace that goes when it ends."""
    absent = [each for each in ("unshare", "nsenter", "ip", "tc") if shutil.which(each) is None]
    if absent:
        sys.exit(f"links are shaped with {', '.join(absent)}: install util-linux and iproute2")
    who = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    os.environ[INSIDE] = "1"
    os.execvp("unshare", ["unshare", *who, "--net", sys.executable, *sys.argv])


def main(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["--worker"]:
        worker(int(arguments[1]), arguments[2])
        return
    command = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    command.add_argument("--sizes", nargs="+", choices=WIDTHS, default=["1M", "8M"])
    command.add_argument("--links", nargs="+", type=float, choices=LINKS, default=LINKS)
    command.add_argument("--methods", nargs="+", choices=NAMES, default=NAMES)
    command.add_argument("--steps", type=int, default=8, help="counted steps, default 8")
    command.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    command.add_argument("--table", type=Path, metavar="FILE", help="print FILE's table, only")
    asked = command.parse_args(arguments)
    if asked.table is not None:
        print(table(json.loads(asked.table.read_text())))
        return
    if INSIDE not in os.environ:
        enter_namespace()
    print(table(measure(asked, asked.json)))


if __name__ == "__main__":
    main(sys.argv[1:])
