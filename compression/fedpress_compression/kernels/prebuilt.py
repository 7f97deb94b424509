"""Kernels from a shared library that `building` has made: the same machine code, without numba.

FEDPRESS_PREBUILT_KERNELS names the folder that holds the library and a table of what each kernel
takes. Arguments are checked against the table, since the library trusts them.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedpress_compression.errors import ConfigurationError

LIBRARY, TABLE = "kernels.so", "kernels.json"
_RESULTS = ctypes.c_int64 * 2


def source_digest() -> str:
    """SHA-256 of the kernels' sources, which a library must be of."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*_compiled.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _library() -> tuple[ctypes.CDLL, dict[str, list[dict[str, Any]]]]:
    """The library and its table; raises ConfigurationError if they are not of these sources."""
    folder = Path(os.environ["FEDPRESS_PREBUILT_KERNELS"])
    hint = "build it again: fedpress client warmup --library FOLDER; or unset the variable"
    try:
        table = json.loads((folder / TABLE).read_text())
        library = ctypes.CDLL(str(folder / LIBRARY))
    except (OSError, ValueError) as exc:
        raise ConfigurationError(
            f"FEDPRESS_PREBUILT_KERNELS is {str(folder)!r}, which has no kernels: {exc}", hint=hint
        ) from exc
    if table["sources"] != source_digest():
        raise ConfigurationError(f"{folder} has kernels of another release", hint=hint)
    return library, table["kernels"]


def dtypes_of(arguments: list[Any]) -> tuple[str, ...]:
    """The dtypes of the arrays among a form's arguments, by which a call finds its form."""
    return tuple(dtype for dtype, ndim in arguments if ndim is not None)


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """The library's code for `function`."""
    name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
    library, table = _library()
    calls = {
        dtypes_of(form["arguments"]): _call_of(name, library[form["symbol"]], form)
        for form in table.get(name, ())
    }
    if len(calls) == 1:
        return next(iter(calls.values()))

    def choose(*arguments: Any) -> Any:
        dtypes = tuple(each.dtype.str for each in arguments if isinstance(each, np.ndarray))
        if dtypes not in calls:
            raise TypeError(f"{name} was not built for arrays of {dtypes}, only for {[*calls]}")
        return calls[dtypes](*arguments)

    return choose


def _call_of(name: str, function: Any, form: dict[str, Any]) -> Callable[..., Any]:
    """A function that checks arguments, and passes addresses, shapes and numbers."""
    kinds: list[tuple[np.dtype[Any], int | None]] = [
        (np.dtype(dtype), ndim) for dtype, ndim in form["arguments"]
    ]
    function.restype = ctypes.c_int
    function.argtypes = [_RESULTS]
    for dtype, ndim in kinds:
        if ndim is None:
            function.argtypes += [np.ctypeslib.as_ctypes_type(dtype)]
        else:
            function.argtypes += [ctypes.c_void_p] + [ctypes.c_int64] * ndim
    returns = form["returns"]

    def call(*arguments: Any) -> Any:
        results = _RESULTS()
        words: list[Any] = [results]
        for argument, (dtype, ndim) in zip(arguments, kinds, strict=True):
            if ndim is None:
                words.append(argument.item() if isinstance(argument, np.generic) else argument)
                continue
            flags = argument.flags
            as_built = argument.dtype == dtype and argument.ndim == ndim
            if not (as_built and flags.c_contiguous and flags.aligned):
                raise TypeError(
                    f"{name} was built for contiguous arrays of {ndim} axes of {dtype}, not "
                    f"{argument.ndim} of {argument.dtype}"
                )
            words.append(argument.__array_interface__["data"][0])
            words.extend(argument.shape)
        if function(*words):
            raise MemoryError(f"{name}: no memory for scratch arrays")
        if returns == "pair":
            return results[0], results[1]
        return None if returns == "none" else bool(results[0]) if returns == "bool" else results[0]

    return call
