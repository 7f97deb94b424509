"""The console's pages. Each reads and does what a route of the API does, by the same parts."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import FileResponse, RedirectResponse
from pydantic import Field, ValidationError

from fedpress_protocols.errors import (
    Conflict,
    InvalidToken,
    MalformedRequest,
    NotFound,
    Unavailable,
    UnknownRound,
)
from fedpress_protocols.messages import (
    Continuation,
    RoundStatus,
    SignedReceipt,
    TaskSummary,
)
from fedpress_protocols.plan import Name
from fedpress_protocols.validation import format_validation_errors
from fedpress_server.api.health import readyz
from fedpress_server.api.listeners import Parts
from fedpress_server.api.routing import By
from fedpress_server.console import curves
from fedpress_server.console.rendering import confirm, render, sent_up
from fedpress_server.console.routing import (
    COOKIE,
    LOGIN,
    OVERVIEW,
    ConsoleRoute,
    OpenPageRoute,
    check_form,
    form_of,
    page_asked_for,
    page_of,
)
from fedpress_server.coordination.divergence import current_warnings
from fedpress_server.doctor import Finding, audit_log, findings_of
from fedpress_server.identity import audit
from fedpress_server.identity.authentication import hash_of
from fedpress_server.identity.browser_sessions import LIFETIME_SECONDS
from fedpress_server.identity.limits import address_of
from fedpress_server.services import Services
from fedpress_server.settings import Settings, secret_settings
from fedpress_server.storage import records

_STATIC = Path(__file__).with_name("static")
_LOGIN_COOKIE = "fedpress_login"
_CSRF = re.compile(r"[A-Za-z0-9_-]{32}", re.ASCII)
"""The value of that cookie."""
MAX_ROWS = 200
"""Rows of a table on one page."""
MAX_ROUNDS = 1000
"""Attempts that a task's charts show."""
MAX_ASSIGNMENTS = 20_000
_Counted = Annotated[int, Field(ge=1, lt=2**31 - 1)]
Action = Literal["pause", "resume", "finish", "cancel", "abort-round", "continue"]

console_routes = APIRouter(prefix="/console", route_class=ConsoleRoute, include_in_schema=False)
_open_routes = APIRouter(prefix="/console", route_class=OpenPageRoute, include_in_schema=False)
missing_pages = APIRouter(prefix="/console", route_class=OpenPageRoute, include_in_schema=False)


# Sessions


@_open_routes.get("/login")
async def show_login(
    request: Request, to: Annotated[str, Query(alias="next")] = OVERVIEW
) -> Response:
    """The form that takes a token, and leads to the page `next`."""
    return _login_form(request, page_of(to))


@_open_routes.post("/login")
async def log_in(request: Request, services: Parts) -> Response:
    """Exchange an operator's token for a session."""
    await check_form(request, request.cookies.get(_LOGIN_COOKIE, ""))
    form = form_of(request)
    to = page_of(form.get("next", OVERVIEW))
    token_hash = hash_of(form.get("token", "").strip())
    try:
        await services.operators.identify(token_hash, address_of(request))
    except InvalidToken as error:
        services.metrics.auth_failures.labels(error.slug).inc()
        return _login_form(request, to, str(error), 401)
    answer = RedirectResponse(to, 303)
    cookie = services.browser_sessions.open(token_hash)
    _set_cookie(request, answer, COOKIE, cookie, "/console", LIFETIME_SECONDS)
    return answer


@console_routes.post("/logout")
async def log_out() -> Response:
    """Have the browser forget the session."""
    answer = RedirectResponse(LOGIN, 303)
    answer.delete_cookie(COOKIE, path="/console")
    return answer


@_open_routes.get("/static/{name}")
async def static(name: Literal["console.css", "console.js"]) -> Response:
    """The style sheet, and the script that keeps pages current."""
    return FileResponse(_STATIC / name, headers={"Cache-Control": "no-cache"})


@missing_pages.get("/{path:path}")
async def no_page(request: Request, path: str) -> Response:
    """For addresses of no page, unless it is one without the slash at its end; the last route."""
    if not path or path.endswith("/"):
        return RedirectResponse(page_asked_for(request), 307)
    raise NotFound(
        f"the console has no page {path[:200]!r}", hint="the overview leads to all pages"
    )


def _login_form(request: Request, to: str, wrong: str = "", status: int = 200) -> Response:
    csrf = request.cookies.get(_LOGIN_COOKIE, "")
    if not _CSRF.fullmatch(csrf):  # else forms in other tabs have the same value
        csrf = secrets.token_urlsafe(24)
    answer = render(request, "login.html", status, csrf=csrf, next=to, wrong=wrong, viewer=None)
    answer.headers["Cache-Control"] = "no-store"
    _set_cookie(request, answer, _LOGIN_COOKIE, csrf, LOGIN, 3600)
    return answer


