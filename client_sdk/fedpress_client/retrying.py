"""Retries over a link that fails: which errors another attempt may cure, and how long to wait."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from fedpress_protocols.errors import FedpressError

_log = logging.getLogger(__name__)

_ResultT = TypeVar("_ResultT")


@dataclass(frozen=True, slots=True)
class Retries:
    """Full jitter: attempt n is followed by a pause drawn from [0, min(cap, base * 2**n)] seconds.

    A Retry-After, of an hour at most, is waited for in full, and the jitter comes on top. After
    `patience` seconds of pauses over one request the last error is raised.
    """

    base: float = 0.5
    cap: float = 60.0
    patience: float = 2 * 3600.0


class TryAgain(Exception):
    """`error`, after which another attempt may do better; `at_most` attempts end like this.
    `is_away`: no server was there, or it failed or put the request off, after `seconds`."""

    def __init__(
        self,
        error: FedpressError,
        *,
        after: float | None = None,
        pause: float | None = None,
        at_most: float = math.inf,
        is_away: bool = False,
    ) -> None:
        super().__init__(str(error))
        self.error = error
        self.after = after
        self.pause = pause
        self.at_most = at_most
        self.is_away = is_away
        self.seconds = 0.0
        self.progress = False


@dataclass(frozen=True, slots=True)
class RetryLoop:
    """Runs attempts by the rules of `retries`; `random` gives numbers in [0, 1).

    `on_away` is called with the seconds lost to each attempt that found the server away, the pause
    after it included.
    """

    retries: Retries
    sleep: Callable[[float], None]
    random: Callable[[], float]
    on_away: Callable[[float], None] = lambda seconds: None

    def run(self, attempt: Callable[[], _ResultT], action: str) -> _ResultT:
        """Return the result of `attempt`, retried as long as it raises TryAgain; `action` names it
        in the log."""
        failures, waited = 0, 0.0
        tries: dict[type[Exception], int] = {}
        while True:
            try:
                return attempt()
            except TryAgain as retry:
                kind = type(retry.error)
                tries[kind] = tries.get(kind, 0) + 1
                if retry.progress:
                    failures, waited = 0, 0.0
                pause = retry.pause
                if pause is None:
                    ceiling = min(self.retries.cap, self.retries.base * 2.0 ** min(failures, 60))
                    pause = (retry.after or 0.0) + self.random() * ceiling
                failures += 1
                waited += pause
                if waited > self.retries.patience or tries[kind] >= retry.at_most:
                    raise retry.error from retry.__cause__
                _log.warning("%s: %s; again in %.1f s", action, retry.error, pause)
                if retry.is_away:
                    self.on_away(retry.seconds + pause)
            self.sleep(pause)
