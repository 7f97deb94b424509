"""How long an answer may take: a server that sends it by drops, or never begins it, is left."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx

from fedpress_client.retrying import TryAgain
from fedpress_protocols.errors import TransportError

_LEAST_RATE = 256
"""Bytes a second of a body, as servers ask of devices."""
_LOOK_SECONDS = 5.0


class AnswerWatch:
    """The time that one answer after the other takes.

    Its head has `patience` seconds, and what the request says the server may hold it; its body has
    as many, and a second for each `_LEAST_RATE` bytes. While an answer that takes long is read,
    `pause` is called every few seconds with 0: it raises once a stop is asked for.
    """

    def __init__(
        self, patience: float, clock: Callable[[], float], pause: Callable[[float], None]
    ) -> None:
        self._patience, self._clock, self._pause = patience, clock, pause
        self._due = self._look_at = math.inf

    def tracer(self, wait: float) -> Callable[[str, Mapping[str, Any]], None]:
        """The `trace` extension of a request that the server may hold for `wait` seconds.

        httpx bounds each read and not all of them, and has no other place to look between the reads
        of a head, of which interim answers (RFC 9110, section 15.2) can make an endless one.
        """

        def trace(event: str, info: Mapping[str, Any]) -> None:
            if event.endswith("receive_response_headers.started"):
                now = self._clock()
                self._due = now + wait + self._patience
                self._look_at = now + _LOOK_SECONDS
            elif event.endswith(("receive_response_headers.complete", ".failed")):
                self._due = math.inf
                self._look_at = self._clock() + _LOOK_SECONDS
            stream: Any = info.get("return_value")
            if hasattr(stream, "read"):  # a new connection
                stream.read = self._watched(stream.read)

        return trace

    def body(self, response: httpx.Response) -> Iterator[bytes]:
        """The body as it comes; TryAgain where it comes too slowly. The time that the caller takes
        between chunks does not count."""
        chunks = response.iter_raw()
        waited, num_bytes = 0.0, 0
        while True:
            start = self._clock()
            chunk = next(chunks, None)
            if chunk is None:
                return
            waited += self._clock() - start
            num_bytes += len(chunk)
            if waited > self._patience + num_bytes / _LEAST_RATE:
                raise TryAgain(
                    TransportError(
                        f"{num_bytes} bytes of {response.url.path} came in {waited:.0f} s, fewer "
                        f"than {_LEAST_RATE} a second",
                        hint="check the network, and the server and proxies on the way",
                    )
                )
            yield chunk

    def _watched(self, read: Callable[..., bytes]) -> Callable[..., bytes]:
        def watched(max_bytes: int, timeout: float | None = None) -> bytes:
            now = self._clock()
            if now > self._due:
                raise httpx.ReadTimeout("the answer's head has no end")
            if now > self._look_at:
                self._look_at = now + _LOOK_SECONDS
                self._pause(0.0)
            return read(max_bytes, timeout)

        return watched