def _set_cookie(
    request: Request, answer: Response, name: str, value: str, path: str, seconds: int
) -> None:
    answer.set_cookie(
        name,
        value,
        max_age=seconds,
        path=path,
        secure="https" in (request.url.scheme, request.headers.get("x-forwarded-proto", "")),
        httponly=True,
        samesite="strict",
    )


# Tasks


@console_routes.get("")
async def overview(request: Request, services: Parts) -> Response:
    """All tasks, and whether the server works."""
    trouble = ""
    try:
        await readyz(services)
    except Unavailable as error:
        trouble = str(error)
    fleet = await services.server_registry.fleet()
    servers = (await services.server_registry.status()).servers
    return render(
        request,
        "overview.html",
        tasks=await services.queries.tasks(),
        warnings=await services.queries.all_warnings(),
        fleet=fleet,
        servers=servers,
        trouble=trouble,
    )


@console_routes.get("/tasks/{task}")
async def show_task(request: Request, task: Name, services: Parts) -> Response:
    """A task: its live round, its charts and its last rounds."""
    summary = await services.queries.task(task)
    config = await services.queries.configuration(task)
    held_since = await services.queries.held_since(task)
    attempts = await services.queries.history(task, limit=MAX_ROUNDS)
    model = await services.models.get(summary.model)
    newest = next((each for each in attempts[::-1] if each.received), None)
    profiles = list[records.ProfileUse]()
    if newest is not None:
        key = newest.task, newest.round, newest.attempt
        profiles = await services.database.read(lambda c: records.profile_use(c, key))
    sent = sum(sent_up(each) + each.download_bytes for each in attempts)
    plain = 2 * model.num_bytes * sum(each.received for each in attempts)
    return render(
        request,
        "task.html",
        task=summary,
        config=json.dumps(config.model_dump(mode="json"), indent=2),
        live=attempts[-1] if attempts and attempts[-1].closed_at is None else None,
        rounds=attempts[:-51:-1],
        learning=curves.learning(attempts),
        sending=curves.sending(attempts, model.num_bytes),
        profiles=profiles,
        profiles_of=newest and f"{newest.round}.{newest.attempt}",
        model_bytes=model.num_bytes,
        sent=sent,
        plain=plain,
        held_since=held_since,
        warnings=current_warnings(attempts),
        actions=_actions(summary, held_since is not None),
    )


def _actions(task: TaskSummary, is_held: bool) -> tuple[Action, ...]:
    by_state: dict[str, tuple[Action, ...]] = {
        "running": ("resume" if is_held else "pause", "abort-round", "cancel"),
        "paused": ("continue", "finish", "cancel"),
        "finished": ("continue",),
        "cancelled": ("continue",),
    }
    return by_state[task.state]


@console_routes.get("/tasks/{task}/rounds/{number}")
async def show_round(
    request: Request, task: Name, number: _Counted, services: Parts, attempt: _Counted | None = None
) -> Response:
    """An attempt at a round, by default the latest: its assignments, receipts and masked
    session."""
    status = await _attempt(services, task, number, attempt)
    assignments = await services.queries.assignments(task, number, status.attempt, MAX_ASSIGNMENTS)
    reasons, shown = Counter[str](), list[tuple[str, str, str, float, str]]()
    for each in assignments:
        reason = "open"
        if each.receipt:
            reason = SignedReceipt.model_validate_json(each.receipt).receipt.reason
        reasons[reason] += 1
        if len(shown) < MAX_ROWS:
            row = each.assignment, each.client_id, each.profile, each.assigned_at, reason
            shown.append(row)
    return render(
        request,
        "round.html",
        status=status,
        assignments=shown,
        num_assignments=len(assignments),
        reasons=reasons.most_common(),
    )


async def _attempt(services: Services, task: str, number: int, attempt: int | None) -> RoundStatus:
    """By default the latest. An earlier one made no model, so nothing was measured of it, and it
    comes without durations."""
    latest = await services.queries.round_status(task, number)
    if attempt is None or attempt == latest.attempt:
        return latest
    earlier = await services.queries.history(task, (number, attempt + 1), limit=1)
    if not earlier or (earlier[0].round, earlier[0].attempt) != (number, attempt):
        raise UnknownRound(f"round {number} of task {task!r} has no attempt {attempt}", task=task)
    return earlier[0]


_CONSEQUENCES: dict[Action, str] = {
    "pause": "No device gets work from now on. Uploads under way are taken, and nothing is lost.",
    "resume": "Devices get work again.",
    "finish": "The task ends, and its devices may go. Continue gives it more rounds later.",
    "cancel": "The task ends. Uploads of the open round are not included.",
    "abort-round": "The open attempt ends without its uploads, and the next one begins.",
    "continue": "The task gets more rounds, from its newest model.",
}


