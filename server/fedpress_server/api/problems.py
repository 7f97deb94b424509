"""The one place where errors become answers: RFC 9457's problem+json, whatever went wrong.

`RequestGuard` stands around the whole application: it names each request, measures it, and is the
last to catch what nobody expected, so that no answer ever carries a traceback.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Mapping
from http import HTTPStatus
from itertools import count
from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedpress_protocols.errors import (
    PROBLEM_PREFIX,
    FedpressError,
    MalformedRequest,
    NotFound,
    ServerError,
    error_classes,
)
from fedpress_protocols.faults import told
from fedpress_server import failpoints
from fedpress_server.metrics import Metrics

_log = logging.getLogger(__name__)
_PROCESS = secrets.token_hex(4)
_NUMBERS = count()
"""With these a request has a name of its own, and costs no call of the system's."""


class Problem(BaseModel):
    """RFC 9457: what is wrong, and what to do about it. `type` never changes its meaning."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(examples=[PROBLEM_PREFIX + "round-closed"])
    title: str
    status: int
    detail: str
    hint: str | None = None
    request_id: str = Field(description="Names the request in the server's log.")


Responses = dict[int | str, dict[str, Any]]


def responses(*statuses: int, besides: Responses | None = None) -> Responses:
    """The problems of these statuses, for a route's documentation, `besides` other answers."""
    return {**(besides or {}), **{status: _documented(status) for status in statuses}}


def _documented(status: int) -> dict[str, Any]:
    classes = [cls for cls in error_classes() if cls.status == status and cls is not FedpressError]
    example = classes[0]().to_problem() if classes else {"status": status}
    return {
        "description": "; ".join(cls.title for cls in classes) or HTTPStatus(status).phrase,
        "content": {
            "application/problem+json": {
                "schema": {"$ref": "#/components/schemas/Problem"},
                "example": example | {"request_id": "0b7c5e3f9d2a4c61"},
            }
        },
    }


def problem_response(
    error: FedpressError, request_id: str, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    return _response(error.to_problem() | {"request_id": request_id}, dict(headers or {}))


def _response(problem: dict[str, Any], headers: dict[str, str]) -> JSONResponse:
    status = int(problem["status"])
    if "retry_after" in problem:
        headers["Retry-After"] = str(math.ceil(float(problem["retry_after"])))
    if status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = 'Signature, Bearer realm="fedpress"'
    return JSONResponse(problem, status, headers=headers, media_type="application/problem+json")


def install(app: FastAPI, metrics: Metrics) -> None:
    """Every error of `app` becomes a problem."""

    async def on_error(request: Request, exc: Exception) -> JSONResponse:
        error = cast(FedpressError, exc)
        metrics.refused.labels(error.slug).inc()
        if error.status >= 500:
            _log.error("request %s: %s", request.state.request_id, exc, exc_info=exc)
        return problem_response(error, request.state.request_id)

    async def on_invalid(request: Request, exc: Exception) -> JSONResponse:
        faults = cast(RequestValidationError, exc).errors()
        return await on_error(request, MalformedRequest(told(faults)))

    async def on_http(request: Request, exc: Exception) -> JSONResponse:
        refused = cast(HTTPException, exc)
        detail = str(refused.detail)
        if refused.status_code == HTTPStatus.NOT_FOUND:
            return await on_error(request, NotFound(f"no route {request.url.path[:200]!r}"))
        nearest = FedpressError.from_problem({"detail": detail}, refused.status_code)
        metrics.refused.labels(nearest.slug).inc()
        problem = nearest.to_problem() | {
            "status": refused.status_code,
            "title": HTTPStatus(refused.status_code).phrase,
            "request_id": request.state.request_id,
        }
        return _response(problem, dict(refused.headers or {}))

    app.add_exception_handler(FedpressError, on_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)


class RequestGuard:
    """The outermost layer. Puts `request_id` into the request's state and X-Request-Id out."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"{_PROCESS}{next(_NUMBERS) & 0xFFFFFFFF:08x}"
        scope.setdefault("state", {})["request_id"] = request_id
        status = 0

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                named = (b"x-request-id", request_id.encode())
                message = {**message, "headers": [*message["headers"], named]}
            await send(message)

        begun = time.perf_counter()
        try:
            await self._app(scope, receive, send_named)
            failpoints.reach("request-answered")
        except ClientDisconnect:
            _log.info("request %s: the client went away", request_id)
        except Exception:
            _log.exception("request %s failed", request_id)
            if not status:
                answer = problem_response(
                    ServerError("the server failed; its log has more"), request_id
                )
                await answer(scope, receive, send_named)
        finally:
            route = scope.get("route")
            path = getattr(route, "path", "unknown")
            seconds = time.perf_counter() - begun
            self._metrics.requests.labels(scope["method"], path, status).observe(seconds)
            _log.debug("%s %s %s: %d in %.3f s", request_id, scope["method"], path, status, seconds)
