"""Softmax regression in numpy alone: a Trainer needs no torch.

    fedpress client join URL --app numpy_softmax:make_trainer

run in this folder, for a task that was begun with `initial_model()`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedpress import Evaluation, Model, Trained, TrainingRequest

Array = npt.NDArray[np.float32]


class SoftmaxTrainer:
    """Mini-batch gradient descent on the cross entropy of `inputs` [n, features], `labels` [n]."""

    honours = frozenset({"proximal", "control", "full_batch", "restricted", "steps", "loss"})

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

    def train(self, model: Model, work: TrainingRequest) -> Trained:
        terms, spec, flat = work.terms, model.spec, model.parameters.copy()
        tensors = spec.unflatten(flat)  # views: a step moves `flat`
        weight, bias = tensors["weight"], tensors["bias"]
        moving = slice(None) if work.support is None else work.support
        rng = np.random.default_rng(work.seed)
        rate = terms.learning_rate or self.learning_rate
        size = (terms.batch_size or self.batch_size) * terms.gradient_accumulation
        per_epoch = -(-len(self.inputs) // size)
        steps = terms.local_steps or per_epoch * (terms.local_epochs or self.local_epochs)
        if work.full_batch:
            size, per_epoch, steps = len(self.inputs), 1, 1
        report = {"steps": steps, "loss": self._loss(model, self.inputs, self.labels)}
        order = rng.permutation(len(self.inputs))
        for step in range(steps):
            turn = step % per_epoch
            if step and turn == 0:
                order = rng.permutation(len(self.inputs))
            batch = order[turn * size : (turn + 1) * size]
            inputs, labels = self.inputs[batch], self.labels[batch]
            error = softmax(inputs @ weight + bias)
            error[np.arange(len(batch)), labels] -= 1
            slope = (inputs.T @ error) / np.float32(len(batch))
            gradient = spec.flatten({"weight": slope, "bias": error.mean(axis=0)})
            gradient += work.added(model, flat)
            flat[moving] -= rate * gradient[moving]
        return Trained(flat, len(self.inputs), report=report)

    def evaluate(self, model: Model) -> Evaluation | None:
        if not len(self.test_inputs):
            return None
        tensors = model.tensors()
        scores = self.test_inputs @ tensors["weight"] + tensors["bias"]
        is_right = scores.argmax(axis=1) == self.test_labels
        metrics = {
            "accuracy": float(is_right.mean()),
            "loss": self._loss(model, self.test_inputs, self.test_labels),
        }
        labels = {str(label): self.test_labels == label for label in np.unique(self.test_labels)}
        classes = {k: (int(own.sum()), int((own & is_right).sum())) for k, own in labels.items()}
        return Evaluation(len(self.test_labels), metrics, classes)

    def _loss(self, model: Model, inputs: Array, labels: npt.NDArray[np.int64]) -> float:
        tensors = model.tensors()
        shares = softmax(inputs @ tensors["weight"] + tensors["bias"])
        right = shares[np.arange(len(labels)), labels]
        return float(-np.log(np.maximum(right, 1e-12)).mean())


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
