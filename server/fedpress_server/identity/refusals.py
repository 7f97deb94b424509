"""Refused operator requests: counted, rate-limited, and summarized in the audit log by time window,
so that strangers cannot fill the disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Literal, NamedTuple

from sqlalchemy.engine import Connection

from fedpress_protocols.errors import TooManyRequests
from fedpress_server.identity import audit
from fedpress_server.identity.limits import Budgets

WINDOW_SECONDS = 60.0
"""Seconds of a window; its refusals are one entry of the audit log."""
BURST, PER_SECOND = 20.0, 0.2
"""Wrong tokens allowed per address: burst and rate."""
_MOST_TOLD = 16

Reason = Literal["no-token", "unknown", "expired", "revoked", "role", "too-many"]


class Refused(NamedTuple):
    reason: Reason
    operator: str
    """The operator id of the token; empty if unknown."""
    address: str


class Refusals:
    """Records refusals; `count` is called with the reason of each."""

    def __init__(self, clock: Callable[[], float], count: Callable[[Reason], None]) -> None:
        self._clock = clock
        self._count = count
        self._budgets = Budgets(burst=BURST, per_second=PER_SECOND)
        self._since = clock()
        self._refused: Counter[Refused] = Counter()
        self._others = 0
        self._taken = self._since, self._refused, self._others
        """The last window that was taken."""

    def may_try(self, address: str) -> bool:
        """Whether the address has budget left for wrong tokens."""
        return self._budgets.wait(address, self._clock()) == 0

    def note(self, reason: Reason, address: str, operator: str = "") -> None:
        """Count a refused request; a wrong token spends budget.

        Raises TooManyRequests, instead of the caller's error, if the budget for wrong tokens is
        exhausted.
        """
        now = self._clock()
        wait = self._budgets.wait(address, now) if reason == "unknown" else 0.0
        self._keep(Refused("too-many" if wait else reason, operator, address))
        if wait:
            raise TooManyRequests(
                "too many wrong tokens came from this address", retry_after=max(1.0, wait)
            )
        if reason == "unknown":
            self._budgets.spend(address, now)

    def _keep(self, refused: Refused) -> None:
        self._count(refused.reason)
        if refused in self._refused or len(self._refused) < _MOST_TOLD:
            self._refused[refused] += 1
        else:
            self._others += 1

    def put_back(self) -> None:
        """Return the last window, which could not be written, to the current one."""
        self._since, refused, others = self._taken
        self._others += others
        for each, times in refused.items():
            if each in self._refused or len(self._refused) < _MOST_TOLD:
                self._refused[each] += times
            else:
                self._others += times

    def take(self) -> Callable[[Connection], None] | None:
        """The write for the window that ends now; None without refusals."""
        since, now = self._since, self._clock()
        refused, others = self._refused, self._others
        self._taken = since, refused, others
        self._since, self._refused, self._others = now, Counter(), 0
        if not refused:
            return None

        def write(connection: Connection) -> None:
            audit.add(
                connection,
                now,
                audit.SERVER,
                "operator.refused",
                "",
                seconds=int(now - since),
                refused=[{**each._asdict(), "count": n} for each, n in refused.most_common()],
                others=others,
            )

        return write
