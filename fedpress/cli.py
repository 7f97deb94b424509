"""The command `fedpress`: serve, join, demo, and an operator's few words.

Each command imports what it needs when it runs, so `fedpress join` works on a device that has the
base install alone.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from fedpress_protocols import __version__
from fedpress_protocols.errors import ConfigurationError, FedpressError, MissingExtra

if TYPE_CHECKING:
    from fedpress.operator import Operator

app = typer.Typer(
    name="fedpress",
    help="Federated learning with updates pressed to the entropy limit.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
task_app = typer.Typer(help="Start, list, watch and cancel tasks.", no_args_is_help=True)
token_app = typer.Typer(help="Enrolment tokens.", no_args_is_help=True)
compressors_app = typer.Typer(help="Every compression method, its cost and its settings.")
bench_app = typer.Typer(help="Measure this machine.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")
app.add_typer(task_app, name="task")
app.add_typer(token_app, name="token")
app.add_typer(compressors_app, name="compressors")

Url = Annotated[str, typer.Option(envvar="FEDPRESS_URL", help="Where the server is.")]
AdminToken = Annotated[
    str, typer.Option(envvar="FEDPRESS_ADMIN_TOKEN", help="The server's admin token.")
]
_LOCAL = "http://127.0.0.1:8080"


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    add_help_option=False,
)
def serve(context: typer.Context) -> None:
    """Run the aggregation server; its settings: fedpress serve --help."""
    try:
        from fedpress_server.serve import main as serve_main
    except ModuleNotFoundError as exc:
        _needs("server", exc)
    serve_main(context.args)


@app.command()
def join(
    url: Annotated[str, typer.Argument(help="Where the server is.")],
    app_path: Annotated[
        str, typer.Option("--app", help="The trainer, as module:factory.", metavar="MODULE:FACTORY")
    ],
    state_dir: Annotated[
        Path, typer.Option(help="Identity, outbox and residual; private to this device.")
    ] = Path("fedpress-state"),
    task: Annotated[
        str | None, typer.Option(help="The task to join; needed if several run.")
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(envvar="FEDPRESS_TOKEN", help="The enrolment token, on first contact."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Makes training repeatable.")] = None,
    ca: Annotated[
        Path | None, typer.Option(help="PEM file of the authority that signed the server.")
    ] = None,
    proxy: Annotated[str | None, typer.Option(help="Proxy, http://host:port.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log every step.")] = False,
) -> None:
    """Take part in a task with your own trainer until the task ends."""
    from fedpress_client import Client
    from fedpress_client.apps import load_trainer

    _log(verbose)
    sys.path.insert(0, os.getcwd())
    client = Client(
        url,
        load_trainer(app_path),
        state_dir=state_dir,
        task=task,
        token=token,
        seed=seed,
        verify=str(ca) if ca else None,
        proxy=proxy,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        ended = client.run()
    except KeyboardInterrupt:
        typer.echo("stopped; the same command goes on from here", err=True)
        raise typer.Exit(130) from None
    typer.echo(
        f"task {ended.task} {ended.state}: {ended.included} uploads included, "
        f"{ended.not_included} not, {ended.pending} pending; model {ended.model}"
    )


@app.command()
def demo(
    clients: Annotated[int, typer.Option(help="Devices, each a process.")] = 10,
    rounds: Annotated[int, typer.Option(help="Rounds of each task.")] = 30,
    compressor: Annotated[
        str, typer.Option(help="none, NAME, NAME:key=value,... or JSON.")
    ] = "topk:fraction=0.02,magnitude_bits=1",
    seed: Annotated[int, typer.Option(help="Of the split, the model and the training.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures here too.", metavar="FILE")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for the plot and history.json.", metavar="DIR")
    ] = Path("demo-out"),
    quick: Annotated[bool, typer.Option("--quick", help="4 clients, 5 rounds.")] = False,
) -> None:
    """Federate handwritten digits twice, uncompressed and compressed, and compare."""
    try:
        from rich.console import Console

        from fedpress.compressor_option import compressor_from_option
        from fedpress.demo.run import Settings, run
    except ModuleNotFoundError as exc:
        _needs("demo,torch", exc)
    if quick:
        clients, rounds = min(clients, 4), min(rounds, 5)
    settings = Settings(compressor_from_option(compressor), clients, rounds, seed, out, json_file)
    console = Console()
    try:
        run(settings, console)
    except KeyboardInterrupt:
        console.print("stopped; all processes have ended", highlight=False)
        raise typer.Exit(130) from None


@task_app.command("create")
def create_task(
    config: Annotated[Path, typer.Argument(help="The task's configuration, JSON.")],
    model: Annotated[Path, typer.Argument(help="The initial model, safetensors.")],
    admin_token: AdminToken,
    url: Url = _LOCAL,
) -> None:
    """Register a model and start a task on it; the configuration's `model` is filled in."""
    import json

    from pydantic import ValidationError

    from fedpress_protocols.messages import TaskConfig
    from fedpress_protocols.model import Model
    from fedpress_protocols.plan import explained

    initial = Model.from_bytes(_read(model))
    try:
        fields = json.loads(_read(config))
        parsed = TaskConfig.model_validate({**fields, "model": initial.digest}, strict=False)
    except ValidationError as exc:
        raise ConfigurationError(f"{config}: {explained(exc)}") from exc
    except (ValueError, TypeError) as exc:
        raise ConfigurationError(f"{config} is not a JSON object: {exc}") from exc
    with _operator(url, admin_token) as operator:
        operator.register_model(initial)
        typer.echo(operator.create_task(parsed).model_dump_json(indent=2))


