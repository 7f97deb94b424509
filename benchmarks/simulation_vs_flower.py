"""The cost of the engines: ours against Flower's own, and both at the sizes that they are for.

    python benchmarks/simulation_vs_flower.py            # all of it, some minutes
    python benchmarks/simulation_vs_flower.py overhead   # or of ray, masked, memory, bytes
    python benchmarks/simulation_vs_flower.py --json FILE

overhead   an app that only echoes, 2,410 parameters, Flower's FedAvg, 1,000 clients, all of them in
           each of 3 rounds: CPU milliseconds a message of the whole process tree, in the rounds
           after the first, first on `processes`, then on Flower's engine by its own run_simulation
ray        1,000 clients, 10 % a round, 5 rounds of the digits on Flower's engine
masked     1,000 clients, 10 % a round, 5 rounds of the digits on `processes` under masks, a tenth
           of the clients lost on the way: bytes and CPU milliseconds of a client that was asked
memory     10,000 clients, 100 a round, 20 rounds of the digits on `processes`: the largest sum of
           what all processes hold, resident (RSS) and by share of what they share (PSS)
bytes      examples/flower, 1.1 M parameters, 10 clients, 40 rounds: without fedpress and with it.
           Bytes are those of replies as Flower sends them, its own framing included
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import multiprocessing
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from harness import parser, save

from fedpress.simulate.apps import FlowerApp, parse_app
from fedpress.simulate.engines import ProcessEngine, Run
from fedpress.simulate.grid import Chance, SimulatedGrid
from fedpress.simulate.replies import Record
from fedpress.simulate.run import Settings, simulate

CLIENTS, ROUNDS, WORKERS = 1000, 3, 2
_SHAPES = ((64, 32), (32,), (32, 10), (10,))
_TICK = os.sysconf("SC_CLK_TCK")


class Echo:
    """The app whose clients do nothing."""

    def client_app(self) -> ClientApp:
        app = ClientApp()

        @app.train()
        def echo(message: Message, context: Context) -> Message:
            metrics = MetricRecord({"num-examples": 16})
            content = RecordDict({"arrays": message.content["arrays"], "metrics": metrics})
            return Message(content, reply_to=message)

        return app


class Timed(FedAvg):
    """FedAvg that notes the CPU seconds of the tree at both ends of each sending."""

    def __init__(self) -> None:
        super().__init__(fraction_evaluate=0.0, min_train_nodes=CLIENTS)
        self.spent: list[float] = []
        self.wall: list[float] = []

    def configure_train(self, *args: Any, **kwargs: Any) -> Any:
        messages = list(super().configure_train(*args, **kwargs))
        self._cpu, self._time = cpu_of_tree(), time.perf_counter()
        return messages

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        came = list(replies)
        assert len([reply for reply in came if reply.has_content()]) == CLIENTS
        self.spent.append(cpu_of_tree() - self._cpu)
        self.wall.append(time.perf_counter() - self._time)
        return super().aggregate_train(server_round, came)


def served(grid: Grid) -> dict[str, Any]:
    arrays = ArrayRecord({str(i): Array(np.zeros(s, np.float32)) for i, s in enumerate(_SHAPES)})
    strategy = Timed()
    strategy.start(grid, arrays, num_rounds=ROUNDS)
    return {
        "cpu_ms_per_message": [round(1e3 * spent / CLIENTS, 3) for spent in strategy.spent],
        "wall_ms_per_message": [round(1e3 * wall / CLIENTS, 3) for wall in strategy.wall],
    }


def overhead_ours() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, Record(Path(folder) / "replies") as record:
        engine = ProcessEngine(Run(Echo(), CLIENTS, 7, {}, Path(folder)), WORKERS)

        def serve(streams: Any) -> None:
            grid = SimulatedGrid(
                streams, CLIENTS, record, Chance(), lambda exchange: None, lambda report: None
            )
            found.update(served(grid))

        engine.run(serve)
    return found


def overhead_flower() -> dict[str, Any]:
    from flwr.simulation import run_simulation

    found: dict[str, Any] = {}
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        found.update(served(grid))

    run_simulation(
        server_app,
        Echo().client_app(),
        CLIENTS,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": WORKERS, "object_store_memory": 400 * 2**20},
        },
    )
    return found


def on_ray() -> dict[str, Any]:
    settings = Settings(
        clients=1000, fraction=0.1, rounds=5, engine="ray", workers=WORKERS, partition="dirichlet:1"
    )
    with tempfile.TemporaryDirectory() as folder:
        history = simulate(settings, Path(folder))
    return history.summary()


def masked() -> dict[str, Any]:
    settings = Settings(
        clients=1000,
        fraction=0.1,
        rounds=5,
        workers=WORKERS,
        partition="dirichlet:1",
        secure=True,
        dropout=0.1,
    )
    with tempfile.TemporaryDirectory() as folder:
        before = cpu_of_tree()
        history = simulate(settings, Path(folder))
        cpu = cpu_of_tree() - before
    asked = sum(row.asked for row in history.rows)
    ups = sum(row.session_up_bytes or 0 for row in history.rows)
    downs = sum(row.session_down_bytes or 0 for row in history.rows)
    included = sum(row.included or 0 for row in history.rows)
    return {
        **history.summary(),
        "included": included,
        "cpu_ms_per_client": round(1e3 * cpu / asked, 1),
        "session_up_bytes_per_client": round(ups / asked),
        "session_down_bytes_per_client": round(downs / asked),
        "abandoned": sum(bool(row.abandoned) for row in history.rows),
    }


def memory() -> dict[str, Any]:
    settings = Settings(clients=10_000, fraction=0.01, rounds=20, workers=WORKERS)
    most = {"rss": 0, "pss": 0}
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.5):
            rss, pss = held_by_tree()
            most["rss"], most["pss"] = max(most["rss"], rss), max(most["pss"], pss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    with tempfile.TemporaryDirectory() as folder:
        before = cpu_of_tree()
        history = simulate(settings, Path(folder))
        cpu = cpu_of_tree() - before
    over.set()
    watcher.join()
    return {
        **history.summary(),
        "cpu_seconds": round(cpu, 1),
        "rss_mib": most["rss"] >> 20,
        "pss_mib": most["pss"] >> 20,
    }


class Framed(SimulatedGrid):
    """Counts replies as Flower deflates them to send: every object, with its head."""

    bytes = 0

    def stream(self, messages: Any, *, timeout: float | None = None) -> Iterator[Message]:
        for reply in super().stream(messages, timeout=timeout):
            self.bytes += framed(reply)
            yield reply


def framed(part: Any) -> int:
    children = part.children or {}
    return len(part.deflate()) + sum(framed(child) for child in children.values())


def rounds_of_example(kept: float) -> dict[str, Any]:
    """The example with this share of its values sent, or all as they are for 0."""
    example = parse_app(str(Path(__file__).parent.parent / "examples" / "flower"))
    assert isinstance(example, FlowerApp)
    config = {**example.config, "num-server-rounds": 40, "fraction-kept": kept, "downlink": False}
    found: dict[str, Any] = {"fraction_kept": kept}
    with tempfile.TemporaryDirectory() as folder, Record(Path(folder) / "replies") as record:
        config["fedpress-state-dir"] = folder
        app = dataclasses.replace(example, config=config)
        random.seed(0)
        printed = io.StringIO()

        def serve(engine: Any) -> None:
            grid = Framed(engine, 10, record, Chance(), lambda e: None, lambda report: None)
            with contextlib.redirect_stdout(printed):
                app.server_app()(grid, Context(7, 0, {}, RecordDict(), config))
            found["upload_bytes_framed"] = grid.bytes

        ProcessEngine(Run(app, 10, 7, config, Path(folder)), WORKERS).run(serve)
    last = [float(line.split()[3].strip(",")) for line in printed.getvalue().splitlines()]
    found["accuracy"], found["accuracy_mean_of_last_5"] = last[-1], sum(last[-5:]) / 5
    return found


def plain_bytes() -> dict[str, Any]:
    return rounds_of_example(0.0)


def pressed_bytes() -> dict[str, Any]:
    return rounds_of_example(0.005)


def tree() -> list[int]:
    """This process and all below it."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            parent = int(Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(name))
    found, rest = [], [os.getpid()]
    while rest:
        found.append(rest.pop())
        rest += children.get(found[-1], [])
    return found


