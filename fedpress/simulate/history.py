"""Measurements of a run, round by round, as JSON, as CSV and as a plot."""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from fedpress import plotting
from fedpress.simulate.grid import Exchange
from fedpress.simulate.rows import Row
from fedpress_flower.envelope import JOIN, STEPS
from fedpress_flower.server import NO_ANSWER
from fedpress_protocols.local_files import replace_file


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
    budget: int | None = None
    """Bytes that the bodies of all rounds may have, by the terms of auto."""
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
                if not (self._has_joined or exchange.is_again):
                    self.rows.append(Row(len(self.rows) + 1))
                self._training, self._has_joined = exchange, False
            row = self.rows[-1]
            row.asked, row.answered, row.lost = exchange.asked, exchange.answered, exchange.lost
            row.failed, row.train = dict(exchange.failed), exchange.metrics
            self._lost = exchange.silent
        elif not self.rows:
            return
        elif exchange.kind == "evaluate":
            row = self.rows[-1]
            row.evaluation, row.evaluation_failed = exchange.metrics, dict(exchange.failed)
        elif exchange.is_over and exchange.kind in STEPS:
            self._lost |= exchange.silent
            self.rows[-1].lost = len(self._lost)
            self.rows[-1].failed = {**self.rows[-1].failed, **exchange.failed}
        if exchange.is_over:
            row = self.rows[-1]
            row.up_bytes += exchange.up_bytes
            row.down_bytes += exchange.down_bytes
            row.seconds += exchange.seconds
            row.left_out = sorted({*row.left_out, *exchange.left_out})
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
        for node, reason in report.dropped.items():
            if not reason.startswith(NO_ANSWER):
                row.failed[node] = reason.removeprefix("failed: ")

    def tested(self, number: int, metrics: dict[str, float]) -> None:
        """Take in what the model after a round is worth; the round is the newest if it trained."""
        if self._training is None or number != (self._training.server_round or len(self.rows)):
            return
        row = self.rows[-1]
        row.test = {name: value for name, value in metrics.items() if math.isfinite(value)}
        row.left_out = sorted({*row.left_out, *(metrics.keys() - row.test.keys())})

    def failures(self) -> Counter[str]:
        """How often trainings failed for each reason, in its last line: that of a traceback says
        what was raised."""
        return _counted(why for row in self.rows for why in row.failed.values())

    def evaluation_failures(self) -> Counter[str]:
        """Like `failures`, of evaluations."""
        return _counted(why for row in self.rows for why in row.evaluation_failed.values())

    def left_out(self) -> list[str]:
        """The metrics of which some were NaN or infinite."""
        return sorted({name for row in self.rows for name in row.left_out})

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
        links = [row.link_seconds for row in self.rows if row.link_seconds is not None]
        return {
            "name": self.name,
            "rounds": len(self.rows),
            "accuracy": last.accuracy,
            "model": last.model,
            "up_bytes": sum(row.up_bytes for row in self.rows),
            "down_bytes": sum(row.down_bytes for row in self.rows),
            "upload_bytes": sum(bodies) if bodies else None,
            "upload_budget": self.budget,
            "download_bytes": sum(downloads) if downloads else None,
            "session_bytes": sum(sessions) if sessions else None,
            "link_seconds": sum(links) if links else None,
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
                values[plain.index("evaluation_failed")] = len(row.evaluation_failed)
                values[plain.index("left_out")] = " ".join(row.left_out)
                cells = (name.partition(".") for name in measured)
                values += [getattr(row, what).get(name) for what, _, name in cells]
                writer.writerow(["" if value is None else value for value in values])
        replace_file(fresh, folder / "history.csv")


_MEASURED = ("train", "evaluation", "test")


def _counted(reasons: Iterable[str]) -> Counter[str]:
    return Counter((reason.strip().splitlines() or ["no reason given"])[-1] for reason in reasons)


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
