"""The command `fedpress demo`."""

from __future__ import annotations

from pathlib import Path

import click

from fedpress.command_line import (
    PATH,
    SECURE_COMPRESSOR,
    Command,
    console,
    needs,
)
from fedpress_protocols.errors import ConfigurationError

_SIZES = {"usual": ((10, 30), (4, 5)), "secure": ((20, 10), (10, 3)), "dp": ((160, 32), (40, 4))}
"""Clients and rounds by kind of demo: usual ones, and those of --quick."""


@click.command("demo", cls=Command)
@click.option(
    "--clients",
    type=int,
    help="Devices, each a process: 10; in threads 20 with --secure, 160 with --dp.",
)
@click.option("--rounds", type=int, help="Rounds of each task: 30; 10 with --secure, 32 with --dp.")
@click.option(
    "--compressor",
    help="auto, none, NAME, NAME:key=value,... or JSON; auto, or "
    f"{SECURE_COMPRESSOR} with --secure.",
)
@click.option("--secure", is_flag=True, help="With secure aggregation and three drop-outs.")
@click.option(
    "--dp", is_flag=True, help="With differential privacy: epsilon 8, a trusted server's noise."
)
@click.option("--seed", default=0, help="Of the split, the model and the training.")
@click.option("--json", "json_file", type=PATH, metavar="FILE", help="Write the figures here too.")
@click.option(
    "--out",
    type=PATH,
    default="demo-out",
    metavar="DIR",
    help="Folder for the plot and history.json.",
)
@click.option("--ui", is_flag=True, help="Keep the server, and its console, until Ctrl-C.")
@click.option(
    "--quick", is_flag=True, help="4 clients, 5 rounds; 10 and 3 with --secure, 40 and 4 with --dp."
)
def demo(
    clients: int | None,
    rounds: int | None,
    compressor: str | None,
    secure: bool,
    dp: bool,
    seed: int,
    json_file: Path | None,
    out: Path,
    ui: bool,
    quick: bool,
) -> None:
    """Train on handwritten digits, uncompressed and compressed."""
    if dp and (secure or compressor):
        raise ConfigurationError(
            f"--dp with {'--secure' if secure else '--compressor'}",
            hint="leave one of them out; docs/privacy.md has private tasks of other kinds",
        )
    try:
        from fedpress.compressor_option import compressor_from_option
        from fedpress.demo import private
        from fedpress.demo import run as compared
        from fedpress.demo import secure as masked
    except ModuleNotFoundError as exc:
        needs("demo,torch", exc)
    kind = "secure" if secure else "dp" if dp else "usual"
    usual, least = _SIZES[kind]
    clients = usual[0] if clients is None else clients
    rounds = usual[1] if rounds is None else rounds
    if quick:
        clients, rounds = min(clients, least[0]), min(rounds, least[1])
    name = compressor or (SECURE_COMPRESSOR if secure else "auto")
    made = None if name == "auto" else compressor_from_option(name, masked=secure)
    screen = console()
    try:
        if dp:
            private.run(private.Settings(clients, rounds, seed, out, json_file, ui), screen)
        elif secure:
            if made is None:
                raise ConfigurationError(
                    "--compressor auto with --secure, where the demo has a fixed one",
                    hint="leave --compressor out, or name one that commutes with the sum",
                )
            masked.run(masked.Settings(made, clients, rounds, seed, out, json_file, ui), screen)
        else:
            compared.run(compared.Settings(made, clients, rounds, seed, out, json_file, ui), screen)
    except KeyboardInterrupt:
        screen.print("stopped; all processes have ended", highlight=False)
        raise click.exceptions.Exit(130) from None
