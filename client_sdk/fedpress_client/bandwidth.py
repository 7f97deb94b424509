"""A limit on the bytes a second that a device sends and receives."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from time import monotonic

from fedpress_protocols.errors import ConfigurationError

_LEAST_RATE = 1024.0
"""Servers close a connection whose body arrives at less than 256 bytes a second."""
_BURST_SECONDS = 0.1
_LARGEST_PIECE = 64 * 1024


class Bandwidth:
    """At most `upload` and `download` bytes a second, 1024 or more each; None for no limit.

    Counts the bodies of requests and answers, without headers, TLS and TCP. Clients that are given
    the same object share the limit, from any thread. The device reports the speed that it measures
    on its uploads, so policies that adapt to links adapt to the limit.
    """

    def __init__(
        self,
        *,
        upload: float | None = None,
        download: float | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._up = _TokenBucket("upload", upload, clock)
        self._down = _TokenBucket("download", download, clock)

    @property
    def upload(self) -> float | None:
        """Bytes a second."""
        return self._up.rate

    @property
    def download(self) -> float | None:
        """Bytes a second."""
        return self._down.rate

    def pieces(self, body: bytes, sleep: Callable[[float], None]) -> Iterator[bytes]:
        """The body in pieces, each at the time when it may leave."""
        size = self._up.piece_bytes
        for start in range(0, len(body), size):
            piece = body[start : start + size]
            self._up.take(len(piece), sleep)
            yield piece

    def received(self, num_bytes: int, sleep: Callable[[float], None]) -> None:
        """Wait until more may be read after `num_bytes`."""
        self._down.take(num_bytes, sleep)


class _TokenBucket:
    """`rate` tokens a second, and no more than those of `_BURST_SECONDS` at once."""

    def __init__(self, name: str, rate: float | None, clock: Callable[[], float]) -> None:
        if rate is not None and not (math.isfinite(rate) and rate >= _LEAST_RATE):
            raise ConfigurationError(
                f"{name} must be {_LEAST_RATE:g} bytes a second or more, not {rate}",
                hint="leave it out for no limit; a slower link would be taken for a broken one",
            )
        self.rate, self._clock = rate, clock
        self._lock = threading.Lock()
        self._empty_until = -math.inf
        """When the tokens that were taken will have come in."""

    @property
    def piece_bytes(self) -> int:
        if self.rate is None:
            return _LARGEST_PIECE
        return min(int(self.rate * _BURST_SECONDS), _LARGEST_PIECE)

    def take(self, num_bytes: int, sleep: Callable[[float], None]) -> None:
        """Wait until `num_bytes` tokens are in; the threads that ask are served in turn."""
        if self.rate is None:
            return
        with self._lock:
            now = self._clock()
            begin = max(self._empty_until, now - _BURST_SECONDS)
            self._empty_until = begin + num_bytes / self.rate
            pause = self._empty_until - now
        if pause > 0:
            sleep(pause)
