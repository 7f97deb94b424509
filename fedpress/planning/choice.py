"""From what profiles cost to seconds a round, and to the one that should be used.

    down → train → compress and code → up → (the server's sum)

Everything here is arithmetic on what was measured; nothing is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedpress.planning.costs import Cost
from fedpress.planning.downlink import Downlink
from fedpress.planning.profiles import Candidate
from fedpress.planning.situation import Situation

WORTH = 0.02
"""A profile pays if it makes a round shorter by this part at least."""
AS_FAST = 0.05
"""Of rounds that differ by less than this, none is the faster one."""


@dataclass(frozen=True, slots=True)
class Row:
    """One profile in a situation; bytes and seconds of one device in one round."""

    candidate: Candidate
    cost: Cost
    upload: int
    """Everything it sends: the body, and what a masked session says."""
    download: int
    down_seconds: float
    codec_seconds: float
    up_seconds: float
    device_seconds: float
    """From its assignment to its upload's acknowledgement."""
    round_seconds: float
    """With the server's sum over the cohort."""
    in_time: bool

    @classmethod
    def of(cls, candidate: Candidate, cost: Cost, down: Downlink, situation: Situation) -> Row:
        upload = round(cost.body) + cost.sent
        download = down.each + cost.received
        down_seconds = 8 * download / (1e6 * situation.down)
        up_seconds = 8 * upload / (1e6 * situation.up)
        codec = situation.slowdown * (cost.client_seconds + down.seconds)
        trips = cost.round_trips * situation.round_trip
        device = down_seconds + situation.compute + codec + up_seconds + trips
        return cls(
            candidate=candidate,
            cost=cost,
            upload=upload,
            download=download,
            down_seconds=down_seconds,
            codec_seconds=codec,
            up_seconds=up_seconds,
            device_seconds=device,
            round_seconds=device + situation.cohort * cost.server_seconds,
            in_time=device <= situation.deadline,
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """`row` None stands for "none": upload the values as they are. `reason` is a sentence."""

    row: Row | None
    reason: str


def choose(rows: Sequence[Row], situation: Situation) -> Choice:
    """The profile to use, of `rows` with the baseline among them.

    Of the profiles that lose no more than `most_loss` and come in before the deadline, the fastest;
    of those that are as fast, the one that loses least, and then the one that sends least. None of
    them if a round without compression is in time and hardly longer. On metered links, the one
    that sends least, however fast the link. Where nothing is in time, the fastest is named all the
    same, and the reason says so. One whose loss nobody measured is for its operator to judge, and
    never recommended.
    """
    baseline = next(row for row in rows if row.candidate.baseline)
    tolerable = [row for row in rows if _loss(row) <= situation.most_loss and row is not baseline]
    if not tolerable:
        return Choice(
            None,
            f"no profile is known to lose {counted(situation.most_loss, 'point')} of accuracy or "
            "less",
        )
    in_time = [row for row in tolerable if row.in_time]
    if not in_time and not baseline.in_time:
        fastest = min(tolerable, key=lambda row: row.round_seconds)
        return Choice(
            fastest,
            f"nothing is in before the deadline of {seconds(situation.deadline)}; this one takes "
            f"{seconds(fastest.device_seconds)}, of which the device trains and downloads "
            f"{seconds(situation.compute + fastest.down_seconds)}: allow more time or train less",
        )
    if situation.metered and in_time:
        thriftiest = min(in_time, key=lambda row: row.upload)
        times = baseline.upload / thriftiest.upload
        return Choice(thriftiest, f"the links are metered, and it sends {times:,.0f} times less")
    least = min((row.round_seconds for row in in_time), default=float("inf"))
    if baseline.in_time and least > (1 - WORTH) * baseline.round_seconds:
        return Choice(None, _does_not_pay(baseline, tolerable, situation))
    as_fast = [row for row in in_time if row.round_seconds <= least / (1 - AS_FAST)]
    best = min(as_fast, key=lambda row: (_loss(row), row.upload))
    return Choice(best, _pays(best, baseline, situation))


def _loss(row: Row) -> float:
    return float("inf") if row.candidate.loss is None else row.candidate.loss


def _does_not_pay(baseline: Row, rows: Sequence[Row], situation: Situation) -> str:
    closest = min(rows, key=lambda row: row.round_seconds)
    saved = baseline.up_seconds - closest.up_seconds
    spent = closest.codec_seconds - baseline.codec_seconds
    if saved <= 0:
        return f"even {closest.candidate.name} would save nothing of the upload"
    if spent >= saved:
        return (
            f"even {closest.candidate.name} would save {seconds(saved)} of upload and cost the "
            f"device {seconds(spent)} of CPU"
        )
    return (
        f"even {closest.candidate.name} would take no more than "
        f"{seconds(max(0.0, baseline.round_seconds - closest.round_seconds))} off a round of "
        f"{seconds(baseline.round_seconds)}"
    )


def _pays(best: Row, baseline: Row, situation: Situation) -> str:
    saved = baseline.up_seconds - best.up_seconds
    spent = best.codec_seconds - baseline.codec_seconds
    cost = f"for {seconds(spent)} of CPU" if spent > 0 else "and no CPU"
    words = (
        f"a round takes {seconds(best.round_seconds)} where {baseline.candidate.name} takes "
        f"{seconds(baseline.round_seconds)}: {seconds(saved)} less upload {cost}"
    )
    if not baseline.in_time:
        words += f"; uncompressed it would miss the deadline of {seconds(situation.deadline)}"
    return words


def counted(number: float, noun: str) -> str:
    """For people: 1 round, 3 rounds."""
    return f"{number:.12g} {noun}" + ("" if number == 1 else "s")


def seconds(value: float) -> str:
    """For people: 2.4 ms, 3.1 s, 12 min."""
    if value < 1:
        return f"{1e3 * value:.3g} ms"
    return f"{value:.3g} s" if value < 600 else f"{value / 60:,.0f} min"
