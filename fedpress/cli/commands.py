"""The command `fedpress` as a whole: its groups and commands in the order in which help lists them.

Each command imports what it needs when it runs, so `fedpress join` works on a device that has the
base install alone.
"""

from __future__ import annotations

import sys

import click

from fedpress.cli.audit import audits
from fedpress.cli.authority import authorities
from fedpress.cli.backup import backup, list_restores, restore, verify
from fedpress.cli.benches import benches
from fedpress.cli.clients import clients
from fedpress.cli.completion import completion
from fedpress.cli.demo import demo
from fedpress.cli.devices import join, relay
from fedpress.cli.doctor import doctor
from fedpress.cli.methods import compressors, strategies
from fedpress.cli.models import models
from fedpress.cli.observing import fleet, log_level
from fedpress.cli.operators import operators
from fedpress.cli.outcomes import as_family, exit_code, said
from fedpress.cli.own_key import device
from fedpress.cli.plan import plan
from fedpress.cli.rounds import rounds
from fedpress.cli.server_keys import server_keys
from fedpress.cli.simulation import run_simulation
from fedpress.cli.tasks import tasks
from fedpress.cli.tokens import tokens
from fedpress.command_line import Command, Group, Invocation, needs
from fedpress_protocols import __version__


@click.group(
    "fedpress",
    cls=Group,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
    epilog="Exit codes: 0 done, 1 failed or refused, 2 wrong use or settings, 3 no answer, "
    "4 not allowed, 130 interrupted. fedpress completion: commands completed by your shell.",
)
def app() -> None:
    """Federated learning with updates pressed to the entropy limit."""


@app.command(
    "serve",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    add_help_option=False,
)
@click.pass_context
def serve(context: click.Context) -> None:
    """Run the aggregation server; its settings: fedpress serve --help."""
    try:
        from fedpress_server.serve import main as serve_main
    except ModuleNotFoundError as exc:
        needs("server", exc)
    serve_main(context.args)


@app.command(
    "migrate",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    add_help_option=False,
)
@click.pass_context
def migrate(context: click.Context) -> None:
    """Bring a server's database up to date; its settings are those of serve."""
    try:
        from fedpress_server.serve import migrate_main
    except ModuleNotFoundError as exc:
        needs("server", exc)
    migrate_main(context.args)


@click.command("warmup", cls=Command)
def warmup() -> None:
    """Compile the kernels once, so that the first round need not; fills numba's cache."""
    from fedpress_compression import kernels

    kernels.warm_up()
    click.echo(f"{kernels.CHOSEN} kernels are ready")


@click.command("version", cls=Command)
def version() -> None:
    """Print the version."""
    click.echo(__version__)


for _command in (
    *(doctor, backup, verify, restore, list_restores, audits, operators, fleet, log_level),
    *(tasks, rounds, models, tokens, clients),
    *(join, device, relay, authorities, server_keys),
    *(demo, run_simulation, plan, compressors, strategies, benches),
    *(warmup, completion, version),
):
    app.add_command(_command)


def main() -> None:
    """Entry point: what goes wrong is one sentence on stderr, and the exit code says of which kind;
    see `outcomes`."""
    invocation = Invocation()
    try:
        app(obj=invocation, prog_name="fedpress")
    except Exception as exc:
        error = as_family(exc)
        if error is None:
            raise
        click.echo(said(error, invocation.as_json), err=True)
        sys.exit(exit_code(error))
