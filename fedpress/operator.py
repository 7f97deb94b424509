"""An operator's hand on a running server: its admin API as a small class."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar
from urllib.parse import parse_qsl, quote, urlsplit

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from fedpress_protocols.audit import AuditPage
from fedpress_protocols.enrolment import (
    ClientDetails,
    ClientStatus,
    DeviceState,
    TokenResponse,
    TokenStatus,
)
from fedpress_protocols.errors import (
    ConfigurationError,
    Conflict,
    FedpressError,
    TransportError,
    Unavailable,
    UnknownModel,
)
from fedpress_protocols.fleet import FleetStatus, LogLevel, LogLevelStatus, ServerList, ServerStatus
from fedpress_protocols.messages import Continuation, RoundStatus, TaskConfig, TaskSummary
from fedpress_protocols.model import Model
from fedpress_protocols.operators import OperatorRequest, OperatorStatus, OperatorToken, Role
from fedpress_protocols.registry import (
    Alias,
    Collected,
    CollectRequest,
    ModelLineage,
    ModelVersion,
    Promotion,
    Rollback,
)
from fedpress_protocols.restores import RestoreStatus

T = TypeVar("T")
__all__ = ["Operator", "RoundStatus", "TaskConfig"]
"""The messages among them are what its methods take and return."""

_ROUNDS = TypeAdapter(list[RoundStatus])
_TASKS = TypeAdapter(list[TaskSummary])
_TASK = TypeAdapter(TaskSummary)
_VERSIONS = TypeAdapter(list[ModelVersion])
_ALIASES = TypeAdapter(list[Alias])
_ALIAS = TypeAdapter(Alias)
_OPERATORS = TypeAdapter(list[OperatorStatus])
_TOKENS = TypeAdapter(list[TokenStatus])
_CLIENTS = TypeAdapter(list[ClientStatus])
_RESTORES = TypeAdapter(list[RestoreStatus])

_OF_OPERATORS = "Operators give none: use the address of FEDPRESS_ADMIN_PORT, which asks for none"


class Operator:
    """Talks to the server at `url` with its admin token.

    `ca` is a PEM file of whom to believe about a server on https, in place of the system's list;
    `http` takes the place of the sockets, for a server in this process.
    Raises ConfigurationError for a URL, a token or a file that cannot be one. Every method raises
    the error that the server sent; without an answer of a fedpress server TransportError, or
    ConfigurationError where TLS is why.
    """

    def __init__(
        self,
        url: str,
        admin_token: str,
        *,
        timeout: float = 30.0,
        ca: Path | None = None,
        http: httpx.BaseTransport | None = None,
    ) -> None:
        if not (admin_token.isascii() and admin_token.isprintable()):
            raise ConfigurationError("an admin token is printable ASCII, and this one is not")
        self._url = checked(url)
        trusted: dict[str, Any] = {} if ca is None else {"verify": _trusting(ca)}
        if http is not None:
            trusted["transport"] = http
        self._http = httpx.Client(
            base_url=self._url,
            headers={"Authorization": f"Bearer {admin_token}"},
            timeout=timeout,
            **trusted,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()

    @property
    def url(self) -> str:
        """The server's address."""
        return self._url

    def create_token(
        self, *, uses: int = 1, expires_in: float | None = None, note: str = ""
    ) -> str:
        """An enrolment token for `uses` devices, valid for `expires_in` seconds (None: the
        server's default). It is shown here and never again."""
        return self.new_token(uses=uses, expires_in=expires_in, note=note).token

    def new_token(
        self,
        *,
        uses: int = 1,
        expires_in: float | None = None,
        note: str = "",
        approve_each: bool = False,
    ) -> TokenResponse:
        """As `create_token`, with what is told of it later. With `approve_each` every device that
        it brings waits for `approve_client`."""
        options: dict[str, Any] = {} if expires_in is None else {"expires_in": expires_in}
        if approve_each:
            options["approve_each"] = True
        body = {"uses": uses, "note": note, **options}
        return self._read(TypeAdapter(TokenResponse), "POST", "/v1/admin/tokens", json=body)

    def tokens(self) -> list[TokenStatus]:
        """Every enrolment token without its secret, the newest first."""
        return self._listed(_TOKENS, "/v1/admin/tokens")

    def revoke_token(self, token_id: str) -> TokenStatus:
        """Let no more devices enrol with it; those that have, stay."""
        path = f"/v1/admin/tokens/{_segment(token_id)}/revoke"
        return self._read(TypeAdapter(TokenStatus), "POST", path)

    def clients(self, state: DeviceState | None = None) -> list[ClientStatus]:
        """The devices that have enrolled, in that order; of one state alone, or of all."""
        asked = {} if state is None else {"state": state}
        return self._listed(_CLIENTS, "/v1/admin/clients", **asked)

    def client(self, client_id: str) -> ClientDetails:
        """One device, with the keys that it has left."""
        path = f"/v1/admin/clients/{_segment(client_id)}"
        return self._read(TypeAdapter(ClientDetails), "GET", path)

    def approve_client(self, client_id: str, *, key_id: str | None = None) -> ClientStatus:
        """Let a device in that waits. Raises Conflict where its key is not `key_id`, which the
        device itself has shown."""
        if key_id is not None and (actual := self.client(client_id).key_id) != key_id:
            raise Conflict(
                f"client {client_id} has key {actual}, and not {key_id}",
                hint="somebody else may have used the token: reject this client",
            )
        return self._decide(client_id, "approve")

    def reject_client(self, client_id: str) -> ClientStatus:
        """Turn a device away that waits."""
        return self._decide(client_id, "reject")

    def revoke_client(self, client_id: str) -> ClientStatus:
        """Turn a device away for good; what it has contributed stays."""
        return self._decide(client_id, "revoke")

    def _decide(self, client_id: str, word: str) -> ClientStatus:
        path = f"/v1/admin/clients/{_segment(client_id)}/{word}"
        return self._read(TypeAdapter(ClientStatus), "POST", path)

    def register_model(self, model: Model) -> str:
        """Store `model`; returns the digest that tasks call it by. Idempotent."""
        self._send(
            "PUT",
            f"/v1/admin/models/{model.digest}",
            content=model.to_bytes(),
            headers={"Content-Type": "application/octet-stream"},
        )
        return model.digest

    def create_task(self, config: TaskConfig) -> TaskSummary:
        return self._read(_TASK, "POST", "/v1/admin/tasks", **_document(config))

    def continue_task(self, task: str, more: Continuation) -> TaskSummary:
        """More rounds for a task that has stopped; repeating it changes nothing."""
        return self._read(_TASK, "POST", _admin(task, "continue"), **_document(more))

    def pause_task(self, task: str) -> TaskSummary:
        """Give its devices no work from now on; what is under way is taken."""
        return self._read(_TASK, "POST", _admin(task, "pause"))

    def resume_task(self, task: str) -> TaskSummary:
        """Give the devices of a paused, running task work again."""
        return self._read(_TASK, "POST", _admin(task, "resume"))

    def finish_task(self, task: str) -> TaskSummary:
        """End a paused task for good: its devices may go."""
        return self._read(_TASK, "POST", _admin(task, "finish"))

    def cancel_task(self, task: str, why: str = "") -> TaskSummary:
        """End a task; the model of its last committed round stays."""
        return self._read(_TASK, "POST", _admin(task, "cancel"), **_reason(why))

    def abort_round(self, task: str, why: str = "") -> TaskSummary:
        """Abandon the open attempt and begin the round again."""
        return self._read(_TASK, "POST", _admin(task, "abort-round"), **_reason(why))

    def tasks(self) -> list[TaskSummary]:
        return self._listed(_TASKS, "/v1/tasks")

    def task(self, task: str) -> TaskSummary:
        return self._read(_TASK, "GET", f"/v1/tasks/{_segment(task)}")

    def configuration(self, task: str) -> TaskConfig:
        """The task's configuration as it stands, with every default written out."""
        path = f"/v1/admin/tasks/{_segment(task)}/configuration"
        return self._read(TypeAdapter(TaskConfig), "GET", path)

    def rounds(
        self, task: str, *, before: str | None = None, limit: int | None = None
    ) -> list[RoundStatus]:
        """The newest attempts at the task's rounds, in order: `limit` of them, at most 1000, or
        every one. `before`: only those before a round, `"12"`, or before an attempt, `"12.1"`."""
        path = f"/v1/tasks/{_segment(task)}/rounds"
        asked = {"before": before, "limit": limit}
        pages = self._pages(_ROUNDS, path, **{n: v for n, v in asked.items() if v is not None})
        newest_first = [next(pages)] if limit is not None else list(pages)
        return [status for page in reversed(newest_first) for status in page]

    def round(self, task: str, number: int) -> RoundStatus:
        """The newest attempt at a round, with what devices measured by group and by class."""
        path = f"/v1/tasks/{_segment(task)}/rounds/{number}"
        return self._read(TypeAdapter(RoundStatus), "GET", path)

    def model(self, digest: str) -> Model:
        """The model, checked against its digest."""
        model = Model.from_bytes(self._send("GET", f"/v1/models/{_segment(digest)}").content)
        if model.digest != digest:
            raise UnknownModel(f"the server sent model {model.digest[:12]} for {digest[:12]}")
        return model

    def versions(
        self, task: str, *, before: int | None = None, limit: int = 1000
    ) -> list[ModelVersion]:
        """The newest versions of the task's model, those below `before`, the newest first."""
        asked = {"limit": limit} if before is None else {"limit": limit, "before": before}
        return self._read(_VERSIONS, "GET", _admin(task, "versions"), params=asked)

    def version(self, task: str, which: str) -> ModelLineage:
        """One version by its number, by an alias, or as newest or best."""
        path = _admin(task, "versions", which)
        return self._read(TypeAdapter(ModelLineage), "GET", path)

    def aliases(self, task: str) -> list[Alias]:
        """The task's aliases and their history."""
        return self._read(_ALIASES, "GET", _admin(task, "aliases"))

    def promote(
        self, task: str, alias: str, version: int, *, expect: int | Literal["any", "none"] = "any"
    ) -> Alias:
        """Point `alias` to `version` if it points to `expect`; Conflict if it does not."""
        asked = Promotion(version=version, expect=expect)
        return self._read(_ALIAS, "PUT", _admin(task, "aliases", alias), **_document(asked))

    def roll_back(self, task: str, alias: str, *, expect: int | Literal["any"] = "any") -> Alias:
        """Point `alias` to where it pointed before; Conflict if it points elsewhere than expected,
        or there is nothing before."""
        path = _admin(task, "aliases", alias, "rollback")
        return self._read(_ALIAS, "POST", path, **_document(Rollback(expect=expect)))

    def collect(self, *, dry_run: bool = False) -> Collected:
        """Remove the files of models that retention gives up; or only say which."""
        asked = _document(CollectRequest(dry_run=dry_run))
        return self._read(TypeAdapter(Collected), "POST", "/v1/admin/models/collect", **asked)

    def create_operator(
        self, role: Role, *, expires_in: float | None = None, note: str = ""
    ) -> OperatorToken:
        """A token for somebody with `role`, valid for `expires_in` seconds (None: the server's
        default). It is shown here and never again."""
        options = {} if expires_in is None else {"expires_in": expires_in}
        asked = _document(OperatorRequest(role=role, note=note, **options))
        return self._read(TypeAdapter(OperatorToken), "POST", "/v1/admin/operators", **asked)

    def operators(self) -> list[OperatorStatus]:
        """Whoever has or had a token, besides the one of the server's settings."""
        return self._listed(_OPERATORS, "/v1/admin/operators")

    def revoke_operator(self, operator_id: str) -> OperatorStatus:
        """Refuse somebody's token from now on; done again, it changes nothing."""
        path = f"/v1/admin/operators/{_segment(operator_id)}"
        return self._read(TypeAdapter(OperatorStatus), "DELETE", path)

    def audit(self, *, after: int = 0, limit: int = 1000) -> AuditPage:
        """Entries of the audit log later than `after`, and where it ends."""
        asked = {"after": after, "limit": limit}
        return self._read(TypeAdapter(AuditPage), "GET", "/v1/admin/audit", params=asked)

    def restores(self) -> list[RestoreStatus]:
        """Every restore that the server has been through, the newest first, with the rounds that
        devices have reported as committed after its backup."""
        return self._read(_RESTORES, "GET", "/v1/admin/restores")

    def fleet(self) -> FleetStatus:
        """Links and clocks of the devices as the servers that run have measured them, and what
        they have sent, each since it was started."""
        return self._read(TypeAdapter(FleetStatus), "GET", "/v1/admin/fleet")

    def servers(self) -> tuple[ServerStatus, ...]:
        """The servers that run, and for an hour those that fell silent without being stopped."""
        return self._read(TypeAdapter(ServerList), "GET", "/v1/admin/servers").servers

    def log_level(self) -> LogLevelStatus:
        """The least severe message that each server logs."""
        return self._read(TypeAdapter(LogLevelStatus), "GET", "/v1/admin/log-level")

    def set_log_level(self, level: LogLevel) -> LogLevelStatus:
        """Have all servers log from another level on."""
        asked = {"level": level}
        return self._read(TypeAdapter(LogLevelStatus), "PUT", "/v1/admin/log-level", json=asked)

    def _pages(self, kind: TypeAdapter[list[T]], path: str, **asked: object) -> Iterator[list[T]]:
        """The pages of a list, as their links lead from one to the next."""
        query = {name: str(value) for name, value in asked.items()}
        while True:
            response = self._send("GET", path, params=query)
            page = self._parsed(kind, response)
            yield page
            if not page or "next" not in response.links:
                return
            query = dict(parse_qsl(urlsplit(response.links["next"]["url"]).query))

    def _listed(self, kind: TypeAdapter[list[T]], path: str, **asked: object) -> list[T]:
        """All entries of a list, page after page."""
        return [each for page in self._pages(kind, path, **asked) for each in page]

    def _read(self, kind: TypeAdapter[T], method: str, path: str, **content: Any) -> T:
        """The answer as what it should be."""
        return self._parsed(kind, self._send(method, path, **content))

    def _parsed(self, kind: TypeAdapter[T], response: httpx.Response) -> T:
        try:
            return kind.validate_json(response.content)
        except ValidationError as exc:
            raise self._stranger(response) from exc

    def _send(self, method: str, path: str, **content: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **content)
        except httpx.HTTPError as exc:
            raise _unanswered(self._url, exc) from exc
        if response.is_success:
            return response
        try:
            problem = response.json()
        except ValueError:
            problem = None
        if not isinstance(problem, dict) or "detail" not in problem:
            raise self._stranger(response)
        raise FedpressError.from_problem(problem, response.status_code)

    def _stranger(self, response: httpx.Response) -> FedpressError:
        """The error for an answer that no fedpress server gives."""
        asked, status = response.request.url, response.status_code
        if response.is_redirect:
            to = response.headers.get("location", "nowhere")
            return TransportError(
                f"{asked} redirects to {to}", hint="give the server's own address as the URL"
            )
        if status in (502, 503, 504):
            return Unavailable(
                f"{self._url} answers {status}, and not by the server itself",
                hint="what stands before the server does not reach it; is the server running?",
            )
        return TransportError(
            f"{self._url} is no fedpress server: it answers {status} without what was asked for",
            hint="look at the URL, and at the proxy if one is before the server",
        )


