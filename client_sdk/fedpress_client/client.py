"""The device's side of a task: check in, train, upload, and account for all of it.

    check in → download → train → compress → outbox → upload → receipt

Each arrow may be the last before a crash: what was saved is what there is, and the next check-in
goes on from there. The way of a round, from top to bottom:

    client.py         join the task, recover from errors, stop
    task_runner.py    one check-in and all that follows from it
    round_runner.py   one assignment: download, train, compress, save, upload
    uploads.py        bodies and declines; masked_rounds.py: the masked lane instead
    receipts.py       settle the account
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import sleep
from typing import Self, Unpack

from fedpress_client.background import BackgroundRun
from fedpress_client.enrolment import Enrolment
from fedpress_client.events import ClientWaiting, Event, EventLog, TaskJoined
from fedpress_client.http_link import OnTransfer
from fedpress_client.joined_task import JoinedTask, log_discard, only_task
from fedpress_client.ledger import Ledger
from fedpress_client.model_reader import ModelReader
from fedpress_client.outgoing import abandon_unfinished
from fedpress_client.privacy_budget import PrivacyBudget
from fedpress_client.progress import ProgressLog
from fedpress_client.receipts import SHORTEST_PAUSE
from fedpress_client.settings import ClientOptions, ClientSettings, Services, Stopped, StopSwitch
from fedpress_client.state import StateDirectory
from fedpress_client.task_runner import TaskRunner
from fedpress_client.trainer import Trainer, check_trainer
from fedpress_client.transport import HttpTransport, Retries, Traffic, Transport
from fedpress_protocols.errors import ConfigurationError, DeviceNotApproved, UnknownDevice
from fedpress_protocols.messages import TaskState
from fedpress_protocols.model import Model
from fedpress_protocols.signatures import DeviceKey

_log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_IMPATIENT = Retries(base=0.2, cap=2.0, patience=5.0)
"""Of `Client.model`, whose caller waits for the answer."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of `run`. Counts are of uploads, over the device's whole part in the task."""

    task: str
    state: TaskState
    """The newest known; "running" if the client was stopped before the end."""
    included: int
    not_included: int
    pending: int
    model: str
    """Digest of the newest model known."""
    traffic: Traffic


