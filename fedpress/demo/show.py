"""Output of the demo: a live table in a terminal, lines elsewhere, and a plot at the end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fedpress.demo.history import Curve, History
from fedpress.demo.live import LiveScreen

_ROWS = 12
_COLUMNS = ("round", "accuracy", "", "participants", "", "up, kB", "", "down, kB", "ratio")


class Screen(LiveScreen):
    """Shows `history` as it grows; a line per round where there is no terminal."""

    def __init__(self, history: History, rounds: int, console: Console) -> None:
        super().__init__(console)
        self._history = history
        self._progress = Progress(
            TextColumn("{task.description:>10}"),
            BarColumn(bar_width=40),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self._bars = {
            curve.name: self._progress.add_task(curve.name, total=rounds)
            for curve in (history.plain, history.compressed)
        }

    def update(self) -> None:
        for curve in (self._history.plain, self._history.compressed):
            self._progress.update(self._bars[curve.name], completed=len(curve.points))
        if self._live:
            self._live.update(Group(self._table(), self._progress))
            return
        for number in range(self._printed, self._finished()):
            cells = self._cells(number)
            self._console.print(
                f"round {cells[0]:>3}  accuracy {cells[1]} plain {cells[2]} compressed  "
                f"up {cells[5]} / {cells[6]} kB  ratio {cells[8]}",
                highlight=False,
            )
        self._printed = self._finished()

    def _finished(self) -> int:
        return min(len(self._history.plain.points), len(self._history.compressed.points))

    def _table(self) -> RenderableType:
        table = Table(title="fedpress: digits, uneven shares", title_justify="left")
        table.add_column("round", justify="right")
        for group in ("accuracy", "participants", "up, kB"):
            for curve in (self._history.plain, self._history.compressed):
                table.add_column(f"{group}\n{curve.name}", justify="right")
        table.add_column("down, kB\npressed", justify="right")
        table.add_column("ratio\nup", justify="right")
        longest = max(len(self._history.plain.points), len(self._history.compressed.points))
        for number in range(max(0, longest - _ROWS), longest):
            table.add_row(*self._cells(number))
        return table

    def _cells(self, number: int) -> list[str]:
        """The row of round `number`, counted from 0; a dash where a task is not there yet."""
        both = [_point(self._history.plain, number), _point(self._history.compressed, number)]
        plain, compressed = both
        cells = [str(number + 1)]
        cells += [f"{100 * point.accuracy:5.1f}%" if point else "-" for point in both]
        cells += [str(point.participants) if point else "-" for point in both]
        cells += [f"{point.upload_bytes / 1e3:,.1f}" if point else "-" for point in both]
        cells.append(f"{compressed.download_bytes / 1e3:,.1f}" if compressed else "-")
        fits = plain and compressed and compressed.upload_bytes
        cells.append(f"{plain.upload_bytes / compressed.upload_bytes:.0f}x" if fits else "-")
        return cells


def _point(curve: Curve, number: int) -> Any:
    return curve.points[number] if number < len(curve.points) else None


def print_summary(console: Console, history: History, files: Mapping[str, Path]) -> None:
    """The figures side by side, and where the files are."""
    figures = history.summary()
    table = Table(title="Summary", title_justify="left")
    table.add_column("")
    for name in ("uncompressed", "compressed", "ratio"):
        table.add_column(name, justify="right")
    table.add_row(
        "accuracy, last round",
        f"{100 * figures['final_accuracy_uncompressed']:.2f}%",
        f"{100 * figures['final_accuracy']:.2f}%",
    )
    table.add_row(
        "uploaded, bodies",
        f"{figures['upload_bytes_uncompressed']:,} B",
        f"{figures['upload_bytes']:,} B",
        f"{figures['upload_ratio']:.1f}x",
    )
    table.add_row(
        "uploaded, with headers",
        f"{figures['wire_upload_bytes_uncompressed']:,} B",
        f"{figures['wire_upload_bytes']:,} B",
        f"{figures['wire_upload_ratio']:.1f}x",
    )
    table.add_row(
        "downloaded, models",
        f"{figures['download_bytes_uncompressed']:,} B",
        f"{figures['download_bytes']:,} B",
    )
    console.print(table)
    console.print(
        f"{figures['rounds']} rounds, {history.clients} clients, seed {history.seed}, "
        f"{history.seconds:.0f} s",
        highlight=False,
    )
    for what, path in files.items():
        console.print(f"{what}: {path}", highlight=False, soft_wrap=True)


def draw_plot(history: History, path: Path) -> None:
    """Accuracy on the test images against megabytes uploaded, log axis, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.5), layout="constrained")
    for curve, colour in ((history.plain, "#7a7a7a"), (history.compressed, "#0a6e8a")):
        accuracies = [100 * point.accuracy for point in curve.points]
        label = f"{curve.name}: {accuracies[-1]:.1f} % for {curve.upload_bytes / 1e6:,.2f} MB"
        axes.plot(curve.megabytes_so_far(), accuracies, ".-", color=colour, label=label)
    axes.set_xscale("log")
    axes.set_xlabel("uploaded by all clients, MB (body bytes, log scale)")
    axes.set_ylabel("accuracy on the test images, %")
    ratio = history.summary()["upload_ratio"]
    axes.set_title(f"Digits on {history.clients} clients: 1/{ratio:.0f} of the bytes", loc="left")
    axes.grid(alpha=0.3, which="both")
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
