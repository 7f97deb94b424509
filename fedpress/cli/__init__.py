"""The command `fedpress`."""

from fedpress.cli.commands import app, main

__all__ = ["app", "main"]
