"""Memory that kernels use again: fresh pages cost more to get than a kernel takes to fill them."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

_KEPT = 64 << 20
"""Bytes; what is larger is not kept."""

_kept = threading.local()


def scratch(name: str, size: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An array [size] of this thread, whose contents are anything; the next call with the same
    `name` gives the same memory again."""
    found: npt.NDArray[Any] | None = getattr(_kept, name, None)
    if found is None or found.size < size:
        found = np.empty(size + size // 4, dtype)
        if found.nbytes <= _KEPT:
            setattr(_kept, name, found)
    return found[:size]
