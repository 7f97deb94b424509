"""Checks of the values that an application gives the client; each raises ConfigurationError."""

from __future__ import annotations

import math
from collections.abc import Collection
from numbers import Integral, Real
from pathlib import Path

from fedpress_protocols.errors import ConfigurationError, MalformedRequest
from fedpress_protocols.signatures import from_base64url


def check_number(
    name: str, value: object, low: float, high: float = math.inf, *, above: bool = False
) -> None:
    """A finite number in [`low`, `high`], or in (`low`, `high`] with `above`."""
    if isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value):
        number = float(value)
        if number <= high and (number > low if above else number >= low):
            return
    raise ConfigurationError(f"{name} must be a number {_range(low, high, above)}, not {value!r}")


def check_whole(name: str, value: object, low: int) -> None:
    """A whole number from `low` on."""
    if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < low:
        raise ConfigurationError(f"{name} must be a whole number from {low} on, not {value!r}")


def check_kind(name: str, value: object, kind: type) -> None:
    """An instance of `kind`."""
    if not isinstance(value, kind):
        expected = "True or False" if kind is bool else f"a {kind.__name__}"
        raise ConfigurationError(f"{name} must be {expected}, not {value!r}")


def check_choices(name: str, values: object, known: Collection[str]) -> None:
    """A collection of some of `known`, one at least; a text is no collection here."""
    several = list(values) if isinstance(values, tuple | list | set | frozenset) else None
    if several and all(each in known for each in several):
        return
    shown = repr(values) if several is None else ", ".join(sorted(map(str, several))) or "none"
    raise ConfigurationError(
        f"{name} must be some of {', '.join(known)}, not {shown}",
        hint=f"give a tuple, such as ({next(iter(known))!r},)",
    )


def check_public_key(name: str, value: object, command: str) -> None:
    """A public key in base64url, as `command` prints it."""
    hint = f"give what {command} prints"
    if not isinstance(value, str):
        raise ConfigurationError(f"{name} must be a text, not {value!r}", hint=hint)
    try:
        from_base64url(value, 32)
    except MalformedRequest as exc:
        raise ConfigurationError(f"{name}: {exc.detail}", hint=hint) from exc


def checked_file(name: str, value: object) -> Path:
    """The path of a file that is there."""
    if not isinstance(value, str | Path):
        raise ConfigurationError(f"{name} must be the path of a file, not {value!r}")
    path = Path(value)
    if not path.is_file():
        raise ConfigurationError(f"{name}: there is no file {path}")
    return path


def _range(low: float, high: float, above: bool) -> str:
    if high < math.inf:
        return f"{'above' if above else 'from'} {low:g} {'and at most' if above else 'to'} {high:g}"
    return f"above {low:g}" if above else f"from {low:g} on"
