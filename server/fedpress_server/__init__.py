"""The coordinator: rounds, uploads and models behind an HTTP API."""

from fedpress_server.app import create_app
from fedpress_server.serve import serve
from fedpress_server.settings import Settings

__all__ = ["Settings", "create_app", "serve"]
