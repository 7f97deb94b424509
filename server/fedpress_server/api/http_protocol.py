"""Timeouts and size limits of a connection, which plain uvicorn does not have.

uvicorn keeps a connection that is silent, sends half a header, stops in the middle of a body or
does not read its answer for as long as the peer likes; its only timeout is for idle keep-alive
connections. This is its protocol class with limits, to be passed as `http=`:

    uvicorn.Config(app, http=bounded_protocol(ConnectionLimits()))

A refusal is RFC 9457's problem+json (408, 431 or 400) if the client can match it to a request,
otherwise a closed connection; answers to earlier requests are sent first. An application that is
reading a refused body gets `http.disconnect`. The client's timeout is suspended while the
application does not read. WebSockets are not supported.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Any, Literal, NamedTuple

from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from fedpress_protocols.errors import (
    PROBLEM_PREFIX,
    ConfigurationError,
    MalformedRequest,
    Unavailable,
)
from fedpress_server.identity.limits import budget_of
from fedpress_server.systems import unsent_in_kernel

Refusal = Literal[
    "silent",
    "header-timeout",
    "header-size",
    "body-timeout",
    "body-chunks",
    "pipelining",
    "malformed",
    "unread",
    "too-many",
    "too-many-from-address",
]
"""The reason why a connection was closed: a label for a metric."""

_LINGER = 1.0
"""Seconds between a refusal and the close, so that data still sent by the client does not cause a
reset that overtakes the refusal."""


_MOST_SURPLUS = 64
"""Maximum refused connections that linger at a time; others are closed without an answer."""
_RETRY_AFTER = 5
"""Retry-After in seconds for a device that was refused for lack of room."""
Network = IPv4Network | IPv6Network


class _EnoughError(Exception):
    """Stops the parser's work on the current data."""


class _Problem(NamedTuple):
    status: HTTPStatus
    slug: str
    title: str


_TIMEOUT = _Problem(
    HTTPStatus.REQUEST_TIMEOUT, "request-timeout", "The request took too long to arrive"
)
_TOO_LARGE = _Problem(
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "header-too-large", "The header is too large"
)
_BUSY = _Problem(HTTPStatus.SERVICE_UNAVAILABLE, Unavailable.slug, Unavailable.title)
_MALFORMED = _Problem(HTTPStatus.BAD_REQUEST, MalformedRequest.slug, MalformedRequest.title)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of a connection; times in seconds."""

    header_timeout: float = 9.0
    """From the start of a connection, or a request's first byte on a kept-alive one, to the end of
    the header. Also for the rest of a body after its answer."""
    body_timeout: float = 9.0
    """Maximum time without a byte of the body."""
    write_timeout: float = 30.0
    """Maximum time without a byte of the answer being read."""
    min_rate: float = 256.0
    """Minimum bytes per second. A body or an answer below it uses up its timeout, silent or not;
    one at or above it may take any time. 0 means no minimum."""
    max_header_bytes: int = 16 * 1024
    max_headers: int = 64
    max_pipelined: int = 16
    """Maximum pipelined requests."""
    free_chunks: int = 256
    """Number of chunks of a body with Transfer-Encoding without a minimum size."""
    min_chunk_bytes: int = 512
    """Minimum mean size of the chunks after them, since every chunk costs the same."""
    connections: int = 16_384
    """Maximum concurrent connections; more are answered 503 and closed."""
    address_connections: int = 8_192
    """Maximum connections of one address, or IPv6 /64 network, except trusted proxies."""
    trusted_proxies: tuple[Network, ...] = ()

    def __post_init__(self) -> None:
        if min(self.header_timeout, self.body_timeout, self.write_timeout) <= 0:
            raise ConfigurationError("a connection's timeouts must be positive")
        if self.min_rate < 0:
            raise ConfigurationError(f"min_rate must be at least 0, not {self.min_rate}")
        sizes = (self.max_header_bytes, self.max_headers, self.max_pipelined)
        if min(*sizes, self.connections, self.address_connections) < 1:
            raise ConfigurationError("a connection's sizes must be at least 1")

    def extended(self, deadline: float, now: float, timeout: float, num_bytes: int) -> float:
        """The deadline after progress: a byte extends it by 1 / min_rate seconds, up to
        `timeout`."""
        if not self.min_rate:
            return now + timeout
        return min(now + timeout, max(now, deadline) + num_bytes / self.min_rate)


class _Connections:
    """Counts of open connections, in total and by address."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._num = self._num_surplus = 0
        self._by_address: Counter[str] = Counter()

    def admit(self, address: str) -> Refusal | None:
        """Count a connection; returns a reason, without counting, if there are too many."""
        if self._num >= self._limits.connections:
            return "too-many"
        limit = self._limits.address_connections
        if self._by_address[address] >= limit and not self._is_trusted(address):
            return "too-many-from-address"
        self._num += 1
        self._by_address[address] += 1
        return None

    def leave(self, address: str) -> None:
        self._num -= 1
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]

    def may_linger(self) -> bool:
        """Whether another refused connection may linger to read the answer; call `left` at its
        end."""
        if self._num_surplus >= _MOST_SURPLUS:
            return False
        self._num_surplus += 1
        return True

    def left(self) -> None:
        self._num_surplus -= 1

    def _is_trusted(self, address: str) -> bool:
        proxies = self._limits.trusted_proxies
        if not proxies or not address:
            return False
        of = ip_network(address).network_address
        return any(of in proxy for proxy in proxies)


