"""One demo device: a process that takes part in both tasks, with the same images and seed in each.

    python -m fedpress.demo.device URL --index 3 --clients 10 --seed 0 --state DIR TASK [TASK ...]

The enrolment token comes in FEDPRESS_TOKEN, so that it does not show in the list of processes.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

import torch

from fedpress.demo import digits
from fedpress_client import Client
from fedpress_protocols.errors import FedpressError


def main() -> int:
    parser = argparse.ArgumentParser(prog="fedpress.demo.device")
    parser.add_argument("url")
    parser.add_argument("tasks", nargs="+")
    parser.add_argument("--index", type=int, required=True)
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--state", type=Path, required=True)
    asked = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level="INFO")
    torch.set_num_threads(1)

    images = digits.split(asked.seed, asked.clients)[1][asked.index]
    seed = asked.seed * 1000 + asked.index
    clients = [
        Client(
            asked.url,
            digits.trainer(asked.seed, images),
            state_dir=asked.state,
            task=task,
            token=os.environ.get("FEDPRESS_TOKEN"),
            seed=seed,
        )
        for task in asked.tasks
    ]

    def stop(signum: int, frame: FrameType | None) -> None:
        for client in clients:
            client.stop()

    signal.signal(signal.SIGTERM, stop)
    failures: list[FedpressError] = []

    def run(client: Client) -> None:
        try:
            client.run()
        except FedpressError as exc:
            logging.getLogger(__name__).error("%s", exc)
            failures.append(exc)

    threads = [threading.Thread(target=run, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
