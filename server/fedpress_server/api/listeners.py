"""The routes of each listener: one listener for all, or one for devices and one for operators.

Two listeners are two applications over the same services. The devices' application does not contain
the admin API, and answers its paths as it answers any unknown path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, FastAPI, Request

from fedpress_server.metrics import Metrics
from fedpress_server.services import Services
from fedpress_server.settings import Settings

Listener = Literal["everybody", "devices", "operators"]


class Process:
    """One server process as its listeners share it; it has services while it runs."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self.settings = settings
        self.metrics = metrics
        self.running: Services | None = None

    @property
    def services(self) -> Services:
        """Raises RuntimeError before the start, and after the end."""
        if self.running is None:
            raise RuntimeError("the server is not running: enter the lifespan of its application")
        return self.running

    @property
    def is_stopping(self) -> bool:
        return self.running is not None and self.running.readiness.is_stopping


class Listening(FastAPI):
    """The application of one listener; `for_operators` is the operators' own, if they have one."""

    def __init__(
        self, listener: Listener, process: Process, routers: Sequence[APIRouter], **described: Any
    ) -> None:
        """Devices' and operators' applications have the `routers` that are meant for them."""
        super().__init__(**described)
        self.listener: Listener = listener
        self.process = process
        self.for_operators: Listening | None = None
        for router in routers:
            self.router.routes.extend(router.routes)  # `include_router` looks twice for each

    @property
    def services(self) -> Services:
        return self.process.services


def application_of(request: Request) -> Listening:
    app: Listening = request.app
    return app


async def services_of(request: Request) -> Services:
    return application_of(request).services


Parts = Annotated[Services, Depends(services_of)]
"""The server's parts, for a route's function."""


def listener_of(request: Request) -> Listener:
    return application_of(request).listener
