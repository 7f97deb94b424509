"""The demo devices of the compose files: handwritten digits, a small perceptron, numpy alone.

    fedpress client join URL --app digits:trainer    one device; its host name chooses its images
    python digits.py FILE                            write the initial model

The trainer shows that a device needs no deep learning framework: any object with these two methods
will do.
"""

import hashlib
import socket
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
from sklearn.datasets import load_digits

from fedpress import Evaluation, Model, Trained, TrainingRequest

IMAGES_PER_DEVICE = 200
Tensors = dict[str, npt.NDArray[np.float32]]


class Perceptron:
    """64-96-10 with ReLU and cross-entropy, trained by plain SGD."""

    def __init__(self, pixels: npt.NDArray[np.float32], labels: npt.NDArray[np.int64]) -> None:
        self.pixels, self.labels = pixels, labels

    def train(self, model: Model, work: TrainingRequest) -> Trained:
        terms, rng = work.terms, np.random.default_rng(work.seed)
        rate, batch_size = terms.learning_rate or 0.1, terms.batch_size or 16
        weights = {name: tensor.copy() for name, tensor in model.tensors().items()}
        for _ in range(terms.local_epochs or 1):
            order = rng.permutation(self.labels.size)
            for start in range(0, order.size, batch_size):
                batch = order[start : start + batch_size]
                for name, gradient in self.gradients(weights, batch).items():
                    weights[name] -= np.float32(rate) * gradient
        return Trained(model.spec.flatten(weights), num_examples=self.labels.size)

    def evaluate(self, model: Model) -> Evaluation:
        _, scores = forward(model.tensors(), self.pixels)
        hits = float((scores.argmax(axis=1) == self.labels).mean())
        return Evaluation(self.labels.size, {"accuracy": hits})

    def gradients(self, weights: Tensors, batch: npt.NDArray[np.int64]) -> Tensors:
        pixels = self.pixels[batch]
        hidden, scores = forward(weights, pixels)
        error = np.exp(scores - scores.max(axis=1, keepdims=True))
        error /= error.sum(axis=1, keepdims=True)
        error[np.arange(batch.size), self.labels[batch]] -= 1
        error /= batch.size
        below = (error @ weights["out.weight"].T) * (hidden > 0)
        return {
            "hidden.weight": pixels.T @ below,
            "hidden.bias": below.sum(axis=0),
            "out.weight": hidden.T @ error,
            "out.bias": error.sum(axis=0),
        }


def forward(
    weights: Tensors, pixels: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    hidden = np.maximum(pixels @ weights["hidden.weight"] + weights["hidden.bias"], 0)
    return hidden, hidden @ weights["out.weight"] + weights["out.bias"]


def trainer() -> Perceptron:
    """A share of the images that leans towards a few digits, the same at every start."""
    seed = int.from_bytes(hashlib.sha256(socket.gethostname().encode()).digest()[:8], "big")
    rng = np.random.default_rng(seed)
    pixels, labels = load_digits(return_X_y=True)
    liking = rng.dirichlet(np.full(10, 0.3))[labels] + 1e-3
    mine = rng.choice(labels.size, IMAGES_PER_DEVICE, replace=False, p=liking / liking.sum())
    return Perceptron((pixels[mine] / 16).astype(np.float32), labels[mine].astype(np.int64))


def initial_model() -> Model:
    rng = np.random.default_rng(0)

    def layer(rows: int, columns: int) -> npt.NDArray[np.float32]:
        spread = float(np.sqrt(2 / rows))
        return (rng.standard_normal((rows, columns)) * spread).astype(np.float32)

    return Model.from_tensors(
        {
            "hidden.weight": layer(64, 96),
            "hidden.bias": np.zeros(96, np.float32),
            "out.weight": layer(96, 10),
            "out.bias": np.zeros(10, np.float32),
        }
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(initial_model().to_bytes())
