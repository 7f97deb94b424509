"""Several starts in one run: each trains, and what clients hold back goes to no other model."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import strategy as flowers
from flwr.serverapp.strategy import Result

from fedpress.simulate.grid import SimulatedGrid
from fedpress_client.ledger_records import Discard
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.topk import TopK
from fedpress_flower.client import compression_mod
from fedpress_flower.server import FedpressStrategy, MaskedStrategy, Plan
from fedpress_protocols.signatures import DeviceKey
from fedpress_strategies import from_config
from tests.flower import apps
from tests.flower.fleet import StreamingFleet, record_of, reply
from tests.flower.masked_fleet import HALF, MaskedFleet, strategy_of
from tests.flower.test_engines import on

logging.getLogger("flwr").setLevel(logging.ERROR)
SIZE = 60
FEEDBACK = ErrorFeedback(TopK(fraction=0.1))
RATES = (1.0, 100.0, -7.0)
Make = Callable[[], FedpressStrategy]


def zeros() -> ArrayRecord:
    return record_of({"w": np.zeros(SIZE, np.float32)})


def values(result: Result) -> np.ndarray:
    found: np.ndarray = result.arrays["w"].numpy()
    return found


class Turns:
    """An app's training: a client's next step each time it is asked, times the rate; so many are
    `done` before."""

    def __init__(self, done: int = 0) -> None:
        self.turns: dict[int, int] = defaultdict(lambda: done)

    def __call__(self, message: Message, context: Context) -> Message:
        node = int(context.node_config["partition-id"])
        self.turns[node] += 1
        step = np.random.default_rng([self.turns[node], node]).normal(0, 0.1, SIZE)
        rate = float(message.content["config"].get("lr", 1.0))
        model = message.content["arrays"]["w"].numpy()
        return reply(message, {"w": model + np.float32(rate) * step.astype(np.float32)})


def fleet_of(folder: Path, done: int = 0, **options: Any) -> StreamingFleet:
    mod = compression_mod(state_dir=folder, durable=False, **options)
    app = ClientApp(mods=[mod])
    app.train()(Turns(done))
    return StreamingFleet(app, 3)


def made(inner: Any = None, **plan: Any) -> FedpressStrategy:
    inner = flowers.FedAvg(fraction_evaluate=0.0) if inner is None else inner
    return FedpressStrategy(inner, Plan(FEEDBACK, **plan))


def started(
    strategy: Any, grid: Any, rounds: int = 1, arrays: ArrayRecord | None = None, rate: float = 1.0
) -> Result:
    arrays = zeros() if arrays is None else arrays
    config = ConfigRecord({"lr": rate})
    result: Result = strategy.start(grid, arrays, rounds, 0.5, config)
    return result


def included(strategy: Any) -> list[int]:
    return [len(report.included) for report in strategy.reports]


def ours() -> FedpressStrategy:
    return FedpressStrategy(
        from_config({"id": "fedavgm", "momentum": 0.5}), Plan(FEEDBACK), fraction_evaluate=0.0
    )


def auto() -> FedpressStrategy:
    return FedpressStrategy(fraction_evaluate=0.0)


@pytest.mark.parametrize("make", [made, ours, auto], ids=["flower", "ours", "auto"])
@pytest.mark.parametrize("same", [False, True], ids=["new objects", "one object"])
@pytest.mark.parametrize("rounds", [1, 2])
def test_each_start_of_a_sweep_trains_as_it_would_alone(
    make: Make, same: bool, rounds: int, tmp_path: Path
) -> None:
    """No start sees what clients held back of another one's updates, nor its momentum."""
    fleet, one = fleet_of(tmp_path / "together"), make()
    for index, rate in enumerate(RATES):
        strategy = one if same else make()
        found = values(started(strategy, fleet, rounds, rate=rate))
        assert included(strategy)[-rounds:] == [3] * rounds
        alone = fleet_of(tmp_path / str(index), done=index * rounds)
        np.testing.assert_array_equal(found, values(started(make(), alone, rounds, rate=rate)))


