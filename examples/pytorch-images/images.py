"""Devices with photographs: a convolutional network that PyTorch trains on each device's own.

    python images.py model.safetensors        the model that the task begins with
    DEVICE=0 DEVICES=4 fedpress client join URL --app images:trainer --state-dir device-0
    fedpress simulate --task task.json --app images:device --clients 4

`IMAGES` names a folder with the four files of MNIST or Fashion-MNIST, as they are published;
without it there are scikit-learn's handwritten digits. See README.md for the whole run.
"""

from __future__ import annotations

import gzip
import os
import sys
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedpress import TorchTrainer
from fedpress.errors import ConfigurationError

SKEW = 0.5
"""Of the Dirichlet distribution of each class over the devices: the smaller, the less alike."""
HELD_OUT = 5
"""Every fifth image of a device is kept for the evaluation of models."""


def trainer() -> TorchTrainer:
    """For `fedpress client join --app images:trainer`: device DEVICE of DEVICES."""
    index, devices = _number("DEVICE"), _number("DEVICES")
    if index >= devices:
        raise ConfigurationError(f"DEVICE is {index} of DEVICES={devices}; it counts from 0")
    return device(index, devices)


def device(index: int, devices: int) -> TorchTrainer:
    """For `fedpress simulate --app images:device`."""
    images, labels = data(os.environ.get("IMAGES"))
    mine = share(labels, index, devices)
    held_out = np.arange(len(mine)) % HELD_OUT == 0
    parts = [
        TensorDataset(torch.from_numpy(images[rows]), torch.from_numpy(labels[rows]))
        for rows in (mine[~held_out], mine[held_out])
    ]
    return TorchTrainer(
        network(images.shape[-1]),
        nn.CrossEntropyLoss(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        parts[0],
        evaluation_data=parts[1],
    )


def network(side: int) -> nn.Module:
    """Scores of ten classes for images [n, 1, side, side]; equal in every process."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * (side // 4) ** 2, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def share(labels: npt.NDArray[np.int64], index: int, devices: int) -> npt.NDArray[np.int64]:
    """The rows of device `index`: its part of each class, drawn alike in every process."""
    rng = np.random.default_rng(0)
    rows = []
    for label in range(10):
        of_class = rng.permutation(np.flatnonzero(labels == label))
        ends = np.cumsum(rng.dirichlet([SKEW] * devices)) * len(of_class)
        begin = ends[index - 1] if index else 0.0
        rows.append(of_class[round(begin) : round(ends[index])])
    mine = np.sort(np.concatenate(rows))
    if len(mine) < 2 * HELD_OUT:
        raise ConfigurationError(
            f"device {index} of {devices} would have {len(mine)} images",
            hint="take fewer devices, or larger data by IMAGES",
        )
    return mine


@cache
def data(folder: str | None) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Images [n, 1, side, side] in [0, 1], and their classes [n]."""
    if folder:
        images = read(Path(folder) / "train-images-idx3-ubyte.gz", 3)
        labels = read(Path(folder) / "train-labels-idx1-ubyte.gz", 1)
        return (images[:, None] / 255).astype(np.float32), labels.astype(np.int64)
    from sklearn.datasets import load_digits

    digits = load_digits()
    return (digits.images[:, None] / 16).astype(np.float32), digits.target.astype(np.int64)


def read(file: Path, dimensions: int) -> npt.NDArray[np.uint8]:
    """The array in an IDX file; raises ConfigurationError if it is none of these dimensions."""
    try:
        content = gzip.decompress(file.read_bytes())
    except (OSError, EOFError) as exc:
        raise ConfigurationError(
            f"cannot read {file}: {exc}", hint="IMAGES must name the folder of the four .gz files"
        ) from exc
    head = 4 + 4 * dimensions
    shape = np.frombuffer(content[4:head].ljust(4 * dimensions, b"\0"), ">u4").astype(int)
    if content[:4] != bytes((0, 0, 8, dimensions)) or len(content) != head + shape.prod():
        raise ConfigurationError(f"{file} is no IDX file of bytes in {dimensions} dimensions")
    return np.frombuffer(content, np.uint8, offset=head).reshape(shape)


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.isdecimal():
        raise ConfigurationError(f"{name} is {text!r}; set it to a whole number")
    return int(text)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python images.py MODEL.safetensors")
    Path(sys.argv[1]).write_bytes(device(0, 1).initial_model().to_bytes())
