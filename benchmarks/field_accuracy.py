"""Accuracy against bytes beside NNCodec 2's own strategy for Flower, with lost uploads.

    pip install --no-deps nncodec==2.1.3 'flwr>=1.41,<2'      # and what they import
    python benchmarks/field_accuracy.py --data FOLDER --json benchmarks/results/field_accuracy.json
    python benchmarks/field_accuracy.py --table    # of the kept figures

The task is `satellite` of accuracy_tasks.py: eight clients, all in every round, since a device of
NNCodec's adds up the differences that come down. Its client and its strategy are the classes of
its package, called as Flower calls them, with its own settings (both directions, sparsity .6,
temporal context, error accumulation) and several steps. Its client keeps what an upload left out
when it is encoded, so that of an upload that is lost all that was in it is gone. Ours is the
default, whose devices hear from a receipt what was included. Bytes are those of upload bodies,
lost ones too. Accuracies are of the newest model, means of the last five rounds.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import json
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import accuracy_tasks
import accuracy_vs_bytes
import numpy as np
import torch
from beside_the_field import UNUSED
from federation import InMemory
from harness import parser, report, save, seed_list

from fedpress_protocols.messages import TaskConfig
from fedpress_protocols.model import Model

TASK, LOST = "satellite", (0.0, 0.1)
KEPT = Path(__file__).parent / "results" / "field_accuracy.json"
STEPS = (-26, -32)
"""NNCodec's `qp`: its own, and 2.8 times as fine."""


def ours(recipe: str, seed: int, data: Path, lost: float) -> dict[str, Any]:
    task = accuracy_tasks.made(TASK, data, seed)
    initial = Model.from_bytes(task.first_model.to_bytes())
    fields: dict[str, Any] = {
        "task": "task",
        "model": initial.digest,
        "rounds": task.rounds,
        "training": {"learning_rate": task.rate},
        "cohort": {"size": task.cohort, "minimum": 1},
        "seed": seed,
    }
    config = TaskConfig.model_validate({**fields, **accuracy_vs_bytes.RECIPES[recipe].fields})
    with tempfile.TemporaryDirectory() as folder:
        payloads = InMemory(Path(folder))
        done = accuracy_vs_bytes.played(task, config, seed, payloads, initial, lost=lost)
    return {"accuracies": [accuracy for accuracy, _ in done.newest], "up": done.up}


def nncodec(qp: int, seed: int, data: Path, lost: float) -> dict[str, Any]:
    """Its client and its strategy, a round after another."""
    import flwr.common
    import flwr.server.strategy  # these two before what it also imports is hidden
    import torch._dynamo

    for unused in UNUSED:
        sys.modules.setdefault(unused, MagicMock())
    fl = importlib.import_module("nncodec.fl")
    task = accuracy_tasks.made(TASK, data, seed)
    model = Model.from_bytes(task.first_model.to_bytes())
    names = [name for name, _ in task.network.named_parameters()]

    def network() -> torch.nn.Module:
        return copy.deepcopy(task.network)

    number = 0

    def trained(net: torch.nn.Module, *, trainloader: Any, **_: Any) -> dict[str, float]:
        tensors = {name: each.detach().numpy() for name, each in net.named_parameters()}
        before = model.with_parameters(model.spec.flatten(tensors))
        client = trainloader.client
        rng = np.random.default_rng([seed, number, client])
        after = before.parameters + task.update(before, client, rng, task.rate)
        tensors = model.spec.unflatten(after)
        for name, each in net.named_parameters():  # new memory: on a CPU its copy of the last
            each.data = torch.from_numpy(tensors[name].copy())  # model is a view of this one
        return {"loss": 0.0}

    accuracies: list[float] = []

    def evaluated(server_round: int, state: Any) -> dict[str, float]:
        arrays = {name: each.numpy() for name, each in state.items()}
        found = task.measure(model.with_parameters(model.spec.flatten(arrays)))
        accuracies.append(found[0])
        return {"loss": found[1]}

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        terms = {**fl.nncargs, "qp": qp, "diff_qp": qp, "results": folder, "model": TASK}
        args = Namespace(**terms, lr=task.rate, weight_decay=0.0, wandb=False)
        info = {"parameter_index": {name: place for place, name in enumerate(names)}}
        first = [each.detach().numpy().copy() for _, each in network().named_parameters()]
        clients = [
            fl.NNClient(
                None, Rows(rows, client), None, client + 1, None, torch.device("cpu"), network(),
                args, info, fl.encode, fl.nnc.decompress, trained,
            )
            for client, rows in enumerate(task.clients)
        ]  # fmt: skip
        strategy = fl.NNCFedAvg(
            len(clients), len(clients), evaluated, True,
            lambda each: {"accumulated_bs_sizes": 0}, None, network(), info, args,
            fl.encode, fl.nnc.decompress,
        )  # fmt: skip
        sent, up = 0, []
        parameters = flwr.common.ndarrays_to_parameters(first)
        strategy.evaluate(0, parameters)
        accuracies.clear()
        for number in range(1, task.rounds + 1):
            arrived, failed = list[Any](), list[Any]()
            for client, each in enumerate(clients):
                values = flwr.common.parameters_to_ndarrays(parameters)
                body, examples, _ = each.fit(values, {})
                sent += len(body[0])
                result = flwr.common.FitRes(
                    flwr.common.Status(flwr.common.Code.OK, ""),
                    flwr.common.ndarrays_to_parameters(body),
                    examples,
                    {},
                )
                is_lost = accuracy_vs_bytes.is_upload_lost(lost, seed, number, client)
                (failed if is_lost else arrived).append((None, result))
            parameters, _ = strategy.aggregate_fit(number, arrived, failed)
            strategy.evaluate(number, parameters)
            up.append(sent)
    return {"accuracies": accuracies, "up": up}