class Client:
    """Takes part in one task, with everything durable in `state_dir`.

    `task` None stands for the single one that is running. `token` is needed once, to enrol.
    `on_event` is called with each `Event`, from the thread that runs. `transport` takes the place
    of HTTP. One thread runs a client; any may `stop` it, or ask for the `model`.

    Further keywords (`ClientOptions`):

    `name`: shown to the operator. `attributes`: numbers and short texts by name, which a task's
    rules of eligibility and groups of metrics may read. `seed`: makes training and compression
    repeat exactly; without it they draw on the system's randomness. `clock`, `random` and `sleep`
    take the place of the system's in tests.
    `server_key` (base64url) names the server's key by a way that is not the server's own; a device
    that has pinned another, which no chain leads to from this one, believes this one from then on.
    `verify`, `client_certificate`, `client_key`, `proxy`, `timeout` and `bandwidth` are
    HttpTransport's. `wait`: seconds in [0, 30] for which the server may hold a check-in.
    `max_model_bytes` bounds downloads. `max_disk_bytes` bounds the files in `state_dir`: models and
    bases of models make room; where the account itself does not fit, it raises StateWriteError.
    `rules` limit the residual; `on_discard` is called with each update that is lost to the model.
    `masking`: requirements of the device, whatever a plan says; with any, masking is required
    unless they say otherwise. A plan that they do not admit is declined, and the client goes on
    asking, less and less often; where no `task` was named it goes to the one masked task that runs.
    `privacy`: the device's privacy budget, over all tasks of `state_dir`; what it has spent is
    counted without it too, and a task's own limit holds.
    `fine_tuning`: terms to train the task's last model on by, for this device alone; see
    `own_model`. `failures`: how often training may fail in a row, and whether deadlines that cannot
    be met are declined. `should_participate`: one callable or several, asked in their order before
    each check-in; while one refuses, the device asks for nothing and sends nothing. What comes
    before the first check-in, enrolment among it, and a masked session under way go on.
    `on_progress` is called with each `Progress` within a step, from the thread that runs; bytes are
    reported by HTTP, and not by a `transport` in its place.
    """

    def __init__(
        self,
        url: str,
        trainer: Trainer,
        *,
        state_dir: str | Path,
        task: str | None = None,
        token: str | None = None,
        on_event: Callable[[Event], None] | None = None,
        transport: Transport | None = None,
        **options: Unpack[ClientOptions],
    ) -> None:
        if task is not None and not _NAME.fullmatch(task):
            raise ConfigurationError(f"{task!r} cannot be the name of a task")
        check_trainer(trainer)
        self._settings = settings = ClientSettings(**options)
        if transport is not None and settings.bandwidth is not None:
            raise ConfigurationError(
                "bandwidth limits HTTP, and this client has a transport of its own",
                hint="limit the transport itself, or leave one of the two out",
            )
        self._stopping = StopSwitch(settings.sleep)
        self._events = EventLog(on_event, task or "")
        self._progress = ProgressLog(settings.on_progress, self._events)
        self._directory = StateDirectory.open(state_dir, settings.max_disk_bytes)
        key = self._directory.key()
        on_transfer = None if settings.on_progress is None else self._progress.report
        self._transport = transport or _open(
            url, key, settings, None, self._stopping.pause, on_transfer
        )
        services = Services(
            settings,
            trainer,
            self._directory,
            self._transport,
            self._events,
            self._progress,
            self._stopping,
            PrivacyBudget(self._directory, settings.privacy_rules),
        )
        self._enrolment = Enrolment(services, key, url, token)
        self._runner = TaskRunner(services, self._enrolment, may_switch=task is None)

        @contextmanager
        def connect(key: DeviceKey) -> Iterator[Transport]:
            if transport is not None:
                yield transport
                return
            with closing(_open(url, key, settings, _IMPATIENT, sleep)) as own:
                yield own

        self._reader = ModelReader(services, self._enrolment, connect)
        self._task = task
        self._joined: JoinedTask | None = None
        self._background: BackgroundRun[Summary] | None = None
        self._newest: JoinedTask | None = None
        """The task as last joined, which may be closed by now."""

    # Running

    def run(self) -> Summary:
        """Take part until the task has ended or `stop` is called.

        Errors that waiting does not resolve are raised; the state is consistent after any of them,
        KeyboardInterrupt among them, and a later run goes on from there.
        """
        try:
            while not self._stopping.is_set:
                pause = self.step()
                if pause is None:
                    break
                if pause:
                    self._events.emit(ClientWaiting(seconds=pause))
                    self._stopping.pause(pause * (1 + 0.1 * self._settings.random()))
        except Stopped:
            _log.info("stopped")
        finally:
            self.close()
        return self.summary()

    def start(self) -> BackgroundRun[Summary]:
        """`run` in a thread of its own. Callbacks are called from that thread; what is raised there
        comes out of `BackgroundRun.join`. A client runs once: after its end, make another."""
        if self._background is not None:
            raise ConfigurationError(
                "this client was started before", hint="make another Client on the same state_dir"
            )
        self._background = BackgroundRun(self.run, self.stop)
        return self._background

    def step(self) -> float | None:
        """One check-in and all that follows from it.

        Returns the seconds until the next is worth while, None once the task has ended and every
        upload has its receipt. Whatever it raises, the state on disk is consistent.
        """
        try:
            task = self._join()
            pause = self._runner.step(task)
        except Stopped:
            raise
        except DeviceNotApproved as exc:
            self._drop()
            return self._enrolment.await_approval(exc)
        except UnknownDevice as exc:
            self._drop()
            self._enrolment.become_known(exc)
            return SHORTEST_PAUSE
        except BaseException:
            self._drop()  # memory may be ahead of the disk or behind; the disk is right
            self._runner.forget()
            raise
        self._enrolment.approved()
        if task.successor is not None:
            self._drop()
            self._task = self._events.task = task.successor
        return pause

    def stop(self) -> None:
        """Have `run` return soon: at the next pause, or once the step under way is done."""
        self._stopping.set()

    def close(self) -> None:
        """Release the lock and the connection; another Client may go on from here. Leaving a `with`
        block does so too."""
        self._drop()
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # Results

    def summary(self) -> Summary:
        """Progress, as far as this client has seen."""
        ledger, server = self._account, None if self._newest is None else self._newest.summary
        return Summary(
            task=ledger.task,
            state=server.state if server is not None else "running",
            included=ledger.included,
            not_included=ledger.not_included,
            pending=len(ledger.pending),
            model=server.model if server is not None else "",
            traffic=replace(self._transport.traffic),
        )

    def model(self, *, max_age: float = 30.0) -> Model:
        """The model that the task serves, with this device's personal tensors if it has
        some: for inference, from any thread, before, while and after another one runs the client.

        The server is asked if its last answer is `max_age` seconds old or older (0: each time), and
        a model that is not here yet is fetched, by its difference where the task has a downlink.
        The SHA-256 of what comes is checked against the name that the server gives it; the server
        signs no models. The last model is kept in the state directory: where the server is away it
        goes on being used, also after a restart. Do not change it in place.

        Enrols the device if need be, and does not join the task. A `transport` given to the client
        must be safe for two threads. Raises TransportError if there is no model here and no answer
        within some seconds, UnknownTask, InvalidToken, UnknownDevice or DeviceNotApproved.
        """
        return self._reader.read(self._task, self._account, max_age)

    def own_model(self) -> Model | None:
        """The task's last model as this device uses it: with its personal tensors, and trained on
        if `fine_tuning` was given. None before the task has ended, or if it is everybody's. Joins
        the task if none was named and none was joined."""
        data = self._directory.own_model(self._task or self._join().name)
        return None if data is None else Model.from_bytes(data)

    @property
    def ledger(self) -> Ledger:
        """The account as saved; joins the task unless that was done before."""
        if self._joined is not None or self._newest is None:
            return self._join().ledger
        name, client_id = self._newest.name, self._newest.ledger.client_id
        return self._directory.peek(name) or Ledger(name, client_id)  # another may hold the lock

    # The device's key

    @property
    def key_id(self) -> str:
        """The id of the device's key, which an operator sees too, and compares."""
        return self._enrolment.key_id

    def rotate_key(self) -> str:
        """Have the server know this device by a new key; its id. The one before is refused from
        then on, wherever a copy of it is; the device stays who it is, with all that it has.

        Not while another thread runs the client. Raises as `device_key.change_key` does; whatever
        it raises, the next run goes on, and ends the change that was begun.
        """
        self._drop()
        self._enrolment.rotate_key()
        return self.key_id

    # Joining

    def _join(self) -> JoinedTask:
        if self._joined is not None:
            return self._joined
        identity = self._enrolment.identity()
        name = self._task or only_task(
            self._transport.tasks(), prefers_masked=self._settings.masking_rules.required
        )
        files = self._directory.task(name)
        try:
            ledger = files.load(identity.client_id)
        except BaseException:
            files.close()
            raise
        trust = self._enrolment.trust(identity)
        on_discard = self._settings.on_discard or log_discard
        task = JoinedTask(name, files, ledger, trust, on_discard)
        if self._newest is not None and self._newest.name == name:
            task.summary = self._newest.summary
        self._joined = self._newest = task
        self._task = self._events.task = name  # should the state be dropped and read again
        abandon_unfinished(files, self._transport, frozenset(ledger.pending))
        if files.session() is not None:
            task.masked_part = self._runner.masked.open_part(task, may_ask=False)
        task.report_discards()
        self._events.emit(TaskJoined(pending=len(ledger.pending)))
        return task

    def _drop(self) -> None:
        """Forget the joined task; the next step reads it from the disk again."""
        if self._joined is not None:
            self._joined.files.close()
            self._joined = None

    @property
    def _account(self) -> Ledger:
        """The account as last known, also once the task is closed; unnamed before it is joined."""
        if self._newest is None:
            return Ledger(self._task or "", "")
        return self._newest.ledger


def _open(
    url: str,
    key: DeviceKey,
    settings: ClientSettings,
    retries: Retries | None,
    sleep: Callable[[float], None],
    on_transfer: OnTransfer | None = None,
) -> HttpTransport:
    return HttpTransport(
        url,
        key,
        verify=settings.verify,
        client_certificate=settings.client_certificate,
        client_key=settings.client_key,
        proxy=settings.proxy,
        timeout=settings.timeout,
        bandwidth=settings.bandwidth,
        on_transfer=on_transfer,
        retries=retries,
        sleep=sleep,
        clock=settings.clock,
        random=settings.random,
    )
