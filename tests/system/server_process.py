"""A real server process that a test can kill and start again on the same port and data."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from fedpress.operator import Operator
from tests import ports

ADMIN_TOKEN = "an admin token for tests"
_START_SECONDS = 60.0


class ServerProcess:
    """`python -m fedpress_server` on a fixed free port of the loopback interface."""

    def __init__(
        self, folder: Path, settings: Mapping[str, str] | None = None, *, open_files: int = 0
    ) -> None:
        """`settings`: more variables than those that every server here has. `open_files`: the soft
        limit that the process begins with, if not that of the tests."""
        self._settings = dict(settings or {})
        limited = ("sh", "-c", f'ulimit -Sn {open_files}; exec "$@"', "sh") if open_files else ()
        self._command = (*limited, sys.executable, "-m", "fedpress_server")
        folder.mkdir(parents=True, exist_ok=True)
        self.port = ports.unused()
        self.url = f"http://127.0.0.1:{self.port}"
        self.data_dir = folder / "server"
        self.log = folder / "server.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, wait: bool = True, settings: Mapping[str, str] | None = None) -> None:
        """Start it, from now on with `settings`, too; with `wait` return once it has said that it
        is ready."""
        self._settings |= settings or {}
        variables = {
            "FEDPRESS_HOST": "127.0.0.1",
            "FEDPRESS_PORT": str(self.port),
            "FEDPRESS_DATA_DIR": str(self.data_dir),
            "FEDPRESS_ADMIN_TOKEN": ADMIN_TOKEN,
            "FEDPRESS_POLL_SECONDS": "0.2",
            "FEDPRESS_OPEN_METRICS": "true",
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PYTHONUNBUFFERED": "1",
            **self._settings,
        }
        begin = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **variables},
            )
        give_up = time.monotonic() + _START_SECONDS
        while wait and b"server ready on" not in self.log.read_bytes()[begin:]:
            running = self._process.poll() is None
            assert running, f"the server did not start:\n{self.log.read_text()[-3000:]}"
            assert time.monotonic() < give_up, "the server takes more than a minute to start"
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL, as a power cut would have it for the process."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def stop(self) -> int:
        """SIGTERM; returns the exit status."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(30)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def operator(self) -> Operator:
        return Operator(self.url, ADMIN_TOKEN)
