"""How often enrolment may be tried: strangers cost little, and fleets get in all the same."""

from __future__ import annotations

import heapq
import json
import math
import random
from typing import Any

import pytest
import sqlalchemy as sa

from fedpress_client.transport import Retries
from fedpress_protocols.errors import FedpressError, InvalidToken, TooManyRequests
from fedpress_protocols.signatures import to_base64url
from fedpress_server.identity import limits as budgets
from fedpress_server.identity.admission import (
    FAILURES_PER_SECOND,
    LIST_SECONDS,
    MOST_FAILURES,
    MOST_TOKENS,
    EnrolmentLimits,
)
from fedpress_server.storage.tables import clients
from tests.devices import Device, Operator
from tests.server.in_process import Clock, Server, Start

NOW = 1_800_000_000.0


def tried(limits: EnrolmentLimits, address: str, token: str, now: float) -> float:
    """Seconds to wait; 0 for an attempt that was let through."""
    try:
        limits.place(address, token, now)
    except TooManyRequests as exc:
        return float(exc.members["retry_after"])
    return 0.0


def test_an_address_and_a_token_have_a_budget_for_failures_each() -> None:
    limits = EnrolmentLimits(100, 30)
    waits = [tried(limits, "192.0.2.1", f"token {n}", NOW) for n in range(40)]
    assert waits == [0.0] * 30 + [2.0] * 10
    assert tried(limits, "192.0.2.1", "another", NOW + 2) == 0
    assert tried(limits, "192.0.2.1", "another", NOW + 2) == 2
    limits = EnrolmentLimits(100, 30)
    waits = [tried(limits, f"192.0.2.{n}", "the same", NOW) for n in range(40)]
    assert waits == [0.0] * 30 + [2.0] * 10


def test_all_addresses_together_have_one_too() -> None:
    limits = EnrolmentLimits(100, 30)
    let_through = sum(
        not tried(limits, f"10.0.{n % 200}.{n // 200}", str(n), NOW) for n in range(5000)
    )
    assert let_through == MOST_FAILURES
    hour = sum(
        not tried(limits, f"{n}", f"{second}.{n}", NOW + second)
        for second in range(1, 61)
        for n in range(50)
    )
    assert hour == 60 * FAILURES_PER_SECOND


def test_what_turns_out_good_costs_nothing() -> None:
    limits = EnrolmentLimits(100, 30)
    for _ in range(100):
        limits.place("192.0.2.1", "good", NOW).was_good()
    assert tried(limits, "192.0.2.1", "bad", NOW) == 0


def test_memory_is_bounded() -> None:
    limits = EnrolmentLimits(100, 30)
    for n in range(3 * budgets._MOST_KEYS):
        tried(limits, f"address {n}", f"token {n}", NOW + n)
        limits.learn(f"good {n}")
    assert len(limits._of_address._spent) <= budgets._MOST_KEYS
    assert len(limits._of_token._spent) <= budgets._MOST_KEYS
    assert len(limits._good) == MOST_TOKENS


def seconds_until_all_are_in(fleet: int, limits: EnrolmentLimits, seed: int = 0) -> float:
    """Of devices that come at one moment with one good token, and wait as the SDK does."""
    chance, retries = random.Random(seed), Retries()
    coming = [(NOW, device, 0) for device in range(fleet)]
    heapq.heapify(coming)
    waited, last = [0.0] * fleet, NOW
    while coming:
        now, device, failures = heapq.heappop(coming)
        try:
            limits.admit(now)
        except TooManyRequests as exc:
            jitter = chance.random() * min(retries.cap, retries.base * 2.0**failures)
            pause = float(exc.members["retry_after"]) + jitter
            waited[device] += pause
            heapq.heappush(coming, (now + pause, device, failures + 1))
        else:
            last = now
    assert max(waited) < retries.patience
    return last - NOW


@pytest.mark.parametrize("fleet", [400, 5000])
def test_a_fleet_that_comes_at_once_gets_in(fleet: int) -> None:
    took = seconds_until_all_are_in(fleet, EnrolmentLimits(100, 30))
    assert took <= max(0.0, fleet - 500) / 100 + 120


# Over the API


