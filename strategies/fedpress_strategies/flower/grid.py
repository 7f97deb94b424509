"""Between strategy and grid: replies as they arrive, nodes in order, clients drawn by a seed."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

_PULL_SECONDS = 0.05


class Arriving(Grid):
    """A grid whose replies come one by one, as they arrive, and whose nodes come in order."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

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
        """A grid that has a method `stream` with this signature is taken at its word; of any other
        replies are pulled until all have come or `timeout` seconds are over."""
        stream = getattr(self._grid, "stream", None)
        if stream is not None:
            yield from stream(messages, timeout=timeout)
            return
        waiting = set(self._grid.push_messages(messages))
        deadline = None if timeout is None else time.monotonic() + timeout
        while waiting and (deadline is None or time.monotonic() < deadline):
            came = list(self._grid.pull_messages(waiting))
            waiting.difference_update(reply.metadata.reply_to_message_id for reply in came)
            yield from came
            if not came:
                time.sleep(_PULL_SECONDS)


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
