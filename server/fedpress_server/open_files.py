"""The limit on open files, which bounds the number of connections; Windows has none."""

from __future__ import annotations

import sys
from contextlib import suppress

from fedpress_server.settings import Settings

if sys.platform != "win32":
    import resource

_MOST_CONNECTIONS = 16_384
_ENOUGH = 65_536
"""Maximum open files to request; a hard limit may be a billion."""
_OWN = 64
"""Open files of the server itself: database, log, libraries."""


def raise_limit() -> int:
    """Raise the soft limit on open files up to the hard one, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    required = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < required:
        with suppress(ValueError, OSError):  # a system may have a lower limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (required, hard))
    return possible()[0]


def possible() -> tuple[int, int]:
    """The soft limit on open files, and the maximum it can be raised to."""
    soft, hard = (
        _ENOUGH if each == resource.RLIM_INFINITY else each
        for each in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    return soft, hard


def connections(settings: Settings, files: int) -> tuple[int, int]:
    """The maximum connections for this number of `files`, in total and per address.

    A connection with a download also has a file open.
    """
    most = settings.max_connections or min(_MOST_CONNECTIONS, max(1, (files - _OWN) // 2))
    return most, min(most, settings.max_connections_per_address or max(1, most // 2))


def needed(settings: Settings) -> int:
    """The open files needed for the connections in the settings."""
    return 2 * (settings.max_connections or 0) + _OWN
