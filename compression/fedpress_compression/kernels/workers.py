"""Threads for kernels that run over long arrays. Kernels let go of the interpreter's lock and write
each to places of its own, so that the result is the same however many threads there are.

FEDPRESS_THREADS says how many a call may use at most; by default it is one for each CPU that this
process may run on, up to 4. 1 keeps every call in its own thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import pairwise
from typing import TypeVar

from fedpress_compression.errors import ConfigurationError

_MOST = 64
_BY_DEFAULT = 4

T = TypeVar("T")


def threads_of(asked: str, cpus: int) -> int:
    """Return the number of threads that a call may use, by the setting; raises
    ConfigurationError."""
    if not asked:
        return max(1, min(cpus, _BY_DEFAULT))
    if not asked.isdecimal() or not 1 <= int(asked) <= _MOST:
        raise ConfigurationError(f"FEDPRESS_THREADS is {asked!r}; it may be 1 to {_MOST}")
    return int(asked)


def _cpus() -> int:
    """Return the number of processors that this process may use, where the system tells."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed else os.cpu_count() or 1


class _Workers:
    """Threads that are started when they are first needed, and again in a process that was forked,
    for threads do not come along."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._pool: ThreadPoolExecutor | None = None

    def pool(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_MOST, "fedpress-kernels")
        return self._pool

    def forget(self) -> None:
        self._pool = None


_workers = _Workers(threads_of(os.environ.get("FEDPRESS_THREADS", ""), _cpus()))
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_workers.forget)


def limit_threads(most: int) -> int:
    """From now on, use at most so many threads for a call; returns what the limit was."""
    before, _workers.limit = _workers.limit, threads_of(str(most), 1)
    return before


def parts(num: int, least: int, unit: int = 1) -> list[tuple[int, int]]:
    """[begin, end) of each thread's part of `num` items, of which none, but a last one, is shorter
    than `least`; all but the last end at a multiple of `unit`."""
    count = max(1, min(_workers.limit, num // least))
    units = -(-num // unit)
    edges = [min(num, units * part // count * unit) for part in range(count + 1)]
    return list(pairwise(edges))


def each(call: Callable[[int, int], T], among: list[tuple[int, int]]) -> list[T]:
    """`call(begin, end)` for all parts, side by side; raises what one of them raises, once all are
    done with."""
    if len(among) == 1:
        return [call(*among[0])]
    begun = [_workers.pool().submit(call, *part) for part in among[1:]]
    try:
        return [call(*among[0]), *(one.result() for one in begun)]
    finally:
        wait(begun)
