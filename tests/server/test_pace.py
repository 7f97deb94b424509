"""Pace steering: the few meet, the many are spread, and nobody is forgotten."""

import asyncio
import heapq
import math
import random
from itertools import pairwise

import pytest

from fedpress_protocols.model import Model
from fedpress_server.coordination.load import Load
from fedpress_server.coordination.pace import Outcome, Pace
from tests.devices import Operator
from tests.server.in_process import Clock, Enrolled, Server

BUDGET = 200.0
PAUSE = 5.0


def arrivals(
    first: list[float], until: float, outcome: Outcome = "full", seconds: float = 0.001
) -> list[list[float]]:
    """By device, when it checks in: at its `first` time and then as it is told, `until` then."""
    chance = random.Random(7)
    pace, came = Pace(BUDGET, PAUSE), [list[float]() for _ in first]
    due = [(at, device) for device, at in enumerate(first)]
    heapq.heapify(due)
    while due and due[0][0] < until:
        now, device = heapq.heappop(due)
        came[device].append(now)
        pace = pace.heard(now, seconds)
        pace, window = pace.window(now, outcome)
        heapq.heappush(due, (now + chance.uniform(window.least, window.most), device))
    return came


def busiest(came: list[list[float]], since: float) -> int:
    """The most check-ins in any whole second after `since`."""
    counts: dict[int, int] = {}
    for times in came:
        for at in times:
            if at >= since:
                counts[math.floor(at)] = counts.get(math.floor(at), 0) + 1
    return max(counts.values())


def test_ten_thousand_who_come_at_once_are_spread_over_the_budget() -> None:
    came = arrivals([1000 + 0.0001 * device for device in range(10_000)], 1400.0)
    assert busiest(came, 1002.0) <= BUDGET
    pauses = [after - before for times in came for before, after in pairwise(times)]
    assert min(map(len, came)) >= 5
    assert max(pauses) <= 1.2 * 10_000 / (0.8 * BUDGET) + 2 * PAUSE


@pytest.mark.parametrize("outcome", ["accepted", "full", "none", "rejected"])
def test_five_devices_meet(outcome: Outcome) -> None:
    beats = 12 if outcome == "rejected" else 1
    came = arrivals([1000.2, 1001.0, 1002.5, 1003.1, 1003.9], 1000 + beats * 60, outcome)
    for meeting in list(zip(*came, strict=False))[1:]:
        assert max(meeting) - min(meeting) <= 1.5
    assert min(map(len, came)) >= 5


def test_who_comes_before_a_round_opens_meets_there() -> None:
    pace = Pace(BUDGET, PAUSE)
    for now in (1000.1, 1000.9, 1001.6):
        pace, window = pace.heard(now, 0.0).window(now, "full", opens_at=1003.0)
        assert 1003.0 <= now + window.least <= now + window.most <= 1004.1


def test_devices_of_no_use_are_in_nobodys_way() -> None:
    pace = Pace(BUDGET, PAUSE)
    for _ in range(10_000):
        pace, window = pace.heard(1000.0, 0.0).window(1000.0, "rejected")
    assert window.least > 10_000 / (BUDGET * 0.2)
    _, window = pace.window(1000.0, "full")
    assert window.most <= 2 * PAUSE


def test_a_slow_server_asks_fewer_to_come() -> None:
    pace = Pace(BUDGET, PAUSE)
    for number in range(1000):
        pace = pace.heard(1000 + number * 0.01, 2.5)
    assert pace.affordable == pytest.approx(0.1 * BUDGET, rel=0.05)
    for number in range(10_000):
        pace = pace.heard(1010 + number * 0.01, 0.01)
    assert pace.affordable == BUDGET


def test_a_clock_set_back_leaves_nobody_waiting() -> None:
    pace = Pace(BUDGET, PAUSE)
    for _ in range(100):
        pace, _ = pace.heard(10_000.0, 0.0).window(10_000.0, "full")
    _, window = pace.heard(1000.0, 0.0).window(1000.0, "full")
    assert window.most <= 3 * PAUSE


def test_no_device_is_sent_away_for_longer_than_an_hour() -> None:
    pace = Pace(0.01, PAUSE)
    for _ in range(1000):
        pace, window = pace.heard(1000.0, 0.0).window(1000.0, "full")
    assert window.least <= 3600.0


def test_how_late_the_event_loop_is_gets_noticed() -> None:
    clock, load, slept = Clock(), Load(), 0

    async def sleep(seconds: float) -> None:
        nonlocal slept
        slept += 1
        if slept == 3:
            raise asyncio.CancelledError
        clock.advance(seconds + (2.5 if slept == 2 else 0.0))

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(load.watch(clock, sleep))
    assert load.late == pytest.approx(2.5)


def test_a_server_whose_event_loop_is_late_asks_fewer_to_come(
    http: Server, operator: Operator, enrolled: Enrolled, model: Model
) -> None:
    operator.begin(model, cohort={"size": 1, "minimum": 1})
    device, other = enrolled(), enrolled()
    device.assignment("digits")
    check_ins = http.app.services.check_ins
    assert other.check_in("digits") is None
    assert check_ins._pace.affordable == check_ins._pace.budget
    check_ins.load = Load()  # and what watches, watches another
    check_ins.load.late = 60.0
    assert other.check_in("digits") is None
    assert check_ins._pace.affordable == pytest.approx(0.1 * check_ins._pace.budget)
