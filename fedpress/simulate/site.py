"""The server's console in a browser, while `fedpress simulate --task FILE --ui` runs."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import uvicorn
from anyio.from_thread import BlockingPortal
from fastapi import FastAPI
from rich.console import Console

from fedpress.command_line import print_site
from fedpress.operator import Operator
from fedpress_server.api.http_protocol import ConnectionLimits, bounded_protocol

_VIEW_SECONDS = 3650 * 86400.0
"""Of the simulated clock, by which a token expires."""
_LINGER_SECONDS = 2


class Site:
    """Serves the console to viewers until Ctrl-C after the last round."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def open(self, app: FastAPI, portal: BlockingPortal, operator: Operator) -> Iterator[None]:
        """Serve `app`, which runs in the portal's thread, on a free port of this machine."""
        viewer = operator.create_operator("viewer", expires_in=_VIEW_SECONDS, note="simulation")
        config = uvicorn.Config(
            app,
            http=bounded_protocol(ConnectionLimits()),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=_LINGER_SECONDS,
        )
        server = uvicorn.Server(config)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            serving = portal.start_task_soon(server.serve, [listener])
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            print_site(self._console, url, viewer.token)
            self._console.print("its times are the simulation's", highlight=False)
            try:
                yield
            finally:
                server.should_exit = True
                serving.result()

    def stay(self) -> None:
        """Return at Ctrl-C."""
        self._console.print("the task has ended; Ctrl-C ends the server", highlight=False)
        with suppress(KeyboardInterrupt):
            while True:
                time.sleep(1)
