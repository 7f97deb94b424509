"""`fedpress simulate` from settings to history: build the app, choose the engine, run, go on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from rich.console import Console
from threadpoolctl import threadpool_limits

from fedpress.callbacks import Callback, Delivery, Result
from fedpress.command_line import read
from fedpress.simulate import flower_runtime as runtime
from fedpress.simulate.apps import ROUNDS, FlowerApp, TrainerApp, parse_app, sources, travelling
from fedpress.simulate.engines import Engine, LocalEngine, ProcessEngine, Run
from fedpress.simulate.grid import Chance, Exchange, SimulatedGrid
from fedpress.simulate.history import History, draw
from fedpress.simulate.partition import Partition
from fedpress.simulate.replies import Record
from fedpress.simulate.rows import Row
from fedpress.simulate.screen import Screen, print_summary
from fedpress.simulate.settings import OF_A_FLOWER_APP
from fedpress.simulate.settings import Settings as Settings
from fedpress.simulate.tasks import Task
from fedpress_client import MaskingRules
from fedpress_flower import envelope
from fedpress_flower.client import SEED, STATE_DIR
from fedpress_flower.server import FedpressStrategy, MaskedStrategy, Plan
from fedpress_protocols.errors import ConfigurationError, FedpressError, IncompatiblePlan
from fedpress_protocols.messages import DownlinkTerms, RoundStatus
from fedpress_protocols.plan import LEAST_MASKED
from fedpress_protocols.policies import Auto, automatic
from fedpress_protocols.signatures import DeviceKey
from fedpress_strategies import Strategy, from_config

TASK = "simulation"
_RUN_NAME = re.compile(r"\w(?:[\w .,%+=-]{0,62}[\w%])?")
_SETTINGS, _REPLIES, _SERVER = "settings.json", "replies", "server"
_CALLBACKS = "callbacks.json"
_DIGEST = "_sha256"


def simulate(
    settings: Settings,
    out: Path,
    *,
    name: str = "simulation",
    fresh: bool = False,
    screen: Screen | None = None,
    callbacks: Mapping[str, Callback] | None = None,
    shown: Console | None = None,
) -> History:
    """Run, or go on with what was stopped: histories in `out`, what clients keep in `out`/run until
    the run is complete. `callbacks`, by a name for warnings, receive each round once, over stops.
    The server of a task's file has its console open, and stays, where `shown` prints its address.
    Raises ConfigurationError; KeyboardInterrupt leaves all as it was to be."""
    folder, identity = (out / "run").absolute(), _identity(settings)
    _check(settings, identity, folder, fresh)
    delivery = Delivery(callbacks or {}, folder / _CALLBACKS, f"the run {name!r}")
    if settings.task is not None:
        return _of_task(settings, identity, out, folder, name, screen, delivery, shown)
    history = History(name, identity, link=settings.link)
    apps, server_app, config = _apps(settings, folder, history)
    if isinstance(apps, TrainerApp) and settings.auto is not None:
        history.budget = settings.auto.upload_bytes
    _begin(folder, identity)
    rounds = int(config.get(ROUNDS, settings.num_rounds))
    run = Run(apps, settings.clients, settings.run_id, config, folder)
    started = time.monotonic()
    delivery.begin(name, history.settings)
    undelivered = _Undelivered(history, delivery)

    def changed(exchange: Exchange) -> None:
        history.change(exchange)
        undelivered.deliver(but=1)
        if screen is not None:
            screen.update(history, rounds, exchange)

    def served(record: Record, engine: Engine) -> None:
        chance = Chance(settings.dropout, settings.seed)
        grid = SimulatedGrid(
            engine, settings.clients, record, chance, changed, history.round_closed
        )
        context = Context(run.run_id, 0, {}, RecordDict(), dict(config))
        # What an app draws for itself, such as the clients of a round, it draws again alike.
        random.seed(settings.seed)
        np.random.seed(settings.seed)  # noqa: NPY002 - the generator that Flower's strategies use
        with runtime.server_evaluations(history.tested):
            server_app(grid, context)

    try:
        # As in the pool and on Ray: the sums of a product may depend on how many threads share it.
        with threadpool_limits(1), Record(folder / _REPLIES) as record:
            _engine(settings, run).run(partial(served, record))
        history.complete = True
        undelivered.deliver()
        if screen is not None:
            screen.finish(history)
    finally:
        history.seconds = time.monotonic() - started
        history.write(out)
        delivery.end(_result(history))
    shutil.rmtree(folder)
    return history


class _Undelivered:
    """The rounds of a history that callbacks have not received."""

    def __init__(self, history: History, delivery: Delivery) -> None:
        self._history, self._delivery, self._count = history, delivery, 0

    def deliver(self, *, but: int = 0) -> None:
        """Deliver them, except the last `but`, whose figures are not complete."""
        while self._count < len(self._history.rows) - but:
            self._delivery.closed(self._history.rows[self._count])
            self._count += 1


def _result(history: History) -> Result:
    last = history.rows[-1].model if history.rows else None
    return Result(len(history.rows), history.complete, history.reason, last)


def _of_task(
    settings: Settings,
    identity: dict[str, Any],
    out: Path,
    folder: Path,
    name: str,
    screen: Screen | None,
    delivery: Delivery,
    shown: Console | None,
) -> History:
    """The run of a task's file, by the server and devices themselves."""
    from fedpress.simulate.server_task import ServerTask
    from fedpress.simulate.site import Site

    history = History(name, identity, link=settings.link)
    run = ServerTask.prepare(settings, folder)
    auto = automatic(run.config.policies)
    history.budget = None if auto is None else auto.upload_bytes
    _begin(folder, identity)
    started = time.monotonic()
    delivery.begin(name, history.settings)

    def closed(row: Row, attempts: list[RoundStatus]) -> None:
        history.rows.append(row)
        delivery.closed(row, attempts)
        if screen is not None:
            screen.round_closed(history, run.config.rounds)

    try:
        with threadpool_limits(1):
            history.reason = run.run(closed, None if shown is None else Site(shown))
        history.complete = True
    finally:
        history.seconds = time.monotonic() - started
        history.write(out)
        delivery.end(_result(history))
    shutil.rmtree(folder)
    return history