def bounded_protocol(
    limits: ConnectionLimits, observe: Callable[[Refusal], None] = lambda _reason: None
) -> type[HttpToolsProtocol]:
    """Create the class for uvicorn's `http=`; `observe` is called for every connection it closes.
    Servers that share the class share its limits on connections.

    The class is local and so cannot be pickled: `uvicorn.run(workers=...)` does not work with it.
    """
    connections = _Connections(limits)

    class Bounded(_BoundedProtocol):
        def __init__(
            self,
            config: Config,
            server_state: ServerState,
            app_state: dict[str, Any],
            _loop: asyncio.AbstractEventLoop | None = None,
        ) -> None:
            super().__init__(limits, connections, observe, config, server_state, app_state, _loop)

    return Bounded


class _Flow(FlowControl):
    """uvicorn's flow control that also reports when the application stops and starts to read."""

    def __init__(
        self,
        transport: asyncio.Transport,
        on_pause: Callable[[], None],
        on_resume: Callable[[], None],
    ) -> None:
        super().__init__(transport)
        self._on_pause = on_pause
        self._on_resume = on_resume

    def pause_reading(self) -> None:
        super().pause_reading()
        self._on_pause()

    def resume_reading(self) -> None:
        """Called whenever the application asks for more of the body, paused or not."""
        super().resume_reading()
        self._on_resume()


