"""Observation of requests: request id, outcome, and the device or operator."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Mapping
from contextvars import ContextVar
from http import HTTPStatus
from itertools import count
from typing import Any, NamedTuple

from starlette.responses import StreamingResponse
from starlette.types import Message, Scope

from fedpress_server.observing.series import Count, Counters, Distribution, Histograms

_log = logging.getLogger("fedpress_server.requests")
_PROCESS = secrets.token_hex(4)
_NUMBERS = count()
"""Parts of unique request ids that need no system call."""
_SANE = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._-]{7,63}")
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"))
_LINES = {
    status.value: len(f"HTTP/1.1 {status.value} {status.phrase}\r\n\r\n")
    + len("date: Fri, 20 Nov 2026 20:00:00 GMT\r\n")
    for status in HTTPStatus
}
"""Bytes of an answer besides the header fields of the application."""

current: ContextVar[SeenRequest | None] = ContextVar("fedpress_request", default=None)
"""The current request, as a context variable."""


class _Route(NamedTuple):
    """The metrics of one method, route and status."""

    seconds: Distribution
    egress: Count


class SeenRequest:
    """One request, from its first line to the last byte of its answer."""

    __slots__ = ("begun", "request_id", "scope", "sent", "status")

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.begun = time.perf_counter()
        self.status = 0
        self.sent = 0
        """Bytes of the answer as HTTP/1.1 including the header, without TLS."""
        self.request_id = _named(scope["headers"])

    def tell(self, message: Message) -> Message:
        """Observe a message of the answer, and add the request id."""
        if message["type"] == "http.response.body":
            self.sent += len(message.get("body", b""))
            return message
        if message["type"] != "http.response.start":
            return message
        self.status = message["status"]
        headers = [*message["headers"], (b"x-request-id", self.request_id.encode())]
        self.sent = _LINES.get(self.status, 64)
        for name, value in headers:
            self.sent += len(name) + len(value) + 4
        return {**message, "headers": headers}

    @property
    def method(self) -> str:
        method: str = self.scope["method"]
        return method if method in _METHODS else "other"

    @property
    def route(self) -> str:
        return getattr(self.scope.get("route"), "path", "unknown")

    @property
    def round_key(self) -> tuple[str, int, int] | None:
        """The attempt of the request, if it has one and it is known yet."""
        key: tuple[str, int, int] | None = self.scope.get("state", {}).get("round_key")
        return key

    def header(self, name: bytes) -> bytes:
        """The first header with this lower-case name; empty if there is none."""
        return next((value for found, value in self.scope["headers"] if found == name), b"")

    def facts(self) -> Mapping[str, object]:
        """The context of the request, as far as known. `client` is the device's real id, which must
        not be logged."""
        scope = self.scope
        state: Mapping[str, Any] = scope.get("state", {})
        found: dict[str, object] = {
            "request": self.request_id,
            "method": self.method,
            "route": self.route,
        }
        if self.round_key is not None:
            found["task"], found["round"], found["attempt"] = self.round_key
        elif "task" in scope.get("path_params", {}):
            found["task"] = scope["path_params"]["task"]
        if "problem" in state:
            found["problem"] = state["problem"]
        device = state.get("device")
        if device is not None:
            found["client"] = device.client_id
        return found

    @property
    def received(self) -> int:
        """Body bytes according to the header."""
        length = self.header(b"content-length")
        return int(length) if length.isdigit() else 0


class RequestObserver:
    """Counts and logs requests: changes by operators at level info, all others at debug, since
    there are thousands of them a second."""

    def __init__(self, seconds: Histograms, egress: Counters) -> None:
        self._seconds, self._egress = seconds, egress
        self._routes: dict[tuple[str, str, int], _Route] = {}

    def ended(self, request: SeenRequest) -> None:
        seconds = time.perf_counter() - request.begun
        key = request.method, request.route, request.status
        route = self._routes.get(key)
        if route is None:
            route = self._routes[key] = self._found(request)
        route.seconds.observe(seconds)
        route.egress.value += request.sent
        is_change = key[1].startswith("/v1/admin") and key[0] not in ("GET", "HEAD")
        level = logging.INFO if is_change and request.status < 400 else logging.DEBUG
        if _log.isEnabledFor(level):
            _log.log(
                level,
                "%s %s: %d in %.3f s",
                *key,
                seconds,
                extra={
                    "status": request.status,
                    "seconds": round(seconds, 6),
                    "received_bytes": request.received,
                    "sent_bytes": request.sent,
                },
            )

    def _found(self, request: SeenRequest) -> _Route:
        answers = getattr(request.scope.get("route"), "response_class", None)
        is_file = isinstance(answers, type) and issubclass(answers, StreamingResponse)
        kind = "download" if is_file and request.status < 300 else "answer"
        where = request.method, request.route, request.status
        return _Route(self._seconds.labels(*where), self._egress.labels(kind))


def _named(headers: list[tuple[bytes, bytes]]) -> str:
    """The request's own id, if it is safe to log, or a new one."""
    for name, value in headers:
        if name == b"x-request-id":
            if _SANE.fullmatch(value):
                return value.decode()
            break
    return f"{_PROCESS}{next(_NUMBERS) & 0xFFFFFFFF:08x}"
