"""The tasks of accuracy_vs_bytes.py: real data, split between clients, and a small network each.

Needs torch. digits come with scikit-learn; Fashion-MNIST and Shakespeare lie in folders of `data`;
letters, satellite and vowel are data sets of R's package mlbench (Debian: r-cran-mlbench), whose
.rda files lie in `data/mlbench`. Vowel's clients are its speakers, Shakespeare's its roles.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from r_data import frame
from torch import nn

from fedpress_compression.tensors import Vector
from fedpress_protocols.model import Model

Rows = npt.NDArray[np.int64]
TESTS = 2000
_CONTEXT, _LETTERS = 8, 69


@dataclass
class Task:
    """`clients`: the rows of each; the rest of the fields says how they train."""

    inputs: torch.Tensor
    labels: torch.Tensor
    test_inputs: torch.Tensor
    test_labels: torch.Tensor
    clients: list[Rows]
    network: nn.Module
    cohort: int
    steps: int
    batch: int
    rate: float
    rounds: int = 90
    proximal: float = 0.0

    @property
    def first_model(self) -> Model:
        tensors = {n: p.detach().cpu().numpy().copy() for n, p in self.network.named_parameters()}
        return Model.from_tensors(tensors)

    def update(
        self,
        model: Model,
        client: int,
        rng: np.random.Generator,
        rate: float,
        support: Rows | None = None,
    ) -> Vector:
        """The model after `steps` of SGD on the client's own examples, less the model; with
        a `support` the others of its values stay. `proximal` pulls towards the model."""
        self._load(model)
        moving, before = self._moving(model, support), None
        if self.proximal:
            before = [each.detach().clone() for each in self.network.parameters()]
        rows, parameters = self.clients[client], list(self.network.parameters())
        order, at = rng.permutation(rows), 0
        for _ in range(self.steps):
            if at and at + self.batch > len(order):
                order, at = rng.permutation(rows), 0
            batch = torch.from_numpy(order[at : at + self.batch])
            at += self.batch
            scores = self.network(self.inputs[batch])
            loss = nn.functional.cross_entropy(scores, self.labels[batch])
            gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                for place, (parameter, gradient) in enumerate(
                    zip(parameters, gradients, strict=True)
                ):
                    if before is not None:
                        gradient = gradient + self.proximal * (parameter - before[place])
                    if moving is not None:
                        gradient = gradient * moving[place]
                    parameter.add_(gradient, alpha=-rate)
        tensors = {n: p.detach().numpy() for n, p in self.network.named_parameters()}
        return model.spec.flatten(tensors) - model.parameters

    def measure(self, model: Model) -> tuple[float, float]:
        """Accuracy and loss on the test examples."""
        self._load(model)
        with torch.no_grad():
            scores = self.network(self.test_inputs)
            loss = nn.functional.cross_entropy(scores, self.test_labels)
        right = (scores.argmax(1) == self.test_labels).float().mean()
        return float(right), float(loss)

    def _moving(self, model: Model, support: Rows | None) -> list[torch.Tensor] | None:
        """By parameter: 1 where it may move."""
        if support is None:
            return None
        flat = np.zeros(model.spec.size, np.float32)
        flat[support] = 1
        tensors = model.spec.unflatten(flat)
        return [torch.from_numpy(tensors[name]) for name, _ in self.network.named_parameters()]

    def _load(self, model: Model) -> None:
        tensors = model.spec.unflatten(model.parameters)
        with torch.no_grad():
            for name, parameter in self.network.named_parameters():
                parameter.copy_(torch.from_numpy(tensors[name]))


def perceptron(*sizes: int) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def shares(
    labels: Rows, clients: int, concentration: float, rng: np.random.Generator
) -> list[Rows]:
    """Dirichlet over the classes (Hsu et al. 2019, arXiv:1909.06335), eight examples at least."""
    shares: list[list[Rows]] = [[] for _ in range(clients)]
    for label in range(int(labels.max()) + 1):
        rows = rng.permutation(np.flatnonzero(labels == label))
        cuts = np.cumsum(rng.dirichlet([concentration] * clients))[:-1] * rows.size
        for share, part in zip(shares, np.split(rows, cuts.astype(np.int64)), strict=True):
            share.append(part)
    own = [np.concatenate(share) for share in shares]
    for poor in [index for index, rows in enumerate(own) if rows.size < 8]:
        rich = max(range(clients), key=lambda index: own[index].size)
        own[poor] = np.concatenate([own[poor], own[rich][:8]])
        own[rich] = own[rich][8:]
    return own


def _equal(labels: Rows, concentration: float, rng: np.random.Generator) -> list[Rows]:
    """100 clients of 256 examples, classes in each one's own Dirichlet proportions."""
    classes = int(labels.max()) + 1
    pools = [rng.permutation(np.flatnonzero(labels == c)).tolist() for c in range(classes)]
    clients = []
    for _ in range(100):
        rows: list[int] = []
        for drawn in rng.choice(classes, 256, p=rng.dirichlet([concentration] * classes)):
            largest = max(range(classes), key=lambda c: len(pools[c]))
            rows.append(pools[drawn if pools[drawn] else largest].pop())
        clients.append(np.array(rows, np.int64))
    return clients