class _BoundedProtocol(HttpToolsProtocol):
    """A protocol with two lazy deadlines per connection: a timer that fires early is rescheduled.

    The read deadline applies to the awaited data: a header, the rest of a body, but not the
    application. It is suspended while reading is paused. The write deadline runs while the client
    does not read pending bytes.
    """

    def __init__(
        self,
        limits: ConnectionLimits,
        connections: _Connections,
        observe: Callable[[Refusal], None],
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._known = connections
        self._address: str | None = None  # counted under it
        self._lingers = False
        self._observe = observe
        self._awaited: Literal["header", "body", "nothing"] = "nothing"
        self._deaf = False  # further data is dropped unread
        self._begun = False  # a byte of the awaited header has arrived
        self._heads = 0
        self._unfinished_bytes = 0
        self._header_bytes = 0
        self._num_headers = 0
        self._read_deadline = math.inf
        self._read_timer: asyncio.TimerHandle | None = None
        self._read_timer_at = math.inf
        self._overdue = False
        self._held_since: float | None = None
        self._write_deadline = math.inf
        self._write_timer: asyncio.TimerHandle | None = None
        self._unsent = 0
        self._linger_timer: asyncio.TimerHandle | None = None
        self._num_chunks = self._body_bytes = 0

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport, self._hold, self._release)
        address = budget_of(self.client[0] if self.client else "")
        surplus = self._known.admit(address)
        if surplus is None:
            self._address = address
            self._await_header()
        else:
            self._turn_away(surplus)

    def _turn_away(self, reason: Refusal) -> None:
        self._observe(reason)
        self._deaf = True
        if not self._known.may_linger():
            self.transport.abort()
            return
        self._lingers = True
        where = " from this address" if reason == "too-many-from-address" else ""
        self._answer(_BUSY, f"too many connections are open{where}", {"retry_after": _RETRY_AFTER})

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers()
        if self._address is not None:
            self._known.leave(self._address)
            self._address = None
        if self._lingers:
            self._known.left()
            self._lingers = False
        super().connection_lost(exc)

    def _should_upgrade(self) -> bool:
        """Never: a WebSocket would have no bounds. Such a request is served as plain HTTP."""
        return False

    def _unsupported_upgrade_warning(self) -> None:
        """Answer and close: the parser treats the following data as another protocol."""
        if not self._deaf:
            self._deaf = True
            self.cycle.keep_alive = False

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        awaited, heads = self._awaited, self._heads
        super().data_received(data)
        if self._deaf or self.transport.is_closing():
            return
        if self._awaited == "header" == awaited and heads == self._heads:
            # The parser reports complete header lines; until then their bytes are counted here.
            self._unfinished_bytes += len(data)
            if self._unfinished_bytes > self._limits.max_header_bytes:
                self._refuse_header()
        elif self._awaited == "nothing" and self._all_answered():
            # Bytes between requests have disarmed uvicorn's keep-alive timeout.
            self._await_header()

    # Callbacks of the parser

    def on_message_begin(self) -> None:
        if self._deaf:
            return
        super().on_message_begin()
        if self._awaited != "header":
            self._await_header()
        self._begun = True

    def on_url(self, url: bytes) -> None:
        self._header_bytes += len(url)
        if not self._deaf and self._header_bytes <= self._limits.max_header_bytes:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._deaf:
            return
        self._header_bytes += len(name) + len(value) + 4
        self._num_headers += 1
        if self._awaited == "header":
            if not self._header_too_large():
                super().on_header(name, value)
        elif self._header_too_large():
            self._refuse_header()
        # else a trailer: uvicorn would add it to headers that the application has already judged

    def on_headers_complete(self) -> None:
        if self._deaf:
            return
        if self._header_too_large():
            self._refuse_header()
            return
        if len(self.pipeline) >= self._limits.max_pipelined:
            self._refuse("pipelining")
            return
        super().on_headers_complete()
        self._heads += 1
        self._num_chunks = self._body_bytes = 0
        self._awaited = "body"
        self._set_read_deadline(self.loop.time() + self._limits.body_timeout)
        if self.expect_100_continue:
            self._hold()  # the client waits for the application to ask for the body

    def on_chunk_header(self) -> None:
        if self._deaf:
            return
        self._num_chunks += 1
        more = self._num_chunks - self._limits.free_chunks
        if more * self._limits.min_chunk_bytes > self._body_bytes:
            self._refuse(
                "body-chunks",
                _MALFORMED,
                f"a body in chunks of less than {self._limits.min_chunk_bytes} bytes after "
                f"{self._limits.free_chunks}: send longer ones, or a Content-Length",
            )
            raise _EnoughError  # otherwise the parser would report every received chunk

    def on_body(self, body: bytes) -> None:
        if self._deaf:
            return
        self._body_bytes += len(body)
        super().on_body(body)
        if not self.cycle.response_complete:
            self._read_deadline = self._limits.extended(
                self._read_deadline, self.loop.time(), self._limits.body_timeout, len(body)
            )

    def on_message_complete(self) -> None:
        if self._deaf:
            return
        super().on_message_complete()
        self._await_nothing()

    # Callbacks of the application and the transport

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._awaited == "body" and self.cycle.response_complete:
            self._set_read_deadline(self.loop.time() + self._limits.header_timeout)
        if self.transport.get_write_buffer_size():
            self._watch_writing()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    # The read deadline

    def _await_header(self) -> None:
        self._awaited = "header"
        self._begun = False
        self._unfinished_bytes = self._header_bytes = self._num_headers = 0
        self._set_read_deadline(self.loop.time() + self._limits.header_timeout)

    def _await_nothing(self) -> None:
        self._awaited = "nothing"
        self._read_deadline = math.inf

    def _set_read_deadline(self, deadline: float) -> None:
        self._read_deadline = deadline
        if self._held_since is not None:
            self._held_since = self.loop.time()
        elif deadline < self._read_timer_at:
            self._arm_read_timer()

    def _arm_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
        self._overdue = False
        self._read_timer_at = self._read_deadline
        self._read_timer = self.loop.call_at(self._read_deadline, self._look_at_reading)

    def _hold(self) -> None:
        if self._held_since is None:
            self._held_since = self.loop.time()

    def _release(self) -> None:
        if self._held_since is not None:
            self._read_deadline += self.loop.time() - self._held_since
            self._held_since = None
            if self._read_deadline < self._read_timer_at:
                self._arm_read_timer()

    def _look_at_reading(self) -> None:
        self._read_timer, self._read_timer_at = None, math.inf
        if self._held_since is not None or self._deaf or self.transport.is_closing():
            return
        if self.loop.time() < self._read_deadline:
            if self._read_deadline < math.inf:
                self._arm_read_timer()
        elif not self._overdue:
            # The process itself may have been suspended: read pending data before deciding.
            self._overdue = True
            self._read_timer = self.loop.call_later(0, self._look_at_reading)
        elif self._awaited == "body":
            self._refuse(
                "body-timeout",
                _TIMEOUT,
                f"the body arrived slower than {self._limits.min_rate:g} bytes per second, or not "
                "at "
                f"all for {self._limits.body_timeout:g} s",
            )
        elif self._begun:
            self._refuse(
                "header-timeout",
                _TIMEOUT,
                f"the header was not complete after {self._limits.header_timeout:g} s",
            )
        else:
            # A client without a request yet would take a 408 for the answer to a request that it
            # sends this moment.
            self._refuse("silent")

    # The write deadline

    def _watch_writing(self) -> None:
        if self._write_timer is None:
            self._unsent = self._count_unsent()
            self._write_deadline = self.loop.time() + self._limits.write_timeout
            self._arm_write_timer()

    def _arm_write_timer(self) -> None:
        soon = self.loop.time() + self._limits.write_timeout / 4
        self._write_timer = self.loop.call_at(
            min(soon, self._write_deadline), self._look_at_writing
        )

    def _look_at_writing(self) -> None:
        self._write_timer = None
        if not self.transport.get_write_buffer_size():
            return
        if not (self.flow.write_paused or self.transport.is_closing() or self._all_answered()):
            return  # the application is writing, and there is room
        now, unsent = self.loop.time(), self._count_unsent()
        if unsent < self._unsent:
            self._write_deadline = self._limits.extended(
                self._write_deadline, now, self._limits.write_timeout, self._unsent - unsent
            )
        elif unsent > self._unsent:  # another answer was written in the meantime
            self._write_deadline = now + self._limits.write_timeout
        self._unsent = unsent
        if now < self._write_deadline:
            self._arm_write_timer()
        else:
            self._observe("unread")
            self.transport.abort()

    def _count_unsent(self) -> int:
        """Bytes of answers that the client has not acknowledged, including the kernel's buffer.

        The kernel accepts more data only in large steps; its own count distinguishes a client that
        reads slowly from one that does not read.
        """
        unsent = self.transport.get_write_buffer_size()
        try:
            return unsent + unsent_in_kernel(self.transport.get_extra_info("socket"))
        except (OSError, ValueError, AttributeError):  # a socket without that information
            return unsent

    # The end

    def send_400_response(self, msg: str) -> None:
        self._refuse("malformed", _MALFORMED, "the request is not valid HTTP/1.1 (RFC 9112)")

    def _refuse_header(self) -> None:
        self._refuse(
            "header-size",
            _TOO_LARGE,
            f"more than {self._limits.max_headers} header fields, or than "
            f"{self._limits.max_header_bytes} bytes of them",
        )

    def _refuse(self, reason: Refusal, problem: _Problem | None = None, detail: str = "") -> None:
        if self._deaf:
            return  # what follows a refused header in the same packet may be refused once more
        self._observe(reason)
        self.logger.debug("%s: connection refused: %s", self.client, reason)
        self._deaf = True
        self._unset_keepalive_if_required()
        if self._awaited == "body":
            answerable = not (self.pipeline or self.cycle.response_started)
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        elif self._all_answered():
            answerable = True
        else:
            self.cycle.keep_alive = False  # uvicorn closes after the last answer
            return
        if problem is not None and answerable:
            self._answer(problem, detail)
        else:
            self._close()

    def _answer(
        self, problem: _Problem, detail: str, members: Mapping[str, object] | None = None
    ) -> None:
        body = json.dumps(
            {
                "type": PROBLEM_PREFIX + problem.slug,
                "title": problem.title,
                "status": problem.status.value,
                "detail": detail,
                **(members or {}),
            }
        ).encode()
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/problem+json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        if members and "retry_after" in members:
            headers.append((b"retry-after", str(members["retry_after"]).encode()))
        lines = [f"HTTP/1.1 {problem.status.value} {problem.status.phrase}".encode()]
        lines += [name + b": " + value for name, value in headers]
        self.transport.write(b"\r\n".join([*lines, b"", body]))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._linger_timer = self.loop.call_later(_LINGER, self.transport.abort)

    def _close(self) -> None:
        self._deaf = True
        self.transport.close()
        if self.transport.get_write_buffer_size():
            self._watch_writing()  # closing waits until these are read

    def _all_answered(self) -> bool:
        return not self.pipeline and (self.cycle is None or self.cycle.response_complete)

    def _header_too_large(self) -> bool:
        return (
            self._header_bytes > self._limits.max_header_bytes
            or self._num_headers > self._limits.max_headers
        )

    def _stop_timers(self) -> None:
        for timer in (self._read_timer, self._write_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        self._read_timer = self._write_timer = self._linger_timer = None
