"""Each client the gentlest profile with which it is in before the deadline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Literal

from pydantic import Field

from fedpress_protocols.plan import Term

TELLING = 16 * 1024
"""Bytes of a body that takes long enough to tell of a link: the first 14 kB or so of any travel at
once, whatever the link."""
UPLINK = "uplink_mbps"
"""The attribute under which a device says what its uplink is, in Mbit/s; see `CheckInRequest`."""
_SLOWEST = 1e-3
"""Bytes a second; what says less is taken for this."""
_SHORTEST = 0.05
"""Seconds, at least, that a body is taken to have travelled."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """An upload as the server saw it: `num_bytes` in the `seconds` from the first byte of its body
    to the last, and `before` that, since the assignment, the download and the training."""

    num_bytes: int
    seconds: float
    before: float


@dataclass(frozen=True, slots=True)
class Link:
    """What is known of one client's way to the server.

    `transfers`, the newest first; `missed` assignments since the newest of them came to no upload
    in time. `said`: what the device itself says of its uplink, in bytes a second.
    """

    transfers: tuple[Transfer, ...] = ()
    missed: int = 0
    said: float | None = None


class BandwidthAware(Term):
    """Each client uses the gentlest of the task's profiles with which it is expected in before the
    deadline, by its own uplink and by the time that its training takes.

    The estimate may take `margin` of the time that is left. It is the median of the client's last
    `window` uploads, as the server saw them come: bodies of 16 kB and more for the uplink, or else
    what the device says of it, or else what small bodies prove at least. A client of which nothing
    is known has the middle profile. Each assignment that it missed since its last upload doubles
    the time that it is expected to take.
    """

    id: Literal["bandwidth_aware"] = "bandwidth_aware"
    margin: Annotated[float, Field(gt=0, le=1)] = 0.75
    window: Annotated[int, Field(ge=1, le=64)] = 5

    def seconds(self, link: Link, num_bytes: int, usual: float | None = None) -> float | None:
        """Expected from the assignment until a body of `num_bytes` is in; None if nobody knows.

        `usual` is what passes before the first byte with other clients of the task.
        """
        uplink, known = self.uplink(link), link.transfers[: self.window]
        if uplink is None:
            return None
        before = median(each.before for each in known) if known else usual or 0.0
        doubled: float = (before + num_bytes / uplink) * 2.0 ** min(link.missed, 16)
        return doubled

    def uplink(self, link: Link) -> float | None:
        """In bytes a second; None if nothing is known of it."""
        known = link.transfers[: self.window]
        rates = [each.num_bytes / max(each.seconds, _SHORTEST) for each in known]
        told = [rate for rate, each in zip(rates, known, strict=True) if each.num_bytes >= TELLING]
        if told:
            return max(median(told), _SLOWEST)
        if link.said is not None:
            return max(link.said, _SLOWEST)
        return max(rates) if rates else None

    def choose(
        self, link: Link, sizes: Sequence[int], left: float, usual: float | None = None
    ) -> int:
        """Which of the profiles whose bodies have these `sizes`, the gentlest first, a client uses
        that has `left` seconds."""
        for index, num_bytes in enumerate(sizes):
            expected = self.seconds(link, num_bytes, usual)
            if expected is None:
                hurried = min(link.missed, len(sizes))
                return min(len(sizes) - 1, len(sizes) // 2 + hurried)
            if expected <= self.margin * left:
                return index
        return len(sizes) - 1

    def fits(self, link: Link, num_bytes: int, left: float, usual: float | None = None) -> bool:
        """Whether a body of `num_bytes` is expected in; False for a client nobody knows."""
        expected = self.seconds(link, num_bytes, usual)
        return expected is not None and expected <= self.margin * left
