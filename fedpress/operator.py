"""An operator's hand on a running server: its admin API as a small class."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import quote

import httpx
from pydantic import TypeAdapter

from fedpress_protocols.errors import FedpressError, TransportError, UnknownModel
from fedpress_protocols.messages import Continuation, RoundStatus, TaskConfig, TaskSummary
from fedpress_protocols.model import Model
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

_ROUNDS = TypeAdapter(list[RoundStatus])
_TASKS = TypeAdapter(list[TaskSummary])
_VERSIONS = TypeAdapter(list[ModelVersion])
_ALIASES = TypeAdapter(list[Alias])
_RESTORES = TypeAdapter(list[RestoreStatus])


class Operator:
    """Talks to the server at `url` with its admin token.

    Every method raises the error that the server sent, or TransportError without an answer.
    """

    def __init__(self, url: str, admin_token: str, *, timeout: float = 30.0) -> None:
        self._http = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {admin_token}"},
            timeout=timeout,
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

    def create_token(
        self, *, uses: int = 1, expires_in: float | None = None, note: str = ""
    ) -> str:
        """An enrolment token for `uses` devices, valid for `expires_in` seconds (None: the
        server's default). It is shown here and never again."""
        body: dict[str, Any] = {"uses": uses, "note": note}
        if expires_in is not None:
            body["expires_in"] = expires_in
        return str(self._json("POST", "/v1/admin/tokens", json=body)["token"])

    def register_model(self, model: Model) -> str:
        """Store `model`; returns the digest that tasks call it by. Idempotent."""
        body = model.to_bytes()
        self._send(
            "PUT",
            f"/v1/admin/models/{model.digest}",
            content=body,
            headers={"Content-Type": "application/octet-stream"},
        )
        return model.digest

    def create_task(self, config: TaskConfig) -> TaskSummary:
        response = self._send(
            "POST",
            "/v1/admin/tasks",
            content=config.model_dump_json(),
            headers={"Content-Type": "application/json"},
        )
        return TaskSummary.model_validate_json(response.content)

    def continue_task(self, task: str, more: Continuation) -> TaskSummary:
        """More rounds for a task that has stopped; repeating it changes nothing."""
        response = self._send(
            "POST",
            f"/v1/admin/tasks/{task}/continue",
            content=more.model_dump_json(),
            headers={"Content-Type": "application/json"},
        )
        return TaskSummary.model_validate_json(response.content)

    def pause_task(self, task: str) -> None:
        """Give its devices no work from now on; what is under way is taken."""
        self._send("POST", f"/v1/admin/tasks/{task}/pause")

    def resume_task(self, task: str) -> None:
        """Give the devices of a paused, running task work again."""
        self._send("POST", f"/v1/admin/tasks/{task}/resume")

    def finish_task(self, task: str) -> None:
        """End a paused task for good: its devices may go."""
        self._send("POST", f"/v1/admin/tasks/{task}/finish")

    def cancel_task(self, task: str) -> None:
        """End a task; the model of its last committed round stays."""
        self._send("POST", f"/v1/admin/tasks/{task}/cancel")

    def abort_round(self, task: str) -> None:
        """Abandon the open attempt and begin the round again."""
        self._send("POST", f"/v1/admin/tasks/{task}/abort-round")

    def tasks(self) -> list[TaskSummary]:
        return _TASKS.validate_json(self._send("GET", "/v1/tasks").content)

    def task(self, task: str) -> TaskSummary:
        return TaskSummary.model_validate_json(self._send("GET", f"/v1/tasks/{task}").content)

    def rounds(self, task: str) -> list[RoundStatus]:
        """Every attempt at every round so far, in order."""
        return _ROUNDS.validate_json(self._send("GET", f"/v1/tasks/{task}/rounds").content)

    def round(self, task: str, number: int) -> RoundStatus:
        """The newest attempt at a round, with what devices measured by group and by class."""
        return RoundStatus.model_validate_json(
            self._send("GET", f"/v1/tasks/{task}/rounds/{number}").content
        )

    def model(self, digest: str) -> Model:
        """The model, checked against its digest."""
        model = Model.from_bytes(self._send("GET", f"/v1/models/{digest}").content)
        if model.digest != digest:
            raise UnknownModel(f"the server sent model {model.digest[:12]} for {digest[:12]}")
        return model

    def versions(
        self, task: str, *, before: int | None = None, limit: int = 1000
    ) -> list[ModelVersion]:
        """The newest versions of the task's model, those below `before`, the newest first."""
        asked = {"limit": limit} if before is None else {"limit": limit, "before": before}
        response = self._send("GET", f"/v1/admin/tasks/{task}/versions", params=asked)
        return _VERSIONS.validate_json(response.content)

    def version(self, task: str, which: str) -> ModelLineage:
        """One version by its number, by an alias, or as newest or best."""
        response = self._send("GET", f"/v1/admin/tasks/{task}/versions/{_segment(which)}")
        return ModelLineage.model_validate_json(response.content)

    def aliases(self, task: str) -> list[Alias]:
        """Where the task's aliases point, and have pointed."""
        response = self._send("GET", f"/v1/admin/tasks/{task}/aliases")
        return _ALIASES.validate_json(response.content)

    def promote(
        self, task: str, alias: str, version: int, *, expect: int | Literal["any", "none"] = "any"
    ) -> Alias:
        """Point `alias` to `version` if it points to `expect`; Conflict if it does not."""
        asked = Promotion(version=version, expect=expect)
        path = f"/v1/admin/tasks/{task}/aliases/{_segment(alias)}"
        response = self._send("PUT", path, json=asked.model_dump())
        return Alias.model_validate_json(response.content)

    def roll_back(self, task: str, alias: str, *, expect: int | Literal["any"] = "any") -> Alias:
        """Point `alias` to where it pointed before; Conflict if it points elsewhere than expected,
        or there is nothing before."""
        path = f"/v1/admin/tasks/{task}/aliases/{_segment(alias)}/rollback"
        response = self._send("POST", path, json=Rollback(expect=expect).model_dump())
        return Alias.model_validate_json(response.content)

    def collect(self, *, dry_run: bool = False) -> Collected:
        """Remove the files of models that retention gives up; or only say which."""
        asked = CollectRequest(dry_run=dry_run)
        response = self._send("POST", "/v1/admin/models/collect", json=asked.model_dump())
        return Collected.model_validate_json(response.content)

    def restores(self) -> list[RestoreStatus]:
        """Every restore that the server has been through, the newest first, with the rounds that
        devices have reported as committed after its backup."""
        return _RESTORES.validate_json(self._send("GET", "/v1/admin/restores").content)

    def _json(self, method: str, path: str, **content: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self._send(method, path, **content).json()
        return answer

    def _send(self, method: str, path: str, **content: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **content)
        except httpx.HTTPError as exc:
            raise TransportError(
                f"no answer from {self._http.base_url}: {exc}", hint="is the server running?"
            ) from exc
        if response.is_success:
            return response
        try:
            problem = response.json()
        except ValueError:
            problem = {"detail": f"status {response.status_code} without a problem in its body"}
        raise FedpressError.from_problem(problem, response.status_code)


def _segment(name: str) -> str:
    """A name as one part of a path, whatever is in it."""
    return quote(name, safe="") or "-"
