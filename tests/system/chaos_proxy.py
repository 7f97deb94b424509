"""A TCP proxy that counts what a device sends and breaks connections where a test says so."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterable
from typing import Literal

Fault = Literal["reset", "stall", "mute"]
"""What happens at a cut: the connection is reset; nothing more is read or answered, and both ends
stay open; or all goes on to the server, whose answers are lost."""

_RESET = struct.pack("ii", 1, 0)
_CHUNK = 65536


class ChaosProxy:
    """Forwards to `port` on loopback. `cuts` are counts of bytes from devices to the server, over
    all connections: at each, the connection that carries it meets its fault. `rate` is in bytes a
    second."""

    def __init__(
        self, port: int, cuts: Iterable[tuple[int, Fault]] = (), *, rate: float | None = None
    ) -> None:
        self._target, self._rate = port, rate
        self._cuts = sorted(cuts)
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: set[socket.socket] = set()
        self.port = int(self._listener.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.bytes_up = 0
        """Read from devices so far."""
        self.met: list[Fault] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()
        with self._lock:
            for each in self._sockets:
                each.close()

    def _accept(self) -> None:
        while True:
            try:
                device, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                _reset(device)
                continue
            link = _Link(device, server)
            with self._lock:
                self._sockets |= {device, server}
            threading.Thread(target=self._up, args=(link,), daemon=True).start()
            threading.Thread(target=self._down, args=(link,), daemon=True).start()

    def _up(self, link: _Link) -> None:
        try:
            while data := link.device.recv(self._most()):
                if self._rate is not None:
                    time.sleep(len(data) / self._rate)
                fault = self._counted(len(data))
                if fault == "reset":
                    _reset(link.device)
                    _reset(link.server)
                    return
                if fault == "stall":
                    link.answers = False
                    return
                if fault == "mute":
                    link.answers = False
                link.server.sendall(data)
            link.server.shutdown(socket.SHUT_WR)
        except OSError:
            _reset(link.device)

    def _down(self, link: _Link) -> None:
        try:
            while data := link.server.recv(_CHUNK):
                if not link.answers:
                    link.device.shutdown(socket.SHUT_RDWR)  # lost, and the device sees it at once
                    return
                link.device.sendall(data)
            link.device.shutdown(socket.SHUT_WR)
        except OSError:
            _reset(link.server)

    def _most(self) -> int:
        """So much is read that the next cut falls exactly where it is due."""
        with self._lock:
            left = self._cuts[0][0] - self.bytes_up if self._cuts else _CHUNK
        return max(1, min(_CHUNK, left))

    def _counted(self, num_bytes: int) -> Fault | None:
        with self._lock:
            self.bytes_up += num_bytes
            if self._cuts and self.bytes_up >= self._cuts[0][0]:
                fault = self._cuts.pop(0)[1]
                self.met.append(fault)
                return fault
        return None


class _Link:
    def __init__(self, device: socket.socket, server: socket.socket) -> None:
        self.device, self.server = device, server
        self.answers = True


def _reset(end: socket.socket) -> None:
    try:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        end.close()
    except OSError:
        pass
