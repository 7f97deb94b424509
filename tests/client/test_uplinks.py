"""What a device finds its uplink to be, and tells of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpress_client.transport import News
from fedpress_compression.compressors.none import Uncompressed
from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.messages import Attribute, CheckInRequest, UploadAck, UploadFigures
from fedpress_protocols.model import Model
from fedpress_protocols.policies import TELLING, UPLINK
from tests.client.fake_server import FakeLink, FakeServer, RandomTrainer, make_client


class Slow(FakeLink):
    """A link of so many Mbit/s, by the clock that its device has."""

    def __init__(self, server: FakeServer, mbits: float) -> None:
        super().__init__(server)
        self.mbits, self.now = mbits, 1_800_000_000.0
        self.said: list[dict[str, Attribute]] = []

    def check_in(self, task: str, request: CheckInRequest) -> News:
        self.said.append(request.attributes)
        return super().check_in(task, request)

    def upload(
        self, assignment: str, body: bytes, figures: UploadFigures | None = None
    ) -> UploadAck:
        self.traffic.body_up += len(body)
        self.now += 8e-6 * len(body) / self.mbits
        return super().upload(assignment, body, figures)


def said(tmp_path: Path, size: int, **options: Any) -> list[dict[str, Attribute]]:
    """What a device says of itself at each check-in, over four rounds of bodies of 4 `size` bytes
    on a link of 2 Mbit/s."""
    model = Model.from_tensors({"w": np.zeros(size, np.float32)})
    server = FakeServer(model, lambda r, a: [Uncompressed()], rounds=4, auto=1)
    link = Slow(server, 2.0)
    trainer = RandomTrainer(size)
    make_client(server, trainer, tmp_path, link, clock=lambda: link.now, **options).run()
    return link.said


def test_a_device_tells_of_the_uplink_that_it_found(tmp_path: Path) -> None:
    told = said(tmp_path, TELLING, attributes={UPLINK: 900.0, "region": "north"})
    assert told[0] == {UPLINK: 900.0, "region": "north"}, "at first what it was declared to be"
    assert told[-1] == {UPLINK: 2.0, "region": "north"}


@pytest.mark.parametrize("uplink", ["nan", "fast", 0.0, -5.0, math.nan])
def test_an_uplink_that_is_no_speed_is_refused(tmp_path: Path, uplink: Attribute) -> None:
    with pytest.raises(ConfigurationError, match="where a number of Mbit/s is due"):
        said(tmp_path, 100, attributes={UPLINK: uplink})


def test_small_bodies_tell_nothing(tmp_path: Path) -> None:
    assert all(not each for each in said(tmp_path, 100))


def test_a_device_with_as_many_attributes_as_there_may_be_adds_none(tmp_path: Path) -> None:
    full = {f"a{index}": 1.0 for index in range(32)}
    assert all(each == full for each in said(tmp_path, TELLING, attributes=full))
