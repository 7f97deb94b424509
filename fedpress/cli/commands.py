"""The command `fedpress` as a whole: its groups and commands in the order in which help lists them.

Each command imports what it needs when it runs, so `fedpress client join` works on a device that
has the base install alone.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from fedpress.cli.authority import authorities
from fedpress.cli.benches import benches
from fedpress.cli.client import client
from fedpress.cli.completion import completion
from fedpress.cli.demo import demo
from fedpress.cli.devices import devices
from fedpress.cli.explain import explain
from fedpress.cli.identity import identity, rotate_key
from fedpress.cli.methods import compressors, strategies
from fedpress.cli.models import models
from fedpress.cli.observing import statistics
from fedpress.cli.outcomes import as_family, exit_code, message
from fedpress.cli.plan import plan
from fedpress.cli.plot import plot
from fedpress.cli.privacy import privacy
from fedpress.cli.renamed import current_words
from fedpress.cli.rounds import rounds
from fedpress.cli.server import server
from fedpress.cli.simulation import run_simulation
from fedpress.cli.tasks import tasks
from fedpress.cli.tokens import token
from fedpress.command_line import Group, Invocation
from fedpress_protocols import __version__

SECTIONS: Mapping[str, Sequence[click.Command]] = {
    "Try it, with no server": (
        demo,
        run_simulation,
        plot,
        plan,
        benches,
        compressors,
        strategies,
    ),
    "Operate a server": (server, tasks, rounds, models, devices),
    "On a device": (client,),
    "Secure aggregation and privacy": (authorities, privacy),
    "Errors": (explain,),
    "Shell": (completion,),
}


class Root(Group):
    """The command `fedpress`: help lists its commands by section, and old names still work."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.commands))
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(f"{each.name:<{width}}", each.get_short_help_str(500)) for each in commands]
                )

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        args, note = current_words(args)
        if note and sys.stderr.isatty():  # nothing that a script could read
            click.echo(f"note: {note}", err=True)
        return super().resolve_command(ctx, args)


@click.group(
    "fedpress",
    cls=Root,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
    epilog="Exit codes: 0 done, 1 failed or refused, 2 wrong use or settings, 3 no answer, "
    "4 not allowed, 130 interrupted.",
)
@click.version_option(__version__, message="%(version)s")
def app() -> None:
    """Federated learning with compressed updates and secure aggregation."""


@client.command("warmup")
@click.option(
    "--library",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Write the compiled kernels there as a library instead, for machines without numba, where "
    "FEDPRESS_PREBUILT_KERNELS names the folder. Needs a linker (Debian's binutils).",
)
def warmup(library: Path | None) -> None:
    """Compile the kernels ahead of the first round; fills numba's cache."""
    from fedpress_compression import kernels

    if library is None:
        kernels.warm_up()
        click.echo(f"{kernels.CHOSEN} kernels are ready")
        return
    kernels.build_library(library)
    click.echo(f"{library} has the kernels of this release")


@app.command("version", hidden=True)
def version() -> None:
    """Print the version."""
    click.echo(__version__)


client.add_command(identity)
client.add_command(rotate_key)
devices.add_command(token)
devices.add_command(statistics)
for _commands in SECTIONS.values():
    for _command in _commands:
        app.add_command(_command)


def main() -> None:
    """Entry point: errors are one sentence on stderr, and the exit code says of which kind; see
    `outcomes`."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # redirected on Windows, it lacks most letters
        sys.stdout.reconfigure(errors="replace")
    invocation = Invocation()
    try:
        app(obj=invocation, prog_name="fedpress")
    except Exception as exc:
        error = as_family(exc)
        if error is None:
            raise
        click.echo(message(error, invocation.as_json), err=True)
        sys.exit(exit_code(error))
