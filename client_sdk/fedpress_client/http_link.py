"""Signed requests over one httpx connection: every byte counted, every refusal an error.

Every request is signed anew, every retry too; the bytes inside stay the same. What the server
refuses comes out as the same error class that it raised.
"""

from __future__ import annotations

import hashlib
import logging
import math
import secrets
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.cookiejar import CookieJar, DefaultCookiePolicy
from pathlib import Path
from random import SystemRandom
from time import sleep as _sleep
from time import time as _time
from typing import Literal, TypeAlias, TypedDict, TypeVar
from urllib.request import getproxies, proxy_bypass

import httpx

from fedpress_client import tls, tracing
from fedpress_client.answer_watch import AnswerWatch
from fedpress_client.answers import (
    Answer,
    bounded,
    date_of,
    drawn_pause,
    finite,
    header_bytes,
    length_of,
    problem_of,
    range_start_of,
    retry_after_of,
)
from fedpress_client.bandwidth import Bandwidth
from fedpress_client.retrying import Retries, RetryLoop, TryAgain
from fedpress_protocols import __version__
from fedpress_protocols.errors import (
    BodyTooLarge,
    ClockSkew,
    ConfigurationError,
    DigestMismatch,
    MalformedRequest,
    NotFound,
    ReplayedRequest,
    TransportError,
)
from fedpress_protocols.signatures import (
    MAX_LIFETIME,
    NONCE_BYTES,
    Content,
    DeviceKey,
    Target,
    sign_request,
)

_log = logging.getLogger(__name__)

MAX_ANSWER_BYTES = 8 * 2**20
"""The largest JSON answer that is read."""
SHORT_LIFETIME, SHORT_BODY = 60, 64 * 1024
"""Seconds for which a request is signed whose body has so many bytes at most: so long the server
remembers it. A longer body may be collected by a proxy before its header goes on."""
_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504, 507})
_random = SystemRandom().random
_ResultT = TypeVar("_ResultT")


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
    """The same for differences to a model that is held, and for trained tensors over a base."""
    seconds_away: float = 0.0
    """Seconds lost to attempts that found no server, or one that failed or put them off (5xx), with
    the pauses after them."""


OnTransfer: TypeAlias = Callable[[Literal["download", "upload"], int, int | None], None]
"""Called with the bytes of a file or body that have come or gone, and how many there are."""


class LinkOptions(TypedDict, total=False):
    """Keywords of `HttpTransport`; `LinkSettings` has their defaults."""

    verify: str | ssl.SSLContext | None
    client_certificate: str | Path | None
    client_key: str | Path | None
    proxy: str | None
    timeout: float
    bandwidth: Bandwidth | None
    on_transfer: OnTransfer | None
    retries: Retries | None
    sleep: Callable[[float], None]
    clock: Callable[[], float]
    random: Callable[[], float]
    http: httpx.BaseTransport | None


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """See `HttpTransport`."""

    verify: str | ssl.SSLContext | None = None
    client_certificate: str | Path | None = None
    client_key: str | Path | None = None
    proxy: str | None = field(default=None, repr=False)
    timeout: float = 30.0
    bandwidth: Bandwidth | None = None
    on_transfer: OnTransfer | None = None
    retries: Retries | None = None
    sleep: Callable[[float], None] = _sleep
    clock: Callable[[], float] = _time
    random: Callable[[], float] = _random
    http: httpx.BaseTransport | None = None


