"""Figures of a round: of a simulation, or of the attempts at a server's round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from fedpress.cli.rounds import privacy_spent
from fedpress_protocols.messages import RoundStatus
from fedpress_protocols.policies import Course


@dataclass
class Row:
    """A round. `up_bytes` and `down_bytes` are of Flower's records, both ways; `upload_bytes` of
    the compressed bodies alone, None where nothing of fedpress was in the run, as `nmse` and
    `model`; `session_up_bytes` and `session_down_bytes` of the messages of a masked round's
    session, bodies not among them, and `abandoned` why it gave no sum. A client that was lost at
    any of its steps counts as lost. `failed` says by node why a training failed, and
    `evaluation_failed` why an evaluation did. `profile` names the compressor, `policies` says why
    auto changed it, and `progress` what a probe measured. `link_seconds`: how long the slowest
    client's transfers take on the link asked for.

    In a run of a task's file all attempts at the round count together: `up_bytes` are uploads with
    their headers, `down_bytes` the models that went down, coded or plain, and `download_bytes`
    says the same, None elsewhere; `link_seconds` is the mean client's, and `seconds` are of the
    simulated clock."""

    round: int
    asked: int = 0
    answered: int = 0
    included: int | None = None
    lost: int = 0
    failed: dict[int, str] = field(default_factory=dict)
    up_bytes: int = 0
    down_bytes: int = 0
    upload_bytes: int | None = None
    download_bytes: int | None = None
    session_up_bytes: int | None = None
    session_down_bytes: int | None = None
    abandoned: str | None = None
    nmse: float | None = None
    seconds: float = 0.0
    link_seconds: float | None = None
    model: str | None = None
    profile: str | None = None
    policies: str | None = None
    progress: float | None = None
    epsilon: float | None = None
    """What a private task has spent so far, by the device that took part most often."""
    privacy: str | None = None
    """The same in words, and against whom it holds."""
    evaluation_failed: dict[int, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    """Metrics of which some were NaN or infinite, which are in no mean."""
    train: dict[str, float] = field(default_factory=dict)
    evaluation: dict[str, float] = field(default_factory=dict)
    """As clients measured it."""
    test: dict[str, float] = field(default_factory=dict)
    """On examples that no client has."""

    def decided(self, course: Course | None) -> None:
        """Take in what policies made of the round."""
        if course is not None:
            self.policies = "; ".join((*course.warnings, *filter(None, [course.why]))) or None
            compared = course.comparison
            self.progress = None if compared is None else compared.progress

    @property
    def accuracy(self) -> float | None:
        return self.test.get("accuracy", self.evaluation.get("accuracy"))

    @property
    def measured(self) -> str | None:
        """The accuracy in percent or, of a task without one, its first metric, the loss last."""
        if self.accuracy is not None:
            return f"accuracy {100 * self.accuracy:.1f} %"
        metrics = self.test or self.evaluation
        names = sorted(metrics, key=lambda name: name == "loss")
        return f"{names[0]} {metrics[names[0]]:.4g}" if names else None


def row_of(attempts: Sequence[RoundStatus], profiles: Sequence[str] = ()) -> Row:
    """The figures of a committed round from all attempts at it, oldest first; `profiles` are the
    names of the task's, if it has any."""
    last = attempts[-1]
    downloads = sum(status.download_bytes for status in attempts)
    row = Row(
        round=last.round,
        asked=sum(status.assigned for status in attempts),
        answered=sum(status.received for status in attempts),
        included=last.included,
        up_bytes=sum(status.wire_upload_bytes for status in attempts),
        upload_bytes=sum(status.upload_bytes for status in attempts),
        down_bytes=downloads,
        download_bytes=downloads,
        abandoned="; ".join(s.reason for s in attempts if s.state == "abandoned") or None,
        nmse=None if last.figures is None else last.figures.nmse,
        seconds=(last.closed_at or last.opened_at) - attempts[0].opened_at,
        model=last.model,
        evaluation=dict(last.metrics),
    )
    row.lost = row.asked - row.answered
    row.decided(last.course)
    if last.privacy is not None:
        row.epsilon, row.privacy = last.privacy.epsilon, privacy_spent(last.privacy)
    if last.course is not None and last.course.gentlest < len(profiles):
        row.profile = profiles[last.course.gentlest]
    return row


def committed(statuses: Sequence[RoundStatus]) -> Iterator[list[RoundStatus]]:
    """The attempts at each committed round, in order; `statuses` in any order."""
    ordered = sorted(statuses, key=lambda status: (status.round, status.attempt))
    for _, attempts in groupby(ordered, key=lambda status: status.round):
        of_round = list(attempts)
        if of_round[-1].state == "committed":
            yield of_round
