"""Rounds against a server on this machine by devices that COMMAND runs, wherever that is:

    python -m tests.platforms.rounds COMMAND [ARGUMENT ...] FOLDER

COMMAND is the interpreter there with device.py's place, e.g. `chroot /arm64 /venv/bin/python
/device.py`, and FOLDER is for the devices' state, by the name that it has for them. Prints what
devices print, and the digest of each task's last model: the same on every platform.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedpress_protocols.messages import TaskConfig
from fedpress_protocols.model import Model
from tests.platforms.device import DEVICES
from tests.system.server_process import ServerProcess

ROUNDS = 3
_SHARED = {"id": "error_feedback", "inner": {"id": "shared_support", "fraction": 0.25}}
TASKS: Mapping[str, Mapping[str, Any]] = {
    "quantized": {"compressor": {"id": "error_feedback", "inner": {"id": "quantize", "bits": 3}}},
    "sparse": {"compressor": {"id": "error_feedback", "inner": {"id": "topk", "fraction": 0.01}}},
    "masked": {"compressor": _SHARED, "lane": "masked", "masking": {"levels": 127}},
}
"""What each task differs in: both lanes, random rounding, a support from a shared seed."""


def first_model() -> Model:
    """A matrix and a vector whose numbers are multiples of 1/1024."""
    numbers = (np.arange(6000) * 7919 % 2048 - 1024).astype(np.float32) / np.float32(1024)
    return Model.from_tensors({"matrix": numbers[:5940].reshape(99, 60), "vector": numbers[5940:]})


def digests(
    command: Sequence[str], folder: Path, *, at: str = "", timeout: float = 600.0
) -> dict[str, str]:
    """Run every task by the devices of `command`: the digest of its last model, by task. `at`: a
    folder for the devices' state, by the name that it has for them; one in `folder` if empty."""
    server = ServerProcess(folder)
    server.start()
    try:
        with server.operator() as operator:
            model = first_model()
            operator.register_model(model)
            for name, settings in TASKS.items():
                rest = {key: value for key, value in settings.items() if key != "compressor"}
                config = {
                    "task": name,
                    "model": model.digest,
                    "rounds": ROUNDS,
                    "profiles": [{"name": "one", "compressor": settings["compressor"]}],
                    "cohort": {"size": DEVICES, "minimum": DEVICES},
                    "seed": 7,
                }
                operator.create_task(TaskConfig.model_validate_json(json.dumps(config | rest)))
            token = operator.create_token(uses=DEVICES)
            state = at or str(folder / "state")
            subprocess.run(
                [*command, server.url, token, state, *TASKS], check=True, timeout=timeout
            )
            return {name: operator.task(name).model for name in TASKS}
    finally:
        server.stop()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="fedpress-rounds-") as name:
        *command, at = sys.argv[1:]
        for task, digest in digests(command, Path(name), at=at).items():
            print(task, digest)
