"""The server's HTTP API, one method for each verb, over a link that fails.

Every request is signed anew, every retry too; the bytes inside stay the same. What the server
refuses comes out as the same error class that it raised.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import secrets
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from random import SystemRandom
from time import sleep as _sleep
from time import time as _time
from typing import Any, NamedTuple, Protocol, TypeVar
from urllib.request import getproxies, proxy_bypass

import httpx
from pydantic import ValidationError

from fedpress_client import tls, tracing
from fedpress_client.parts import PART_SECONDS, PARTS_ABOVE, Delivery, PartSizes, PartsNotOffered
from fedpress_protocols import __version__
from fedpress_protocols.errors import (
    BodyTooLarge,
    ClockSkew,
    ConfigurationError,
    DeviceError,
    DigestMismatch,
    FedpressError,
    IncompatiblePlan,
    MalformedRequest,
    NotFound,
    ReplayedRequest,
    ServerError,
    TransportError,
)
from fedpress_protocols.messages import (
    CheckInRequest,
    CheckInResponse,
    DeclineReason,
    EnrolRequest,
    EnrolResponse,
    EvaluationReport,
    Membership,
    PartialCompletion,
    PartialIntent,
    PartialUpload,
    RotationRequest,
    RotationResponse,
    SignedReceipt,
    TaskSummary,
    Trip,
    UploadAck,
)
from fedpress_protocols.plan import Term, TermT, parsed
from fedpress_protocols.signatures import (
    MAX_LIFETIME,
    NONCE_BYTES,
    Content,
    DeviceKey,
    Target,
    sign_request,
)
from fedpress_protocols.succession import ServerKeys

_log = logging.getLogger(__name__)

MAX_ANSWER_BYTES = 8 * 2**20
"""The largest JSON answer that is read."""
SHORT_LIFETIME, SHORT_BODY = 60, 64 * 1024
"""Seconds for which a request is signed whose body has so many bytes at most: so long the server
remembers it. A longer body may be collected by a proxy before its header goes on."""
MAX_RETRY_AFTER = 3600.0
_TASKS_SHOWN, _MOST_TASKS = 1000, 100_000
"""Of one answer, and of all that are asked for."""
_OCTETS = "application/octet-stream"
_OFFSET_OCTETS = "application/offset+octet-stream"
_random = SystemRandom().random
_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504, 507})
_ResultT = TypeVar("_ResultT")


class News(NamedTuple):
    """What a check-in brought. `response` is None if there is nothing new.

    `unfit` is an assignment that this release cannot read, and why; the rest of the answer holds.
    """

    response: CheckInResponse | None
    retry_after: float
    unfit: tuple[str, IncompatiblePlan] | None = None


@dataclass(slots=True)
class Traffic:
    """Bytes since the transport was made, every attempt counted.

    Bodies are `len(body)`; wire adds request and status lines and headers, without TLS and TCP.
    """

    body_up: int = 0
    body_down: int = 0
    wire_up: int = 0
    wire_down: int = 0
    coded_down: int = 0
    """Of `body_down`: what came when a whole model was asked for, coded."""
    difference_down: int = 0
    """The same for differences to a model that is held."""


class Transport(Protocol):
    """The verbs of the API. Each blocks until it has an answer or gives up with a FedpressError."""

    traffic: Traffic

    def enrol(self, token: str, request: EnrolRequest) -> EnrolResponse: ...

    def rotate(self, request: RotationRequest) -> RotationResponse:
        """Bring in another key; it may be said again."""
        ...

    def use_key(self, key: DeviceKey) -> None:
        """Sign with `key` from now on."""
        ...

    def tasks(self) -> tuple[TaskSummary, ...]: ...

    def task(self, task: str) -> TaskSummary: ...

    def check_in(self, task: str, request: CheckInRequest) -> News: ...

    def model(self, digest: str, max_bytes: int, task: str) -> bytes:
        """The model's bytes; their SHA-256 is `digest`. They count as `task`'s."""
        ...

    def coded(self, digest: str, max_bytes: int, task: str) -> bytes:
        """The coded form of the model `digest`; what it is, decoding and its digest tell."""
        ...

    def difference(self, digest: str, base: str, max_bytes: int, task: str) -> bytes:
        """The same as the difference to the model `base`. Raises NotFound where there is none."""
        ...

    def artefact(self, digest: str, max_bytes: int, task: str) -> bytes:
        """As `model`, for what a plan names besides."""
        ...

    def own(self, assignment: str, digest: str, max_bytes: int, task: str) -> bytes:
        """As `model`, for what the device's last included upload stood for."""
        ...

    def basis(self, assignment: str, digest: str, max_bytes: int, task: str) -> bytes:
        """As `model`, for what the round's first trips came to."""
        ...

    def first(self, assignment: str, body: bytes) -> UploadAck:
        """Send the first of two trips."""
        ...

    def upload(self, assignment: str, body: bytes) -> UploadAck: ...

    def decline(
        self, assignment: str, reason: DeclineReason, needed_seconds: float | None = None
    ) -> SignedReceipt | None:
        """Give an assignment back; its receipt, if the server sends it at once. `needed_seconds`:
        the time that a device which is too slow expects to need."""
        ...

    def receipt(self, assignment: str) -> SignedReceipt | float:
        """The receipt, or the seconds until it is worth while to ask again."""
        ...

    def report(self, task: str, report: EvaluationReport) -> None: ...

    def certificate(self) -> Membership:
        """The server's word, or its authority's, that this device is one of the population."""
        ...

    def server_keys(self) -> ServerKeys:
        """The key that the server signs with, and how it came to it from earlier ones."""
        ...

    def ready(self, assignment: str) -> None:
        """In the masked lane: trained, and waiting for the session."""
        ...

    def say(self, assignment: str, step: str, message: bytes) -> None:
        """Answer a step of the session; the same bytes may be sent again."""
        ...

    def hear(self, assignment: str, step: str, wait: float) -> bytes | float:
        """What the server says once `step` is over, or the seconds until it is worth while to ask
        again; the server may hold the answer for `wait` seconds."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Retries:
    """Full jitter: attempt n is followed by a pause drawn from [0, min(cap, base * 2**n)] seconds.

    A Retry-After is waited for in full, and the jitter comes on top. After `patience` seconds of
    pauses over one request the last error is raised.
    """

    base: float = 0.5
    cap: float = 60.0
    patience: float = 3600.0


class HttpTransport:
    """The API over httpx; one connection, kept alive. Not for several threads at once.

    `verify` is the path of a CA bundle, or an ssl.SSLContext; None trusts the usual ones.
    `client_certificate` and `client_key` are PEM files for a server that asks devices for one.
    `proxy` overrides what HTTP_PROXY, HTTPS_PROXY and NO_PROXY say. `timeout` bounds, in seconds,
    every wait for the network. A body of more than `parts_above` bytes goes by parts, of some
    `part_seconds` each, if the server takes it so. `http` replaces the sockets in tests.
    """

    def __init__(
        self,
        url: str,
        key: DeviceKey,
        *,
        verify: str | ssl.SSLContext | None = None,
        client_certificate: str | Path | None = None,
        client_key: str | Path | None = None,
        proxy: str | None = None,
        timeout: float = 30.0,
        retries: Retries | None = None,
        parts_above: int = PARTS_ABOVE,
        part_seconds: float = PART_SECONDS,
        sleep: Callable[[float], None] = _sleep,
        clock: Callable[[], float] = _time,
        random: Callable[[], float] = _random,
        http: httpx.BaseTransport | None = None,
    ) -> None:
        self.traffic = Traffic()
        self._url = _base_url(url)
        self._key = key
        self._timeout = timeout
        self._retries = retries or Retries()
        self._sleep, self._clock, self._random = sleep, clock, random
        self._ahead = 0.0
        self.parts_above = parts_above
        self._sizes = PartSizes(part_seconds)
        self._takes_parts = True
        self._certificate = Path(client_certificate) if client_certificate else None
        if not isinstance(verify, ssl.SSLContext):
            verify = tls.context_of(verify, client_certificate, client_key)
        self._proxy = _without_password(proxy or ("" if http is not None else _proxy_of(self._url)))
        try:
            self._http = httpx.Client(
                verify=verify,
                proxy=proxy,
                transport=http,
                timeout=timeout,
                follow_redirects=False,
                headers={
                    "User-Agent": f"fedpress/{__version__}",
                    # Bytes are counted and digests taken of what travels; nothing here compresses
                    # well.
                    "Accept-Encoding": "identity",
                },
            )
        except (ValueError, ImportError, httpx.InvalidURL) as exc:
            raise ConfigurationError(
                f"proxy {self._proxy}: {exc}", hint="give http://host:port"
            ) from exc

    def close(self) -> None:
        self._http.close()

    def enrol(self, token: str, request: EnrolRequest) -> EnrolResponse:
        headers = {"Authorization": f"Bearer {token}"}
        answer = self._call("POST", "/v1/enrol", _json(request), headers)
        return answer.parsed(EnrolResponse)

    def rotate(self, request: RotationRequest) -> RotationResponse:
        return self._call("POST", "/v1/key-rotation", _json(request)).parsed(RotationResponse)

    def use_key(self, key: DeviceKey) -> None:
        self._key = key

    def tasks(self) -> tuple[TaskSummary, ...]:
        found = page = self._call("GET", "/v1/tasks").all_parsed(TaskSummary)
        while len(page) >= _TASKS_SHOWN and len(found) < _MOST_TASKS:
            last = found[-1].task
            more = self._call("GET", f"/v1/tasks?after={last}").all_parsed(TaskSummary)
            page = tuple(each for each in more if each.task > last)
            found += page
        return found

    def task(self, task: str) -> TaskSummary:
        return self._call("GET", f"/v1/tasks/{task}").parsed(TaskSummary)

    def check_in(self, task: str, request: CheckInRequest) -> News:
        path = f"/v1/tasks/{task}/check-in"

        def read(answer: _Answer) -> News:
            if answer.status == 204:
                return News(None, answer.retry_after or 1.0)
            return answer.news()

        return self._retrying(
            lambda: read(self._once("POST", path, _json(request), wait=request.wait)), path
        )

    def first(self, assignment: str, body: bytes) -> UploadAck:
        return self._deliver(assignment, "first", body)

    def upload(self, assignment: str, body: bytes) -> UploadAck:
        return self._deliver(assignment, "update", body)

    def _deliver(self, assignment: str, trip: Trip, body: bytes) -> UploadAck:
        if len(body) > self.parts_above and self._takes_parts:
            try:
                return self._by_parts(assignment, trip, body)
            except PartsNotOffered as exc:
                _log.info("%s", exc)
                self._takes_parts = False
        path = f"/v1/assignments/{assignment}/{trip}"
        return self._call("PUT", path, body, {"Content-Type": _OCTETS}).parsed(UploadAck)

    # Uploads by parts, see parts.py

    def _by_parts(self, assignment: str, trip: Trip, body: bytes) -> UploadAck:
        delivery = Delivery(self, assignment, trip, self._sizes, self._clock)

        def attempt() -> UploadAck:
            begun = delivery.offset
            try:
                return delivery.whole(body)
            except _Again as again:
                again.progress = delivery.offset > begun
                delivery.cut()
                raise

        return self._retrying(attempt, _partials(assignment))

    def ahead(
        self,
        assignment: str,
        max_bytes: int,
        source: Callable[[int, int], bytes],
        begun: Callable[[str], None],
    ) -> None:
        """Send parts of an update that is not whole yet, see `Delivery.ahead`; nothing is tried
        again. May run in a thread of its own, beside which nothing else is asked of this."""
        if not self._takes_parts:
            return
        try:
            delivery = Delivery(self, assignment, "update", self._sizes, self._clock)
            delivery.ahead(source, max_bytes, begun)
        except PartsNotOffered as exc:
            _log.info("%s", exc)
            self._takes_parts = False
        except _Again as again:
            raise again.error from again

    def begin_parts(self, assignment: str, intent: PartialIntent) -> PartialUpload:
        path = _partials(assignment)
        try:
            answer = self._once("POST", path, _json(intent))
        except NotFound as exc:
            if type(exc) is NotFound:
                raise PartsNotOffered(f"the server has no {path}") from exc
            raise
        answer.check()
        return answer.parsed(PartialUpload)

    def held_parts(self, assignment: str, partial: str) -> PartialUpload:
        path = _partials(assignment, partial)
        with self._sent("HEAD", path, b"", {}) as response:
            self._refused(response)
            told = response.headers
        try:
            return PartialUpload(
                partial=partial,
                offset=int(told["upload-offset"]),
                digest=told["upload-digest"],
                part_bytes=int(told["upload-part-bytes"]),
                expires_at=float(told["upload-expires"]),
            )
        except (KeyError, ValueError, ValidationError) as exc:
            raise _Again(TransportError(f"{path} does not say where it stands")) from exc

    def send_part(self, assignment: str, partial: str, offset: int, part: bytes) -> PartialUpload:
        path = f"{_partials(assignment, partial)}?offset={offset}"
        answer = self._once("PATCH", path, part, {"Content-Type": _OFFSET_OCTETS})
        answer.check()
        return answer.parsed(PartialUpload)

    def complete_parts(
        self, assignment: str, partial: str, completion: PartialCompletion
    ) -> UploadAck:
        path = f"{_partials(assignment, partial)}/completion"
        answer = self._once("POST", path, _json(completion))
        answer.check()
        return answer.parsed(UploadAck)

    def drop_parts(self, assignment: str, partial: str) -> None:
        try:
            self._once("DELETE", _partials(assignment, partial), b"")
        except NotFound:
            pass
        except _Again as again:
            raise again.error from again

    def decline(
        self, assignment: str, reason: DeclineReason, needed_seconds: float | None = None
    ) -> SignedReceipt | None:
        # In the query: a server that does not know these ignores them, and declines.
        path = f"/v1/assignments/{assignment}?reason={reason}"
        if needed_seconds is not None:
            path += f"&needed_seconds={needed_seconds:.3f}"
        answer = self._call("DELETE", path)
        return answer.parsed(SignedReceipt) if answer.data else None

    def receipt(self, assignment: str) -> SignedReceipt | float:
        answer = self._call("GET", f"/v1/assignments/{assignment}/receipt")
        return answer.retry_after or 1.0 if answer.status == 202 else answer.parsed(SignedReceipt)

    def report(self, task: str, report: EvaluationReport) -> None:
        self._call("POST", f"/v1/tasks/{task}/evaluations", _json(report))

    def certificate(self) -> Membership:
        return self._call("GET", "/v1/membership").parsed(Membership)

    def server_keys(self) -> ServerKeys:
        return self._call("GET", "/v1/server-keys").parsed(ServerKeys)

    def ready(self, assignment: str) -> None:
        self._call("POST", f"/v1/assignments/{assignment}/ready")

    def say(self, assignment: str, step: str, message: bytes) -> None:
        path = f"/v1/assignments/{assignment}/session/{step}"
        self._call("POST", path, message, {"Content-Type": _OCTETS})

    def hear(self, assignment: str, step: str, wait: float) -> bytes | float:
        path = f"/v1/assignments/{assignment}/session/{step}?wait={wait:g}"

        def listen() -> bytes | float:
            with self._sent("GET", path, b"", {}, wait) as response:
                self._refused(response)
                data = b"".join(self._chunks(response, MAX_ANSWER_BYTES))
                if response.status_code == 204:
                    return _retry_after(response, self._clock) or 0.0
                if response.headers.get("content-type") != _OCTETS:
                    found = _Answer(response.status_code, data, path, None)
                    raise _Again(found.other("no message"))
                return data

        return self._retrying(listen, path)

    def model(self, digest: str, max_bytes: int, task: str) -> bytes:
        return self._file(f"/v1/models/{digest}?task={task}", digest, max_bytes)

    def coded(self, digest: str, max_bytes: int, task: str) -> bytes:
        before = self.traffic.body_down
        try:
            return self._file(f"/v1/models/{digest}/coded?task={task}", None, max_bytes)
        finally:
            self.traffic.coded_down += self.traffic.body_down - before

    def difference(self, digest: str, base: str, max_bytes: int, task: str) -> bytes:
        before = self.traffic.body_down
        try:
            return self._file(f"/v1/models/{digest}/from/{base}?task={task}", None, max_bytes)
        finally:
            self.traffic.difference_down += self.traffic.body_down - before

    def artefact(self, digest: str, max_bytes: int, task: str) -> bytes:
        return self._file(f"/v1/artefacts/{digest}?task={task}", digest, max_bytes)

    def own(self, assignment: str, digest: str, max_bytes: int, task: str) -> bytes:
        return self._file(f"/v1/assignments/{assignment}/own?task={task}", digest, max_bytes)

    def basis(self, assignment: str, digest: str, max_bytes: int, task: str) -> bytes:
        return self._file(f"/v1/assignments/{assignment}/basis?task={task}", digest, max_bytes)

    def _file(self, path: str, digest: str | None, max_bytes: int) -> bytes:
        """What lies at `path`, checked by its SHA-256 if that is known before."""
        received = bytearray()

        def fetch() -> bytes:
            """The rest of it; what came before a broken connection is kept."""
            begun = len(received)
            headers = {"Range": f"bytes={begun}-"} if begun else {}
            try:
                with self._sent("GET", path, b"", headers) as response:
                    if response.status_code == 416:
                        received.clear()
                        raise _Again(TransportError(f"{path} is shorter than it was"))
                    self._refused(response)
                    start = _range_start(response) if response.status_code == 206 else 0
                    if start not in (0, begun):
                        raise _Again(TransportError(f"{path} from byte {start}, not from {begun}"))
                    del received[start:]
                    announced = _length(response)
                    for chunk in self._chunks(response, max_bytes - start):
                        received.extend(chunk)
                    if announced is not None and len(received) < start + announced:
                        raise _Again(TransportError(f"{path} broke off at {len(received)} bytes"))
            except _Again as again:
                again.progress = len(received) > begun
                raise
            if digest is not None and hashlib.sha256(received).hexdigest() != digest:
                received.clear()
                raise _Again(DigestMismatch(f"{path} came with other bytes"), at_most=3)
            return bytes(received)

        return self._retrying(fetch, path)

    def _call(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> _Answer:
        def attempt() -> _Answer:
            answer = self._once(method, path, body, headers)
            answer.check()
            return answer

        return self._retrying(attempt, path)

    def _once(
        self,
        method: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str] | None = None,
        wait: float = 0.0,
    ) -> _Answer:
        with self._sent(method, path, body, headers or {}, wait) as response:
            self._refused(response)
            data = b"".join(self._chunks(response, MAX_ANSWER_BYTES))
            pause = _drawn(response, self._random)
            if pause is None:
                pause = _retry_after(response, self._clock)
            return _Answer(response.status_code, data, path, pause)

    @contextmanager
    def _sent(
        self,
        method: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        wait: float = 0.0,
    ) -> Iterator[httpx.Response]:
        """The answer to one signed request, its body still to be read; _Again if there is none."""
        content = {"Content-Type": "application/json"} if body else {}
        request = self._http.build_request(
            method,
            self._url + path,
            content=body,
            headers={**content, **headers, **tracing.carried()},
            timeout=httpx.Timeout(self._timeout, read=self._timeout + wait),
        )
        signature = sign_request(
            self._key,
            Target.from_url(method, str(request.url)),
            Content.of(body),
            created=math.floor(self._clock() + self._ahead),
            nonce=secrets.token_bytes(NONCE_BYTES),
            lifetime=SHORT_LIFETIME if len(body) <= SHORT_BODY else MAX_LIFETIME,
        )
        request.headers.update(signature)
        answered = False
        try:
            response = self._http.send(request, stream=True)
            answered = True
            self._count_up(request, len(body))
            try:
                self._count_down(response)
                yield response
            finally:
                response.close()
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError) as exc:
            raise self._no_connection(exc) from exc
        except httpx.TransportError as exc:
            if not answered:
                self._count_up(request, len(body))
            reason = str(exc) or type(exc).__name__
            if tls.explained(exc) is not None:
                raise self._no_connection(exc) from exc
            hint = ""
            if not answered and isinstance(exc, httpx.RemoteProtocolError | httpx.ReadError):
                hint = tls.silence(self._url, self._certificate, self._clock())
            told = TransportError(f"{method} {self._url}{path}: {reason}", hint=hint)
            raise _Again(told) from exc
        except httpx.HTTPError as exc:
            raise TransportError(f"{method} {self._url}{path}: {exc}") from exc

    def _no_connection(self, exc: httpx.TransportError) -> _Again:
        told = tls.explained(exc)
        if told is None and self._proxy:
            found = f"the proxy {self._proxy}, on the way to {self._url}: {exc}"
            hint = "check --proxy, HTTP_PROXY, HTTPS_PROXY and NO_PROXY"
            return _Again(TransportError(found, hint=hint))
        if told is None:
            return _Again(TransportError(f"{self._url}: {exc}"))
        error = TransportError(f"{self._url}: {told[0]}", hint=told[1])
        return _Again(error, at_most=3 if tls.is_about_this_device(told) else math.inf)

    def _refused(self, response: httpx.Response) -> None:
        """Raise what an answer other than 2xx stands for, as _Again where trying again helps."""
        status = response.status_code
        if 200 <= status < 300:
            return
        if 300 <= status < 400:
            raise TransportError(
                f"{response.url} redirects to {response.headers.get('location', '?')[:200]}",
                hint="a redirect is not followed: give the final URL",
            )
        error = _problem(response, b"".join(self._chunks(response, MAX_ANSWER_BYTES)))
        if isinstance(error, ClockSkew):
            raise _Again(error, at_most=2, pause=0.0 if self._adjusted(error, response) else None)
        if isinstance(error, ReplayedRequest):
            raise _Again(error, at_most=3)
        if isinstance(error, DigestMismatch):
            raise _Again(error, at_most=3)
        if status in _AGAIN or status >= 500:
            after = _retry_after(response, self._clock)
            stated = error.members.get("retry_after")
            if after is None and isinstance(stated, int | float):
                after = _bounded(float(stated))
            raise _Again(error, after=after)
        raise error

    def _adjusted(self, error: ClockSkew, response: httpx.Response) -> bool:
        """Take the server's time for ours in signatures; False if it told none."""
        told = error.members.get("server_time")
        if not isinstance(told, int | float) or not math.isfinite(told):
            told = _date(response.headers.get("date"))
        if told is None:
            return False
        self._ahead = float(told) - self._clock()
        _log.warning(
            "the clock here is %.0f s off the server's; signing with its time", self._ahead
        )
        return True

    def _chunks(self, response: httpx.Response, at_most: int) -> Iterator[bytes]:
        """The body as it comes, counted; BodyTooLarge beyond `at_most` bytes."""
        if (announced := _length(response) or 0) > at_most:
            raise BodyTooLarge(f"an answer of {announced} bytes where {at_most} are allowed")
        received = 0
        for chunk in response.iter_raw():
            received += len(chunk)
            self.traffic.body_down += len(chunk)
            self.traffic.wire_down += len(chunk)
            if received > at_most:
                raise BodyTooLarge(f"an answer of more than {at_most} bytes")
            yield chunk

    def _retrying(self, attempt: Callable[[], _ResultT], what: str) -> _ResultT:
        failures, waited = 0, 0.0
        tries: dict[type[Exception], int] = {}
        while True:
            try:
                return attempt()
            except _Again as again:
                kind = type(again.error)
                tries[kind] = tries.get(kind, 0) + 1
                if again.progress:
                    failures, waited = 0, 0.0
                pause = again.pause
                if pause is None:
                    ceiling = min(self._retries.cap, self._retries.base * 2.0 ** min(failures, 60))
                    pause = (again.after or 0.0) + self._random() * ceiling
                failures += 1
                waited += pause
                if waited > self._retries.patience or tries[kind] >= again.at_most:
                    raise again.error from again.__cause__
                _log.warning("%s: %s; again in %.1f s", what, again.error.detail, pause)
            self._sleep(pause)

    def _count_up(self, request: httpx.Request, body: int) -> None:
        line = f"{request.method} {request.url.raw_path.decode()} HTTP/1.1\r\n"
        self.traffic.body_up += body
        self.traffic.wire_up += len(line) + _header_bytes(request.headers) + body

    def _count_down(self, response: httpx.Response) -> None:
        line = f"HTTP/1.1 {response.status_code} {response.reason_phrase}\r\n"
        self.traffic.wire_down += len(line) + _header_bytes(response.headers)


