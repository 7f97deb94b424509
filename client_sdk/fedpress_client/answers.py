"""Answers of the server: their JSON, their headers, and the errors that they stand for."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

import httpx
from pydantic import TypeAdapter, ValidationError

from fedpress_client.retrying import TryAgain
from fedpress_protocols.errors import (
    DeviceError,
    FedpressError,
    IncompatiblePlan,
    ServerError,
    TransportError,
)
from fedpress_protocols.messages import CheckInResponse, Identifier
from fedpress_protocols.plan import Term, TermT, parsed

_log = logging.getLogger(__name__)

MAX_RETRY_AFTER = 3600.0
_identifiers: TypeAdapter[str] = TypeAdapter(Identifier)


class News(NamedTuple):
    """The result of a check-in. `response` is None if there is nothing new.

    `unfit` is the id of an assignment that this release cannot read, and why; the rest of the
    answer holds. An assignment without a proper id is left out: no request can name it.
    """

    response: CheckInResponse | None
    retry_after: float
    unfit: tuple[str, IncompatiblePlan] | None = None


class Answer(NamedTuple):
    """A 2xx answer, read to its end; `retry_after` in seconds, if it has one."""

    status: int
    data: bytes
    path: str
    retry_after: float | None

    def check(self) -> None:
        """Raise TryAgain unless it is JSON or empty: a portal's page is neither."""
        if self.data:
            self._json()

    def parsed(self, cls: type[TermT]) -> TermT:
        try:
            return parsed(cls, self.data)
        except IncompatiblePlan as exc:
            raise self.other(exc.detail) from exc

    def all_parsed(self, cls: type[TermT]) -> tuple[TermT, ...]:
        rows = self._json()
        if isinstance(rows, dict):
            rows = rows.get("tasks")
        if not isinstance(rows, list):
            raise self.other("no list")
        try:
            return tuple(parsed(cls, json.dumps(row)) for row in rows)
        except IncompatiblePlan as exc:
            raise self.other(exc.detail) from exc

    def news(self) -> News:
        """A check-in's answer; an assignment alone that does not parse is `unfit`."""
        try:
            response = parsed(CheckInResponse, self.data)
            return News(response, bounded(response.retry_after))
        except IncompatiblePlan as exc:
            document = self._json()
            assignment = document.get("assignment") if isinstance(document, dict) else None
            if not isinstance(assignment, dict):
                raise TryAgain(self.other(exc.detail)) from exc
            try:
                rest = parsed(CheckInResponse, json.dumps(document | {"assignment": None}))
            except IncompatiblePlan as other:
                raise TryAgain(self.other(other.detail)) from other
            try:
                name = _identifiers.validate_python(assignment.get("assignment"))
            except ValidationError:
                _log.warning("%s", self.other("an assignment without a proper id"))
                return News(rest, bounded(rest.retry_after))
            return News(rest, bounded(rest.retry_after), (name, exc))

    def _json(self) -> Any:
        try:
            return json.loads(self.data)
        except (ValueError, RecursionError) as exc:
            raise TryAgain(self.other("no JSON")) from exc

    def other(self, content: str) -> TransportError:
        """The error of an answer with another `content` than the API's."""
        return TransportError(
            f"{self.path} answered {self.status} with something else: {content[:500]}",
            hint="is this a fedpress server, and is no proxy or portal in between?",
        )


def problem_of(response: httpx.Response, data: bytes) -> FedpressError:
    """The error that an answer of status 400 or more stands for, whatever its body."""
    status = response.status_code
    plain = {"detail": f"{response.request.method} {response.url.path} was answered {status}"}
    try:
        problem = json.loads(data)
        error = FedpressError.from_problem(problem, status)
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        error = FedpressError.from_problem(plain, status)
    # No server can speak of this device's files and links.
    return ServerError(error.detail, hint=error.hint) if isinstance(error, DeviceError) else error


def finite(value: object) -> float | None:
    """A number that a problem states; None for anything else, NaN and integers beyond floats."""
    if not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def bounded(seconds: float) -> float:
    """Seconds that the device waits; 0 for NaN."""
    return min(max(0.0, seconds), MAX_RETRY_AFTER)  # max keeps the first unless it is less


def retry_after_of(response: httpx.Response, clock: Callable[[], float]) -> float | None:
    """Seconds, from either form of the header (RFC 9110, section 10.2.3)."""
    value = response.headers.get("retry-after", "").strip()
    try:
        seconds = float(value)
    except ValueError:
        date = date_of(value)
        if date is None:
            return None
        seconds = date - (date_of(response.headers.get("date")) or clock())
    return bounded(seconds) if math.isfinite(seconds) else None


def drawn_pause(response: httpx.Response, chance: Callable[[], float]) -> float | None:
    """A moment of the Retry-Window, in seconds from now; `chance` gives numbers in [0, 1)."""
    least, _, most = response.headers.get("retry-window", "").partition("-")
    try:
        window = float(least), float(most)
    except ValueError:
        return None
    if not all(map(math.isfinite, window)) or window[0] > window[1]:
        return None
    return bounded(window[0] + chance() * (window[1] - window[0]))


def date_of(value: str | None) -> float | None:
    try:
        return parsedate_to_datetime(value or "").timestamp()
    except (ValueError, TypeError, OverflowError):
        return None


def length_of(response: httpx.Response) -> int | None:
    return _count(response.headers.get("content-length", ""))


def range_start_of(response: httpx.Response) -> int:
    """From `bytes 100-199/200`; -1 if the header is not of that form."""
    unit, _, rest = response.headers.get("content-range", "").partition(" ")
    first = _count(rest.partition("-")[0]) if unit == "bytes" else None
    return -1 if first is None else first


def _count(text: str) -> int | None:
    """A number of bytes; None if `text` is none that a file can have."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else None


def header_bytes(headers: httpx.Headers) -> int:
    return sum(len(name) + len(value) + 4 for name, value in headers.raw) + 2


def json_of(term: Term) -> bytes:
    """The body of a request."""
    return term.model_dump_json().encode()
