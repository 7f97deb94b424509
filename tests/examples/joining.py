"""Examples as their READMEs run them: an operator's commands, and devices that are processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from click.testing import CliRunner

from fedpress.cli import app
from tests.system.server_process import ADMIN_TOKEN

PATIENCE = 180.0
FEDPRESS = ("-m", "fedpress")


def fedpress(*words: str | Path, url: str) -> str:
    """What the command prints; it must succeed."""
    access = {"FEDPRESS_URL": url, "FEDPRESS_ADMIN_TOKEN": ADMIN_TOKEN}
    done = CliRunner().invoke(app, [str(word) for word in words], env=access)
    assert done.exit_code == 0, done.output
    return done.stdout


def join(
    example: Path,
    trainer: str,
    url: str,
    devices: Mapping[Path, Mapping[str, str]],
    *,
    program: Sequence[str] = FEDPRESS,
) -> list[str]:
    """Have a device join for each state folder, with these variables, and return what each has
    printed once all have ended. `program` are Python's arguments for the command `fedpress`."""
    processes: list[subprocess.Popen[str]] = []
    uses = str(len(devices))
    token = fedpress("devices", "token", "create", "--uses", uses, url=url).strip()
    ours = {"PYTHONPATH": os.pathsep.join(sys.path), "FEDPRESS_TOKEN": token}
    try:
        for state, variables in devices.items():
            words = ["client", "join", url, "--app", trainer, "--state-dir", str(state)]
            processes.append(
                subprocess.Popen(
                    [sys.executable, *program, *words],
                    cwd=example,
                    env={**os.environ, "OMP_NUM_THREADS": "1", **ours, **variables},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        printed = []
        for process in processes:
            printed.append(process.communicate(timeout=PATIENCE)[0])
            assert process.returncode == 0, printed[-1]
        return printed
    finally:
        for process in processes:
            process.kill()
            process.wait()
