"""The commands `fedpress bench ...`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from fedpress.command_line import Group, figures, needs


@click.group("bench", cls=Group)
def benches() -> None:
    """Measure this machine."""


@benches.command("codec")
@figures
@click.option("--quick", is_flag=True, help="1M values, few repeats.")
def bench_codec(json_file: Path | None, quick: bool) -> None:
    """Measure compression and coding against the machine's limits and other coders."""
    from fedpress.bench.codec import run

    _measure(partial(run, quick=quick), json_file)


@benches.command("rate-distortion")
@click.option(
    "--update",
    default="fixture",
    metavar="FILE",
    help="An .npz of updates, or the source tree's own.",
)
@click.option("--only", metavar="NAME", help="One method alone.")
@figures
def bench_rate_distortion(update: str, only: str | None, json_file: Path | None) -> None:
    """Measure what every method makes of real updates: bytes and error."""
    from fedpress.bench.rate_distortion import run

    _measure(lambda file: run(update, file, only), json_file)


@benches.command("robustness")
@figures
def bench_robustness(json_file: Path | None) -> None:
    """Measure what forged updates do to each strategy; takes a minute or two."""
    try:
        from fedpress.bench.robustness import run
    except ModuleNotFoundError as exc:
        needs("demo,torch", exc)
    _measure(run, json_file)


@benches.command("secagg")
@figures
@click.option("--quick", is_flag=True, help="Sessions of 100 clients alone.")
def bench_secagg(json_file: Path | None, quick: bool) -> None:
    """Measure what secure aggregation costs clients and server, against its masks alone."""
    from fedpress.bench.secagg import run

    _measure(partial(run, quick=quick), json_file)


@benches.command("ingest")
@figures
@click.option("--quick", is_flag=True, help="Few uploads, few clients.")
@click.option(
    "--postgresql",
    metavar="URL",
    envvar="FEDPRESS_BENCH_POSTGRESQL",
    show_envvar=True,
    help="A PostgreSQL whose user may create databases; without it SQLite alone.",
)
@click.option(
    "--part",
    "parts",
    type=click.Choice(["uploads", "polls", "memory"]),
    multiple=True,
    default=("uploads", "polls", "memory"),
    help="One part alone; may be given again.",
)
def bench_ingest(
    json_file: Path | None, quick: bool, postgresql: str | None, parts: tuple[str, ...]
) -> None:
    """Measure the uploads that a server takes for good, beside the least that could take them."""
    try:
        from fedpress.bench.ingest import run
    except ModuleNotFoundError as exc:
        needs("server", exc)
    _measure(lambda file: run(file, quick, postgresql, parts), json_file)


def _measure(run: Callable[[Path | None], str], json_file: Path | None) -> None:
    """Print the text that `run` returns, and have it write its figures to the file, which is tried
    before anything is measured; `-` prints the figures alone."""
    if json_file == Path("-"):
        with TemporaryDirectory(prefix="fedpress-") as folder:
            file = Path(folder) / "figures.json"
            run(file)
            click.echo(file.read_text(), nl=False)
        return
    if json_file is not None:
        json_file.touch()
    click.echo(run(json_file))
