"""`fedpress simulate --task`: a task's file, run by the server and the devices themselves.

The application that `fedpress server run` runs, and a `Client` for each simulated device, in this
process: requests pass as function calls, everything else is what runs in the field, durable state
included, so a run that was stopped goes on. Devices take turns in one thread, in an order that
comes of the seed; when none has anything to do, the clock that all of them go by moves on, so
deadlines pass without anybody's waiting. Keys come of the seed too, and so do the ids of clients.
"""

from __future__ import annotations

import hashlib
import random
import secrets
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
from anyio.from_thread import BlockingPortal, start_blocking_portal

from fedpress.command_line import needs
from fedpress.operator import Operator
from fedpress.simulate.apps import FlowerApp, TrainerApp, parse_app
from fedpress.simulate.partition import Partition
from fedpress.simulate.rows import Row, committed, row_of
from fedpress.simulate.settings import Settings
from fedpress.simulate.tasks import Task
from fedpress.task_file import checked, read_model, task_config
from fedpress_client import Client, Event, MaskingRules
from fedpress_client.events import (
    AssignmentDeclined,
    DeviceEnrolled,
    ReceiptReceived,
    SessionAdvanced,
    TaskJoined,
    UpdateTrained,
    UpdateUploaded,
)
from fedpress_client.state import StateDirectory
from fedpress_client.trainer import Evaluation, Trained, Trainer, TrainingRequest
from fedpress_client.transport import HttpTransport
from fedpress_flower.envelope import client_seed
from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.messages import RoundStatus, TaskConfig
from fedpress_protocols.model import Model
from fedpress_protocols.plan import MaskingTerms
from fedpress_protocols.signatures import DeviceKey

try:
    from fastapi import FastAPI

    from fedpress.simulate.site import Site
    from fedpress_server import Settings as ServerSettings
    from fedpress_server import create_app
except ModuleNotFoundError as exc:
    needs("server", exc)

_URL = "http://fedpress.simulation"
_BEGINNING = 1_800_000_000.0
_SHORTEST_STEP, _LONGEST_STEP = 0.05, 3600.0
_LONGEST_IDLE = 86_400.0
"""Of the simulated clock, beyond two rounds, until a task that no device works for is ended."""
_FOLD_SECONDS = 0.002
_PROGRESS = (
    DeviceEnrolled,
    TaskJoined,
    UpdateTrained,
    UpdateUploaded,
    ReceiptReceived,
    SessionAdvanced,
)
_OVER = frozenset({"committed", "abandoned"})
_AT_WORK = frozenset({"folding"})


class Clock:
    """Unix seconds of the simulated world, kept in a file over a stop."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._now = float(file.read_text()) if file.exists() else _BEGINNING

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds
        self._file.write_text(repr(self._now))


class _InProcess(httpx.BaseTransport):
    """Requests to an application that runs in the portal's thread."""

    def __init__(self, app: FastAPI, portal: BlockingPortal) -> None:
        self._transport, self._portal = httpx.ASGITransport(app), portal

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return self._portal.call(self._answered, request)

    async def _answered(self, request: httpx.Request) -> httpx.Response:
        sent = httpx.Request(
            request.method, request.url, headers=request.headers, content=request.read()
        )
        answer = await self._transport.handle_async_request(sent)
        stream = httpx.ByteStream(await answer.aread())
        return httpx.Response(answer.status_code, headers=answer.headers, stream=stream)


class _LostError(BaseException):
    """A device is lost at its training: nobody who handles a trainer's faults may catch it."""


@dataclass
class _Device:
    """One simulated device: `is_lost` until the round's attempt has ended that it was lost in.
    `declined` counts what all devices declined, by reason."""

    declined: Counter[str]
    client: Client = field(init=False)
    is_lost: bool = False
    has_worked: bool = False

    def on_event(self, event: Event) -> None:
        self.has_worked |= isinstance(event, _PROGRESS)
        if isinstance(event, AssignmentDeclined):
            self.declined[event.reason] += 1


@dataclass(frozen=True)
class _Fragile:
    """A trainer whose device is lost, with probability `chance`, when it is to train."""

    trainer: Trainer
    chance: float
    seed: int

    @property
    def honours(self) -> frozenset[str]:
        return frozenset(getattr(self.trainer, "honours", ()))

    def train(self, model: Model, work: TrainingRequest) -> Trained:
        drawn = np.random.default_rng([self.seed, work.round, work.attempt]).random()
        if drawn < self.chance:
            raise _LostError
        return self.trainer.train(model, work)

    def evaluate(self, model: Model) -> Evaluation | None:
        return self.trainer.evaluate(model)


