"""What the files of commands have in common: help that explains arguments, shared options, and the
ways to the server and to files."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from fedpress_protocols.errors import ConfigurationError, MissingExtra

if TYPE_CHECKING:
    from fedpress.operator import Operator

_LOCAL = "http://127.0.0.1:8080"
PATH = click.Path(path_type=Path)
DEMO_COMPRESSOR = "topk:fraction=0.02,magnitude_bits=1"
SECURE_COMPRESSOR = "shared_support:fraction=0.3,explore=0.25"
"""What demo and simulation press with unless told otherwise."""


class Argument(click.Argument):
    """With a line of help, which click's own has not."""

    def __init__(self, declared: Sequence[str], help: str = "", **attributes: Any) -> None:
        super().__init__(declared, **attributes)
        self.help = help


class Command(click.Command):
    """Its help explains the arguments before the options."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        explained = [
            (each.human_readable_name, each.help)
            for each in self.params
            if isinstance(each, Argument)
        ]
        if explained:
            with formatter.section("Arguments"):
                formatter.write_dl(explained)
        super().format_options(ctx, formatter)


class Group(click.Group):
    """Lists its commands in the order of their definition, each with its whole first sentence."""

    command_class = Command
    group_class = type

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, each.get_short_help_str(limit=500)) for name, each in self.commands.items()]
            )

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise click.exceptions.Exit(130) from None


argument = partial(click.argument, cls=Argument)
admin_token = click.option(
    "--admin-token",
    required=True,
    envvar="FEDPRESS_ADMIN_TOKEN",
    show_envvar=True,
    help="The server's admin token.",
)
url = click.option(
    "--url", default=_LOCAL, envvar="FEDPRESS_URL", show_envvar=True, help="Where the server is."
)
figures = click.option(
    "--json", "json_file", type=PATH, metavar="FILE", help="Write the figures here."
)
verbose = click.option("--verbose", "-v", is_flag=True, help="Log every step.")


def operator(url: str, admin_token: str) -> Operator:
    """The operator's way to the server at `url`."""
    from fedpress.operator import Operator

    return Operator(url, admin_token)


def needs(extra: str, exc: ModuleNotFoundError) -> NoReturn:
    """Raise MissingExtra that names `extra` for a library that is missing."""
    if exc.name and exc.name.startswith("fedpress"):
        raise exc
    raise MissingExtra(
        f"{exc.name} is not installed", hint=f"pip install 'fedpress[{extra}]'"
    ) from exc


def read(path: Path) -> bytes:
    """The bytes of a file; raises ConfigurationError."""
    try:
        return path.read_bytes()
    except OSError as exc:
        raise ConfigurationError(f"{path} cannot be read: {exc.strerror}") from exc


def stopped() -> NoReturn:
    click.echo("stopped; the same command goes on from here", err=True)
    raise click.exceptions.Exit(130) from None


def log(verbose: bool) -> None:
    logging.basicConfig(
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        level=logging.DEBUG if verbose else logging.INFO,
    )
