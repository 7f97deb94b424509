"""The commands `fedpress bench ...`."""

from __future__ import annotations

from pathlib import Path

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

    click.echo(run(json_file, quick))


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

    click.echo(run(update, json_file, only))


@benches.command("robustness")
@click.option("--json", "as_json", is_flag=True, help="Print JSON in place of the table.")
def bench_robustness(as_json: bool) -> None:
    """Measure what forged updates do to each strategy; takes a minute or two."""
    try:
        from fedpress.bench.robustness import run
    except ModuleNotFoundError as exc:
        needs("demo,torch", exc)
    click.echo(run(as_json))


@benches.command("secagg")
@figures
@click.option("--quick", is_flag=True, help="Sessions of 100 clients alone.")
def bench_secagg(json_file: Path | None, quick: bool) -> None:
    """Measure what secure aggregation costs clients and server, against its masks alone."""
    from fedpress.bench.secagg import run

    click.echo(run(json_file, quick))


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
    click.echo(run(json_file, quick, postgresql, parts))
