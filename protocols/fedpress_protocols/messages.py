"""The control plane: JSON messages between devices and the server.

Both ends parse with these classes and refuse unknown fields; the API's schemas come from them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from fedpress_compression.compressors.error_feedback import check_feedback
from fedpress_protocols.defaults import completed
from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan
from fedpress_protocols.plan import (
    TWO_PHASES,
    CohortRules,
    Digest,
    MaskingTerms,
    Name,
    PrivacyTerms,
    Profile,
    RoundPlan,
    Term,
    TrainingTerms,
)
from fedpress_protocols.policies import Course, Policies, check_policies
from fedpress_protocols.schedule import Schedule, check_schedule
from fedpress_protocols.upload import WIRE_VERSIONS

ONE_LINE = r"^[^\x00-\x1f\x7f-\x9f]*$"
"""No control characters: neither line ends nor a terminal's escapes."""
Identifier = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
Metrics = Annotated[dict[Name, float], Field(max_length=64)]
Attribute = float | Annotated[str, Field(max_length=64, pattern=ONE_LINE)]
MAX_ATTRIBUTES = 32
Attributes = Annotated[dict[Name, Attribute], Field(max_length=MAX_ATTRIBUTES)]
"""Attributes that a device declares, by name: its memory in GiB, its region."""
AVERAGE = "average"
"""Under which a strategy publishes the average of its models."""
Outcome = Literal["included", "not-included"]
RoundState = Literal["collecting", "basing", "masking", "folding", "committed", "abandoned"]
TaskState = Literal["running", "paused", "finished", "cancelled"]
"""A paused task has finished its rounds and may be continued; devices treat it like a running
one."""


PublicKey = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{42}[AEIMQUYcgkosw048]$")]
"""32 bytes, canonical base64url without padding."""
_Signature = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{85}[AQgw]$")]
"""64 bytes, canonical base64url without padding."""
MAX_ROTATIONS = 256
"""Maximum number of key rotations of a device."""


class KeyRotation(Term):
    """The statement that the device `client_id` signs with `new_key` from now on, not `old_key`."""

    client_id: Identifier
    old_key: PublicKey
    new_key: PublicKey


class SignedRotation(Term):
    """A key rotation signed by both keys: the old one authorizes, the new one proves possession.

    See `device_keys` for the signed bytes.
    """

    rotation: KeyRotation
    old_signature: _Signature
    new_signature: _Signature


class RotationRequest(Term):
    """Register a device's newest key; the request is signed by it or by the previous one.

    `rotations` is the whole chain of rotations or its end: a server that was restored from a backup
    may know an earlier key only.
    """

    rotations: Annotated[
        tuple[SignedRotation, ...], FailFast(), Field(min_length=1, max_length=MAX_ROTATIONS)
    ]


class RotationResponse(Term):
    client_id: Identifier
    key_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{22}$")]
    """The id of the key that the server now has for the device."""
    server_time: float


class EnrolRequest(Term):
    """Register the Ed25519 key that signed this request: the signature proves possession.

    The enrolment token travels as `Authorization: Bearer`.
    """

    public_key: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{43}$")]
    """32 bytes, base64url without padding."""
    name: Annotated[str, Field(max_length=128, pattern=ONE_LINE)] = ""
    rotations: Annotated[
        tuple[SignedRotation, ...], FailFast(), Field(max_length=MAX_ROTATIONS)
    ] = ()
    """Rotations from the key with which the device first enrolled to this one: a server that has
    lost its records recognizes the device by them. Left out if empty."""

    @model_serializer(mode="wrap")
    def _without_empty(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialize(self)
        if not fields.get("rotations", True):
            del fields["rotations"]
        return fields


class EnrolResponse(Term):
    client_id: Identifier
    server_key: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{43}$")]
    """The key that signs receipts; the device pins it."""
    server_time: float


class Membership(Term):
    """The certificate that a device of the masked lane shows to others, and its issuer.

    `authority` is the Ed25519 key that signs certificates for `population`. `certificate` is
    None where the server does not hold that key: the operator of the authority issues it.
    """

    population: Name
    authority: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{43}$")]
    certificate: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,1024}$")] | None
    """Its canonical bytes, base64url without padding."""


