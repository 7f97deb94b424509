"""Built-in tasks of the simulator: data, models, local training.

    digits              scikit-learn's handwritten digits, a perceptron 64-256-128-10 in numpy
    fashion-mnist:DIR   the four files of Fashion-MNIST, a small convolutional network in torch
    shakespeare:DIR     the plays as text, the next character by a GRU in torch; a role is a group

DIR has train-images-idx3-ubyte.gz and its three sisters, or the plays as .txt or in plays.tar.xz.
"""

from __future__ import annotations

import gzip
import math
import zlib
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from fedpress.simulate.partition import Partition, Rows
from fedpress.simulate.plays import roles
from fedpress_client.trainer import Evaluation, Trained, Trainer, TrainingRequest
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_protocols.errors import ConfigurationError, MissingExtra
from fedpress_protocols.model import Model

if TYPE_CHECKING:
    from fedpress_client.torch_trainer import TorchTrainer

Array = npt.NDArray[Any]
_LARGEST_FILE = 64 * 2**20


@dataclass(frozen=True)
class Data:
    """`inputs` [n, ...] and `targets` [n, ...] to learn from, others to test on; `labels` [n] are
    what partitions go by, `groups` [n] those that the data came in."""

    inputs: Array
    targets: Array
    labels: Rows
    test_inputs: Array
    test_targets: Array
    groups: Rows | None = None


_USUAL = Partition()


@dataclass(frozen=True)
class Task:
    """Equal tasks give equal data, shares and models, in any process."""

    data: str = "digits"
    folder: str = ""
    clients: int = 100
    partition: Partition = _USUAL
    seed: int = 0
    device: str = "cpu"

    @classmethod
    def parse(cls, text: str, clients: int, partition: Partition, seed: int, device: str) -> Task:
        """`text` as typed, data or data:folder; raises ConfigurationError."""
        data, _, folder = text.partition(":")
        if data not in _KINDS:
            raise ConfigurationError(f"no data {data!r}; known are {', '.join(_KINDS)}")
        if (data == "digits") == bool(folder):
            due = "digits" if data == "digits" else f"{data}:DIR"
            raise ConfigurationError(f"--data {text}, where {due} is due")
        return cls(data, folder, clients, partition, seed, device)

    def initial_model(self) -> Model:
        return _KINDS[self.data].initial_model(self)

    def trainer(self, index: int) -> Trainer:
        """Return the trainer of the client `index`, with its own examples.
        ---"""
        return _KINDS[self.data].trainer(self, _shares(self)[index])

    def evaluate(self, model: Model) -> dict[str, float]:
        """Loss and accuracy on the test examples."""
        evaluation = _KINDS[self.data].trainer(self, np.empty(0, np.int64)).evaluate(model)
        return {} if evaluation is None else dict(evaluation.metrics)

    def load(self) -> Data:
        return _data(self.data, self.folder)


class _Kind(Protocol):
    def read(self, folder: Path) -> Data: ...

    def initial_model(self, task: Task) -> Model: ...

    def trainer(self, task: Task, rows: Rows) -> Trainer: ...


@lru_cache(maxsize=2)
def _data(name: str, folder: str) -> Data:
    return _KINDS[name].read(Path(folder).expanduser())


@lru_cache(maxsize=2)
def _shares(task: Task) -> list[Rows]:
    data = task.load()
    return task.partition.deal(data.labels, task.clients, task.seed, data.groups)


# Handwritten digits: a perceptron in numpy


