"""Bodies checked and put on the disk beside the event loop, those that wait together.

The way to a thread and back, and the sync of a folder, cost the same for one body as for many.
While a thread has some in hand, others gather, and the next to be free takes its share of them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from fedpress_protocols.errors import FedpressError
from fedpress_server.storage.payloads import Payloads

T = TypeVar("T")
_BATCH = 16
"""Bodies that a thread takes at a time: with a slow disk the first waits for the last."""


@dataclass(slots=True, eq=False)
class _Body:
    """One that waits for a thread, and then what was found."""

    name: str
    data: bytes
    check: Callable[[], Any]
    written: asyncio.Future[None]
    found: Any = None
    failure: Exception | None = None

    def tell(self) -> None:
        if not self.written.done():  # or nobody waits any more
            self.written.set_result(None)

    def outcome(self) -> Any:
        """Return the result or raise the failure, once; neither is kept.

        An error refers to the frames that it passed, and they refer to this object: the body
        would outlive them all in that cycle.
        """
        result, failure = self.found, self.failure
        self.found = self.failure = None
        if failure is None:
            return result
        try:
            raise failure
        finally:
            del failure


class BodyWriter:
    """`threads` of its own, for whatever else there is to do about bodies too."""

    def __init__(self, payloads: Payloads, threads: int) -> None:
        self._payloads = payloads
        self._num_threads = threads
        self._threads = ThreadPoolExecutor(threads, "fedpress-check")
        self._most = _BATCH if payloads.is_local else 1  # a network is waited for by each
        self._waiting: deque[_Body] = deque()
        self._num_busy = 0

    def stop(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    async def run(self, work: Callable[..., T], *args: object) -> T:
        """Run `work` in a thread, and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    async def write(
        self, name: str, data: bytes, check: Callable[[], T | FedpressError]
    ) -> T | FedpressError:
        """Run `check` in a thread, and return its result; unless that is an error, `data` is
        durable under `name` when this returns. Raises as `check` does, and `Payloads.put`."""
        loop = asyncio.get_running_loop()
        body = _Body(name, data, check, loop.create_future())
        self._waiting.append(body)
        if self._num_busy < self._num_threads:
            self._num_busy += 1
            self._threads.submit(self._work, loop)
        await body.written
        result: T | FedpressError = body.outcome()
        return result

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        """Keep some of those that wait, in a thread, and see to the rest after others' work."""
        some = self._next_batch()
        self._write_all(some)
        goes_on = False
        if self._waiting:
            with suppress(RuntimeError):  # no work is taken any more
                self._threads.submit(self._work, loop)
                goes_on = True
        with suppress(RuntimeError):  # the loop has ended, and nobody waits
            loop.call_soon_threadsafe(self._tell, loop, some, goes_on)

    def _next_batch(self) -> list[_Body]:
        share = -(-len(self._waiting) // self._num_threads)
        some: list[_Body] = []
        with suppress(IndexError):  # another thread was faster
            while len(some) < max(1, min(share, self._most)):
                some.append(self._waiting.popleft())
        return some

    def _write_all(self, some: list[_Body]) -> None:
        accepted = []
        for body in some:
            try:
                body.found = body.check()
            except Exception as exc:
                body.failure = exc
                continue
            if not isinstance(body.found, FedpressError):
                accepted.append(body)
        failures = self._payloads.put_all([(body.name, body.data) for body in accepted])
        for body, failure in zip(accepted, failures, strict=True):
            body.failure = failure

    def _tell(self, loop: asyncio.AbstractEventLoop, some: list[_Body], goes_on: bool) -> None:
        for body in some:
            body.tell()
        if goes_on:
            return
        if self._waiting:  # they came while the thread was on its way out
            self._threads.submit(self._work, loop)
        else:
            self._num_busy -= 1
