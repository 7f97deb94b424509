"""The command `fedpress simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fedpress.command_line import (
    PATH,
    Command,
    callbacks,
    console,
    needs,
    stopped,
)


@click.command("simulate", cls=Command)
@click.option("--clients", type=click.IntRange(min=1), default=100, help="Simulated clients.")
@click.option("--fraction", default=0.1, help="Of the clients, in each round.")
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    help="Rounds: 20, or what a Flower app says, whose num-server-rounds this sets.",
)
@click.option(
    "--task",
    type=PATH,
    metavar="FILE",
    help="A task as `fedpress task create` takes it, run by the real server and devices in this "
    "process: strategy, profiles, policies, schedule, downlink, lane and rounds are the file's.",
)
@click.option(
    "--model",
    type=PATH,
    metavar="FILE",
    help="With --task: the initial model, in place of the data's or the trainer's own.",
)
@click.option(
    "--engine",
    type=click.Choice(["local", "processes", "ray"]),
    default="processes",
    help="local: one process; processes: a pool; ray: Flower's own engine.",
)
@click.option(
    "--compressor",
    help="auto, auto:gap=1, none, NAME, NAME:key=value,... or JSON; auto, see docs/auto.md. A NAME "
    "has 8 bits for tensors of fewer than 1,024 values or of one dimension; JSON is taken as is.",
)
@click.option(
    "--downlink/--no-downlink",
    default=None,
    help="Encode model downloads, and count their bytes; as a rule with auto, else not.",
)
@click.option("--secure", is_flag=True, help="With secure aggregation: the server sees sums only.")
@click.option(
    "--masking",
    default="",
    help="Terms of masked rounds that differ from their defaults, as JSON: "
    '{"adversary": "semi-honest"}.',
)
@click.option(
    "--strategy",
    help="One of fedpress's: NAME or JSON with its settings, "
    '{"id": "fedavgm", "momentum": 0.9}; with auto momentum and an average, else fedavg.',
)
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
@click.option(
    "--link",
    type=float,
    help="Each client's link in Mbit/s: tells how long its transfers take.",
)
@click.option("--seed", default=0, help="Of the split, the model, cohorts, training.")
@click.option("--timeout", default=3600.0, help="Seconds that a round waits at most.")
@click.option("--workers", type=click.IntRange(min=1), help="Processes; one for each core.")
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda", "auto"]),
    default="cpu",
    help="The processor of tasks in torch.",
)
@click.option("--local-epochs", type=int, help="Local epochs a round.")
@click.option("--local-steps", type=int, help="Instead of epochs.")
@click.option("--batch-size", type=click.IntRange(min=1), help="Of the local training.")
@click.option("--learning-rate", type=float, help="Of the local training.")
@click.option("--json", "json_file", type=PATH, metavar="FILE", help="Write the history here too.")
@click.option("--plot", is_flag=True, help="Draw accuracy.png.")
@click.option(
    "--sweep",
    "sweep_file",
    type=PATH,
    metavar="FILE",
    help="Several runs: a JSON list of objects, a name and the settings that differ.",
)
@click.option(
    "--out",
    type=PATH,
    default="simulate-out",
    help="Folder for histories, and for a run that was stopped.",
)
@click.option("--fresh", is_flag=True, help="Start over instead of resuming a stopped run.")
@click.option(
    "--ui",
    is_flag=True,
    help="With --task: open the server's console in a browser, and keep it until Ctrl-C.",
)
@callbacks()
def run_simulation(
    json_file: Path | None,
    plot: bool,
    sweep_file: Path | None,
    out: Path,
    fresh: bool,
    ui: bool,
    callback_texts: tuple[str, ...],
    task: Path | None,
    model: Path | None,
    **settings: Any,
) -> None:
    """Simulate up to thousands of clients; run again to resume."""
    from fedpress.callbacks import from_options

    try:
        from fedpress.simulate import run as simulation
    except ModuleNotFoundError as exc:
        needs("flower,demo", exc)
    try:
        simulation.run(
            simulation.Settings(
                **settings,
                task=None if task is None else str(task),
                model=None if model is None else str(model),
            ),
            out,
            console(),
            json_file=json_file,
            plot=plot,
            sweep_file=sweep_file,
            fresh=fresh,
            ui=ui,
            callbacks=from_options(callback_texts),
        )
    except KeyboardInterrupt:
        stopped()
