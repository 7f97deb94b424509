"""Kernels: the inner loops of coding and compression, in numpy, compiled by numba, or in Triton.

    from fedpress_compression import kernels
    kernels.largest(vector, k)

All give the same results, bit for bit. FEDPRESS_KERNELS=numpy, =numba or =triton selects them when
this module is imported, triton only if asked; the library itself is imported by the first kernel
that runs. A kernel trusts its
arguments: data from the wire is validated by its caller or by the kernel, as its docstring says.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Collection
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from fedpress_compression.errors import ConfigurationError, MissingExtra
from fedpress_compression.kernels import reference

if TYPE_CHECKING:
    from fedpress_compression.kernels.reference import *  # noqa: F403

__all__ = ["CHOSEN", "limit_threads", "warm_up"]
__all__ += reference.__all__

_MODULES = {"numpy": "reference", "numba": "compiled", "triton": "on_device"}
_EXTRAS = {"numba": "fast", "triton": "gpu"}


def choose(asked: str, installed: Collection[str], byte_order: str = sys.byteorder) -> str:
    """Choose numpy, numba or triton: the `asked` one, otherwise numba if possible.

    Raises MissingExtra if its library is not among those `installed`, ConfigurationError for any
    other value.
    """
    if asked not in ("", *_MODULES):
        raise ConfigurationError(f"FEDPRESS_KERNELS must be numpy, numba or triton, not {asked!r}")
    if asked in _EXTRAS and asked not in installed:
        raise MissingExtra(
            f"FEDPRESS_KERNELS={asked}, but {asked} is not installed",
            hint=f"pip install fedpress[{_EXTRAS[asked]}], or unset it: numpy's kernels give the "
            "same bytes",
        )
    # The compiled kernels read words of little-endian memory.
    return asked or ("numba" if "numba" in installed and byte_order == "little" else "numpy")


CHOSEN = choose(
    os.environ.get("FEDPRESS_KERNELS", ""),
    [name for name in _EXTRAS if find_spec(name) is not None],
)
"""The kernels in use: numpy, numba or triton."""


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
