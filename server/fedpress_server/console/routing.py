"""Route classes of the console: sessions in place of bearer tokens, forms in place of JSON, and
errors as pages."""

from __future__ import annotations

import hmac
import re
from typing import NamedTuple
from urllib.parse import parse_qs, quote, urlsplit

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import RedirectResponse

from fedpress_protocols.errors import FedpressError, Forbidden, MalformedRequest, Unauthorized
from fedpress_protocols.signatures import Content
from fedpress_protocols.validation import format_error_details
from fedpress_server.api.listeners import services_of
from fedpress_server.api.permissions import permission_of
from fedpress_server.api.routing import BoundedRoute, Handler, OperatorRoute, read_body
from fedpress_server.console.rendering import render
from fedpress_server.identity.limits import address_of
from fedpress_server.identity.operators import MAY, Permission

COOKIE = "fedpress_session"
LOGIN = "/console/login"
OVERVIEW = "/console"
_PAGE = re.compile(r"/console(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*(\?[A-Za-z0-9._~%&=+:-]*)?", re.ASCII)
"""A page's path with its query: no host, no empty, dotted or escaped part of the path."""
_ENTRANCES = (LOGIN, "/console/logout")
MAX_FORM_BYTES = 65536
POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Viewer(NamedTuple):
    """The operator who looks, as the templates see one."""

    actor: str
    role: str
    permissions: frozenset[Permission]
    csrf: str


class OpenPageRoute(BoundedRoute):
    """A page for anybody; errors become pages, too."""

    def get_route_handler(self) -> Handler:
        handle = super().get_route_handler()

        async def shown(request: Request) -> Response:
            try:
                answer = await handle(request)
            except FedpressError as error:
                answer = await _refusal(request, error)
            except RequestValidationError as exc:
                wrong = MalformedRequest(format_error_details(exc.errors()))
                answer = await _refusal(request, wrong)
            answer.headers.update(HEADERS)
            if "cache-control" not in answer.headers:
                answer.headers["Cache-Control"] = "no-store"
            return answer

        return shown


class ConsoleRoute(OpenPageRoute, OperatorRoute):
    """A page for an operator with a session and the permission that `PERMISSIONS` requires."""

    async def admit(self, request: Request) -> Content | None:
        services = await services_of(request)
        session = services.browser_sessions.find(request.cookies.get(COOKIE, ""))
        if session is None:
            raise Unauthorized("there is no session, or it has ended", hint="log in")
        address = address_of(request)
        identity = await services.operators.identify(session.token_hash, address)
        request.state.viewer = Viewer(
            identity.actor, identity.role, MAY[identity.role], session.csrf
        )
        if request.method == "POST":
            await check_form(request, session.csrf)
        permission = permission_of(self.methods, self.path)
        request.state.actor = services.operators.authorize(identity, permission, address)
        return None


async def check_form(request: Request, csrf: str) -> None:
    """Read the form into the request's state; raises Forbidden unless it is one of this site's."""
    origin = request.headers.get("origin")
    if origin is not None and _authority_of(origin) != request.headers.get("host"):
        raise Forbidden("the form was sent from another site", hint="open the console itself")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise MalformedRequest(f"a form of type {kind[:64]!r}, not a form of the console")
    body = await read_body(request, MAX_FORM_BYTES)
    try:
        fields = parse_qs(body.decode(), keep_blank_values=True, max_num_fields=16)
    except ValueError as exc:
        raise MalformedRequest(f"the form cannot be read: {exc}") from exc
    form = {name: values[-1] for name, values in fields.items()}
    sent = form.pop("csrf", "")
    if not csrf or not hmac.compare_digest(sent.encode(), csrf.encode()):
        raise Forbidden(
            "the form is not of this session", hint="go back, reload the page and try again"
        )
    request.state.form = form


def page_of(text: str) -> str:
    """The text where it is the path of one of the console's pages, with a query or without;
    the overview's in place of anything else: a log-in leads nowhere out of the console."""
    is_page = len(text) <= 2048 and _PAGE.fullmatch(text) is not None
    return text if is_page and text.partition("?")[0] not in _ENTRANCES else OVERVIEW


def page_asked_for(request: Request) -> str:
    """`page_of` the request's address, without slashes at its end."""
    path, query = request.scope["path"].rstrip("/"), request.scope["query_string"].decode("latin-1")
    return page_of(f"{path}?{query}" if query else path)


def _authority_of(origin: str) -> str:
    """Host and port of a URL; empty for what is none."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def form_of(request: Request) -> dict[str, str]:
    """The checked form, without its CSRF value."""
    form: dict[str, str] = request.state.form
    return form


async def _refusal(request: Request, error: FedpressError) -> Response:
    services = await services_of(request)
    services.metrics.refused.labels(error.slug).inc()
    request.state.problem = error.slug
    login = ""
    if isinstance(error, Unauthorized):
        services.metrics.auth_failures.labels(error.slug).inc()
        page = page_asked_for(request)
        login = LOGIN if page == OVERVIEW else f"{LOGIN}?next={quote(page, safe='')}"
        if request.method == "GET":
            return RedirectResponse(login, 303)
    return render(request, "error.html", error.status, error=error, login=login)
