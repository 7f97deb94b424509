"""Two sites with two processes each train one model; only the line between the sites is slow.

    torchrun --nproc-per-node 4 two_sites.py --out runs.json
    python two_sites.py --draw runs.json result.png

Inside a site gradients are summed in full, between the sites the first process of each sends them
for both: in float32, then compressed under error feedback. The handwritten digits of scikit-learn
are divided among the four processes; the accuracy is that on 360 images that none of them has.
"""

# No `from __future__ import annotations`: torch looks at a hook's annotations as objects.

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel

from fedpress.compressors import ErrorFeedback, TopK, Uncompressed
from fedpress.ddp import HookState, Sites, comm_hook

SITE = 2
"""Processes of a site."""
HELD_OUT = 360
METHODS: dict[str, Any] = {
    "float32": Uncompressed(),
    "top-k 1 %, feedback": ErrorFeedback(TopK(fraction=0.01, magnitude_bits=1)),
}


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    return torch.tensor(images[order] / 16, dtype=torch.float32), torch.tensor(labels[order])


def trained(compressor: Any, steps: int) -> list[tuple[int, int, float]]:
    """Steps, bytes that this process has sent to the other site until then, and the accuracy."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        *(torch.nn.Linear(64, 256), torch.nn.ReLU()),
        *(torch.nn.Linear(256, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)),
    )
    model = DistributedDataParallel(network)
    state = HookState(compressor, sites=Sites.of(SITE))
    model.register_comm_hook(state, comm_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    images, labels = digits()
    own = torch.arange(HELD_OUT + dist.get_rank(), len(labels), dist.get_world_size())
    draw = torch.Generator().manual_seed(dist.get_rank())
    curve = []
    for step in range(1, steps + 1):
        rows = own[torch.randint(len(own), (16,), generator=draw)]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()
        if step % 20 == 0 or step == steps:
            with torch.no_grad():
                right = network(images[:HELD_OUT]).argmax(1) == labels[:HELD_OUT]
            curve.append((step, state.sent.num_bytes, right.float().mean().item()))
    return curve


def run(out: Path, steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    curves = {name: trained(compressor, steps) for name, compressor in METHODS.items()}
    if dist.get_rank() == 0:
        for name, curve in curves.items():
            _, num_bytes, accuracy = curve[-1]
            print(f"{name:20} {accuracy:.1%} after {num_bytes:,} bytes from site to site")
        out.write_text(json.dumps(curves))
    dist.destroy_process_group()


def draw(runs: Path, picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_step, by_bytes) = pyplot.subplots(
        1, 2, figsize=(11, 4.5), layout="constrained", sharey=True
    )
    for name, curve in json.loads(runs.read_text()).items():
        steps, sizes, accuracies = zip(*curve, strict=True)
        by_step.plot(steps, accuracies, ".-", label=name)
        by_bytes.plot([size / 1e6 for size in sizes], accuracies, ".-", label=name)
    by_step.set(xlabel="step", ylabel="accuracy")
    by_bytes.set(xlabel="sent from one site to the other, MB (log scale)", xscale="log")
    by_step.legend()
    for axes in (by_step, by_bytes):
        axes.grid(alpha=0.3, which="both")
    figure.savefig(picture, dpi=100)


def main() -> None:
    command = argparse.ArgumentParser(description="Two sites with a slow line between them.")
    command.add_argument("--out", type=Path, default=Path("runs.json"))
    command.add_argument("--steps", type=int, default=400)
    command.add_argument("--draw", type=Path, nargs=2, metavar=("RUNS", "PICTURE"))
    asked = command.parse_args()
    if asked.draw:
        draw(*asked.draw)
    else:
        run(asked.out, asked.steps)


if __name__ == "__main__":
    main()
