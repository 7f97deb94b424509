"""The command `fedpress plot`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click

from fedpress.command_line import PATH, Command, argument, needs
from fedpress.plotting import SUFFIXES, Run, draw, runs_in
from fedpress_protocols.errors import ConfigurationError


@click.command("plot", cls=Command)
@argument(
    "histories",
    metavar="HISTORY...",
    type=PATH,
    nargs=-1,
    required=True,
    help="history.json of simulate or demo, or what `round list TASK --json` prints.",
)
@click.option("--metric", default="accuracy", help="What to draw.")
@click.option(
    "--out", type=PATH, default="plot.png", metavar="FILE", help="A name in .png, .svg or .pdf."
)
def plot(histories: Sequence[Path], metric: str, out: Path) -> None:
    """Draw a metric of several runs, over rounds and over bytes."""
    if out.suffix not in SUFFIXES:
        raise ConfigurationError(
            f"{out} is of no known format", hint=f"use a name in {', '.join(SUFFIXES)}"
        )
    runs = _distinct([(path, run) for path in histories for run in runs_in(path, metric)])
    try:
        draw(runs, metric, out)
    except ModuleNotFoundError as exc:
        needs("demo", exc)
    for run in runs:
        if run.points:
            last = run.points[-1]
            click.echo(
                f"{run.name}: {metric} {last.value:.4g} after round {last.round}, "
                f"{last.num_bytes:,} bytes up and down"
            )
    click.echo(f"plot: {out}")


def _distinct(runs: Sequence[tuple[Path, Run]]) -> list[Run]:
    """Runs of one name are called by the folders of their files, or numbered if those are the same
    too."""
    names, seen = Counter(run.name for _, run in runs), Counter[str]()
    folders = Counter((run.name, path.resolve().parent.name) for path, run in runs)
    distinct = []
    for path, run in runs:
        folder = path.resolve().parent.name
        seen[run.name] += 1
        if names[run.name] == 1:
            name = run.name
        elif folder and folders[run.name, folder] == 1:
            name = folder
        else:
            name = f"{run.name} {seen[run.name]}"
        distinct.append(run._replace(name=name))
    return distinct
