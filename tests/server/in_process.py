"""The server in this process, and the small steps that its tests share."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import httpx
import numpy as np
from anyio.from_thread import BlockingPortal, start_blocking_portal

from fedpress_compression.tensors import Vector
from fedpress_protocols.messages import RoundStatus
from fedpress_protocols.model import Model
from fedpress_server.api.listeners import Listening
from tests.devices import Device, Operator


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class Server(httpx.Client):
    """An HTTP client of an app that runs in another thread; `call` runs something beside it."""

    def __init__(self, app: Listening, portal: BlockingPortal) -> None:
        super().__init__(transport=_InProcess(app, portal), base_url="http://fedpress.test")
        self.app = app
        self.portal = portal

    def call(self, work: Callable[..., Any], *args: Any) -> Any:
        return self.portal.call(work, *args)

    def tick(self) -> None:
        """Let the deadlines pass that have passed."""
        self.call(self.app.services.scheduler.tick)


class _InProcess(httpx.BaseTransport):
    def __init__(self, app: Listening, portal: BlockingPortal) -> None:
        self._transport = httpx.ASGITransport(app)
        self._portal = portal

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return self._portal.call(self._answer, request)

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        sent = httpx.Request(
            request.method, request.url, headers=request.headers, content=request.read()
        )
        answer = await self._transport.handle_async_request(sent)
        content = await answer.aread()
        return httpx.Response(answer.status_code, headers=answer.headers, content=content)


@contextmanager
def running(app: Listening) -> Iterator[Server]:
    """The app between its start and its end."""
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(app.router.lifespan_context(app)),
        Server(app, portal) as server,
    ):
        yield server


Start = Callable[..., AbstractContextManager[Server]]
Enrolled = Callable[[], Device]


def ones(model: Model, value: float = 1.0) -> Vector:
    return np.full(model.spec.size, value, np.float32)


def include_one(device: Device, model: Model, task: str = "digits", value: float = 1.0) -> str:
    """The device's whole part in a round; the assignment."""
    assignment = device.assignment(task)
    device.upload(assignment.assignment, device.body_for(assignment, ones(model, value)))
    return assignment.assignment


def history(operator: Operator, task: str = "digits") -> list[RoundStatus]:
    found = operator.get(f"/v1/tasks/{task}/rounds")
    return [RoundStatus.model_validate(status) for status in found]
