"""The demo's processes: one server and its devices, started, watched and stopped together."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console

from fedpress.command_line import print_site
from fedpress.operator import Operator
from fedpress_protocols.errors import ServerError

_READY = re.compile(r"ready on (http://\S+)")
_START_SECONDS = 60.0
_STOP_SECONDS = 10.0
_VIEW_SECONDS = 86400.0
"""Lifetime of the token for the console; the server ends with the demo."""


class Fleet:
    """Everything runs in sessions of its own, so that Ctrl-C reaches this process alone and the
    devices are stopped before their server. State lies in `folder`, and what the processes print
    in `logs`; `settings` are the server's besides those of every demo."""

    def __init__(self, folder: Path, logs: Path, settings: Mapping[str, str] | None = None) -> None:
        self._folder = folder
        self._settings = settings or {}
        self._logs = logs
        self._admin_token = secrets.token_urlsafe(24)
        self._server: subprocess.Popen[bytes] | None = None
        self._devices: list[subprocess.Popen[bytes]] = []
        self.url = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start_server(self) -> Operator:
        """A server on a free port of this machine; returns once it answers."""
        settings = {
            "FEDPRESS_HOST": "127.0.0.1",
            "FEDPRESS_PORT": "0",
            "FEDPRESS_DATA_DIR": str(self._folder / "server"),
            "FEDPRESS_ADMIN_TOKEN": self._admin_token,
            **{f"FEDPRESS_{name.upper()}": value for name, value in self._settings.items()},
        }
        with _interrupts_held_back():
            self._server = self._spawn("server", ["-m", "fedpress_server"], settings)
        log = self._logs / "server.log"
        give_up = time.monotonic() + _START_SECONDS
        while time.monotonic() < give_up and self._server.poll() is None:
            ready = _READY.search(log.read_text(errors="replace"))
            if ready:
                self.url = ready[1]
                return Operator(self.url, self._admin_token)
            time.sleep(0.05)
        raise ServerError(f"the server did not start: {_tail(log)}", hint=f"see {log}")

    def show_console(self, operator: Operator, console: Console) -> None:
        """Print the address of the server's console, and a token that may look and nothing else."""
        viewer = operator.create_operator("viewer", expires_in=_VIEW_SECONDS, note="demo")
        print_site(console, self.url, viewer.token)

    def stay(self, console: Console) -> None:
        """Wait for Ctrl-C, with the server running."""
        console.print("all rounds are done; Ctrl-C ends the server", highlight=False)
        with suppress(KeyboardInterrupt):
            while True:
                self.check()
                time.sleep(1)

    def start_devices(self, token: str, clients: int, seed: int, tasks: Sequence[str]) -> None:
        environment = {"FEDPRESS_TOKEN": token, "OMP_NUM_THREADS": "1"}
        for index in range(clients):
            arguments = [
                *("-m", "fedpress.demo.device", self.url, *tasks),
                f"--index={index}",
                f"--clients={clients}",
                f"--seed={seed}",
                f"--state={self._folder / f'device-{index}'}",
            ]
            with _interrupts_held_back():
                self._devices.append(self._spawn(f"device-{index}", arguments, environment))

    def check(self) -> None:
        """Raise ServerError if a process has died; one that ended well is well."""
        if self._server is not None and self._server.poll() is not None:
            log = self._logs / "server.log"
            raise ServerError(f"the server ended by itself: {_tail(log)}", hint=f"see {log}")
        for index, device in enumerate(self._devices):
            if device.poll():
                log = self._logs / f"device-{index}.log"
                raise ServerError(f"device {index} failed: {_tail(log)}", hint=f"see {log}")

    def finish(self, timeout: float = 60.0) -> None:
        """Wait for the devices to see that their tasks are over."""
        give_up = time.monotonic() + timeout
        for device in self._devices:
            try:
                device.wait(max(0.1, give_up - time.monotonic()))
            except subprocess.TimeoutExpired:
                break

    def stop(self) -> None:
        """Stop the devices, then the server; kill what does not listen. Idempotent."""
        _stop(self._devices)
        _stop([self._server] if self._server else [])
        self._devices, self._server = [], None

    def _spawn(
        self, name: str, arguments: Sequence[str], environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        with (self._logs / f"{name}.log").open("wb") as log:
            return subprocess.Popen(  # noqa: S603 - our own modules, no shell
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Ctrl-C takes effect once what is started in here is noted, or nobody would stop it."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Ctrl-C reaches the main thread alone
        return
    interrupts: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupts:
        raise KeyboardInterrupt


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    give_up = time.monotonic() + _STOP_SECONDS
    for process in processes:
        try:
            process.wait(max(0.1, give_up - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1] if lines else "it printed nothing"
