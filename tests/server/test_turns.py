"""Many at about the same time: one transaction, and each its own answer."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from fedpress_protocols.errors import FedpressError, RoundClosed, UnknownDevice
from fedpress_protocols.messages import UploadAck
from fedpress_protocols.model import Model
from fedpress_server.coordination.commands import Happen, ReceivedUpload
from fedpress_server.rounds import UploadStaged
from fedpress_server.storage.records import UploadRecord
from tests.devices import Device, Operator
from tests.server.in_process import Server

pytestmark = pytest.mark.both_databases(short=True)


def test_uploads_of_many_are_all_staged_and_fill_the_round(
    http: Server, operator: Operator, enrolled: Callable[[], Device], model: Model
) -> None:
    operator.begin(model, cohort={"size": 12, "minimum": 1}, rounds=1)
    devices = [enrolled() for _ in range(12)]
    with ThreadPoolExecutor(12) as threads:
        assignments = list(threads.map(lambda device: device.assignment("digits"), devices))
        update = np.ones(model.spec.size, np.float32)
        bodies = [
            device.body_for(each, update) for device, each in zip(devices, assignments, strict=True)
        ]

        def upload(number: int) -> UploadAck:
            return devices[number].upload(assignments[number].assignment, bodies[number])

        acks = list(threads.map(upload, range(12)))
    assert len({each.assignment for each in assignments}) == 12
    for device, given, ack in zip(devices, assignments, acks, strict=True):
        again = device.upload(given.assignment, bodies[devices.index(device)])
        assert again == ack  # the very time that is on the disk
    [attempt] = operator.get("/v1/tasks/digits/rounds")
    assert (attempt["assigned"], attempt["received"]) == (12, 12)


def test_one_revoked_among_many_fails_alone(
    http: Server, operator: Operator, enrolled: Callable[[], Device], model: Model
) -> None:
    operator.begin(model, cohort={"size": 9, "minimum": 1})
    devices = [enrolled() for _ in range(4)]
    assignments = [device.assignment("digits") for device in devices]
    operator.post(f"/v1/admin/clients/{devices[1].client_id}/revoke")
    store = http.app.services.store

    async def all_at_once() -> list[Any]:
        def one(number: int) -> Any:
            given, digest = assignments[number], f"{number}" * 64
            key = (given.plan.task, given.plan.round, given.plan.attempt)
            upload = UploadRecord(given.assignment, digest, 10, 1, 0.0)
            sender = (str(devices[number].client_id), None)
            payload = ReceivedUpload(key, upload, {"received": 1}, sender)
            event = UploadStaged(given.assignment, digest)
            return store.apply(store.get("digits"), Happen(event, key, payload))

        return list(await asyncio.gather(*map(one, range(4)), return_exceptions=True))

    found = http.call(all_at_once)
    assert isinstance(found[1], UnknownDevice)
    assert all(found[number] for number in (0, 2, 3))
    assert not any(isinstance(found[number], FedpressError) for number in (0, 2, 3))
    [attempt] = operator.get("/v1/tasks/digits/rounds")
    assert attempt["received"] == 3


def test_who_comes_after_the_last_of_the_round_is_told_so(
    http: Server, operator: Operator, enrolled: Callable[[], Device], model: Model
) -> None:
    operator.begin(model, cohort={"size": 2, "minimum": 1, "over_selection": 3.0}, rounds=1)
    devices = [enrolled() for _ in range(3)]
    assignments = [device.assignment("digits") for device in devices]
    update = np.ones(model.spec.size, np.float32)
    for device, each in zip(devices[:2], assignments, strict=False):
        device.upload(each.assignment, device.body_for(each, update))
    body = devices[0].body_for(assignments[0], update)
    with pytest.raises(RoundClosed):
        devices[2].upload(assignments[2].assignment, body)
