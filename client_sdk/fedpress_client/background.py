"""A client in a thread of its own: beside an application, a notebook or an event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Generic, TypeVar

_log = logging.getLogger(__name__)

_ResultT = TypeVar("_ResultT")


class BackgroundRun(Generic[_ResultT]):
    """A run that `Client.start` began; its result is the `Summary` that `Client.run` returns.

    `join` waits for it in a thread, `await` in asyncio. As a context, also with `async with`, it is
    stopped and joined at the end. The thread does not keep the process alive: what is on the disk
    when a process ends is consistent, and the next run goes on from there.
    """

    def __init__(self, run: Callable[[], _ResultT], stop: Callable[[], None]) -> None:
        self._run, self._stop = run, stop
        self._future: Future[_ResultT] = Future()
        self._future.set_running_or_notify_cancel()  # nobody who waits may cancel it
        self._thread = threading.Thread(target=self._work, name="fedpress-client", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            result = self._run()
        except BaseException as exc:
            _log.error("the client has ended", exc_info=exc)
            self._future.set_exception(exc)
        else:
            self._future.set_result(result)

    @property
    def is_running(self) -> bool:
        return not self._future.done()

    def stop(self) -> None:
        """Have the run end soon, see `Client.stop`; returns at once."""
        self._stop()

    def join(self, timeout: float | None = None) -> _ResultT:
        """Wait for the end and return the result, or raise what the run raised.

        Raises TimeoutError after `timeout` seconds, while the run goes on. Not from a callback of
        the client: that would wait for itself.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("a callback of the client cannot wait for the client's end")
        return self._future.result(timeout)

    def __await__(self) -> Generator[Any, None, _ResultT]:
        """As `join`, without blocking the event loop. A task that is cancelled while it waits does
        not stop the run."""
        return asyncio.wrap_future(self._future).__await__()

    def __enter__(self) -> BackgroundRun[_ResultT]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        if error is None:
            self.join()
        else:
            self._future.exception()  # the error of the block is the one to raise

    async def __aenter__(self) -> BackgroundRun[_ResultT]:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        try:
            await self
        except Exception:
            if error is None:
                raise