class _Again(Exception):
    """`error`, after which another attempt may do better; `at_most` attempts end like this."""

    def __init__(
        self,
        error: FedpressError,
        *,
        after: float | None = None,
        pause: float | None = None,
        at_most: float = math.inf,
    ) -> None:
        super().__init__(str(error))
        self.error = error
        self.after = after
        self.pause = pause
        self.at_most = at_most
        self.progress = False


class _Answer(NamedTuple):
    """A 2xx answer, read to its end."""

    status: int
    data: bytes
    path: str
    retry_after: float | None

    def check(self) -> None:
        """Raise _Again unless there is JSON in it or nothing at all: a portal's page is neither."""
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
            return News(response, _bounded(response.retry_after))
        except IncompatiblePlan as exc:
            document = self._json()
            assignment = document.get("assignment") if isinstance(document, dict) else None
            if not isinstance(assignment, dict):
                raise _Again(self.other(exc.detail)) from exc
            try:
                rest = parsed(CheckInResponse, json.dumps(document | {"assignment": None}))
            except IncompatiblePlan as other:
                raise _Again(self.other(other.detail)) from other
            name = str(assignment.get("assignment", ""))
            return News(rest, _bounded(rest.retry_after), (name, exc))

    def _json(self) -> Any:
        try:
            return json.loads(self.data)
        except (ValueError, RecursionError) as exc:
            raise _Again(self.other("no JSON")) from exc

    def other(self, found: str) -> TransportError:
        return TransportError(
            f"{self.path} answered {self.status} with something else: {found[:500]}",
            hint="is this a fedpress server, and is no proxy or portal in between?",
        )


