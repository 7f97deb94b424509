"""Failure policy: how to continue when training fails, or takes longer than the round lasts."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from dataclasses import dataclass, field, replace
from statistics import median

from fedpress_client.checks import check_kind, check_number, check_whole
from fedpress_client.state import TaskFiles
from fedpress_protocols.errors import StateWriteError
from fedpress_protocols.plan import RoundPlan

_log = logging.getLogger(__name__)

_REMEMBERED = 5
"""Assignments whose time is known; the median of them is what the next is expected to take."""
_SKIPPED = 8
"""The most assignments declined in a row as too slow, before one is tried all the same: two after
a single one is known, which a busy minute may have slowed, and twice as many for each more."""


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """Limit of failures in a row, and pauses in between.

    After a failed training (an exception, NaN, a full disk) it declines the assignment, waits
    `pause` seconds, twice as long after each failure that follows, `longest_pause` at most, and
    goes on. More than `allowed` failures in a row end `Client.run` with the last error; 0: the
    first does. An evaluation that fails is left out and counted likewise, without a pause. With
    `skips_late` a device that knows from its own past that it cannot meet a deadline declines.
    """

    allowed: int = 3
    pause: float = 10.0
    longest_pause: float = 600.0
    skips_late: bool = True

    def __post_init__(self) -> None:
        check_whole("allowed", self.allowed, 0)
        check_number("pause", self.pause, 0)
        check_number("longest_pause", self.longest_pause, self.pause)
        check_kind("skips_late", self.skips_late, bool)

    def pause_after(self, failures: int) -> float:
        """Seconds to wait after so many failures in a row; 0 after none."""
        if not failures:
            return 0.0
        return min(self.longest_pause, self.pause * 2.0 ** min(failures - 1, 60))


@dataclass(frozen=True, slots=True)
class Durations:
    """Seconds from an assignment to its whole upload, of the newest assignments of one kind; those
    lost while the server was away are left out.

    A kind is a model and its training terms: what another kind takes is not known. `skipped` counts
    the assignments declined since the newest of them.
    """

    kind: str = ""
    seconds: tuple[float, ...] = ()
    skipped: int = 0

    @classmethod
    def read(cls, files: TaskFiles) -> Durations:
        """As last kept; none if there is no such file or it is damaged."""
        try:
            row = json.loads(files.durations() or b"{}")
            seconds = tuple(float(each) for each in row["seconds"])
            if all(0 < each < math.inf for each in seconds):
                return cls(str(row["kind"]), seconds[-_REMEMBERED:], int(row["skipped"]))
        except (ValueError, TypeError, KeyError):
            pass
        return cls()

    def keep(self, files: TaskFiles) -> None:
        row = {"kind": self.kind, "seconds": self.seconds, "skipped": self.skipped}
        try:
            files.keep_durations(json.dumps(row).encode())
        except StateWriteError as exc:  # it is learnt again
            _log.warning("how long training takes is not kept: %s", exc)

    def too_long(self, plan: RoundPlan, seconds_left: float) -> float | None:
        """The usual seconds of an assignment of `plan`, if they are more than `seconds_left`; None
        if they are not, if nothing is known, or if it is time to try again."""
        if self.kind != kind_of(plan) or not self.seconds:
            return None
        if self.skipped >= min(_SKIPPED, 2 ** len(self.seconds)):
            return None
        usual = median(self.seconds)
        return usual if usual > seconds_left else None

    def after_skipping(self) -> Durations:
        return replace(self, skipped=self.skipped + 1)

    def after(self, plan: RoundPlan, seconds: float) -> Durations:
        """With what an assignment of `plan` took."""
        kind = kind_of(plan)
        if not 0 < seconds < math.inf:  # the clock was set
            return self
        earlier = self.seconds if kind == self.kind else ()
        return Durations(kind, (*earlier, seconds)[-_REMEMBERED:])


def kind_of(plan: RoundPlan) -> str:
    """The same for assignments that take about as long."""
    terms = plan.training.model_dump_json() + plan.client_terms.model_dump_json(exclude={"control"})
    return hashlib.sha256(f"{plan.spec} {plan.lane} {terms}".encode()).hexdigest()


@dataclass(slots=True)
class Failures:
    """Failures in a row of one kind of work, judged by a policy."""

    policy: FailurePolicy
    in_a_row: int = field(default=0)

    def add(self, error: Exception) -> None:
        """Raise `error` if it is one too many."""
        self.in_a_row += 1
        if self.in_a_row > self.policy.allowed:
            raise error

    def clear(self) -> None:
        self.in_a_row = 0

    @property
    def pause(self) -> float:
        return self.policy.pause_after(self.in_a_row)
