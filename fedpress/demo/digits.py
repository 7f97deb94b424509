"""The demo's data and model: scikit-learn's handwritten digits, split unevenly over the devices."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

from fedpress_client.torch_trainer import TorchTrainer
from fedpress_protocols.model import Model

NUM_CLASSES = 10
TEST_IMAGES = 540
"""Held out for the table's accuracy; no device ever sees them."""

_SMALLEST_SHARE = 10


class Images(NamedTuple):
    """`pixels` [n, 64] float32 in [0, 1], `labels` [n] int64."""

    pixels: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]

    def take(self, rows: npt.NDArray[np.int64]) -> Images:
        return Images(self.pixels[rows], self.labels[rows])


def split(seed: int, clients: int, concentration: float = 0.3) -> tuple[Images, list[Images]]:
    """The test images, and each client's own: Dirichlet(`concentration`) over the classes.

    Hsu et al. 2019, arXiv:1909.06335, Section 3.1. Drawn again until every client has a few.
    """
    pixels, labels = load_digits(return_X_y=True)
    everything = Images((pixels / 16).astype(np.float32), labels.astype(np.int64))
    rng = np.random.default_rng(seed)
    order = rng.permutation(labels.size)
    test, rest = order[:TEST_IMAGES], order[TEST_IMAGES:]
    while True:
        shares: list[list[npt.NDArray[np.int64]]] = [[] for _ in range(clients)]
        for digit in range(NUM_CLASSES):
            rows = rest[everything.labels[rest] == digit]
            proportions = rng.dirichlet([concentration] * clients)
            cuts = (np.cumsum(proportions)[:-1] * rows.size).astype(np.int64)
            for share, part in zip(shares, np.split(rows, cuts), strict=True):
                share.append(part)
        rows_of = [np.concatenate(share) for share in shares]
        if min(rows.size for rows in rows_of) >= min(_SMALLEST_SHARE, rest.size // (2 * clients)):
            return everything.take(test), [everything.take(rows) for rows in rows_of]


def network(seed: int) -> torch.nn.Module:
    """A perceptron 64-256-128-10: 50,826 parameters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.nn.Sequential(
            torch.nn.Linear(64, 256),
            torch.nn.ReLU(),
            torch.nn.Linear(256, 128),
            torch.nn.ReLU(),
            torch.nn.Linear(128, NUM_CLASSES),
        )


def trainer(seed: int, images: Images) -> TorchTrainer:
    """Plain SGD on one client's images; lengths and rates are the plan's."""
    return trainer_of(network(seed), images)


def trainer_of(network: torch.nn.Module, images: Images) -> TorchTrainer:
    """The same of another network."""
    data = TensorDataset(torch.from_numpy(images.pixels), torch.from_numpy(images.labels))
    return TorchTrainer(
        network,
        torch.nn.CrossEntropyLoss(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data,
    )


def accuracy(model: Model, images: Images) -> float:
    """The share of `images` that `model`, a perceptron with ReLU between, gets right."""
    hidden = images.pixels
    tensors = model.tensors()
    layers = sorted({name.rpartition(".")[0] for name in tensors}, key=int)
    for layer in layers:
        if layer != layers[0]:
            hidden = np.maximum(hidden, 0)
        hidden = hidden @ tensors[f"{layer}.weight"].T + tensors[f"{layer}.bias"]
    return float((hidden.argmax(axis=1) == images.labels).mean())
