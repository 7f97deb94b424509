"""The command `fedpress`: serve, join, demo, and an operator's few words.

Each command imports what it needs when it runs, so `fedpress join` works on a device that has the
base install alone. Help lists the commands in the order in which they stand here.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from fedpress.cli_backup import backup, list_restores, restore, verify
from fedpress.cli_doctor import doctor
from fedpress.cli_models import models
from fedpress.cli_plan import plan
from fedpress.cli_task_check import check_task
from fedpress.command_line import PATH as _PATH
from fedpress.command_line import Group as _Group
from fedpress.command_line import admin_token as _admin_token
from fedpress.command_line import argument as _argument
from fedpress.command_line import figures as _figures
from fedpress.command_line import needs as _needs
from fedpress.command_line import operator as _operator
from fedpress.command_line import read as _read
from fedpress.command_line import url as _url
from fedpress.command_line import verbose as _verbose
from fedpress_protocols import __version__
from fedpress_protocols.errors import ConfigurationError, FedpressError

_DEMO_COMPRESSOR = "topk:fraction=0.02,magnitude_bits=1"
_SECURE_COMPRESSOR = "shared_support:fraction=0.3,explore=0.25"


@click.group(
    "fedpress",
    cls=_Group,
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
        _needs("server", exc)
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
        _needs("server", exc)
    migrate_main(context.args)


for _command in (doctor, backup, verify, restore, list_restores):
    app.add_command(_command)


@app.group("task")
def tasks() -> None:
    """Start, list, watch and cancel tasks."""


@tasks.command("create")
@_argument("config", type=_PATH, help="The task's configuration, YAML or JSON.")
@_argument("model", type=_PATH, help="The initial model, safetensors.")
@_admin_token
@_url
def create_task(config: Path, model: Path, admin_token: str, url: str) -> None:
    """Register a model and start a task on it; the configuration's `model` is filled in."""
    from fedpress.task_file import task_config
    from fedpress_protocols.model import Model

    initial = Model.from_bytes(_read(model))
    parsed = task_config(config, initial.digest)
    with _operator(url, admin_token) as operator:
        operator.register_model(initial)
        click.echo(operator.create_task(parsed).model_dump_json(indent=2))


tasks.add_command(check_task)


@tasks.command("list")
@_admin_token
@_url
def list_tasks(admin_token: str, url: str) -> None:
    """Every task and how far it is."""
    with _operator(url, admin_token) as operator:
        for task in operator.tasks():
            why = f"  {task.reason}" if task.reason else ""
            click.echo(f"{task.task}  {task.state}  {task.round}/{task.rounds} rounds{why}")


@tasks.command("rounds")
@click.argument("task")
@_admin_token
@click.option(
    "--round",
    "number",
    type=click.IntRange(min=1),
    help="Only this one, with metrics by group and by class.",
)
@_url
def show_rounds(task: str, admin_token: str, number: int | None, url: str) -> None:
    """Every attempt at every round of a task, one JSON object a line."""
    with _operator(url, admin_token) as operator:
        for status in operator.rounds(task) if number is None else [operator.round(task, number)]:
            click.echo(status.model_dump_json())


@tasks.command("continue")
@click.argument("task")
@_admin_token
@click.option("--rounds", type=click.IntRange(min=1), default=1, help="How many more.")
@click.option(
    "--model", type=_PATH, help="Begin at this safetensors file, not at the task's model."
)
@_url
def continue_task(task: str, admin_token: str, rounds: int, model: Path | None, url: str) -> None:
    """Give a task that has stopped more rounds; its optimizer begins anew."""
    from fedpress_protocols.messages import Continuation
    from fedpress_protocols.model import Model

    with _operator(url, admin_token) as operator:
        before = operator.task(task)
        digest = before.model
        if model is not None:
            digest = operator.register_model(Model.from_bytes(_read(model)))
        more = Continuation(after_round=before.round, rounds=rounds, model=digest)
        click.echo(operator.continue_task(task, more).model_dump_json(indent=2))


@tasks.command("pause")
@click.argument("task")
@_admin_token
@_url
def pause_task(task: str, admin_token: str, url: str) -> None:
    """Give a running task's devices no work until it is resumed; nothing is lost."""
    with _operator(url, admin_token) as operator:
        operator.pause_task(task)


