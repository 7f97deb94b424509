"""Pace steering: time windows for the next check-in of devices without an assignment.

    pace = pace.heard(now, seconds)
    pace, window = pace.window(now, outcome, opens_at)

A few devices come back together, many one after the other. A server that tells everybody the same
pause gets everybody back at once. Here each device is given
a window of its own, and draws a moment in it. A round of a small population opens with all who can
come: their windows begin at one moment, the next of a common beat or the round's own. Of a large
one no more than `budget` come in a second: whoever finds the beat taken is booked behind those
before (pace steering: Bonawitz et al. 2019, arXiv:1902.01046, Section 2.3).

Pure: the time comes in, a new value goes out, and the device draws.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp, floor
from typing import Literal

Outcome = Literal["accepted", "full", "none", "rejected"]
"""The outcome of a check-in: an assignment or a receipt; an open round without a free place; no
open round; a device that is not eligible for the task."""

_FAR_BEATS = 12
"""Pauses that a device makes which the task would not take."""
_FAR_SHARE = 0.2
"""Of the budget, for those devices."""
_MEMORY = 30.0
"""Seconds after which a check-in counts 1 / e in the averages."""
_PROMPT = 0.25
"""Seconds that a check-in may take before fewer are asked to come."""
_LEAST_SHARE = 0.1
_SPREAD = 0.2
"""Length of a window where nobody else is in the way, in pauses."""
_FARTHEST = 3600.0


@dataclass(frozen=True, slots=True)
class Window:
    """Seconds from now: the device comes back `least` to `most` from now, at a moment that it draws
    uniformly."""

    least: float
    most: float


@dataclass(frozen=True, slots=True)
class Pace:
    """Statistics and bookings of the check-ins so far; `budget` in check-ins per second, `pause`
    in seconds. Times are seconds of one clock."""

    budget: float
    pause: float
    rate: float = 0.0
    """Check-ins per second, averaged over half a minute or so."""
    seconds: float = 0.0
    """The duration of a check-in, averaged over the same time."""
    heard_at: float = 0.0
    booked_until: float = 0.0
    """Every moment before this one is given to somebody, as far as the budget goes."""
    far_until: float = 0.0
    """The same for devices that the task would not take, who are not in the others' way."""

    def heard(self, now: float, seconds: float) -> Pace:
        """After a check-in that was worked on for `seconds`, those not among it that it was held.

        A clock that was set back takes the bookings with it.
        """
        elapsed = now - self.heard_at
        rate = self.rate * exp(-max(0.0, elapsed) / _MEMORY) + 1.0 / _MEMORY
        weight = min(1.0, 1.0 / (_MEMORY * rate))
        return replace(
            self,
            rate=rate,
            seconds=self.seconds + weight * (max(0.0, seconds) - self.seconds),
            heard_at=now,
            booked_until=self.booked_until + min(0.0, elapsed),
            far_until=self.far_until + min(0.0, elapsed),
        )

    @property
    def affordable(self) -> float:
        """Check-ins per second that are asked to come: the budget, and less of it the longer each
        takes."""
        return self.budget * max(_LEAST_SHARE, min(1.0, _PROMPT / max(self.seconds, _PROMPT)))

    def window(
        self, now: float, outcome: Outcome, opens_at: float | None = None
    ) -> tuple[Pace, Window]:
        """Return the updated pace, and the window in which one device checks in again.

        `opens_at`: the expected opening of the task's next round, None if it is not known.
        """
        if outcome == "rejected":
            beat = self._beat(now, _FAR_BEATS)
            slot = min(max(beat, self.far_until), now + _FARTHEST)
            far_until = slot + 1.0 / (self.affordable * _FAR_SHARE)
            return replace(self, far_until=far_until), self._from(now, beat, slot)
        beat = self._beat(now, 1)
        if opens_at is not None and now + self.pause * _SPREAD < opens_at < beat:
            beat = opens_at
        slot = min(max(beat, self.booked_until), now + _FARTHEST)
        gap = 1.0 / (self.affordable * (1.0 - _FAR_SHARE))
        return replace(self, booked_until=slot + gap), self._from(now, beat, slot)

    def _beat(self, now: float, number: int) -> float:
        """The `number`th beat from now; one that is hardly away any more is not counted."""
        return (floor(now / self.pause + _SPREAD) + number) * self.pause

    def _from(self, now: float, due: float, slot: float) -> Window:
        """Window from `slot` on, relative to `now`; a longer one behind many other bookings."""
        narrow = _SPREAD * self.pause
        return Window(slot - now, slot - now + (narrow if slot - due < narrow else self.pause))
