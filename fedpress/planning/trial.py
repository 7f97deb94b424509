"""A trial: some rounds of simulation on the user's own app, for every profile of a plan.

It measures by what `fedpress simulate` runs: real bodies, the error that compression adds, the
accuracy that clients or the data's test examples show. All profiles begin at one model, with the
same cohorts and the same local training.
"""

from __future__ import annotations

import json
import logging
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedpress.command_line import needs
from fedpress.planning.profiles import AUTO, Candidate, rung_of_auto
from fedpress.planning.situation import Situation
from fedpress_compression.compressor import to_config
from fedpress_protocols.defaults import BITS, USUAL
from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.policies import Auto

if TYPE_CHECKING:
    from fedpress.simulate.history import History
    from fedpress.simulate.settings import Settings

_LAST = 3
_PARTITION = "dirichlet:0.3"


@dataclass(frozen=True, slots=True)
class Trial:
    """Terms of a trial. `app` is a factory of trainers, module:name, `data` a data set of `fedpress
    simulate` by its name; one of them is None."""

    app: str | None = None
    data: str | None = None
    rounds: int = 10
    clients: int = 20
    partition: str = _PARTITION
    strategy: str = "fedavg"
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.app is None) == (self.data is None):
            raise ConfigurationError(
                "--trial measures on an app or on a data set, one of them",
                hint="give --app module:factory, as for `fedpress simulate`, or --data digits",
            )
        if self.app is not None and self.partition != _PARTITION:
            raise ConfigurationError(
                "--partition cannot be combined with --app, whose clients bring their own data",
                hint="remove one of them",
            )
        if self.rounds < 1 or self.clients < 2:
            raise ConfigurationError(
                f"a trial of {self.rounds} rounds with {self.clients} clients; at least 1 round "
                "and 2 clients are needed",
                hint="raise --trial-rounds or --trial-clients",
            )

    @property
    def averaged(self) -> int:
        """Rounds at the end whose accuracies are averaged."""
        return min(_LAST, self.rounds)

    @property
    def subject(self) -> str:
        return self.app or self.data or ""

    def cohort(self, situation: Situation) -> int:
        return min(situation.cohort, self.clients)


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one profile: the mean body in bytes, the mean NMSE, the accuracy in percent over the last
    rounds; None where the trial shows none, or no number. `loss` is in points below the baseline,
    `discards` how many updates were lost to the model in whole or in part, by reason."""

    body: float
    nmse: float | None
    accuracy: float | None
    loss: float | None = None
    discards: Mapping[str, int] = field(default_factory=dict)


def tried(
    candidates: Sequence[Candidate],
    situation: Situation,
    trial: Trial,
    on_start: Callable[[str], None] = lambda name: None,
) -> dict[str, Measured]:
    """Simulate every candidate, the baseline among them, and measure; by the candidates' names.

    Raises ConfigurationError as `checked` does.
    """
    usual = checked(situation, trial)
    from fedpress.simulate.run import simulate
    from fedpress.simulate.screen import quieten

    quieten()
    measured = {}
    with tempfile.TemporaryDirectory(prefix="fedpress-trial-") as folder:
        for number, candidate in enumerate(candidates):
            on_start(candidate.name)
            settings = _settings(usual, candidate, situation, trial)
            with _discards() as discards:
                history = simulate(settings, Path(folder) / str(number))
            measured[candidate.name] = _measured(history, candidate, discards)
    base = next(measured[each.name] for each in candidates if each.baseline)
    return {name: replace(each, loss=_below(base, each)) for name, each in measured.items()}


def checked(situation: Situation, trial: Trial) -> Settings:
    """The settings that all profiles of a trial share.

    Raises ConfigurationError for an app that is none, or of another model, for a strategy that
    cannot be simulated, and in the masked lane.
    """
    try:
        from fedpress.simulate.run import check
        from fedpress.simulate.settings import Settings
    except ModuleNotFoundError as exc:
        needs("flower,demo", exc)
    if situation.lane == "masked":
        raise ConfigurationError(
            "--trial measures the clear lane",
            hint="bodies of the masked lane follow from the plan alone; for its accuracy run "
            "`fedpress simulate --secure` on the app",
        )
    usual = Settings(
        clients=trial.clients,
        fraction=trial.cohort(situation) / trial.clients,
        rounds=trial.rounds,
        engine="local",
        app=trial.app,
        data=trial.data or "digits",
        partition=trial.partition,
        seed=trial.seed,
        downlink=situation.coded_downloads,
    )
    _check_app(usual, situation)
    check(replace(usual, compressor="none", strategy=trial.strategy))
    return usual


def rate_of_auto(situation: Situation) -> float:
    """Bits a value of auto's most compressed profile in a trial: that of the planned task, or the
    second of two profiles, the fewest that auto has."""
    return BITS[max(1, rung_of_auto(situation.uploads))]


def _settings(
    usual: Settings, candidate: Candidate, situation: Situation, trial: Trial
) -> Settings:
    if candidate.name == AUTO:
        # By a gap, which the number of the trial's own uploads does not change.
        gap = Auto().gap * (BITS[USUAL] / rate_of_auto(situation)) ** 2
        return replace(usual, compressor=f"auto:gap={gap}")
    return replace(usual, compressor=json.dumps(to_config(candidate.made)), strategy=trial.strategy)


def _check_app(settings: Settings, situation: Situation) -> None:
    """Refuse what cannot be tried before anything runs."""
    from fedpress.simulate.apps import FlowerApp, TrainerApp, parse_app
    from fedpress.simulate.partition import Partition
    from fedpress.simulate.tasks import Task

    app, common = settings.app, ("trial", settings.terms, settings.seed, settings.clients, "")
    if app is None:
        partition = Partition.parse(settings.partition)
        task = Task.parse(settings.data, settings.clients, partition, settings.seed, "cpu")
        trainers = TrainerApp(*common, task=task)
    elif isinstance(parse_app(app), FlowerApp):
        raise ConfigurationError(
            f"{app} is a Flower app, which brings a compressor and a strategy of its own",
            hint="give --app module:factory of trainers",
        )
    else:
        trainers = TrainerApp(*common, factory=app)
    size = trainers.initial_model().spec.size
    if size != situation.spec.size:
        raise ConfigurationError(
            f"the model of {app or settings.data} has {size:,} parameters, and "
            f"{situation.model} has {situation.spec.size:,}",
            hint="plan the app's own model: give its safetensors file, or its number of parameters",
        )


@contextmanager
def _discards() -> Iterator[Counter[str]]:
    """Count the updates that are lost to the model, by reason, in place of a warning for each."""
    from fedpress_flower.client.compression import warn

    reasons: Counter[str] = Counter()

    def count(record: logging.LogRecord) -> bool:
        if record.funcName != warn.__name__ or record.levelno < logging.WARNING:
            return True
        reasons[record.getMessage().rpartition(": ")[2]] += 1
        return False

    log = logging.getLogger(warn.__module__)
    log.addFilter(count)
    try:
        yield reasons
    finally:
        log.removeFilter(count)


def _measured(history: History, candidate: Candidate, discards: Mapping[str, int]) -> Measured:
    included = sum(row.included or 0 for row in history.rows)
    if not included:
        failed = next((why for row in history.rows for why in row.failed.values()), "no answer")
        raise ConfigurationError(f"the trial of {candidate.name} included no upload: {failed}")
    bodies = sum(row.upload_bytes or 0 for row in history.rows)
    errors = [row.nmse for row in history.rows if row.nmse is not None]
    last = [row.accuracy for row in history.rows[-_LAST:] if row.accuracy is not None]
    accuracy = 100 * math.fsum(last) / len(last) if last else math.nan
    return Measured(
        body=bodies / included,
        nmse=math.fsum(errors) / len(errors) if errors else None,
        accuracy=accuracy if math.isfinite(accuracy) else None,
        discards=discards,
    )


def _below(base: Measured, other: Measured) -> float | None:
    if base.accuracy is None or other.accuracy is None:
        return None
    return base.accuracy - other.accuracy


def to_json(
    trial: Trial, situation: Situation, results: Mapping[str, Measured]
) -> dict[str, object]:
    return {
        "of": trial.subject,
        "rounds": trial.rounds,
        "clients": trial.clients,
        "cohort": trial.cohort(situation),
        "strategy": trial.strategy,
        "seed": trial.seed,
        "profiles": {
            name: {
                "body_bytes": each.body,
                "nmse": each.nmse,
                "accuracy": each.accuracy,
                "loss_points": each.loss,
                "discards": dict(each.discards),
            }
            for name, each in results.items()
        },
    }
