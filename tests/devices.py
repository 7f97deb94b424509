"""A device for tests of the server: signs, checks in, uploads; trains nothing.

It speaks through any httpx.Client: starlette's TestClient for an app in this process, a plain one
for a server somewhere else.
"""

import hashlib
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import numpy as np

from fedpress_compression import activity, sketches
from fedpress_compression.compressor import Knowledge, Public
from fedpress_compression.contexts import contexts_of
from fedpress_compression.tensors import Vector
from fedpress_protocols.errors import FedpressError
from fedpress_protocols.messages import (
    Assignment,
    CheckInResponse,
    EnrolResponse,
    SignedReceipt,
    UploadAck,
)
from fedpress_protocols.model import Model
from fedpress_protocols.plan import RoundPlan
from fedpress_protocols.signatures import (
    Content,
    DeviceKey,
    Target,
    from_base64url,
    sign_request,
    to_base64url,
    verify_document,
)
from fedpress_protocols.upload import Upload

ADMIN_TOKEN = "an-admin-token-for-tests"
ADMIN = {"Authorization": f"Bearer {ADMIN_TOKEN}"}


class Device:
    """One device; `http` has the server's base URL. Errors come out as their own class."""

    def __init__(
        self,
        http: httpx.Client,
        clock: Callable[[], float] = time.time,
        key: DeviceKey | None = None,
    ) -> None:
        self.http = http
        self.clock = clock
        self.key = key or DeviceKey.generate()
        self.client_id = ""
        self.server_key = b""
        self.epoch: str | None = None
        """Of the last restore of the server that this device has heard of; its user sets it."""

    def sign(
        self,
        method: str,
        path: str,
        content: Content,
        *,
        skew: int = 0,
        nonce: bytes | None = None,
    ) -> dict[str, str]:
        """The headers of a request signed `skew` seconds from now."""
        return sign_request(
            self.key,
            Target.from_url(method, str(self.http.base_url.join(path))),
            content,
            created=int(self.clock()) + skew,
            nonce=nonce or secrets.token_bytes(16),
        )

    def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        **how: Any,
    ) -> httpx.Response:
        """A signed request and its answer, whatever its status."""
        signed = self.sign(method, path, Content.of(body), **how)
        return self.http.request(method, path, content=body, headers={**signed, **(headers or {})})

    def json(self, method: str, path: str, body: str = "") -> httpx.Response:
        """A signed JSON request; raises the FedpressError of its answer."""
        headers = {"Content-Type": "application/json"} if body else {}
        return checked(self.request(method, path, body.encode(), headers))

    def enrol(self, token: str, name: str = "") -> EnrolResponse:
        public = to_base64url(self.key.public)
        body = f'{{"public_key": "{public}", "name": "{name}"}}'.encode()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        answer = checked(self.request("POST", "/v1/enrol", body, headers))
        enrolled = EnrolResponse.model_validate_json(answer.content)
        self.client_id = enrolled.client_id
        self.server_key = from_base64url(enrolled.server_key, 32)
        return enrolled

    def check_in(self, task: str, *pending: str, wait: float = 0.0) -> CheckInResponse | None:
        quoted = ", ".join(f'"{name}"' for name in pending)
        epoch = f', "epoch": "{self.epoch}"' if self.epoch else ""
        body = f'{{"pending": [{quoted}], "wait": {wait}{epoch}}}'
        answer = self.json("POST", f"/v1/tasks/{task}/check-in", body)
        if answer.status_code == 204:
            assert int(answer.headers["retry-after"]) >= 0
            return None
        parsed = CheckInResponse.model_validate_json(answer.content)
        for receipt in parsed.receipts:
            self.verify(receipt)
        return parsed

    def assignment(self, task: str) -> Assignment:
        """The open assignment; fails if there is none."""
        answer = self.check_in(task)
        assert answer is not None
        assert answer.assignment is not None
        return answer.assignment

    def model(self, digest: str, task: str = "") -> Model:
        answer = self.json("GET", f"/v1/models/{digest}" + (f"?task={task}" if task else ""))
        assert hashlib.sha256(answer.content).hexdigest() == digest
        return Model.from_bytes(answer.content)

    def body_for(self, assignment: Assignment, update: Vector, num_examples: int = 1) -> bytes:
        """The upload that says `update`, compressed without feedback."""
        model = self.model(assignment.plan.model, assignment.plan.task)
        spec = model.spec
        compressor = assignment.plan.compressor(assignment.profile)
        public = assignment.plan.public(spec, self.known(assignment, model))
        rng = np.random.default_rng(0)
        symbols, _ = compressor.compress(update, compressor.init(spec), public, rng)
        index, layout = assignment.plan.profile_index(assignment.profile), compressor.layout(spec)
        sketch = sketched(assignment.plan, update, public)
        made = Upload(index, num_examples, symbols, sketch=sketch)
        return made.to_bytes(layout, contexts_of(layout, public))

    def known(self, assignment: Assignment, model: Model) -> dict[Knowledge, Vector]:
        """What the plan's profiles read of how `model` came about, and of the upload before."""
        plan, known = assignment.plan, dict[Knowledge, Vector]()
        if "own" in plan.needs:
            known["own"] = self.own(assignment, model.spec.size)
        for what, digest in plan.sources.items():
            if digest is None:
                known[what] = np.zeros(model.spec.size, np.float32)
            elif what == "activity":
                known[what] = activity.from_bytes(self.artefact(digest, plan.task), model.spec)
            else:
                known[what] = model.parameters - self.model(digest, plan.task).parameters
        return known

    def own(self, assignment: Assignment, size: int) -> Vector:
        """What the last included upload stood for, as the server tells it."""
        if assignment.own is None:
            return np.zeros(size, np.float32)
        answer = self.json("GET", f"/v1/assignments/{assignment.assignment}/own")
        assert hashlib.sha256(answer.content).hexdigest() == assignment.own
        return np.frombuffer(answer.content, "<f4")

    def artefact(self, digest: str, task: str) -> bytes:
        answer = self.json("GET", f"/v1/artefacts/{digest}?task={task}")
        assert hashlib.sha256(answer.content).hexdigest() == digest
        return answer.content

    def put(self, assignment: str, body: bytes, **more: Any) -> httpx.Response:
        return self.request("PUT", f"/v1/assignments/{assignment}/update", body, **more)

    def upload(self, assignment: str, body: bytes) -> UploadAck:
        answer = checked(self.put(assignment, body))
        return UploadAck.model_validate_json(answer.content)

    def receipt(self, assignment: str) -> SignedReceipt | None:
        """None while there is none yet."""
        answer = self.json("GET", f"/v1/assignments/{assignment}/receipt")
        if answer.status_code == 202:
            return None
        receipt = SignedReceipt.model_validate_json(answer.content)
        self.verify(receipt)
        return receipt

    def verify(self, signed: SignedReceipt) -> None:
        document = signed.receipt.model_dump(mode="json")
        whole = {**document, "key_id": signed.key_id, "signature": signed.signature}
        assert verify_document(whole, self.server_key, context="fedpress receipt v1") == document
        assert signed.receipt.client_id == self.client_id


