"""How replies are pulled from a grid that cannot stream them."""

import itertools
from collections.abc import Iterable

import pytest

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Message

from fedpress_compression.compressors.none import Uncompressed
from fedpress_flower.server import FedpressStrategy, Plan
from fedpress_flower.server.grid import Arriving
from tests.flower import apps
from tests.flower.fleet import Fleet


class SlowFleet(Fleet):
    """Replies can be pulled once `ready` seconds of its own clock are over."""

    def __init__(self, ready: float) -> None:
        super().__init__(apps.stock, 3)
        self.now, self.ready, self.pulled_at = 0.0, ready, list[float]()

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        self.pulled_at.append(self.now)
        return super().pull_messages(message_ids) if self.now >= self.ready else []


def replies_of(fleet: SlowFleet, timeout: float | None) -> list[Message]:
    strategy = FedpressStrategy(apps.FedAvg(), Plan(Uncompressed()))
    messages = strategy.configure_train(1, apps.arrays(), ConfigRecord(), fleet)
    grid = Arriving(fleet, clock=fleet.clock, sleep=fleet.sleep)
    return list(grid.send_and_receive(messages, timeout=timeout))


def test_a_long_round_is_asked_after_no_more_often_than_flower_does() -> None:
    fleet = SlowFleet(ready=600.0)
    assert len(replies_of(fleet, None)) == 3
    asked = fleet.pulled_at
    pauses = [after - before for before, after in itertools.pairwise(asked)]
    assert max(pauses) == pytest.approx(3.0)
    assert len([at for at in asked if at < 600.0]) < 600 / 3 + 50  # Flower: 200; 0.05 s: 12,000


def test_a_short_round_waits_for_a_tenth_of_its_time_at_most() -> None:
    fleet = SlowFleet(ready=1.0)
    assert len(replies_of(fleet, None)) == 3
    assert fleet.now <= 1.15


def test_a_reply_that_comes_at_the_last_moment_is_taken() -> None:
    fleet = SlowFleet(ready=7.5)
    assert len(replies_of(fleet, 7.5)) == 3
    silent = SlowFleet(ready=99.0)
    assert replies_of(silent, 7.5) == []
    assert silent.now == pytest.approx(7.5)
