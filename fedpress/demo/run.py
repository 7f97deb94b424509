"""The demo from end to end: start, federate both tasks, measure, draw, stop."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from fedpress.demo import digits, show
from fedpress.demo.fleet import Fleet
from fedpress.demo.history import Curve, History
from fedpress.operator import Operator
from fedpress.simulate.rows import committed
from fedpress_compression.compressor import Compressor, to_config
from fedpress_compression.compressors.none import Uncompressed
from fedpress_protocols.errors import ConfigurationError, ServerError
from fedpress_protocols.messages import TaskConfig
from fedpress_protocols.plan import CohortRules, Profile, TrainingTerms

_POLL_SECONDS = 0.2
_STRATEGY = {"id": "fedavgm", "learning_rate": 1.0, "momentum": 0.8}
_TERMS = TrainingTerms(local_epochs=5, batch_size=16, learning_rate=0.2)
"""docs/design.md has the other settings that were tried, with results."""


@dataclass(frozen=True, slots=True)
class Settings:
    """`out` is where the plot and history go; `json` is one more place for the history. Without a
    `compressor` the compressed task names none, and has auto."""

    compressor: Compressor[Any] | None
    clients: int = 10
    rounds: int = 30
    seed: int = 0
    out: Path = Path("demo-out")
    json: Path | None = None
    stays: bool = False
    """Whether the server runs on after the last round, until Ctrl-C."""

    def __post_init__(self) -> None:
        if not 1 <= self.clients <= 100:
            raise ConfigurationError(f"--clients must lie in 1 to 100, not {self.clients}")
        if not 1 <= self.rounds <= 10_000:
            raise ConfigurationError(f"--rounds must lie in 1 to 10000, not {self.rounds}")
        if not 0 <= self.seed < 2**31:
            raise ConfigurationError(f"--seed must lie in 0 to 2**31 - 1, not {self.seed}")


def run(settings: Settings, console: Console) -> History:
    """Run the demo; the history is written even if it ends early. Raises ServerError."""
    history = History(
        plain=Curve("plain", to_config(Uncompressed())),
        compressed=Curve("compressed", _config(settings.compressor)),
        clients=settings.clients,
        seed=settings.seed,
    )
    (settings.out / "logs").mkdir(parents=True, exist_ok=True)
    files = {"history": settings.out / "history.json", "plot": settings.out / "accuracy.png"}
    if settings.json:
        files["json"] = settings.json
    started = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="fedpress-demo-") as folder:
            fleet = Fleet(Path(folder), settings.out / "logs")
            _federate(settings, history, console, fleet)
        history.complete = True
    finally:
        history.seconds = time.monotonic() - started
        for what, path in files.items():
            if what != "plot":
                history.write(path)
    show.draw_plot(history, files["plot"])
    show.print_summary(console, history, {what: path.resolve() for what, path in files.items()})
    return history


def _federate(settings: Settings, history: History, console: Console, fleet: Fleet) -> None:
    test, _ = digits.split(settings.seed, settings.clients)
    model = digits.trainer(settings.seed, test).initial_model()
    with fleet:
        console.print(f"starting a server and {settings.clients} devices ...", highlight=False)
        with fleet.start_server() as operator:
            fleet.show_console(operator, console)
            operator.register_model(model)
            for curve in (history.plain, history.compressed):
                operator.create_task(_task(settings, curve, model.digest))
            token = operator.create_token(uses=settings.clients, expires_in=3600, note="demo")
            names = [history.plain.name, history.compressed.name]
            fleet.start_devices(token, settings.clients, settings.seed, names)
            with show.Screen(history, settings.rounds, console) as screen:
                while not _caught_up(operator, history, test, settings.rounds):
                    fleet.check()
                    screen.update()
                    time.sleep(_POLL_SECONDS)
                screen.update()
            fleet.finish()
            if settings.stays:
                fleet.stay(console)


def _config(compressor: Compressor[Any] | None) -> dict[str, Any]:
    return {"id": "auto"} if compressor is None else to_config(compressor)


def _task(settings: Settings, curve: Curve, digest: str) -> TaskConfig:
    fields: dict[str, Any] = {
        "task": curve.name,
        "model": digest,
        "rounds": settings.rounds,
        "training": _TERMS,
        "cohort": CohortRules(size=settings.clients, minimum=settings.clients),
        "seed": settings.seed,
    }
    if curve.compressor != _config(None):
        profile = Profile(name="device", compressor=curve.compressor)
        fields |= {"strategy": _STRATEGY, "profiles": (profile,)}
    return TaskConfig.model_validate(fields)


def _caught_up(operator: Operator, history: History, test: digits.Images, rounds: int) -> bool:
    """Take in the rounds committed since; True once both tasks have all of theirs."""
    for curve in (history.plain, history.compressed):
        for attempts in committed(operator.rounds(curve.name)):
            last = attempts[-1]
            if last.round == len(curve.points) + 1 and last.model is not None:
                curve.add(attempts, digits.accuracy(operator.model(last.model), test))
        done = len(curve.points) == rounds
        if not done and operator.task(curve.name).state == "cancelled":
            raise ServerError(f"task {curve.name!r} was cancelled after {len(curve.points)} rounds")
    return all(len(curve.points) == rounds for curve in (history.plain, history.compressed))
