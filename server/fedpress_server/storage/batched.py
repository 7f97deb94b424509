"""Requests that wait at one moment share one transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Batched(Generic[K, V]):
    """Calls `work` with all the items that came while the call before it ran, at most `most`.

    `work` returns a value for each item, in order; what it raises, all its items raise. A call
    begins after its items came, so what it reads is as new as what each would have read alone.
    """

    def __init__(
        self, work: Callable[[Sequence[K]], Awaitable[Sequence[V]]], most: int = 512
    ) -> None:
        self._work = work
        self._most = most
        self._waiting: list[tuple[K, asyncio.Future[V]]] = []
        self._running: asyncio.Task[None] | None = None

    async def __call__(self, item: K) -> V:
        loop = asyncio.get_running_loop()
        value: asyncio.Future[V] = loop.create_future()
        self._waiting.append((item, value))
        if self._running is None or self._running.done():
            # On behalf of all of them: in nobody's context.
            self._running = Context().run(loop.create_task, self._run())
        return await value

    async def _run(self) -> None:
        while self._waiting:
            batch = self._waiting[: self._most]
            del self._waiting[: self._most]
            try:
                values = await self._work([item for item, _ in batch])
            except BaseException as exc:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(exc)
                if not isinstance(exc, Exception):
                    raise
            else:
                for (_, future), value in zip(batch, values, strict=True):
                    if not future.done():
                        future.set_result(value)