class Rows:
    """A client's number, and how many examples it has: all that NNCodec's client asks of it."""

    def __init__(self, rows: Any, client: int) -> None:
        self.rows, self.client = rows, client

    def __len__(self) -> int:
        return len(self.rows)


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Markdown: means over the seeds."""
    yield "| method | lost | seeds | ends, % | MB up in all |"
    yield "|---|---|---|---|---|"
    for method in dict.fromkeys(row["method"] for row in rows):
        for lost in LOST:
            own = [row for row in rows if (row["method"], row["lost"]) == (method, lost)]
            if own:
                ends = [100 * np.mean(row["accuracies"][-5:]) for row in own]
                sent = np.mean([row["up"][-1] for row in own]) / 1e6
                yield (f"| {method} | {lost:.0%} | {len(own)} | {np.mean(ends):.1f} | {sent:.3f} |")


def main() -> None:
    made = parser(__doc__, seeds="0")
    made.add_argument("--data", type=Path, default=Path("data"), help="see accuracy_tasks.py")
    made.add_argument("--table", action="store_true", help="print the table of the kept figures")
    made.add_argument("--only", default="", help="methods whose name holds this")
    made.set_defaults(quick=False)
    asked = made.parse_args()
    rows: list[dict[str, Any]] = json.loads(KEPT.read_text()) if asked.table else []
    methods = ["float32, FedAvg", "fedpress, default", *(f"NNCodec 2, qp {qp}" for qp in STEPS)]
    for seed in seed_list(asked) if not asked.table else ():
        for method in (each for each in methods if asked.only in each):
            for lost in LOST:
                begun = time.process_time()
                try:
                    if method.startswith("NNCodec"):
                        row = nncodec(int(method.split()[-1]), seed, asked.data, lost)
                    else:
                        recipe = "auto" if method == "fedpress, default" else "fedavg"
                        row = ours(recipe, seed, asked.data, lost)
                except ImportError as exc:
                    print(f"{method} is left out: {exc}", file=sys.stderr)
                    continue
                seconds = round(time.process_time() - begun, 1)
                row |= {"method": method, "lost": lost, "seed": seed, "cpu_seconds": seconds}
                rows.append(row)
                save(rows, asked.json)
                end = 100 * np.mean(row["accuracies"][-5:])
                print(f"{method}, {lost:.0%} lost, seed {seed}: {end:.1f} %, {row['up'][-1]} bytes")
    report("\n".join(table(rows)), rows, None if asked.table else asked.json)


if __name__ == "__main__":
    main()