@task_app.command("list")
def list_tasks(admin_token: AdminToken, url: Url = _LOCAL) -> None:
    """Every task and how far it is."""
    with _operator(url, admin_token) as operator:
        for task in operator.tasks():
            typer.echo(f"{task.task}  {task.state}  {task.round}/{task.rounds} rounds")


@task_app.command("rounds")
def show_rounds(
    task: Annotated[str, typer.Argument()], admin_token: AdminToken, url: Url = _LOCAL
) -> None:
    """Every attempt at every round of a task, one JSON object a line."""
    with _operator(url, admin_token) as operator:
        for status in operator.rounds(task):
            typer.echo(status.model_dump_json())


@task_app.command("cancel")
def cancel_task(
    task: Annotated[str, typer.Argument()], admin_token: AdminToken, url: Url = _LOCAL
) -> None:
    """End a task before its last round; its last model stays."""
    with _operator(url, admin_token) as operator:
        operator.cancel_task(task)


@task_app.command("model")
def save_model(
    task: Annotated[str, typer.Argument()],
    file: Annotated[Path, typer.Argument(help="Where to write the safetensors file.")],
    admin_token: AdminToken,
    url: Url = _LOCAL,
) -> None:
    """Save a task's newest model."""
    with _operator(url, admin_token) as operator:
        model = operator.model(operator.task(task).model)
    file.write_bytes(model.to_bytes())
    typer.echo(f"{file}: {model.digest}")


@token_app.command("create")
def create_token(
    admin_token: AdminToken,
    url: Url = _LOCAL,
    uses: Annotated[int, typer.Option(min=1, help="Devices that may enrol with it.")] = 1,
    hours: Annotated[float, typer.Option(min=0.01, help="How long it is valid.")] = 24.0,
    note: Annotated[str, typer.Option(help="For your own records.")] = "",
) -> None:
    """Print a new enrolment token; it is not stored and cannot be shown again."""
    with _operator(url, admin_token) as operator:
        typer.echo(operator.create_token(uses=uses, expires_in=3600 * hours, note=note))


@compressors_app.callback(invoke_without_command=True)
def list_compressors(context: typer.Context) -> None:
    """List every method: what its defaults cost, what it claims, what it keeps, its source."""
    if context.invoked_subcommand is None:
        from fedpress.compressor_table import table

        typer.echo(table())


@compressors_app.command("show")
def show_compressor(
    name: Annotated[str, typer.Argument(help="A method's id.", metavar="NAME")],
) -> None:
    """Describe a method, with its settings, their defaults and an example."""
    from fedpress.compressor_table import described

    typer.echo(described(name))


@app.command()
def warmup() -> None:
    """Compile the kernels once, so that the first round need not; fills numba's cache."""
    from fedpress_protocols import kernels

    kernels.warm_up()
    typer.echo(f"{kernels.CHOSEN} kernels are ready")


@bench_app.command("codec")
def bench_codec(
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures here.", metavar="FILE")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="1M values, few repeats.")] = False,
) -> None:
    """Measure compression and coding against the machine's limits and other coders."""
    from fedpress.bench.codec import run

    typer.echo(run(json_file, quick))


@bench_app.command("rate-distortion")
def bench_rate_distortion(
    update: Annotated[
        str, typer.Option(help="An .npz of updates, or the source tree's own.", metavar="FILE")
    ] = "fixture",
    only: Annotated[str | None, typer.Option(help="One method alone.", metavar="NAME")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures here.", metavar="FILE")
    ] = None,
) -> None:
    """Measure what every method makes of real updates: bytes and error."""
    from fedpress.bench.rate_distortion import run

    typer.echo(run(update, json_file, only))


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def main() -> None:
    """Entry point: an error of the family is one sentence on stderr and exit code 1."""
    try:
        app()
    except FedpressError as exc:
        typer.echo(f"fedpress: {exc}", err=True)
        sys.exit(1)


def _operator(url: str, admin_token: str) -> Operator:
    from fedpress.operator import Operator

    return Operator(url, admin_token)


def _needs(extra: str, exc: ModuleNotFoundError) -> NoReturn:
    if exc.name and exc.name.startswith("fedpress"):
        raise exc
    raise MissingExtra(
        f"{exc.name} is not installed", hint=f"pip install 'fedpress[{extra}]'"
    ) from exc


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise ConfigurationError(f"{path} cannot be read: {exc.strerror}") from exc


def _log(verbose: bool) -> None:
    logging.basicConfig(
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        level=logging.DEBUG if verbose else logging.INFO,
    )
