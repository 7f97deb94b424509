"""Each client the gentlest profile with which it is in before the deadline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from fedpress_protocols.policies import TELLING, BandwidthAware

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
    """Measurements of the link between one client and the server.

    `transfers`, the newest first; `missed` assignments since the newest of them came to no upload
    in time. `said`: what the device itself says of its uplink, in bytes a second.
    """

    transfers: tuple[Transfer, ...] = ()
    missed: int = 0
    said: float | None = None


def seconds(
    policy: BandwidthAware, link: Link, num_bytes: int, usual: float | None = None
) -> float | None:
    """Expected from the assignment until a body of `num_bytes` is in; None if nobody knows.

    `usual` is what passes before the first byte with other clients of the task.
    """
    uplink, transfers = uplink_of(policy, link), link.transfers[: policy.window]
    if uplink is None:
        return None
    before = median(each.before for each in transfers) if transfers else usual or 0.0
    doubled: float = (before + num_bytes / uplink) * 2.0 ** min(link.missed, 16)
    return doubled


def uplink_of(policy: BandwidthAware, link: Link) -> float | None:
    """In bytes a second; None if nothing is known of it."""
    transfers = link.transfers[: policy.window]
    rates = [each.num_bytes / max(each.seconds, _SHORTEST) for each in transfers]
    reliable = [
        rate for rate, each in zip(rates, transfers, strict=True) if each.num_bytes >= TELLING
    ]
    if reliable:
        return max(median(reliable), _SLOWEST)
    if link.said is not None:
        return max(link.said, _SLOWEST)
    return max(rates) if rates else None


def choose(
    policy: BandwidthAware,
    link: Link,
    sizes: Sequence[int],
    seconds_left: float,
    usual: float | None = None,
) -> int:
    """The index of the profile for a client with `seconds_left`; `sizes` are those of the
    profiles' bodies, the least compressed first."""
    for index, num_bytes in enumerate(sizes):
        expected = seconds(policy, link, num_bytes, usual)
        if expected is None:
            hurried = min(link.missed, len(sizes))
            return min(len(sizes) - 1, len(sizes) // 2 + hurried)
        if expected <= policy.margin * seconds_left:
            return index
    return len(sizes) - 1
