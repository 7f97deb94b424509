"""Reuse of memory: new pages cost more than the kernels that fill them."""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from fedpress_compression.kernels.wire import Octets

_MAX_THREAD_BUFFER = 64 << 20
"""Maximum bytes of a buffer that a thread keeps."""
_MIN_POOLED = 1 << 18
"""Minimum bytes of a pooled array."""
_MAX_POOL_BYTES = 160 << 20
"""Maximum bytes of free memory in the pool."""

_thread_buffers = threading.local()
_free: dict[int, list[Octets]] = {}
"""Free memory by size, the last returned at the end. Taking and returning are single atomic calls,
since arrays may be finalized at any time, in any thread."""


def thread_buffer(name: str, size: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An uninitialized array [size] local to this thread; the next call with the same `name` reuses
    its memory."""
    buffer: npt.NDArray[Any] | None = getattr(_thread_buffers, name, None)
    if buffer is None or buffer.size < size:
        buffer = np.empty(size + size // 4, dtype)
        if buffer.nbytes <= _MAX_THREAD_BUFFER:
            setattr(_thread_buffers, name, buffer)
    return buffer[:size]


def pooled(size: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An uninitialized array [size] owned by the caller. If it is large, its memory returns to the
    pool once neither it nor a view of it is referenced."""
    kind = np.dtype(dtype)
    num_bytes = size * kind.itemsize
    if not _MIN_POOLED <= num_bytes <= _MAX_POOL_BYTES:
        return np.empty(size, kind)
    step = 1 << (num_bytes.bit_length() - 3)
    room = -(-num_bytes // step) * step
    try:
        memory = _free[room].pop()
    except (KeyError, IndexError):
        memory = np.empty(room, np.uint8)
    # Through a memoryview, since otherwise numpy's views of the array would reference `memory`.
    array: npt.NDArray[Any] = np.frombuffer(memory.data[:num_bytes], kind)
    weakref.finalize(array, _return_memory, memory).atexit = False
    return array


def _return_memory(memory: Octets) -> None:
    with suppress(RuntimeError):  # changed concurrently while counting: drop this one
        _free[memory.size] = [*_free.pop(memory.size, ()), memory]
        total = sum(room * len(those) for room, those in tuple(_free.items()))
        while total > _MAX_POOL_BYTES and _free:
            room = next(iter(_free))
            total -= room * len(_free.pop(room, ()))
