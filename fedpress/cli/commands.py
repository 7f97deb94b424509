"""The command `fedpress` as a whole: its groups and commands in the order in which help lists them.

Each command imports what it needs when it runs, so `fedpress join` works on a device that has the
base install alone.
"""

from __future__ import annotations

import sys

import click

from fedpress.cli.authority import authorities
from fedpress.cli.backup import backup, list_restores, restore, verify
from fedpress.cli.benches import benches
from fedpress.cli.demo import demo
from fedpress.cli.devices import join, relay
from fedpress.cli.doctor import doctor
from fedpress.cli.methods import compressors, strategies
from fedpress.cli.models import models
from fedpress.cli.plan import plan
from fedpress.cli.simulation import run_simulation
from fedpress.cli.tasks import tasks, tokens
from fedpress.command_line import Command, Group, needs
from fedpress_protocols import __version__
from fedpress_protocols.errors import FedpressError


@click.group(
    "fedpress",
    cls=Group,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
    epilog="""\b
    Completion in bash; elsewhere zsh_source or fish_source:
      eval "$(_FEDPRESS_COMPLETE=bash_source fedpress)"
    """,
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
    from fedpress_protocols import kernels

    kernels.warm_up()
    click.echo(f"{kernels.CHOSEN} kernels are ready")


@click.command("version", cls=Command)
def version() -> None:
    """Print the version."""
    click.echo(__version__)


for _command in (
    *(doctor, backup, verify, restore, list_restores),
    *(tasks, models, tokens),
    *(join, relay, authorities),
    *(demo, run_simulation, plan, compressors, strategies, benches),
    *(warmup, version),
):
    app.add_command(_command)


def main() -> None:
    """Entry point: an error of the family is one sentence on stderr and exit code 1."""
    try:
        app()
    except FedpressError as exc:
        click.echo(f"fedpress: {exc}", err=True)
        sys.exit(1)
    except ValueError as exc:  # of an option that is no value of the field it stands for
        click.echo(f"fedpress: {_fault(exc)}", err=True)
        sys.exit(1)
    except OSError as exc:  # a path that is not what it was taken for, a disk that is full
        click.echo(f"fedpress: {exc.filename or 'input or output'}: {exc.strerror}", err=True)
        sys.exit(1)


def _fault(exc: ValueError) -> str:
    """What is wrong with a field; raises `exc` if it is about none."""
    from pydantic import ValidationError

    from fedpress_protocols.faults import explained

    if not isinstance(exc, ValidationError):
        raise exc
    return explained(exc)