def asked(url: str, *, ca: Path | None = None, timeout: float = 5.0) -> httpx.Response:
    """The answer to a GET without a token, which ignores this machine's proxy settings; raises as
    `Operator` does."""
    trusted = httpx.create_ssl_context() if ca is None else _trusting(ca)
    try:
        return httpx.get(checked(url), timeout=timeout, trust_env=False, verify=trusted)
    except httpx.HTTPError as exc:
        raise _unanswered(url, exc) from exc


def _unanswered(url: str, exc: httpx.HTTPError) -> FedpressError:
    """The error for a request without an answer; TLS that fails once fails again."""
    from fedpress_client import tls  # here alone: the SDK takes a second to import

    if (reason := tls.explained(exc)) is not None:
        detail, hint = reason
        if tls.is_about_the_client(reason):
            detail, hint = "the server asks for a client certificate", _OF_OPERATORS
        return ConfigurationError(f"{url}: {detail}", hint=hint)
    hint = "is the server running?"
    if isinstance(exc, httpx.ReadError | httpx.RemoteProtocolError):  # something is there
        hint = "does it speak TLS? Then its URL begins with https://"
        if url.startswith("https:"):
            hint = f"does it ask for a client certificate? {_OF_OPERATORS}"
    return TransportError(f"no answer from {url}: {exc}", hint=hint)


