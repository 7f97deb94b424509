"""Load of a server, measured as the delay of its event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

_EVERY = 0.25


class Load:
    """`late`: seconds that the event loop took, beyond those asked for, to come back to a task that
    slept. A request that is ready waits as long before it is begun, and nothing that it does itself
    can tell."""

    def __init__(self) -> None:
        self.late = 0.0

    async def watch(
        self,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """Look again and again; to be cancelled."""
        while True:
            due = now() + _EVERY
            await sleep(_EVERY)
            self.late = max(0.0, now() - due)
