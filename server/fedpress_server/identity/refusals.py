"""Attempts to operate the server that were refused: counted, slowed down, and told in the audit log
in windows, so that strangers cannot fill the disk with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Literal, NamedTuple

from sqlalchemy.engine import Connection

from fedpress_protocols.errors import TooManyRequests
from fedpress_server.identity import audit
from fedpress_server.identity.limits import Budgets

WINDOW_SECONDS = 60.0
"""What was refused within a window is one entry of the audit log."""
BURST, PER_SECOND = 20.0, 0.2
"""Wrong tokens that an address may send at once, and how fast it may go on."""
_MOST_TOLD = 16

Reason = Literal["no-token", "unknown", "expired", "revoked", "role", "too-many"]


class Refused(NamedTuple):
    reason: Reason
    operator: str
    """The id of the operator whose token it was; empty if it was nobody's."""
    address: str


class Refusals:
    """`count` tells a counter of every one by its reason."""

    def __init__(self, clock: Callable[[], float], count: Callable[[Reason], None]) -> None:
        self._clock = clock
        self._count = count
        self._budgets = Budgets(burst=BURST, per_second=PER_SECOND)
        self._since = clock()
        self._refused: Counter[Refused] = Counter()
        self._others = 0
        self._taken = self._since, self._refused, self._others
        """The window that was taken last."""

    def may_try(self, address: str) -> bool:
        """Whether the address has not spent its budget of wrong tokens."""
        return self._budgets.wait(address, self._clock()) == 0

    def note(self, reason: Reason, address: str, operator: str = "") -> None:
        """Count a request that is refused; a wrong token is paid for.

        Raises TooManyRequests, in place of what the caller would raise, if the budget of wrong
        tokens was spent before.
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
        """What was taken last was not written: it belongs to the window that goes on."""
        self._since, refused, others = self._taken
        self._others += others
        for each, times in refused.items():
            if each in self._refused or len(self._refused) < _MOST_TOLD:
                self._refused[each] += times
            else:
                self._others += times

    def take(self) -> Callable[[Connection], None] | None:
        """What writes the window that ends now; None if nothing was refused in it."""
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
