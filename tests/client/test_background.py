"""A client in a thread of its own, from a thread and from asyncio."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpress import BackgroundRun, Client, ClientWaiting, Event, RoundAssigned, Summary
from fedpress_compression.compressors.none import Uncompressed
from fedpress_protocols.errors import ConfigurationError, StateLocked
from fedpress_protocols.model import Model
from tests.client.fake_server import FakeServer, RandomTrainer, make_client

PATIENCE = 60.0
"""Seconds after which a test fails, not that anything is expected to take."""


def fleet(rounds: int = 2, auto: int | None = 1) -> FakeServer:
    model = Model.from_tensors({"w": np.zeros(20, np.float32)})
    return FakeServer(model, lambda r, a: [Uncompressed()], rounds=rounds, auto=auto)


def endless(folder: Path) -> Client:
    """A client of a task whose first round never ends; it pauses as clients do."""
    return make_client(fleet(auto=None), RandomTrainer(20), folder, sleep=None)


def waiting(server: FakeServer, folder: Path) -> tuple[Client, BackgroundRun[Summary]]:
    """A client that runs, and has joined, uploaded and begun to wait."""
    waits = threading.Event()

    def on_event(event: Event) -> None:
        if isinstance(event, ClientWaiting):
            waits.set()

    client = make_client(server, RandomTrainer(20), folder, sleep=None, on_event=on_event)
    running = client.start()
    assert waits.wait(PATIENCE)
    return client, running


def test_a_run_beside_the_application_ends_with_the_summary(tmp_path: Path) -> None:
    seen: list[Event] = []
    client = make_client(fleet(), RandomTrainer(20), tmp_path, on_event=seen.append)
    running = client.start()
    summary = running.join(PATIENCE)
    assert (summary.included, summary.state) == (2, "finished")
    assert not running.is_running
    assert running.join() == summary == client.summary()
    assert any(isinstance(event, RoundAssigned) for event in seen)


def test_stop_ends_a_run_and_another_goes_on_from_there(tmp_path: Path) -> None:
    server = fleet(auto=None)
    client, running = waiting(server, tmp_path)
    assert running.is_running
    with pytest.raises(TimeoutError):
        running.join(0.01)
    running.stop()
    assert running.join(PATIENCE).state == "running"
    with pytest.raises(ConfigurationError, match="started before") as caught:
        client.start()
    assert "another Client" in caught.value.hint
    server.auto = 1
    server.close()
    again = make_client(server, RandomTrainer(20), tmp_path).start()
    assert again.join(PATIENCE).state == "finished"


def test_a_context_stops_and_waits(tmp_path: Path) -> None:
    with endless(tmp_path).start() as running:
        assert running.is_running
    assert not running.is_running


class Wrong(RandomTrainer):
    def train(self, model: Model, work: Any) -> Any:
        raise SystemExit("the application's own")  # no Exception, so no policy swallows it


def test_what_ends_the_run_comes_out_of_join(tmp_path: Path) -> None:
    running = make_client(fleet(), Wrong(20), tmp_path).start()
    for _ in range(2):
        with pytest.raises(SystemExit, match="the application's own"):
            running.join(PATIENCE)
    other = make_client(fleet(), Wrong(20), tmp_path / "b").start()
    with pytest.raises(SystemExit), other, pytest.raises(SystemExit):
        other.join(PATIENCE)


def test_the_error_of_the_block_is_the_one_that_is_raised(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), endless(tmp_path).start():
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), make_client(fleet(), Wrong(20), tmp_path / "b").start():
        raise ZeroDivisionError


def test_two_runs_on_one_folder_are_refused_by_the_second(tmp_path: Path) -> None:
    server = fleet(auto=None)
    with waiting(server, tmp_path)[1]:
        other = make_client(server, RandomTrainer(20), tmp_path).start()
        with pytest.raises(StateLocked):
            other.join(PATIENCE)


def test_a_callback_cannot_wait_for_its_own_end(tmp_path: Path) -> None:
    runs: list[BackgroundRun[Any]] = []
    began = threading.Event()

    def on_event(event: Event) -> None:
        assert began.wait(PATIENCE)
        runs[0].join()

    client = make_client(fleet(), RandomTrainer(20), tmp_path, on_event=on_event)
    runs.append(client.start())
    began.set()
    with pytest.raises(RuntimeError, match="cannot wait"):
        runs[0].join(PATIENCE)


def test_asyncio_waits_without_being_blocked(tmp_path: Path) -> None:
    async def main() -> Any:
        events: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def on_event(event: Event) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        client = make_client(fleet(), RandomTrainer(20), tmp_path / "a", on_event=on_event)
        running = client.start()
        kinds = [(await asyncio.wait_for(events.get(), PATIENCE)).kind for _ in range(3)]
        summary = await asyncio.wait_for(running, PATIENCE)

        async with endless(tmp_path / "b").start() as other:
            waits = asyncio.ensure_future(asyncio.wait_for(other, PATIENCE))
            await asyncio.sleep(0)
            waits.cancel()  # whoever waits may leave: the run goes on
            with pytest.raises(asyncio.CancelledError):
                await waits
            assert other.is_running
        assert not other.is_running
        return kinds, summary

    kinds, summary = asyncio.run(main())
    assert kinds[:2] == ["enrolled", "joined"]
    assert summary.included == 2


def test_asyncio_gets_the_error(tmp_path: Path) -> None:
    def fails(event: Event) -> None:
        raise ValueError("a callback of the application")

    async def main() -> None:
        client = make_client(fleet(), RandomTrainer(20), tmp_path, on_event=fails)
        await asyncio.wait_for(client.start(), PATIENCE)

    with pytest.raises(ValueError, match="a callback of the application"):
        asyncio.run(main())

    async def block(error: bool) -> None:
        client = make_client(fleet(), RandomTrainer(20), tmp_path / "b", on_event=fails)
        async with client.start():
            if error:
                raise ZeroDivisionError

    with pytest.raises(ValueError, match="a callback"):
        asyncio.run(block(error=False))
    with pytest.raises(ZeroDivisionError):
        asyncio.run(block(error=True))