def _partials(assignment: str, partial: str = "") -> str:
    path = f"/v1/assignments/{assignment}/partials"
    return f"{path}/{partial}" if partial else path


def _base_url(url: str) -> str:
    base = url.rstrip("/")
    try:
        target = Target.from_url("GET", str(httpx.URL(base)))
    except (httpx.InvalidURL, MalformedRequest) as exc:
        raise ConfigurationError(f"server URL {url!r}: {exc}") from exc
    if target.query:
        raise ConfigurationError(f"server URL {url!r} has a query")
    return base


def _proxy_of(url: str) -> str:
    """The proxy that the environment names for `url`, as httpx reads it; empty for none."""
    target = httpx.URL(url)
    if proxy_bypass(target.netloc.decode()):
        return ""
    proxies = getproxies()
    return proxies.get(target.scheme) or proxies.get("all") or ""


def _without_password(url: str) -> str:
    credentials, has_credentials, rest = url.rpartition("@")
    scheme, has_scheme, _ = credentials.rpartition("://")
    return f"{scheme}{has_scheme}{rest}" if has_credentials else url


def _json(term: Term) -> bytes:
    return term.model_dump_json().encode()


def _problem(response: httpx.Response, data: bytes) -> FedpressError:
    """The error that an answer of status 400 or more stands for, whatever its body."""
    status = response.status_code
    plain = {"detail": f"{response.request.method} {response.url.path} was answered {status}"}
    try:
        problem = json.loads(data)
        error = FedpressError.from_problem(problem, status)
    except (ValueError, TypeError, AttributeError, RecursionError):
        error = FedpressError.from_problem(plain, status)
    # No server can speak of this device's files and links.
    return ServerError(error.detail, hint=error.hint) if isinstance(error, DeviceError) else error