@tasks.command("resume")
@click.argument("task")
@_admin_token
@_url
def resume_task(task: str, admin_token: str, url: str) -> None:
    """Give a task's devices work again."""
    with _operator(url, admin_token) as operator:
        operator.resume_task(task)


@tasks.command("finish")
@click.argument("task")
@_admin_token
@_url
def finish_task(task: str, admin_token: str, url: str) -> None:
    """End a paused task for good, so that its devices may go."""
    with _operator(url, admin_token) as operator:
        operator.finish_task(task)


@tasks.command("cancel")
@click.argument("task")
@_admin_token
@_url
def cancel_task(task: str, admin_token: str, url: str) -> None:
    """End a task before its last round; its last model stays."""
    with _operator(url, admin_token) as operator:
        operator.cancel_task(task)


@tasks.command("model")
@click.argument("task")
@_argument("file", type=_PATH, help="Where to write the safetensors file.")
@_admin_token
@click.option("--best", is_flag=True, help="The one that devices measured best so far.")
@_url
def save_model(task: str, file: Path, admin_token: str, best: bool, url: str) -> None:
    """Save a task's newest model."""
    with _operator(url, admin_token) as operator:
        found = operator.task(task)
        digest = found.best if best else found.model
        if digest is None:
            raise ConfigurationError(
                f"no model of {task!r} has been measured",
                hint="devices must report the metric that the task's evaluation terms name",
            )
        model = operator.model(digest)
    file.write_bytes(model.to_bytes())
    click.echo(f"{file}: {model.digest}")


app.add_command(models)


@app.group("token")
def tokens() -> None:
    """Enrolment tokens."""


@tokens.command("create")
@_admin_token
@_url
@click.option(
    "--uses", type=click.IntRange(min=1), default=1, help="Devices that may enrol with it."
)
@click.option(
    "--hours", type=click.FloatRange(min=0.01), default=24.0, help="How long it is valid."
)
@click.option("--note", default="", show_default=False, help="For your own records.")
def create_token(admin_token: str, url: str, uses: int, hours: float, note: str) -> None:
    """Print a new enrolment token; it is not stored and cannot be shown again."""
    with _operator(url, admin_token) as operator:
        click.echo(operator.create_token(uses=uses, expires_in=3600 * hours, note=note))


@app.command("join")
@_argument("url", help="Where the server is.")
@click.option(
    "--app",
    "app_path",
    required=True,
    metavar="MODULE:FACTORY",
    help="The trainer, as module:factory.",
)
@click.option(
    "--state-dir",
    type=_PATH,
    default="fedpress-state",
    help="Identity, outbox and residual; private to this device.",
)
@click.option("--task", help="The task to join; needed if several run.")
@click.option(
    "--token",
    envvar="FEDPRESS_TOKEN",
    show_envvar=True,
    help="The enrolment token, on first contact.",
)
@click.option("--seed", type=int, help="Makes training repeatable.")
@click.option("--ca", type=_PATH, help="PEM file of the authority that signed the server.")
@click.option("--proxy", help="Proxy, http://host:port.")
@click.option(
    "--fine-tune",
    type=click.IntRange(min=0),
    default=0,
    help="Epochs to train the last model on, for this device alone.",
)
@click.option(
    "--attribute", multiple=True, metavar="KEY=VALUE", help="Of this device, for a task's rules."
)
@click.option("--authority", help="Secure aggregation: public key of the enrolment authority.")
@click.option(
    "--certificate",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Secure aggregation: what `fedpress ca issue` wrote.",
)
@click.option(
    "--least-cohort",
    type=click.IntRange(min=3),
    default=3,
    help="Secure aggregation: clients in a sum, at least.",
)
@click.option(
    "--semi-honest", is_flag=True, help="Secure aggregation: trust the server to only look."
)
@_verbose
def join(
    url: str,
    app_path: str,
    state_dir: Path,
    task: str | None,
    token: str | None,
    seed: int | None,
    ca: Path | None,
    proxy: str | None,
    fine_tune: int,
    attribute: tuple[str, ...],
    authority: str | None,
    certificate: Path | None,
    least_cohort: int,
    semi_honest: bool,
    verbose: bool,
) -> None:
    """Take part in a task with your own trainer until the task ends."""
    from fedpress_client import Client, MaskingRules
    from fedpress_client.apps import load_trainer
    from fedpress_protocols.plan import TrainingTerms
    from fedpress_protocols.signatures import from_base64url

    _log(verbose)
    attributes = _attributes(attribute)
    if authority is not None:
        from_base64url(authority, 32)  # refused here, before the token is used up
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
        masking=MaskingRules(
            authority=authority,
            certificate=certificate,
            minimum=least_cohort,
            adversary="semi-honest" if semi_honest else "malicious",
        ),
        fine_tuning=TrainingTerms(local_epochs=fine_tune) if fine_tune else None,
        attributes=attributes,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        ended = client.run()
    except KeyboardInterrupt:
        _stopped()
    click.echo(
        f"task {ended.task} {ended.state}: {ended.included} uploads included, "
        f"{ended.not_included} not, {ended.pending} pending; model {ended.model}"
    )


