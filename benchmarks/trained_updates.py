"""Real updates: what one client's epoch changes in a small network on scikit-learn's digits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from sklearn.datasets import load_digits
from torch import nn

_EPOCHS_BEFORE = 3
_CLIENT_IMAGES = 300


def updates(seed: int = 0) -> dict[str, npt.NDArray[np.float32]]:
    """A flat update [size] of an MLP and of a CNN, the same for the same seed and torch."""
    return {
        name: np.concatenate([part.ravel() for part in update.values()])
        for name, update in shaped(seed).items()
    }


def shaped(seed: int = 0) -> dict[str, dict[str, npt.NDArray[np.float32]]]:
    """The same updates, by the names of their tensors."""
    torch.manual_seed(seed)
    mlp = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
    mlp.append(nn.Linear(512, 10))
    cnn = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 64, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2048, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )
    return {"MLP": _update(mlp), "CNN": _update(cnn)}


def _update(model: nn.Module) -> dict[str, npt.NDArray[np.float32]]:
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32)
    classes = torch.tensor(labels, dtype=torch.int64)
    for _ in range(_EPOCHS_BEFORE):
        _epoch(model, images[_CLIENT_IMAGES:], classes[_CLIENT_IMAGES:])
    before = [parameter.detach().clone() for parameter in model.parameters()]
    _epoch(model, images[:_CLIENT_IMAGES], classes[:_CLIENT_IMAGES])
    return {
        name: (after.detach() - old).numpy()
        for (name, after), old in zip(model.named_parameters(), before, strict=True)
    }


def _epoch(model: nn.Module, images: torch.Tensor, classes: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for rows in torch.split(torch.randperm(len(classes)), 32):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[rows]), classes[rows]).backward()
        optimizer.step()
