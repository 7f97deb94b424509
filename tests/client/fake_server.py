"""A small honest server in memory, and a link to it that can misbehave."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedpress_client import Client, Evaluation, Traffic, Trained, Trainer, TrainingRequest
from fedpress_client.transport import News
from fedpress_compression import activity
from fedpress_compression.compressor import Compressor
from fedpress_compression.contexts import contexts_of
from fedpress_compression.fixed_point import Accumulator
from fedpress_compression.update import Update
from fedpress_protocols.errors import (
    Conflict,
    RoundClosed,
    TransportError,
    UnknownAssignment,
    UpdateConflict,
)
from fedpress_protocols.key_rollover import ServerKeys
from fedpress_protocols.messages import (
    RECEIPT_CONTEXT,
    Assignment,
    CheckInRequest,
    CheckInResponse,
    DeclineReason,
    EnrolRequest,
    EnrolResponse,
    EvaluationReport,
    Membership,
    Receipt,
    RotationRequest,
    RotationResponse,
    SignedReceipt,
    TaskSummary,
    UploadAck,
    UploadFigures,
)
from fedpress_protocols.model import Model
from fedpress_protocols.plan import (
    CohortRules,
    FixedPointTerms,
    Profile,
    RoundPlan,
    TrainingTerms,
)
from fedpress_protocols.signatures import DeviceKey, sign_document, to_base64url
from fedpress_protocols.upload import Upload

TASK = "task"


def signed(receipt: Receipt, key: DeviceKey) -> SignedReceipt:
    document = sign_document(receipt.model_dump(mode="json"), key, context=RECEIPT_CONTEXT)
    return SignedReceipt(
        receipt=receipt, key_id=document["key_id"], signature=document["signature"]
    )


def make_plan(
    model: Model,
    *compressors: Compressor[Any],
    round_: int = 1,
    attempt: int = 1,
    cohort: int = 4,
    max_abs: float = 64.0,
    training: TrainingTerms | None = None,
    **terms: Any,
) -> RoundPlan:
    seed = hashlib.sha256(f"{round_}.{attempt}".encode()).hexdigest()
    return RoundPlan(
        task=TASK,
        round=round_,
        attempt=attempt,
        model=model.digest,
        spec=model.spec.digest,
        profiles=tuple(
            Profile(name=f"p{index}", compressor=made) for index, made in enumerate(compressors)
        ),
        training=training or TrainingTerms(),
        cohort=CohortRules(size=cohort, minimum=1),
        fixed_cohort=True,
        deadline=1e9,
        fixed_point=FixedPointTerms(scale_bits=24, max_abs=max_abs, max_examples=1000),
        public_seed=seed,
        **terms,
    )


@dataclass
class Part:
    """One assignment as the server sees it."""

    assignment: Assignment
    round: int
    attempt: int
    body: bytes | None = None
    update: Update | None = None
    weight: int = 0
    receipt: SignedReceipt | None = None


@dataclass
class FakeServer:
    """Rounds open and close when the test says so, or by themselves once `auto` uploads are in."""

    model: Model
    profiles: Callable[[int, int], list[Compressor[Any]]]
    """The compressors of a round and attempt; client i is given the i-th, counting round."""
    rounds: int = 3
    cohort: int = 4
    auto: int | None = None
    training: TrainingTerms = field(default_factory=TrainingTerms)
    max_abs: float = 64.0
    key: DeviceKey = field(default_factory=DeviceKey.generate)
    clients: dict[str, str] = field(default_factory=dict)
    models: dict[str, bytes] = field(default_factory=dict)
    published: dict[str, str] = field(default_factory=dict)
    best: str | None = None
    artefacts: dict[str, bytes] = field(default_factory=dict)
    bases: dict[str, np.ndarray] = field(default_factory=dict)
    """By client: what its last included upload stood for."""
    parts: dict[str, Part] = field(default_factory=dict)
    evaluations: list[tuple[str, EvaluationReport]] = field(default_factory=list)
    committed: int = 0
    abandoned: int = 0
    attempt: int = 1
    state: str = "running"

    def __post_init__(self) -> None:
        self.first = self.previous = self.model
        self.average = np.zeros(self.model.spec.size, np.float32)
        self._publish(self.model)

    def _publish(self, model: Model) -> None:
        self.model = model
        self.models[model.digest] = model.to_bytes()
        activity_map = activity.to_bytes(self.average, model.spec)
        digest = hashlib.sha256(activity_map).hexdigest()
        self.artefacts = {digest: activity_map}
        self.plan = make_plan(
            model,
            *self.profiles(self.committed + 1, self.attempt),
            round_=self.committed + 1,
            attempt=self.attempt,
            cohort=self.cohort,
            max_abs=self.max_abs,
            training=self.training,
            previous_model=self.previous.digest,
            first_model=self.first.digest,
            activity=digest,
        )

    @property
    def summary(self) -> TaskSummary:
        return TaskSummary(
            task=TASK,
            state=self.state,
            model=self.model.digest,
            spec=self.model.spec.digest,
            round=self.committed,
            rounds=self.rounds,
            published=self.published,
            best=self.best,
        )

    def enrol(self, public_key: str) -> str:
        return self.clients.setdefault(public_key, f"client{len(self.clients)}")

    def assignment_for(self, client_id: str) -> Assignment | None:
        if self.state != "running":
            return None
        name = f"{client_id}-{self.plan.round}-{self.plan.attempt}"
        part = self.parts.get(name)
        if part is None:
            index = list(self.clients.values()).index(client_id) % len(self.plan.profiles)
            base = self.bases.get(client_id)
            digest = None if base is None else hashlib.sha256(base.tobytes()).hexdigest()
            assignment = Assignment(
                assignment=name,
                client_id=client_id,
                plan=self.plan,
                profile=f"p{index}",
                own=digest,
            )
            part = Part(assignment, self.plan.round, self.plan.attempt)
            self.parts[name] = part
        is_open = part.body is None and part.receipt is None
        return part.assignment if is_open else None

    def upload(self, client_id: str, name: str, body: bytes) -> UploadAck:
        part = self.parts.get(name)
        if part is None or part.assignment.client_id != client_id:
            raise UnknownAssignment(f"no assignment {name}")
        digest = hashlib.sha256(body).hexdigest()
        if part.body is None:
            if part.receipt is not None:
                raise RoundClosed
            plan, assignment = part.assignment.plan, part.assignment
            spec = Model.from_bytes(self.models[plan.model]).spec
            assert len(body) <= plan.max_body_bytes(spec)
            index = plan.profile_index(assignment.profile)
            values = self.model.parameters
            assert plan.activity is not None
            public = plan.public(
                spec,
                {
                    "previous": values - self.previous.parameters,
                    "drift": values - self.first.parameters,
                    "activity": activity.from_bytes(self.artefacts[plan.activity], spec),
                    "own": self.bases.get(client_id, np.zeros(spec.size, np.float32)),
                },
            )
            layouts = plan.layouts(spec)
            contexts = contexts_of(layouts[index], public)
            upload = Upload.from_bytes(body, layouts, index, contexts, sketch=plan.sketch)
            update = plan.compressor(assignment.profile).decompress(upload.symbols, public)
            update.check(plan.fixed_point.max_abs)
            part.body, part.update, part.weight = body, update, upload.num_examples
        elif part.body != body:
            raise UpdateConflict
        ack = UploadAck(assignment=name, upload=digest, received_at=0.0)
        waiting = [p for p in self._of_now() if p.body is not None]
        if self.auto is not None and part in waiting and len(waiting) >= self.auto:
            self.close()
        return ack

    def _of_now(self) -> list[Part]:
        return [p for p in self.parts.values() if p.assignment.plan is self.plan]

    def close(self, keep: Callable[[str], bool] = lambda name: True, minimum: int = 1) -> bool:
        """The deadline: aggregate the uploads that `keep` takes; False if the round is
        abandoned."""
        here = self._of_now()
        chosen = [p for p in here if p.body is not None and keep(p.assignment.assignment)]
        if len(chosen) < minimum:
            for part in here:
                self._conclude(part, "round-abandoned", None)
            self.attempt += 1
            self.abandoned += 1
            self._publish(self.model)
            return False
        total = Accumulator(self.model.spec.size, self.plan.sum_bounds())
        for part in chosen:
            assert part.update is not None
            total.add(part.update, part.weight)
            if "own" in self.plan.needs:
                self.bases[part.assignment.client_id] = part.update.dense()
        moved = self.model.parameters.astype(np.float64) + total.mean()
        model = self.model.with_parameters(moved.astype(np.float32))
        for part in here:
            late = "round-full" if part.body is not None else "missed-deadline"
            self._conclude(part, "included" if part in chosen else late, model.digest)
        self.committed += 1
        self.attempt = 1
        if self.committed == self.rounds:
            self.state = "finished"
        self.previous = self.model
        self.average = activity.averaged(self.average, model.parameters - self.model.parameters)
        self._publish(model)
        return True

    def _conclude(self, part: Part, reason: str, model: str | None) -> None:
        if part.receipt is None:
            self.conclude(part, reason, model)

    def conclude(self, part: Part, reason: str, model: str | None = None) -> SignedReceipt:
        is_in = reason == "included"
        receipt = Receipt(
            assignment=part.assignment.assignment,
            client_id=part.assignment.client_id,
            task=TASK,
            round=part.round,
            attempt=part.attempt,
            outcome="included" if is_in else "not-included",
            reason=reason,
            upload=None if part.body is None else hashlib.sha256(part.body).hexdigest(),
            model=model if is_in else None,
            issued_at=0,
        )
        part.receipt = signed(receipt, self.key)
        return part.receipt

    def decline(self, client_id: str, name: str) -> SignedReceipt:
        part = self.parts.get(name)
        if part is None:
            raise UnknownAssignment(f"no assignment {name}")
        if part.receipt is None and part.body is not None:
            raise Conflict("the assignment has an upload already")
        return part.receipt or self.conclude(part, "declined")


class Unasked:
    """The verbs of a Transport that a FakeLink's clients have no reason to use."""

    def rotate(self, request: RotationRequest) -> RotationResponse:
        raise NotImplementedError

    def use_key(self, key: DeviceKey) -> None:
        raise NotImplementedError

    def coded(self, digest: str, max_bytes: int, task: str) -> bytes:
        raise NotImplementedError

    def difference(self, digest: str, base: str, max_bytes: int, task: str) -> bytes:
        raise NotImplementedError

    def trained(self, digest: str, base: str, max_bytes: int, task: str) -> bytes:
        raise NotImplementedError

    def certificate(self) -> Membership:
        raise NotImplementedError

    def ready(self, assignment: str) -> None:
        raise NotImplementedError

    def say(self, assignment: str, step: str, message: bytes) -> None:
        raise NotImplementedError

    def hear(self, assignment: str, step: str, wait: float) -> bytes | float:
        raise NotImplementedError


