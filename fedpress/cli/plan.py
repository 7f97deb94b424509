"""The command `fedpress plan`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import click

from fedpress.command_line import Command, argument
from fedpress_protocols.errors import ConfigurationError


@click.command("plan", cls=Command)
@argument("model", help="A safetensors file, or a number of parameters: 50826, 350k, 1.5M, 7G.")
@click.option("--link", "uplink", type=float, help="A device's uplink, Mbit/s; required.")
@click.option("--downlink", type=float, help="Its downlink, Mbit/s; by default as --link.")
@click.option("--lane", type=click.Choice(["clear", "masked"]), default="clear", help="The lane.")
@click.option("--cohort", type=int, default=100, help="Devices whose uploads make a round.")
@click.option("--rounds", type=int, default=100, help="Rounds of the task.")
@click.option(
    "--compute", type=float, default=30.0, help="Seconds of training a round, on a device."
)
@click.option("--deadline", type=float, default=600.0, help="Seconds that a round lasts at most.")
@click.option(
    "--device-slowdown",
    "slowdown",
    type=float,
    default=1.0,
    help="How many times slower than this machine a device compresses and encodes.",
)
@click.option("--round-trip", type=float, default=0.05, help="Seconds there and back on the link.")
@click.option(
    "--server-link", type=float, default=1000.0, help="All devices together, Mbit/s each way."
)
@click.option(
    "--most-loss", type=float, default=1.0, help="Points of accuracy that a profile may cost."
)
@click.option(
    "--coded-downloads", is_flag=True, help="For a task with a downlink: encoded model downloads."
)
@click.option("--metered", is_flag=True, help="Bytes count more than seconds.")
@click.option(
    "--update",
    metavar="FILE",
    help="An .npz of real updates, as `fedpress bench rate-distortion` takes, to measure on.",
)
@click.option(
    "--compressor",
    "own",
    multiple=True,
    help="One more compressor to compare: NAME, NAME:key=value,... or JSON. A NAME has 8 bits for "
    "tensors of fewer than 1,024 values or of one dimension; JSON is taken as is. May be "
    "repeated.",
)
@click.option(
    "--trial",
    is_flag=True,
    help="Simulate some rounds with every profile on --app or --data, and go by the losses there.",
)
@click.option(
    "--app", "trial_app", metavar="APP", help="Of a trial: module:factory, as for simulate."
)
@click.option("--data", "trial_data", help="Of a trial, in place of --app: as for simulate.")
@click.option("--partition", "trial_partition", help="Of a trial on --data: as for simulate.")
@click.option("--trial-rounds", type=int, help="Rounds of a trial: 10.")
@click.option("--trial-clients", type=int, help="Clients of a trial: 20, of which --cohort train.")
@click.option("--trial-strategy", help="Of all profiles but auto in a trial: fedavg.")
@click.option("--trial-seed", type=int, help="Of a trial's cohorts, split and training: 0.")
@click.option(
    "--ddp",
    is_flag=True,
    help="Plan DistributedDataParallel instead: seconds and money of a step, by method. "
    "With the options below, --most-loss and --json alone.",
)
@click.option("--processes", type=int, help="Of --ddp: processes or GPUs; required.")
@click.option(
    "--step-time",
    "step_seconds",
    type=float,
    help="Of --ddp: seconds of a step without communication; required.",
)
@click.option("--network", type=float, help="Of --ddp: Gbit/s of each process; required.")
@click.option("--latency", type=float, help="Of --ddp: seconds of one message: 0.00005.")
@click.option("--steps", type=int, help="Of --ddp: steps of the training: 100,000.")
@click.option("--price-hour", type=float, help="Of --ddp: price of one process for an hour.")
@click.option(
    "--price-gb",
    type=float,
    help="Price of a GB on a device's link; of --ddp: that a process sends.",
)
@click.option(
    "--json", "json_file", metavar="FILE|-", help="Write the figures here; - prints them alone."
)
@click.pass_context
def plan(
    context: click.Context,
    /,
    model: str,
    downlink: float | None,
    update: str | None,
    own: tuple[str, ...],
    json_file: str | None,
    trial: bool,
    trial_app: str | None,
    trial_data: str | None,
    trial_partition: str | None,
    trial_rounds: int | None,
    trial_clients: int | None,
    trial_strategy: str | None,
    trial_seed: int | None,
    ddp: bool,
    processes: int | None,
    step_seconds: float | None,
    network: float | None,
    latency: float | None,
    steps: int | None,
    price_hour: float | None,
    price_gb: float | None,
    **asked: Any,
) -> None:
    """Predict bytes and time of a task, and recommend a profile."""
    cluster = {
        "processes": processes,
        "step_seconds": step_seconds,
        "network": network,
        "latency": latency,
        "steps": steps,
        "price_hour": price_hour,
        "price_gb": price_gb,
    }
    _check_options(context, ddp, cluster)
    if ddp:
        chosen_cluster = {name: each for name, each in cluster.items() if each is not None}
        _data_parallel(model, json_file, most_loss=asked["most_loss"], **chosen_cluster)
        return
    from fedpress.planning.report import planned
    from fedpress.planning.situation import Situation, model_of
    from fedpress.planning.trial import Trial
    from fedpress.planning.updates import Drawn
    from fedpress.update_file import Updates

    spec, size = model_of(model)
    chosen_downlink = asked["uplink"] if downlink is None else downlink
    real = None if update is None else Drawn.real(Updates.load(update))
    if real is not None and real.spec.size != spec.size:
        raise ConfigurationError(
            f"{update} has updates of {real.spec.size:,} values, the model has {spec.size:,}"
        )
    spec = spec if real is None else real.spec
    terms = {
        "app": trial_app,
        "data": trial_data,
        "partition": trial_partition,
        "rounds": trial_rounds,
        "clients": trial_clients,
        "strategy": trial_strategy,
        "seed": trial_seed,
    }
    chosen: dict[str, Any] = {name: each for name, each in terms.items() if each is not None}
    if chosen and not trial:
        raise ConfigurationError(
            "options of a trial, and no trial is asked for", hint="add --trial, or remove them"
        )
    report = planned(
        Situation(model, spec, size, downlink=chosen_downlink, price_gb=price_gb or 0.0, **asked),
        own,
        real,
        Trial(**chosen) if trial else None,
        lambda name: click.echo(f"trial: {name}", err=True),
    )
    _print(report, json_file)


def _data_parallel(model: str, json_file: str | None, **cluster: Any) -> None:
    from fedpress.planning.data_parallel import Cluster, Report, measure
    from fedpress.planning.situation import model_of

    spec, _ = model_of(model)
    asked = Cluster(parameters=spec.size, **cluster)
    _print(Report(model, asked, measure(spec)), json_file)


def _check_options(
    context: click.Context, ddp: bool, cluster: Mapping[str, float | int | None]
) -> None:
    """Raise ConfigurationError if an option is required, or belongs to the other kind of plan."""
    required: tuple[str, ...]
    if ddp:
        required = ("processes", "step_seconds", "network")
        allowed = {"model", "ddp", "most_loss", "json_file", *cluster}
    else:
        required, allowed = ("uplink",), set(context.params) - set(cluster) | {"price_gb"}
    by_name = {each.name: each.opts[0] for each in context.command.params}
    absent = [by_name[name] for name in required if context.params[name] is None]
    if absent:
        kind = "a plan with --ddp" if ddp else "a plan"
        raise ConfigurationError(f"{kind} needs {', '.join(absent)}")
    default = click.core.ParameterSource.DEFAULT
    foreign = [
        by_name[name]
        for name in context.params
        if name not in allowed and context.get_parameter_source(name) != default
    ]
    if foreign:
        raise ConfigurationError(
            f"{', '.join(foreign)}: {'not for a plan with --ddp' if ddp else 'only with --ddp'}",
            hint="`fedpress plan --help` says which options go together",
        )


class _Report(Protocol):
    def to_json(self) -> dict[str, Any]: ...
    def to_text(self) -> str: ...


def _print(report: _Report, json_file: str | None) -> None:
    figures = json.dumps(report.to_json(), indent=2) + "\n"
    if json_file == "-":
        click.echo(figures, nl=False)
        return
    if json_file is not None:
        try:
            Path(json_file).write_text(figures, encoding="utf-8")
        except OSError as exc:
            raise ConfigurationError(f"{json_file} cannot be written: {exc.strerror}") from exc
    click.echo(report.to_text())
