"""The part of one client in an attempt at a round, and the form in which the next takes it over."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

Reason = Literal[
    "included",
    "round-full",
    "round-abandoned",
    "missed-deadline",
    "cancelled",
    "declined",
    "dropped-out",
    "stale",
]
Step = Literal["advertise", "shares", "masked", "consent", "reveal", "complaint"]
"""The messages of a client in a session; the server answers each but the last with one of the same
name."""


@dataclass(frozen=True, slots=True)
class Part:
    """The part of one client in this attempt; `reason` is set once, when it is settled."""

    client_id: str
    index: int
    upload: str | None = None
    reason: Reason | None = None
    is_ready: bool = False
    given: tuple[int, int] | None = None
    """The round and the attempt it is of, if it was carried over."""
    turn: int = 0
    due: float = inf
    """When its own time is up, in an asynchronous task."""
    is_next: bool = False
    """Whether its upload is for the next buffer, the one here being full."""
    profile: str | None = None
    """Of its plan's profiles; None: the one whose turn it is."""

    @property
    def is_open(self) -> bool:
        return self.upload is None and self.reason is None

    @property
    def is_done(self) -> bool:
        """Whether its client has had its part, and did not give it back."""
        return not self.is_open and self.reason != "declined"

    @property
    def is_staged(self) -> bool:
        return self.upload is not None and self.reason is None and not self.is_next


@dataclass(frozen=True, slots=True)
class Carried:
    """An assignment that an asynchronous task's next attempt takes over, as it is: given in `round`
    and `attempt`, open or with its `upload` in. It has until `due`."""

    assignment: str
    client_id: str
    round: int
    attempt: int
    index: int
    turn: int
    due: float
    upload: str | None = None
    profile: str | None = None
