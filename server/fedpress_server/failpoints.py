"""Failpoints: named points between two durable steps at which a test may stop the process.

`FEDPRESS_FAILPOINT=upload-kept:kill:3` kills the process the third time that it reaches
`upload-kept`; without a number, the first. Several are separated by commas. A disabled failpoint
costs one lookup in an empty mapping. docs/fault-table.md has the purpose of each.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from fedpress_protocols.errors import ConfigurationError

POINTS: Mapping[str, str] = MappingProxyType(
    {
        "body-begun": "the first piece of an upload's body was received",
        "file-written": "a file is written and synced under a temporary name",
        "file-kept": "a file is durable under its name, no row refers to it",
        "upload-kept": "an upload is durable, its row is not written",
        "commit-due": "a transaction has run its statements and is about to commit",
        "committed": "a transaction is durable, the process has not been notified",
        "upload-committed": "an upload's row is durable, the device has no answer",
        "request-answered": "a request's answer is sent",
        "job-leased": "a worker holds a lease and has not started",
        "upload-added": "one more upload is added to an aggregation's sum",
        "sum-kept": "the sum of a batch is durable, its row is not written",
        "sum-committed": "the row of a batch's sum is durable",
        "model-stepped": "the optimizer has made the next model, no file of it is written",
        "model-kept": "the model and its state are durable, the version is not committed",
        "round-committed": "the result of a job is durable",
        "models-given-up": "collected models are marked in their rows, their files are not removed",
        "events-dropped": "some events of old rounds are deleted, others are not",
        "device-changed": "a device's new state or key is durable, no server has been notified",
    }
)
"""By name: the state when the process reaches the point."""
ACTIONS = ("kill", "raise", "pause")
"""SIGKILL; an exception; SIGSTOP, until somebody sends SIGCONT."""


class FailpointReached(RuntimeError):
    """Raised by the action `raise`."""


class Failpoint:
    """One action at the pass number `at` through a point."""

    def __init__(self, action: str, at: int) -> None:
        self._action, self._left = action, at
        self._lock = threading.Lock()

    def passed(self, name: str) -> None:
        with self._lock:
            self._left -= 1
            if self._left:
                return
        if self._action == "raise":
            raise FailpointReached(name)
        os.kill(os.getpid(), signal.SIGKILL if self._action == "kill" else signal.SIGSTOP)


_armed: dict[str, Failpoint] = {}


def reach(name: str) -> None:
    """Mark that the process has reached the point `name` of POINTS."""
    if _armed and name in _armed:
        _armed[name].passed(name)


def parsed(text: str) -> dict[str, Failpoint]:
    """Parse `name:action[:pass],...` by name; raises ConfigurationError."""
    failpoints: dict[str, Failpoint] = {}
    for each in filter(None, text.split(",")):
        name, _, rest = each.strip().partition(":")
        action, _, at = rest.partition(":")
        if name not in POINTS:
            raise ConfigurationError(
                f"there is no failpoint {name!r}", hint=f"one of {', '.join(POINTS)}"
            )
        if action not in ACTIONS or not (at or "1").isdecimal() or int(at or "1") < 1:
            raise ConfigurationError(
                f"failpoint {each.strip()!r} is not name:action[:pass]",
                hint=f"an action is one of {', '.join(ACTIONS)}, a pass a number from 1",
            )
        failpoints[name] = Failpoint(action, int(at or "1"))
    return failpoints


def arm(text: str) -> None:
    """Set the failpoints of this process; "" disarms. Raises ConfigurationError."""
    failpoints = parsed(text)
    _armed.clear()
    _armed.update(failpoints)


@contextmanager
def armed(text: str) -> Iterator[None]:
    """Like `arm`, within the block."""
    arm(text)
    try:
        yield
    finally:
        arm("")
