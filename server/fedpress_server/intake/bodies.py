"""Room in memory for bodies on their way: what has arrived takes it, and the slowest gives it up.

Anybody may announce a long body and send it slowly. So the length that a body announces takes no
room, it has to come at the rate that its length and its time ask for, and where there is no room
left the body that would take longest to come is put off.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from prometheus_client import Gauge

from fedpress_protocols.errors import FedpressError, RequestTimeout, Unavailable

MAX_PER_DEVICE = 4
"""Bodies of one device at a time."""
_DEVICE_SHARE = 4
"""A device may announce this part of the room in bodies beside its first."""
_GRACE = 1 / 20
"""Of the time for a body: before that its rate is nobody's concern."""
_RETRY_AFTER = 2


class Body:
    """One that has a place: `arrived` of `length` bytes are in memory, since `began_at` by the
    event loop's clock, where they are read."""

    def __init__(self, room: BytesInFlight, sender: str, device: str, length: int) -> None:
        self.sender, self.device, self.length = sender, device, length
        self.arrived = 0
        self.began_at = 0.0
        self._room = room
        self._reading: asyncio.Timeout | None = None
        self._is_evicted = False

    @property
    def is_evictable(self) -> bool:
        return self._reading is not None and not self._is_evicted and self.arrived > 0

    def seconds_in_all(self, now: float) -> float:
        """Estimate the seconds that the whole body takes at the rate so far."""
        return (now - self.began_at) * self.length / self.arrived

    @asynccontextmanager
    async def reading(self, seconds: float) -> AsyncIterator[Callable[[int], None]]:
        """While the body is read, which may take `seconds` in all: call what this gives with the
        bytes of each piece.

        Raises RequestTimeout for a body that comes too slowly, and Unavailable for one that is put
        off.
        """
        loop = asyncio.get_running_loop()
        self.began_at = loop.time()
        grace = seconds * _GRACE

        def due() -> float:
            share = self.arrived / self.length if self.length else 1.0
            return self.began_at + min(seconds, grace + seconds * share)

        def count(num_bytes: int) -> None:
            self.arrived += num_bytes
            self._room.grow(self, num_bytes)
            if self._reading is not None and not self._is_evicted:
                self._reading.reschedule(due())

        try:
            async with asyncio.timeout_at(due()) as self._reading:
                yield count
        except TimeoutError as exc:
            raise self._refusal(loop.time() - self.began_at, seconds) from exc
        finally:
            self._reading = None

    def fill(self) -> None:
        """Take room for the whole; raises Unavailable."""
        self.arrived = self.length
        self._room.grow(self, self.length)

    def evict(self) -> None:
        """Have its reader stop; its room is free from now on."""
        self._is_evicted = True
        self._room.release(self)
        if self._reading is not None:
            self._reading.reschedule(asyncio.get_running_loop().time())

    def _refusal(self, after: float, seconds: float) -> FedpressError:
        if self._is_evicted:
            return put_off("bodies in memory take all the room, and this one came slowest")
        return RequestTimeout(
            f"{self.arrived} of {self.length} bytes came in {after:.0f} s, and the whole is due "
            f"within {seconds:g} s at an even rate",
            hint="send the upload by parts, or compress it further",
        )


class BytesInFlight:
    """Limit on the upload bytes in memory, `limit` in all; a body alone always fits.

    One body at a time of each sender, MAX_PER_DEVICE of a device.
    """

    def __init__(self, limit: int, gauge: Gauge) -> None:
        self._limit = limit
        self._gauge = gauge
        self._held = 0
        self._bodies: dict[str, Body] = {}

    @contextmanager
    def hold(self, sender: str, num_bytes: int, device: str = "") -> Iterator[Body]:
        """A place for a body of `num_bytes`, which takes room as it arrives.

        Raises Unavailable (with `retry_after`) rather than give a sender or a device too many.
        """
        if sender in self._bodies:
            raise Unavailable("another body is on its way from here", retry_after=1)
        others = [each for each in self._bodies.values() if device and each.device == device]
        announced = num_bytes + sum(each.length for each in others)
        if others and (len(others) >= MAX_PER_DEVICE or announced > self._limit // _DEVICE_SHARE):
            raise Unavailable(
                f"{len(others)} other bodies are on their way from this device",
                hint="send one after the other",
                retry_after=1,
            )
        body = self._bodies[sender] = Body(self, sender, device, num_bytes)
        try:
            yield body
        finally:
            del self._bodies[sender]
            self.release(body)

    def grow(self, body: Body, num_bytes: int) -> None:
        """Make room for `num_bytes` that have arrived of `body`; raises Unavailable if that is the
        one to give way."""
        self._held += num_bytes
        while self._held > self._limit and self._held > body.arrived:
            slowest = self._slowest()
            if slowest is None or slowest is body:
                raise put_off("bodies in memory take all the room")
            slowest.evict()
        self._gauge.set(self._held)

    def release(self, body: Body) -> None:
        """The bytes of `body` are in memory no more."""
        self._held -= body.arrived
        body.arrived = 0
        self._gauge.set(self._held)

    def _slowest(self) -> Body | None:
        """Of the bodies that are being read, the one that takes longest at its rate so far."""
        some = [each for each in self._bodies.values() if each.is_evictable]
        now = asyncio.get_running_loop().time()
        return max(some, key=lambda each: each.seconds_in_all(now), default=None)


def put_off(detail: str) -> Unavailable:
    return Unavailable(detail, retry_after=_RETRY_AFTER)
