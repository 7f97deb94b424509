"""`fedpress demo --secure`: a masked task over HTTP, three devices that drop out, what was seen.

The server is a process of its own. The devices are threads here, each with its own state and link;
the enrolment authority is here too, so that the server cannot invent devices. As this process has
both ends in its hands, it can hold what the server was sent to what the devices had.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fedpress.demo import digits
from fedpress.demo.fleet import Fleet
from fedpress.demo.secure_show import Screen, print_report
from fedpress.operator import Operator
from fedpress_client import Client, Event, MaskingRules, ReceiptReceived, SessionAdvanced
from fedpress_client.state import StateDirectory
from fedpress_compression.compressor import Compressor
from fedpress_protocols.errors import ConfigurationError, FedpressError, ServerError
from fedpress_protocols.masking.certificates import Certificate
from fedpress_protocols.messages import RoundStatus, TaskConfig
from fedpress_protocols.plan import CohortRules, MaskingTerms, PhaseTerms, Profile, TrainingTerms
from fedpress_protocols.signatures import DeviceKey, to_base64url

TASK = "secure"
POPULATION = "demo"
_POLL_SECONDS = 0.1
_DAY = 24 * 3600
_STRATEGY = {"id": "fedavgm", "learning_rate": 1.0, "momentum": 0.8}
_TERMS = TrainingTerms(local_epochs=5, batch_size=16, learning_rate=0.2)
_MASKING = MaskingTerms(
    levels=15, seconds=PhaseTerms(advertise=6, share=6, mask=6, consent=6, reveal=6)
)
_GOES_AFTER = ("advertise", "shares", "masked")
"""The last message of each of the three devices that drop out."""


@dataclass(frozen=True, slots=True)
class Settings:
    """`json` is where the figures go besides the terminal."""

    compressor: Compressor[Any]
    clients: int = 20
    rounds: int = 10
    seed: int = 0
    out: Path = Path("demo-out")
    json: Path | None = None
    stays: bool = False
    """Whether the server runs on after the last round, until Ctrl-C."""

    def __post_init__(self) -> None:
        if not 10 <= self.clients <= 100:
            raise ConfigurationError(
                f"--clients must lie in 10 to 100, not {self.clients}",
                hint="three drop out, and enough must remain to undo the masks",
            )
        if not 2 <= self.rounds <= 1000:
            raise ConfigurationError(f"--rounds must lie in 2 to 1000, not {self.rounds}")
        if not 0 <= self.seed < 2**31:
            raise ConfigurationError(f"--seed must lie in 0 to 2**31 - 1, not {self.seed}")

    @property
    def drop_outs(self) -> dict[int, str]:
        """By device, the step after which it goes."""
        apart = self.clients // 4
        return {(number + 1) * apart - 1: step for number, step in enumerate(_GOES_AFTER)}

    @property
    def drop_round(self) -> int:
        """The round in which they go; they are back for the next."""
        return min(2, self.rounds - 1)


@dataclass
class Findings:
    """The report's data, filled while the task runs."""

    clients: int
    rounds: list[RoundStatus] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    plain: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """By round and device: the whole numbers before they were masked, as they would have left."""
    masked: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """The same, as they left."""
    fates: dict[tuple[int, int], str] = field(default_factory=dict)
    """By round and device: what its receipt says."""
    left: dict[int, str] = field(default_factory=dict)
    """By device that dropped out: after which step."""
    steps: dict[int, str] = field(default_factory=dict)
    """By device: what it did last."""

    def to_json(self) -> str:
        return json.dumps(
            {
                "clients": self.clients,
                "rounds": [status.model_dump(mode="json") for status in self.rounds],
                "accuracies": self.accuracies,
                "dropped_out": self.left,
            },
            indent=2,
        )


class Gone(BaseException):
    """The device loses its power now."""


class DemoDevice:
    """One device in a thread; drops out once if it is to, and begins again from its disk."""

    def __init__(
        self,
        number: int,
        settings: Settings,
        findings: Findings,
        make: Callable[[Callable[[Event], None]], Client],
        came_after: threading.Event,
    ) -> None:
        self._number, self._findings, self._make = number, findings, make
        self._goes_after = settings.drop_outs.get(number)
        self._drop_round, self._came_after = settings.drop_round, came_after
        self._client: Client | None = None
        self.failure: FedpressError | None = None
        self._stopping = False
        self.thread = threading.Thread(target=self._run, name=f"device-{number}", daemon=True)

    def stop(self) -> None:
        self._stopping = True
        self._came_after.set()
        if self._client is not None:
            self._client.stop()

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._client = self._make(self._heard)
                self._client.run()
                return
            except Gone:
                self._findings.steps[self._number] = "gone"
                self._came_after.wait()
            except FedpressError as exc:
                self.failure = exc
                return

    def _heard(self, event: Event) -> None:
        findings, number = self._findings, self._number
        step = event.step if isinstance(event, SessionAdvanced) else event.kind
        findings.steps[number] = step
        if isinstance(event, ReceiptReceived):
            findings.fates[event.round, number] = event.reason
        if step in ("trained", "masked") and self._client is not None:
            bodies = findings.plain if step == "trained" else findings.masked
            for pending in self._client.ledger.pending.values():
                bodies[pending.round, number] = pending.body
        if step == self._goes_after and event.round == self._drop_round:
            findings.left[number], self._goes_after = step, None
            raise Gone


