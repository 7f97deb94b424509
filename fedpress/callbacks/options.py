"""The values of `--callback`: a built-in callback with its argument, or one of the user's own."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping

from fedpress.callbacks.interface import Callback
from fedpress.command_line import Extra, needs
from fedpress_client.apps import load_callable
from fedpress_protocols.errors import ConfigurationError

_EXTRAS: Mapping[str, Extra] = {"tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb"}
"""Of the built-in callbacks, by name."""
FORMS = "tensorboard:DIR, mlflow[:URI], wandb[:PROJECT] or module:function"
_HINT = f"--callback takes {FORMS}"


def from_options(texts: Iterable[str]) -> dict[str, Callback]:
    """The callbacks by the text that names each.

    Raises ConfigurationError for a text that names none, and MissingExtra for a library that is not
    installed. An error inside the user's own function comes through.
    """
    callbacks: dict[str, Callback] = {}
    for text in texts:
        if text in callbacks:
            raise ConfigurationError(f"--callback {text} is given twice", hint="remove one")
        callbacks[text] = _callback(text)
    return callbacks


def _callback(text: str) -> Callback:
    kind, _, argument = text.partition(":")
    if kind in _EXTRAS:
        try:
            module = importlib.import_module(f"fedpress.callbacks.{kind}_callback")
        except ModuleNotFoundError as exc:
            needs(_EXTRAS[kind], exc)
        built: Callback = module.make(argument)
        return built
    made: object = load_callable(text, ".", "callback", _HINT)()
    if not isinstance(made, Callback):
        raise ConfigurationError(
            f"{text!r} returned a {type(made).__name__}, which is no fedpress.callbacks.Callback",
            hint=_HINT,
        )
    return made
