"""Parts that all commands share: help with arguments, shared options, access to the server."""

from __future__ import annotations

import logging
import math
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

import click
from click.core import ParameterSource

from fedpress_protocols.errors import ConfigurationError, MissingExtra

if TYPE_CHECKING:
    from rich.console import Console

    from fedpress.operator import Operator

_LOCAL = "http://127.0.0.1:8080"
_FILE_COLUMNS = 200
PATH = click.Path(path_type=Path)
SECURE_COMPRESSOR = "shared_support:fraction=0.3,explore=0.25"
"""The default compressor of the demo under masks."""


C = TypeVar("C", bound=Callable[..., Any])


class Argument(click.Argument):
    """An argument with a line of help, which click's own lacks."""

    def __init__(self, declared: Sequence[str], help: str = "", **attributes: Any) -> None:
        super().__init__(declared, **attributes)
        self.help = help


class Number(click.FloatRange):
    """A number in a range; NaN, which click's own type accepts, is refused."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


_KEY_OR_ID = re.compile(r"-[A-Za-z0-9_-]{15}|-[A-Za-z0-9_-]{42}")
"""One in 64 public keys and client ids starts with a dash, as an option does."""


class Command(click.Command):
    """Its help explains the arguments before the options; an argument may be a key or a client id
    that begins with a dash."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            return super().parse_args(ctx, args)
        options = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        known = {name for each in options for name in (*each.opts, *each.secondary_opts)}
        valued = {name for each in options if not each.is_flag for name in each.opts}
        before = ["", *args]
        dashed = [
            place
            for place, (last, text) in enumerate(zip(before, args, strict=False))
            if _KEY_OR_ID.fullmatch(text) and text not in known and last not in valued
        ]
        if dashed:
            rest = [text for place, text in enumerate(args) if place not in dashed]
            args = [*rest, "--", *(args[place] for place in dashed)]
        return super().parse_args(ctx, args)

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
url = click.option(
    "--url", default=_LOCAL, envvar="FEDPRESS_URL", show_envvar=True, help="The server's address."
)
ca = click.option(
    "--ca",
    type=PATH,
    envvar="FEDPRESS_CA",
    show_envvar=True,
    help="PEM file of the CA that signed the server's certificate.",
)
figures = click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    metavar="FILE|-",
    help="Write the figures here; - prints them alone.",
)
callbacks = partial(
    click.option,
    "--callback",
    "callback_texts",
    multiple=True,
    metavar="CALLBACK",
    help="Send the figures of each closed round to tensorboard:DIR, mlflow[:URI], wandb[:PROJECT] "
    "or a callback of your own, module:function; repeatable, see docs/callbacks.md.",
)
verbose = click.option("--verbose", "-v", is_flag=True, help="Log every step.")


class Invocation:
    """State of one invocation, for its error message: whether JSON was asked for."""

    def __init__(self) -> None:
        self.as_json = False


def _wants_json(ctx: click.Context, parameter: click.Parameter, value: bool) -> bool:
    if isinstance(ctx.obj, Invocation):
        ctx.obj.as_json = value
    return value


as_json = click.option(
    "--json",
    "as_json",
    is_flag=True,
    callback=_wants_json,
    help="Print one JSON document instead of text.",
)


def secret_option(name: str, what: str, *, is_needed: bool) -> Callable[[C], C]:
    """Add the options of a secret, `--name` and `--name-file`, with their variables FEDPRESS_NAME
    and FEDPRESS_NAME_FILE, as the one parameter `name`; `what` is its help text."""
    parameter, file_key = name.replace("-", "_"), f"fedpress.{name}-file"

    def remember(ctx: click.Context, option: click.Parameter, value: Path | None) -> None:
        ctx.meta[file_key] = value

    def resolved(ctx: click.Context, option: click.Parameter, value: str | None) -> str | None:
        """Prefer the command line to the environment, in either form; within the environment
        prefer the secret to a file, which a container may set for all commands."""
        file: Path | None = ctx.meta.get(file_key)
        if ctx.resilient_parsing:
            return value or ""
        if file is not None and value:
            on_command_line = [
                ctx.get_parameter_source(each) is ParameterSource.COMMANDLINE
                for each in (parameter, f"{parameter}_file")
            ]
            if all(on_command_line):
                raise click.UsageError(f"give --{name} or --{name}-file, not both", ctx)
            if not on_command_line[1]:
                return value
        if file is not None:
            return _secret_in(file, name)
        if not value and is_needed:
            raise click.MissingParameter(ctx=ctx, param=option)
        return value

    def options(command: C) -> C:
        variable = f"FEDPRESS_{parameter.upper()}"
        from_file = click.option(
            f"--{name}-file",
            type=PATH,
            envvar=f"{variable}_FILE",
            show_envvar=True,
            is_eager=True,
            expose_value=False,
            callback=remember,
            help="File that contains it.",
        )
        itself = click.option(
            f"--{name}", envvar=variable, show_envvar=True, callback=resolved, help=what
        )
        return itself(from_file(command))

    return options


