"""The cost of observing a request: its name, its figures, its line of the log, its spans.

    python benchmarks/observing_cost.py [--requests 20000]

Microseconds of CPU a request, the least of five turns, over an application that answers at once:
the guard of the server with everything off but figures, with lines written, and with traces; and
what the same guard took with a prometheus_client histogram and a line that is not written.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedpress_server.api.problems import RequestGuard
from fedpress_server.metrics import Metrics
from fedpress_server.observing import logs, traces
from fedpress_server.observing.requests import RequestObserver

HEADERS = [(name.encode(), b"x" * 40) for name in (
    "host", "user-agent", "accept", "accept-encoding", "connection", "content-length",
    "content-type", "content-digest", "signature-input", "signature",
)]  # fmt: skip
START: Message = {
    "type": "http.response.start",
    "status": 201,
    "headers": [(b"content-length", b"120"), (b"content-type", b"application/json")],
}
BODY: Message = {"type": "http.response.body", "body": b"x" * 120}


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    with traces.span("verify"), traces.span("read"):
        pass
    with traces.span("stage"), traces.span("commit"):
        pass
    await send(START)
    await send(BODY)


def bare(histogram: Histogram) -> ASGIApp:
    """As much as a server must do at least: a duration by route and status."""

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        status = 0

        async def seen(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        begun = time.perf_counter()
        await application(scope, receive, seen)
        seconds = time.perf_counter() - begun
        histogram.labels(scope["method"], "unknown", status).observe(seconds)

    return answered


async def nowhere(message: Message) -> None:
    pass


async def nothing() -> Message:
    return {"type": "http.request"}


def cost(app: Callable[[Scope, Receive, Send], Awaitable[None]], requests: int) -> float:
    """Microseconds of CPU a request."""

    async def turn() -> float:
        begun = time.process_time()
        for _ in range(requests):
            scope = {"type": "http", "method": "PUT", "headers": HEADERS, "path": "/v1/x"}
            await app(scope, nothing, nowhere)
        return time.process_time() - begun

    return min(asyncio.run(turn()) for _ in range(5)) / requests * 1e6


@contextmanager
def tracing() -> Iterator[None]:
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    class Forgetful(InMemorySpanExporter):
        def export(self, spans):  # type: ignore[no-untyped-def]
            self.clear()
            return super().export(spans)

    traces.start(traces.Tracing(BatchSpanProcessor(Forgetful()), b"bench"))
    try:
        yield
    finally:
        traces.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20000)
    requests = parser.parse_args().requests
    metrics = Metrics()
    guard = RequestGuard(application, RequestObserver(metrics.requests, metrics.egress))
    histogram = Histogram("h", "h", ("a", "b", "c"), registry=CollectorRegistry())
    found = {
        "no guard": cost(application, requests),
        "a histogram": cost(bare(histogram), requests),
    }
    for form in ("json", "text"):
        logs.install("info", form, stream=io.StringIO())
        found["the guard"] = min(found.get("the guard", 1e9), cost(guard, requests))
        logs.install("debug", form, stream=io.StringIO())
        found[f"... and a line of {form}"] = cost(guard, requests)
    logging.getLogger().handlers.clear()
    logs.set_level("error")
    try:
        with tracing():
            found["... and five spans"] = cost(guard, requests)
    except ModuleNotFoundError:
        print("no opentelemetry here: pip install fedpress[otel]")
    for what, microseconds in found.items():
        print(f"{what:24}{microseconds:8.2f} us")


if __name__ == "__main__":
    main()
