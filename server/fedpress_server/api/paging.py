"""Lists that grow without end are answered page by page, each with a link to the next one.

    Link: </v1/tasks/digits/rounds?limit=100&before=12.1>; rel="next"

(RFC 8288). A page has MOST entries at most, whatever is asked for.
"""

from __future__ import annotations

from typing import Annotated
from urllib.parse import parse_qsl, urlencode

from fastapi import Query, Request, Response

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
"""What a route's 200 says of it in OpenAPI."""


def link_next(request: Request, response: Response, **cursor: str | int) -> None:
    """Tell where the list goes on: at the same path and query, with `cursor` in it."""
    query = dict(parse_qsl(request.url.query)) | {name: str(at) for name, at in cursor.items()}
    response.headers["Link"] = f'<{request.url.path}?{urlencode(query)}>; rel="next"'
