"""Finds the trainer that `fedpress client join --app module:factory` names."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from fedpress_client.trainer import Trainer
from fedpress_protocols.errors import ConfigurationError

_HINT = "--app takes module:factory, a function without arguments that returns a Trainer"


def load_trainer(app: str, folder: str | Path = ".") -> Trainer:
    """Call the factory that `app` names; modules in `folder` are found first.

    Raises ConfigurationError that says which part is wrong. An error inside the factory is its own
    and comes through.
    """
    module_name, colon, attribute = app.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigurationError(f"{app!r} names no factory", hint=_HINT)
    place = str(Path(folder).absolute())
    if place not in sys.path:
        sys.path.insert(0, place)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as exc:
        missing = exc.name or module_name
        if module_name != missing and not module_name.startswith(f"{missing}."):
            raise ConfigurationError(
                f"module {module_name!r} imports {missing!r}, which is not installed"
            ) from exc
        raise ConfigurationError(
            f"no module {module_name!r} in {place} or installed", hint=_HINT
        ) from exc
    factory: object = module
    for part in attribute.split("."):
        if not hasattr(factory, part):
            raise ConfigurationError(f"module {module_name!r} has no {attribute!r}", hint=_HINT)
        factory = getattr(factory, part)
    if not callable(factory):
        raise ConfigurationError(
            f"{app!r} is a {type(factory).__name__} and cannot be called", hint=_HINT
        )
    trainer: object = factory()
    if not isinstance(trainer, Trainer):
        raise ConfigurationError(
            f"{app!r} returned a {type(trainer).__name__}, which has no train and evaluate",
            hint=_HINT,
        )
    return trainer
