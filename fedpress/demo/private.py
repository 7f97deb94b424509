"""`fedpress demo --dp`: a task with user-level differential privacy beside one without.

The server is a process of its own and adds the noise; it is trusted, others are not. Devices are
taken in turns by threads here, each with its own state, and rest between their rounds, so that
noise that is correlated over the rounds can cancel in the model.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from rich.console import Console, RenderableType
from rich.table import Table

from fedpress.demo import digits
from fedpress.demo.fleet import Fleet
from fedpress.demo.live import LiveScreen
from fedpress.operator import Operator
from fedpress_client import Client, PrivacyRules
from fedpress_client.privacy_budget import NO_RULES
from fedpress_client.torch_trainer import TorchTrainer
from fedpress_protocols.errors import ConfigurationError, FedpressError, ServerError
from fedpress_protocols.messages import RoundStatus, TaskConfig
from fedpress_protocols.plan import CohortRules, PrivacyTerms, TrainingTerms
from fedpress_protocols.privacy import accounting, correlated

PRIVATE, OPEN = "private", "open"
SEPARATION = 4
"""A quarter of the devices takes part in each round, so that each rests for three."""
_CLIP, _EPSILON, _DELTA = 0.5, 8.0, 1e-5
_TERMS = TrainingTerms(local_steps=5, batch_size=8, learning_rate=0.5)
_WORKERS, _POLL_SECONDS, _LONGEST_PAUSE = 4, 0.1, 0.3
_ROWS = 12
_RULES = PrivacyRules(_EPSILON, _DELTA, lanes=frozenset({"central"}))
"""The devices' own: the server is trusted to add the noise, and epsilon is bounded."""


