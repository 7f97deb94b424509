"""Kernels: the inner loops of coding and compression, in numpy, compiled by numba, or in Triton.

    from fedpress_compression import kernels
    kernels.largest(vector, k)

All give the same results, bit for bit. FEDPRESS_KERNELS=numpy, =numba, =prebuilt or =triton selects
them when this module is imported, triton only if asked; the library itself is imported by the first
kernel that runs. Prebuilt kernels are numba's in a library, FEDPRESS_PREBUILT_KERNELS. A kernel
trusts its arguments: data from the wire is validated by its caller or by the kernel, as its
docstring says.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpress_compression.errors import ConfigurationError, MissingExtra
from fedpress_compression.kernels import reference

if TYPE_CHECKING:
    from fedpress_compression.kernels.reference import *  # noqa: F403

__all__ = ["CHOSEN", "build_library", "limit_threads", "warm_up"]
__all__ += reference.__all__

_MODULES = {
    "numpy": "reference",
    "numba": "compiled",
    "prebuilt": "compiled",
    "triton": "on_device",
}
_EXTRAS = {"numba": "fast", "triton": "gpu"}


def choose(asked: str, installed: Collection[str], byte_order: str = sys.byteorder) -> str:
    """Choose numpy, numba, prebuilt or triton: the `asked` one, otherwise a library, then numba.

    Raises MissingExtra if its library is not among those `installed`, ConfigurationError for any
    other value.
    """
    if asked not in ("", *_MODULES):
        raise ConfigurationError(
            f"FEDPRESS_KERNELS must be numpy, numba, prebuilt or triton, not {asked!r}"
        )
    if asked == "prebuilt" and asked not in installed:
        raise ConfigurationError(
            "FEDPRESS_KERNELS=prebuilt, but no FEDPRESS_PREBUILT_KERNELS",
            hint="name the folder that fedpress client warmup --library has written",
        )
    if asked in _EXTRAS and asked not in installed:
        raise MissingExtra(
            f"FEDPRESS_KERNELS={asked}, but {asked} is not installed",
            hint=f"pip install fedpress[{_EXTRAS[asked]}], or unset it: numpy's kernels give the "
            "same bytes",
        )
    # The compiled kernels read words of little-endian memory.
    if asked or byte_order != "little":
        return asked or "numpy"
    return next((name for name in ("prebuilt", "numba") if name in installed), "numpy")


CHOSEN = choose(
    os.environ.get("FEDPRESS_KERNELS", ""),
    [name for name in _EXTRAS if find_spec(name) is not None]
    + ["prebuilt"] * bool(os.environ.get("FEDPRESS_PREBUILT_KERNELS")),
)
"""The kernels in use: numpy, numba, prebuilt or triton."""


def limit_threads(most: int) -> int:
    """Set the maximum threads of a call; returns the previous limit, initially FEDPRESS_THREADS.
    Only compiled kernels use more than one."""
    from fedpress_compression.kernels import workers

    return workers.limit_threads(most)


def warm_up() -> None:
    """Compile every kernel and fill numba's cache; a no-op with numpy kernels."""
    from fedpress_compression.kernels import warming

    warming.warm_up()


def build_library(folder: Path) -> None:
    """Write all kernels to `folder` as a library that FEDPRESS_PREBUILT_KERNELS can name.

    It runs on this processor, or on any with its instruction set if NUMBA_CPU_NAME is `generic`.
    Raises ConfigurationError if numba's kernels are not in use or there is no linker.
    """
    if CHOSEN != "numba":
        raise ConfigurationError(
            f"a library is built of numba's kernels; those in use are {CHOSEN}'s",
            hint="pip install 'fedpress[fast]', and unset FEDPRESS_KERNELS",
        )
    from fedpress_compression.kernels import building

    building.build(folder)


def __getattr__(name: str) -> Any:
    """Load a kernel on first use and store it as an attribute."""
    if name.startswith("_") or name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULES[CHOSEN]}")
    function = globals()[name] = getattr(module, name)
    return function
