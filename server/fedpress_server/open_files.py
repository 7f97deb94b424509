"""How many files the process may open, and so how many connections it can serve."""

from __future__ import annotations

import resource
from contextlib import suppress

from fedpress_server.settings import Settings

_MOST_CONNECTIONS = 16_384
_ENOUGH = 65_536
"""Open files that no server needs more of; a hard limit may be a billion."""
_OWN = 64
"""Files that a server has open for itself: its database, its log, its libraries."""


def raise_limit() -> int:
    """Raise the soft limit on open files as far as the hard one lets, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # a system may have a lower limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return possible()[0]


def possible() -> tuple[int, int]:
    """The soft limit on open files, and what it can be raised to."""
    soft, hard = (
        _ENOUGH if each == resource.RLIM_INFINITY else each
        for each in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    return soft, hard


def connections(settings: Settings, files: int) -> tuple[int, int]:
    """The connections to serve at a time with so many `files`, in all and of one address.

    A connection that downloads has a file open, too.
    """
    most = settings.max_connections or min(_MOST_CONNECTIONS, max(1, (files - _OWN) // 2))
    return most, min(most, settings.max_connections_per_address or max(1, most // 2))


def needed(settings: Settings) -> int:
    """Open files for the connections that the settings name."""
    return 2 * (settings.max_connections or 0) + _OWN
