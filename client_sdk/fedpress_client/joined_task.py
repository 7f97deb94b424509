"""A task that the device has joined: its open files, its account as saved, and the state that lives
only as long as this process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fedpress_client.ledger import Ledger
from fedpress_client.ledger_records import Discard
from fedpress_client.masking import MaskedPart
from fedpress_client.server_trust import ServerTrust
from fedpress_client.state import TaskFiles
from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan
from fedpress_protocols.messages import Assignment, TaskSummary, UploadFigures

_log = logging.getLogger(__name__)


def log_discard(discard: Discard) -> None:
    """The default `on_discard`: a warning."""
    _log.warning("an update of norm %.3g is lost to the model: %s", discard.norm, discard.reason)


@dataclass(slots=True)
class JoinedTask:
    """One task, from joining until an error or `close`; then it is read again from the disk."""

    name: str
    files: TaskFiles
    ledger: Ledger
    """The account as saved; change it by `save`."""
    trust: ServerTrust
    on_discard: Callable[[Discard], None] = log_discard
    summary: TaskSummary | None = None
    """The server's newest description of the task; None before the first."""
    sent: set[str] = field(default_factory=set)
    """Pending uploads that the server has answered."""
    declined: set[str] = field(default_factory=set)
    figures: dict[str, UploadFigures] = field(default_factory=dict)
    """Of pending uploads that this process has compressed, if they may be told."""
    masked_part: MaskedPart | None = None
    """In masked sessions, once it has taken part in one."""
    is_hurried: bool = False
    """Whether the server is to answer the next check-in at once."""
    successor: str | None = None
    """The task to join in place of this one."""

    def save(self, ledger: Ledger) -> None:
        """Make `ledger` the account, durably, and report what it discards."""
        self.files.save(ledger)
        self.ledger = ledger
        self.report_discards()

    def report_discards(self) -> None:
        """Report discards once they are durable; the file forgets them at its next writing."""
        for discard in self.ledger.discards:
            self.on_discard(discard)
        self.ledger = self.ledger.told()

    def is_new(self, assignment: str) -> bool:
        """Whether nothing was done yet about an assignment."""
        ledger = self.ledger
        return not (
            assignment in ledger.pending
            or assignment in ledger.settled
            or assignment in self.declined
        )

    @property
    def was_assigned(self) -> bool:
        """Whether this device was given a round, as far as it knows: others measure no models."""
        return bool(self.ledger.pending or self.ledger.settled or self.declined)

    @property
    def unsent(self) -> list[str]:
        """Pending uploads of the clear lane that the server has not answered in this process."""
        return [
            assignment
            for assignment, upload in self.ledger.pending.items()
            if assignment not in self.sent and upload.lane == "clear"
        ]

    @property
    def lane(self) -> str:
        return "clear" if self.summary is None else self.summary.lane

    @property
    def has_downlink(self) -> bool:
        """Whether the server offers models as differences and in coded form."""
        return self.summary is not None and self.summary.downlink

    def check_assignment(self, assignment: Assignment) -> None:
        """Raises IncompatiblePlan unless `assignment` is for this device and this task."""
        client_id, task = self.ledger.client_id, assignment.plan.task
        if assignment.client_id != client_id or task != self.name:
            raise IncompatiblePlan(
                f"for client {assignment.client_id} in task {task}, this is client {client_id} in "
                f"task {self.name}"
            )


def masked_tasks(tasks: Sequence[TaskSummary]) -> list[str]:
    """The tasks of the masked lane that are not over."""
    return [each.task for each in tasks if each.state in _GOING and each.lane == "masked"]


def only_task(tasks: Sequence[TaskSummary], *, prefers_masked: bool) -> str:
    """The task to join where none was named; raises ConfigurationError if that is not clear."""
    running = [each.task for each in tasks if each.state in _GOING]
    masked = masked_tasks(tasks) if prefers_masked else []
    if len(masked) == 1:
        return masked[0]
    if len(running) != 1:
        listed = ", ".join(f"{each.task} ({each.state})" for each in tasks) or "none"
        raise ConfigurationError(
            f"{len(running) or 'no'} tasks are running; the server has: {listed}",
            hint="name the task to join" if running else "a task that has ended takes no devices",
        )
    return running[0]


_GOING = ("running", "paused")
