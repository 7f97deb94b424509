"""Room for bodies, with the event loop's own clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack

import pytest
from prometheus_client import CollectorRegistry, Gauge

from fedpress_protocols.errors import RequestTimeout, Unavailable
from fedpress_server.intake.bodies import MAX_PER_DEVICE, BytesInFlight

LONG = 3600.0


def room(limit: int) -> BytesInFlight:
    return BytesInFlight(limit, Gauge("bytes", "In memory.", registry=CollectorRegistry()))


async def sent(
    where: BytesInFlight, sender: str, length: int, first: int, go_on: asyncio.Event
) -> None:
    """A body whose first bytes come at once, and the rest after `go_on`."""
    with where.hold(sender, length) as place:
        async with place.reading(LONG) as count:
            count(first)
            await go_on.wait()
            count(length - first)


def test_an_announced_length_takes_no_room() -> None:
    async def work() -> None:
        where = room(1000)
        with where.hold("slow", 1000) as slow, where.hold("other", 1000) as other:
            async with slow.reading(LONG) as count, other.reading(LONG) as count_other:
                count(1)
                count_other(998)

    asyncio.run(work())


def test_the_slowest_gives_way_and_no_other() -> None:
    async def work() -> None:
        where, go_on = room(1000), asyncio.Event()
        slow = asyncio.create_task(sent(where, "slow", 900, 90, go_on))
        good = asyncio.create_task(sent(where, "good", 400, 380, go_on))
        await asyncio.sleep(0.05)
        with where.hold("new", 600) as place:
            async with place.reading(LONG) as count:
                count(600)
        with pytest.raises(Unavailable) as caught:
            await slow
        assert caught.value.members["retry_after"] > 0
        go_on.set()
        await good
        assert where._held == 0

    asyncio.run(work())


def test_one_that_is_slowest_itself_gives_way() -> None:
    async def work() -> None:
        where = room(1000)
        with where.hold("kept", 900) as kept:
            kept.fill()
            with pytest.raises(Unavailable), where.hold("slow", 200) as slow:
                async with slow.reading(LONG) as count:
                    count(200)
        assert where._held == 0

    asyncio.run(work())


def test_a_body_alone_always_fits() -> None:
    async def work() -> None:
        with room(10).hold("long", 1000) as place:
            async with place.reading(LONG) as count:
                count(1000)

    asyncio.run(work())


@pytest.mark.parametrize("first", [0, 500])
def test_a_body_below_its_rate_is_timed_out_before_its_time(first: int) -> None:
    async def slow() -> None:
        with room(1000).hold("slow", 1000) as place:
            async with place.reading(0.5) as count:
                count(first)
                await asyncio.sleep(LONG)

    with pytest.raises(RequestTimeout, match=f"{first} of 1000 bytes"):
        asyncio.run(slow())


def test_a_device_has_a_share_of_the_room() -> None:
    where = room(1000)
    with where.hold("a", 600, "one"):
        with pytest.raises(Unavailable, match="1 other bodies"), where.hold("b", 1, "one"):
            pass
        with where.hold("b", 600, "another"):
            pass
    with ExitStack() as stack:
        hold: Callable[[str], object] = lambda sender: stack.enter_context(  # noqa: E731
            where.hold(sender, 10, "one")
        )
        for number in range(MAX_PER_DEVICE):
            hold(str(number))
        with pytest.raises(Unavailable, match=f"{MAX_PER_DEVICE} other bodies"):
            hold("more")
