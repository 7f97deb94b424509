"""How often enrolment is tried: what a stranger may cost, and what a fleet may ask at once.

A token is 192 random bits, so nobody guesses one; what is to be kept small is the work that guesses
make. A token that has let a device in is remembered, and passes whatever its neighbours do. Any
other one spends from the budget for failures of its address, of itself and of all before anything
is looked up for it, and has it back if it turns out good. Behind a proxy every device has the
proxy's address, and so do all behind one router: there strangers may use that budget up, and a good
token that is new to this server gets in by the list of good ones, which is then read every few
seconds. Nothing here outlives the process.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from fedpress_protocols.errors import TooManyRequests
from fedpress_server.identity.limits import Budgets

BURST_SECONDS = 5.0
"""A crowd is let in at once as far as this many seconds' worth of enrolments."""
FAILURES_PER_SECOND = 20.0
MOST_FAILURES = 600.0
"""Of all addresses together: so many at once, and so many more a second."""
MOST_TOKENS = 4_096
"""That are remembered to be good."""
LIST_SECONDS = 5.0
"""How often the list of good tokens is read at most."""
_LONGEST_WAIT = 60.0
_ALL = ""


class Place:
    """What was spent on a token that is not known, until it turns out good."""

    def __init__(self, spent: tuple[tuple[Budgets, str], ...]) -> None:
        self._spent = spent

    def was_good(self) -> None:
        for budgets, key in self._spent:
            budgets.give_back(key)


class EnrolmentLimits:
    """`per_second` enrolments with good tokens, and `failures_per_minute` from one address, and of
    one token. To be called from one thread."""

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
        """Whether the token was good when it was last looked at."""
        return token_hash in self._good

    def learn(self, token_hash: str) -> None:
        self._good[token_hash] = None
        self._good.move_to_end(token_hash)
        while len(self._good) > MOST_TOKENS:
            self._good.popitem(last=False)

    def forget(self, token_hash: str) -> None:
        self._good.pop(token_hash, None)

    def list_is_due(self, now: float) -> bool:
        """Whether the list of good tokens may be read; if so it is taken to be."""
        if 0 <= now - self._listed_at < LIST_SECONDS:
            return False
        self._listed_at = now
        return True

    def place(self, address: str, token_hash: str, now: float) -> Place:
        """For a token that is not known to be good; raises TooManyRequests."""
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
        """One more enrolment with a good token; raises TooManyRequests."""
        wait = self._enrolments.wait(_ALL, now)
        if wait > 0:
            raise _refused(wait, "too many devices enrol at once")
        self._enrolments.spend(_ALL, now)


def _refused(wait: float, why: str) -> TooManyRequests:
    """For `wait` seconds; a device adds chance of its own."""
    return TooManyRequests(why, retry_after=min(_LONGEST_WAIT, max(1, math.ceil(wait))))
