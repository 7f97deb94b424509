"""Servers killed at every durable step, time and again: nothing is lost, nothing counts twice.

Real processes and real HTTP. In every round each device sends a vector that is zero but at one
coordinate, which is its own in that round, so the last model itself says what was counted: 1 where
an upload is in it, 0 where it is not, and 2 where it was counted twice.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from fedpress_server.failpoints import POINTS
from tests.system.forked_server import ForkedServer
from tests.system.one_hot_fleet import Fleet

PATIENCE = 120.0
BATCH = 2
"""Uploads added up together, so that every round has two sums of batches."""
WORKER_POINTS = (
    "job-leased",
    "upload-added",
    "sum-kept",
    "sum-committed",
    "model-stepped",
    "model-kept",
    "round-committed",
)
API_POINTS = ("body-begun", "upload-kept", "upload-committed", "request-answered")
ANYWHERE = ("file-kept", "commit-due", "committed")
"""Reached by whoever writes."""
LOCAL = ("file-written",)
"""Reached where files are written in a folder."""
ELSEWHERE = ("device-changed", "models-given-up", "events-dropped")
"""Of devices: `test_key_changes`; of collections: `test_killed_collections`."""
EVERY = 12
"""Passes through a point of ANYWHERE, or through "request-answered", until the kill, at most."""


def test_every_failpoint_is_killed_at() -> None:
    assert {*WORKER_POINTS, *API_POINTS, *ANYWHERE, *LOCAL, *ELSEWHERE} == set(POINTS)


@dataclass
class Slot:
    """A server that is killed at its points in turn, and begins again each time."""

    server: ForkedServer
    points: Iterator[str]
    armed: str = ""

    def start(self, *, is_armed: bool) -> None:
        self.armed = next(self.points) if is_armed else ""
        self.server.start(self.armed)


def in_turn(points: Sequence[str], chance: random.Random) -> Iterator[str]:
    """All points in an order drawn anew each time, each to kill at a pass that is drawn."""
    while True:
        for name in chance.sample(points, len(points)):
            often = name in ANYWHERE or name == "request-answered"
            yield f"{name}:kill:{chance.randint(1, EVERY if often else 3)}"


def killed(slots: list[Slot], apis: list[ForkedServer], kills: int) -> tuple[Counter[str], int]:
    """Let devices take part while servers are killed `kills` times; then let them come to an end.

    How often at which point, and how many uploads the last model is made of.
    """
    with ExitStack() as stack:
        for slot in slots:
            stack.callback(slot.server.kill)
            slot.start(is_armed=False)
        for slot in slots:
            slot.server.wait()
        clients = [stack.enter_context(httpx.Client(base_url=api.url, timeout=30)) for api in apis]
        fleet = Fleet(clients, rounds=4 * (kills + 20))
        with fleet.taking_part():
            counted = disturb(slots, fleet, kills)
        return counted, fleet.check()


def disturb(slots: list[Slot], fleet: Fleet, kills: int) -> Counter[str]:
    """Kill until there were `kills`; in the end every server runs, and none is armed."""
    counted: Counter[str] = Counter()
    for slot in slots:
        slot.server.kill()
        slot.start(is_armed=True)
    last = time.monotonic()
    while counted.total() < kills:
        for slot in slots:
            if not slot.server.is_running:
                assert slot.server.was_killed, slot.server.log.read_text()[-3000:]
                counted[slot.armed.partition(":")[0]] += 1
                slot.start(is_armed=True)
                last = time.monotonic()
        fleet.check_failures()
        assert time.monotonic() < last + PATIENCE, (
            f"nobody gets to {[slot.armed for slot in slots]} after {counted}\n"
            + slots[0].server.log.read_text()[-3000:]
        )
        time.sleep(0.005)
    for slot in slots:
        slot.server.kill()
        slot.start(is_armed=False)
    for slot in slots:
        slot.server.wait()
    return counted


def told(counted: Counter[str], uploads: int, what: str) -> str:
    where = ", ".join(f"{name} {number}" for name, number in sorted(counted.items()))
    return f"{what}: {counted.total()} kills, {uploads} uploads, 0 lost, 0 doubled ({where})"


@pytest.mark.soak
@pytest.mark.slow
def test_a_server_on_sqlite_killed_at_every_step_loses_and_doubles_nothing(
    tmp_path: Path, soak: bool, record_property: Callable[[str, object], None]
) -> None:
    points = (*API_POINTS, *WORKER_POINTS, *ANYWHERE, *LOCAL)
    server = ForkedServer(tmp_path / "server", {}, batch=BATCH)
    slot = Slot(server, in_turn(points, random.Random(5)))
    counted, uploads = killed([slot], [server], 200 if soak else 20)
    assert counted.keys() == set(points)
    check_nothing_is_left(server)
    record_property("figure", told(counted, uploads, "SQLite"))


def check_nothing_is_left(server: ForkedServer) -> None:
    """A start has removed all files that kills left behind."""
    server.start()
    server.wait()
    assert server.stop() == 0
    left = [path for path in (server.data_dir / "uploads").rglob("*") if path.is_file()]
    left += list(server.data_dir.rglob("*.tmp"))
    assert not left


@pytest.mark.soak
@pytest.mark.slow
def test_two_apis_and_two_workers_on_postgresql_killed_at_every_step_lose_and_double_nothing(
    place: Mapping[str, str],
    tmp_path: Path,
    soak: bool,
    record_property: Callable[[str, object], None],
) -> None:
    def slot(role: str, number: int, points: Sequence[str]) -> Slot:
        settings = {**place, "role": role}
        server = ForkedServer(tmp_path / f"{role}{number}", settings, batch=BATCH)
        return Slot(server, in_turn(points, random.Random(f"{role}{number}")))

    apis = [slot("api", number, (*API_POINTS, *ANYWHERE)) for number in (1, 2)]
    workers = [slot("worker", number, (*WORKER_POINTS, *ANYWHERE)) for number in (1, 2)]
    servers = [each.server for each in apis]
    counted, uploads = killed([*apis, *workers], servers, 100 if soak else 10)
    if soak:
        assert counted.keys() == {*API_POINTS, *WORKER_POINTS, *ANYWHERE}
    record_property("figure", told(counted, uploads, "PostgreSQL"))
