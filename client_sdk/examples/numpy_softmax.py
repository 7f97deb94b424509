"""Softmax regression in numpy alone: a Trainer needs no torch.

    fedpress join URL --app numpy_softmax:make_trainer

run in this folder, for a task that was begun with `initial_model()`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedpress_client import Evaluation, Model, Trained, Work

Array = npt.NDArray[np.float32]


class SoftmaxTrainer:
    """Mini-batch gradient descent on the cross entropy of `inputs` [n, features], `labels` [n]."""

    def __init__(
        self,
        inputs: Array,
        labels: npt.NDArray[np.int64],
        *,
        learning_rate: float = 0.5,
        batch_size: int = 32,
        local_epochs: int = 1,
        held_out: float = 0.2,
    ) -> None:
        split = len(inputs) - int(held_out * len(inputs))
        self.inputs, self.labels = inputs[:split], labels[:split]
        self.test_inputs, self.test_labels = inputs[split:], labels[split:]
        self.learning_rate, self.batch_size = learning_rate, batch_size
        self.local_epochs = local_epochs

    def train(self, model: Model, work: Work) -> Trained:
        terms = work.terms
        tensors = model.tensors()
        weight, bias = tensors["weight"].copy(), tensors["bias"].copy()
        rng = np.random.default_rng(work.seed)
        rate = terms.learning_rate or self.learning_rate
        size = (terms.batch_size or self.batch_size) * terms.gradient_accumulation
        per_epoch = -(-len(self.inputs) // size)
        steps = terms.local_steps or per_epoch * (terms.local_epochs or self.local_epochs)
        order = rng.permutation(len(self.inputs))
        for step in range(steps):
            turn = step % per_epoch
            if step and turn == 0:
                order = rng.permutation(len(self.inputs))
            batch = order[turn * size : (turn + 1) * size]
            inputs, labels = self.inputs[batch], self.labels[batch]
            error = softmax(inputs @ weight + bias)
            error[np.arange(len(batch)), labels] -= 1
            weight -= rate * (inputs.T @ error) / np.float32(len(batch))
            bias -= rate * error.mean(axis=0)
        parameters = model.spec.flatten({"weight": weight, "bias": bias})
        return Trained(parameters, len(self.inputs))

    def evaluate(self, model: Model) -> Evaluation | None:
        if not len(self.test_inputs):
            return None
        tensors = model.tensors()
        scores = softmax(self.test_inputs @ tensors["weight"] + tensors["bias"])
        count = len(self.test_labels)
        right = scores[np.arange(count), self.test_labels]
        return Evaluation(
            count,
            {
                "accuracy": float((scores.argmax(axis=1) == self.test_labels).mean()),
                "loss": float(-np.log(np.maximum(right, 1e-12)).mean()),
            },
        )


def softmax(scores: Array) -> Array:
    """Rows of probabilities."""
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares: Array = powers / powers.sum(axis=1, keepdims=True)
    return shares


def initial_model(features: int = 8, classes: int = 3) -> Model:
    return Model.from_tensors(
        {
            "weight": np.zeros((features, classes), np.float32),
            "bias": np.zeros(classes, np.float32),
        }
    )


def make_trainer(seed: int | None = None, examples: int = 300) -> SoftmaxTrainer:
    """A trainer on made-up data: three clouds of points, the same three for every device."""
    centres = np.random.default_rng(0).normal(size=(3, 8))
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, examples)
    inputs = centres[labels] + rng.normal(scale=0.8, size=(examples, 8))
    return SoftmaxTrainer(inputs.astype(np.float32), labels)
