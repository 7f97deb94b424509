"""Outages: failures that an operator has to fix, after which the server recovers by itself.

A full disk or a database that is down fails many operations a second. One log line reports the
start with a remedy, one the end. Failures in between are logged at level debug, without a
traceback, since the code is not the cause.
"""

from __future__ import annotations

import errno
import logging
import math
import threading
import time
from collections.abc import Callable
from contextvars import Context

from fedpress_protocols.errors import Unavailable

FULL = (errno.ENOSPC, errno.EDQUOT)
"""The errors of a full disk."""
MAKE_ROOM = "%s; nothing acknowledged is lost: free some space, and the server resumes by itself"
"""The start of a disk outage; see docs/operations/disk-full.md."""
QUIET = 90.0
"""Seconds without a failure after which a success ends the outage: longer than any retry interval,
since small writes may succeed on a full disk."""


class Outage:
    """The outage of one resource, as seen by the module that uses it. Thread-safe.

    `begins` has a placeholder for the reason. `quiet`: seconds without a failure before a success
    ends it.
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
        """During an outage: its newest failure."""
        self._newest = -math.inf

    def failed(self, reason: object) -> None:
        with self._lock:
            is_new, self._failed_at = self._failed_at is None, self._clock()
            self._newest = self._failed_at
        if is_new:
            Context().run(self._log.warning, self._begins, reason)  # it belongs to no request

    def has_failed_within(self, seconds: float) -> bool:
        """Whether the newest failure is at most so long ago, over or not."""
        return self._clock() <= self._newest + seconds

    def worked(self) -> None:
        if self._failed_at is None:
            return
        with self._lock:
            if self._failed_at is None or self._clock() < self._failed_at + self._quiet:
                return
            self._failed_at = None
        Context().run(self._log.warning, self._over)


def is_one(exc: Exception) -> bool:
    """Whether a failure says nothing against what was tried: a store or a database is away, or a
    disk is full, be it for a temporary file."""
    return isinstance(exc, Unavailable) or _is_full(exc)


def _is_full(exc: Exception) -> bool:
    return isinstance(exc, OSError) and exc.errno in FULL


def tell(log: logging.Logger, exc: Exception, message: str, *args: object) -> None:
    """Log a failure that will be retried: with its traceback, unless it is an outage, which the
    module of the resource has already logged."""
    if isinstance(exc, Unavailable):
        log.debug(f"{message}: %s", *args, exc)
    elif _is_full(exc):  # by no door: a temporary file
        log.warning(f"{message}: %s", *args, exc)
    else:
        log.error(message, *args, exc_info=exc)
