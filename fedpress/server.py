"""The server as a library: its settings, its ASGI application, and a process that serves it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedpress.lazy import exports

if TYPE_CHECKING:
    from fedpress_server.app import create_app
    from fedpress_server.serve import serve
    from fedpress_server.settings import Settings

__all__ = [
    "Settings",
    "create_app",
    "serve",
]

__getattr__, __dir__ = exports(
    __name__,
    {
        "Settings": "fedpress_server.settings",
        "create_app": "fedpress_server.app",
        "serve": "fedpress_server.serve",
    },
    extra="server",
)