@app.command("relay")
@_argument("upper", help="Where the upper server is.")
@click.option("--region", required=True, metavar="URL", help="Where the region's own server is.")
@_admin_token
@click.option(
    "--config",
    type=_PATH,
    required=True,
    help="The region's task: a TaskConfig without model and rounds, JSON.",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=1,
    help="The region's rounds for one upward.",
)
@click.option(
    "--state-dir",
    type=_PATH,
    default="fedpress-relay",
    help="Identity, outbox and residual towards the upper server.",
)
@click.option("--task", help="The upper task; needed if several run.")
@click.option(
    "--token",
    envvar="FEDPRESS_TOKEN",
    show_envvar=True,
    help="The upper server's enrolment token.",
)
@click.option("--ca", type=_PATH, help="PEM file of the authority that signed the upper server.")
@_verbose
def relay(
    upper: str,
    region: str,
    admin_token: str,
    config: Path,
    rounds: int,
    state_dir: Path,
    task: str | None,
    token: str | None,
    ca: Path | None,
    verbose: bool,
) -> None:
    """Take part in an upper server's task as a whole region, with the region's devices."""
    from fedpress.relay import RegionalTrainer
    from fedpress_client import Client

    _log(verbose)
    try:
        template = dict(json.loads(_read(config)))
    except (ValueError, TypeError) as exc:
        raise ConfigurationError(f"{config} is not a JSON object: {exc}") from exc
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with _operator(region, admin_token) as operator:
        trainer = RegionalTrainer(operator, template, rounds, state_dir)
        client = Client(
            upper,
            trainer,
            state_dir=state_dir,
            task=task,
            token=token,
            verify=str(ca) if ca else None,
        )
        try:
            ended = client.run()
        except KeyboardInterrupt:
            _stopped()
        trainer.finish()
    click.echo(f"task {ended.task} {ended.state}: {ended.included} updates of the region included")


@app.group("ca")
def authorities() -> None:
    """An enrolment authority for secure aggregation, apart from the server."""


@authorities.command("init")
@_argument("file", type=_PATH, help="Where to write the private key.")
def make_authority(file: Path) -> None:
    """Make an authority's key and print its public half, for the server and the devices."""
    from fedpress import authority

    click.echo(authority.make_authority(file))


@authorities.command("request")
@_argument("state_dir", type=_PATH, help="The device's state directory.")
def request_certificate(state_dir: Path) -> None:
    """Print a device's public key, on the device, to have a certificate issued for it."""
    from fedpress import authority

    click.echo(authority.device_key(state_dir))


@authorities.command("issue")
@_argument("authority_file", type=_PATH, help="The authority's private key.")
@_argument("public_key", help="The device's public key.")
@click.option("--out", type=_PATH, required=True, help="Where to write the certificate.")
@click.option("--name", default="", show_default=False, help="What the device is called in it.")
@click.option("--population", default="fedpress", help="As the server's --population.")
@click.option(
    "--days",
    type=click.FloatRange(min=0.01, max=36_500),
    default=365.0,
    help="How long it is good for.",
)
def issue_certificate(
    authority_file: Path, public_key: str, out: Path, name: str, population: str, days: float
) -> None:
    """Certify a device's key; the file goes to the device."""
    from time import time

    from fedpress import authority

    made = authority.issue(
        authority_file,
        public_key=public_key,
        name=name,
        population=population,
        days=days,
        now=time(),
    )
    out.write_bytes(made)
    click.echo(f"{out}: good for {days:g} days")


