"""Finds the trainer that `fedpress client join --app module:factory` names, and conditions."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedpress_client.participation import Condition
from fedpress_client.trainer import Trainer, check_trainer
from fedpress_protocols.errors import ConfigurationError, FedpressError

_HINT = "--app takes module:factory, a function without arguments that returns a Trainer"
_CONDITION_HINT = (
    "--condition takes module:function, a function without arguments that returns True or a Refusal"
)


def load_trainer(app: str, folder: str | Path = ".") -> Trainer:
    """Call the factory that `app` names; modules in `folder` are found first.

    Raises ConfigurationError that says which part is wrong, and RuntimeError from an error inside
    the factory.
    """
    factory = load_callable(app, folder, "factory", _HINT)
    try:
        trainer: Trainer = factory()
    except FedpressError:
        raise
    except Exception as exc:
        raise RuntimeError(f"the factory {app} raised {type(exc).__name__}: {exc}") from exc
    try:
        check_trainer(trainer)
    except ConfigurationError as exc:
        raise ConfigurationError(f"{app!r}: {exc.detail}", hint=_HINT) from exc
    return trainer


def load_condition(name: str, folder: str | Path = ".") -> Condition:
    """The condition that `name` (module:function) names; it is not called. Raises
    ConfigurationError as `load_trainer` does."""
    condition: Condition = load_callable(name, folder, "function", _CONDITION_HINT)
    return condition


def load_callable(name: str, folder: str | Path, kind: str, hint: str) -> Callable[[], Any]:
    """The callable that module:attribute names; modules in `folder` are found first. Raises
    ConfigurationError with `hint`, in which a `kind` is what was to be named."""
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigurationError(f"{name!r} names no {kind}", hint=hint)
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
        if module_name.endswith(".py"):
            hint = f"name the module without .py: {module_name.removesuffix('.py')}:{attribute}"
        raise ConfigurationError(
            f"no module {module_name!r} in {place} or installed", hint=hint
        ) from exc
    target: object = module
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise ConfigurationError(f"module {module_name!r} has no {attribute!r}", hint=hint)
        target = getattr(target, part)
    if not callable(target):
        raise ConfigurationError(
            f"{name!r} is a {type(target).__name__} and cannot be called", hint=hint
        )
    return target
