"""Rendering of the console's templates; everything that is inserted is escaped, also characters
that would reorder what a page says."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse, Response
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fedpress_compression.errors import printable
from fedpress_protocols.messages import RoundStatus

_UNITS = ("B", "kB", "MB", "GB", "TB")
_SPANS = (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 0.001))


def moment(seconds: float | None) -> str:
    """Unix seconds as UTC, or a dash."""
    if seconds is None:
        return "–"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def size(num_bytes: float, digits: int = 3) -> str:
    """Bytes with `digits` digits and a decimal unit."""
    for unit in _UNITS:
        if num_bytes < 1000 or unit == _UNITS[-1]:
            break
        num_bytes /= 1000
    return f"{num_bytes:.{digits}g} {unit}" if num_bytes < 999.5 else f"{num_bytes:.0f} {unit}"


def span(seconds: float, digits: int = 3) -> str:
    """A duration with `digits` digits, in the largest unit of which it is at least one."""
    if not seconds:
        return "0 s"
    unit, length = next((each for each in _SPANS if abs(seconds) >= each[1]), _SPANS[-1])
    return f"{seconds / length:.{digits}g} {unit}"


def sent_up(attempt: RoundStatus) -> int:
    """Body bytes of the attempt's uploads and of the messages of its masked session."""
    return attempt.upload_bytes + (attempt.session.message_bytes if attempt.session else 0)


def counted(counts: dict[str, int]) -> str:
    """Numbers, each before what it counts."""
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def shown(value: Any) -> Any:
    """A text with escapes in place of characters that hide or reorder others, for devices choose
    some of the texts; of control characters it keeps those of a form with several lines."""
    if not isinstance(value, str) or isinstance(value, Markup) or value.isprintable():
        return value
    return "".join(each if each in "\n\r\t" else printable(each) for each in value)


_TEMPLATES = Environment(
    loader=PackageLoader("fedpress_server.console"),
    autoescape=True,
    finalize=shown,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters.update(moment=moment, size=size, span=span, sent_up=sent_up, counted=counted)


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
    facts: Sequence[tuple[str, str]] = (),
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
        facts=facts,
    )
