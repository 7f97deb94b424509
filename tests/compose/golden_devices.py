"""The devices of a golden archive go on where the release before has left them, over HTTP.

    python -m tests.compose.golden_devices URL DEVICES.JSON

What tests/server/test_releases.py has happen in one process, here through the proxy.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import httpx
import numpy as np

from fedpress_protocols.messages import Assignment, CheckInResponse
from fedpress_protocols.signatures import DeviceKey
from tests.devices import Device

T = TypeVar("T")


def until(attempt: Callable[[], T | None], what: str) -> T:
    give_up = time.monotonic() + 60
    while time.monotonic() < give_up:
        if (found := attempt()) is not None:
            return found
        time.sleep(0.2)
    raise SystemExit(f"{what} did not happen")


def assignment_of(device: Device) -> Assignment | None:
    answer = device.check_in("digits")
    return None if answer is None else answer.assignment


def main(url: str, file: Path) -> None:
    told = json.loads(file.read_text())
    with httpx.Client(base_url=url, timeout=60.0) as http:
        devices = []
        for each in told["devices"]:
            device = Device(http, time.time, DeviceKey.from_bytes(bytes.fromhex(each["key"])))
            device.client_id = each["client_id"]
            device.server_key = bytes.fromhex(each["server_key"])
            devices.append(device)
            receipt = device.receipt(each["included"])
            assert receipt is not None
            assert receipt.receipt.outcome == "included"
        statuses = [
            device.put(each["assignment"], bytes.fromhex(each["body"])).status_code
            for device, each in zip(devices, told["devices"], strict=True)
        ]
        assert statuses == [200, 201], statuses  # the first had come before

        def with_model_of(round_: int) -> CheckInResponse | None:
            answer = devices[0].check_in("digits")
            return answer if answer is not None and answer.task.round > round_ else None

        before = devices[0].model(told["model"]).parameters
        answer = until(lambda: with_model_of(1), "the second round's end")
        after = devices[0].model(answer.task.model).parameters
        mean, momentum = (0.5 - 0.25) / 2, 0.5 * (1.0 + 2.0) / 2
        np.testing.assert_allclose(after - before, mean + momentum, atol=1e-6)
        print("round 2, begun under the older release, has the sum of both devices' updates")

        for device in devices:
            given = until(partial(assignment_of, device), "an assignment of round 3")
            device.upload(given.assignment, device.body_for(given, np.zeros(12, np.float32)))

        def has_ended() -> bool | None:
            answer = devices[0].check_in("digits")
            return True if answer is not None and answer.task.state == "finished" else None

        until(has_ended, "the task's end")


main(sys.argv[1], Path(sys.argv[2]))