def table(
    inputs: npt.NDArray[np.float64], labels: Rows, tests: int, rng: np.random.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    scaled = ((inputs - inputs.mean(0)) / np.maximum(inputs.std(0), 1e-6)).astype(np.float32)
    order = rng.permutation(labels.size)
    rest, test = order[tests:], order[:tests]
    return tensors(scaled[rest], labels[rest], scaled[test], labels[test])


def skewed_table(
    columns: Mapping[str, npt.NDArray[np.float64]],
    label: str,
    hidden: tuple[int, ...],
    tests: int,
    clients: int,
    steps: int,
    batch: int,
    rng: np.random.Generator,
) -> Task:
    """A perceptron on a table whose clients have classes in Dirichlet proportions of .3; ten of
    them in each of 60 rounds. Standardised values are cut off at 5."""
    labels = columns[label].astype(np.int64)
    inputs = np.stack([each for name, each in columns.items() if name != label], 1)
    parts = table(inputs, labels, tests, rng)
    for each in (parts[0], parts[2]):
        each.clamp_(-5, 5)
    own = shares(parts[1].numpy(), clients, 0.3, rng)
    network = perceptron(inputs.shape[1], *hidden, int(labels.max()) + 1)
    return Task(*parts, own, network, 10, steps, batch, 0.05, 60)


def tensors(
    inputs: npt.NDArray[Any],
    labels: npt.NDArray[Any],
    test_inputs: npt.NDArray[Any],
    test_labels: npt.NDArray[Any],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    from_numpy = torch.from_numpy
    return (
        from_numpy(inputs),
        from_numpy(labels),
        from_numpy(test_inputs),
        from_numpy(test_labels),
    )


def _digits(data: Path, rng: np.random.Generator) -> Task:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = rng.permutation(labels.size)
    inputs, labels = (pixels / 16).astype(np.float32), labels.astype(np.int64)
    rest, test = order[360:], order[:360]
    parts = tensors(inputs[rest], labels[rest], inputs[test], labels[test])
    clients = shares(labels[rest], 100, 0.3, rng)
    return Task(*parts, clients, perceptron(64, 256, 128, 10), 10, 10, 16, 0.2)


def _fashion(concentration: float) -> Callable[[Path, np.random.Generator], Task]:
    def made(data: Path, rng: np.random.Generator) -> Task:
        folder = data / "fashion_mnist"
        pixels, labels = idx(folder, "train-images-idx3"), idx(folder, "train-labels-idx1")
        tests, answers = idx(folder, "t10k-images-idx3"), idx(folder, "t10k-labels-idx1")
        clients = _equal(labels.astype(np.int64), concentration, rng)

        def scaled(values: npt.NDArray[np.uint8]) -> torch.Tensor:
            return torch.from_numpy((values.astype(np.float32) / 255 - 0.286) / 0.353)[:, None]

        network = nn.Sequential(
            nn.Conv2d(1, 16, 5, 2, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(),
            nn.Flatten(), nn.Linear(1568, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip
        own, others = (torch.from_numpy(each.astype(np.int64)) for each in (labels, answers))
        test = scaled(tests[:TESTS]), others[:TESTS]
        return Task(scaled(pixels), own, *test, clients, network, 10, 8, 32, 0.1)

    return made


def _mlbench(
    name: str, label: str, network: Callable[[], nn.Module], **terms: float
) -> Callable[[Path, np.random.Generator], Task]:
    clients, cohort = int(terms.pop("clients")), int(terms.pop("cohort"))

    def made(data: Path, rng: np.random.Generator) -> Task:
        columns = frame(data / "mlbench" / f"{name}.rda")
        labels = columns.pop(label).astype(np.int64)
        parts = table(np.stack(list(columns.values()), 1), labels, TESTS, rng)
        own = shares(parts[1].numpy(), clients, 0.3, rng)
        rounds = int(terms.get("rounds", 90))
        return Task(*parts, own, network(), cohort, 10, 32, terms["rate"], rounds)

    return made


def _vowel(data: Path, rng: np.random.Generator) -> Task:
    """A client for each speaker; of the six times that a speaker says a vowel two are for tests."""
    columns = frame(data / "mlbench" / "Vowel.rda")
    labels, speakers = (columns.pop(name).astype(np.int64) for name in ("Class", "V1"))
    inputs = np.stack(list(columns.values()), 1)
    scaled = ((inputs - inputs.mean(0)) / inputs.std(0)).astype(np.float32)
    times = np.zeros(labels.size, np.int64)
    for speaker in range(15):
        for label in range(11):
            rows = np.flatnonzero((speakers == speaker) & (labels == label))
            times[rows] = np.arange(rows.size)
    is_test = np.isin(times, rng.permutation(6)[:2])
    parts = tensors(scaled[~is_test], labels[~is_test], scaled[is_test], labels[is_test])
    clients = [np.flatnonzero(speakers[~is_test] == speaker) for speaker in range(15)]
    return Task(*parts, clients, perceptron(9, 256, 128, 11), 15, 8, 8, 0.1, 60)


class _NextLetter(nn.Module):
    """Scores of the letter after eight others."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_LETTERS, 16)
        self.hidden, self.scores = nn.Linear(16 * _CONTEXT, 192), nn.Linear(192, _LETTERS)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.relu(self.hidden(self.embedding(letters).flatten(1)))
        scores: torch.Tensor = self.scores(hidden)
        return scores


def _shakespeare(data: Path, rng: np.random.Generator) -> Task:
    """120 roles that say 1,600 letters or more, at most 2,500 places of each."""
    from fedpress.simulate.partition import Partition
    from fedpress.simulate.tasks import Task as Simulated

    whole = Simulated("shakespeare", str(data / "shakespeare"), 1, Partition()).load()
    assert whole.groups is not None

    def places(inputs: Rows, targets: Rows) -> Rows:
        pieces = np.concatenate([inputs, targets[:, -1:]], 1).astype(np.int64)
        windows = np.lib.stride_tricks.sliding_window_view(pieces, _CONTEXT + 1, axis=1)
        return windows.reshape(-1, _CONTEXT + 1)

    roles = np.flatnonzero(np.bincount(whole.groups) >= 25)
    parts, clients, count = [], [], 0
    for role in rng.permutation(roles)[:120]:
        rows = np.flatnonzero(whole.groups == role)[:60]
        own = places(whole.inputs[rows], whole.targets[rows])
        parts.append(own[rng.permutation(len(own))[:2500]])
        clients.append(np.arange(count, count + len(parts[-1])))
        count += len(parts[-1])
    own, tests = np.concatenate(parts), places(whole.test_inputs[:200], whole.test_targets[:200])
    tests = tests[::3][:3000]
    sets = (own[:, :-1], own[:, -1], tests[:, :-1], tests[:, -1])
    return Task(*tensors(*map(np.ascontiguousarray, sets)), clients, _NextLetter(), 12, 12, 64, 0.5)


TASKS: dict[str, Callable[[Path, np.random.Generator], Task]] = {
    "digits": _digits,
    "vowel": _vowel,
    "satellite": _mlbench(
        "Satellite", "classes", lambda: perceptron(36, 256, 128, 6),
        clients=8, cohort=8, rate=0.05, rounds=60,
    ),
    "letters": _mlbench(
        "LetterRecognition", "lettr", lambda: perceptron(16, 256, 128, 26),
        clients=60, cohort=20, rate=0.1,
    ),
    "shakespeare": _shakespeare,
    "fashion .1": _fashion(0.1),
    "fashion .5": _fashion(0.5),
    "fashion 1": _fashion(1.0),
}  # fmt: skip


def made(
    name: str,
    data: Path,
    seed: int,
    tasks: Mapping[str, Callable[[Path, np.random.Generator], Task]] = TASKS,
) -> Task:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    return tasks[name](data, np.random.default_rng([seed, 7]))


def idx(folder: Path, name: str) -> npt.NDArray[np.uint8]:
    """An array in the format of LeCun's MNIST page."""
    data = gzip.decompress((folder / f"{name}-ubyte.gz").read_bytes())
    extents = np.frombuffer(data, ">u4", data[3], 4).astype(int)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(extents)