def test_a_start_that_goes_on_is_one_training(tmp_path: Path) -> None:
    """Four starts of one round, each from the model of the one before, come to what one start of
    four rounds does: nothing that clients hold back is lost or sent twice."""
    whole = values(started(made(), fleet_of(tmp_path / "whole"), 4))
    for same in (False, True):
        fleet, one, arrays = fleet_of(tmp_path / str(same)), made(), zeros()
        for _ in range(4):
            strategy = one if same else made()
            arrays = started(strategy, fleet, arrays=arrays).arrays
            assert included(strategy)[-1:] == [3]
        assert np.array_equal(arrays["w"].numpy(), whole)
        ledger = fleet.ledger(1)
        assert (ledger.included, ledger.not_included, list(ledger.pending)) == (3, 0, ["4-1-1"])


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_reply_that_was_lost_before_a_start_is_sent_after_it(lost: int, tmp_path: Path) -> None:
    def fate(call: int, node: int) -> str:
        return "unheard" if (call, node) == (lost, 2) else "answers"

    whole, parts = fleet_of(tmp_path / "whole"), fleet_of(tmp_path / "parts")
    whole.fate = parts.fate = fate
    expected = values(started(made(), whole, 4))
    first = started(made(), parts, 2)
    found = values(started(made(), parts, 2, first.arrays))
    assert np.array_equal(found, expected)
    assert parts.ledger(2).not_included == 1


def test_a_client_that_sat_a_start_out_goes_on_with_what_it_holds(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path)
    first = started(made(), fleet, 2)
    before = fleet.ledger(3)
    fleet.fate = lambda call, node: "unreached" if node == 3 and call == 3 else "answers"
    second = started(made(), fleet, 1, first.arrays)
    started(made(), fleet, 1, second.arrays)
    after = fleet.ledger(3)
    assert before.residual is not None
    assert after.residual is not None
    assert list(after.pending) == ["3-1-3"]
    # Its last upload of the first start was in, and nobody has told it of that since.
    assert (after.included, after.not_included) == (2, 0)


def test_what_waits_for_another_training_is_reported(tmp_path: Path) -> None:
    told: list[Discard] = []
    fleet = fleet_of(tmp_path, on_discard=told.append)
    started(made(), fleet, 2)
    waiting = [fleet.ledger(node).residual for node in (1, 2, 3)]
    started(made(), fleet)
    assert {discard.reason for discard in told} == {"other-model"}
    assert sorted(discard.vector.tolist() for discard in told) == sorted(
        residual.tolist() for residual in waiting if residual is not None
    )


def test_a_message_of_an_earlier_start_is_refused(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path)
    started(made(), fleet, 2)
    late = fleet.sent[-1]
    node = late.metadata.dst_node_id
    started(made(), fleet)
    before = fleet.ledger(node)
    with pytest.raises(Exception, match="round 2 of the strategy's start 1 came after start 2"):
        fleet.app(late, fleet.contexts[node])
    assert fleet.ledger(node).to_bytes() == before.to_bytes()


def test_each_task_of_a_run_has_an_account_of_its_own(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path)
    first = started(made(), fleet)
    other = started(made(task="b"), fleet)
    strategy = made()
    started(strategy, fleet, 1, first.arrays)
    assert included(strategy) == [3]
    assert values(other).any()
    assert {path.parent.name for path in tmp_path.rglob("*.account")} == {"flower", "b"}
    assert fleet.ledger(1).included == 1


class Sweep:
    """Clients that train to something else if they are asked the same again."""

    def __init__(self, folder: Path) -> None:
        self.app = ClientApp(mods=[compression_mod(state_dir=folder, durable=False)])
        self.app.train()(self._train)
        self._turns: dict[tuple[Any, ...], int] = defaultdict(int)

    def _train(self, message: Message, context: Context) -> Message:
        config = message.content["config"]
        asked = (context.node_id, int(config["server-round"]), int(config["lr"]))
        self._turns[asked] += 1
        step = np.random.default_rng(asked).normal(0, self._turns[asked], SIZE)
        return reply(message, {"w": message.content["arrays"]["w"].numpy() + step.astype("f4")})

    def client_app(self) -> ClientApp:
        return self.app


