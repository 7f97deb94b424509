"""Measurements of a run, round by round, as JSON, as CSV and as a plot."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from fedpress import plotting
from fedpress.simulate.grid import Exchange
from fedpress_flower.envelope import JOIN, STEPS
from fedpress_flower.server import NO_ANSWER
from fedpress_protocols.local_files import replace_file
from fedpress_protocols.policies import Course


@dataclass
class Row:
    """A round. `up_bytes` and `down_bytes` are of Flower's records, both ways; `upload_bytes` of
    the compressed bodies alone, None where nothing of fedpress was in the run, as `nmse` and
    `model`; `session_up_bytes` and `session_down_bytes` of the messages of a masked round's
    session, bodies not among them, and `abandoned` why it gave no sum. A client that was lost at
    any of its steps counts as lost. `profile` names the compressor, `policies` says why auto
    changed it, and `progress` what a probe measured. `link_seconds`: how long the slowest client's
    transfers take on the link asked for.

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


@dataclass
class History:
    """One run: its settings as they were typed, and its rounds."""

    name: str
    settings: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    link: float | None = None
    """Megabits a second."""
    seconds: float = 0.0
    complete: bool = False
    reason: str = ""
    """Why a task ended before its last round, if it did."""
    _training: Exchange | None = None
    _lost: frozenset[int] = frozenset()
    """In the newest round, of whom nothing came."""
    _has_joined: bool = False
    """True once clients of the newest round have sent their keys."""

    def change(self, exchange: Exchange) -> None:
        """Take in how far an exchange has come."""
        if exchange.kind == JOIN and not self._has_joined:
            self._has_joined = True
            self.rows.append(Row(len(self.rows) + 1))
        if exchange.kind == "train":
            if exchange is not self._training:
                if not self._has_joined:
                    self.rows.append(Row(len(self.rows) + 1))
                self._training, self._has_joined = exchange, False
            row = self.rows[-1]
            row.asked, row.answered, row.lost = exchange.asked, exchange.answered, exchange.lost
            row.failed, row.train = {**row.failed, **exchange.failed}, exchange.metrics
            self._lost = exchange.silent
        elif not self.rows:
            return
        elif exchange.kind == "evaluate":
            self.rows[-1].evaluation = exchange.metrics
        elif exchange.is_over and exchange.kind in STEPS:
            self._lost |= exchange.silent
            self.rows[-1].lost = len(self._lost)
            self.rows[-1].failed = {**self.rows[-1].failed, **exchange.failed}
        if exchange.is_over:
            row = self.rows[-1]
            row.up_bytes += exchange.up_bytes
            row.down_bytes += exchange.down_bytes
            row.seconds += exchange.seconds
            if self.link is not None:
                spent = 8 * exchange.link_bytes / (1e6 * self.link)
                row.link_seconds = (row.link_seconds or 0.0) + spent

    def round_closed(self, report: Any) -> None:
        """Take in what a FedpressStrategy says of the newest round."""
        row = self.rows[-1]
        row.included, row.upload_bytes = len(report.included), report.upload_bytes
        row.download_bytes = getattr(report, "download_bytes", None)
        row.nmse = report.nmse if math.isfinite(report.nmse) else None
        row.model, self._has_joined = report.model, False
        if report.session_down_bytes:
            row.session_up_bytes = report.session_up_bytes
            row.session_down_bytes = report.session_down_bytes
        row.abandoned = report.abandoned or None
        row.profile = getattr(report, "profile", None)
        row.decided(getattr(report, "course", None))
        failed = {n: why for n, why in report.dropped.items() if not why.startswith(NO_ANSWER)}
        row.failed = {**row.failed, **failed}

    def tested(self, number: int, metrics: dict[str, float]) -> None:
        """Take in what the model after a round is worth."""
        for row in self.rows:
            if row.round == number:
                row.test = metrics

    def summary(self) -> dict[str, Any]:
        """The figures of the whole run."""
        last = self.rows[-1] if self.rows else Row(0)
        bodies = [row.upload_bytes for row in self.rows if row.upload_bytes is not None]
        downloads = [row.download_bytes for row in self.rows if row.download_bytes is not None]
        sessions = [
            row.session_up_bytes + (row.session_down_bytes or 0)
            for row in self.rows
            if row.session_up_bytes is not None
        ]
        return {
            "name": self.name,
            "rounds": len(self.rows),
            "accuracy": last.accuracy,
            "model": last.model,
            "up_bytes": sum(row.up_bytes for row in self.rows),
            "down_bytes": sum(row.down_bytes for row in self.rows),
            "upload_bytes": sum(bodies) if bodies else None,
            "download_bytes": sum(downloads) if downloads else None,
            "session_bytes": sum(sessions) if sessions else None,
            "answered": sum(row.answered for row in self.rows),
            "lost": sum(row.lost for row in self.rows),
            "failed": sum(len(row.failed) for row in self.rows),
            "epsilon": last.epsilon,
            "seconds": round(self.seconds, 3),
            "complete": self.complete,
            "reason": self.reason,
        }

    def to_json(self) -> str:
        rounds = [asdict(row) for row in self.rows]
        document = {**self.summary(), "settings": self.settings, "history": rounds}
        return json.dumps(document, indent=2) + "\n"

    def write(self, folder: Path) -> None:
        """history.json and history.csv, each replaced in one step."""
        folder.mkdir(parents=True, exist_ok=True)
        _replace(folder / "history.json", self.to_json())
        fresh = folder / "history.csv.new"
        plain = [each.name for each in fields(Row)][:-3]
        measured = sorted(
            {f"{what}.{n}" for r in self.rows for what in _MEASURED for n in getattr(r, what)}
        )
        with fresh.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(plain + measured)
            for row in self.rows:
                values = [getattr(row, name) for name in plain]
                values[plain.index("failed")] = len(row.failed)
                cells = (name.partition(".") for name in measured)
                values += [getattr(row, what).get(name) for what, _, name in cells]
                writer.writerow(["" if value is None else value for value in values])
        replace_file(fresh, folder / "history.csv")


_MEASURED = ("train", "evaluation", "test")


def _replace(path: Path, text: str) -> None:
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(text, encoding="utf-8")
    replace_file(fresh, path)


def draw(histories: Sequence[History], path: Path) -> None:
    """Accuracy by round and by megabytes that went up and down, a line for each run, as a PNG."""
    plotting.draw([_run(history) for history in histories], "accuracy", path)


def _run(history: History) -> plotting.Run:
    rounds = ((row.round, row.up_bytes + row.down_bytes, row.accuracy) for row in history.rows)
    return plotting.Run(history.name, plotting.points_of(rounds))
