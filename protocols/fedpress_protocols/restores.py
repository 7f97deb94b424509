"""Reports to operators about restores and the rounds that they undid."""

from __future__ import annotations

from fedpress_protocols.messages import Restore
from fedpress_protocols.plan import Digest, Name, Term


class UndoneRound(Term):
    """A round that was committed after the backup, as reported by devices from their receipts."""

    task: Name
    round: int
    attempt: int
    model: Digest | None
    """The model that it published, which this server does not have."""
    devices: int
    """Number of devices that have reported it so far."""
    reported_at: float
    """Unix seconds of the first report."""


class RestoreStatus(Restore):
    """A restore, and the rounds known to have come after its backup, in order."""

    undone: tuple[UndoneRound, ...] = ()
