"""Compressors and strategies of third parties: packages that name them as entry points.

The id of a plug-in is `package.name`, with the distribution's name in lower case and `_` for `-`
and `.`: no two packages claim one id, and an end that lacks a plug-in can name its package.
docs/plugins.md is the guide.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from fedpress_compression.errors import ConfigurationError

_NAMESPACED = re.compile(r"([a-z][a-z0-9_]{0,63})\.[a-z][a-z0-9_]{0,63}")


def check_id(identifier: str, module: str, home: str) -> None:
    """Raise ValueError unless code in `module` may claim `identifier`: an id without a package
    belongs to fedpress's own package `home`."""
    if _NAMESPACED.fullmatch(identifier) is None and not module.startswith(f"{home}."):
        raise ValueError(f"a plug-in's id has the form package.name, and {identifier!r} has not")


def load(group: str, id_of: Callable[[Any], object]) -> None:
    """Import what installed packages name in the entry points `group`.

    Raises ConfigurationError that names the package if one cannot be imported, or is not what its
    entry point says: the name must be the package's own and the object's id.
    """
    for entry in entry_points(group=group):
        package = entry.dist.name if entry.dist is not None else entry.module
        namespace = re.sub(r"[-.]+", "_", package).lower()
        try:
            if not _NAMESPACED.fullmatch(entry.name) or entry.name.split(".")[0] != namespace:
                raise ValueError(f"its name should be {namespace}.NAME")
            identifier = id_of(entry.load())
            if identifier != entry.name:
                raise ValueError(f"it points to {identifier!r}")
        except Exception as exc:
            raise ConfigurationError(
                f"the plug-in {entry.name!r} of the package {package} cannot be loaded: {exc}",
                hint=f"upgrade or uninstall {package}",
            ) from exc


def missing(kind: str, identifier: object, known: list[str]) -> tuple[str, str]:
    """Detail and hint of the error for an `identifier` that no `kind` has at this end."""
    match = _NAMESPACED.fullmatch(identifier) if isinstance(identifier, str) else None
    if match is None:
        detail = f"no {kind} has the id {identifier!r}; known are {', '.join(known)}"
        return detail, f"upgrade this end, or choose another {kind}"
    package = match[1].replace("_", "-")
    detail = f"the {kind} {identifier!r} is of the package {package}, which is not installed here"
    return detail, f"pip install {package} at this end, too, or choose another {kind}"
