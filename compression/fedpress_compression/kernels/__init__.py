"""Kernels: the inner loops of coding and compression, in numpy or, with numba, compiled.

    from fedpress_compression import kernels
    kernels.largest(vector, k)

Both give the same results, bit for bit. FEDPRESS_KERNELS=numpy or =numba selects one of them when
this module is imported; numba itself is imported by the first kernel that runs. A kernel trusts its
arguments: data from the wire is validated by its caller or by the kernel, as its docstring says.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from fedpress_compression.errors import ConfigurationError, MissingExtra
from fedpress_compression.kernels import reference

if TYPE_CHECKING:
    from fedpress_compression.kernels.reference import *  # noqa: F403

__all__ = ["CHOSEN", "limit_threads", "warm_up"]
__all__ += reference.__all__

_MODULES = {"numpy": "reference", "numba": "compiled"}


def choose(asked: str, installed: bool, byte_order: str = sys.byteorder) -> str:
    """Choose numpy or numba: the `asked` one, otherwise numba if possible.

    Raises MissingExtra if numba is not installed, ConfigurationError for any other value.
    """
    if asked not in ("", *_MODULES):
        raise ConfigurationError(f"FEDPRESS_KERNELS must be numpy or numba, not {asked!r}")
    if asked == "numba" and not installed:
        raise MissingExtra(
            "FEDPRESS_KERNELS=numba, but numba is not installed",
            hint="pip install fedpress[fast], or unset it: numpy's kernels give the same bytes",
        )
    # The compiled kernels read words of little-endian memory.
    return asked or ("numba" if installed and byte_order == "little" else "numpy")


CHOSEN = choose(os.environ.get("FEDPRESS_KERNELS", ""), find_spec("numba") is not None)
"""The kernels in use: numpy or numba."""


def limit_threads(most: int) -> int:
    """Set the maximum threads of a call; returns the previous limit, initially FEDPRESS_THREADS.
    Only compiled kernels use more than one."""
    from fedpress_compression.kernels import workers

    return workers.limit_threads(most)


def warm_up() -> None:
    """Compile every kernel and fill numba's cache; a no-op with numpy kernels."""
    from fedpress_compression.kernels import warming

    warming.warm_up()


def __getattr__(name: str) -> Any:
    """Load a kernel on first use and store it as an attribute."""
    if name.startswith("_") or name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULES[CHOSEN]}")
    function = globals()[name] = getattr(module, name)
    return function
