"""Progress and summary of a simulation on the terminal."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fedpress.simulate.grid import Exchange
from fedpress.simulate.history import History

_REASONS = 3
"""Reasons of failed clients that a summary has at most, the most frequent first."""


def quieten() -> dict[str, int]:
    """Log no more than errors of Flower and its strategies, since the histories have all of it;
    return the levels before, by logger."""
    before = {name: logging.getLogger(name).level for name in ("flwr", "fedpress_flower.server")}
    for name in before:
        logging.getLogger(name).setLevel(logging.ERROR)
    return before


class Screen:
    """Two bars, rounds and the clients of this one, with rate and time left; a line per round where
    there is no terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description:>12}"),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]:>14}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
        )
        self._rounds = self._progress.add_task("rounds", total=1, rate="", note="")
        self._clients = self._progress.add_task("clients", total=1, rate="", note="")
        self._told: tuple[str, int] = ("", 0)
        self._since = time.monotonic()
        self._last = 0.0

    def __enter__(self) -> Self:
        self._levels = quieten()
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:
            self._progress.stop()
        for name, level in self._levels.items():
            logging.getLogger(name).setLevel(level)

    def update(self, history: History, rounds: int, exchange: Exchange) -> None:
        done = exchange.answered + len(exchange.failed)
        now = time.monotonic()
        if not done:
            self._since = now
        if exchange.kind == "train" and not done:
            self._tell(history)
        if now - self._last < 0.1 and not exchange.is_over and done:
            return
        self._last = now
        rate = done / (now - self._since) if done and now > self._since else 0.0
        row = history.rows[-1] if history.rows else None
        note = f"{row.up_bytes / 1e3:,.1f} kB up" if row is not None and row.up_bytes else ""
        self._progress.update(
            self._rounds,
            total=rounds,
            completed=len(history.rows) - (not exchange.is_over),
            description=history.name[:12],
            note=note,
        )
        self._progress.update(
            self._clients,
            total=exchange.asked,
            completed=done,
            description=exchange.kind,
            rate=f"{rate:,.1f}/s" if rate else "",
            note=f"{len(exchange.failed)} failed" if exchange.failed else "",
        )

    def round_closed(self, history: History, rounds: int) -> None:
        """A round more of a task whose devices are not shown one by one."""
        self._tell(history, all_of_it=True)
        row = history.rows[-1]
        self._progress.update(
            self._rounds,
            total=rounds,
            completed=len(history.rows),
            description=history.name[:12],
            note=f"{row.up_bytes / 1e3:,.1f} kB up, {row.down_bytes / 1e3:,.1f} kB down",
        )
        self._progress.update(
            self._clients, total=row.asked, completed=row.answered, description="answered"
        )

    def finish(self, history: History) -> None:
        """The last round is told too."""
        self._tell(history, all_of_it=True)

    def _tell(self, history: History, *, all_of_it: bool = False) -> None:
        if self._console.is_terminal:
            return
        printed = self._told[1] if self._told[0] == history.name else 0
        whole = len(history.rows) - (not all_of_it)
        for row in history.rows[printed:whole]:
            parts = [
                f"{history.name}: round {row.round:>3}",
                f"{row.answered}/{row.asked} answered",
            ]
            if row.measured is not None:
                parts.append(row.measured)
            parts.append(f"up {row.up_bytes / 1e3:,.1f} kB")
            parts.append(f"down {row.down_bytes / 1e3:,.1f} kB")
            if row.nmse is not None:
                parts.append(f"nmse {row.nmse:.3f}")
            if row.epsilon is not None:
                parts.append(f"epsilon {row.epsilon:.3g}")
            if row.link_seconds is not None:
                parts.append(f"link {row.link_seconds:,.2f} s")
            self._console.print("  ".join(parts), highlight=False)
            if row.policies:
                self._console.print(f"{history.name}: {' ' * 9} {row.policies}", highlight=False)
        self._told = (history.name, max(printed, whole))


def _last_measured(history: History) -> str | None:
    measured = [row.measured for row in history.rows if row.measured is not None]
    return measured[-1] if measured else None


def print_summary(console: Console, histories: Sequence[History], out: Path) -> None:
    """A line for each run, and where the files are. "link, s" is what the transfers of all rounds
    would take on the link asked for."""
    table = Table(title="Simulation", title_justify="left")
    table.add_column("", no_wrap=True)
    has_others = any(history.summary()["accuracy"] is None for history in histories)
    metric = "measured" if has_others else "accuracy"
    names = ["rounds", metric, "up, kB", "bodies, kB", "down, kB", "failed", "lost", "s"]
    has_link = any(history.link is not None for history in histories)
    for name in [*names, *(["link, s"] if has_link else [])]:
        table.add_column(name, justify="right")
    for history in histories:
        figures = history.summary()
        accuracy, bodies = figures["accuracy"], figures["upload_bytes"]
        spent = figures["link_seconds"]
        table.add_row(
            history.name,
            str(figures["rounds"]),
            (_last_measured(history) or "-") if has_others else f"{100 * accuracy:.2f}%",
            f"{figures['up_bytes'] / 1e3:,.1f}",
            "-" if bodies is None else f"{bodies / 1e3:,.1f}",
            f"{figures['down_bytes'] / 1e3:,.1f}",
            str(figures["failed"]),
            str(figures["lost"]),
            f"{figures['seconds']:.0f}",
            *(["-" if spent is None else f"{spent:,.1f}"] if has_link else []),
        )
    console.print(table)
    for history in histories:
        if history.rows and history.rows[-1].privacy:
            told = f"{history.name}: privacy {history.rows[-1].privacy}"
            console.print(told, highlight=False, soft_wrap=True)
        if history.reason:
            console.print(f"{history.name} ended early: {history.reason}", highlight=False)
        for line in _remarks(history):
            line = f"{history.name}: {line}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(f"files: {out.resolve()}", highlight=False, soft_wrap=True)


def _remarks(history: History) -> Iterator[str]:
    """Failures, metrics left out and an exceeded budget, a line each."""
    for reason, count in history.failures().most_common(_REASONS):
        yield f"{count} failed: {reason}"
    for reason, count in history.evaluation_failures().most_common(_REASONS):
        yield f"{count} {'evaluations' if count > 1 else 'evaluation'} failed: {reason}"
    if history.left_out():
        yield f"not finite, left out: {', '.join(history.left_out())}"
    spent = history.summary()["upload_bytes"] or 0
    if history.budget is not None and spent > history.budget:
        yield f"upload_bytes exceeded: {_kilobytes(spent)} of {_kilobytes(history.budget)}"


def _kilobytes(number: int) -> str:
    return f"{number / 1e3:,.1f} kB"