@dataclass(frozen=True, slots=True)
class Settings:
    """`json` is where the figures go besides the terminal."""

    clients: int = 160
    rounds: int = 32
    seed: int = 0
    out: Path = Path("demo-out")
    json: Path | None = None
    stays: bool = False
    """Whether the server runs on after the last round, until Ctrl-C."""

    def __post_init__(self) -> None:
        if not 40 <= self.clients <= 400 or self.clients % SEPARATION:
            raise ConfigurationError(
                f"--clients must be a multiple of {SEPARATION} in 40 to 400, not {self.clients}",
                hint="noise is divided among the devices of a round: few of them are not hidden",
            )
        if not SEPARATION <= self.rounds <= 1000:
            raise ConfigurationError(
                f"--rounds must lie in {SEPARATION} to 1000, not {self.rounds}"
            )
        if not 0 <= self.seed < 2**31:
            raise ConfigurationError(f"--seed must lie in 0 to 2**31 - 1, not {self.seed}")

    @property
    def cohort(self) -> int:
        return self.clients // SEPARATION

    @property
    def privacy(self) -> PrivacyTerms:
        """The least noise that the epsilon allows, with one participation to spare: a round that
        is abandoned spends those of the devices whose uploads came."""
        times = -(-self.rounds // SEPARATION) + 1
        correlation = correlated.best(SEPARATION, self.rounds)
        cost = accounting.participation("central", correlation)
        return PrivacyTerms(
            lane="central",
            clip=_CLIP,
            noise_multiplier=accounting.noise_multiplier_for(_EPSILON, _DELTA, times, cost),
            participations=times,
            epsilon=_EPSILON,
            delta=_DELTA,
            correlation=correlation,
        )


@dataclass
class Findings:
    """By task: its committed rounds, and each one's accuracy on the test images."""

    rounds: dict[str, list[RoundStatus]] = field(default_factory=lambda: {PRIVATE: [], OPEN: []})
    accuracies: dict[str, list[float]] = field(default_factory=lambda: {PRIVATE: [], OPEN: []})

    def to_json(self) -> str:
        tasks = {
            name: {
                "accuracies": self.accuracies[name],
                "rounds": [status.model_dump(mode="json") for status in rounds],
            }
            for name, rounds in self.rounds.items()
        }
        return json.dumps({"tasks": tasks}, indent=2) + "\n"


def run(settings: Settings, console: Console) -> Findings:
    """Run the demo and print the report. Raises ServerError."""
    torch.set_num_threads(1)
    findings = Findings()
    logs = settings.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fedpress-demo-") as folder:
        _federate(settings, findings, console, Path(folder), logs)
    for path in (settings.out / "private.json", settings.json):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(findings.to_json(), encoding="utf-8")
    _print_report(console, findings, settings)
    return findings


def _federate(
    settings: Settings, findings: Findings, console: Console, folder: Path, logs: Path
) -> None:
    test, shares = _split(settings.seed, settings.clients)
    model = _trainer(test).initial_model()
    console.print(
        f"starting a server; {settings.cohort} of {settings.clients} devices in each round ...",
        highlight=False,
    )
    fleet = Fleet(folder, logs)
    with fleet, fleet.start_server() as operator:
        fleet.show_console(operator, console)
        operator.register_model(model)
        for name in (PRIVATE, OPEN):
            operator.create_task(_task(settings, name, model.digest))
        token = operator.create_token(uses=settings.clients, expires_in=3600, note="demo")
        clients = [
            Client(
                fleet.url,
                _trainer(share),
                state_dir=folder / f"device-{number}",
                task=name,
                token=token,
                seed=settings.seed * 1000 + number,
                wait=0,
                privacy=_RULES if name == PRIVATE else NO_RULES,
            )
            for name in (PRIVATE, OPEN)
            for number, share in enumerate(shares)
        ]
        with Devices(clients) as devices, Screen(findings, console) as screen:
            while _follow(operator, findings, test, settings.rounds):
                fleet.check()
                devices.check()
                screen.update()
                time.sleep(_POLL_SECONDS)
            screen.update()
        if settings.stays:
            fleet.stay(console)


class Devices:
    """Clients by turns: each thread has its own, and steps those whose pause is over."""

    def __init__(self, clients: Sequence[Client]) -> None:
        self._is_over = threading.Event()
        self._failure: FedpressError | None = None
        self._threads = [
            threading.Thread(target=self._run, args=(clients[first::_WORKERS],), daemon=True)
            for first in range(_WORKERS)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(30)

    def check(self) -> None:
        """Raise what a device failed with."""
        if self._failure is not None:
            raise self._failure

    def _run(self, clients: Sequence[Client]) -> None:
        due = dict.fromkeys(clients, 0.0)
        try:
            while due and not self._is_over.is_set():
                for client in [each for each, at in due.items() if at <= time.monotonic()]:
                    if self._is_over.is_set():
                        return
                    pause = client.step()
                    if pause is None:
                        del due[client]
                    else:
                        due[client] = time.monotonic() + min(pause, _LONGEST_PAUSE)
                self._is_over.wait(0.01)
        except FedpressError as exc:
            self._failure = exc
        finally:
            for client in clients:
                client.close()


class Screen(LiveScreen):
    """Shows `findings` as they grow; a line per round where there is no terminal."""

    def __init__(self, findings: Findings, console: Console) -> None:
        super().__init__(console)
        self._findings = findings

    def update(self) -> None:
        if self._live:
            self._live.update(self._table())
            return
        both = min(len(each) for each in self._findings.rounds.values())
        for number in range(self._printed, both):
            number_, *cells = self._cells(number)
            accuracy, without, epsilon, devices, _ = cells
            self._console.print(
                f"round {number_:>3}  accuracy {accuracy} private {without} without noise  "
                f"epsilon {epsilon}  devices {devices}",
                highlight=False,
            )
        self._printed = both

    def _table(self) -> RenderableType:
        table = Table(title="fedpress: digits, with differential privacy", title_justify="left")
        for name in (
            "round",
            "accuracy\nprivate",
            "accuracy\nno noise",
            "epsilon\nspent",
            "devices",
            "up, kB\nprivate",
        ):
            table.add_column(name, justify="right")
        longest = max(len(each) for each in self._findings.rounds.values())
        for number in range(max(0, longest - _ROWS), longest):
            table.add_row(*self._cells(number))
        return table

    def _cells(self, number: int) -> list[str]:
        """The row of round `number`, counted from 0; a dash where a task is not there yet."""
        findings = self._findings
        accuracies = [
            f"{100 * findings.accuracies[name][number]:5.1f}%"
            if number < len(findings.accuracies[name])
            else "-"
            for name in (PRIVATE, OPEN)
        ]
        own = findings.rounds[PRIVATE]
        status = own[number] if number < len(own) else None
        spent = "-" if status is None or status.privacy is None else f"{status.privacy.epsilon:.2f}"
        devices = "-" if status is None else str(status.included)
        sent = "-" if status is None else f"{status.upload_bytes / 1e3:,.1f}"
        return [str(number + 1), *accuracies, spent, devices, sent]


def _split(seed: int, clients: int) -> tuple[digits.Images, list[digits.Images]]:
    """The test images, and each device's own: as many for each, at random."""
    test, (rest,) = digits.split(seed, 1)
    order = np.random.default_rng(seed).permutation(rest.labels.size)
    return test, [rest.take(rows) for rows in np.array_split(order, clients)]


def _trainer(images: digits.Images) -> TorchTrainer:
    """Softmax regression of 650 parameters: the fewer there are, the less noise there is."""
    network = torch.nn.Sequential(torch.nn.Linear(64, digits.NUM_CLASSES))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    return digits.trainer_of(network, images)


def _task(settings: Settings, name: str, digest: str) -> TaskConfig:
    feedback = {"id": "error_feedback", "inner": {"id": "quantize", "clip": _CLIP / 4}}
    fields: dict[str, Any] = {
        "task": name,
        "model": digest,
        "rounds": settings.rounds,
        "strategy": {"id": "fedavg"},
        "profiles": [{"name": "device", "compressor": feedback}],
        "training": _TERMS,
        "cohort": CohortRules(size=settings.cohort, minimum=3 * settings.cohort // 4),
        "round_seconds": 300,
        "seed": settings.seed,
    }
    if name == PRIVATE:
        fields["privacy"] = settings.privacy
    return TaskConfig.model_validate(fields)


def _follow(operator: Operator, findings: Findings, test: digits.Images, rounds: int) -> bool:
    """Take in the rounds committed since; False once both tasks have all."""
    for name, known in findings.rounds.items():
        if len(known) == rounds:
            continue
        for status in operator.rounds(name):
            is_next = status.state == "committed" and status.round == len(known) + 1
            if is_next and status.model is not None:
                known.append(status)
                accuracy = digits.accuracy(operator.model(status.model), test)
                findings.accuracies[name].append(accuracy)
        if len(known) < rounds and operator.task(name).state == "cancelled":
            raise ServerError(f"task {name!r} was cancelled after {len(known)} rounds")
    return any(len(known) < rounds for known in findings.rounds.values())


def _print_report(console: Console, findings: Findings, settings: Settings) -> None:
    spent = findings.rounds[PRIVATE][-1].privacy
    if spent is None:
        raise ServerError("the private task has no account of its privacy")
    private, without = (100 * findings.accuracies[name][-1] for name in (PRIVATE, OPEN))
    for line in (
        f"accuracy after {settings.rounds} rounds: {private:.1f}% private, {without:.1f}% without",
        f"privacy: epsilon {spent.epsilon:.2f} at delta {spent.delta:g} for everything that one "
        f"device has, in {spent.participations} rounds",
        f"against: {spent.against}",
        f"noise: {spent.noise_multiplier:.2f} times the clip of {spent.clip:g}, correlated over "
        f"rounds; a device rests for {spent.separation - 1} rounds between its own",
    ):
        console.print(line, highlight=False, soft_wrap=True)
