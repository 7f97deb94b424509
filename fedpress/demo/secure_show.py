"""Output of `fedpress demo --secure`: rounds and devices live, and a report at the end."""

from __future__ import annotations

import zlib
from math import erfc
from typing import TYPE_CHECKING

import numpy as np
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from fedpress.demo.live import LiveScreen
from fedpress_protocols.messages import RoundStatus, SessionStatus

if TYPE_CHECKING:
    from fedpress.demo.secure import Findings

_STEPS = {
    "advertise": "keys",
    "shares": "sealed\nshares",
    "masked": "masked\nupdates",
    "consent": "consents",
    "reveal": "shares\nshown",
}
_AFTER = {
    "advertise": "after its keys",
    "shares": "after its shares",
    "masked": "after its masked update",
}
_COLOURS = {"gone": "bold red", "settled": "green", "masked": "cyan", "reveal": "cyan"}


class Screen(LiveScreen):
    """Shows `findings` as they grow; a line per round where there is no terminal."""

    def __init__(self, findings: Findings, rounds: int, console: Console) -> None:
        super().__init__(console)
        self._findings, self._rounds = findings, rounds

    def update(self) -> None:
        if self._live:
            self._live.update(Group(self._table(), self._devices()))
            return
        for number in range(self._printed, len(self._findings.rounds)):
            status = self._findings.rounds[number]
            self._console.print(
                f"round {status.round:>3}  accuracy {100 * self._findings.accuracies[number]:5.1f}%"
                f"  began {session(status).began}  in the sum {status.included}"
                f"  session {session(status).seconds or 0:.1f} s",
                highlight=False,
            )
        self._printed = len(self._findings.rounds)

    def _table(self) -> RenderableType:
        table = Table(title=f"fedpress: {self._rounds} masked rounds", title_justify="left")
        for name in ("round", "accuracy", "ready", *_STEPS.values(), "in the\nsum", "session"):
            table.add_column(name, justify="right")
        for status, accuracy in zip(
            self._findings.rounds[-12:], self._findings.accuracies[-12:], strict=True
        ):
            summary = session(status)
            answered = [str(summary.answered.get(step, 0)) for step in _STEPS]
            table.add_row(
                str(status.round),
                f"{100 * accuracy:.1f}%",
                str(summary.began),
                *answered,
                f"[bold]{status.included}[/]",
                f"{summary.seconds or 0:.1f} s",
            )
        return table

    def _devices(self) -> RenderableType:
        def cell(number: int) -> Text:
            step = self._findings.steps.get(number, "-")
            return Text(f"{number:>2} {step:<9}", _COLOURS.get(step, "dim"))

        return Columns([cell(number) for number in range(self._findings.clients)], padding=(0, 2))


def session(status: RoundStatus) -> SessionStatus:
    """The round's session; one of nobody if it had none."""
    return status.session or SessionStatus(began=0, answered={}, message_bytes=0)


def print_report(console: Console, findings: Findings, drop_round: int) -> None:
    """The server's view, and what stayed hidden, in the round with drop-outs."""
    status = next(each for each in findings.rounds if each.round == drop_round)
    summary = session(status)
    of_round = {device: body for (r, device), body in findings.masked.items() if r == drop_round}
    plain = {device: body for (r, device), body in findings.plain.items() if r == drop_round}
    masked_all, plain_all = (b"".join(of_round.values()), b"".join(plain.values()))
    size = len(next(iter(of_round.values())))
    bytes_per_client = summary.message_bytes / summary.began
    table = Table(title=f"Round {drop_round}: what the server saw", title_justify="left")
    table.add_column("")
    table.add_column("of each device", justify="right")
    table.add_row("keys, sealed shares, signatures", f"{bytes_per_client:,.0f} B")
    table.add_row("masked update", f"{size:,} B")
    table.add_row("its bytes, were they random: chi-square p", f"{uniformity(masked_all):.3f}")
    table.add_row("zlib makes of them", f"{shrunk(masked_all):.1%}")
    table.add_row("  the same numbers unmasked", f"{shrunk(plain_all):.1%}")
    table.add_row("  unmasked: chi-square p", f"{uniformity(plain_all):.3g}")
    console.print()
    console.print(table)
    dropped = "\n".join(
        f"  device {number:>2} {_AFTER[step]}: "
        + ("its update is in the sum" if step == "masked" else "it keeps its update for later")
        + f"; receipt: {findings.fates.get((drop_round, number), 'none yet')}"
        for number, step in sorted(findings.left.items())
    )
    saw = (
        f"who took part and when; {summary.began} certified keys; the sum of {status.included} "
        f"updates, of {status.num_examples:,} examples in all."
    )
    could_not = (
        "any single update, its loss or its number of examples: these are inside the masks. Shares "
        "go through the server sealed, device to device. It was shown one kind of share of each "
        "device, never both, for one set of survivors that was fixed before."
    )
    against = (
        "a server that lies, as the key that certifies devices is not the server's; not against "
        "what the sum itself tells, nor against devices that train on wrong data."
    )
    text = Text.assemble(
        ("Dropped out\n", "bold"),
        f"{dropped}\n",
        ("The server saw ", "bold"),
        f"{saw}\n",
        ("It could not see ", "bold"),
        f"{could_not}\n",
        ("This holds against ", "bold"),
        against,
    )
    console.print(Panel(text, width=min(console.width, 100)))
    total = sum(each.upload_bytes for each in findings.rounds)
    message_bytes = sum(session(each).message_bytes for each in findings.rounds)
    console.print(
        f"{len(findings.rounds)} rounds, {findings.clients} clients, accuracy "
        f"{100 * findings.accuracies[-1]:.2f}%; masked updates {total:,} B, the protocol around "
        f"them {message_bytes:,} B",
        highlight=False,
    )


def uniformity(data: bytes) -> float:
    """The chance that uniform bytes are at least as uneven: Pearson's chi-square over their 256
    values, by Wilson and Hilferty's cube root (1931)."""
    counts = np.bincount(np.frombuffer(data, np.uint8), minlength=256)
    expected = len(data) / 256
    statistic = float(np.square(counts - expected).sum() / expected)
    degrees = 255.0
    variance = 2 / (9 * degrees)
    score = ((statistic / degrees) ** (1 / 3) - (1 - variance)) / variance**0.5
    return 0.5 * erfc(score / 2**0.5)


def shrunk(data: bytes) -> float:
    """The share of its length that `data` has after zlib."""
    return len(zlib.compress(data, 9)) / len(data)