@dataclass
class ServerTask:
    """A task that is ready to run in `folder`."""

    settings: Settings
    folder: Path
    app: TrainerApp
    model: Model
    config: TaskConfig
    _reported: int = 0
    _random: random.Random = field(default_factory=random.Random)
    _declined: Counter[str] = field(default_factory=Counter)

    @classmethod
    def prepare(cls, settings: Settings, folder: Path) -> ServerTask:
        """Read and check everything; raises ConfigurationError as the server would, and for
        conditions that no simulated device can meet."""
        if settings.task is None:
            raise ConfigurationError("no task's file was named")
        path = Path(settings.task)
        app = _trainers(settings, folder, task_config(path))
        initial = _initial_model(settings, app)
        model = Model.from_bytes(initial.to_bytes())
        config = checked(path, model).config
        if config.seed is None:
            config = config.model_copy(update={"seed": settings.seed})
        unmet = [name for name in ("eligible", "members") if getattr(config, name)]
        if unmet:
            raise ConfigurationError(
                f"{path}: {' and '.join(unmet)} cannot be simulated: the devices have no "
                "attributes, and ids that are drawn when they enrol",
                hint="leave it out of the file that is simulated",
            )
        if config.cohort.minimum > settings.clients:
            raise ConfigurationError(
                f"{path}: a round needs {config.cohort.minimum} uploads at least, and --clients is "
                f"{settings.clients}",
                hint="raise --clients, or lower cohort.minimum in the file",
            )
        return cls(settings, folder, app, model, config)

    def run(
        self, closed: Callable[[Row, list[RoundStatus]], None], site: Site | None = None
    ) -> str:
        """Run the task to its end, or go on with it; why it ended before its last round, if it did.

        `closed` is told every round that has come to its end, those of a run before a stop first.
        A `site` shows the server, and keeps it.
        Raises what server and devices raise.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        clock = Clock(self.folder / "clock")
        self._random.seed(self.settings.seed)
        admin_token = secrets.token_urlsafe(24)
        server_settings = ServerSettings(
            data_dir=self.folder / "server",
            admin_token=admin_token,
            tick_seconds=3600,
        )
        app = create_app(server_settings, clock=clock, session_clock=time.time)
        with ExitStack() as stack:
            portal = stack.enter_context(start_blocking_portal())
            stack.enter_context(portal.wrap_async_context_manager(app.router.lifespan_context(app)))
            http = _InProcess(app, portal)
            operator = stack.enter_context(Operator(_URL, admin_token, http=http))
            if not any(task.task == self.config.task for task in operator.tasks()):
                operator.register_model(self.model)
                operator.create_task(self.config)
            token = operator.create_token(uses=self.settings.clients, expires_in=10 * 86_400)
            devices = stack.enter_context(self._devices(token, http, clock))
            if site is not None:
                stack.enter_context(site.open(app, portal, operator))

            def tick() -> None:
                portal.call(app.services.scheduler.tick)

            idle = self._drive(devices, operator, clock, tick, closed)
            if site is not None:
                site.stay()
            reasons = [idle, operator.task(self.config.task).reason]
        if any(reasons):
            reasons += [f"{count} declined: {why}" for why, count in self._declined.most_common(1)]
        return "; ".join(filter(None, reasons))

    def _drive(
        self,
        devices: list[_Device],
        operator: Operator,
        clock: Clock,
        tick: Callable[[], None],
        closed: Callable[[Row, list[RoundStatus]], None],
    ) -> str:
        """Let devices take turns until the task has ended and each has settled its account, or
        until none has had anything to do for long; returns the reason in that case."""
        going, step = list(devices), _SHORTEST_STEP
        newest, idle_since = ("", 0, 0), clock()
        longest_idle = _LONGEST_IDLE + 2 * self.config.round_seconds
        while going:
            self._random.shuffle(going)
            for device in going:
                device.has_worked = False
            ended: list[_Device] = []
            pauses: list[float] = []
            for device in going:
                if device.is_lost:
                    continue
                try:
                    pause = device.client.step()
                except _LostError:
                    device.is_lost = True
                    continue
                if device.has_worked:
                    self._settled(operator)
                if pause is None:
                    ended.append(device)
                elif pause:
                    pauses.append(pause)
            going = [device for device in going if device not in ended]
            status = self._settled(operator)
            self._report(operator, closed)
            now = (status.state, status.round, status.attempt) if status else ("", 0, 0)
            if now[1:] != newest[1:] or now[0] in _OVER:
                for device in devices:
                    device.is_lost = False
            if now == newest and not ended and not any(each.has_worked for each in going):
                clock.advance(step)
                step = min(2 * step, _LONGEST_STEP)
                tick()
                if clock() - idle_since > longest_idle:
                    self._report(operator, closed, but=0)
                    if operator.task(self.config.task).state == "paused":
                        return ""
                    return (
                        f"no device had anything to do for {longest_idle / 3600:,.0f} hours of the "
                        f"simulated clock, in round {newest[1]}"
                    )
            else:
                idle_since = clock()
                step = min(pauses, default=_SHORTEST_STEP)
                clock.advance(_SHORTEST_STEP)
                tick()
            newest = now
        self._report(operator, closed, but=0)
        return ""

    def _settled(self, operator: Operator) -> RoundStatus | None:
        """The newest attempt, once the server has no model to make: its clock stands still while it
        does, and what the next device is told must not depend on how long that takes."""
        while True:
            newest = operator.rounds(self.config.task, limit=1)
            if not newest or newest[0].state not in _AT_WORK:
                return newest[0] if newest else None
            time.sleep(_FOLD_SECONDS)

    def _report(
        self,
        operator: Operator,
        closed: Callable[[Row, list[RoundStatus]], None],
        but: int = 1,
    ) -> None:
        """Report the rounds committed since the last call, except the newest `but` rounds: devices
        measure a model in the round after."""
        last = operator.task(self.config.task).round - but
        if last <= self._reported:
            return
        for attempts in committed(operator.rounds(self.config.task)):
            if self._reported < attempts[-1].round <= last:
                closed(self._row(operator, attempts), attempts)
                self._reported = attempts[-1].round

    def _row(self, operator: Operator, attempts: list[RoundStatus]) -> Row:
        last = attempts[-1]
        row = row_of(attempts, [each.name for each in self.config.profiles])
        if self.settings.link is not None and row.asked:
            each = (row.up_bytes + row.down_bytes) / row.asked
            row.link_seconds = 8 * each / (1e6 * self.settings.link)
        if self.app.task is not None and last.model is not None:
            row.test = self.app.task.evaluate(operator.model(last.model))
        return row

    @contextmanager
    def _devices(
        self, token: str, http: httpx.BaseTransport, clock: Clock
    ) -> Iterator[list[_Device]]:
        context = ssl.create_default_context()
        masking = None
        if self.config.lane == "masked":
            terms = self.config.masking or MaskingTerms()
            masking = MaskingRules(adversary=terms.adversary, corrupt=terms.corrupt)
        devices: list[_Device] = []
        try:
            for index in range(self.settings.clients):
                state = self.folder / "clients" / str(index)
                seed = client_seed(self.settings.seed, index)
                trainer = _Fragile(self.app.trainer(index), self.settings.dropout, seed)
                device = _Device(self._declined)
                device.client = Client(
                    _URL,
                    trainer if self.settings.dropout else trainer.trainer,
                    state_dir=state,
                    task=self.config.task,
                    token=token,
                    seed=seed,
                    wait=0.0,
                    masking=masking,
                    on_event=device.on_event,
                    transport=HttpTransport(
                        _URL,
                        _key(state, self.settings.seed, index),
                        verify=context,
                        sleep=lambda seconds: None,
                        clock=clock,
                        http=http,
                    ),
                    sleep=lambda seconds: None,
                    clock=clock,
                    random=random.Random(seed).random,  # noqa: S311
                )
                devices.append(device)
            yield devices
        finally:
            for device in devices:
                device.client.close()


def _trainers(settings: Settings, folder: Path, config: TaskConfig) -> TrainerApp:
    common = (
        config.task,
        config.training,
        settings.seed,
        settings.clients,
        str(folder / "clients"),
    )
    if settings.app is None:
        partition = Partition.parse(settings.partition)
        task = Task.parse(
            settings.data, settings.clients, partition, settings.seed, settings.device
        )
        return TrainerApp(*common, task=task)
    if isinstance(parse_app(settings.app), FlowerApp):
        raise ConfigurationError(
            "--task runs fedpress's own server, and a Flower app brings a server of its own",
            hint="give --app module:factory of trainers, or remove --task",
        )
    return TrainerApp(*common, factory=settings.app)


def _initial_model(settings: Settings, app: TrainerApp) -> Model:
    """The file's that --model names, or the trainers' own; raises ConfigurationError for a file of
    other tensors than the trainers'."""
    if settings.model is None:
        return app.initial_model()
    model = read_model(Path(settings.model))
    if app.task is None and getattr(app.trainer(0), "initial_model", None) is None:
        return model
    own, whose = app.initial_model().spec, f"the model of {settings.app or settings.data}"
    hint = "give a model of the trainers' tensors, or leave --model out"
    if own.size != model.spec.size:
        raise ConfigurationError(
            f"{whose} has {own.size:,} parameters, and {settings.model} has {model.spec.size:,}",
            hint=hint,
        )
    has, named = ({t.name: t.shape for t in spec.tensors} for spec in (own, model.spec))
    other = [name for name, shape in has.items() if named.get(name) != shape]
    if other:
        raise ConfigurationError(
            f"tensor {other[0]!r} is of shape {has[other[0]]} in {whose}, and "
            f"{_shape(named.get(other[0]))} in {settings.model}",
            hint=hint,
        )
    return model


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else f"of shape {shape}"


def _key(state: Path, seed: int, index: int) -> DeviceKey:
    """The device's key, which comes of the seed: in a simulation nothing is secret."""
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = state / "key.pem"
    if not path.exists():
        drawn = hashlib.sha256(f"fedpress simulation|{seed}|device {index}".encode()).digest()
        path.touch(mode=0o600)
        path.write_bytes(DeviceKey.from_bytes(drawn).to_pem())
    return StateDirectory.open(state).key()
