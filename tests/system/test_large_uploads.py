"""Large updates over links that break: what it costs, that they count once, that nothing changes.

The real server process, real HTTP, and a proxy in between that cuts where it is told to.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpress_client import Client, Model
from fedpress_client.transport import HttpTransport
from fedpress_compression.compressors.none import Uncompressed
from fedpress_protocols.messages import PartialUpload, TaskConfig
from fedpress_protocols.plan import CohortRules, Profile, TrainingTerms
from tests.system.chaos_proxy import ChaosProxy, Fault
from tests.system.large_device import make_device
from tests.system.server_process import ServerProcess

SIZE = 10_000_000
BODY = 4 * SIZE
SMALLER = 2_500_000
"""Parameters of the model in the other tests: a body beyond the size from which parts are used."""
CUTS = 20
PART = 2**20
HEADERS = 2048
"""A request's line and headers are no longer, nor is the JSON of one."""


def initial(size: int) -> Model:
    return Model.from_tensors({"w": np.zeros((size // 1000, 1000), np.float32)})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path_factory.mktemp("large"))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("FEDPRESS_MAX_PART_BYTES", str(PART))
        process.start()
        with process.operator() as operator:
            for size in (SIZE, SMALLER):
                operator.register_model(initial(size))
        yield process
        if process.is_running:
            process.kill()


def begin(server: ServerProcess, task: str, size: int) -> None:
    with server.operator() as operator:
        operator.create_task(
            TaskConfig(
                task=task,
                model=initial(size).digest,
                rounds=1,
                profiles=(Profile(name="whole", compressor=Uncompressed()),),
                training=TrainingTerms(local_epochs=1),
                cohort=CohortRules(size=1, minimum=1),
                round_seconds=3600,
                seed=7,
            )
        )


def device(server: ServerProcess, url: str, folder: Path, task: str, size: int) -> Client:
    with server.operator() as operator:
        token = operator.create_token(uses=1)
    return make_device(url, folder / task, task, token, size)


def model_of(server: ServerProcess, task: str) -> str:
    """Of the finished task; its one upload was counted once."""
    with server.operator() as operator:
        (status,) = operator.rounds(task)
        assert (status.received, status.included) == (1, 1)
        return operator.task(task).model


@pytest.fixture(scope="module")
def undisturbed(
    server: ServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], str]:
    """By size: the model that comes of it where nothing breaks."""
    made: dict[int, str] = {}

    def of(size: int) -> str:
        if size not in made:
            task = f"calm-{size}"
            begin(server, task, size)
            device(server, server.url, tmp_path_factory.mktemp("calm"), task, size).run()
            made[size] = model_of(server, task)
        return made[size]

    return of


Undisturbed = Callable[[int], str]


@pytest.mark.slow
def test_twenty_cuts_cost_no_more_than_the_parts_in_flight(
    server: ServerProcess, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    rng = random.Random(5)
    kinds: list[Fault] = ["reset", "mute"]
    cuts = [(rng.randrange(2**20, BODY), kinds[index % 2]) for index in range(CUTS)]
    proxy = ChaosProxy(server.port, cuts)
    begin(server, "cut", SIZE)
    sender = device(server, proxy.url, tmp_path, "cut", SIZE)
    sent: list[int] = []
    assert isinstance(sender._transport, HttpTransport)
    link: Any = sender._transport._parts
    send = link.send_part

    def counting(assignment: str, partial: str, offset: int, part: bytes) -> PartialUpload:
        sent.append(len(part))
        told: PartialUpload = send(assignment, partial, offset, part)
        return told

    link.send_part = counting
    summary = sender.run()
    proxy.close()
    assert len(proxy.met) == CUTS
    assert summary.included == 1
    assert model_of(server, "cut") == undisturbed(SIZE)
    assert max(sent) <= PART
    allowed = BODY + CUTS * PART + HEADERS * (len(sent) + 4 * CUTS + 20)
    assert BODY < proxy.bytes_up <= allowed
    assert summary.traffic.wire_up <= allowed


@pytest.mark.slow
def test_a_connection_that_stalls_is_left_for_another(
    server: ServerProcess, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """Both ends of the first stay open, as when a phone has changed its network."""
    proxy = ChaosProxy(server.port, [(3_000_000, "stall"), (6_000_000, "stall")])
    begin(server, "stall", SMALLER)
    summary = device(server, proxy.url, tmp_path, "stall", SMALLER).run()
    assert proxy.met == ["stall", "stall"]
    proxy.close()
    assert summary.included == 1
    assert model_of(server, "stall") == undisturbed(SMALLER)


@pytest.mark.slow
def test_a_server_killed_in_the_middle_keeps_what_it_acknowledged(
    server: ServerProcess, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    proxy = ChaosProxy(server.port, rate=1e7)
    begin(server, "killed", SMALLER)
    sender = device(server, proxy.url, tmp_path, "killed", SMALLER)
    outcome: list[Any] = []
    thread = threading.Thread(target=lambda: outcome.append(sender.run()), daemon=True)
    thread.start()

    def is_past(place: int) -> bool:
        return proxy.bytes_up > place or not thread.is_alive()

    kills = (2_000_000, 5_000_000, 8_000_000)
    try:
        for at in kills:
            until(partial(is_past, at))
            assert thread.is_alive()
            server.kill()
            server.start()
        thread.join(120)
    finally:
        sender.stop()
    proxy.close()
    assert outcome[0].included == 1
    assert model_of(server, "killed") == undisturbed(SMALLER)
    most = 4 * SMALLER + len(kills) * PART
    assert proxy.bytes_up < most + HEADERS * 100


@pytest.mark.slow
def test_a_device_killed_before_its_account_was_saved_begins_again(
    server: ServerProcess, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """Parts of a body have left that nobody knows any more: they never count."""
    begin(server, "unsaved", SMALLER)
    proxy = ChaosProxy(server.port, rate=2e7)
    folder = tmp_path / "unsaved"
    with server.operator() as operator:
        token = operator.create_token(uses=1)
    process = spawn(proxy.url, folder, "unsaved", token, "--hang")
    record = folder / "tasks" / "unsaved" / "outgoing.json"
    until(lambda: record.exists() and proxy.bytes_up > 2_000_000)
    process.kill()
    process.wait()
    partial = json.loads(record.read_text())["partial"]
    assert parts_of(server, partial)
    with server.operator() as operator:
        assert operator.rounds("unsaved")[0].received == 0
    assert not (folder / "tasks" / "unsaved" / "ledger.safetensors").exists()
    again = spawn(proxy.url, folder, "unsaved", token)
    assert again.wait(120) == 0
    proxy.close()
    assert not record.exists()
    assert not parts_of(server, partial)
    assert model_of(server, "unsaved") == undisturbed(SMALLER)


@pytest.mark.slow
def test_a_device_killed_after_its_account_was_saved_resumes(
    server: ServerProcess, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    begin(server, "saved", SMALLER)
    proxy = ChaosProxy(server.port, rate=4e6)
    folder = tmp_path / "saved"
    with server.operator() as operator:
        token = operator.create_token(uses=1)
    ledger = folder / "tasks" / "saved" / "ledger.safetensors"

    def is_past(place: int) -> bool:
        return ledger.exists() and proxy.bytes_up > place

    for at in (3_000_000, 7_000_000):
        process = spawn(proxy.url, folder, "saved", token)
        until(partial(is_past, at))
        process.kill()
        process.wait()
    assert spawn(proxy.url, folder, "saved", token).wait(120) == 0
    proxy.close()
    assert model_of(server, "saved") == undisturbed(SMALLER)
    assert proxy.bytes_up < 4 * SMALLER + 2 * PART + HEADERS * 100


def parts_of(server: ServerProcess, partial: str) -> list[Path]:
    return list((server.data_dir / "parts" / partial).glob("*"))


def spawn(url: str, folder: Path, task: str, token: str, *more: str) -> subprocess.Popen[bytes]:
    script = Path(__file__).with_name("large_device.py")
    arguments = [url, str(folder), task, token, str(SMALLER), *more]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen([sys.executable, str(script), *arguments], env=environment)


def until(holds: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.01)
