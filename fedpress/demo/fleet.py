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
from typing import Any, Self

from rich.console import Console

from fedpress.command_line import print_site
from fedpress.operator import Operator
from fedpress_protocols.errors import ServerError

_READY = re.compile(r"ready on (http://\S+)")
_START_SECONDS = 60.0
_STOP_SECONDS = 10.0
_VIEW_SECONDS = 86400.0
"""Lifetime of the token for the console; the server ends with the demo."""
_STOP_SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGBREAK") if hasattr(signal, name)
]


class Fleet:
    """Everything runs in sessions of its own, so that Ctrl-C reaches this process alone and the
    devices are stopped before their server. SIGTERM raises KeyboardInterrupt, too, as otherwise the
    processes would outlive this one. State lies in `folder`, and what the processes print in
    `logs`; `settings` are the server's besides those of every demo."""

    def __init__(self, folder: Path, logs: Path, settings: Mapping[str, str] | None = None) -> None:
        self._folder = folder
        self.settings = dict(settings or {})
        self._logs = logs
        self._server: subprocess.Popen[bytes] | None = None
        self._devices: dict[str, subprocess.Popen[bytes]] = {}
        self._started: set[str] = set()
        self._handlers: dict[int, Any] = {}
        self.admin_token = secrets.token_urlsafe(24)
        self.url = ""

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._handlers = {
                each: signal.signal(each, signal.default_int_handler)
                for each in _STOP_SIGNALS
                if each != signal.SIGINT
            }
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            with _interrupts_held_back():
                self.stop()
        finally:
            for each, handler in self._handlers.items():
                signal.signal(each, handler)
            self._handlers = {}

    def start_server(self) -> Operator:
        """A server on a free port of this machine; returns once it answers."""
        settings = {
            "FEDPRESS_HOST": "127.0.0.1",
            "FEDPRESS_PORT": "0",
            "FEDPRESS_DATA_DIR": str(self._folder / "server"),
            "FEDPRESS_ADMIN_TOKEN": self.admin_token,
            **{f"FEDPRESS_{name.upper()}": value for name, value in self.settings.items()},
        }
        with _interrupts_held_back():
            self._server = self._spawn("server", ["-m", "fedpress_server"], settings)
        log = self._log("server")
        give_up = time.monotonic() + _START_SECONDS
        while time.monotonic() < give_up and self._server.poll() is None:
            ready = _READY.search(log.read_text(errors="replace"))
            if ready:
                self.url = ready[1]
                return Operator(self.url, self.admin_token)
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
            self.start(f"device-{index}", arguments, environment)

    def start(
        self,
        name: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        folder: Path | None = None,
    ) -> None:
        """Start a device: `python ARGUMENTS` in `folder`, with these variables besides ours."""
        with _interrupts_held_back():
            self._devices[name] = self._spawn(name, arguments, environment, folder)

    def kill(self, name: str) -> None:
        """End a device without notice, as a power cut would; it may be started again."""
        device = self._devices.pop(name)
        device.kill()
        device.wait()

    def log(self, name: str) -> str:
        """The output of a process so far, all its starts together."""
        return self._log(name).read_text(errors="replace")

    def check(self) -> None:
        """Raise ServerError if a process has died; one that ended well is well."""
        if self._server is not None and self._server.poll() is not None:
            log = self._log("server")
            raise ServerError(f"the server ended by itself: {_tail(log)}", hint=f"see {log}")
        for name, device in self._devices.items():
            if device.poll():
                log = self._log(name)
                raise ServerError(f"{name} failed: {_tail(log)}", hint=f"see {log}")

    def finish(self, timeout: float = 60.0) -> None:
        """Wait for the devices to see that their tasks are over."""
        give_up = time.monotonic() + timeout
        for device in self._devices.values():
            try:
                device.wait(max(0.1, give_up - time.monotonic()))
            except subprocess.TimeoutExpired:
                break

    def stop(self) -> None:
        """Stop the devices, then the server; kill what does not listen. Idempotent."""
        _stop(list(self._devices.values()))
        _stop([self._server] if self._server else [])
        self._devices, self._server = {}, None

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def _spawn(
        self,
        name: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        folder: Path | None = None,
    ) -> subprocess.Popen[bytes]:
        mode = "ab" if name in self._started else "wb"
        self._started.add(name)
        with self._log(name).open(mode) as log:
            return subprocess.Popen(  # noqa: S603 - our own modules, no shell
                [sys.executable, *arguments],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """A signal to stop takes effect once what is started in here is noted, or nobody would stop
    it."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals reach the main thread alone
        return
    interrupts: list[int] = []
    before = {
        each: signal.signal(each, lambda number, frame: interrupts.append(number))
        for each in _STOP_SIGNALS
    }
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
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