def cpu_of_tree() -> float:
    """Seconds, those of processes that have ended among them."""
    total = 0.0
    for process in tree():
        try:
            text = Path(f"/proc/{process}/stat").read_text()
        except OSError:
            continue
        total += sum(map(int, text.rsplit(")", 1)[1].split()[11:15])) / _TICK
    return total


def held_by_tree() -> tuple[int, int]:
    """Bytes in memory, and bytes with what several share divided among them."""
    rss = pss = 0
    for process in tree():
        try:
            text = Path(f"/proc/{process}/smaps_rollup").read_text()
        except OSError:
            continue
        rows = dict(line.split(":") for line in text.splitlines()[1:])
        rss += 1024 * int(rows["Rss"].split()[0])
        pss += 1024 * int(rows["Pss"].split()[0])
    return rss, pss


def apart(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of `work` in a process of its own, so that nothing of another is measured."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_apart, args=(theirs, work))
    process.start()
    theirs.close()
    try:
        found: dict[str, Any] = ours.recv()
    except EOFError:
        process.join()
        sys.exit(f"{work.__name__} ended with code {process.exitcode}")
    process.join()
    return found


def _apart(pipe: Any, work: Callable[[], dict[str, Any]]) -> None:
    pipe.send(work())
    pipe.close()


def main() -> None:
    command = parser(__doc__)
    known = ["overhead", "ray", "masked", "memory", "bytes"]
    command.add_argument("parts", nargs="*", choices=[*known, []])
    asked = command.parse_args()
    parts = asked.parts or known
    found: dict[str, Any] = {}
    if "overhead" in parts:
        for name, work in (("processes", overhead_ours), ("flower", overhead_flower)):
            figures = apart(work)
            figures["steady_cpu_ms"] = round(
                sum(figures["cpu_ms_per_message"][1:]) / (ROUNDS - 1), 3
            )
            found[f"overhead_{name}"] = figures
            print(f"overhead on {name}: {figures}", flush=True)
    if "ray" in parts:
        found["ray"] = apart(on_ray)
        print(f"1,000 clients on Ray: {found['ray']}", flush=True)
    if "masked" in parts:
        found["masked"] = apart(masked)
        print(f"1,000 clients under masks: {found['masked']}", flush=True)
    if "memory" in parts:
        found["memory"] = apart(memory)
        print(f"10,000 clients on processes: {found['memory']}", flush=True)
    if "bytes" in parts:
        plain, pressed = apart(plain_bytes), apart(pressed_bytes)
        ratio = round(plain["upload_bytes_framed"] / pressed["upload_bytes_framed"], 1)
        found["bytes"] = {"plain": plain, "pressed": pressed, "ratio": ratio}
        print(f"bytes with Flower's framing: {found['bytes']}", flush=True)
    save(found, asked.json)


if __name__ == "__main__":
    main()
