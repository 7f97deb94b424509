"""Error handling: every error becomes an RFC 9457 problem+json answer.

`RequestGuard` wraps the whole application: it gives each request an id, measures it, and catches
unexpected exceptions, so that no answer ever has a traceback.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

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
    Unauthorized,
    Unavailable,
    error_classes,
)
from fedpress_protocols.validation import format_error_details
from fedpress_server import failpoints
from fedpress_server.api.listeners import Listening
from fedpress_server.metrics import Metrics
from fedpress_server.observing import traces
from fedpress_server.observing.requests import RequestObserver, SeenRequest, current

_log = logging.getLogger(__name__)
_ANY_HOST = ("/livez", "/readyz", "/metrics")
"""Paths of health checks, which supervisors request by address."""
_PORT = re.compile(r":[0-9]*$")
_SHOWN = 100
"""Characters of a refused Host in a message."""
_PAUSE = 1.0
"""Minimum seconds between log lines about failures, or about refusals, of the same kind."""


class Problem(BaseModel):
    """An RFC 9457 problem with a hint. A `type` never changes its meaning."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(examples=[PROBLEM_PREFIX + "round-closed"])
    title: str
    status: int
    detail: str
    hint: str | None = None
    request_id: str = Field(description="The id of the request in the server's log.")


Responses = dict[int | str, dict[str, Any]]


def responses(*statuses: int, besides: Responses | None = None) -> Responses:
    """The documented problems of a route for these statuses, `besides` other answers."""
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
        headers.setdefault("WWW-Authenticate", 'Signature, Bearer realm="fedpress"')
    return JSONResponse(problem, status, headers=headers, media_type="application/problem+json")


def install(app: FastAPI, metrics: Metrics) -> None:
    """Install the handlers that turn every error of `app` into a problem."""
    failures = _Failures()

    @app.exception_handler(FedpressError)
    async def on_error(request: Request, error: FedpressError) -> JSONResponse:
        metrics.refused.labels(error.slug).inc()
        request.state.problem = error.slug
        if isinstance(error, Unauthorized):
            metrics.auth_failures.labels(error.slug).inc()
        if error.status >= 500:
            failures.tell(error)
        # A browser asks for a password only with this challenge; send it only where one is
        # accepted.
        asks = {"WWW-Authenticate": 'Basic realm="fedpress operators"'}
        headers = asks if error.status == 401 and request.url.path == "/docs" else None
        return problem_response(error, request.state.request_id, headers)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, exc: RequestValidationError) -> JSONResponse:
        return await on_error(request, MalformedRequest(format_error_details(exc.errors())))

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, refused: HTTPException) -> JSONResponse:
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


class _Failures:
    """Logs requests that the server could not serve. Failures expected under load or without a
    database are logged at most once a second per kind, without traceback."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[float, int]] = {}

    def tell(self, error: FedpressError) -> None:
        if not isinstance(error, Unavailable):
            _log.error("%s: %s", error.title, error, exc_info=error)
            return
        now = time.monotonic()
        at, untold = self._told.get(error.slug, (-math.inf, 0))
        if now < at + _PAUSE:
            self._told[error.slug] = at, untold + 1
            return
        self._told[error.slug] = now, 0
        extra = {"problem": error.slug}
        cause = error.__cause__
        if cause is not None:
            extra["cause"] = f"{type(cause).__name__}: {cause}"[:500]
        if untold:
            extra["untold"] = str(untold)
        _log.warning("put off: %s", error, extra=extra)


class RequestGuard:
    """The outermost ASGI layer. Sets `request_id` in the request's state and X-Request-Id.

    A stopping server closes connections after their answer, and answers 503 to requests that are
    unfinished at the end of the grace period.
    """

    def __init__(self, app: ASGIApp, observer: RequestObserver, hosts: Sequence[str] = ()) -> None:
        """`hosts`: allowed host names in lower case, `*.example.org` for subdomains; empty: any."""
        self._app = app
        self._observer = observer
        self._hosts = ", ".join(hosts)
        self._told_at = -math.inf
        self._names = frozenset(each for each in hosts if not each.startswith("*."))
        self._below = tuple(each[1:] for each in hosts if each.startswith("*."))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = SeenRequest(scope)
        scope.setdefault("state", {})["request_id"] = request.request_id
        before = current.set(request)

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start" and _is_stopping(scope):
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(request.tell(message))

        try:
            with traces.of_request(request):
                await self._answered(request, receive, send_named)
        finally:
            current.reset(before)

    def _stranger(self, scope: Scope) -> str:
        """The Host of the request, quoted, if it is another than this server's; empty if not."""
        if not self._hosts or scope["path"] in _ANY_HOST:
            return ""
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(hosts) == 1:
            host = _PORT.sub("", hosts[0].lower())
            if host in self._names or host.endswith(self._below):
                return ""
        return ascii(", ".join(hosts)[:_SHOWN])

    async def _answered(self, request: SeenRequest, receive: Receive, send: Send) -> None:
        try:
            if host := self._stranger(request.scope):
                if time.monotonic() >= self._told_at + _PAUSE:
                    self._told_at = time.monotonic()
                    _log.info("refused the Host %s, expected %s", host, self._hosts)
                wrong = MalformedRequest(
                    f"the Host of the request, {host}, is none of this server's",
                    hint="use the server's own name, or add this one to FEDPRESS_ALLOWED_HOSTS",
                )
                answer = problem_response(wrong, request.request_id)
                await answer(request.scope, receive, send)
                return
            await self._app(request.scope, receive, send)
            failpoints.reach("request-answered")
        except ClientDisconnect:
            _log.debug("the client went away")
        except asyncio.CancelledError:
            if not _is_stopping(request.scope):
                raise
            if request.status:
                _log.warning("interrupted during its answer: the server is stopping")
            else:
                error = Unavailable(
                    "the server stopped before the request was completed", retry_after=1
                )
                answer = problem_response(error, request.request_id)
                await answer(request.scope, receive, send)
        except Exception:
            _log.exception("the request failed")
            if not request.status:
                answer = problem_response(
                    ServerError("the server failed; its log has details under the request id"),
                    request.request_id,
                )
                await answer(request.scope, receive, send)
        finally:
            self._observer.ended(request)


def _is_stopping(scope: Scope) -> bool:
    app: Listening = scope["app"]
    return app.process.is_stopping
