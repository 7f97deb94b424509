"""The engines: apps of Flower run unchanged, and what a client does wrong stays its own."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp.strategy import FedAvg

from fedpress.simulate.engines import Engine, LocalEngine, ProcessEngine, Run
from fedpress.simulate.grid import Chance, Exchange, SimulatedGrid
from fedpress.simulate.replies import Record
from tests.flower import apps

logging.getLogger("flwr").setLevel(logging.ERROR)
CLIENTS = 6


def engine_of(kind: str, run: Run) -> Any:
    return LocalEngine(run) if kind == "local" else ProcessEngine(run, 2)


def on(
    kind: str,
    folder: Path,
    made: Any,
    serve: Callable[[SimulatedGrid], None],
    clients: int = CLIENTS,
    chance: Chance | None = None,
) -> list[Exchange]:
    """Run `serve` on a grid of an engine; the exchanges that it made."""
    seen: list[Exchange] = []

    def changed(exchange: Exchange) -> None:
        if exchange.is_over:
            seen.append(exchange)

    with Record(folder / "replies") as record:

        def served(engine: Engine) -> None:
            serve(
                SimulatedGrid(
                    engine, clients, record, chance or Chance(), changed, lambda report: None
                )
            )

        engine_of(kind, Run(made, clients, 7, {"rounds": 3}, folder)).run(served)
    return seen


@pytest.mark.parametrize("kind", ["local", "processes"])
def test_a_stock_app_runs_unchanged_and_keeps_its_state(kind: str, tmp_path: Path) -> None:
    context = Context(7, 0, {}, RecordDict(), {"rounds": 3})
    seen = on(kind, tmp_path, apps.Stock(), lambda grid: apps.server(grid, context))
    result = apps.LAST.pop("result")
    # Client i adds i + 1, so the mean rises by 3.5 in each round.
    np.testing.assert_allclose(result.arrays["w"].numpy(), 10.5, rtol=1e-6)
    turns = [found["turns"] for found in result.train_metrics_clientapp.values()]
    assert turns == pytest.approx([1.0, 2.0, 3.0])
    assert result.evaluate_metrics_clientapp[3]["mean"] == pytest.approx(10.5)
    assert [exchange.kind for exchange in seen] == ["train", "evaluate"] * 3
    assert all(exchange.answered == CLIENTS for exchange in seen)
    assert sorted(path.name for path in (tmp_path / "contexts").iterdir()) == list("123456")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("shared-")]


@pytest.mark.parametrize("kind", ["local", "processes"])
def test_bytes_are_those_of_flowers_records(kind: str, tmp_path: Path) -> None:
    def serve(grid: SimulatedGrid) -> None:
        FedAvg(fraction_evaluate=0.0).start(grid, apps.arrays(), num_rounds=1)

    (exchange,) = on(kind, tmp_path, apps.Stock(), serve)
    one = apps.arrays().count_bytes()
    assert 6 * one <= exchange.down_bytes < 6 * (one + 100)
    assert 6 * one <= exchange.up_bytes < 6 * (one + 100)
    assert exchange.link_bytes == (exchange.down_bytes + exchange.up_bytes) // 6


def test_the_pool_survives_whatever_a_client_does(tmp_path: Path) -> None:
    """One raises, one ends its process, one hangs; the others are answered for in time."""
    found: dict[int, Message] = {}

    def serve(grid: SimulatedGrid) -> None:
        strategy = FedAvg(fraction_evaluate=0.0)
        messages = list(strategy.configure_train(1, apps.arrays(), ConfigRecord(), grid))
        replies = grid.stream(messages, timeout=15)
        found.update((reply.metadata.src_node_id, reply) for reply in replies)

    (exchange,) = on("processes", tmp_path, apps.Unruly(), serve, clients=10)
    assert sorted(found) == [1, 2, 3, 4, 5, 7, 8, 9, 10]
    assert {n for n, r in found.items() if r.has_error()} == {1, 5}
    assert "RuntimeError: no data here" in exchange.failed[1]
    assert "its process ended with code 9" in exchange.failed[5]
    assert (exchange.answered, exchange.lost) == (7, 1)


def test_clients_asked_again_in_a_round_count_once(tmp_path: Path) -> None:
    def serve(grid: SimulatedGrid) -> None:
        for number, nodes in ((1, (1, 2, 3)), (1, (1, 2)), (2, (1, 2, 3))):
            strategy = FedAvg(fraction_evaluate=0.0)
            messages = strategy.configure_train(number, apps.arrays(), ConfigRecord(), grid)
            list(grid.stream([m for m in messages if m.metadata.dst_node_id in nodes]))

    first, again, second = on("local", tmp_path, apps.Late(), serve, clients=3)
    assert (first.asked, first.answered, first.lost, list(first.failed)) == (3, 1, 0, [1])
    assert (again.asked, again.answered, again.lost, again.failed) == (3, 3, 0, {})
    assert again.metrics["loss"] == 1.0
    assert [each.is_again for each in (first, again, second)] == [False, True, False]
    assert second.metrics == again.metrics


def test_an_app_that_cannot_be_built_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be built"):
        on(
            "processes",
            tmp_path,
            apps.Unbuildable(),
            lambda grid: apps.server(grid, Context(7, 0, {}, RecordDict(), {})),
        )


@pytest.mark.parametrize("kind", ["local", "processes"])
def test_a_run_that_was_stopped_asks_only_those_who_had_not_answered(
    kind: str, tmp_path: Path
) -> None:
    class Stopped(Exception):
        pass

    context = Context(7, 0, {}, RecordDict(), {"rounds": 3})

    def until_stopped(grid: SimulatedGrid) -> None:
        stream, turns = grid._engine.stream, iter(range(9))

        def broken(messages: Any, *, timeout: float | None = None) -> Any:
            for reply in stream(messages, timeout=timeout):
                if next(turns, None) is None:
                    raise Stopped
                yield reply

        grid._engine.stream = broken  # type: ignore[method-assign]
        apps.server(grid, context)

    with pytest.raises(Stopped):
        on(kind, tmp_path, apps.Stock(), until_stopped)
    asked: list[int] = []

    def noting(grid: SimulatedGrid) -> None:
        stream = grid._engine.stream

        def noted(messages: Any, *, timeout: float | None = None) -> Any:
            every = list(messages)
            asked.extend(message.metadata.dst_node_id for message in every)
            return stream(every, timeout=timeout)

        grid._engine.stream = noted  # type: ignore[method-assign]
        apps.server(grid, context)

    on(kind, tmp_path, apps.Stock(), noting)
    # Nine of 36 had answered: a round's training, and half of its evaluation.
    assert len(asked) == 36 - 9
    result = apps.LAST.pop("result")
    np.testing.assert_allclose(result.arrays["w"].numpy(), 10.5, rtol=1e-6)
    # Who was at work when the run was stopped is asked again; nobody loses a turn that counted.
    turns = [found["turns"] for found in result.train_metrics_clientapp.values()]
    assert turns == pytest.approx([1.0, 2.0, 3.0])


@pytest.mark.parametrize("kind", ["local", "processes"])
def test_messages_may_be_pushed_and_pulled(kind: str, tmp_path: Path) -> None:
    def serve(grid: SimulatedGrid) -> None:
        strategy = FedAvg(fraction_evaluate=0.0)
        messages = strategy.configure_train(1, apps.arrays(), ConfigRecord(), grid)
        waiting = set(grid.push_messages(messages))
        assert len(waiting) == CLIENTS
        came = []
        while waiting:
            replies = grid.pull_messages(waiting)
            assert replies
            waiting -= {reply.metadata.reply_to_message_id for reply in replies}
            came += replies
        assert sorted(reply.metadata.src_node_id for reply in came) == [1, 2, 3, 4, 5, 6]

    (exchange,) = on(kind, tmp_path, apps.Stock(), serve)
    assert exchange.answered == CLIENTS


def test_chance_loses_what_it_says_and_the_same_each_time(tmp_path: Path) -> None:
    fates = [Chance(0.4, 3).fate(call, node) for call in range(50) for node in range(40)]
    assert fates == [Chance(0.4, 3).fate(call, node) for call in range(50) for node in range(40)]
    shares = {fate: fates.count(fate) / len(fates) for fate in set(fates)}
    assert shares == pytest.approx({"answers": 0.6, "unreached": 0.2, "unheard": 0.2}, abs=0.04)

    def serve(grid: SimulatedGrid) -> None:
        FedAvg(fraction_evaluate=0.0).start(grid, apps.arrays(), num_rounds=4)

    seen = on("local", tmp_path, apps.Stock(), serve, 20, Chance(0.4, 3))
    for exchange in seen:
        lost = [n for n in range(1, 21) if Chance(0.4, 3).fate(exchange.number, n) != "answers"]
        assert exchange.lost == len(lost) == 20 - exchange.answered