def sketched(plan: RoundPlan, update: Vector, public: Public) -> bytes:
    """The sketch of `update` that a probe asks for; empty in any other round."""
    if not plan.sketch:
        return b""
    stream = public.stream(sketches.LABEL)
    return sketches.to_bytes(sketches.sketch(update, plan.sketch, stream))


class Operator:
    """Whoever holds the admin token."""

    def __init__(self, http: httpx.Client, token: str = ADMIN_TOKEN) -> None:
        self.http = http
        self.headers = {"Authorization": f"Bearer {token}"}

    def get(self, path: str) -> Any:
        return checked(self.http.get(path, headers=self.headers)).json()

    def post(self, path: str, body: Any = None) -> Any:
        return checked(self.http.post(path, headers=self.headers, json=body)).json()

    def token(self, uses: int = 1, expires_in: float = 3600.0) -> str:
        body = {"uses": uses, "expires_in": expires_in}
        return str(self.post("/v1/admin/tokens", body)["token"])

    def bring(self, model: Model) -> str:
        path = f"/v1/admin/models/{model.digest}"
        checked(self.http.put(path, headers=self.headers, content=model.to_bytes()))
        return model.digest

    def begin(self, model: Model, task: str = "digits", **config: Any) -> None:
        """A task on `model`: two clients a round, uncompressed, unless `config` says otherwise."""
        defaults: dict[str, Any] = {
            "task": task,
            "model": self.bring(model),
            "rounds": 2,
            "profiles": [{"name": "whole", "compressor": {"id": "none"}}],
            "cohort": {"size": 2, "minimum": 1},
            "round_seconds": 60.0,
            "seed": 7,
        }
        self.post("/v1/admin/tasks", defaults | config)


def checked(answer: httpx.Response) -> httpx.Response:
    """The answer; raises the FedpressError that a problem stands for."""
    if answer.status_code >= 400:
        assert answer.headers["content-type"] == "application/problem+json", answer.text
        problem = answer.json()
        assert problem["status"] == answer.status_code
        assert problem["request_id"] == answer.headers["x-request-id"]
        raise FedpressError.from_problem(problem, answer.status_code)
    return answer
