"""Names of a module that are imported when they are first used."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from fedpress_protocols.errors import MissingExtra


def exports(
    module: str,
    homes: Mapping[str, str],
    *,
    extra: str = "",
    renamed: Mapping[str, str] | None = None,
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of `module`.

    `homes` has, by name, the module that defines it, or the module itself where the name is a
    namespace below `module`; `renamed` has former names, which warn. Where a library is missing, a
    name raises MissingExtra with the `extra` that brings it.
    """

    def attribute(name: str) -> Any:
        if renamed is not None and name in renamed:
            warnings.warn(
                f"{module}.{name} is now called {renamed[name]}", DeprecationWarning, stacklevel=2
            )
            name = renamed[name]
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        try:
            imported = importlib.import_module(home)
        except ModuleNotFoundError as exc:
            if not extra:
                raise
            raise MissingExtra(
                f"{module}.{name} needs {exc.name}", hint=f"pip install 'fedpress[{extra}]'"
            ) from exc
        return imported if home == f"{module}.{name}" else getattr(imported, name)

    return attribute, lambda: sorted(homes)