def test_a_run_that_is_resumed_in_a_later_start_gets_the_same_bytes(tmp_path: Path) -> None:
    """The client whose reply was lost when the run stopped is asked again, and what it sent before
    is what it sends."""
    found: dict[str, list[np.ndarray]] = {}

    class Stopped(Exception):
        pass

    def swept(name: str) -> Callable[[SimulatedGrid], None]:
        def serve(grid: SimulatedGrid) -> None:
            found[name] = []
            for rate in (1.0, 5.0):
                result = started(made(seed=1), grid, 2, rate=rate)
                found[name].append(values(result))

        return serve

    def stopping(grid: SimulatedGrid) -> None:
        stream, turns = grid._engine.stream, iter(range(7))

        def broken(messages: Any, *, timeout: float | None = None) -> Any:
            for answer in stream(messages, timeout=timeout):
                if next(turns, None) is None:
                    raise Stopped
                yield answer

        grid._engine.stream = broken  # type: ignore[method-assign]
        swept("stopped")(grid)

    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    on("local", tmp_path / "whole", Sweep(tmp_path / "whole"), swept("whole"), 3)
    app = Sweep(tmp_path / "stopped")
    with pytest.raises(Stopped):
        on("local", tmp_path / "stopped", app, stopping, 3)
    on("local", tmp_path / "stopped", app, swept("stopped"), 3)
    for expected, each in zip(found["whole"], found["stopped"], strict=True):
        assert np.array_equal(each, expected)
    first, second = found["whole"]
    assert not np.array_equal(first, second)


# The inner strategy's own start


def test_the_inner_strategys_own_start_is_called(tmp_path: Path) -> None:
    plain = values(started(made(), fleet_of(tmp_path / "plain"), 2))
    inner = apps.Saving(fraction_evaluate=0.0)
    strategy = made(inner)
    result = started(strategy, fleet_of(tmp_path / "own"), 2)
    assert inner.saved is result
    assert inner.rounds == 2
    assert included(strategy) == [3, 3]
    assert np.array_equal(values(result), plain)
    assert type(inner).configure_train is flowers.FedAvg.configure_train


# Under masks


def masked(folder: Path) -> MaskedFleet:
    return MaskedFleet(folder, 4, Turns(), rules=None)


def test_a_masked_strategy_starts_again(tmp_path: Path) -> None:
    """From its own model or from another, and its sums go on."""
    fleet = masked(tmp_path)
    strategy = strategy_of(flowers.FedAvg(fraction_evaluate=0.0))
    first = started(strategy, fleet, 2)
    started(strategy, fleet, 2, first.arrays)
    assert fleet.ledger(1).included == 3
    started(strategy, fleet, 2)
    assert included(strategy) == [4] * 6
    ledger = fleet.ledger(1)
    assert list(ledger.pending) == ["3-2-1"]
    assert (ledger.included, ledger.not_included) == (4, 1)


def test_another_masked_strategy_of_the_run_needs_the_same_keys(tmp_path: Path) -> None:
    fleet = masked(tmp_path)
    key, authority = DeviceKey.generate(), DeviceKey.generate()

    def with_keys() -> MaskedStrategy:
        inner = flowers.FedAvg(fraction_evaluate=0.0)
        return strategy_of(inner, Plan(HALF, minimum=3), key=key, authority=authority)

    first = started(with_keys(), fleet)
    second = with_keys()
    started(second, fleet, 1, first.arrays)
    assert included(second) == [4]
    stranger = strategy_of(flowers.FedAvg(fraction_evaluate=0.0))
    started(stranger, fleet)
    assert included(stranger) == [0]
    (why, *_) = stranger.reports[0].dropped.values()
    assert "give every MaskedStrategy of a run the same `key` and `authority`" in why