def _bounded(seconds: float) -> float:
    return min(max(seconds, 0.0), MAX_RETRY_AFTER)


def _retry_after(response: httpx.Response, clock: Callable[[], float]) -> float | None:
    """Seconds, from either form of the header (RFC 9110, section 10.2.3)."""
    value = response.headers.get("retry-after", "").strip()
    try:
        seconds = float(value)
    except ValueError:
        date = _date(value)
        if date is None:
            return None
        seconds = date - (_date(response.headers.get("date")) or clock())
    return _bounded(seconds) if math.isfinite(seconds) else None


def _drawn(response: httpx.Response, chance: Callable[[], float]) -> float | None:
    """A moment of the Retry-Window, in seconds from now; `chance` gives numbers in [0, 1)."""
    least, _, most = response.headers.get("retry-window", "").partition("-")
    try:
        window = float(least), float(most)
    except ValueError:
        return None
    if not all(map(math.isfinite, window)) or window[0] > window[1]:
        return None
    return _bounded(window[0] + chance() * (window[1] - window[0]))


def _date(value: str | None) -> float | None:
    try:
        return parsedate_to_datetime(value or "").timestamp()
    except (ValueError, TypeError, OverflowError):
        return None


def _length(response: httpx.Response) -> int | None:
    value = response.headers.get("content-length", "")
    return int(value) if value.isascii() and value.isdigit() and len(value) < 16 else None


def _range_start(response: httpx.Response) -> int:
    """From `bytes 100-199/200`; -1 if the header is not of that form."""
    unit, _, rest = response.headers.get("content-range", "").partition(" ")
    first = rest.partition("-")[0]
    return int(first) if unit == "bytes" and first.isascii() and first.isdigit() else -1


def _header_bytes(headers: httpx.Headers) -> int:
    return sum(len(name) + len(value) + 4 for name, value in headers.raw) + 2