@app.command("demo")
@click.option(
    "--clients", type=int, help="Devices, each a process: 10, or 20 threads with --secure."
)
@click.option("--rounds", type=int, help="Rounds of each task: 30, or 10 with --secure.")
@click.option(
    "--compressor",
    help=f"none, NAME, NAME:key=value,... or JSON; {_DEMO_COMPRESSOR}, or {_SECURE_COMPRESSOR} "
    "with --secure.",
)
@click.option(
    "--secure", is_flag=True, help="Under masks, with three devices that drop out on the way."
)
@click.option("--seed", default=0, help="Of the split, the model and the training.")
@click.option("--json", "json_file", type=_PATH, metavar="FILE", help="Write the figures here too.")
@click.option(
    "--out",
    type=_PATH,
    default="demo-out",
    metavar="DIR",
    help="Folder for the plot and history.json.",
)
@click.option("--quick", is_flag=True, help="4 clients, 5 rounds; 10 and 3 with --secure.")
def demo(
    clients: int | None,
    rounds: int | None,
    compressor: str | None,
    secure: bool,
    seed: int,
    json_file: Path | None,
    out: Path,
    quick: bool,
) -> None:
    """Federate handwritten digits twice, uncompressed and compressed, and compare."""
    try:
        from rich.console import Console

        from fedpress.compressor_option import compressor_from_option
        from fedpress.demo import run as compared
        from fedpress.demo import secure as masked
    except ModuleNotFoundError as exc:
        _needs("demo,torch", exc)
    usual = (20, 10, _SECURE_COMPRESSOR) if secure else (10, 30, _DEMO_COMPRESSOR)
    clients = usual[0] if clients is None else clients
    rounds = usual[1] if rounds is None else rounds
    if quick:
        clients, rounds = min(clients, 10 if secure else 4), min(rounds, 3 if secure else 5)
    made = compressor_from_option(compressor or usual[2], masked=secure)
    console = Console()
    try:
        if secure:
            masked.run(masked.Settings(made, clients, rounds, seed, out, json_file), console)
        else:
            compared.run(compared.Settings(made, clients, rounds, seed, out, json_file), console)
    except KeyboardInterrupt:
        console.print("stopped; all processes have ended", highlight=False)
        raise click.exceptions.Exit(130) from None


@app.command("simulate")
@click.option("--clients", type=click.IntRange(min=1), default=100, help="Simulated clients.")
@click.option("--fraction", default=0.1, help="Of the clients, in each round.")
@click.option("--rounds", type=click.IntRange(min=1), default=20, help="Rounds.")
@click.option(
    "--engine",
    type=click.Choice(["local", "processes", "ray"]),
    default="processes",
    help="local: one process; processes: a pool; ray: Flower's own engine.",
)
@click.option(
    "--compressor",
    help=f"none, NAME, NAME:key=value,... or JSON; {_DEMO_COMPRESSOR}, or {_SECURE_COMPRESSOR} "
    "with --secure.",
)
@click.option(
    "--secure", is_flag=True, help="Under masks: the server gets sums, and no client's update."
)
@click.option(
    "--masking",
    default="",
    help="Terms of masked rounds that differ from their defaults, as JSON: "
    '{"adversary": "semi-honest"}.',
)
@click.option("--strategy", default="fedavg", help="One of fedpress's: NAME or JSON.")
@click.option("--data", default="digits", help="digits, fashion-mnist:DIR or shakespeare:DIR.")
@click.option(
    "--app",
    metavar="APP",
    help="In place of data: a Flower app's folder, module:pair of a ServerApp and a ClientApp, or "
    "module:factory of trainers, called with a client's index and the number of clients.",
)
@click.option(
    "--run-config", default="", help="Of a Flower app: 'key=value ...', as flwr run has it."
)
@click.option(
    "--partition",
    default="dirichlet:0.3",
    help="iid, dirichlet:A, shards:K, quantity:A or natural.",
)
@click.option(
    "--dropout",
    default=0.0,
    help="Chance that a client is lost before or after its training, or with --secure at any step.",
)
@click.option("--link", type=float, help="Each client's link: tells how long its transfers take.")
@click.option("--seed", default=0, help="Of the split, the model, cohorts, training.")
@click.option("--timeout", default=3600.0, help="Seconds that a round waits at most.")
@click.option("--workers", type=click.IntRange(min=1), help="Processes; one for each core.")
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda", "auto"]),
    default="cpu",
    help="For tasks in torch.",
)
@click.option("--local-epochs", type=int, help="Between two models.")
@click.option("--local-steps", type=int, help="In the place of epochs.")
@click.option("--batch-size", type=click.IntRange(min=1), help="Of the local training.")
@click.option("--learning-rate", type=float, help="Of the local training.")
@click.option("--json", "json_file", type=_PATH, metavar="FILE", help="Write the history here too.")
@click.option("--plot", is_flag=True, help="Draw accuracy.png.")
@click.option(
    "--sweep",
    "sweep_file",
    type=_PATH,
    metavar="FILE",
    help="Several runs: a JSON list of objects, a name and the settings that differ.",
)
@click.option(
    "--out",
    type=_PATH,
    default="simulate-out",
    help="Folder for histories, and for a run that was stopped.",
)
@click.option("--fresh", is_flag=True, help="Begin anew where a run was stopped.")
def run_simulation(
    json_file: Path | None,
    plot: bool,
    sweep_file: Path | None,
    out: Path,
    fresh: bool,
    **settings: Any,
) -> None:
    """Simulate clients by the thousand; what was stopped goes on by the same command."""
    try:
        from rich.console import Console

        from fedpress.simulate import run as simulation
    except ModuleNotFoundError as exc:
        _needs("flower,demo", exc)
    try:
        simulation.run(
            simulation.Settings(**settings),
            out,
            Console(),
            json_file=json_file,
            plot=plot,
            sweep_file=sweep_file,
            fresh=fresh,
        )
    except KeyboardInterrupt:
        _stopped()


