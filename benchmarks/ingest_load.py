"""Many clients of one server over plain sockets: requests are made and signed before the clock
starts, and answers are read for their status and their length alone."""

from __future__ import annotations

import asyncio
import heapq
import random
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import count
from math import inf
from typing import Any, NamedTuple, TypeVar

from fedpress_protocols.signatures import Content, DeviceKey, Target, sign_request

AUTHORITY = "fedpress.benchmark"
"""The authority that all requests are signed for, whatever port they go to."""

T = TypeVar("T")
_END = b"\r\n\r\n"
_LENGTH = re.compile(rb"content-length: *([0-9]+)", re.IGNORECASE)
_WINDOW = re.compile(rb"retry-window: *([0-9.]+)-([0-9.]+)", re.IGNORECASE)
_AFTER = re.compile(rb"retry-after: *([0-9]+)", re.IGNORECASE)
_OPENING = 200
"""Connections that are opened at a time."""
_IDLE = 5.0
"""Seconds for which httpx, and so the SDK, keeps a connection that nothing is asked over."""


def request_of(
    key: DeviceKey, method: str, path: str, body: bytes = b"", *, token: str = "", kind: str = ""
) -> bytes:
    """A signed request as it goes over the wire; with the bearer `token`, if there is one."""
    headers = {"Host": AUTHORITY, "Content-Type": kind or "application/octet-stream"}
    target = Target(method, AUTHORITY, *path.split("?"))
    nonce = secrets.token_bytes(16)
    headers |= sign_request(key, target, Content.of(body), created=int(time.time()), nonce=nonce)
    return _written(method, path, headers | _bearer(token), body)


def plain_request(method: str, path: str, token: str, body: bytes = b"", kind: str = "") -> bytes:
    """A request of the operator's."""
    headers = {"Host": AUTHORITY, "Content-Length": str(len(body))}
    return _written(method, path, headers | {"Content-Type": kind} | _bearer(token), body)


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}


def _written(method: str, path: str, headers: dict[str, str], body: bytes) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode() + _END + body


class Answer(NamedTuple):
    status: int
    head: bytes
    body: bytes
    seconds: float


@dataclass
class Load:
    """Answers in the order of their requests; seconds on the clock, and of this process's CPU."""

    answers: list[Answer]
    seconds: float
    cpu_seconds: float


