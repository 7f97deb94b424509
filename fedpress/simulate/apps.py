"""Simulated tasks: built-in ones, trainers as for `fedpress client join`, or a Flower app.

All are picklable, so that processes of the pool make their own client app from them.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fedpress.simulate.tasks import Task
from fedpress_client import MaskingRules
from fedpress_client.ledger_records import Discard
from fedpress_client.trainer import Trainer, TrainingRequest, check_evaluation, check_trained
from fedpress_compression.update import Indices
from fedpress_flower import envelope
from fedpress_flower.client import compression_mod, masking_mod
from fedpress_flower.client.compression import warn
from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.model import Model
from fedpress_protocols.plan import TrainingTerms

ROUNDS = "num-server-rounds"
"""The run configuration's key of the number of rounds, as in Flower's templates."""
_HINT = (
    "give module:name of a function (index, clients) that returns a Trainer, or of a pair "
    "(ServerApp, ClientApp) or a function that returns one; or the folder of a Flower app"
)


@dataclass(frozen=True)
class TrainerApp:
    """A client app of trainers: those of a built-in `task`, or what the function `factory`, as
    module:name, returns for a client's index and the number of clients."""

    name: str
    terms: TrainingTerms
    seed: int
    clients: int
    state_dir: str
    task: Task | None = None
    factory: str = ""
    masking: MaskingRules | None = None
    """Rules of its clients for masked rounds; None: uploads are not masked."""

    def client_app(self) -> ClientApp:
        common: dict[str, Any] = {
            "state_dir": self.state_dir,
            "seed": self.seed,
            "durable": False,
            "on_discard": _warn,
        }
        mod = (
            compression_mod(**common)
            if self.masking is None
            else masking_mod(masking=self.masking, honours=self.honours, **common)
        )
        app = ClientApp(mods=[mod])
        app.train()(_Train(self))
        app.evaluate()(_Evaluate(self))
        return app

    @property
    def honours(self) -> frozenset[str]:
        """The terms that its trainers know, see TrainingRequest."""
        return frozenset(getattr(self.trainer(0), "honours", ()))

    def trainer(self, index: int) -> Trainer:
        """Raises ConfigurationError if the factory makes none."""
        if self.task is not None:
            return self.task.trainer(index)
        made = load(self.factory)(index, self.clients)
        if not isinstance(made, Trainer):
            raise ConfigurationError(
                f"{self.factory!r} returned a {type(made).__name__} for client {index}", hint=_HINT
            )
        return made

    def initial_model(self) -> Model:
        if self.task is not None:
            return self.task.initial_model()
        make = getattr(self.trainer(0), "initial_model", None)
        if make is None:
            raise ConfigurationError(
                f"the trainer of {self.factory!r} has no initial_model(), and the rounds begin at "
                "none"
            )
        model: Model = make()
        return model


@dataclass(frozen=True)
class _Train:
    app: TrainerApp

    def __call__(self, message: Message, context: Context) -> Message:
        app, index = self.app, int(context.node_config["partition-id"])
        trainer = app.trainer(index)
        model = _model_in(message, trainer)
        number = int(message.content["config"]["server-round"])
        own = envelope.client_seed(app.seed, index)
        # As a Client with the seed `own` draws it.
        drawn = np.random.SeedSequence([own, number, 1, 1]).generate_state(1, np.uint64)
        work = TrainingRequest(
            app.name, number, 1, app.terms, int(drawn[0]) >> 1, support=_support_in(message)
        )
        trained = check_trained(trainer.train(model, work), model)
        # No Model, which would refuse NaN: the mod does so in a device's words.
        after = {**travelling(model), **model.spec.unflatten(trained.parameters)}
        arrays = ArrayRecord({n: Array(np.asarray(a)) for n, a in after.items()})
        metrics = MetricRecord(
            {**trained.report, **trained.metrics, "num-examples": trained.num_examples}
        )
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


@dataclass(frozen=True)
class _Evaluate:
    app: TrainerApp

    def __call__(self, message: Message, context: Context) -> Message:
        trainer = self.app.trainer(int(context.node_config["partition-id"]))
        evaluation = check_evaluation(trainer.evaluate(_model_in(message, trainer)))
        metrics = MetricRecord({"num-examples": 0})
        if evaluation is not None:
            metrics = MetricRecord({**evaluation.metrics, "num-examples": evaluation.num_examples})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)


def travelling(model: Model) -> dict[str, npt.NDArray[Any]]:
    """Its tensors but the frozen ones, which clients have, as devices do."""
    tensors = model.tensors()
    return {each.name: tensors[each.name] for each in model.spec.tensors if not each.frozen}


def _model_in(message: Message, trainer: Trainer) -> Model:
    """The model of the message, with the frozen tensors of the trainer's own."""
    record = next(iter(message.content.array_records.values()))
    arrays = {name: array.numpy() for name, array in record.items()}
    spec = getattr(trainer, "spec", None)
    if spec is None or not any(tensor.frozen for tensor in spec.tensors):
        return envelope.model_of(arrays)
    own: Model = trainer.initial_model()  # type: ignore[attr-defined]
    buffers = {name: arrays.get(name, values) for name, values in own.buffers.items()}
    return Model(own.spec, own.spec.flatten({**own.tensors(), **arrays}), buffers)


