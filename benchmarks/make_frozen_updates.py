"""Write the frozen updates of beside_the_field.py: what clients of three tasks send.

    python benchmarks/make_frozen_updates.py --data FOLDER [--out FOLDER]

Plain FedAvg on the tasks of `accuracy_tasks.py` (digits; Fashion-MNIST, Dirichlet .1; Shakespeare),
two clients of each of two rounds of a task: twelve updates. Updates and `previous`, the model's
last step, are float16, which changes them by a thousandth: errors are measured against the float16
values. A file for each task and round, in the form of `fedpress bench rate-distortion`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import accuracy_tasks
import numpy as np

from fedpress_compression.tensors import ModelSpec, Vector

FOLDER = Path(__file__).parent / "fixtures" / "frozen"
ROUNDS = {"digits": (3, 30), "fashion .1": (3, 30), "shakespeare": (3, 30)}
"""The rounds, counted from 1, of which updates are kept."""
KEPT, SEED = 2, 0


def frozen(
    task: accuracy_tasks.Task, rounds: tuple[int, ...]
) -> Iterator[tuple[int, Vector, Vector]]:
    """Each of `rounds` with the updates of KEPT clients and the model's step before it."""
    model, rng = task.first_model, np.random.default_rng(SEED)
    previous = np.zeros(model.spec.size, np.float32)
    for number in range(1, max(rounds) + 1):
        cohort = rng.choice(len(task.clients), task.cohort, replace=False).tolist()
        updates = np.stack([task.update(model, client, rng, task.rate) for client in cohort])
        if number in rounds:
            yield number, updates[:KEPT], previous
        shares = np.array([task.clients[client].size for client in cohort], np.float32)
        previous = (updates * (shares / shares.sum())[:, np.newaxis]).sum(axis=0)
        model = model.with_parameters(model.parameters + previous)


def write(path: Path, spec: ModelSpec, updates: Vector, previous: Vector) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        path,
        names=np.array([tensor.name for tensor in spec.tensors]),
        shapes=np.array([",".join(map(str, tensor.shape)) for tensor in spec.tensors]),
        updates=updates.astype("<f2"),
        previous=previous.astype("<f2"),
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--data", type=Path, default=Path("data"), help="see accuracy_tasks.py")
    arguments.add_argument("--out", type=Path, default=FOLDER)
    chosen = arguments.parse_args()
    for name, rounds in ROUNDS.items():
        task = accuracy_tasks.made(name, chosen.data, SEED)
        for number, updates, previous in frozen(task, rounds):
            path = chosen.out / f"{name.replace(' ', '')}-round{number}.npz"
            write(path, task.first_model.spec, updates, previous)
            print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