class _Line(asyncio.Protocol):
    """A connection, kept alive: one request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self._data = bytearray()
        self._end = -1
        self._sent = 0.0
        self._answered: asyncio.Future[Answer] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def ask(self, request: bytes) -> asyncio.Future[Answer]:
        self._answered = asyncio.get_running_loop().create_future()
        self._sent = time.perf_counter()
        self.transport.write(request)
        return self._answered

    def data_received(self, data: bytes) -> None:
        self._data += data
        if self._end < 0:
            found = self._data.find(_END)
            if found < 0:
                return
            length = _LENGTH.search(self._data, 0, found)
            self._end = found + len(_END) + (int(length[1]) if length else 0)
        if len(self._data) < self._end or self._answered is None:
            return
        head, _, body = bytes(self._data[: self._end]).partition(_END)
        del self._data[: self._end]
        self._end = -1
        answered, self._answered = self._answered, None
        answered.set_result(Answer(int(head[9:12]), head, body, time.perf_counter() - self._sent))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(exc or ConnectionResetError("closed by the server"))


def running(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, on the fastest event loop that is installed."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if find_spec("uvloop"):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)


async def _opened(port: int, number: int) -> list[_Line]:
    loop, lines = asyncio.get_running_loop(), list[_Line]()
    while len(lines) < number:
        some = min(_OPENING, number - len(lines))
        made = [loop.create_connection(_Line, "127.0.0.1", port) for _ in range(some)]
        lines += [line for _, line in await asyncio.gather(*made)]
    return lines


def drive(port: int, requests: Sequence[bytes], connections: int) -> Load:
    """Send all `requests` over so many connections, each its next as soon as it has an answer."""

    async def work() -> Load:
        lines = await _opened(port, min(connections, len(requests)))
        answers: list[Answer | None] = [None] * len(requests)
        rest: Iterator[int] = iter(range(len(requests)))

        async def run(line: _Line) -> None:
            for index in rest:
                answers[index] = await line.ask(requests[index])

        began, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*map(run, lines))
        seconds, used = time.perf_counter() - began, time.process_time() - cpu
        for line in lines:
            line.transport.close()
        return Load([each for each in answers if each is not None], seconds, used)

    return running(work())


@dataclass
class Polls:
    """Seconds that polls took, beyond those that the server was asked to hold them; of those that
    news ended, seconds since the news."""

    seconds: list[float] = field(default_factory=list)
    told: list[float] = field(default_factory=list)
    late: float = 0.0
    """Seconds that this process itself was late, the most of all."""
    failed: Counter[str] = field(default_factory=Counter)
    """By the status of the answer, or by what became of the connection."""
    open: int = 0
    """The most connections at a time."""


class _Kept:
    """One client's connection: closed when it has been idle for as long as the SDK keeps one, or
    by the server, and made again when it is needed."""

    def __init__(self, port: int, found: Polls, lines: set[_Line]) -> None:
        self._port, self._found, self._lines = port, found, lines
        self._line: _Line | None = None
        self._ends: asyncio.TimerHandle | None = None

    async def ask(self, request: bytes) -> Answer:
        if self._ends is not None:
            self._ends.cancel()
        loop = asyncio.get_running_loop()
        line = self._line
        if line is None or line.transport.is_closing():
            self.close()
            _, line = await loop.create_connection(_Line, "127.0.0.1", self._port)
            self._line = line
            self._lines.add(line)
            self._found.open = max(self._found.open, len(self._lines))
        answer = await line.ask(request)
        self._ends = loop.call_later(_IDLE, self.close)
        return answer

    def close(self) -> None:
        if self._line is not None:
            self._lines.discard(self._line)
            self._line.transport.close()
            self._line = None


def poll(
    port: int,
    requests: Sequence[Callable[[], bytes]],
    first_within: float,
    until: float,
    held: float = 0.0,
    news: Callable[[], object] | None = None,
) -> Polls:
    """Clients that come once within `first_within` seconds and then as told, until `until`; each
    asks to be held for `held` seconds. At the end `news` are made, which those who are held hear.
    """
    found, order = Polls(), count()
    chance = random.Random(5)

    async def work() -> None:
        lines: set[_Line] = set()
        clients = [_Kept(port, found, lines) for _ in requests]
        began, loop = time.perf_counter(), asyncio.get_running_loop()
        due = [
            (began + chance.uniform(0, first_within), next(order), n) for n in range(len(clients))
        ]
        heapq.heapify(due)
        open_polls: set[asyncio.Task[None]] = set()
        news_at = inf

        async def ask(number: int) -> None:
            sent = time.perf_counter()
            try:
                answer = await clients[number].ask(requests[number]())
            except OSError as exc:
                found.failed[type(exc).__name__] += 1
                clients[number].close()
                heapq.heappush(due, (time.perf_counter() + 5.0, next(order), number))
                return
            now = time.perf_counter()
            if answer.status not in (200, 204):
                found.failed[str(answer.status)] += 1
            if now > news_at and answer.status == 200:
                found.told.append(now - news_at)
            else:
                found.seconds.append(max(0.0, now - sent - held))
            least, most = told(answer)
            heapq.heappush(due, (now + chance.uniform(least, most), next(order), number))

        while (now := time.perf_counter()) < began + until:
            if due and due[0][0] <= now:
                at, _, number = heapq.heappop(due)
                found.late = max(found.late, now - at)
                task = loop.create_task(ask(number))
                open_polls.add(task)
                task.add_done_callback(open_polls.discard)
                if len(open_polls) % 32:
                    continue
            await asyncio.sleep(0.001 if due and due[0][0] > now else 0)
        if news is not None:
            news_at = time.perf_counter()
            await loop.run_in_executor(None, news)
        await asyncio.gather(*open_polls)
        for client in clients:
            client.close()

    running(work())
    return found


def told(answer: Answer) -> tuple[float, float]:
    """The window that an answer tells its client to come back in, in seconds from now."""
    window = _WINDOW.search(answer.head)
    if window is not None:
        return float(window[1]), float(window[2])
    after = _AFTER.search(answer.head)
    seconds = float(after[1]) if after else 5.0
    return seconds, seconds