def sweep(
    settings: Settings,
    variations: list[dict[str, Any]],
    out: Path,
    *,
    fresh: bool = False,
    screen: Screen | None = None,
    callbacks: Mapping[str, Callback] | None = None,
) -> list[History]:
    """A run for each of `variations`, settings that differ and a `name`; each in a folder of its
    own. Those that are complete are not run again; all others are checked before the first one
    runs."""
    asked: dict[str, Settings] = {}
    for number, changes in enumerate(variations, 1):
        name = str(changes.get("name", number))
        if not _RUN_NAME.fullmatch(name):
            raise ConfigurationError(
                f"the sweep's run {number} has the name {name!r}, which cannot be a folder's",
                hint="give it 1 to 64 letters, digits, spaces and . , % + = - _, with a letter, a "
                "digit or _ at its beginning, and at its end one of these or %",
            )
        if name in asked:
            raise ConfigurationError(
                f"two runs of the sweep have the name {name!r}; give each its own"
            )
        rest = {key: value for key, value in changes.items() if key != "name"}
        with _naming(name):
            asked[name] = Settings.parse({**dataclasses.asdict(settings), **rest})
    done: dict[str, History | None] = {}
    for name, own in asked.items():
        with _naming(name):
            done[name] = None if fresh else _finished(out / name, name, own)
            if done[name] is None:
                check(own)
    histories = []
    for name, own in asked.items():
        with _naming(name):
            histories.append(
                done[name]
                or simulate(
                    own, out / name, name=name, fresh=fresh, screen=screen, callbacks=callbacks
                )
            )
    return histories


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Have an error say which run of a sweep it is about."""
    try:
        yield
    except ConfigurationError as exc:
        raise type(exc)(f"the sweep's run {name!r}: {exc.detail}", hint=exc.hint) from exc


def check(settings: Settings) -> None:
    """Make what the run would make before its first round; raises ConfigurationError."""
    if settings.task is None:
        _apps(settings, Path(), History("", {}))
        return
    from fedpress.simulate.server_task import ServerTask

    ServerTask.prepare(settings, Path())


def _identity(settings: Settings) -> dict[str, Any]:
    """The settings, and a digest of each file that they name: a run with a changed file is another.
    Raises ConfigurationError for a file that cannot be read, or an app that cannot be loaded."""
    files = {
        "task": [] if settings.task is None else [Path(settings.task)],
        "model": [] if settings.model is None else [Path(settings.model)],
        "app": [] if settings.app is None else sources(settings.app),
    }
    digests = {f"{name}{_DIGEST}": _digest(paths) for name, paths in files.items() if paths}
    return {**dataclasses.asdict(settings), **digests}


def _digest(files: Iterable[Path]) -> str:
    whole = hashlib.sha256()
    for file in files:
        whole.update(hashlib.sha256(read(file)).digest())
    return whole.hexdigest()


def _begin(folder: Path, identity: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _SETTINGS).write_text(json.dumps(identity, indent=2), encoding="utf-8")


def _finished(out: Path, name: str, settings: Settings) -> History | None:
    """The history of a run of these very settings and files that is complete; None if there is
    none that can be read."""
    identity = _identity(settings)
    try:
        document = json.loads((out / "history.json").read_bytes())
        if document["settings"] != identity or not document["complete"]:
            return None
        rows = [Row(**row) for row in document["history"]]
        for row in rows:  # whose keys JSON has made text
            row.failed = {int(node): reason for node, reason in row.failed.items()}
            failed = row.evaluation_failed
            row.evaluation_failed = {int(node): reason for node, reason in failed.items()}
        return History(
            name,
            document["settings"],
            rows,
            settings.link,
            document["seconds"],
            True,
            document.get("reason", ""),
            document.get("upload_budget"),
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _check(settings: Settings, identity: dict[str, Any], folder: Path, fresh: bool) -> None:
    """See that `folder` is a run of these settings that was stopped, or none; make it none if asked
    to, or if it never came to a reply. Raises ConfigurationError."""
    replies = folder / _REPLIES
    has_begun = (
        replies.exists() and replies.stat().st_size
        if settings.task is None
        else (folder / _SERVER).exists()
    )
    if folder.exists() and (fresh or not has_begun):
        shutil.rmtree(folder)
    if not folder.exists():
        return
    free = ("engine", "workers", "timeout", "link")
    path = folder / _SETTINGS
    try:
        before = {**json.loads(path.read_bytes())}
    except (OSError, ValueError, TypeError) as exc:
        raise ConfigurationError(
            f"{path}, of a run that was stopped, cannot be read: {exc}",
            hint="add --fresh to start again, or give another --out",
        ) from exc
    keys = [key for key in identity if key not in free and before.get(key) != identity[key]]
    other = [
        f"content of {identity[key.removesuffix(_DIGEST)]}" if key.endswith(_DIGEST) else key
        for key in keys
    ]
    if other:
        raise ConfigurationError(
            f"{folder} is a run that was stopped, with another {', '.join(other)}",
            hint="give the same settings, another --out, or --fresh to start again",
        )


def _engine(settings: Settings, run: Run) -> Any:
    if settings.engine == "local":
        return LocalEngine(run)
    if settings.engine == "processes":
        return ProcessEngine(run, settings.workers)
    init_args = {} if settings.workers is None else {"num_cpus": settings.workers}
    return runtime.RayEngine(
        run.apps.client_app(),
        run.clients,
        run.run_id,
        run.run_config,
        gpus=_gpus_for_each(settings),
        init_args=init_args,
    )


def _gpus_for_each(settings: Settings) -> float:
    """The part of a GPU that Ray is to keep for an actor."""
    if settings.device == "cpu":
        return 0.0
    import torch

    return 1 / (settings.workers or os.cpu_count() or 1) if torch.cuda.is_available() else 0.0


def _apps(
    settings: Settings, folder: Path, history: History
) -> tuple[FlowerApp | TrainerApp, ServerApp, dict[str, Any]]:
    """The client app's maker, the server app, and the run's configuration."""
    config: dict[str, Any] = {SEED: settings.seed, STATE_DIR: str(folder / "clients")}
    common = (TASK, settings.terms, settings.seed, settings.clients, str(folder / "clients"))
    rules = _rules(settings) if settings.secure else None
    if settings.app is not None:
        parsed = parse_app(settings.app)
        if isinstance(parsed, FlowerApp):
            server_app = parsed.server_app()
            if settings.secure:
                raise ConfigurationError(
                    "--secure is for built-in tasks and for trainers; a Flower app masks by itself",
                    hint="use MaskedStrategy and masking_mod in it, see docs/flower.md",
                )
            if options := settings.changed(*OF_A_FLOWER_APP):
                raise ConfigurationError(
                    f"{options} cannot be combined with a Flower app, whose own code says that",
                    hint="change the app, or set what it reads with --run-config",
                )
            config = {**parsed.configured(settings.run_config, settings.rounds), **config}
            return parsed, server_app, config
        if settings.run_config:
            raise ConfigurationError(
                f"--run-config is for a Flower app, and {settings.app} makes trainers",
                hint="remove it",
            )
        app = TrainerApp(*common, factory=settings.app, masking=rules)
    else:
        partition = Partition.parse(settings.partition)
        task = Task.parse(
            settings.data, settings.clients, partition, settings.seed, settings.device
        )
        app = TrainerApp(*common, task=task, masking=rules)
    app.trainer(0)  # what cannot be made fails here, and not at every client
    return app, _server_app(settings, app, history), config


def _server_app(settings: Settings, app: TrainerApp, history: History) -> ServerApp:
    inner = _strategy(settings)
    sampling: dict[str, Any] = {
        "fraction_train": settings.fraction,
        "fraction_evaluate": 0.0 if app.task is not None else settings.fraction,
        "min_train_nodes": 1,
        "min_evaluate_nodes": 1,
        "min_available_nodes": 1,
    }
    strategy: FedpressStrategy | MaskedStrategy
    if settings.secure:
        asked = max(1, int(settings.clients * settings.fraction))
        if asked < LEAST_MASKED:
            raise ConfigurationError(
                f"--secure: a round asks {asked} clients, and no sum of fewer than {LEAST_MASKED} "
                "is unmasked",
                hint="raise --fraction or --clients",
            )
        is_restricted = settings.method is None and "restricted" in app.honours
        strategy = MaskedStrategy(
            inner,
            Plan(
                settings.method,
                task=TASK,
                seed=settings.seed,
                minimum=LEAST_MASKED,
                auto=settings.auto or Auto(),
                restricted=is_restricted,
            ),
            settings.masking_terms(is_restricted=is_restricted),
            authority=_key(settings, "authority"),
            key=_key(settings, "server"),
            **sampling,
        )
    else:
        plan = Plan(settings.method, task=TASK, seed=settings.seed, auto=settings.auto or Auto())
        downlink = DownlinkTerms() if settings.downlink else settings.downlink
        strategy = FedpressStrategy(inner, plan, downlink=downlink, **sampling)
    server_app = ServerApp()
    task = app.task

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        model = app.initial_model()
        arrays = ArrayRecord({name: Array(values) for name, values in travelling(model).items()})

        def measured(record: ArrayRecord) -> dict[str, float]:
            values = {name: array.numpy() for name, array in record.items()}
            return dict(task.evaluate(envelope.model_of(values))) if task is not None else {}

        def tested(number: int, arrays: ArrayRecord) -> MetricRecord | None:
            if task is None or not number:
                return None
            metrics = measured(arrays)
            if strategy.average is not None and strategy.newest is not None:
                newest = measured(strategy.newest)
                metrics |= {f"newest-{name}": value for name, value in newest.items()}
            history.tested(number, metrics)
            return MetricRecord(metrics)

        strategy.start(
            grid,
            arrays,
            num_rounds=settings.num_rounds,
            timeout=settings.timeout,
            train_config=ConfigRecord(),
            evaluate_fn=tested,
        )

    return server_app


def _strategy(settings: Settings) -> Strategy | None:
    """The one that is named; None for what goes with the compressor."""
    if settings.strategy is None:
        return None
    try:
        is_json = settings.strategy.lstrip().startswith("{")
        config = json.loads(settings.strategy) if is_json else {"id": settings.strategy}
    except ValueError as exc:
        raise ConfigurationError(f"--strategy is not JSON: {exc}") from exc
    try:
        strategy = from_config(config, settings.terms)
    except ConfigurationError as exc:
        form = (
            "" if is_json else f'give its settings as JSON: {{"id": "{config["id"]}", NAME: ...}}'
        )
        raise type(exc)(f"--strategy: {exc.detail}", hint=exc.hint or form) from exc
    terms = strategy.client_terms
    others = [name for name in ("normalise", "personal") if getattr(terms, name)]
    asked = sorted(terms.of_trainer) + others
    if asked:
        raise IncompatiblePlan(
            f"--strategy {settings.strategy} asks of its clients {', '.join(asked)}, which "
            "Flower's messages do not carry",
            hint="name it in a task's file, and simulate that with --task",
        )
    return strategy


def _rules(settings: Settings) -> MaskingRules:
    """Masking rules of simulated clients: the terms of the run. They report their metrics."""
    terms = settings.masking_terms()
    return MaskingRules(adversary=terms.adversary, corrupt=terms.corrupt, reports_evaluations=True)


def _key(settings: Settings, whose: str) -> DeviceKey:
    """A key that a run has again when it goes on. Of a simulation's keys nothing is secret."""
    seed = f"fedpress simulation|{settings.seed}|{whose}"
    return DeviceKey.from_bytes(hashlib.sha256(seed.encode()).digest())