def run(settings: Settings, console: Console) -> Findings:
    """Run the demo and print the report. Raises ServerError."""
    torch.set_num_threads(1)
    findings = Findings(settings.clients)
    logs = settings.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fedpress-demo-") as folder:
        _federate(settings, findings, console, Path(folder), logs)
    text = findings.to_json() + "\n"
    for path in (settings.out / "secure.json", settings.json):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    print_report(console, findings, settings.drop_round)
    return findings


def _federate(
    settings: Settings, findings: Findings, console: Console, folder: Path, logs: Path
) -> None:
    test, shares = digits.split(settings.seed, settings.clients)
    model = digits.trainer(settings.seed, test).initial_model()
    authority = DeviceKey.generate()
    public = to_base64url(authority.public)
    console.print(
        f"starting a server and {settings.clients} devices; "
        f"{len(settings.drop_outs)} will drop out in round {settings.drop_round} ...",
        highlight=False,
    )
    fleet = Fleet(folder, logs, {"masking_authority": public, "population": POPULATION})
    with fleet, fleet.start_server() as operator:
        fleet.show_console(operator, console)
        operator.register_model(model)
        operator.create_task(_task(settings, model.digest))
        token = operator.create_token(uses=settings.clients, expires_in=3600, note="demo")
        came_after = threading.Event()

        def maker(number: int) -> Callable[[Callable[[Event], None]], Client]:
            state = folder / f"device-{number}"
            certificate = folder / f"certificate-{number}"
            key = StateDirectory.open(state).key()
            certificate.write_bytes(
                Certificate.issue(
                    authority,
                    identity=key.public,
                    client_id=f"device {number}",
                    population=POPULATION,
                    expires=int(time.time()) + _DAY,
                ).to_bytes()
            )
            trainer = digits.trainer(settings.seed, shares[number])

            def make(on_event: Callable[[Event], None]) -> Client:
                return Client(
                    fleet.url,
                    trainer,
                    state_dir=state,
                    task=TASK,
                    token=token,
                    seed=settings.seed * 1000 + number,
                    masking=MaskingRules(authority=public, certificate=certificate),
                    on_event=on_event,
                )

            return make

        devices = [
            DemoDevice(number, settings, findings, maker(number), came_after)
            for number in range(settings.clients)
        ]
        for device in devices:
            device.thread.start()
        try:
            with Screen(findings, settings.rounds, console) as screen:
                while _follow(operator, findings, test, settings.rounds):
                    fleet.check()
                    _check(devices)
                    if _is_over(operator, settings.drop_round):
                        came_after.set()
                    screen.update()
                    time.sleep(_POLL_SECONDS)
                screen.update()
            for device in devices:
                device.thread.join(30)
            if settings.stays:
                fleet.stay(console)
        finally:
            for device in devices:
                device.stop()
            for device in devices:
                device.thread.join(10)


def _task(settings: Settings, digest: str) -> TaskConfig:
    return TaskConfig(
        task=TASK,
        model=digest,
        rounds=settings.rounds,
        strategy=_STRATEGY,
        lane="masked",
        masking=_MASKING,
        profiles=(Profile(name="device", compressor=settings.compressor),),
        training=_TERMS,
        cohort=CohortRules(size=settings.clients, minimum=settings.clients // 2),
        round_seconds=60,
        seed=settings.seed,
    )


def _is_over(operator: Operator, number: int) -> bool:
    """True once an attempt at the round has ended, committed or abandoned."""
    ends = ("committed", "abandoned")
    return any(each.round == number and each.state in ends for each in operator.rounds(TASK))


def _follow(operator: Operator, findings: Findings, test: digits.Images, rounds: int) -> bool:
    """Take in the rounds committed since; False once all are."""
    for status in operator.rounds(TASK):
        is_next = status.state == "committed" and status.round == len(findings.rounds) + 1
        if is_next and status.model is not None:
            findings.rounds.append(status)
            findings.accuracies.append(digits.accuracy(operator.model(status.model), test))
    if operator.task(TASK).state == "cancelled":
        raise ServerError(f"the task was cancelled after {len(findings.rounds)} rounds")
    return len(findings.rounds) < rounds


def _check(devices: list[DemoDevice]) -> None:
    for device in devices:
        if device.failure is not None:
            raise device.failure
