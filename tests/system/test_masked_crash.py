"""A server that is killed in the middle of masked sessions: exact sums, and no update lost.

The real server process, real HTTP, real devices with their state on disk. What the models must be
is computed here, from the whole numbers that the devices prepared.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest

from fedpress_client import Event
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.shared_support import SharedSupport
from fedpress_protocols.masking.payload import Payload
from fedpress_protocols.messages import RoundStatus, TaskConfig
from fedpress_protocols.model import Model
from fedpress_protocols.plan import CohortRules, MaskingTerms, Profile, RoundPlan
from tests.masked import TASK, Participant, summed
from tests.system.server_process import ServerProcess

CLIENTS = 4
STEPS = ("ready", "advertise", "shares", "masked", "consent", "reveal")


class Killer:
    """Kills the server once, in each round at another step, as soon as a first device is past it;
    whoever asks meanwhile waits and asks again."""

    def __init__(self, server: ServerProcess, steps: list[str]) -> None:
        self._server, self._steps = server, steps
        self._lock = threading.Lock()
        self.killed: list[str] = []

    def heard(self, event: Event) -> None:
        step = event.details.get("step") if event.kind == "session" else None
        with self._lock:
            if self._steps and step == self._steps[0]:
                self.killed.append(self._steps.pop(0))
                self._server.kill()
                self._server.start()


def run(participant: Participant, failures: list[BaseException]) -> None:
    try:
        participant.start()
        assert participant.client is not None
        participant.client.run()
    except BaseException as exc:
        failures.append(exc)


@pytest.mark.soak
@pytest.mark.slow
def test_a_server_killed_at_every_step_of_a_session_sums_exactly(
    tmp_path: Path, soak: bool, record_property: Callable[[str, object], None]
) -> None:
    steps = list(STEPS) * (3 if soak else 1)
    kills = steps if soak else ["masked"]
    server = ServerProcess(tmp_path)
    server.start()
    killer = Killer(server, list(kills))
    model = Model.from_tensors({"w": np.linspace(-1, 1, 60, dtype=np.float32)})
    with server.operator() as operator:
        operator.register_model(model)
        operator.create_task(
            TaskConfig(
                task=TASK,
                model=model.digest,
                rounds=len(kills),
                lane="masked",
                masking=MaskingTerms(levels=127),
                profiles=(
                    Profile(name="one", compressor=ErrorFeedback(SharedSupport(fraction=0.5))),
                ),
                cohort=CohortRules(size=CLIENTS, minimum=CLIENTS),
                round_seconds=3600,
                seed=7,
            )
        )
        token = operator.create_token(uses=CLIENTS)
    participants = [
        Participant(tmp_path, number, token, httpx.HTTPTransport, time.time, url=server.url)
        for number in range(CLIENTS)
    ]
    failures: list[BaseException] = []
    threads = []
    for each in participants:
        each.on_event = killer.heard
        each.patience, each.wait, each.pause = 60.0, 1.0, time.sleep
        threads.append(threading.Thread(target=run, args=(each, failures)))
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join(300)
            assert not thread.is_alive(), "a device hangs"
    finally:
        for each in participants:
            if each.client is not None:
                each.client.stop()
        if server.is_running:
            with server.operator() as operator:
                statuses = operator.rounds(TASK)
            server.kill()
    assert not failures, failures
    assert killer.killed == kills
    check(server.data_dir, statuses, participants, model)
    abandoned = sum(status.state == "abandoned" for status in statuses)
    record_property(
        "figure",
        f"{len(kills)} kills inside masked sessions: {len(kills)} exact sums, {abandoned} "
        "sessions given up",
    )


def check(
    data_dir: Path, statuses: list[RoundStatus], participants: list[Participant], model: Model
) -> None:
    """Every committed round added up all four devices' integers, in the clear."""
    database = sqlite3.connect(data_dir / "fedpress.db")
    plans = {
        (number, attempt): RoundPlan.from_json(text)
        for number, attempt, text in database.execute("SELECT round, attempt, plan FROM rounds")
    }
    left = database.execute("SELECT count(*) FROM session_messages").fetchone()[0]
    database.close()
    assert left == 0  # what was said in sessions that are over is gone

    def parameters(digest: str) -> np.ndarray:
        data = (data_dir / "models" / f"{digest}.safetensors").read_bytes()
        return Model.from_bytes(data).parameters

    for status in statuses:
        assert status.state in ("committed", "abandoned")
        if status.model is None:
            continue
        plan = plans[status.round, status.attempt]
        previous = parameters(plan.model) - parameters(str(plan.previous_model))
        payload = Payload(plan, plan.public(model.spec, {"previous": previous}))
        held = [
            held
            for each in participants
            for held in each.plain.values()
            if (held.round, held.attempt) == (status.round, status.attempt)
        ]
        assert len(held) == status.included == CLIENTS
        base = parameters(plan.model).astype(np.float64)
        expected = (base + summed(payload, held)).astype(np.float32)
        np.testing.assert_array_equal(parameters(status.model), expected)
    for each in participants:
        assert each.ledger.included == len({s.round for s in statuses})
        assert not each.ledger.pending