class HttpLink:
    """One connection to the server, kept alive; `key` signs. Not for several threads at once."""

    def __init__(self, url: str, key: DeviceKey, settings: LinkSettings) -> None:
        self.traffic = Traffic()
        self.key = key
        self._url = _base_url(url)
        self._timeout = settings.timeout
        self.clock, self.random = settings.clock, settings.random
        self._bandwidth, self._sleep = settings.bandwidth or Bandwidth(), settings.sleep
        self._on_transfer = settings.on_transfer
        self._watch = AnswerWatch(settings.timeout, settings.clock, settings.sleep)
        self._loop = RetryLoop(
            settings.retries or Retries(), settings.sleep, settings.random, self._count_away
        )
        self._ahead = 0.0
        """Seconds by which the server's clock is ahead of this device's."""
        certificate, key_file = settings.client_certificate, settings.client_key
        self._certificate = Path(certificate) if certificate else None
        verify: ssl.SSLContext | bool = True
        if isinstance(settings.verify, ssl.SSLContext):
            verify = settings.verify
        elif settings.http is None or settings.proxy or settings.verify or certificate or key_file:
            verify = tls.context_of(settings.verify, certificate, key_file)
        proxy = settings.proxy or ("" if settings.http is not None else _proxy_of(self._url))
        self._proxy = _without_password(proxy)
        try:
            self._http = httpx.Client(
                verify=verify,
                proxy=settings.proxy,
                transport=settings.http,
                timeout=settings.timeout,
                follow_redirects=False,
                cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),  # keeps none
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

    def report(self, step: Literal["download", "upload"], done: int, total: int | None) -> None:
        """Pass on how far a file or body is."""
        if self._on_transfer is not None:
            self._on_transfer(step, done, total)

    @property
    def max_upload_rate(self) -> float | None:
        """Bytes a second, if the device limits them."""
        return self._bandwidth.upload

    def retrying(self, attempt: Callable[[], _ResultT], path: str) -> _ResultT:
        """Return what `attempt` returns, see RetryLoop."""
        return self._loop.run(attempt, path)

    def file(self, path: str, digest: str | None, max_bytes: int) -> bytes:
        """The bytes at `path`, checked by their SHA-256 if that is known before."""
        received, most_received = bytearray(), 0

        def fetch() -> bytes:
            """The rest of it; what came before a broken connection is kept."""
            nonlocal most_received
            num_received = len(received)
            headers = {"Range": f"bytes={num_received}-"} if num_received else {}
            try:
                with self.sent("GET", path, b"", headers) as response:
                    if response.status_code == 416:
                        received.clear()
                        raise TryAgain(TransportError(f"{path} is shorter than it was"))
                    self.raise_refusal(response)
                    start = range_start_of(response) if response.status_code == 206 else 0
                    if start not in (0, num_received):
                        raise TryAgain(
                            TransportError(f"{path} from byte {start}, not from {num_received}")
                        )
                    del received[start:]
                    announced = length_of(response)
                    total = None if announced is None else start + announced
                    for chunk in self.chunks(response, max_bytes - start):
                        received.extend(chunk)
                        self.report("download", len(received), total)
                    if announced is not None and len(received) < start + announced:
                        raise TryAgain(TransportError(f"{path} broke off at {len(received)} bytes"))
            except TryAgain as retry:
                retry.progress = len(received) > most_received
                most_received = max(most_received, len(received))
                raise
            if digest is not None and hashlib.sha256(received).hexdigest() != digest:
                received.clear()
                raise TryAgain(DigestMismatch(f"{path} came with other bytes"), at_most=3)
            return bytes(received)

        return self._loop.run(fetch, path)

    def call(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> Answer:
        def attempt() -> Answer:
            answer = self.once(method, path, body, headers)
            answer.check()
            return answer

        return self._loop.run(attempt, path)

    def once(
        self,
        method: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str] | None = None,
        wait: float = 0.0,
    ) -> Answer:
        with self.sent(method, path, body, headers or {}, wait) as response:
            self.raise_refusal(response)
            data = b"".join(self.chunks(response, MAX_ANSWER_BYTES))
            pause = drawn_pause(response, self.random)
            if pause is None:
                pause = retry_after_of(response, self.clock)
            return Answer(response.status_code, data, path, pause)

    @contextmanager
    def sent(
        self,
        method: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        wait: float = 0.0,
    ) -> Iterator[httpx.Response]:
        """The answer to one signed request, its body still to be read; raises TryAgain."""
        began_at = self.clock()
        try:
            with self._sent(method, path, body, headers, wait) as response:
                yield response
        except TryAgain as retry:
            retry.seconds = max(0.0, self.clock() - began_at)
            raise

    @contextmanager
    def _sent(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str], wait: float
    ) -> Iterator[httpx.Response]:
        request = self._signed(method, path, body, headers, wait)
        has_answer = False
        try:
            response = self._http.send(request, stream=True)
            has_answer = True
            self._count_up(request, len(body))
            try:
                self._count_down(response)
                yield response
            finally:
                response.close()
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError) as exc:
            raise self._no_connection(exc) from exc
        except httpx.TransportError as exc:
            if not has_answer:
                self._count_up(request, len(body))
            reason = str(exc) or type(exc).__name__
            if tls.explained(exc) is not None:
                raise self._no_connection(exc) from exc
            hint = ""
            if not has_answer and isinstance(exc, httpx.RemoteProtocolError | httpx.ReadError):
                hint = tls.silence(self._url, self._certificate, self.clock())
            error = TransportError(f"{method} {self._url}{path}: {reason}", hint=hint)
            is_away = not has_answer and isinstance(exc, httpx.ReadTimeout)
            raise TryAgain(error, is_away=is_away) from exc
        except httpx.HTTPError as exc:
            raise TransportError(f"{method} {self._url}{path}: {exc}") from exc

    def _signed(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str], wait: float
    ) -> httpx.Request:
        content = {"Content-Type": "application/json"} if body else {}
        pieces: bytes | Iterator[bytes] = body
        is_reported = method == "PUT" and self._on_transfer is not None
        if body and (is_reported or self.max_upload_rate is not None):
            content["Content-Length"] = str(len(body))
            pieces = self._pieces(body, is_reported)
        request = self._http.build_request(
            method,
            self._url + path,
            content=pieces,
            headers={**content, **headers, **tracing.carried()},
            timeout=httpx.Timeout(self._timeout, read=self._timeout + wait),
            extensions={"trace": self._watch.tracer(wait)},
        )
        signature = sign_request(
            self.key,
            Target.from_url(method, str(request.url)),
            Content.of(body),
            created=math.floor(self.clock() + self._ahead),
            nonce=secrets.token_bytes(NONCE_BYTES),
            lifetime=SHORT_LIFETIME if len(body) <= SHORT_BODY else MAX_LIFETIME,
        )
        request.headers.update(signature)
        return request

    def _pieces(self, body: bytes, is_reported: bool) -> Iterator[bytes]:
        """The body as fast as it may leave, reported as it does."""
        num_sent = 0
        for piece in self._bandwidth.pieces(body, self._sleep):
            yield piece
            num_sent += len(piece)
            if is_reported:
                self.report("upload", num_sent, len(body))

    def _no_connection(self, exc: httpx.TransportError) -> TryAgain:
        reason = tls.explained(exc)
        if reason is None and self._proxy:
            return TryAgain(
                TransportError(
                    f"the proxy {self._proxy}, on the way to {self._url}: {exc}",
                    hint="check --proxy, HTTP_PROXY, HTTPS_PROXY and NO_PROXY",
                ),
                is_away=True,
            )
        if reason is None:
            hint = "check that the server runs, and that the URL and its port are right"
            return TryAgain(TransportError(f"{self._url}: {exc}", hint=hint), is_away=True)
        error = TransportError(f"{self._url}: {reason[0]}", hint=reason[1])
        return TryAgain(error, at_most=3 if tls.is_final(reason) else math.inf)

    def raise_refusal(self, response: httpx.Response) -> None:
        """Raise what an answer other than 2xx stands for, as TryAgain where trying again helps."""
        status = response.status_code
        if 200 <= status < 300:
            return
        if 300 <= status < 400:
            raise TransportError(
                f"{response.url} redirects to {response.headers.get('location', '?')[:200]}",
                hint="a redirect is not followed: give the final URL",
            )
        error = problem_of(response, b"".join(self.chunks(response, MAX_ANSWER_BYTES)))
        prefix = httpx.URL(self._url).path.rstrip("/")
        if type(error) is NotFound and prefix:
            raise NotFound(
                f"the server at {self._url}: {error.detail}",
                hint=error.hint
                or f"give the server's URL without the path {prefix}, unless a proxy expects it",
            )
        if isinstance(error, ClockSkew):
            raise TryAgain(error, at_most=2, pause=0.0 if self._adjusted(error, response) else None)
        if isinstance(error, ReplayedRequest):
            raise TryAgain(error, at_most=3)
        if isinstance(error, DigestMismatch):
            raise TryAgain(error, at_most=3)
        if status in _AGAIN or status >= 500:
            after = retry_after_of(response, self.clock)
            stated = finite(error.members.get("retry_after"))
            if after is None and stated is not None:
                after = bounded(stated)
            raise TryAgain(error, after=after, is_away=status >= 500)
        raise error

    def _adjusted(self, error: ClockSkew, response: httpx.Response) -> bool:
        """Sign with the server's time from now on; False if it did not state it."""
        server_time = finite(error.members.get("server_time"))
        if server_time is None:
            server_time = date_of(response.headers.get("date"))
        if server_time is None:
            return False
        self._ahead = server_time - self.clock()
        _log.warning(
            "the clock here is %.0f s off the server's; signing with its time", self._ahead
        )
        return True

    def chunks(self, response: httpx.Response, at_most: int) -> Iterator[bytes]:
        """The body as it comes, counted; BodyTooLarge beyond `at_most` bytes, TryAgain where it is
        too slow."""
        if (announced := length_of(response) or 0) > at_most:
            raise BodyTooLarge(f"an answer of {announced} bytes where {at_most} are allowed")
        received = 0
        for chunk in self._watch.body(response):
            received += len(chunk)
            self.traffic.body_down += len(chunk)
            self.traffic.wire_down += len(chunk)
            if received > at_most:
                raise BodyTooLarge(f"an answer of more than {at_most} bytes")
            self._bandwidth.received(len(chunk), self._sleep)
            yield chunk

    def _count_away(self, seconds: float) -> None:
        self.traffic.seconds_away += seconds

    def _count_up(self, request: httpx.Request, body: int) -> None:
        line = f"{request.method} {request.url.raw_path.decode()} HTTP/1.1\r\n"
        self.traffic.body_up += body
        self.traffic.wire_up += len(line) + header_bytes(request.headers) + body

    def _count_down(self, response: httpx.Response) -> None:
        line = f"HTTP/1.1 {response.status_code} {response.reason_phrase}\r\n"
        self.traffic.wire_down += len(line) + header_bytes(response.headers)


def _base_url(url: str) -> str:
    base = url.rstrip("/")
    try:
        target = Target.from_url("GET", str(httpx.URL(base)))
    except (httpx.InvalidURL, MalformedRequest) as exc:
        hint = "give it as https://HOST or http://HOST:PORT"
        raise ConfigurationError(f"the server's URL: {exc}", hint=hint) from exc
    if target.query:
        raise ConfigurationError(f"the server's URL {url!r} has a query; leave it out")
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
