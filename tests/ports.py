"""TCP ports for servers that have to begin again on the same one."""

from __future__ import annotations

import itertools
import os
import socket

_FIRST, _EACH, _WORKERS = 20_000, 1_000, 12
"""Below those that systems give to connections and to servers that ask for any."""
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % _WORKERS
_next = itertools.count(os.getpid())


def unused() -> int:
    """A port of the loopback interface that no other process gets: each of xdist's workers has some
    of its own, and takes the next one."""
    for number in itertools.islice(_next, _EACH):
        port = _FIRST + _worker * _EACH + number % _EACH
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise OSError(f"no port from {_FIRST + _worker * _EACH} on is free")