class FakeLink(Unasked):
    """The Transport of one device. `fault(verb)` runs before a call reaches the server and after.

    It may raise; `duplicates()` says whether an upload is delivered twice.
    """

    def __init__(
        self,
        server: FakeServer,
        fault: Callable[[str], None] = lambda verb: None,
        duplicates: Callable[[], bool] = lambda: False,
    ) -> None:
        self.server, self.fault, self.duplicates = server, fault, duplicates
        self.traffic = Traffic()
        self.client_id = ""
        self.calls: list[str] = []
        self.declined: list[tuple[str, str, float | None]] = []

    def _around(self, verb: str) -> Iterator[None]:
        self.calls.append(verb)
        self.fault(f"before {verb}")
        yield
        self.fault(f"after {verb}")

    def server_keys(self) -> ServerKeys:
        for _ in self._around("server-keys"):
            pass
        return ServerKeys(server_key=to_base64url(self.server.key.public))

    def enrol(self, token: str, request: EnrolRequest) -> EnrolResponse:
        assert token == "token"
        for _ in self._around("enrol"):
            self.client_id = self.server.enrol(request.public_key)
        key = to_base64url(self.server.key.public)
        return EnrolResponse(client_id=self.client_id, server_key=key, server_time=0.0)

    def tasks(self) -> tuple[TaskSummary, ...]:
        return (self.server.summary,)

    def task(self, task: str) -> TaskSummary:
        return self.server.summary

    def check_in(self, task: str, request: CheckInRequest) -> News:
        assert task == TASK
        for _ in self._around("check_in"):
            assignment = self.server.assignment_for(self.client_id)
            parts = (self.server.parts.get(name) for name in request.pending)
            receipts = tuple(p.receipt for p in parts if p is not None and p.receipt is not None)
        if assignment is None and not receipts and self.server.state == "running":
            return News(None, 1.0)
        response = CheckInResponse(
            task=self.server.summary,
            receipts=receipts,
            assignment=assignment,
            retry_after=1.0,
            server_time=0.0,
        )
        # Through the wire's own words, as over HTTP.
        again = CheckInResponse.model_validate_json(response.model_dump_json())
        return News(again, again.retry_after)

    def model(self, digest: str, max_bytes: int, task: str) -> bytes:
        for _ in self._around("model"):
            data = self.server.models[digest]
        return data

    def own(self, assignment: str, digest: str, max_bytes: int, task: str) -> bytes:
        for _ in self._around("own"):
            data = self.server.bases[self.client_id].tobytes()
        return data

    def artefact(self, digest: str, max_bytes: int, task: str) -> bytes:
        for _ in self._around("artefact"):
            data = self.server.artefacts[digest]
        return data

    def upload(
        self, assignment: str, body: bytes, figures: UploadFigures | None = None
    ) -> UploadAck:
        for _ in self._around("upload"):
            ack = self.server.upload(self.client_id, assignment, body)
            if self.duplicates():
                again = self.server.upload(self.client_id, assignment, body)
                assert again == ack
        return ack

    def decline(
        self, assignment: str, reason: DeclineReason, needed_seconds: float | None = None
    ) -> SignedReceipt | None:
        self.declined.append((assignment, reason, needed_seconds))
        for _ in self._around("decline"):
            receipt = self.server.decline(self.client_id, assignment)
        return receipt

    def receipt(self, assignment: str) -> SignedReceipt | float:
        part = self.server.parts.get(assignment)
        if part is None:
            raise UnknownAssignment(f"no assignment {assignment}")
        return part.receipt or 1.0

    def report(self, task: str, report: EvaluationReport) -> None:
        for _ in self._around("report"):
            self.server.evaluations.append((self.client_id, report))

    def close(self) -> None:
        pass


