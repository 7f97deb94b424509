"""Rate limits of enrolment: for failed attempts, and for bursts of a fleet.

A token is 192 random bits and cannot be guessed; the limits bound the cost of guesses. A token that
has enrolled a device is cached, and passes independently of its neighbours. Any other token spends
from the failure budgets of its address, of itself and of all addresses before it is looked up, and
is refunded if it is valid. Behind a proxy or router all devices have one address: there strangers
may exhaust that budget, and a valid token that is new to this server passes by the list of valid
ones, which is then read every few seconds. All state is in memory.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from fedpress_protocols.errors import TooManyRequests
from fedpress_server.identity.limits import Budgets

BURST_SECONDS = 5.0
"""Burst of enrolments, in seconds of the rate."""
FAILURES_PER_SECOND = 20.0
MOST_FAILURES = 600.0
"""Failures of all addresses together: burst and rate per second."""
MOST_TOKENS = 4_096
"""Maximum number of cached valid tokens."""
LIST_SECONDS = 5.0
"""Minimum seconds between reads of the list of valid tokens."""
_LONGEST_WAIT = 60.0
_ALL = ""


class Place:
    """The budget spent on an unknown token, refunded if it is valid."""

    def __init__(self, spent: tuple[tuple[Budgets, str], ...]) -> None:
        self._spent = spent

    def was_good(self) -> None:
        for budgets, key in self._spent:
            budgets.give_back(key)


class EnrolmentLimits:
    """Limits of `per_second` enrolments with valid tokens, and `failures_per_minute` per address
    and per token. Not thread-safe."""

    def __init__(self, per_second: float, failures_per_minute: float) -> None:
        burst, rate = max(1.0, failures_per_minute), failures_per_minute / 60
        self._enrolments = Budgets(
            burst=max(1.0, BURST_SECONDS * per_second), per_second=per_second
        )
        self._failures = Budgets(burst=MOST_FAILURES, per_second=FAILURES_PER_SECOND)
        self._of_address = Budgets(burst=burst, per_second=rate)
        self._of_token = Budgets(burst=burst, per_second=rate)
        self._good: OrderedDict[str, None] = OrderedDict()
        self._listed_at = -math.inf

    def knows(self, token_hash: str) -> bool:
        """Whether the token was valid when it was last looked up."""
        return token_hash in self._good

    def learn(self, token_hash: str) -> None:
        self._good[token_hash] = None
        self._good.move_to_end(token_hash)
        while len(self._good) > MOST_TOKENS:
            self._good.popitem(last=False)

    def forget(self, token_hash: str) -> None:
        self._good.pop(token_hash, None)

    def list_is_due(self, now: float) -> bool:
        """Whether the list of valid tokens may be read now; if so, counts it as read."""
        if 0 <= now - self._listed_at < LIST_SECONDS:
            return False
        self._listed_at = now
        return True

    def place(self, address: str, token_hash: str, now: float) -> Place:
        """Spend from the failure budgets for an unknown token; raises TooManyRequests."""
        spent = (
            (self._failures, _ALL),
            (self._of_address, address),
            (self._of_token, token_hash),
        )
        wait = max(budgets.wait(key, now) for budgets, key in spent)
        if wait > 0:
            raise _refused(wait, "too many enrolments have failed")
        for budgets, key in spent:
            budgets.spend(key, now)
        return Place(spent)

    def admit(self, now: float) -> None:
        """Count an enrolment with a valid token; raises TooManyRequests."""
        wait = self._enrolments.wait(_ALL, now)
        if wait > 0:
            raise _refused(wait, "too many devices enrol at once")
        self._enrolments.spend(_ALL, now)


def _refused(wait: float, why: str) -> TooManyRequests:
    """The error for a limit that ends in `wait` seconds; the device adds jitter."""
    return TooManyRequests(why, retry_after=min(_LONGEST_WAIT, max(1, math.ceil(wait))))
