"""The default on networks with BatchNorm, beside FedAvg in float32: whole simulations of devices.

    python benchmarks/batch_norm.py --data FOLDER [--tasks "digits;letters;fashion .5"] [--seeds 0]
    python benchmarks/batch_norm.py --table          # of what has been run

The tasks are those of accuracy_tasks.py, their networks with a BatchNorm layer before every
rectifier. What runs is `fedpress simulate --app batch_norm:device`: TorchTrainer with its running
statistics, uploads and downloads as they are. The first four clients measure models on the test
examples; a figure is the mean of the last sixth of their measures, of newest models.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import accuracy_tasks
import accuracy_vs_bytes
import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedpress import TorchTrainer

STORE = Path(__file__).parent / "results" / "batch_norm.json"
RATES: Mapping[str, tuple[float, int]] = {
    "digits": (0.1, 60),
    "letters": (0.4, 60),
    "satellite": (0.2, 40),
    "watch": (0.05, 60),
    "fashion .5": (0.1, 40),
}
"""Learning rate and rounds."""
RECIPES: Mapping[str, list[str]] = {
    "fedavg, float32": ["--compressor", "none", "--strategy", "fedavg"],
    "default": [],
}
_TEST_EXAMPLES, _MEASURING = 2000, 4
_TASK, _DATA, _SEED = "BATCH_NORM_TASK", "BATCH_NORM_DATA", "BATCH_NORM_SEED"


def with_batch_norm(network: nn.Sequential) -> nn.Sequential:
    """The layers of `network`, with a BatchNorm layer before each rectifier."""
    layers: list[nn.Module] = []
    width, is_flat = 0, True
    for layer in network:
        if isinstance(layer, nn.ReLU) and width:
            one, two = (nn.BatchNorm1d, nn.BatchNorm2d)
            layers.append(one(width) if is_flat else two(width))
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d):
            width, is_flat = layer.weight.shape[0], not isinstance(layer, nn.Conv2d)
        layers.append(copy.deepcopy(layer))
    return nn.Sequential(*layers)


@cache
def _made() -> tuple[accuracy_tasks.Task, nn.Sequential]:
    name, seed = os.environ[_TASK], int(os.environ[_SEED])
    torch.set_num_threads(1)
    task = accuracy_tasks.made(name, Path(os.environ[_DATA]), seed, accuracy_vs_bytes.TASKS)
    torch.manual_seed(seed)
    return task, with_batch_norm(task.network)  # type: ignore[arg-type]


def device(index: int, clients: int) -> TorchTrainer:
    """For `fedpress simulate --app batch_norm:device`."""
    task, network = _made()
    rows, rate = torch.as_tensor(task.clients[index]), RATES[os.environ[_TASK]][0]
    test = slice(_TEST_EXAMPLES)
    return TorchTrainer(
        copy.deepcopy(network),
        nn.CrossEntropyLoss(),
        lambda parameters: torch.optim.SGD(parameters, lr=rate),
        TensorDataset(task.inputs[rows], task.labels[rows].long()),
        batch_size=task.batch,
        evaluation_data=TensorDataset(task.test_inputs[test], task.test_labels[test].long())
        if index < _MEASURING
        else None,
    )


def run(name: str, recipe: str, seed: int, data: Path) -> dict[str, Any]:
    """One simulation, in processes of its own: accuracy in percent and bytes up."""
    here = Path(__file__).parent
    task = accuracy_tasks.made(name, data, seed, accuracy_vs_bytes.TASKS)
    paths = [str(here), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {_TASK: name, _DATA: str(data.resolve()), _SEED: str(seed), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "history.json"
        command = [sys.executable, "-m", "fedpress", "simulate", "--app", "batch_norm:device"]
        command += ["--clients", str(len(task.clients)), "--rounds", str(RATES[name][1])]
        command += ["--fraction", str(task.cohort / len(task.clients)), "--engine", "local"]
        command += ["--local-steps", str(task.steps), "--seed", str(seed), "--out", folder]
        command += ["--json", str(out), *RECIPES[recipe]]
        environ = {**os.environ, **environ, "PYTHONPATH": os.pathsep.join(paths)}
        subprocess.run(command, check=True, env=environ, stdout=subprocess.DEVNULL)
        rows = json.loads(out.read_text())["history"]
    measured = [row["evaluation"].get("accuracy") for row in rows]
    accuracies = [100 * each for each in measured if each is not None]
    last = accuracies[-max(3, len(accuracies) // 6) :]
    return {
        "task": name,
        "recipe": recipe,
        "seed": seed,
        "ends": round(float(np.mean(last)), 2),
        "up": sum(row["upload_bytes"] for row in rows),
    }


def table(kept: list[dict[str, Any]]) -> Iterator[str]:
    """Markdown, of the tasks and seeds of which both recipes are there."""
    yield "| task | seed | FedAvg ends | default ends | above FedAvg | times fewer bytes up |"
    yield "|" + "---|" * 6
    runs = {(each["task"], each["seed"], each["recipe"]): each for each in kept}
    baseline, ours = RECIPES
    for name, seed, recipe in runs:
        theirs, mine = runs.get((name, seed, baseline)), runs.get((name, seed, ours))
        if recipe == baseline and theirs is not None and mine is not None:
            yield (
                f"| {name} | {seed} | {theirs['ends']:.1f} | {mine['ends']:.1f} | "
                f"{mine['ends'] - theirs['ends']:+.1f} | {theirs['up'] / mine['up']:.0f} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("data"), help="fashion_mnist, mlbench")
    parser.add_argument("--tasks", default=";".join(RATES), help=f"of {'; '.join(RATES)}")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--store", type=Path, default=STORE, help="where runs are kept")
    parser.add_argument("--table", action="store_true", help="print the table, run nothing")
    asked = parser.parse_args()
    kept = json.loads(asked.store.read_text()) if asked.store.exists() else []
    if not asked.table:
        done = {(each["task"], each["seed"], each["recipe"]) for each in kept}
        for seed in map(int, asked.seeds.split(",")):
            for name in asked.tasks.split(";"):
                for recipe in RECIPES:
                    if (name, seed, recipe) not in done:
                        kept.append(run(name, recipe, seed, asked.data))
                        asked.store.write_text(json.dumps(kept, indent=1) + "\n")
                        print(kept[-1], flush=True)
    print("\n".join(table(kept)))


if __name__ == "__main__":
    main()
