"""Servers that a test kills by the hundred: forked from a process that has imported everything."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

from fedpress_server import Settings, serve
from fedpress_server.coordination import jobs
from tests import ports
from tests.system.server_process import ADMIN_TOKEN

_START_SECONDS = 60.0
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["fedpress_server.serve", "fedpress_client"])


class ForkedServer:
    """A whole server in a process of its own, on a fixed free port of the loopback interface."""

    def __init__(self, folder: Path, settings: Mapping[str, str], *, batch: int) -> None:
        """`settings`: more than those that every server here has; `batch`: uploads that it adds up
        together."""
        folder.mkdir(parents=True)
        port = ports.unused()
        self.url = f"http://127.0.0.1:{port}"
        self.data_dir = folder / "data"
        self.log = folder / "server.log"
        self._batch = batch
        self._settings = {
            "host": "127.0.0.1",
            "port": str(port),
            "data_dir": str(self.data_dir),
            "admin_token": ADMIN_TOKEN,
            "poll_seconds": "0.2",
            "open_metrics": "true",
            **settings,
        }
        self.process: BaseProcess | None = None

    def start(self, failpoint: str = "") -> None:
        """Start it, armed with `failpoint`, where it may die at once."""
        settings = self._settings | {"failpoint": failpoint}
        self.log.touch()
        self._begin = self.log.stat().st_size
        arguments = (settings, str(self.log), self._batch)
        self.process = _context.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()

    def wait(self) -> None:
        """Until it takes requests."""
        give_up = time.monotonic() + _START_SECONDS
        while b"server ready on" not in self.log.read_bytes()[self._begin :]:
            assert self.is_running, f"the server did not start:\n{self.log.read_text()[-3000:]}"
            assert time.monotonic() < give_up, "the server takes more than a minute to start"
            time.sleep(0.02)

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.is_alive()

    @property
    def was_killed(self) -> bool:
        """Whether it ended by SIGKILL."""
        return self.process is not None and self.process.exitcode == -signal.SIGKILL

    @property
    def pid(self) -> int:
        assert self.process is not None
        assert self.process.pid is not None
        return self.process.pid

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()

    def stop(self) -> int | None:
        """SIGTERM; the exit status."""
        assert self.process is not None
        self.process.terminate()
        self.process.join(60)
        return self.process.exitcode


def _serve(settings: dict[str, str], log: str, batch: int) -> None:
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for name in [name for name in os.environ if name.startswith("FEDPRESS_")]:
        del os.environ[name]
    jobs.BATCH = batch
    serve(Settings.load(None, **settings))
