"""The API's description: OpenAPI for programs, and the same as a page for people.

The page is made here, of the description alone: no script, nothing from elsewhere, and a policy
that lets the browser load nothing. So it reads the same without the internet.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from html import escape
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse

from fedpress_server.api.routing import OperatorRoute, PageRoute

description_routes = APIRouter(include_in_schema=False)
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
code, pre { font-family: ui-monospace, monospace; font-size: 0.9em }
pre { background: #f3f3f3; padding: 0.6rem; overflow-x: auto }
summary { cursor: pointer; padding: 0.2rem 0 } summary b { display: inline-block; min-width: 4rem }
table { border-collapse: collapse } td { padding: 0.1rem 1rem 0.1rem 0; vertical-align: top }
"""
_DIGEST = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_POLICY = (
    f"default-src 'none'; style-src 'sha256-{_DIGEST}'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


async def openapi(request: Request) -> JSONResponse:
    """The description, OpenAPI 3.1."""
    return JSONResponse(request.app.openapi())


async def page(request: Request) -> HTMLResponse:
    """The description to read."""
    return HTMLResponse("".join(_written(request.app.openapi())), headers=_HEADERS)


description_routes.add_api_route(
    "/openapi.json", openapi, methods=["GET"], route_class_override=OperatorRoute
)
description_routes.add_api_route("/docs", page, methods=["GET"], route_class_override=PageRoute)


def _written(schema: dict[str, Any]) -> Iterator[str]:
    title = escape(f"{schema['info']['title']} {schema['info']['version']}")
    yield f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
    yield f"<style>{_STYLE}</style><h1>{title}</h1>"
    yield f"<p>{escape(schema['info'].get('description', ''))}</p>"
    yield "<p>For programs: <code>GET /openapi.json</code>, with the same token.</p>"
    by_tag: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            for tag in operation.get("tags") or ["others"]:
                by_tag.setdefault(tag, []).append((method.upper(), path, operation))
    for tag, routes in by_tag.items():
        yield f"<h2>{escape(tag)}</h2>"
        for method, path, operation in routes:
            yield from _route(method, path, operation)
    yield "<h2>Schemas</h2>"
    for name, each in sorted(schema.get("components", {}).get("schemas", {}).items()):
        text = escape(json.dumps(each, indent=2, ensure_ascii=False))
        yield (
            f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary>'
            f"<pre>{text}</pre></details>"
        )


def _route(method: str, path: str, operation: dict[str, Any]) -> Iterator[str]:
    yield f"<details><summary><b>{method}</b> <code>{escape(path)}</code> "
    yield f"{escape(operation.get('summary', ''))}</summary>"
    yield f"<p>{escape(operation.get('description', ''))}</p><table>"
    for each in operation.get("parameters", []):
        need = "required" if each.get("required") else "optional"
        text = escape(each.get("description", ""))
        yield f"<tr><td>{each['in']}<td><code>{escape(each['name'])}</code><td>{need}<td>{text}"
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        yield f"<tr><td>body<td>{escape(kind)}<td><td>{_type(content.get('schema', {}))}"
    for status, answer in operation["responses"].items():
        kinds = answer.get("content", {}).values()
        types = ", ".join(filter(None, (_type(each.get("schema", {})) for each in kinds)))
        yield f"<tr><td>{status}<td>{types}<td><td>{escape(answer.get('description', ''))}"
    yield "</table></details>"


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "items" in schema:
        return f"list of {_type(schema['items'])}"
    return escape(str(schema.get("type", "")))
