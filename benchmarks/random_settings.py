"""The default against float32 FedAvg in settings that are drawn at random.

    python benchmarks/random_settings.py --data FOLDER --settings 0:20 [--store FILE]
    python benchmarks/random_settings.py --table --settings 0:20     # of what has been run

A setting is all that a user decides: the data, how they are split between how many clients, the
cohort, the rounds, and how a device trains (optimizer, steps, batch). Its number determines it. Of
three local rates it has the one at which FedAvg's averages end highest. Numbers from 1000 on have
two to six clients, which all come in every round. Everything else is as in accuracy_vs_bytes.py,
whose data folder this uses. Each setting is kept as a line of JSON and not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import accuracy_tasks
import numpy as np
import torch
from accuracy_tasks import Rows, Task, perceptron
from accuracy_vs_bytes import LAST, TASKS, Run, played
from federation import InMemory
from torch import nn

from fedpress_compression.tensors import Vector
from fedpress_protocols.defaults import completed
from fedpress_protocols.messages import TaskConfig
from fedpress_protocols.model import Model

STORE = Path(__file__).parent / "results" / "random_settings.jsonl"
DATA = (
    "digits",
    "vowel",
    "satellite",
    "letters",
    "fashion 1",
    "dna",
    "shuttle",
    "diamonds",
    "spam",
)
RATES = {
    "sgd": (0.02, 0.1, 0.5),
    "momentum": (0.004, 0.02, 0.1),
    "adam": (0.0003, 0.001, 0.004),
}
"""Local learning rates that are tried."""
_MOMENTUM = {"sgd": 0.0, "momentum": 0.9}
_MOST_STEPS = 60_000
"""Local steps of all devices in all rounds: a setting with more has fewer rounds."""
_LEAST_EXAMPLES = 16
_FEW_CLIENTS = 1000
"""The number from which on settings have few clients."""


@dataclass(frozen=True)
class Setting:
    """`concentration` is that of the Dirichlet distribution of each class over the clients."""

    number: int
    data: str
    clients: int
    concentration: float
    cohort: int
    rounds: int
    optimizer: str
    steps: int
    batch: int
    hidden: tuple[int, ...]


class Drawn(Task):
    """A task whose devices train with any of torch's optimizers."""

    optimizer: str

    def update(
        self,
        model: Model,
        client: int,
        rng: np.random.Generator,
        rate: float,
        support: Rows | None = None,
    ) -> Vector:
        assert support is None
        self._load(model)
        rows, at = self.clients[client], 0
        order = rng.permutation(rows)
        parameters = self.network.parameters()
        optimizer: torch.optim.Optimizer
        if self.optimizer == "adam":
            optimizer = torch.optim.Adam(parameters, rate)
        else:
            optimizer = torch.optim.SGD(parameters, rate, _MOMENTUM[self.optimizer])
        for _ in range(self.steps):
            if at and at + self.batch > len(order):
                order, at = rng.permutation(rows), 0
            batch = torch.from_numpy(order[at : at + self.batch])
            at += self.batch
            optimizer.zero_grad()
            scores = self.network(self.inputs[batch])
            nn.functional.cross_entropy(scores, self.labels[batch]).backward()
            optimizer.step()
        tensors = {n: p.detach().numpy() for n, p in self.network.named_parameters()}
        return model.spec.flatten(tensors) - model.parameters


