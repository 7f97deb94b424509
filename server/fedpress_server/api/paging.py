"""Lists that grow without end are answered page by page, each with a link to the next one.

    Link: </v1/tasks/digits/rounds?limit=100&before=12.1>; rel="next"

(RFC 8288). A page has MOST entries at most, whatever is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar
from urllib.parse import parse_qsl, urlencode

from fastapi import Query, Request, Response

T = TypeVar("T")
MOST = 1000
"""Entries of one answer."""

Limit = Annotated[int, Query(ge=1, le=MOST, description="Entries of the page, at most.")]

LINKED = {
    "headers": {
        "Link": {
            "description": 'Where there are more: the next page, rel="next"',
            "schema": {"type": "string"},
        }
    }
}
"""The `Link` header in the OpenAPI description of a page."""


def first_page(
    request: Request,
    response: Response,
    rows: list[T],
    limit: int,
    **cursor: Callable[[T], str | int],
) -> list[T]:
    """The first `limit` of `found`, of which there is one more where the list goes on: then the
    answer links to the next page, by the `cursor` that the last entry shown makes."""
    shown = rows[:limit]
    if len(rows) > limit:
        query = dict(parse_qsl(request.url.query))
        query |= {name: str(of(shown[-1])) for name, of in cursor.items()}
        response.headers["Link"] = f'<{request.url.path}?{urlencode(query)}>; rel="next"'
    return shown
