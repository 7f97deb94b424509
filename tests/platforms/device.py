"""Devices for `rounds.py`, which need fedpress's base install and no other file:

    python device.py URL TOKEN FOLDER TASK [TASK ...]

Runs three devices through each task in turn. Training is exact arithmetic, so that all else is
fedpress's: the same seeds must give the same bytes on any machine.
"""

import platform
import sys
import threading
from pathlib import Path

import numpy as np

from fedpress_client import Client, Trained, TrainingRequest
from fedpress_compression import kernels
from fedpress_protocols.model import Model

DEVICES = 3


class Dyadic:
    """Adds multiples of 1/65536, drawn as integers from the seed: no rounding anywhere."""

    def __init__(self, number: int) -> None:
        self.number = number

    def train(self, model: Model, work: TrainingRequest) -> Trained:
        steps = np.random.default_rng(work.seed).integers(-4000, 4001, model.spec.size)
        update = steps.astype(np.float32) / np.float32(65536)
        return Trained(model.parameters + update, 10 + self.number)

    def evaluate(self, model: Model) -> None:
        return None


def main(url: str, token: str, folder: Path, *tasks: str) -> int:
    print(platform.system(), platform.machine(), platform.python_version(), kernels.CHOSEN)
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            for task in tasks:
                ended = Client(
                    url,
                    Dyadic(number),
                    state_dir=folder / f"device-{number}",
                    task=task,
                    token=token,
                    seed=number,
                    wait=1.0,
                ).run()
                print(
                    f"{number} {task} {ended.state}: {ended.included} included\n",
                    end="",
                    flush=True,
                )
        except BaseException as exc:
            failures.append(exc)
            raise

    threads = [threading.Thread(target=run, args=(number,)) for number in range(DEVICES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 1 if failures else 0


if __name__ == "__main__":
    url, token, folder, *tasks = sys.argv[1:]
    sys.exit(main(url, token, Path(folder), *tasks))
