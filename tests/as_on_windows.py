"""Run a module as if this were Windows: `python -m tests.as_on_windows MODULE [ARGUMENT ...]`.

Only the product's own modules see another system; Python's and other libraries go on as they are.
Theirs are `sys.platform == "win32"`, no modules that Windows lacks, and of `os`, `signal`, `time`
and `select` the names that CPython 3.13 has there (golden/windows_names.json, from a real one).
`msvcrt.locking` is there, by way of `flock`.
"""

from __future__ import annotations

import builtins
import fcntl
import json
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

NAMES: Mapping[str, frozenset[str]] = {
    module: frozenset(names)
    for module, names in json.loads(
        (Path(__file__).parent / "golden" / "windows_names.json").read_text()
    ).items()
}
MISSING = frozenset({"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"})
_import = builtins.__import__


class _OnWindows(ModuleType):
    """What a module shows there; attributes that a test sets on the real one show here, too."""

    def __init__(self, real: ModuleType) -> None:
        super().__init__(real.__name__)
        self._real = real

    def __getattr__(self, name: str) -> Any:
        real: ModuleType = self.__dict__["_real"]
        names = NAMES.get(real.__name__)
        if names is not None and name not in names:
            raise AttributeError(f"module {real.__name__!r} has no {name!r} on Windows", name=name)
        if (real.__name__, name) in {("sys", "platform"), ("os", "name")}:
            return "win32" if name == "platform" else "nt"
        return getattr(real, name)


class _Msvcrt(ModuleType):
    LK_NBLCK = 2

    @staticmethod
    def locking(descriptor: int, mode: int, num_bytes: int) -> None:
        assert (mode, num_bytes) == (_Msvcrt.LK_NBLCK, 1)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _imported(
    name: str,
    globals: Mapping[str, Any] | None = None,
    locals: Mapping[str, Any] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> ModuleType:
    importer = str((globals or {}).get("__name__", ""))
    if level or not importer.startswith("fedpress"):
        return _import(name, globals, locals, fromlist, level)
    if name in MISSING:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    if name == "msvcrt":
        return _Msvcrt("msvcrt")
    module = _import(name, globals, locals, fromlist, level)
    return _OnWindows(module) if name == "sys" or name in NAMES else module


def main(arguments: Sequence[str]) -> None:
    begun = [name for name in sys.modules if name.startswith("fedpress")]
    assert not begun, f"imported before this began: {begun}"
    builtins.__import__ = _imported
    module, *rest = arguments
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