def _support_in(message: Message) -> Indices | None:
    record = message.content.config_records.get(envelope.SUPPORT)
    if record is None:
        return None
    return np.frombuffer(bytes(record[envelope.INDICES]), "<i8").astype(np.int64)


def _warn(discard: Discard) -> None:
    if discard.reason != "invalid":  # of a client that failed, which the history has
        warn(discard)


@dataclass(frozen=True)
class FlowerApp:
    """A Flower app: its two halves by module:name, in `folder`, or both from one `pair`."""

    folder: str
    server: str = ""
    client: str = ""
    pair: str = ""
    config: dict[str, Any] = field(default_factory=dict, hash=False)

    def configured(self, text: str, rounds: int | None = None) -> dict[str, Any]:
        """The app's configuration with what `text`, key=value in TOML's words, has otherwise, and
        `rounds` as its num-server-rounds.

        Raises ConfigurationError for a key that the app's pyproject.toml does not have.
        """
        try:
            changes = _flat(tomllib.loads("\n".join(text.split())))
        except tomllib.TOMLDecodeError as exc:
            raise ConfigurationError(f"--run-config {text!r}: {exc}") from exc
        unknown = sorted(set(changes) - set(self.config)) if self.config else []
        if unknown:
            raise ConfigurationError(
                f"--run-config: the app has no {', '.join(unknown)}; it has "
                f"{', '.join(self.config)}"
            )
        if rounds is not None:
            if ROUNDS not in self.config:
                raise ConfigurationError(
                    "--rounds: the app says itself how many rounds it has, and its configuration "
                    f"has no {ROUNDS}",
                    hint="remove --rounds, or set what the app reads with --run-config",
                )
            if changes.get(ROUNDS, rounds) != rounds:
                raise ConfigurationError(f"--rounds {rounds} and --run-config differ in {ROUNDS}")
            changes[ROUNDS] = rounds
        return {**self.config, **changes}

    def client_app(self) -> ClientApp:
        return self._half(self.client, ClientApp, 1)

    def server_app(self) -> ServerApp:
        return self._half(self.server, ServerApp, 0)

    def _half(self, reference: str, kind: type[Any], place: int) -> Any:
        app = _pair(self.folder, self.pair)[place] if self.pair else load(reference, self.folder)
        if not isinstance(app, kind):
            raise ConfigurationError(
                f"{reference or self.pair!r} is a {type(app).__name__}, not a {kind.__name__}"
            )
        return app


@lru_cache(maxsize=4)
def _pair(folder: str, reference: str) -> tuple[Any, Any]:
    loaded = load(reference, folder)
    if callable(loaded):
        loaded = loaded()
    if not isinstance(loaded, tuple) or len(loaded) != 2:
        raise ConfigurationError(f"{reference!r} is no pair of apps", hint=_HINT)
    return loaded


def load(reference: str, folder: str = ".") -> Any:
    """Import module:name; modules in `folder` take precedence. Raises ConfigurationError."""
    module_name, colon, attribute = reference.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigurationError(f"{reference!r} names nothing", hint=_HINT)
    place = str(Path(folder).absolute())
    if place not in sys.path:
        sys.path.insert(0, place)
    try:
        loaded: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            loaded = getattr(loaded, part)
    except ModuleNotFoundError as exc:
        raise ConfigurationError(f"{reference!r}: no module {exc.name!r}", hint=_HINT) from exc
    except AttributeError as exc:
        raise ConfigurationError(f"{reference!r}: {exc}", hint=_HINT) from exc
    return loaded


def sources(text: str) -> list[Path]:
    """The files that the app of `--app` is written in: its modules, of those in a package all of
    the package's folder, and the pyproject.toml of a folder's."""
    path, app = Path(text), parse_app(text)
    files = {path / "pyproject.toml"} if path.is_dir() else set()
    references = [text]
    if isinstance(app, FlowerApp) and not app.pair:
        app.client_app(), app.server_app()
        references = [app.client, app.server]
    for name in (reference.partition(":")[0] for reference in references):
        module = Path(getattr(sys.modules[name], "__file__", None) or "")
        if module.is_file():
            files |= {module, *(module.parent.glob("*.py") if "." in name else ())}
    return sorted(files)


def parse_app(text: str) -> FlowerApp | Callable[[int, int], Trainer]:
    """Load the value of `--app`: a Flower app, or a factory of trainers."""
    path = Path(text)
    if path.is_dir():
        return _project(path)
    loaded = load(text)
    if callable(loaded) and not isinstance(loaded, tuple):
        needed = [
            each
            for each in inspect.signature(loaded).parameters.values()
            if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
        ]
        if len(needed) == 2:
            made: Callable[[int, int], Trainer] = loaded
            return made
    return FlowerApp(".", pair=text)


def _project(folder: Path) -> FlowerApp:
    """A Flower app as `flwr run` takes it: what its pyproject.toml says."""
    try:
        settings = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
        app = settings["tool"]["flwr"]["app"]
        parts = app["components"]
        return FlowerApp(
            str(folder.absolute()),
            server=parts["serverapp"],
            client=parts["clientapp"],
            config=_flat(app.get("config", {})),
        )
    except (OSError, KeyError, tomllib.TOMLDecodeError) as exc:
        raise ConfigurationError(
            f"{folder} is no Flower app: {exc!r}", hint="its pyproject.toml has [tool.flwr.app]"
        ) from exc


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
