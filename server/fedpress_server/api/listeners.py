"""Which routes are answered where: at one listener all, or devices' and operators' apart.

Two listeners are two applications with one state behind them. What one does not answer it does not
have: a device's listener knows no more of the admin API than of any other path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

from fastapi import APIRouter, FastAPI, Request

Listener = Literal["everybody", "devices", "operators"]


class Listening(FastAPI):
    """The application of one listener."""

    def __init__(self, listener: Listener, routers: Sequence[APIRouter], **described: Any) -> None:
        """Devices' and operators' applications have the `routers` that are meant for them."""
        super().__init__(**described)
        self.listener: Listener = listener
        for router in routers:
            self.router.routes.extend(router.routes)  # `include_router` looks twice for each


def listener_of(request: Request) -> Listener:
    return cast(Listening, request.app).listener