admin_token = secret_option(
    "admin-token", "The server's admin token, or an operator's own.", is_needed=True
)


def _secret_in(file: Path, name: str) -> str:
    from fedpress_protocols.local_files import check_private

    check_private(file, f"--{name}-file")
    secret = read(file).decode("utf-8", "replace").strip()
    if not secret:
        raise ConfigurationError(f"{file} is empty", hint=f"it should contain the {name}")
    return secret


def operates(work: Callable[..., None]) -> Callable[..., None]:
    """Make a command that calls a running server: add --url, --ca and the admin token, and pass an
    open Operator as the first argument of `work`. Use it as the innermost decorator."""

    @wraps(work)
    def command(*args: Any, url: str, admin_token: str, ca: Path | None, **options: Any) -> None:
        with operator(url, admin_token, ca=ca) as server:
            work(server, *args, **options)

    return admin_token(url(ca(command)))


def operator(url: str, admin_token: str, *, ca: Path | None = None) -> Operator:
    """An Operator for the server at `url`; `ca`: PEM file of the CA to trust."""
    from fedpress.operator import Operator

    return Operator(url, admin_token, ca=ca)


def console() -> Console:
    """The output of long runs, as wide as its terminal; in a file or a pipe no line is broken.
    Raises ModuleNotFoundError without the demo extra."""
    from rich.console import Console

    screen = Console()
    return screen if screen.is_terminal else Console(width=_FILE_COLUMNS)


Extra = Literal["server", "demo", "flower,demo", "demo,torch", "tensorboard", "mlflow", "wandb"]
_WITHOUT: Mapping[Extra, str] = {
    "server": "devices, and the commands that talk to a server, work without it",
    "demo": "servers and devices work without it",
    "flower,demo": "devices and servers work without it",
    "demo,torch": "servers, and devices whose trainer needs no torch, work without it",
    **dict.fromkeys(("tensorboard", "mlflow", "wandb"), "or leave out this --callback"),
}
"""What an installation without an extra can do: not every Python and processor has its wheels."""


def needs(extra: Extra, exc: ModuleNotFoundError) -> NoReturn:
    """Raise MissingExtra that names `extra` for a library that is missing, and what works so."""
    library = (exc.name or "").partition(".")[0]
    if library.startswith("fedpress"):
        raise exc
    raise MissingExtra(
        f"{library} is not installed",
        hint=f"pip install 'fedpress[{extra}]'; {_WITHOUT[extra]}",
    ) from exc


def read(path: Path) -> bytes:
    """The bytes of a file; raises ConfigurationError."""
    try:
        return path.read_bytes()
    except OSError as exc:
        raise ConfigurationError(f"{path} cannot be read: {exc.strerror}") from exc


def heed_stop_signals() -> None:
    """Have what stops a service raise KeyboardInterrupt: SIGTERM, and on Windows Ctrl-Break."""
    for name in ("SIGTERM", "SIGBREAK"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.default_int_handler)


def print_site(console: Console, url: str, token: str) -> None:
    """Print the address of a server's console, and the token to log in."""
    console.print(f"in a browser: {url}/console", highlight=False, soft_wrap=True)
    console.print(f"the token to log in: {token}", highlight=False, soft_wrap=True)


def stopped() -> NoReturn:
    click.echo("stopped; run the same command to resume", err=True)
    raise click.exceptions.Exit(130) from None


def log(verbose: bool) -> None:
    """Log to stderr; with `verbose` also details and each HTTP request."""
    logging.basicConfig(
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        level=logging.DEBUG if verbose else logging.INFO,
    )
    logging.getLogger("httpx").setLevel(logging.INFO if verbose else logging.WARNING)
