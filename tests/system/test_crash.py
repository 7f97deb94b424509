"""A server killed at random moments ends with the very model of one that never was.

The real server process, real HTTP, real devices with their state on disk. Everything that may
differ between two runs (client ids, assignment ids, nonces, times) stays out of what is compared.
"""

from __future__ import annotations

import random
import sqlite3
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fedpress_client import Client, Model, Trained, TrainingRequest
from fedpress_client.state import StateDirectory
from fedpress_client.transport import HttpTransport, Retries
from fedpress_compression.compressors.delta import Delta
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.per_tensor import PerTensor
from fedpress_compression.compressors.topk import TopK
from fedpress_protocols.messages import DownlinkTerms, EnrolRequest, TaskConfig
from fedpress_protocols.plan import CohortRules, Profile, TrainingTerms
from fedpress_protocols.signatures import to_base64url
from tests.system.server_process import ServerProcess

sys.path.insert(0, str(Path(__file__).parents[2] / "client_sdk" / "examples"))
from numpy_softmax import SoftmaxTrainer, initial_model, make_trainer

CLIENTS = 4
PROFILE = Profile(
    name="device",
    compressor=ErrorFeedback(PerTensor(TopK(0.3, magnitude_bits=1), min_size=1)),
)
DIFFERENCES = Profile(name="device", compressor=Delta(TopK(0.3, magnitude_bits=1)))
"""Both ends have to agree on each device's last included upload."""
FEDAVGM = {"id": "fedavgm", "momentum": 0.5}
ONE_EPOCH = TrainingTerms(local_epochs=1)


@dataclass
class Outcome:
    """What must not depend on crashes."""

    model: str
    included: list[tuple[int, str, str]]
    """(round, client's name, digest of its body), in order."""
    attempts: int


class Pace:
    """Holds training back until the server was killed often enough for the round to begin, so that
    all kills fall into the task however fast the machine is."""

    def __init__(self, kills: int, rounds: int) -> None:
        self.kills, self.rounds, self.killed = kills, rounds, 0
        self._changed = threading.Condition()

    def wait(self, number: int) -> None:
        due = self.kills * (number - 1) // self.rounds
        with self._changed:
            assert self._changed.wait_for(lambda: self.killed >= due, timeout=120)

    def count(self) -> None:
        with self._changed:
            self.killed += 1
            self._changed.notify_all()


def federate(
    folder: Path,
    rounds: int,
    kills: int,
    chance: random.Random,
    profile: Profile = PROFILE,
    strategy: dict[str, Any] = FEDAVGM,
    training: TrainingTerms = ONE_EPOCH,
    downlink: DownlinkTerms | None = None,
) -> Outcome:
    """Run a task to its end; kill and restart the server `kills` times on the way."""
    pace = Pace(kills, rounds)
    server = ServerProcess(folder)
    server.start()
    with server.operator() as operator:
        initial = initial_model()
        operator.register_model(initial)
        token = operator.create_token(uses=CLIENTS)
        clients = [device(server, folder, token, index, pace) for index in range(CLIENTS)]
        members = [enrolled(server, folder, token, index) for index in range(CLIENTS)]
        operator.create_task(
            TaskConfig(
                task="crash",
                model=initial.digest,
                rounds=rounds,
                profiles=(profile,),
                training=training,
                cohort=CohortRules(size=CLIENTS, minimum=CLIENTS),
                strategy=strategy,
                round_seconds=3600,
                members=tuple(members) if profile is DIFFERENCES else (),
                downlink=downlink,
                seed=7,
            )
        )
    failures: list[BaseException] = []
    threads = [threading.Thread(target=run, args=(client, failures)) for client in clients]
    for thread in threads:
        thread.start()
    try:
        while pace.killed < kills and not failures:
            # Short pauses hit the start and the recovery, longer ones uploads and aggregation.
            time.sleep(chance.choice([0.05, 0.2, 0.5, 1.0]) * chance.random())
            server.kill()
            pace.count()
            server.start(wait=chance.random() < 0.7)
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive(), "a device hangs"
    finally:
        for client in clients:
            client.stop()
        if server.is_running:
            server.kill()
    assert not failures, failures
    return outcome(server.data_dir)


def device(server: ServerProcess, folder: Path, token: str, index: int, pace: Pace) -> Client:
    state = folder / f"device-{index}"
    key = StateDirectory.open(state).key()
    return Client(
        server.url,
        PacedTrainer(index, pace),
        state_dir=state,
        task="crash",
        token=token,
        name=f"device-{index}",
        seed=100 + index,
        transport=HttpTransport(server.url, key, retries=Retries(base=0.05, cap=0.3)),
    )


def enrolled(server: ServerProcess, folder: Path, token: str, index: int) -> str:
    """The device's id; when it enrols itself, it is told the same."""
    key = StateDirectory.open(folder / f"device-{index}").key()
    transport = HttpTransport(server.url, key)
    request = EnrolRequest(public_key=to_base64url(key.public), name=f"device-{index}")
    found = transport.enrol(token, request).client_id
    transport.close()
    return found


class PacedTrainer:
    """The example's trainer, held back by `pace`."""

    honours = SoftmaxTrainer.honours

    def __init__(self, index: int, pace: Pace) -> None:
        self._trainer = make_trainer(seed=index, examples=60)
        self._pace = pace

    def train(self, model: Model, work: TrainingRequest) -> Trained:
        self._pace.wait(work.round)
        return self._trainer.train(model, work)

    def evaluate(self, model: Model) -> None:
        return None


def run(client: Client, failures: list[BaseException]) -> None:
    try:
        client.run()
    except BaseException as exc:
        failures.append(exc)


def outcome(data_dir: Path) -> Outcome:
    database = sqlite3.connect(data_dir / "fedpress.db")
    state, model = database.execute("SELECT state, model FROM tasks").fetchone()
    assert state == "finished"
    rows = database.execute(
        """SELECT a.round, c.name, u.digest FROM uploads u
           JOIN assignments a USING (assignment) JOIN clients c USING (client_id)
           WHERE json_extract(a.receipt, '$.receipt.outcome') = 'included' ORDER BY 1, 2"""
    ).fetchall()
    attempts = database.execute("SELECT count(*) FROM rounds").fetchone()[0]
    database.close()
    return Outcome(model, rows, attempts)


@pytest.mark.soak
@pytest.mark.slow
def test_a_killed_server_ends_with_the_same_model(
    tmp_path: Path, soak: bool, record_property: Callable[[str, object], None]
) -> None:
    rounds, kills = (30, 30) if soak else (10, 10)
    undisturbed = federate(tmp_path / "undisturbed", rounds, 0, random.Random(0))
    disturbed = federate(tmp_path / "disturbed", rounds, kills, random.Random(1))
    assert len(undisturbed.included) == rounds * CLIENTS
    assert disturbed.included == undisturbed.included
    assert disturbed.model == undisturbed.model
    assert undisturbed.attempts == disturbed.attempts == rounds
    record_property("figure", f"{kills} kills in {rounds} rounds: the same uploads, the same model")


@pytest.mark.soak(only=True)
def test_kills_leave_both_ends_together(tmp_path: Path) -> None:
    """Short of this, the tests of the server restart within one process."""
    rounds = kills = 20
    undisturbed = federate(tmp_path / "undisturbed", rounds, 0, random.Random(2), DIFFERENCES)
    disturbed = federate(tmp_path / "disturbed", rounds, kills, random.Random(3), DIFFERENCES)
    assert len(undisturbed.included) == rounds * CLIENTS
    assert disturbed == undisturbed
