"""Devices that wait for places that there are not, and a count of what everybody is answered."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import numpy as np

from fedpress_protocols.errors import ClockSkew, TooManyRequests, Unavailable
from fedpress_protocols.model import Model
from tests.devices import Device, Operator

TASK = "full"


class Answers:
    """Counts answers: `httpx.Client(event_hooks=answers.hooks)`."""

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.unanswered: Counter[str] = Counter()
        """Requests of waiting devices that got no answer, by the reason."""
        self.failures: Counter[str] = Counter()
        """Answers of 500 or more other than 503 with Retry-After."""
        self.hooks = {"response": [self._count]}

    def _count(self, answer: httpx.Response) -> None:
        status, request = answer.status_code, answer.request
        self.statuses[status] += 1
        if status >= 500 and (status != 503 or not answer.headers.get("retry-after")):
            self.failures[f"{status} {request.method} {request.url.path}"] += 1

    def __str__(self) -> str:
        counted = ", ".join(f"{status}: {num}" for status, num in sorted(self.statuses.items()))
        return f"{self.statuses.total()} answers ({counted}), without one: {dict(self.unanswered)}"


def full_task(operator: Operator, http: httpx.Client) -> None:
    """A task whose places are taken, so that whoever asks waits."""
    model = Model.from_tensors({"weight": np.zeros(8, np.float32)})
    operator.begin(model, TASK, cohort={"size": 2, "minimum": 2}, round_seconds=86400.0)
    for _ in range(2):
        enrolled(operator, http).assignment(TASK)


def enrolled(operator: Operator, http: httpx.Client) -> Device:
    device = Device(http)
    while True:
        try:
            device.enrol(operator.token())
        except TooManyRequests as exc:
            time.sleep(float(exc.members.get("retry_after", 1.0)))
        else:
            return device


@contextmanager
def waiting(
    number: int, operator: Operator, clients: Sequence[httpx.Client], answers: Answers, wait: float
) -> Iterator[None]:
    """So many devices that check in at one server after the other, held for `wait` seconds each
    time, while the block lasts. Raises whatever one of them was answered that is no answer to it.
    """
    is_over = threading.Event()

    def ask(device: Device, place: int) -> None:
        while not is_over.is_set():
            device.http = clients[place % len(clients)]
            place += 1
            try:
                answer = device.check_in(TASK, wait=wait)
                if answer is not None:  # a server that was restored says so once
                    assert answer.assignment is None
                    assert answer.recall is not None
                    device.epoch = answer.recall.recall.restore.epoch
            except ClockSkew:  # signed within the second in which the server began: sign again
                is_over.wait(0.2)
            except Unavailable as exc:
                is_over.wait(min(1.0, float(exc.members["retry_after"])))
            except httpx.TransportError as exc:
                answers.unanswered[repr(exc)] += 1
                is_over.wait(0.05)

    devices = [enrolled(operator, clients[0]) for _ in range(number)]
    with ThreadPoolExecutor(number) as threads:
        asking = [threads.submit(ask, device, place) for place, device in enumerate(devices)]
        try:
            yield
        finally:
            is_over.set()
        for each in asking:
            each.result(60)
