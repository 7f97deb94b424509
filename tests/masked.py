"""Devices of the masked lane for tests: real clients over HTTP, driven in turn by one thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from fedpress_client import Client, Event, MaskingRules
from fedpress_client.ledger import Ledger
from fedpress_client.ledger_records import Pending
from fedpress_client.state import StateDirectory
from fedpress_client.trainer import Evaluation, Trained, TrainingRequest
from fedpress_client.transport import HttpTransport, Retries
from fedpress_protocols.masking.payload import Payload
from fedpress_protocols.model import Model
from tests.devices import Operator
from tests.server.in_process import Server

TASK = "digits"
URL = "http://fedpress.test"
SHARED: dict[str, Any] = {
    "id": "error_feedback",
    "inner": {"id": "shared_support", "fraction": 0.5},
}
"""Half of the coordinates; the rest waits in the residual."""


class Unread(httpx.BaseTransport):
    """To a server in this process, whose answers come as a stream, as over a socket."""

    def __init__(self, server: Server) -> None:
        self._transport = server._transport

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer = self._transport.handle_request(request)
        stream = httpx.ByteStream(answer.read())
        return httpx.Response(answer.status_code, headers=answer.headers, stream=stream)


class Numbered:
    """Trains by adding noise of its own number and the round's; remembers what it computed."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.computed: dict[tuple[int, int], np.ndarray] = {}

    def train(self, model: Model, work: TrainingRequest) -> Trained:
        rng = np.random.default_rng([self.number, work.round, work.attempt])
        step = rng.normal(scale=0.02, size=model.spec.size).astype(np.float32)
        parameters = model.parameters + step
        self.computed[work.round, work.attempt] = parameters - model.parameters
        return Trained(parameters, 1 + self.number)

    def evaluate(self, model: Model) -> Evaluation | None:
        return None


class Lost(BaseException):
    """The device dies here."""


class Participant:
    """One device; `start` begins it, or begins it again after it died."""

    def __init__(
        self,
        folder: Path,
        number: int,
        token: str,
        http: Callable[[], httpx.BaseTransport],
        clock: Callable[[], float],
        url: str = URL,
        task: str = TASK,
        **options: Any,
    ) -> None:
        self.folder, self.number = folder / f"device-{number}", number
        self.trainer = Numbered(number)
        self.events: list[Event] = []
        self.plain: dict[str, Pending] = {}
        """By assignment, what was prepared and not yet masked."""
        self.is_gone = False
        self.on_event: Callable[[Event], None] = lambda event: None
        self._token, self._http, self._clock, self._url = token, http, clock, url
        self._task = task
        self.wait, self.patience = 0.0, 0.5
        self.pause: Callable[[float], None] = lambda seconds: None
        """For a server that is elsewhere, and may be away for a while."""
        self._options = {"masking": MaskingRules()} | options
        self.client: Client | None = None

    def start(self) -> None:
        if self.client is not None:
            self.client.close()
        key = StateDirectory.open(self.folder).key()
        self.client = Client(
            self._url,
            self.trainer,
            state_dir=self.folder,
            task=self._task,
            token=self._token,
            seed=self.number,
            wait=self.wait,
            sleep=self.pause,
            clock=self._clock,
            random=lambda: 0.5,
            on_event=self._heard,
            transport=HttpTransport(
                self._url,
                key,
                http=self._http(),
                retries=Retries(0.01, 0.2, self.patience),
                sleep=self.pause,
                clock=self._clock,
            ),
            **self._options,
        )

    def _heard(self, event: Event) -> None:
        self.events.append(event)
        if event.kind in ("trained", "joined") and self.client is not None:
            for name, held in self.client.ledger.pending.items():
                if held.session is None:
                    self.plain.setdefault(name, held)
        self.on_event(event)

    def step(self) -> float | None:
        if self.client is None:
            self.start()
        assert self.client is not None
        return self.client.step()

    def die_after(self, step: str) -> None:
        """Be gone for good once this step of a session is done."""

        def on_event(event: Event) -> None:
            if event.kind == "session" and event.details["step"] == step:
                raise Lost(step)

        self.on_event = on_event

    @property
    def ledger(self) -> Ledger:
        """As it lies on the disk."""
        path = self.folder / "tasks" / self._task / "ledger.safetensors"
        return Ledger.from_bytes(path.read_bytes())

    @property
    def steps(self) -> list[str]:
        """What it did in sessions."""
        return [event.details["step"] for event in self.events if event.kind == "session"]


def masked_task(
    operator: Operator, model: Model, size: int, task: str = TASK, **config: Any
) -> None:
    """A task of one masked round for `size` clients, unless `config` says otherwise."""
    defaults: dict[str, Any] = {
        "lane": "masked",
        "rounds": 1,
        "profiles": [{"name": "one", "compressor": SHARED}],
        "cohort": {"size": size, "minimum": max(3, size // 2)},
        "masking": {"headroom": 8.0, "levels": 127},
    }
    operator.begin(model, task, **(defaults | config))


def drive(
    participants: Sequence[Participant],
    pass_time: Callable[[], None],
    turns: int = 200,
    *,
    begin_again: bool = False,
) -> None:
    """Everybody in turn until their task is over for all that are left. Where nobody gets any
    further, `pass_time`. Whoever dies is gone, unless it is to `begin_again`."""
    going = [each for each in participants if not each.is_gone]
    for _ in range(turns):
        before = [len(each.events) for each in participants]
        for each in list(going):
            try:
                if each.step() is None:
                    going.remove(each)
            except Lost:
                if begin_again:
                    each.start()
                    before.clear()
                    continue
                each.is_gone = True
                going.remove(each)
        if not going:
            return
        if before == [len(each.events) for each in participants]:
            pass_time()
    raise AssertionError("the task did not end")


def summed(payload: Payload, held: Sequence[Pending]) -> np.ndarray:
    """The mean that the plaintext integers of these uploads make; the oracle of the masked sum."""
    packing = payload.packing
    total = {each.name: np.zeros(each.length, np.int64) for each in payload.vectors}
    for each in held:
        for name, values in packing.unpack(packing.from_bytes(each.body)).items():
            total[name] += values
    return payload.decompress(total, len(held)).mean.dense().astype(np.float64)
