"""Backups of a server: created while it runs, verified, and restored."""

from fedpress_server.backup.restoring import Restored, restore
from fedpress_server.backup.taking import back_up
from fedpress_server.backup.verifying import Report, verify

__all__ = ["Report", "Restored", "back_up", "restore", "verify"]
