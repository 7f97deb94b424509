"""Between strategy and grid: replies as they arrive, nodes in order, clients drawn by a seed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 3.0
"""Seconds between two pulls; the longest is that of Flower's own grids."""
_PAUSE_SHARE = 0.1
"""Of the time waited so far: a pause delays a reply by a tenth at most."""


class Arriving(Grid):
    """A grid whose replies come one by one, as they arrive, and whose nodes come in order. Where
    `again` has another message for a client than the one that it replied to, that is sent, and the
    reply to it counts."""

    def __init__(
        self,
        grid: Grid,
        again: Callable[[Message], Message | None] = lambda reply: None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._grid, self._again, self._clock, self._sleep = grid, again, clock, sleep

    def set_run(self, run: Any) -> None:
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        return self._grid.run

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        return self._grid.create_message(*args, **kwargs)

    def get_node_ids(self) -> list[int]:
        return sorted(self._grid.get_node_ids())

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self._grid.pull_messages(message_ids)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        start = self._clock()
        left: list[Message] = []
        for reply in self._replies(messages, timeout):
            message = self._again(reply)
            if message is None:
                yield reply
            else:
                left.append(message)
        if left:
            if timeout is not None:
                timeout = max(timeout - (self._clock() - start), 0.0)
            for reply in self._replies(left, timeout):
                if self._again(reply) is None:
                    yield reply

    def _replies(self, messages: Iterable[Message], timeout: float | None) -> Iterator[Message]:
        """A grid that has a method `stream` with this signature is taken at its word; of any other
        replies are pulled until all have come or `timeout` seconds are over. Every pull is a
        request to the SuperLink, so the pauses between them grow with the time waited."""
        stream = getattr(self._grid, "stream", None)
        if stream is not None:
            yield from stream(messages, timeout=timeout)
            return
        waiting = set(self._grid.push_messages(messages))
        start = self._clock()
        while waiting:
            elapsed = self._clock() - start
            replies = list(self._grid.pull_messages(waiting))
            waiting.difference_update(reply.metadata.reply_to_message_id for reply in replies)
            yield from replies
            if replies:
                continue
            if timeout is not None and elapsed >= timeout:
                return
            pause = min(max(_PAUSE_SHARE * elapsed, _FIRST_PAUSE), _LONGEST_PAUSE)
            self._sleep(pause if timeout is None else min(pause, timeout - elapsed))


@contextmanager
def seeded(seed: int | None, server_round: int, what: str) -> Iterator[None]:
    """Flower's strategies draw their clients from Python's global generator; with a seed it begins
    at the same place for the same round, and is afterwards as it was."""
    if seed is None:
        yield
        return
    before = random.getstate()
    random.seed(f"{seed}|{server_round}|{what}")
    try:
        yield
    finally:
        random.setstate(before)
