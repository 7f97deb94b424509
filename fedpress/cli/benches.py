"""The commands `fedpress bench ...`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from fedpress.command_line import Group, figures


@click.group("bench", cls=Group)
def benches() -> None:
    """Measure the codec on this machine or on your own updates."""


@benches.command("codec")
@click.option("--values", default=1_000_000, help="Values of an update.")
@click.option(
    "--compressor",
    "own",
    multiple=True,
    help="NAME, NAME:key=value,... or JSON. May be repeated; default: a sparse and a dense one.",
)
@click.option("--quick", is_flag=True, help="At most 100,000 values, few repeats.")
@figures
def bench_codec(values: int, own: tuple[str, ...], quick: bool, json_file: Path | None) -> None:
    """Measure the CPU time of compressing, encoding and decoding an update."""
    from fedpress.bench.codec import DEFAULTS, run

    _measure(lambda file: run(file, quick, values, own or DEFAULTS), json_file)


@benches.command("rate-distortion")
@click.option(
    "--update",
    default="fixture",
    metavar="FILE",
    help="An .npz of updates; by default the source tree's own.",
)
@click.option("--only", metavar="NAME", help="One method alone.")
@figures
def bench_rate_distortion(update: str, only: str | None, json_file: Path | None) -> None:
    """Measure bytes and error of every compressor on real updates."""
    from fedpress.bench.rate_distortion import run

    _measure(lambda file: run(update, file, only), json_file)


def _measure(run: Callable[[Path | None], str], json_file: Path | None) -> None:
    """Print the text that `run` returns, and have it write its figures to the file, which is
    opened before anything is measured; `-` prints the figures alone."""
    if json_file == Path("-"):
        with TemporaryDirectory(prefix="fedpress-") as folder:
            file = Path(folder) / "figures.json"
            run(file)
            click.echo(file.read_text(encoding="utf-8"), nl=False)
        return
    if json_file is not None:
        json_file.touch()
    click.echo(run(json_file))