@console_routes.get("/tasks/{task}/do/{action}")
async def confirm_action(request: Request, task: Name, action: Action, services: Parts) -> Response:
    """The consequences of an action, and the button for it."""
    summary = await services.queries.task(task)
    fields, hidden = [("detail", "Reason (optional)", "text", "")], dict[str, str]()
    if action == "abort-round":
        hidden = {"expect": await _newest_attempt(services, task)}
    elif action == "continue":
        fields = [("rounds", "Further rounds", "number", "1")]
        hidden = {"after_round": str(summary.round), "model": summary.model}
    return confirm(
        request,
        f"{action.replace('-', ' ').capitalize()}: {task}",
        f"{_CONSEQUENCES[action]} The task is {summary.state} at round {summary.round} of "
        f"{summary.rounds}.",
        f"/console/tasks/{task}",
        fields if action in ("continue", "cancel", "abort-round") else [],
        hidden,
    )


async def _newest_attempt(services: Services, task: str) -> str:
    """The newest attempt at a round of the task, as ROUND.ATTEMPT."""
    newest = await services.queries.history(task, limit=1)
    return f"{newest[-1].round}.{newest[-1].attempt}" if newest else ""


@console_routes.post("/tasks/{task}/do/{action}")
async def act(request: Request, task: Name, action: Action, services: Parts, by: By) -> Response:
    """Do it, as the API's route of that name."""
    lifecycle, form = services.lifecycle, form_of(request)
    detail = form.get("detail", "").strip()[:200]
    if action == "pause":
        await lifecycle.pause(task, by=by)
    elif action == "resume":
        await lifecycle.resume(task, by=by)
    elif action == "finish":
        await lifecycle.finish(task, by=by)
    elif action == "cancel":
        await lifecycle.cancel(task, f"cancelled {detail or 'in the console'}", by=by)
    elif action == "abort-round":
        newest = await _newest_attempt(services, task)
        if form.get("expect") != newest:
            raise Conflict(
                f"the open attempt is {newest} now, and the form was for another",
                hint="look at the task again",
            )
        await lifecycle.abort_round(task, f"aborted {detail or 'in the console'}", by=by)
    else:
        try:
            more = Continuation.model_validate_strings(
                {name: form.get(name, "") for name in Continuation.model_fields}
            )
        except ValidationError as exc:
            raise MalformedRequest(format_validation_errors(exc)) from exc
        await lifecycle.continue_(task, more, by=by)
    return RedirectResponse(f"/console/tasks/{task}", 303)


# The server


@console_routes.get("/audit")
async def show_audit(
    request: Request,
    services: Parts,
    after: Annotated[int | None, Query(ge=0, lt=2**53)] = None,
) -> Response:
    """The audit log, by default its end."""
    return await _audit_log(request, services, after)


@console_routes.post("/audit")
async def verify_audit(request: Request, services: Parts) -> Response:
    """Check the chain of the whole audit log, and show its end."""
    verdict = await asyncio.to_thread(audit_log, services.settings)
    return await _audit_log(request, services, None, verdict)


async def _audit_log(
    request: Request, services: Services, after: int | None, verdict: Finding | None = None
) -> Response:
    if after is None:
        head = await services.database.read(audit.head)
        after = max(0, head.seq - MAX_ROWS)
    start = after
    page = await services.database.read(lambda c: audit.page(c, start, MAX_ROWS))
    entries = [(each, json.dumps(each.details)) for each in reversed(page.entries)]
    earlier = max(0, start - MAX_ROWS) if start else None
    return render(
        request, "audit.html", entries=entries, head=page.head, earlier=earlier, verdict=verdict
    )


@console_routes.get("/settings")
async def show_settings(request: Request, services: Parts) -> Response:
    """The settings, without secrets."""
    return render(request, "settings.html", settings=_public(services), findings=None)


@console_routes.post("/settings")
async def diagnose(request: Request, services: Parts) -> Response:
    """The settings, and what `fedpress doctor` finds about them."""
    findings = await asyncio.to_thread(lambda: list(findings_of(services.settings, time.time())))
    return render(request, "settings.html", settings=_public(services), findings=findings)


def _public(services: Services) -> list[tuple[str, str, str]]:
    secret = {*secret_settings(), "database_url"}  # which may have a password in it
    values = services.settings.model_dump(mode="json", exclude=secret)
    fields = Settings.model_fields
    return [
        (name, "not set" if value in (None, "") else str(value), fields[name].description or "")
        for name, value in values.items()
    ]


console_routes.routes.extend(_open_routes.routes)