class TaskSummary(Term):
    """A task as a device sees it before it joins."""

    task: Name
    state: TaskState
    model: Digest
    """The newest model."""
    published: dict[Name, Digest] = Field(default_factory=dict)
    """Further models that the strategy publishes, by name; for example `average`."""
    best: Digest | None = None
    """The best model by the devices' evaluations so far, see EvaluationTerms; None without any."""
    spec: Digest
    round: Annotated[int, Field(ge=0)]
    """Rounds committed so far."""
    rounds: Annotated[int, Field(ge=1)]
    """Rounds in all."""
    reason: str = ""
    """Why it ended before its last round; for a running task, why it makes no progress."""
    lane: Literal["clear", "masked"] = "clear"
    downlink: bool = False
    """Whether its models can be downloaded coded, whole and as differences."""

    @property
    def served(self) -> Digest:
        """The model to use, where another is not asked for by name: the average of the rounds'
        models where the strategy publishes one, unless devices have measured the newest as best."""
        average = self.published.get(AVERAGE)
        return self.model if average is None or self.best == self.model else average


class Restore(Term):
    """A restore of the server from a backup; rounds committed after the backup are lost.

    Each restore starts a new *epoch*.
    """

    number: Annotated[int, Field(ge=1)]
    """Number of restores in the history of this server's records."""
    epoch: Identifier
    """Drawn at random for each restore, so that two restores of one backup differ."""
    backup_at: int
    """Unix seconds; everything committed before is kept."""
    restored_at: int


class IncludedUpload(Term):
    """An upload for which the device has a receipt that says it was included."""

    assignment: Identifier
    round: Annotated[int, Field(ge=0, lt=2**31)]
    attempt: Annotated[int, Field(ge=0, lt=2**31)]
    model: Digest | None
    """The model that includes it."""


MAX_FATES = 1024


class CheckInRequest(Term):
    wire_versions: Annotated[tuple[int, ...], FailFast(), Field(max_length=64)] = WIRE_VERSIONS
    pending: Annotated[tuple[Identifier, ...], FailFast(), Field(max_length=1024)] = ()
    """Assignments with an upload but without a receipt."""
    wait: Annotated[float, Field(ge=0, le=30)] = 0.0
    """Seconds for which the server may hold the request (long poll)."""
    attributes: Attributes = Field(default_factory=dict)
    """Attributes for the task's eligibility rules, as the device reports them; not verified."""
    epoch: Identifier | None = None
    """The epoch of the last restore that the device has processed; None before any."""
    fates: Annotated[tuple[IncludedUpload, ...], FailFast(), Field(max_length=MAX_FATES)] = ()
    """Uploads with receipts since the last backup; sent once after a restore."""


class Assignment(Term):
    """The work of one client in one attempt at a round; its id makes the upload idempotent."""

    assignment: Identifier
    client_id: Identifier
    plan: RoundPlan
    profile: Name
    own: Digest | None = None
    """SHA-256 of the client's last included update, decoded, float32; None for zeros, or if no
    profile of the plan reads it."""
    basis: Digest | None = None
    """In the second exchange of a round with two: SHA-256 of the basis from the first, float32."""
    turn: Annotated[int, Field(ge=0)] = 0
    """Number of earlier assignments of the client in this attempt; in an asynchronous task."""


RECEIPT_CONTEXT = "fedpress receipt v1"
"""Signature context of receipts."""


class MaskedSum(Term):
    """The sum that includes a masked upload: the session's id, the digest of the signed set of
    survivors, and the digest of the sum."""

    session: Digest
    survivors: Digest
    aggregate: Digest


