"""Memory that is used again: fresh pages cost more to get than a kernel takes to fill them."""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from fedpress_compression.kernels.wire import Octets

_KEPT = 64 << 20
"""Bytes; what is larger is not kept as scratch."""
_LENT_FROM = 1 << 18
"""Bytes of an array that is worth it."""
_SPARE_BYTES = 160 << 20
"""Bytes that are kept, at most, while nobody has them."""

_kept = threading.local()
_spare: dict[int, list[Octets]] = {}
"""By size, that given back last at the end, memory of arrays that nobody has any more. It is taken
and given back by calls that cannot be interrupted: arrays may go at any time, in any thread."""


def thread_buffer(name: str, size: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An array [size] of this thread, whose contents are anything; the next call with the same
    `name` gives the same memory again."""
    found: npt.NDArray[Any] | None = getattr(_kept, name, None)
    if found is None or found.size < size:
        found = np.empty(size + size // 4, dtype)
        if found.nbytes <= _KEPT:
            setattr(_kept, name, found)
    return found[:size]


def pooled(size: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An array [size] whose contents are anything, the caller's to keep. Where it is long, its
    memory becomes another such array once neither it nor a view of it is left."""
    kind = np.dtype(dtype)
    num_bytes = size * kind.itemsize
    if not _LENT_FROM <= num_bytes <= _SPARE_BYTES:
        return np.empty(size, kind)
    step = 1 << (num_bytes.bit_length() - 3)
    room = -(-num_bytes // step) * step
    try:
        memory = _spare[room].pop()
    except (KeyError, IndexError):
        memory = np.empty(room, np.uint8)
    # By way of a memoryview, lest numpy let views of the array hold on to `memory` in its place.
    array: npt.NDArray[Any] = np.frombuffer(memory.data[:num_bytes], kind)
    weakref.finalize(array, _take_back, memory).atexit = False
    return array


def _take_back(memory: Octets) -> None:
    with suppress(RuntimeError):  # others came and went while they were counted: let this one go
        _spare[memory.size] = [*_spare.pop(memory.size, ()), memory]
        held = sum(room * len(those) for room, those in tuple(_spare.items()))
        while held > _SPARE_BYTES and _spare:
            room = next(iter(_spare))
            held -= room * len(_spare.pop(room, ()))
