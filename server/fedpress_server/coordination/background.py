"""Background work of a server: services that may be cancelled, and work that may not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import Context, copy_context
from typing import Any, TypeVar

T = TypeVar("T")

_BESIDE_JOBS = 2


class Background:
    """The asyncio tasks and the threads of one server: as many as it has jobs at a time, and a few
    for what must not wait until a job is done."""

    def __init__(self, num_jobs: int) -> None:
        self._threads = ThreadPoolExecutor(num_jobs + _BESIDE_JOBS, "fedpress-aggregate")
        self._services: set[asyncio.Task[Any]] = set()
        self._running: set[asyncio.Task[Any]] = set()
        self._waiting: set[asyncio.Task[Any]] = set()
        self.stopping = False

    def serve(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a service, which may be broken off at any await."""
        self._start(work, self._services)

    def finish(
        self, work: Coroutine[Any, Any, T], *, on_behalf_of_all: bool = False
    ) -> asyncio.Task[T]:
        """Start what must come to its end, since disk and memory change in it together. What is
        done `on_behalf_of_all` is logged and traced on behalf of nobody."""
        return self._start(work, self._running, Context() if on_behalf_of_all else None)

    async def shielded(self, work: Coroutine[Any, Any, T]) -> T:
        """Memory and disk change together even if whoever asked goes away."""
        return await asyncio.shield(self.finish(work))

    async def in_thread(self, work: Callable[..., T], *args: Any) -> T:
        """Run `work(*args)` in a thread, with the caller's context (log fields included)."""
        run = copy_context().run
        return await asyncio.get_running_loop().run_in_executor(self._threads, run, work, *args)

    @contextmanager
    def until_stopping(self, refusal: Callable[[], Exception]) -> Iterator[None]:
        """Raise `refusal()` as soon as the server is to stop, whatever the block awaits then."""
        task = asyncio.current_task()
        if self.stopping or task is None:
            raise refusal()
        self._waiting.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self.stopping:
                raise
            task.uncancel()
            raise refusal() from None
        finally:
            self._waiting.discard(task)

    def release(self) -> None:
        """End the blocks of `until_stopping`: the server is about to stop."""
        if not self.stopping:
            self.stopping = True
            for task in tuple(self._waiting):
                task.cancel()

    async def stop(self) -> None:
        self.release()
        for service in self._services:
            service.cancel()
        while pending := self._services | self._running:
            await asyncio.gather(*pending, return_exceptions=True)
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    def _start(
        self,
        work: Coroutine[Any, Any, T],
        among: set[asyncio.Task[Any]],
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        task = asyncio.create_task(work, context=context)
        among.add(task)
        task.add_done_callback(among.discard)
        return task
