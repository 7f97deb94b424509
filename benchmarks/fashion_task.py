"""The Fashion-MNIST task of the benchmarks: a small convolutional network, 106,122 parameters.

100 clients of 256 images each, split by Dirichlet(0.1) over the classes, 10 of them a round, 8
local steps of batches of 32. Needs torch, and the four files of the data set in a folder.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from fedpress_compression.tensors import ModelSpec, TensorSpec, Vector

CLIENTS, COHORT, IMAGES, BATCH = 100, 10, 256, 32
CONCENTRATION, LEARNING_RATE = 0.1, 0.1
TEST_IMAGES = 2000

_SHAPES = {
    "conv1.weight": (16, 1, 5, 5),
    "conv1.bias": (16,),
    "conv2.weight": (32, 16, 3, 3),
    "conv2.bias": (32,),
    "fc1.weight": (64, 1568),
    "fc1.bias": (64,),
    "fc2.weight": (10, 64),
    "fc2.bias": (10,),
}
SPEC = ModelSpec(tuple(TensorSpec(name, shape) for name, shape in _SHAPES.items()))
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Fashion:
    """`pixels` [n, 1, 28, 28] and `labels` [n], the last TEST_IMAGES for testing."""

    pixels: torch.Tensor
    labels: torch.Tensor
    clients: tuple[Rows, ...]

    @classmethod
    def split(cls, folder: Path, seed: int) -> Fashion:
        """Each client draws its images from classes in its own proportions."""
        torch.set_num_threads(1)
        pixels, labels = idx(folder, "train-images-idx3"), idx(folder, "train-labels-idx1")
        test = idx(folder, "t10k-images-idx3"), idx(folder, "t10k-labels-idx1")
        rng = np.random.default_rng(seed)
        pools = [rng.permutation(np.flatnonzero(labels == c)).tolist() for c in range(10)]
        clients = []
        for _ in range(CLIENTS):
            proportions = rng.dirichlet([CONCENTRATION] * 10)
            rows: list[int] = []
            for c in rng.choice(10, IMAGES, p=proportions).tolist():
                largest = max(range(10), key=lambda other: len(pools[other]))
                rows.append(pools[c if pools[c] else largest].pop())
            clients.append(np.array(rows, np.int64))
        every = np.concatenate([pixels, test[0][:TEST_IMAGES]]).astype(np.float32)
        scaled = torch.from_numpy((every / 255 - 0.286) / 0.353).unsqueeze(1)
        both = np.concatenate([labels, test[1][:TEST_IMAGES]]).astype(np.int64)
        return cls(scaled, torch.from_numpy(both), tuple(clients))

    def update(
        self,
        model: Vector,
        client: int,
        rng: np.random.Generator,
        rate: float = LEARNING_RATE,
        support: Rows | None = None,
    ) -> Vector:
        """The update of `client` to `model` in one pass over its images: the new less the old, zero
        outside `support`."""
        rows = torch.from_numpy(rng.permutation(self.clients[client]))
        flat = torch.from_numpy(model.copy())
        outside = torch.ones(flat.numel(), dtype=torch.bool)
        outside[slice(None) if support is None else torch.from_numpy(support)] = False
        for batch in rows.split(BATCH):
            flat.requires_grad_(True)
            scores = _forward(flat, self.pixels[batch])
            loss = torch.nn.functional.cross_entropy(scores, self.labels[batch])
            (gradient,) = torch.autograd.grad(loss, flat)
            flat = flat.detach().add_(gradient.masked_fill_(outside, 0), alpha=-rate)
        return flat.numpy() - model

    def accuracy(self, model: Vector) -> float:
        """The share of the test images that `model` gets right."""
        with torch.no_grad():
            scores = _forward(torch.from_numpy(model), self.pixels[-TEST_IMAGES:])
        return float((scores.argmax(1) == self.labels[-TEST_IMAGES:]).float().mean())


def first_model(seed: int) -> Vector:
    """He et al. 2015: normal weights of variance 2 / inputs, biases zero."""
    rng = np.random.default_rng([seed, 1])
    flat = np.zeros(SPEC.size, np.float32)
    for name, shape in _SHAPES.items():
        if len(shape) > 1:
            part = SPEC.slices[name]
            scale = np.sqrt(2 / np.prod(shape[1:]))
            flat[part] = scale * rng.standard_normal(part.stop - part.start)
    return flat


def cohorts(seed: int, rounds: int) -> list[list[int]]:
    """Who takes part in each round."""
    rng = np.random.default_rng([seed, 2])
    return [rng.choice(CLIENTS, COHORT, replace=False).tolist() for _ in range(rounds)]


def _forward(flat: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
    at = {name: flat[SPEC.slices[name]].view(shape) for name, shape in _SHAPES.items()}
    functional = torch.nn.functional
    hidden = functional.conv2d(pixels, at["conv1.weight"], at["conv1.bias"], 2, 2).relu()
    hidden = functional.conv2d(hidden, at["conv2.weight"], at["conv2.bias"], 2, 1).relu()
    hidden = functional.linear(hidden.flatten(1), at["fc1.weight"], at["fc1.bias"]).relu()
    return functional.linear(hidden, at["fc2.weight"], at["fc2.bias"])


def idx(folder: Path, name: str) -> npt.NDArray[np.uint8]:
    """An array in the format of LeCun's MNIST page."""
    data = gzip.decompress((folder / f"{name}-ubyte.gz").read_bytes())
    extents = np.frombuffer(data, ">u4", data[3], 4).astype(int)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(extents)