def run(
    settings: Settings,
    out: Path,
    console: Console,
    *,
    json_file: Path | None = None,
    plot: bool = False,
    sweep_file: Path | None = None,
    fresh: bool = False,
    callbacks: Mapping[str, Callback] | None = None,
    ui: bool = False,
) -> list[History]:
    """The command: simulate, show, write."""
    if ui and (settings.task is None or sweep_file is not None):
        raise ConfigurationError(
            "--ui shows the server of one task, which only --task FILE without --sweep runs",
            hint="write a task's file and give it by --task, or leave --ui out",
        )
    if json_file is not None:
        _check_writable(json_file)
    with Screen(console) as screen:
        begin = partial(simulate, fresh=fresh, screen=screen, callbacks=callbacks)
        if sweep_file is None:
            histories = [begin(settings, out, shown=console if ui else None)]
        else:
            variations = _variations(sweep_file)
            histories = sweep(
                settings, variations, out, fresh=fresh, screen=screen, callbacks=callbacks
            )
    if json_file is not None:
        document = [json.loads(history.to_json()) for history in histories]
        whole = document if sweep_file is not None else document[0]
        json_file.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    if plot:
        draw(histories, out / "accuracy.png")
    print_summary(console, histories, out)
    without = [history.name for history in histories if not history.summary()["answered"]]
    if without:
        raise FedpressError(
            f"no client answered in any round of {', '.join(without)}",
            hint="the reasons are above, and all of them in the history",
        )
    return histories


def _check_writable(path: Path) -> None:
    """Make the file's folder, and raise ConfigurationError if the file could not be written."""
    is_new = not path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except OSError as exc:
        raise ConfigurationError(f"--json: {path} cannot be written: {exc.strerror}") from exc
    if is_new:
        path.unlink()


def _variations(path: Path) -> list[dict[str, Any]]:
    try:
        variations = json.loads(path.read_bytes())
    except (OSError, ValueError) as exc:
        raise ConfigurationError(f"--sweep {path}: {exc}") from exc
    if (
        not isinstance(variations, list)
        or not variations
        or not all(isinstance(e, dict) for e in variations)
    ):
        raise ConfigurationError(
            f"--sweep {path} is no list of objects",
            hint='as in [{"name": "plain", "compressor": "none"}, {"name": "topk", ...}]',
        )
    return variations