app.add_command(plan)


@app.group("compressors", invoke_without_command=True)
@click.pass_context
def compressors(context: click.Context) -> None:
    """Every compression method, its cost and its settings."""
    if context.invoked_subcommand is None:
        from fedpress.compressor_table import table

        click.echo(table())


@compressors.command("show")
@_argument("name", help="A method's id.")
def show_compressor(name: str) -> None:
    """Describe a method, with its settings, their defaults and an example."""
    from fedpress.compressor_table import described

    click.echo(described(name))


@app.group("strategies", invoke_without_command=True)
@click.pass_context
def strategies(context: click.Context) -> None:
    """Every strategy, what it keeps and its settings."""
    if context.invoked_subcommand is None:
        from fedpress.strategy_table import table

        click.echo(table())


@strategies.command("show")
@_argument("name", help="A strategy's id.")
def show_strategy(name: str) -> None:
    """Describe a strategy, with its settings, their defaults and an example."""
    from fedpress.strategy_table import described

    click.echo(described(name))


@app.group("bench")
def benches() -> None:
    """Measure this machine."""


@benches.command("codec")
@_figures
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
@_figures
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
        _needs("demo,torch", exc)
    click.echo(run(as_json))


@benches.command("secagg")
@_figures
@click.option("--quick", is_flag=True, help="Sessions of 100 clients alone.")
def bench_secagg(json_file: Path | None, quick: bool) -> None:
    """Measure what secure aggregation costs clients and server, against its masks alone."""
    from fedpress.bench.secagg import run

    click.echo(run(json_file, quick))


@benches.command("ingest")
@_figures
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
        _needs("server", exc)
    click.echo(run(json_file, quick, postgresql, parts))


@app.command("warmup")
def warmup() -> None:
    """Compile the kernels once, so that the first round need not; fills numba's cache."""
    from fedpress_protocols import kernels

    kernels.warm_up()
    click.echo(f"{kernels.CHOSEN} kernels are ready")


@app.command("version")
def version() -> None:
    """Print the version."""
    click.echo(__version__)


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


def _stopped() -> NoReturn:
    click.echo("stopped; the same command goes on from here", err=True)
    raise click.exceptions.Exit(130) from None


def _attributes(given: Sequence[str]) -> dict[str, float | str]:
    """`KEY=VALUE` each; a value that reads as a finite number is one."""
    attributes: dict[str, float | str] = {}
    for text in given:
        name, has_value, value = text.partition("=")
        if not has_value or name in attributes:
            raise ConfigurationError(
                f"--attribute {text!r}", hint="give KEY=VALUE, and each key once"
            )
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        attributes[name] = number if math.isfinite(number) else value
    return attributes


def _log(verbose: bool) -> None:
    logging.basicConfig(
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        level=logging.DEBUG if verbose else logging.INFO,
    )
