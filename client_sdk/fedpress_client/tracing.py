"""OpenTelemetry, where the application around the device uses it; where it does not, nothing.

The SDK neither needs nor imports it: whoever has imported it finds the device's steps among its own
spans, and the server's traces lead to them by a link.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def span(name: str) -> AbstractContextManager[object]:
    """A part of what the device does."""
    api = _api()
    if api is None:
        return nullcontext()
    current: AbstractContextManager[object] = api.get_tracer(
        "fedpress_client"
    ).start_as_current_span(f"fedpress {name}")
    return current


def traced(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Every call is a span."""

    def around(work: Callable[P, R]) -> Callable[P, R]:
        @wraps(work)
        def called(*args: P.args, **more: P.kwargs) -> R:
            with span(name):
                return work(*args, **more)

        return called

    return around


def carried() -> dict[str, str]:
    """The header that names the current span to the server (W3C Trace Context), if there is one."""
    api = _api()
    if api is None:
        return {}
    context = api.get_current_span().get_span_context()
    if not context.is_valid:
        return {}
    ids = f"{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    return {"traceparent": f"00-{ids}"}


def _api() -> Any:
    return sys.modules.get("opentelemetry.trace")
