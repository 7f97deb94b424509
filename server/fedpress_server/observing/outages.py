"""Outages: what an operator mends, and what goes on by itself then.

A full disk or a database that is down fails whatever wants it, several times a second. One line
says so when it begins, with what to do, and one when it is over. What failed meanwhile says so at
level debug, without a traceback: there is nothing in the code to look for.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable
from contextvars import Context

from fedpress_protocols.errors import Unavailable

FULL = (errno.ENOSPC, errno.EDQUOT)
"""The errors of a full disk."""
MAKE_ROOM = "%s; nothing acknowledged is lost: make room, and all goes on by itself"
"""Begins the outage of a disk; docs/operations/disk-full.md has more."""
QUIET = 90.0
"""Seconds without a failure after which a success is an end: longer than anything waits before it
tries again, since on a full disk what is small, or changes nothing, goes through meanwhile."""


class Outage:
    """Of one thing, as its one door sees it. Any thread may tell of it.

    `begins` has a place for the reason. `quiet`: seconds without a failure before a success ends
    it.
    """

    def __init__(
        self,
        log: logging.Logger,
        begins: str,
        over: str,
        *,
        quiet: float = QUIET,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._begins, self._over = begins, over
        self._quiet = quiet
        self._clock = clock
        self._lock = threading.Lock()
        self._failed_at: float | None = None

    def failed(self, reason: object) -> None:
        with self._lock:
            is_new, self._failed_at = self._failed_at is None, self._clock()
        if is_new:
            Context().run(self._log.warning, self._begins, reason)  # it concerns no request

    def worked(self) -> None:
        if self._failed_at is None:
            return
        with self._lock:
            if self._failed_at is None or self._clock() < self._failed_at + self._quiet:
                return
            self._failed_at = None
        Context().run(self._log.warning, self._over)


def tell(log: logging.Logger, exc: Exception, message: str, *args: object) -> None:
    """Write down what failed and is tried again: with its traceback, unless it is an outage, of
    which the door to what is out has told."""
    if isinstance(exc, Unavailable):
        log.debug(f"{message}: %s", *args, exc)
    elif isinstance(exc, OSError) and exc.errno in FULL:  # by no door: a temporary file
        log.warning(f"{message}: %s", *args, exc)
    else:
        log.error(message, *args, exc_info=exc)
