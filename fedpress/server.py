"""The server as a library: its settings, its ASGI application, and a process that serves it."""

from fedpress_server.app import create_app
from fedpress_server.serve import serve
from fedpress_server.settings import Settings

__all__ = [
    "Settings",
    "create_app",
    "serve",
]