def drawn(number: int) -> Setting:
    """The setting of this number, the same everywhere."""
    rng = np.random.default_rng([number, 21])

    def between(least: float, most: float) -> float:
        """Its logarithm is uniform."""
        return float(np.exp(rng.uniform(np.log(least), np.log(most))))

    data = DATA[rng.integers(len(DATA))]
    if number < _FEW_CLIENTS:
        clients, concentration = round(between(8, 150)), between(0.05, 10)
        cohort = min(clients, round(between(3, 25)))
    else:
        clients, concentration = int(rng.integers(2, 7)), between(0.05, 10)
        cohort = clients
    rounds, steps = round(between(15, 120)), round(between(1, 100))
    rounds = max(15, min(rounds, _MOST_STEPS // (cohort * steps)))
    optimizer = str(rng.choice(["sgd", "momentum", "adam"], p=[0.5, 0.2, 0.3]))
    batch = int(rng.choice([8, 16, 32, 64]))
    hidden = ((64,), (128, 64), (256, 128))[rng.integers(3)]
    return Setting(
        number, data, clients, concentration, cohort, rounds, optimizer, steps, batch, hidden
    )


def made(setting: Setting, data: Path) -> Drawn:
    whole = accuracy_tasks.made(setting.data, data, setting.number, TASKS)
    rng = np.random.default_rng([setting.number, 22])
    rows = np.concatenate(whole.clients)
    labels = whole.labels.numpy()[rows]
    clients = min(setting.clients, rows.size // _LEAST_EXAMPLES)
    own = accuracy_tasks.shares(labels, clients, setting.concentration, rng)
    network = whole.network
    if whole.inputs.ndim == 2:
        network = perceptron(whole.inputs.shape[1], *setting.hidden, int(labels.max()) + 1)
    task = Drawn(
        whole.inputs,
        whole.labels,
        whole.test_inputs,
        whole.test_labels,
        [rows[each] for each in own],
        network,
        min(setting.cohort, clients),
        setting.steps,
        setting.batch,
        0.0,
        setting.rounds,
    )
    task.optimizer = setting.optimizer
    return task


def run(setting: Setting, data: Path) -> dict[str, Any]:
    """The setting, the local rate, and by recipe where models end, in %, and the bytes uploaded."""
    task = made(setting, data)
    initial = Model.from_bytes(task.first_model.to_bytes())
    best = max(
        ((_played(task, initial, setting, rate, False), rate) for rate in RATES[setting.optimizer]),
        key=lambda tried: _end(tried[0].average),
    )
    fedavg, rate = best
    auto = _played(task, initial, setting, rate, True)
    result: dict[str, Any] = {**asdict(setting), "rate": rate, "values": initial.spec.size}
    for name, done in (("fedavg", fedavg), ("auto", auto)):
        result[name] = {
            "newest": _end(done.newest),
            "average": _end(done.average),
            "up": done.up[-1],
            "refused": done.refused,
        }
    used, progress = auto.profiles, auto.progress
    result["profiles"] = [f"{name} x {used.count(name)}" for name in dict.fromkeys(used)]
    result["progress"] = [round(each, 2) for each in progress.values() if each is not None]
    return result


def _played(task: Task, initial: Model, setting: Setting, rate: float, is_auto: bool) -> Run:
    fields: dict[str, Any] = {
        "task": "task",
        "model": initial.digest,
        "rounds": setting.rounds,
        "training": {"learning_rate": rate},
        "cohort": {"size": task.cohort, "minimum": 1},
        "seed": setting.number,
    }
    if not is_auto:
        decay = completed(fields)["strategy"]["decay"]
        fields["profiles"] = [{"name": "float32", "compressor": {"id": "none"}}]
        fields["strategy"] = {"id": "ema", "inner": {"id": "fedavg"}, "decay": decay}
    config = TaskConfig.model_validate(fields)
    with tempfile.TemporaryDirectory() as folder:
        return played(task, config, setting.number, InMemory(Path(folder)), initial)


def _end(measured: Iterable[tuple[float, float]]) -> float:
    """Of the last measures, in %."""
    return 100 * float(np.mean([accuracy for accuracy, _ in list(measured)[-LAST:]]))


def kept(store: Path) -> dict[int, dict[str, Any]]:
    """By number, of one of several runs the last."""
    lines = store.read_text().splitlines() if store.exists() else []
    return {each["number"]: each for each in map(json.loads, lines)}


def table(every: list[dict[str, Any]]) -> Iterator[str]:
    """Markdown: how far the default ends from FedAvg by groups of settings, and the worst."""
    yield (
        "| settings | how many | no more than .5 below FedAvg | more than 1 below | "
        "median above FedAvg | median times fewer bytes |"
    )
    yield "|" + "---|" * 6
    groups = {
        "all": every,
        **{each: [s for s in every if s["optimizer"] == each] for each in RATES},
        "up to 30 rounds": [s for s in every if s["rounds"] <= 30],
        "more rounds": [s for s in every if s["rounds"] > 30],
        "cohorts below ten": [s for s in every if s["cohort"] < 10],
        "larger cohorts": [s for s in every if s["cohort"] >= 10],
    }
    for name, settings in groups.items():
        if settings:
            above = np.array([_above(each) for each in settings])
            fewer = [each["fedavg"]["up"] / max(1, each["auto"]["up"]) for each in settings]
            yield (
                f"| {name} | {len(settings)} | {(above >= -0.5).sum()} | {(above < -1).sum()} | "
                f"{np.median(above):+.1f} | {np.median(fewer):.0f} |"
            )
    yield ""
    yield (
        "| number | data | clients, concentration | cohort, rounds | local training | "
        "FedAvg ends | auto ends | above FedAvg | newest | bits a value |"
    )
    yield "|" + "---|" * 10
    for each in sorted(every, key=_above):
        if _above(each) < -1:
            newest = each["auto"]["newest"] - each["fedavg"]["newest"]
            bits = 32 * each["auto"]["up"] / each["fedavg"]["up"]
            yield (
                f"| {each['number']} | {each['data']} | {each['clients']}, "
                f"{each['concentration']:.2g} | {each['cohort']}, {each['rounds']} | "
                f"{each['steps']} of {each['batch']}, {each['optimizer']} {each['rate']:g} | "
                f"{each['fedavg']['average']:.1f} | {each['auto']['average']:.1f} | "
                f"{_above(each):+.1f} | {newest:+.1f} | {bits:.2f} |"
            )


def _above(result: dict[str, Any]) -> float:
    """Points by which the default's average ends above FedAvg's."""
    return float(result["auto"]["average"] - result["fedavg"]["average"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("data"), help="see accuracy_tasks.py")
    parser.add_argument("--settings", default="0:60", help="numbers of settings, FROM:TO")
    parser.add_argument("--store", type=Path, default=STORE, help="where runs are kept")
    parser.add_argument("--table", action="store_true", help="print the table, run nothing")
    asked = parser.parse_args()
    first, _, end = asked.settings.partition(":")
    numbers = range(int(first), int(end))
    for number in () if asked.table else numbers:
        if number in kept(asked.store):
            continue
        done = run(drawn(number), asked.data)
        with asked.store.open("a") as file:
            file.write(json.dumps(done) + "\n")
        print(
            f"{number:4} {done['data']:10} {done['optimizer']:8} {done['steps']:3} steps, "
            f"{done['cohort']:2} of {done['clients']:3}, {done['rounds']:3} rounds: "
            f"FedAvg {done['fedavg']['average']:.1f}, auto {done['auto']['average']:.1f} "
            f"({_above(done):+.1f}; newest "
            f"{done['auto']['newest'] - done['fedavg']['newest']:+.1f}) "
            f"{', '.join(done['profiles'])}; progress {done['progress']}",
            flush=True,
        )
    runs = kept(asked.store)
    print("\n".join(table([runs[number] for number in numbers if number in runs])))


if __name__ == "__main__":
    main()
