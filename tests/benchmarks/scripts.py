"""Runs of benchmarks in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def printed(script: Path, *options: str | Path) -> list[str]:
    """The lines that `script` prints; fails if it does."""
    answer = subprocess.run(
        [sys.executable, script, *options],
        env={"PYTHONPATH": os.pathsep.join(sys.path), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
        timeout=280,
    )
    return answer.stdout.splitlines()
