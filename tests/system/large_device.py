"""A device with a large update, in this process or, for tests that kill it, in one of its own."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from fedpress_client import Client, Model, Trained, TrainingRequest
from fedpress_client.state import StateDirectory, TaskFiles
from fedpress_client.transport import HttpTransport, Retries


class Adds:
    """A trainer that adds the same numbers every time; `size` parameters."""

    honours = frozenset[str]()

    def __init__(self, size: int) -> None:
        rng = np.random.default_rng(3)
        self._update = (rng.standard_normal(size) * 0.01).astype(np.float32)

    def train(self, model: Model, work: TrainingRequest) -> Trained:
        return Trained(model.parameters + self._update, 3)

    def evaluate(self, model: Model) -> None:
        return None


def make_device(url: str, folder: Path, task: str, token: str, size: int) -> Client:
    key = StateDirectory.open(folder).key()
    retries = Retries(base=0.01, cap=0.05)
    return Client(
        url,
        Adds(size),
        state_dir=folder,
        task=task,
        token=token,
        seed=1,
        transport=HttpTransport(url, key, retries=retries, timeout=5.0, part_seconds=1.0),
    )


def hang(files: TaskFiles, ledger: object) -> None:
    """In the place of saving the account."""
    time.sleep(600)


if __name__ == "__main__":
    server, state, name, enrolment, parameters, *more = sys.argv[1:]
    if more == ["--hang"]:
        TaskFiles.save = hang  # type: ignore[method-assign, assignment]
    make_device(server, Path(state), name, enrolment, int(parameters)).run()