def guess(http: Server, clock: Clock, token: str = "fpe_made_up") -> int:
    try:
        Device(http, clock).enrol(token)
    except (InvalidToken, TooManyRequests) as exc:
        return exc.status
    return 200


def test_guesses_are_put_off_and_good_tokens_pass(http: Server, clock: Clock) -> None:
    operator = Operator(http)
    known = operator.token(uses=100)
    Device(http, clock).enrol(known)
    found = [guess(http, clock, f"fpe_{n}") for n in range(40)]
    assert found == [401] * 30 + [429] * 10
    device = Device(http, clock)
    body = json.dumps({"public_key": to_base64url(device.key.public)}).encode()
    headers = {"Authorization": "Bearer fpe_x", "Content-Type": "application/json"}
    refused = device.request("POST", "/v1/enrol", body, headers)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "2")
    assert refused.json()["type"].endswith("too-many-requests")
    assert Device(http, clock).enrol(known)  # by the same address
    clock.advance(LIST_SECONDS)
    new = operator.token(uses=100)
    assert Device(http, clock).enrol(new)  # found in the list
    again = operator.token(uses=100)
    late = [guess(http, clock, again)]
    while late[-1] == 429:
        clock.advance(1)
        guess(http, clock)  # somebody else takes what is won back
        late.append(guess(http, clock, again))
    assert late[-1] == 200
    assert len(late) <= LIST_SECONDS + 1


class Counted:
    """The database as enrolment asks it."""

    def __init__(self, database: Any) -> None:
        self._database, self.reads, self.writes = database, 0, 0

    async def read(self, work: Any) -> Any:
        self.reads += 1
        return await self._database.read(work)

    async def write(self, work: Any) -> Any:
        self.writes += 1
        return await self._database.write(work)


def test_a_guess_writes_nothing_and_one_put_off_reads_nothing(
    http: Server, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    enrolment = http.app.services.enrolment
    count = Counted(enrolment._database)
    monkeypatch.setattr(enrolment, "_database", count)
    for n in range(30):
        assert guess(http, clock, f"fpe_{n}") == 401
    assert (count.reads, count.writes) == (30, 0)
    for n in range(100):
        assert guess(http, clock, f"fpe_more_{n}") == 429
    assert (count.reads, count.writes) == (31, 0)  # the list


def test_a_token_that_is_used_up_falls_among_the_failures(http: Server, clock: Clock) -> None:
    token = Operator(http).token(uses=2)
    devices = [Device(http, clock) for _ in range(2)]
    for device in devices:
        device.enrol(token)
    assert [guess(http, clock, token) for _ in range(40)] == [401] * 31 + [429] * 9
    clock.advance(10)
    assert devices[0].enrol(token).client_id == devices[0].client_id


def test_a_crowd_with_a_good_token_is_spread(start: Start, clock: Clock) -> None:
    with start(enrolments_per_second=2) as http:
        token = Operator(http).token(uses=100)
        crowd = [Device(http, clock) for _ in range(20)]
        seconds, waits = 0, []
        while crowd:
            left = []
            for device in crowd:
                try:
                    device.enrol(token)
                except TooManyRequests as exc:
                    waits.append(exc.members["retry_after"])
                    left.append(device)
            crowd = left
            clock.advance(1)
            seconds += 1
        assert 5 <= seconds <= 6
        assert {1} == set(waits)

        def count(connection: sa.Connection) -> int:
            return int(connection.scalar(sa.select(sa.func.count()).select_from(clients)) or 0)

        assert http.call(http.app.services.database.read, count) == 20


def test_the_errors_of_good_devices_keep_nobody_out(http: Server, clock: Clock) -> None:
    """A clock that is wrong, a body that was changed: the token was good all the same."""
    token = Operator(http).token(uses=100)
    Device(http, clock).enrol(token)
    for _ in range(60):
        device = Device(http, lambda: clock() - 4000)
        with pytest.raises(FedpressError) as caught:
            device.enrol(token)
        assert caught.value.slug == "clock-skew"
    assert Device(http, clock).enrol(token)


if __name__ == "__main__":
    for size in (1_000, 5_000, 20_000):
        took = seconds_until_all_are_in(size, EnrolmentLimits(100, 30))
        print(f"{size:6} devices at once, 100/s: all in after {math.ceil(took)} s")
