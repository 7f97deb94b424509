"""Examples for the API's documentation, made of the messages themselves and so never stale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from fedpress_protocols.device_keys import signed_rotation
from fedpress_protocols.messages import (
    Assignment,
    CheckInRequest,
    CheckInResponse,
    ClassCount,
    Continuation,
    EnrolRequest,
    EnrolResponse,
    EvaluationReport,
    Measured,
    Membership,
    PartialCompletion,
    PartialIntent,
    PartialUpload,
    Receipt,
    RotationRequest,
    RotationResponse,
    RoundStatus,
    SignedReceipt,
    TaskConfig,
    TaskSummary,
    UploadAck,
)
from fedpress_protocols.plan import (
    CohortRules,
    FixedPointTerms,
    Profile,
    RoundPlan,
    TrainingTerms,
)
from fedpress_protocols.signatures import DeviceKey

_NOW = 1_800_000_000
_BASE, _NEXT, _SPEC, _UPLOAD = ("0" * 62 + pair for pair in ("a1", "a2", "b1", "c1"))
_KEY = "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"
_SIGNATURE = (
    "hgyY0il_MGCjP0JzlnLWG1PPOt7-09PGcvMg3AIbQR6dWbhijcNR4ki4iylGjg5BhVsPt9g7sVvpAr_MuM0KAg"
)
_ASSIGNMENT = "Zr1x0nC5m3q9JtTz7Wb2-A"
_CLIENT = "q83vEjRWeJCr"

_profiles = Profile.model_validate(
    {"name": "slow-link", "compressor": {"id": "topk", "fraction": 0.005, "magnitude_bits": 0}}
)
_cohort = CohortRules(size=10, minimum=6, over_selection=1.3)
_plan = RoundPlan(
    task="digits",
    round=3,
    attempt=1,
    model=_BASE,
    spec=_SPEC,
    profiles=(_profiles,),
    training=TrainingTerms(local_epochs=2, batch_size=32, learning_rate=0.1),
    cohort=_cohort,
    deadline=_NOW + 600,
    fixed_point=FixedPointTerms(scale_bits=24, max_abs=256.0, max_examples=65536),
    public_seed="5e" * 32,
)

ENROL = EnrolRequest(public_key=_KEY, name="kitchen-camera")
ENROLLED = EnrolResponse(client_id=_CLIENT, server_key=_KEY, server_time=_NOW)
_before, _after = (DeviceKey.from_bytes(bytes([number]) * 32) for number in (1, 2))
ROTATE = RotationRequest(rotations=(signed_rotation(_CLIENT, _before, _after),))
ROTATED = RotationResponse(client_id=_CLIENT, key_id=_after.key_id, server_time=_NOW)
TASK = TaskSummary(task="digits", state="running", model=_BASE, spec=_SPEC, round=2, rounds=30)
CONTINUATION = Continuation(after_round=30, rounds=10, model=_BASE)
CHECK_IN = CheckInRequest(
    pending=(_ASSIGNMENT,), wait=20, attributes={"memory_gib": 4.0, "region": "north"}
)
RECEIPT = SignedReceipt(
    receipt=Receipt(
        assignment=_ASSIGNMENT,
        client_id=_CLIENT,
        task="digits",
        round=2,
        attempt=1,
        outcome="included",
        reason="included",
        upload=_UPLOAD,
        model=_BASE,
        issued_at=_NOW,
    ),
    key_id="kPrK_qmxVWaYVA9wwBF6Iu",
    signature=_SIGNATURE,
)
CHECKED_IN = CheckInResponse(
    task=TASK,
    receipts=(RECEIPT,),
    assignment=Assignment(
        assignment="b7KqP2vN8sE4hYd1LwXo3Q", client_id=_CLIENT, plan=_plan, profile="slow-link"
    ),
    retry_after=5.0,
    server_time=_NOW,
)
ACK = UploadAck(assignment=_ASSIGNMENT, upload=_UPLOAD, received_at=_NOW)
PARTIAL_INTENT = PartialIntent(max_bytes=40_000_003, upload=_UPLOAD)
PARTIAL = PartialUpload(
    partial="u7yYjk2kqWm8yJ0L",
    offset=3_145_728,
    digest=_SPEC,
    part_bytes=8_388_608,
    expires_at=_NOW + 3600,
)
COMPLETION = PartialCompletion(num_bytes=40_000_003, upload=_UPLOAD)
MEMBERSHIP = Membership(population="fedpress", authority=_KEY, certificate="2c4Jw" * 52)
EVALUATION = EvaluationReport(
    model=_NEXT,
    num_examples=120,
    metrics={"accuracy": 0.94, "loss": 0.21},
    classes={
        "0": ClassCount(num_examples=70, correct=68),
        "1": ClassCount(num_examples=50, correct=45),
    },
    attributes={"region": "north"},
)
ROUND = RoundStatus(
    task="digits",
    round=2,
    attempt=1,
    state="committed",
    base_model=_BASE,
    model=_NEXT,
    assigned=13,
    received=10,
    included=10,
    minimum=6,
    size=10,
    opened_at=_NOW,
    deadline=_NOW + 600,
    closed_at=_NOW + 41,
    upload_bytes=4_180,
    wire_upload_bytes=11_240,
    download_bytes=1_340_560,
    num_examples=1_203,
    metrics={"accuracy": 0.94, "loss": 0.21},
    measured=Measured(num_clients=12, num_examples=1_405, metrics={"accuracy": 0.94, "loss": 0.21}),
    groups={"north": Measured(num_clients=7, num_examples=820, metrics={"accuracy": 0.95})},
    classes={"0": Measured(num_clients=10, num_examples=640, metrics={"accuracy": 0.97})},
)
CONFIG = TaskConfig(
    task="digits",
    model=_BASE,
    rounds=30,
    strategy={"id": "fedavgm", "momentum": 0.9},
    profiles=(_profiles,),
    training=_plan.training,
    cohort=_cohort,
)


def asked(example: BaseModel) -> dict[str, Any]:
    """For `Body(openapi_examples=...)`."""
    return {"example": {"value": example.model_dump(mode="json")}}


def answered(example: BaseModel | Sequence[BaseModel]) -> dict[str, Any]:
    """For a response's documentation."""
    if isinstance(example, BaseModel):
        shown: Any = example.model_dump(mode="json")
    else:
        shown = [one.model_dump(mode="json") for one in example]
    return {"content": {"application/json": {"example": shown}}}
