"""Two processes train a convolutional network together: DGC beside SGD in float32.

    python benchmarks/data_parallel_fashion.py --data FOLDER [--seeds 6] [--only WORD...]
    python benchmarks/data_parallel_fashion.py --data FOLDER --tune .05 .1 .2 --seeds 2

Fashion-MNIST, 1.04 million parameters in two convolutions and two layers, half of 30,000 images in
each process, batches of 32 in each. The rest, and all options, are those of
benchmarks/data_parallel_digits.py. The rates are the best of .025, .05, .1 and .2 for each, by
`--tune` with two seeds; there .1 was as good for float32 as .05, and has a row of its own.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch
from data_parallel_digits import Task, main
from fashion_task import idx

TRAINED, TESTED = 30_000, 10_000
FLOAT32 = "float32, falling rate"
ROWS = {
    FLOAT32: {"id": "none", "rate": 0.05, "falls": True},
    "dgc, top-k .3 % ternary, falling rate": {
        "id": "dgc",
        "inner": {"id": "topk", "fraction": 0.003, "magnitude_bits": 0},
        "optimizer_momentum": 0.0,
        "sparsities": [[0.05, 12], [0.0125, 12], [0.004, 12]],
        "plain_steps": 0,
        "rate": 0.1,
        "falls": True,
        "like": FLOAT32,
    },
    "float32, falling rate of .1": {"id": "none", "rate": 0.1, "falls": True},
}


def network() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 5, 2, 2),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 3, 1, 1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(1568, 656),
        torch.nn.ReLU(),
        torch.nn.Linear(656, 10),
    )


@cache
def _images(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The 60,000 training images, then the 10,000 for testing."""
    both = [
        np.concatenate([idx(folder, f"{part}-{what}") for part in ("train", "t10k")])
        for what in ("images-idx3", "labels-idx1")
    ]
    pixels = torch.from_numpy((both[0].astype(np.float32) / 255 - 0.286) / 0.353)
    return pixels.unsqueeze(1), torch.from_numpy(both[1].astype(np.int64))


def fashion(seed: int, is_tuning: bool, folder: Path | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The images to test on, then 30,000 to train with. Tuning tests on 10,000 training images."""
    assert folder is not None
    pixels, labels = _images(folder)
    order = np.random.default_rng(seed).permutation(60_000)
    held_out = order[-TESTED:] if is_tuning else np.arange(60_000, 70_000)
    rows = torch.from_numpy(np.concatenate([held_out, order[:TRAINED]]))
    return pixels[rows], labels[rows]


FASHION = Task(
    network, fashion, TESTED, batch=32, epochs=3, rows=ROWS, source=Path("Fashion-MNIST")
)

if __name__ == "__main__":
    main(FASHION, __doc__)