class Drops(FakeLink):
    """A FakeLink whose fault is a lost connection, with a chance that the test sets."""

    def __init__(self, server: FakeServer, rng: np.random.Generator, chance: float) -> None:
        def fault(verb: str) -> None:
            if rng.random() < chance:
                raise TransportError(f"lost {verb}")

        super().__init__(server, fault, duplicates=lambda: bool(rng.random() < 0.2))


class RandomTrainer:
    """Heavy-tailed updates drawn from the seed; remembers what it computed in each attempt."""

    def __init__(self, size: int, scale: float = 0.01) -> None:
        self.size, self.scale = size, scale
        self.computed: dict[tuple[int, int], np.ndarray] = {}
        self.calls = 0

    def train(self, model: Model, work: TrainingRequest) -> Trained:
        self.calls += 1
        rng = np.random.default_rng(work.seed)
        step = rng.standard_t(3, self.size) * self.scale * 10.0 ** rng.integers(-3, 3)
        parameters = (model.parameters + step).astype(np.float32)
        self.computed[work.round, work.attempt] = parameters - model.parameters
        return Trained(parameters, int(rng.integers(1, 1000)))

    def evaluate(self, model: Model) -> Evaluation | None:
        return None


def make_client(
    server: FakeServer,
    trainer: Trainer,
    state_dir: Path,
    link: FakeLink | None = None,
    **options: Any,
) -> Client:
    link = link or FakeLink(server)
    options.setdefault("sleep", lambda seconds: None)
    client = Client(
        "http://fake",
        trainer,
        state_dir=state_dir,
        task=TASK,
        token="token",
        transport=link,
        random=lambda: 0.5,
        **options,
    )
    # A server knows a device by its key, also after a restart.
    link.client_id = server.clients.get(to_base64url(client._enrolment.key.public), "")
    return client