class Receipt(Term):
    """The final outcome of an assignment, signed by the server.

    `model` is the model that includes the upload, `upload` the SHA-256 of the body. `masked` is
    set, and signed, for an included upload of the masked lane.
    """

    assignment: Identifier
    client_id: Identifier
    task: Name
    round: int
    attempt: int
    outcome: Outcome
    reason: Literal[
        "included",
        "round-full",
        "round-abandoned",
        "missed-deadline",
        "cancelled",
        "declined",
        "dropped-out",
        "stale",
    ]
    upload: Digest | None
    model: Digest | None
    issued_at: int
    """Unix seconds."""
    masked: MaskedSum | None = None
    epoch: Identifier | None = None
    """The epoch of the server's last restore before the receipt was issued; left out before any."""

    @model_serializer(mode="wrap")
    def _without_none(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialize(self)
        for name in ("masked", "epoch"):
            if fields.get(name, ...) is None:
                del fields[name]
        return fields


DeclineReason = Literal[
    "training-failed",
    "invalid-update",
    "too-slow",
    "incompatible-plan",
    "masking-rules",
    "session-failed",
    "storage-failed",
    "upload-refused",
    "privacy-budget",
]
"""Reasons to decline an assignment. A server counts reasons of later releases as `other`, and
requests without one as `unstated`."""


class SignedReceipt(Term):
    receipt: Receipt
    key_id: str
    signature: str


RECALL_CONTEXT = "fedpress recall v1"
"""Signature context of recalls."""


class Recall(Term):
    """A signed statement to one device after `restore`: the server has no record of the assignments
    `unknown`, and no model does or will include their uploads."""

    client_id: Identifier
    task: Name
    restore: Restore
    unknown: Annotated[tuple[Identifier, ...], FailFast(), Field(max_length=1024 + MAX_FATES)] = ()
    issued_at: int
    """Unix seconds."""


class SignedRecall(Term):
    recall: Recall
    key_id: str
    signature: str


class CheckInResponse(Term):
    """An assignment, if there is one, and the receipts of pending uploads."""

    task: TaskSummary
    receipts: Annotated[tuple[SignedReceipt, ...], FailFast()] = ()
    assignment: Assignment | None = None
    retry_after: float
    """Seconds until the next check-in; the device adds jitter."""
    server_time: float
    recall: SignedRecall | None = None
    """Set if the server was restored since the device's `epoch`, or if a restore lost a pending
    assignment."""
    backup_at: int | None = None
    """Time of the last backup (Unix seconds), to which a restore may return: a device keeps
    included updates of later receipts. Sent with receipts; None without a backup."""


class UploadAck(Term):
    """Acknowledgement that the upload is stored durably. The receipt will give the outcome."""

    assignment: Identifier
    upload: Digest
    received_at: float


Trip = Literal["first", "update"]
"""The body of an assignment: that of the first of two exchanges, or the update."""


class PartialIntent(Term):
    """Start an upload in parts of an assignment's body, or resume one."""

    trip: Trip = "update"
    max_bytes: Annotated[int, Field(ge=1, lt=2**53)]
    """Maximum length of the body; its exact length once known."""
    upload: Digest | None = None
    """SHA-256 of the whole body; None while it is still being produced."""


class PartialUpload(Term):
    """Progress of an upload in parts: everything before `offset` is on the server's disk.

    It counts as an upload only after its completion, and is dropped at `expires_at`, which every
    part postpones.
    """

    partial: Identifier | None
    """Its id; None if `ack` is set and there is nothing to send."""
    offset: Annotated[int, Field(ge=0)]
    digest: Digest
    """SHA-256 of the bytes before `offset`: a device whose body differs restarts."""
    part_bytes: Annotated[int, Field(ge=1)]
    """Maximum bytes of a part."""
    expires_at: float
    ack: UploadAck | None = None
    """Set if this body is already staged."""


class PartialCompletion(Term):
    """Completes an upload in parts; the device's signature makes the body count as its upload."""

    num_bytes: Annotated[int, Field(ge=1, lt=2**53)]
    upload: Digest
    """SHA-256 of the whole body."""


MAX_CLASSES = 1000


class ClassCount(Term):
    """Number of examples of a class on a device, and of correct predictions."""

    num_examples: Annotated[int, Field(ge=1, lt=2**32)]
    correct: Annotated[int, Field(ge=0)]

    @model_validator(mode="after")
    def _no_more_than_all(self) -> ClassCount:
        if self.correct > self.num_examples:
            raise ValueError(
                f"correct must be at most num_examples ({self.num_examples}), not {self.correct}"
            )
        return self


class EvaluationReport(Term):
    """A device's own measure of a model on its own data."""

    model: Digest
    num_examples: Annotated[int, Field(ge=1, lt=2**32)]
    metrics: Metrics
    classes: Annotated[dict[Name, ClassCount], Field(max_length=MAX_CLASSES)] = Field(
        default_factory=dict
    )
    """Counts by class, if the device has them."""
    attributes: Attributes = Field(default_factory=dict)
    """As in CheckInRequest: one of them may select the group of the report."""

    @model_validator(mode="after")
    def _no_more_than_all(self) -> EvaluationReport:
        total = sum(count.num_examples for count in self.classes.values())
        if total > self.num_examples:
            raise ValueError(
                f"the classes count {total} examples, more than num_examples ({self.num_examples})"
            )
        return self


class Measured(Term):
    """Evaluation results of several devices: means weighted by their examples."""

    num_clients: int
    num_examples: int
    metrics: Metrics


class SessionStatus(Term):
    """Progress of a masked session. `began` is the number of clients at its start; by phase,
    `answered` counts those that answered, `silent` those that missed the deadline."""

    began: int
    answered: dict[str, int]
    silent: dict[str, int] = Field(default_factory=dict)
    message_bytes: int
    """Bytes of all client messages, without the uploads."""
    seconds: float | None = None
    """Seconds from its start to the end of the last phase."""
    suspects: tuple[str, ...] = ()
    """Clients at fault: several others could not open their sealed messages, or their shares were
    wrong. They are excluded from the task's next sessions."""
    failures: tuple[tuple[str, str], ...] = ()
    """Pairs (receiver, sender) with a sealed message that did not open. Either may be at fault, so
    they are kept apart."""


class Durations(Term):
    """Seconds that devices took from assignment to complete upload in a round, and the estimates of
    those that declined as `too-slow`."""

    num_uploads: Annotated[int, Field(ge=0)]
    num_too_slow: Annotated[int, Field(ge=0)]
    median: Annotated[float, Field(ge=0)]
    longest: Annotated[float, Field(ge=0)]
    suggested_round_seconds: Annotated[float, Field(gt=0)]
    """The 90% quantile of these durations plus a quarter; where devices declined, at least the
    task's `round_seconds` and the longest estimate: they came when part of it had passed."""


class PrivacyStatus(Term):
    """The privacy spent by a task's rounds up to one: by the device that took part most often, so
    many times; `epsilon` at `delta`, of `max_epsilon` after `max_participations`.

    `against` names whom it covers. It counts bodies that were received, also of rounds that failed.
    """

    participations: Annotated[int, Field(ge=0)]
    max_participations: Annotated[int, Field(ge=1)]
    epsilon: Annotated[float, Field(ge=0)]
    max_epsilon: Annotated[float, Field(gt=0)]
    delta: float
    clip: float
    noise_multiplier: float
    separation: int = 1
    """The least distance of two participations, where noise is correlated over rounds; left out
    where it is 1."""
    quantile: float | None = None
    """That the clip follows; left out where it is fixed. `clip` is the round's."""
    per_tensor: bool = False
    """Whether each tensor has its share of `clip`; left out where it has none."""
    against: str

    @classmethod
    def of(cls, plan: RoundPlan, participations: int) -> PrivacyStatus | None:
        """The privacy spent after so many participations; None for a plan without privacy terms."""
        terms = plan.privacy
        if terms is None:
            return None
        return cls(
            participations=participations,
            max_participations=terms.participations,
            epsilon=terms.spent(participations),
            max_epsilon=terms.epsilon,
            delta=terms.delta,
            clip=terms.clip,
            noise_multiplier=terms.noise_multiplier,
            separation=terms.separation,
            quantile=None if terms.adaptive is None else terms.adaptive.quantile,
            per_tensor=bool(terms.per_tensor),
            against=plan.private_against,
        )

    @model_serializer(mode="wrap")
    def _without_defaults(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialize(self)
        defaults = {"separation": 1, "quantile": None, "per_tensor": False}
        for name, usual in defaults.items():
            if fields.get(name, ...) == usual:
                del fields[name]
        return fields


FLAT = 0.55
"""The least flatness of an update that counts as flat: with Adam it is .56 to 1 as a rule, with SGD
.03 to .52 (docs/auto.md)."""


class UploadFigures(BaseModel):
    """Figures that a device measures of its own update: parameters of an upload's address in the
    clear lane. Each may be absent; those of later releases are ignored. Masked and private rounds
    have none, since they would tell of a single update.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    nmse: Annotated[float, Field(ge=0, le=1e9)] | None = None
    """Squared norm of what is left unsent, relative to that of the update and the residual."""
    residual: Annotated[float, Field(ge=0, le=1e9)] | None = None
    """Norm of the residual after compression, relative to the update's; 0 without feedback."""
    norm: Annotated[float, Field(ge=0, le=1e30)] | None = None
    """L2 norm of the update before compression."""
    train: Annotated[float, Field(ge=0, le=1e9)] | None = None
    """Seconds of local training."""
    compress: Annotated[float, Field(ge=0, le=1e9)] | None = None
    """Seconds of compression and coding."""
    flatness: Annotated[float, Field(ge=0, le=1)] | None = None
    """Of the update before compression, see `fedpress_compression.values.flatness`."""

    @property
    def query(self) -> str:
        """The parameters, three digits each, without the plus of an exponent: it stands for a blank
        in a query."""
        values = self.model_dump(exclude_none=True).items()
        return "&".join(f"{name}={value:.3g}".replace("+", "") for name, value in values)

    @field_validator("*", mode="before")
    @classmethod
    def _with_plus(cls, value: object) -> object:
        """Read the exponents of earlier devices, whose plus has become a blank."""
        return value.replace("e ", "e+") if isinstance(value, str) else value

    @property
    def means(self) -> dict[str, float]:
        """What a round shows the means of; empty unless all of it is there."""
        values = {name: getattr(self, name) for name in MEANS}
        return {} if None in values.values() else values

    @property
    def is_flat(self) -> bool:
        return self.flatness is not None and self.flatness >= FLAT


class RoundFigures(Term):
    """Means of UploadFigures over the uploads of an attempt that had them."""

    num_uploads: int
    nmse: float
    residual: float
    norm: float
    train: float
    compress: float


MEANS = tuple(name for name in RoundFigures.model_fields if name != "num_uploads")


DivergenceSign = Literal["loss", "norm", "nmse", "residual"]
"""The loss rises; updates explode; compression loses more than it sends; residuals grow."""
DIVERGENCE_SIGNS: tuple[DivergenceSign, ...] = get_args(DivergenceSign)


class RoundStatus(Term):
    """One attempt at a round, as operators and devices see it."""

    task: Name
    round: int
    attempt: int
    state: RoundState
    reason: str = ""
    base_model: Digest
    model: Digest | None = None
    published: dict[Name, Digest] = Field(default_factory=dict)
    """Further models, see TaskSummary."""
    assigned: int
    received: int
    included: int
    minimum: int
    size: int
    opened_at: float
    deadline: float
    closed_at: float | None = None
    upload_bytes: int
    """Body bytes of all uploads read."""
    wire_upload_bytes: int
    """The same, including request lines and headers."""
    download_bytes: int
    """Model bytes sent for this attempt."""
    coded_download_bytes: int = 0
    """Bytes among them of coded whole models."""
    difference_download_bytes: int = 0
    """Bytes among them of coded differences."""
    num_examples: int
    session: SessionStatus | None = None
    """Set in the masked lane once a session has started."""
    course: Course | None = None
    """Decisions of the task's policies for the round, if it has policies."""
    declined: dict[str, int] = Field(default_factory=dict)
    """Declined assignments by `DeclineReason`, `other` or `unstated`."""
    durations: Durations | None = None
    """Durations of the devices' work; only for a single round, None before any upload or
    estimate."""
    metrics: Metrics = Field(default_factory=dict)
    """Evaluation reports on the round's model, averaged by their examples."""
    measured: Measured | None = None
    """The same with the numbers of devices and examples; only for a single round."""
    groups: dict[str, Measured] = Field(default_factory=dict)
    """The same by value of `group_by`, see EvaluationTerms; only for a single round."""
    classes: dict[Name, Measured] = Field(default_factory=dict)
    """Accuracy by class, over the reports that count classes; only for a single round."""
    privacy: PrivacyStatus | None = None
    """Left out for tasks without privacy terms."""
    figures: RoundFigures | None = None
    """Left out if no upload had any."""
    update_norm: float | None = None
    """The L2 norm of the aggregated update; left out before there is one."""
    strategy_figures: dict[str, float] = Field(default_factory=dict)
    """The strategy's own figures of the round, such as `clipped_share`; left out without any."""
    warnings: dict[DivergenceSign, str] = Field(default_factory=dict)
    """Why the round looks as if training diverges, by sign; left out if it does not."""

    @model_serializer(mode="wrap")
    def _without_absent(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialize(self)
        for name in ("privacy", "figures", "update_norm", "strategy_figures", "warnings"):
            if name in fields and fields[name] in (None, {}):
                del fields[name]
        return fields


class Continuation(Term):
    """More rounds for a task that stopped after `after_round` rounds, starting from `model`."""

    after_round: Annotated[int, Field(ge=0, lt=2**30)]
    rounds: Annotated[int, Field(ge=1, lt=2**30)]
    model: Digest


class AsynchronousTerms(Term):
    """Asynchronous aggregation: every `cohort.size` uploads make a model, whichever models they
    were trained from.

    At most `concurrency` assignments are open at a time, each for `round_seconds`. An upload whose
    model is more than `max_staleness` versions old is not included.
    """

    concurrency: Annotated[int, Field(ge=1, lt=2**31)]
    max_staleness: Annotated[int, Field(ge=0, lt=2**31)] = 10


class DownlinkTerms(Term):
    """Compression of model downloads; docs/downlink.md has the cost of each number.

    Every published model lies on a grid: its tensors hold integers of `bits` bits, and a step from
    model to model takes at most `rate` bits per coordinate. The server keeps the remainder of a
    step for the next. A device that has one of the last `keep` models before the newest gets the
    difference, any other device the newest model whole, coded.
    """

    bits: Annotated[int, Field(ge=4, le=14)] = 12
    rate: Annotated[float, Field(gt=0, le=3.2)] = 1.0
    keep: Annotated[int, Field(ge=1, le=256)] = 8
    coder: Literal["huffman", "auto"] = "huffman"
    """"auto" fits more into the same bytes; decoding is slow on a device without fast kernels."""


class SelectionTerms(Term):
    """Selection of waiting devices for assignments; docs/selection.md compares the policies.

    "first" assigns in order of arrival, at once. The others choose once `candidates` devices wait,
    or `window` seconds after the first, and again whenever places are free: "uniform", all equally
    likely; "weighted", in proportion to examples; "seldom", in inverse proportion to the device's
    previous assignments; "reliable", in proportion to the share of them that led to an upload;
    "loss", the highest losses among `candidates` devices drawn in proportion to examples.
    """

    policy: Literal["first", "uniform", "weighted", "seldom", "reliable", "loss"] = "first"
    candidates: Annotated[int, Field(ge=1, lt=2**20)] | None = None
    """None: twice the number of free places."""
    window: Annotated[float, Field(gt=0)] = 10.0


class Eligibility(Term):
    """A condition on one attribute: a number in [`minimum`, `maximum`], or any value of
    `one_of`."""

    minimum: float | None = None
    maximum: float | None = None
    one_of: Annotated[tuple[Attribute, ...], Field(max_length=256)] = ()

    @model_validator(mode="after")
    def _asks_for_one_thing(self) -> Eligibility:
        least, most = self.minimum, self.maximum
        if (least is not None or most is not None) == bool(self.one_of):
            raise ValueError("set either one_of, or minimum, maximum or both")
        if least is not None and most is not None and least > most:
            raise ValueError(f"minimum {least:g} is larger than maximum {most:g}")
        return self

    def admits(self, value: Attribute | None) -> bool:
        """Return whether `value` satisfies the condition; None, a missing attribute, never does."""
        if value is None or isinstance(value, str) or self.one_of:
            return value in self.one_of
        return (self.minimum is None or value >= self.minimum) and (
            self.maximum is None or value <= self.maximum
        )


class EvaluationTerms(Term):
    """Use of the devices' evaluation reports in a task.

    The best model has the `goal` (lowest or highest) of `metric`; of equal ones, the first. A task
    that names another metric than the loss has to name its goal. With
    `patience` the task ends, as after its last round, once that many models in a row do not improve
    on the best previous one by more than `min_delta`. `group_by` names the device attribute by
    which metrics are grouped. Results of fewer than `least_clients` devices are not shown by group
    or class, and count neither for the best model nor for patience.
    """

    metric: Name = "loss"
    goal: Literal["lowest", "highest"] = "lowest"
    patience: Annotated[int, Field(ge=1)] | None = None
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    group_by: Name | None = None
    least_clients: Annotated[int, Field(ge=1)] = 1

    @model_validator(mode="before")
    @classmethod
    def _names_its_goal(cls, data: Any) -> Any:
        if isinstance(data, dict) and "goal" not in data:
            metric = data.get("metric", "loss")
            if metric != "loss":
                raise ValueError(
                    f"the metric {metric!r} needs a goal; "
                    'add "goal": "highest", as for an accuracy, or "lowest", as for an error'
                )
        return data

    def cost(self, value: float) -> float:
        """The metric as a cost: lower is better."""
        return value if self.goal == "lowest" else -value


class RetentionTerms(Term):
    """Retention of a task's model files: the newest `last` versions, and every `every`-th.

    Always kept: the first, the best, those that an alias has pointed to, and all that a round
    needs. The records of all versions stay; the events of rounds before the newest `last` go.
    """

    last: Annotated[int, Field(ge=1, lt=2**31)] = 10
    every: Annotated[int, Field(ge=1, lt=2**31)] | None = None


class TaskConfig(Term):
    """The configuration that an operator creates a task with; the initial model is registered
    before.

    A task that names no profiles gets them, see `defaults`.
    """

    task: Name
    model: Digest
    rounds: Annotated[int, Field(ge=1, lt=2**31)]
    strategy: dict[str, Any] = Field(default_factory=lambda: {"id": "fedavg"})
    lane: Literal["clear", "masked"] = "clear"
    masking: MaskingTerms | None = None
    """Terms of the masked lane; None there means the defaults."""
    privacy: PrivacyTerms | None = None
    """Terms of differential privacy; None: updates are sent without noise."""
    profiles: Annotated[tuple[Profile, ...], Field(min_length=1, max_length=256)]
    """The profiles of all rounds, or of the rounds after the `schedule`."""
    schedule: Schedule = ()
    """The profiles of the first rounds: warm-ups, other rates."""
    policies: Policies = ()
    """Policies that choose from `profiles` for each round and client. With any, `profiles` are rate
    levels, the least compressed first; without, the assignments of a round take turns."""
    schedule_after: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Rounds before the schedule starts; set by a continuation, whose optimizer restarts."""
    training: TrainingTerms = TrainingTerms()
    cohort: CohortRules
    round_seconds: Annotated[float, Field(gt=0, lt=2**31)] = 600.0
    at_end: Literal["finished", "paused"] = "finished"
    """Whether the task finishes or pauses after its last round."""
    max_attempts: Annotated[int, Field(ge=1, lt=2**31)] = 10
    """Maximum attempts at one round before the task is cancelled."""
    max_abs: Annotated[float, Field(gt=0)] = 256.0
    max_examples: Annotated[int, Field(ge=1, lt=2**32)] = 65536
    members: Annotated[tuple[Identifier, ...], Field(max_length=65536)] = ()
    """The clients that may take part; empty: all."""
    eligible: Annotated[dict[Name, Eligibility], Field(max_length=32)] = Field(default_factory=dict)
    """Conditions by attribute for a device to be assigned."""
    selection: SelectionTerms = SelectionTerms()
    evaluation: EvaluationTerms = EvaluationTerms()
    asynchronous: AsynchronousTerms | None = None
    """None: synchronous rounds."""
    downlink: DownlinkTerms | None = None
    """None: models are sent uncompressed. Otherwise the first model is rounded to the grid, and its
    digest differs from `model`."""
    retention: RetentionTerms | None = RetentionTerms()
    """None: the files of all versions are kept."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Derives the public seeds of the rounds; None draws one at random."""

    @model_validator(mode="before")
    @classmethod
    def _completed(cls, data: Any) -> Any:
        fields = completed(data) if isinstance(data, dict) else data
        if isinstance(fields, dict) and fields.get("profiles") is None:
            raise ValueError(
                "policies that choose from profiles, and the task names none; give profiles, the "
                'least compressed first, or {"id": "auto"} among the policies, which brings its own'
            )
        return fields

    @model_validator(mode="after")
    def _can_select(self) -> TaskConfig:
        terms = self.selection
        if terms.policy == "first":
            return self
        if terms.window >= self.round_seconds:
            raise ValueError(
                f"selection.window of {terms.window:g} s in rounds of {self.round_seconds:g} s; "
                "choose a shorter window: the selected devices only have the rest of the round"
            )
        places = 1 if self.asynchronous else self.cohort.assigned
        if terms.candidates is not None and terms.candidates < places:
            raise ValueError(
                f"selection.candidates of {terms.candidates} for {places} places leaves "
                f"nothing to choose; set at least {places}, or leave it out"
            )
        return self

    @property
    def every_profile(self) -> tuple[Profile, ...]:
        """Those of the schedule's periods in order, and of the rounds after."""
        periods = [each for period in self.schedule for each in period.profiles]
        return (*periods, *self.profiles)

    @property
    def needs_plain_mean(self) -> bool:
        """Whether a compressor does, see `Compressor`."""
        return any(
            getattr(profile.compressor, "needs_plain_mean", False) for profile in self.every_profile
        )

    def check_new(self) -> None:
        """Raise IncompatiblePlan for a configuration that new tasks may not have. Tasks started by
        an earlier release are read unchanged."""
        names = [profile.name for profile in self.profiles]
        if len(set(names)) < len(names):
            raise IncompatiblePlan(f"profile names must be unique, not {', '.join(names)}")
        for profile in self.every_profile:
            check_feedback(profile.compressor)
        self.check_phases()

    def check_phases(self) -> None:
        """Raise IncompatiblePlan for a profile whose rounds have two phases."""
        for profile in self.every_profile:
            if "basis" in profile.compressor.needs:
                raise IncompatiblePlan(f"profile {profile.name!r}: {TWO_PHASES}")

    @model_validator(mode="after")
    def _can_be_scheduled(self) -> TaskConfig:
        try:
            check_schedule(self.schedule, self.profiles)
            size = self.cohort.size
            check_policies(self.policies, self.profiles, lane=self.lane, size=size)
        except ConfigurationError as exc:
            raise ValueError(str(exc)) from exc
        return self

    @model_validator(mode="after")
    def _can_be_private(self) -> TaskConfig:
        if self.privacy is None:
            return self
        if self.privacy.needs_masks and self.lane != "masked":
            raise ValueError(
                "privacy terms in the clear lane, whose uploads have no noise; set lane to masked, "
                "or privacy.lane to central, where the server is trusted, or to local"
            )
        if self.asynchronous is not None:
            raise ValueError(
                "an asynchronous task cannot have privacy terms: its sums have uploads of several "
                "rounds, counted by their age; leave asynchronous out"
            )
        if self.policies:
            raise ValueError(
                f"{', '.join(each.id for each in self.policies)} under privacy terms: what "
                "policies go by is measured on devices' data, without noise; name profiles and "
                "leave policies out (a clear task without profiles gets the policy auto)"
            )
        if self.selection.policy in ("weighted", "loss"):
            raise ValueError(
                f"selection by {self.selection.policy} under privacy terms: devices tell neither "
                "losses nor numbers of examples; choose first, uniform, seldom or reliable"
            )
        bodies = len(set(self.members)) * self.privacy.participations
        if self.members and bodies < self.rounds * self.cohort.minimum:
            raise ValueError(
                f"{len(set(self.members))} members who take part {self.privacy.participations} "
                f"times each are enough for {bodies // self.cohort.minimum} rounds of "
                f"{self.cohort.minimum} clients or more, not for {self.rounds}; lower rounds, or "
                "raise privacy.participations and the noise with it"
            )
        apart = self.privacy.separation
        at_once = (apart - 1) * self.cohort.size + self.cohort.minimum
        if self.members and len(set(self.members)) < at_once:
            raise ValueError(
                f"{len(set(self.members))} members are too few for a privacy.separation of "
                f"{apart} rounds, which cohorts of {self.cohort.size} fill with {at_once} clients; "
                "lower cohort.size, or privacy.separation and raise the noise with it"
            )
        if self.evaluation.patience is not None:
            raise ValueError(
                "evaluation.patience under privacy terms: devices report no evaluations, whose "
                "losses have no noise; leave patience out"
            )
        return self

    @model_validator(mode="after")
    def _can_be_asynchronous(self) -> TaskConfig:
        if self.asynchronous is None:
            return self
        if self.lane == "masked":
            raise ValueError(
                "an asynchronous task cannot use the masked lane, whose clients must be online "
                "at the same time; use the clear lane, or a task without asynchronous terms"
            )
        needs = frozenset[str]().union(*(each.compressor.needs for each in self.every_profile))
        if needs & {"own", "basis"}:
            raise ValueError(
                "an asynchronous task cannot use delta or powersgd in two exchanges, whose uploads "
                "decode only within their round; use another compressor, or a task without "
                "asynchronous terms"
            )
        if self.cohort.minimum != self.cohort.size:
            raise ValueError(
                f"cohort.minimum of {self.cohort.minimum}, but an asynchronous task makes every "
                f"model of cohort.size = {self.cohort.size} uploads; set both to the same number"
            )
        if self.cohort.over_selection != 1:
            raise ValueError(
                f"over_selection of {self.cohort.over_selection:g} in an asynchronous task, which "
                "uses every upload; set asynchronous.concurrency for the number of clients"
            )
        return self