def checked(url: str) -> str:
    """The URL; raises ConfigurationError if nobody can be asked there."""
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port, httpx.URL(url)
    except (ValueError, httpx.InvalidURL):
        is_one = False
    if not is_one or parts.query or parts.fragment or parts.username:
        raise ConfigurationError(
            f"{url!r} is no server's URL", hint="such as http://127.0.0.1:8080"
        )
    return url


def _trusting(ca: Path) -> ssl.SSLContext:
    """Raises ConfigurationError."""
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as exc:  # ssl.SSLError, too
        reason = "holds no certificate" if isinstance(exc, ssl.SSLError) else exc.strerror
        raise ConfigurationError(f"{ca}: {reason}", hint="give a PEM file") from exc


def _document(content: BaseModel) -> dict[str, Any]:
    """As the body of a request."""
    headers = {"Content-Type": "application/json"}
    return {"content": content.model_dump_json(), "headers": headers}


def _reason(why: str) -> dict[str, Any]:
    return {"json": {"detail": why}} if why else {}


def _admin(task: str, *rest: str) -> str:
    """The path of what operators ask of a task."""
    return "/".join(("/v1/admin/tasks", *map(_segment, (task, *rest))))


def _segment(name: str) -> str:
    """A name as one part of a path, whatever is in it."""
    if not name.strip("."):  # which a path would take for its own folder or the one above
        return "%2E" * len(name) or "-"
    return quote(name, safe="")