class PerceptronTrainer:
    """Mini-batch gradient descent on the cross entropy of a perceptron with ReLU between layers.

    Its tensors are torch's for a Sequential of Linear and ReLU. It tests on what it is given for
    that, and not at all without.
    """

    honours = frozenset({"proximal", "control", "full_batch", "restricted", "steps", "loss"})

    def __init__(
        self,
        inputs: Array,
        labels: Rows,
        test: tuple[Array, Rows] | None = None,
        *,
        learning_rate: float = 0.2,
        batch_size: int = 16,
        local_epochs: int = 5,
    ) -> None:
        self._inputs, self._labels, self._test = inputs, labels, test
        self._rate, self._batch, self._epochs = learning_rate, batch_size, local_epochs

    def train(self, model: Model, work: TrainingRequest) -> Trained:
        terms, flat = work.terms, model.parameters.copy()
        count = len(self._inputs)
        size = (terms.batch_size or self._batch) * terms.gradient_accumulation
        rate = np.float32(terms.learning_rate or self._rate)
        per_epoch = -(-count // size)
        steps = terms.local_steps or per_epoch * (terms.local_epochs or self._epochs)
        if work.full_batch:
            size, per_epoch, steps = count, 1, 1
        moving = slice(None) if work.support is None else work.support
        rng = np.random.default_rng(work.seed)
        order, first_loss = rng.permutation(count), 0.0
        if "loss" in work.report:
            first_loss = _perceptron(model.spec, flat, self._inputs, self._labels)[0]
        loss = 0.0
        for step in range(steps):
            turn = step % per_epoch
            if step and not turn:
                order = rng.permutation(count)
            batch = order[turn * size : (turn + 1) * size]
            loss, _, gradient = _perceptron(
                model.spec, flat, self._inputs[batch], self._labels[batch]
            )
            if work.proximal or work.correction is not None:
                gradient = gradient + work.added(model, flat)
            flat[moving] -= rate * gradient[moving]
        return Trained(flat, count, {"loss": loss}, {"steps": steps, "loss": first_loss})

    def evaluate(self, model: Model) -> Evaluation | None:
        if self._test is None:
            return None
        loss, right, _ = _perceptron(model.spec, model.parameters, *self._test)
        return Evaluation(len(self._test[1]), {"loss": loss, "accuracy": right})


def _perceptron(
    spec: ModelSpec, flat: Vector, inputs: Array, labels: Rows
) -> tuple[float, float, Vector]:
    """Mean cross entropy, the share that is right, and the gradient [spec.size] of the former."""
    tensors = spec.unflatten(flat)
    layers = [tensor.name.rpartition(".")[0] for tensor in spec.trained[::2]]
    outputs = [inputs]
    for layer in layers:
        activations = outputs[-1] if layer == layers[0] else np.maximum(outputs[-1], 0)
        outputs.append(activations @ tensors[f"{layer}.weight"].T + tensors[f"{layer}.bias"])
    scores = outputs[-1] - outputs[-1].max(axis=1, keepdims=True)
    shares = np.exp(scores)
    shares /= shares.sum(axis=1, keepdims=True)
    own = shares[np.arange(labels.size), labels]
    loss = float(-np.log(np.maximum(own, np.float32(1e-30))).mean())
    right = float((scores.argmax(axis=1) == labels).mean())
    back = shares
    back[np.arange(labels.size), labels] -= 1
    back /= np.float32(labels.size)
    gradients = {}
    for place in reversed(range(len(layers))):
        layer = layers[place]
        activations = outputs[place] if place == 0 else np.maximum(outputs[place], 0)
        gradients[f"{layer}.weight"], gradients[f"{layer}.bias"] = (
            back.T @ activations,
            back.sum(axis=0),
        )
        if place:
            back = (back @ tensors[f"{layer}.weight"]) * (outputs[place] > 0)
    return loss, right, spec.flatten(gradients)


class _Digits:
    _SIZES = (64, 256, 128, 10)
    _TEST = 360

    def read(self, folder: Path) -> Data:
        try:
            from sklearn.datasets import load_digits
        except ModuleNotFoundError as exc:
            raise MissingExtra(
                "the digits come with scikit-learn", hint="pip install 'fedpress[demo]'"
            ) from exc
        pixels, labels = load_digits(return_X_y=True)
        pixels, labels = (pixels / 16).astype(np.float32), labels.astype(np.int64)
        order = np.random.default_rng(0).permutation(labels.size)
        rest, test = order[self._TEST :], order[: self._TEST]
        return Data(pixels[rest], labels[rest], labels[rest], pixels[test], labels[test])

    def initial_model(self, task: Task) -> Model:
        """Uniform within 1 / sqrt(inputs), as torch begins."""
        rng = np.random.default_rng([task.seed, 1])
        tensors = {}
        for place, (inputs, outputs) in enumerate(pairwise(self._SIZES)):
            for name, shape in (("weight", (outputs, inputs)), ("bias", (outputs,))):
                values = rng.uniform(-1, 1, shape) / np.sqrt(inputs)
                tensors[f"{2 * place}.{name}"] = values.astype(np.float32)
        return Model.from_tensors(tensors)

    def trainer(self, task: Task, rows: Rows) -> Trainer:
        data = task.load()
        test = (data.test_inputs, data.test_targets)
        return PerceptronTrainer(data.inputs[rows], data.targets[rows], test)


# In torch: Fashion-MNIST and Shakespeare


class _Fashion:
    _TEST = 2000

    def read(self, folder: Path) -> Data:
        images, labels = _idx(folder, "train-images-idx3"), _idx(folder, "train-labels-idx1")
        test = _idx(folder, "t10k-images-idx3")[: self._TEST]
        test_labels = _idx(folder, "t10k-labels-idx1")[: self._TEST]
        own, others = labels.astype(np.int64), test_labels.astype(np.int64)
        return Data(images[:, None], own, own, self._scaled(test[:, None]), others)

    def initial_model(self, task: Task) -> Model:
        return self._torch(task, np.empty(0, np.int64)).initial_model()

    def trainer(self, task: Task, rows: Rows) -> Trainer:
        return self._torch(task, rows)

    def _torch(self, task: Task, rows: Rows) -> TorchTrainer:
        data = task.load()
        pair = (self._scaled(data.inputs[rows]), data.targets[rows])
        return _torch_trainer("fashion", task, pair, (data.test_inputs, data.test_targets), 0.1, 32)

    def _scaled(self, pixels: Array) -> Array:
        """To mean 0 and variance 1, over all of the data set."""
        return (pixels.astype(np.float32) / 255 - np.float32(0.286)) / np.float32(0.353)


class _Shakespeare:
    _LENGTH = 64
    _TEST_EVERY = 10
    _MOST_TESTS = 1000
    ALPHABET = "\n !&'(),-.:;?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz~"

    def read(self, folder: Path) -> Data:
        """Every role's speeches in pieces of 64 characters; each tenth piece is for testing."""
        codes = np.full(256, len(self.ALPHABET) - 1, np.uint8)
        for code, letter in enumerate(self.ALPHABET):
            codes[ord(letter)] = code
        pieces, groups, tests = [], [], []
        for role, each in enumerate(roles(folder)):
            coded = codes[np.frombuffer(each.text.encode("latin-1", "replace"), np.uint8)]
            for number, start in enumerate(range(0, coded.size - self._LENGTH, self._LENGTH)):
                piece = coded[start : start + self._LENGTH + 1]
                if number % self._TEST_EVERY == self._TEST_EVERY - 1:
                    tests.append(piece)
                else:
                    pieces.append(piece)
                    groups.append(role)
        if not pieces or not tests:
            raise ConfigurationError(f"{folder} holds no plays with speeches by role")
        chosen = np.random.default_rng(0).permutation(len(tests))[: self._MOST_TESTS]
        whole, test = np.stack(pieces), np.stack(tests)[np.sort(chosen)]
        labels = whole[:, -1].astype(np.int64)
        owners = np.array(groups, np.int64)
        others = test.astype(np.int64)
        return Data(whole[:, :-1], whole[:, 1:], labels, others[:, :-1], others[:, 1:], owners)

    def initial_model(self, task: Task) -> Model:
        return self._torch(task, np.empty(0, np.int64)).initial_model()

    def trainer(self, task: Task, rows: Rows) -> Trainer:
        return self._torch(task, rows)

    def _torch(self, task: Task, rows: Rows) -> TorchTrainer:
        data = task.load()
        pair = data.inputs[rows].astype(np.int64), data.targets[rows].astype(np.int64)
        test = (data.test_inputs, data.test_targets)
        return _torch_trainer("shakespeare", task, pair, test, 1.0, 16)


def _torch_trainer(
    kind: str,
    task: Task,
    own: tuple[Array, Array],
    test: tuple[Array, Array],
    rate: float,
    batch: int,
) -> TorchTrainer:
    try:
        import torch
    except ModuleNotFoundError as exc:
        raise MissingExtra(
            f"{task.data} needs torch", hint="pip install 'fedpress[torch]'"
        ) from exc
    from torch.utils.data import TensorDataset

    from fedpress.simulate import networks
    from fedpress_client.torch_trainer import TorchTrainer

    torch.set_num_threads(1)  # clients run side by side, and results must not depend on cores
    return TorchTrainer(
        networks.made(kind, task.seed, len(_Shakespeare.ALPHABET)),
        networks.loss,
        lambda parameters: torch.optim.SGD(parameters, lr=rate),
        TensorDataset(*(torch.from_numpy(np.ascontiguousarray(each)) for each in own)),
        evaluation_data=TensorDataset(
            *(torch.from_numpy(np.ascontiguousarray(each)) for each in test)
        ),
        batch_size=batch,
        metrics=networks.metrics,
        device=task.device,
    )


def _idx(folder: Path, name: str) -> npt.NDArray[np.uint8]:
    """An array in the format of LeCun's MNIST page: two zeros, the type (8, unsigned bytes), the
    number of extents, the extents, the values."""
    path, num_extents = folder / f"{name}-ubyte.gz", int(name[-1])
    try:
        with gzip.open(path) as file:
            data = file.read(_LARGEST_FILE)
    except (OSError, EOFError, zlib.error) as exc:
        raise ConfigurationError(f"{path} cannot be read: {exc}") from exc
    start = 4 + 4 * num_extents
    if data[:4] != bytes([0, 0, 8, num_extents]) or len(data) < start:
        raise ConfigurationError(
            f"{path} begins with {data[:4].hex()}, not as an IDX file of bytes in {num_extents} "
            "dimensions",
            hint="download the file again",
        )
    extents = [int(each) for each in np.frombuffer(data, ">u4", num_extents, 4)]
    if math.prod(extents) != len(data) - start:
        raise ConfigurationError(
            f"{path} holds {len(data) - start:,} values, not the {math.prod(extents):,} that it "
            "announces",
            hint="download the file again",
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(extents)


_KINDS: dict[str, _Kind] = {
    "digits": _Digits(),
    "fashion-mnist": _Fashion(),
    "shakespeare": _Shakespeare(),
}
