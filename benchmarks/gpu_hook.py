"""A data-parallel step on a GPU with NCCL: no hook, torch's hooks and ours, and whether ours sends
the same bytes from the device as from the host.

    python benchmarks/gpu_hook.py [--width 1024] [--batch 64] [--steps 20] [--json FILE]

One process, so that nothing crosses a network and a hook can only lose; NCCL takes no two
processes on one GPU. Eight square layers of `--width`. Milliseconds are medians of whole steps:
forward, backward and exchange. Each row of ours is a process of its own, since FEDPRESS_KERNELS is
read at import: "device" is `triton`, "host" the kernels of the CPU. The digests are of the means of
all steps, of the residuals after them and of the number of bytes sent.
"""

# No `from __future__ import annotations`: torch looks at a hook's annotations as objects.

import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from data_parallel_links import network
from harness import machine, parser, report
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

TOPK: Mapping[str, Any] = {
    "id": "error_feedback",
    "inner": {"id": "topk", "fraction": 0.01},
}
RARE: Mapping[str, Any] = {
    "id": "error_feedback",
    "inner": {"id": "topk", "fraction": 0.001},
}
OURS = {"top-k 1 %": TOPK, "top-k .1 %": RARE}
THEIRS = ("no hook", "torch, fp16", "torch, PowerSGD of rank 2")
WARM_UP = 5


def stepped(name: str, width: int, batch: int, steps: int) -> dict[str, Any]:
    """Milliseconds of the steps under the hook `name`, and digests of what it gave."""
    from fedpress.ddp import HookState, comm_hook
    from fedpress_compression.compressor import from_config

    model = DistributedDataParallel(network(width).cuda())
    state = None
    if name in OURS:
        state = HookState(from_config(OURS[name]), plain_steps=1)
        model.register_comm_hook(state, comm_hook)
    elif name == THEIRS[1]:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name == THEIRS[2]:
        low_rank = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=2
        )
        model.register_comm_hook(low_rank, powerSGD_hook.powerSGD_hook)
    draw = torch.Generator(device="cuda").manual_seed(0)
    means, taken = hashlib.sha256(), []
    for _ in range(WARM_UP + steps):
        inputs = torch.randn((batch, width), generator=draw, device="cuda")
        model.zero_grad()
        torch.cuda.synchronize()
        start = time.perf_counter()
        model(inputs).square().mean().backward()
        torch.cuda.synchronize()
        taken.append(1e3 * (time.perf_counter() - start))
        for parameter in model.parameters():
            assert parameter.grad is not None
            means.update(parameter.grad.cpu().numpy().tobytes())
    found: dict[str, Any] = {"ms": statistics.median(taken[WARM_UP:]), "means": means.hexdigest()}
    if state is not None:
        assert state.metrics is not None
        kept = hashlib.sha256()
        for residual in state.exchange.residuals().values():
            kept.update(residual.tobytes())
        found |= {"residuals": kept.hexdigest(), "bytes": state.sent.num_bytes}
        found["step_bytes"] = state.metrics.num_bytes
    return found


def process(names: list[str], width: int, batch: int, steps: int) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{Path(folder, 'store')}"
        torch.cuda.set_device(0)
        dist.init_process_group("nccl", init_method=store, rank=0, world_size=1)
        print(json.dumps({name: stepped(name, width, batch, steps) for name in names}))
        dist.destroy_process_group()


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    lines = ["| hook | step, ms | bytes of a step |", "|---|---|---|"]
    for name, row in rows.items():
        num_bytes = f"{row['step_bytes']:,}" if "step_bytes" in row else ""
        lines.append(f"| {name} | {row['ms']:.2f} | {num_bytes} |")
    return "\n".join(lines)


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--width", type=int, default=1024)
    command.add_argument("--batch", type=int, default=64)
    command.add_argument("--steps", type=int, default=20)
    command.add_argument("--rows", nargs="+", help="run these in this process and print JSON")
    asked = command.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU that torch can use, and there is none")
    sizes = asked.width, asked.batch, asked.steps
    if asked.rows is not None:
        process(asked.rows, *sizes)
        return
    rows: dict[str, Any] = {}
    for selected, names in (("host", [*THEIRS, *OURS]), ("device", [*OURS])):
        own = {k: v for k, v in os.environ.items() if k != "FEDPRESS_KERNELS"}
        if selected == "device":
            own["FEDPRESS_KERNELS"] = "triton"
        again = [sys.executable, __file__, "--rows", *names]
        again += [f"--{k}={v}" for k, v in zip(("width", "batch", "steps"), sizes, strict=True)]
        done = subprocess.run(again, env=own, check=True, stdout=subprocess.PIPE, text=True)
        for name, row in json.loads(done.stdout.splitlines()[-1]).items():
            rows[f"{name}, {selected}" if name in OURS else name] = row
    for name in OURS:
        pair = rows[f"{name}, host"], rows[f"{name}, device"]
        for key in ("means", "residuals", "bytes"):
            if pair[0][key] != pair[1][key]:
                raise SystemExit(f"{name}: {key} differ between device and host")
    figures = {"gpu": torch.cuda.get_device_name(), "machine": machine(), "rows": rows}
    print(f"{torch.cuda.get_device_name()}, {8 * (sizes[0] + 1) * sizes[0]:,} parameters")
    report(table(rows), figures, asked.json)
    print("means, residuals and bytes are the same from device and host")


if __name__ == "__main__":
    main()
