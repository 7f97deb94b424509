"""Rendering of the console's templates; everything that is inserted is escaped."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse, Response
from jinja2 import Environment, PackageLoader, StrictUndefined

_UNITS = ("B", "kB", "MB", "GB", "TB")
_SPANS = (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 0.001))


def moment(seconds: float | None) -> str:
    """Unix seconds as UTC, or a dash."""
    if seconds is None:
        return "–"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def size(num_bytes: float) -> str:
    """Bytes with three digits and a decimal unit."""
    for unit in _UNITS:
        if num_bytes < 1000 or unit == _UNITS[-1]:
            break
        num_bytes /= 1000
    return f"{num_bytes:.3g} {unit}" if num_bytes < 999.5 else f"{num_bytes:.0f} {unit}"


def span(seconds: float) -> str:
    """A duration with three digits, in the largest unit of which it is at least one."""
    if not seconds:
        return "0 s"
    unit, length = next((each for each in _SPANS if abs(seconds) >= each[1]), _SPANS[-1])
    return f"{seconds / length:.3g} {unit}"


_TEMPLATES = Environment(
    loader=PackageLoader("fedpress_server.console"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters.update(moment=moment, size=size, span=span)


def render(request: Request, template: str, code: int = 200, **values: Any) -> Response:
    """The page, or 304 where the browser has the same one already."""
    values.setdefault("viewer", getattr(request.state, "viewer", None))
    text = _TEMPLATES.get_template(template).render(path=request.url.path, **values)
    etag = f'"{hashlib.sha256(text.encode()).hexdigest()[:32]}"'
    headers = {"ETag": etag, "Cache-Control": "private, no-cache"}
    if code == 200 and request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    return HTMLResponse(text, code, headers=headers)


def confirm(
    request: Request,
    title: str,
    text: str,
    back: str,
    fields: Sequence[tuple[str, str, str, str]] = (),
    hidden: dict[str, str] | None = None,
) -> Response:
    """A page whose button posts to its own address."""
    return render(
        request,
        "confirm.html",
        title=title,
        text=text,
        back=back,
        fields=fields,
        hidden=hidden or {},
    )
