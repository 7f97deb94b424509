"""The control plane: what devices and server say to each other in JSON.

Both ends parse with these and refuse unknown fields; the API's schemas are drawn from them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from fedpress_protocols.plan import (
    CohortRules,
    Digest,
    Name,
    Profile,
    RoundPlan,
    Term,
    TrainingTerms,
)
from fedpress_protocols.upload import WIRE_VERSIONS

Identifier = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
Metrics = Annotated[dict[Name, float], Field(max_length=64)]
Outcome = Literal["included", "not-included"]
RoundState = Literal["collecting", "folding", "committed", "abandoned"]
TaskState = Literal["running", "finished", "cancelled"]


class EnrolRequest(Term):
    """Registers the Ed25519 key that signed this very request: its signature proves possession.

    The enrolment token travels as `Authorization: Bearer`.
    """

    public_key: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{43}$")]
    """32 bytes, base64url without padding."""
    name: Annotated[str, Field(max_length=128)] = ""


class EnrolResponse(Term):
    client_id: Identifier
    server_key: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{43}$")]
    """The key that signs receipts; the device pins it."""
    server_time: float


class TaskSummary(Term):
    """What a device needs to know of a task before it joins."""

    task: Name
    state: TaskState
    model: Digest
    """The newest model."""
    spec: Digest
    round: Annotated[int, Field(ge=0)]
    """Rounds committed so far."""
    rounds: Annotated[int, Field(ge=1)]
    """Rounds in all."""


class CheckInRequest(Term):
    wire_versions: tuple[int, ...] = WIRE_VERSIONS
    pending: Annotated[tuple[Identifier, ...], Field(max_length=1024)] = ()
    """Assignments of which the device holds an upload and no receipt."""
    wait: Annotated[float, Field(ge=0, le=30)] = 0.0
    """Seconds that the server may hold the answer until there is news."""


class Assignment(Term):
    """One client's part in one attempt at a round; the key under which its upload is idempotent."""

    assignment: Identifier
    client_id: Identifier
    plan: RoundPlan
    profile: Name


RECEIPT_CONTEXT = "fedpress receipt v1"
"""Under which the server signs receipts and a device verifies them."""


class Receipt(Term):
    """What became of an assignment, once and for all; signed by the server.

    `model` is the model that the upload went into, `upload` the SHA-256 of the body.
    """

    assignment: Identifier
    client_id: Identifier
    task: Name
    round: int
    attempt: int
    outcome: Outcome
    reason: Literal[
        "included", "round-full", "round-abandoned", "missed-deadline", "cancelled", "declined"
    ]
    upload: Digest | None
    model: Digest | None
    issued_at: int
    """Unix seconds."""


class SignedReceipt(Term):
    receipt: Receipt
    key_id: str
    signature: str


class CheckInResponse(Term):
    """An assignment or none, and the fate of everything pending that has one."""

    task: TaskSummary
    receipts: tuple[SignedReceipt, ...] = ()
    assignment: Assignment | None = None
    retry_after: float
    """Seconds until the next check-in is worth while; jitter is the device's."""
    server_time: float


class UploadAck(Term):
    """The upload is staged durably. What becomes of it, the receipt will say."""

    assignment: Identifier
    upload: Digest
    received_at: float


class EvaluationReport(Term):
    """A device's own measure of a model on its own data."""

    model: Digest
    num_examples: Annotated[int, Field(ge=1, lt=2**32)]
    metrics: Metrics


class RoundStatus(Term):
    """One attempt at a round, as operators and devices may see it."""

    task: Name
    round: int
    attempt: int
    state: RoundState
    reason: str = ""
    base_model: Digest
    model: Digest | None = None
    assigned: int
    received: int
    included: int
    minimum: int
    size: int
    opened_at: float
    deadline: float
    closed_at: float | None = None
    upload_bytes: int
    """Body bytes of every upload that was read."""
    wire_upload_bytes: int
    """The same with request lines and headers."""
    download_bytes: int
    """Model bytes sent for this attempt."""
    num_examples: int
    metrics: Metrics = Field(default_factory=dict)
    """Evaluation reports on the round's model, averaged by their examples."""


class TaskConfig(Term):
    """What an operator starts a task with; the initial model is registered before."""

    task: Name
    model: Digest
    rounds: Annotated[int, Field(ge=1)]
    strategy: dict[str, Any] = Field(default_factory=lambda: {"id": "fedavg"})
    profiles: Annotated[tuple[Profile, ...], Field(min_length=1, max_length=256)]
    training: TrainingTerms = TrainingTerms()
    cohort: CohortRules
    round_seconds: Annotated[float, Field(gt=0)] = 600.0
    max_attempts: Annotated[int, Field(ge=1)] = 10
    """Attempts at one round before the task is cancelled."""
    max_abs: Annotated[float, Field(gt=0)] = 256.0
    max_examples: Annotated[int, Field(ge=1, lt=2**32)] = 65536
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Derives the public seeds of the rounds; None draws one at random."""
