"""What operators are told of restores, and of what these undid."""

from __future__ import annotations

from fedpress_protocols.messages import Restore
from fedpress_protocols.plan import Digest, Name, Term


class UndoneRound(Term):
    """A round that was committed after the backup, as devices know it by their receipts."""

    task: Name
    round: int
    attempt: int
    model: Digest | None
    """The model that it made, and that this server does not have from it."""
    devices: int
    """How many have reported it so far; those that were in it and come back will."""
    reported_at: float
    """Unix seconds, of the first report."""


class RestoreStatus(Restore):
    """A restore, and the rounds known to have come after its backup, in order."""

    undone: tuple[UndoneRound, ...] = ()
