"""The control plane: what devices and server say to each other in JSON.

Both ends parse with these and refuse unknown fields; the API's schemas are drawn from them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from fedpress_compression.compressors.error_feedback import check_feedback
from fedpress_protocols.defaults import completed
from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan
from fedpress_protocols.plan import (
    TWO_PHASES,
    CohortRules,
    Digest,
    MaskingTerms,
    Name,
    Profile,
    RoundPlan,
    Term,
    TrainingTerms,
)
from fedpress_protocols.policies import Course, Policies, check_policies, prober
from fedpress_protocols.schedule import Schedule, check_schedule
from fedpress_protocols.upload import WIRE_VERSIONS

WITHOUT_NUL = r"^[^\x00]*$"
"""No database's text holds the character 0."""
Identifier = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
Metrics = Annotated[dict[Name, float], Field(max_length=64)]
Attribute = float | Annotated[str, Field(max_length=64, pattern=WITHOUT_NUL)]
MAX_ATTRIBUTES = 32
Attributes = Annotated[dict[Name, Attribute], Field(max_length=MAX_ATTRIBUTES)]
"""What a device says of itself, by name: its memory in GiB, its region."""
AVERAGE = "average"
"""Under which a strategy publishes the average of its models."""
Outcome = Literal["included", "not-included"]
RoundState = Literal["collecting", "basing", "masking", "folding", "committed", "abandoned"]
TaskState = Literal["running", "paused", "finished", "cancelled"]
"""A paused task has had its rounds and may get more; to a device it is as good as running."""


PublicKey = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{42}[AEIMQUYcgkosw048]$")]
"""32 bytes, base64url without padding, in its one spelling."""
_Signature = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{85}[AQgw]$")]
"""64 bytes, likewise."""
MAX_ROTATIONS = 256
"""How often a device may change its key."""


class KeyRotation(Term):
    """That the device `client_id` signs with `new_key` from now on, and with `old_key` no more."""

    client_id: Identifier
    old_key: PublicKey
    new_key: PublicKey


class SignedRotation(Term):
    """Signed by both keys: the old one says which comes next, the new one that it is there.

    See `device_keys` for what is signed.
    """

    rotation: KeyRotation
    old_signature: _Signature
    new_signature: _Signature


class RotationRequest(Term):
    """Brings in a device's newest key; the request is signed by it, or by the one before it.

    `rotations` is the chain of all that led to it, or the end of that: a server which came back
    from a backup knows an earlier key.
    """

    rotations: Annotated[tuple[SignedRotation, ...], Field(min_length=1, max_length=MAX_ROTATIONS)]


class RotationResponse(Term):
    client_id: Identifier
    key_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{22}$")]
    """Of the key that the server knows the device by now."""
    server_time: float


class EnrolRequest(Term):
    """Registers the Ed25519 key that signed this very request: its signature proves possession.

    The enrolment token travels as `Authorization: Bearer`.
    """

    public_key: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{43}$")]
    """32 bytes, base64url without padding."""
    name: Annotated[str, Field(max_length=128, pattern=WITHOUT_NUL)] = ""
    rotations: Annotated[tuple[SignedRotation, ...], Field(max_length=MAX_ROTATIONS)] = ()
    """From the key with which the device first enrolled to this one, if it is another: the device
    is the one that it was, to a server that has lost its records. Left out where it is empty."""

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
    """What a device of the masked lane shows to others: a certificate, and whose it is.

    `authority` is the Ed25519 key that signs certificates for `population`. `certificate` is
    None where the server does not hold that key: the operator of the authority issues it.
    """

    population: Name
    authority: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{43}$")]
    certificate: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,1024}$")] | None
    """Its canonical bytes, base64url without padding."""


class TaskSummary(Term):
    """What a device needs to know of a task before it joins."""

    task: Name
    state: TaskState
    model: Digest
    """The newest model."""
    published: dict[Name, Digest] = Field(default_factory=dict)
    """Models that the strategy publishes beside it, by name: `average`, say."""
    best: Digest | None = None
    """The one that devices measured best so far, see EvaluationTerms; None before any did."""
    spec: Digest
    round: Annotated[int, Field(ge=0)]
    """Rounds committed so far."""
    rounds: Annotated[int, Field(ge=1)]
    """Rounds in all."""
    reason: str = ""
    """Why it ended before its last round, if it did; of a running task, why it does not go on."""
    lane: Literal["clear", "masked"] = "clear"
    downlink: bool = False
    """Whether its models are to be had coded, whole and as differences."""

    @property
    def served(self) -> Digest:
        """The model to use, where another is not asked for by name: the average of the rounds'
        models where the strategy publishes one, unless devices have measured the newest as best."""
        average = self.published.get(AVERAGE)
        return self.model if average is None or self.best == self.model else average


class Restore(Term):
    """A server came back from a backup: what was committed after it is in no model of this server.

    Each restore makes a new *epoch*.
    """

    number: Annotated[int, Field(ge=1)]
    """Of restores that this server's records have been through."""
    epoch: Identifier
    """Drawn anew by each restore: of two restores of one backup too."""
    backup_at: int
    """Unix seconds; what was committed before is here."""
    restored_at: int


class IncludedUpload(Term):
    """An upload that a device knows to have been included, by the receipt that it has."""

    assignment: Identifier
    round: Annotated[int, Field(ge=0, lt=2**31)]
    attempt: Annotated[int, Field(ge=0, lt=2**31)]
    model: Digest | None
    """The one that it went into."""


MAX_FATES = 1024


class CheckInRequest(Term):
    wire_versions: tuple[int, ...] = WIRE_VERSIONS
    pending: Annotated[tuple[Identifier, ...], Field(max_length=1024)] = ()
    """Assignments of which the device holds an upload and no receipt."""
    wait: Annotated[float, Field(ge=0, le=30)] = 0.0
    """Seconds that the server may hold the answer until there is news."""
    attributes: Attributes = Field(default_factory=dict)
    """What the task's rules of eligibility read; the device's own word."""
    epoch: Identifier | None = None
    """Of the last restore that the device has taken account of; None: of none."""
    fates: Annotated[tuple[IncludedUpload, ...], Field(max_length=MAX_FATES)] = ()
    """What it was told since the last backup; asked once it hears of a restore."""


class Assignment(Term):
    """One client's part in one attempt at a round; the key under which its upload is idempotent."""

    assignment: Identifier
    client_id: Identifier
    plan: RoundPlan
    profile: Name
    own: Digest | None = None
    """SHA-256 of what the client's last included upload stood for, float32; None for zeros, and
    where no profile of the plan reads it."""
    basis: Digest | None = None
    """Of the second of two trips: SHA-256 of the basis that the first trips came to, float32."""
    turn: Annotated[int, Field(ge=0)] = 0
    """How many assignments of this very attempt the client had before; in an asynchronous task."""


RECEIPT_CONTEXT = "fedpress receipt v1"
"""Under which the server signs receipts and a device verifies them."""


class MaskedSum(Term):
    """Which sum a masked upload went into: the session's id, the digest of the set of clients that
    was signed in it, and that of the sum."""

    session: Digest
    survivors: Digest
    aggregate: Digest


class Receipt(Term):
    """What became of an assignment, once and for all; signed by the server.

    `model` is the model that the upload went into, `upload` the SHA-256 of the body. `masked` is
    there, also among the fields signed, for an upload of the masked lane that was included.
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
    """Of the server's last restore before the receipt was issued; there only if there was one."""

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
]
"""Why a device gives an assignment back. A server counts words of later releases as `other`, and
devices that state none as `unstated`."""


class SignedReceipt(Term):
    receipt: Receipt
    key_id: str
    signature: str


RECALL_CONTEXT = "fedpress recall v1"
"""Under which the server signs what a restore undid."""


class Recall(Term):
    """The server's word to one device, signed: since `restore` it knows nothing of the assignments
    `unknown`, and what was sent for them is in no model of it, nor will be."""

    client_id: Identifier
    task: Name
    restore: Restore
    unknown: Annotated[tuple[Identifier, ...], Field(max_length=1024 + MAX_FATES)] = ()
    issued_at: int
    """Unix seconds."""


class SignedRecall(Term):
    recall: Recall
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
    recall: SignedRecall | None = None
    """Where the server was restored since the device's `epoch`, or does not know what it asks of
    because of that."""
    backup_at: int | None = None
    """The server may go back to here (Unix seconds): a device keeps what receipts of later say was
    included. Told with receipts; None without a backup."""


class UploadAck(Term):
    """The upload is staged durably. What becomes of it, the receipt will say."""

    assignment: Identifier
    upload: Digest
    received_at: float


Trip = Literal["first", "update"]
"""Which body of an assignment: the first of two trips, or the update."""


class PartialIntent(Term):
    """Begins an upload by parts of an assignment's body, or finds the one that was begun."""

    trip: Trip = "update"
    max_bytes: Annotated[int, Field(ge=1, lt=2**53)]
    """What the body will not be longer than; its length, once that is known."""
    upload: Digest | None = None
    """SHA-256 of the whole body; None while it is still being made."""


class PartialUpload(Term):
    """How far an upload by parts has come: everything before `offset` is on the server's disk.

    It is no upload before its completion, and is forgotten at `expires_at`, which every part puts
    off.
    """

    partial: Identifier | None
    """What names it; None where `ack` says that there is nothing to send."""
    offset: Annotated[int, Field(ge=0)]
    digest: Digest
    """SHA-256 of the bytes before `offset`: a device whose body begins otherwise starts anew."""
    part_bytes: Annotated[int, Field(ge=1)]
    """The longest part that is taken."""
    expires_at: float
    ack: UploadAck | None = None
    """Of the very body that was asked about, if it is staged already."""


class PartialCompletion(Term):
    """The device's signed word that the parts are the whole body: from here on it is an upload."""

    num_bytes: Annotated[int, Field(ge=1, lt=2**53)]
    upload: Digest
    """SHA-256 of the whole body."""


MAX_CLASSES = 1000


class ClassCount(Term):
    """How many examples of a class a device has, and of how many the model was right."""

    num_examples: Annotated[int, Field(ge=1, lt=2**32)]
    correct: Annotated[int, Field(ge=0)]

    @model_validator(mode="after")
    def _no_more_than_all(self) -> ClassCount:
        if self.correct > self.num_examples:
            raise ValueError(f"{self.correct} correct of {self.num_examples} examples")
        return self


class EvaluationReport(Term):
    """A device's own measure of a model on its own data."""

    model: Digest
    num_examples: Annotated[int, Field(ge=1, lt=2**32)]
    metrics: Metrics
    classes: Annotated[dict[Name, ClassCount], Field(max_length=MAX_CLASSES)] = Field(
        default_factory=dict
    )
    """By class, if the device counts them."""
    attributes: Attributes = Field(default_factory=dict)
    """As of CheckInRequest: one of them says which group the report counts in."""

    @model_validator(mode="after")
    def _no_more_than_all(self) -> EvaluationReport:
        total = sum(count.num_examples for count in self.classes.values())
        if total > self.num_examples:
            raise ValueError(f"classes of {total} examples in all, of {self.num_examples}")
        return self


class Measured(Term):
    """What several devices measured: means weighted by their examples."""

    num_clients: int
    num_examples: int
    metrics: Metrics


class SessionStatus(Term):
    """A masked session, as far as it has come. `began` clients were there for it; by step,
    `answered` is how many came and `silent` how many had not, of those asked, at its deadline."""

    began: int
    answered: dict[str, int]
    silent: dict[str, int] = Field(default_factory=dict)
    message_bytes: int
    """Of all that clients said, uploads not among it."""
    seconds: float | None = None
    """From its beginning until the last step was over."""
    suspects: tuple[str, ...] = ()
    """The clients at fault: what they sealed several could not open, or their shares were wrong.
    They take no part in the task's next sessions."""
    failures: tuple[tuple[str, str], ...] = ()
    """Who could not open what whom had sealed. Of a pair by itself either may be at fault: they are
    kept apart."""


class Durations(Term):
    """How long devices took for their assignments of a round, in seconds from the assignment to the
    whole upload, and how long those that declined as `too-slow` say that they need."""

    num_uploads: Annotated[int, Field(ge=0)]
    num_too_slow: Annotated[int, Field(ge=0)]
    median: Annotated[float, Field(ge=0)]
    longest: Annotated[float, Field(ge=0)]
    suggested_round_seconds: Annotated[float, Field(gt=0)]
    """Time for nine of ten of these devices, and a quarter more."""


class RoundStatus(Term):
    """One attempt at a round, as operators and devices may see it."""

    task: Name
    round: int
    attempt: int
    state: RoundState
    reason: str = ""
    base_model: Digest
    model: Digest | None = None
    published: dict[Name, Digest] = Field(default_factory=dict)
    """Models beside `model`, see TaskSummary."""
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
    coded_download_bytes: int = 0
    """Of them: of whole models, coded."""
    difference_download_bytes: int = 0
    """Of them: of differences to a model that the device held."""
    num_examples: int
    session: SessionStatus | None = None
    """In the masked lane, once a session has begun."""
    course: Course | None = None
    """What the task's policies made of the round, if it has any."""
    declined: dict[str, int] = Field(default_factory=dict)
    """Assignments that devices gave back, by their `DeclineReason`, `other` or `unstated`."""
    durations: Durations | None = None
    """How long devices took; asked for one round, None before any upload or estimate."""
    metrics: Metrics = Field(default_factory=dict)
    """Evaluation reports on the round's model, averaged by their examples."""
    measured: Measured | None = None
    """The same with how many devices and examples they are of; asked for one round."""
    groups: dict[str, Measured] = Field(default_factory=dict)
    """The same by the value of the task's attribute, see EvaluationTerms; asked for one round."""
    classes: dict[Name, Measured] = Field(default_factory=dict)
    """Accuracy by class, over the reports that count classes; asked for one round."""


class Continuation(Term):
    """More rounds for a task that has stopped after `after_round` of them, beginning at `model`."""

    after_round: Annotated[int, Field(ge=0, lt=2**30)]
    rounds: Annotated[int, Field(ge=1, lt=2**30)]
    model: Digest


class AsynchronousTerms(Term):
    """How a task goes on without rounds that wait: every `cohort.size` uploads make a model,
    whatever the models that they were trained from.

    At most `concurrency` assignments are open at a time, each for `round_seconds`. One whose model
    is more than `max_staleness` models behind comes to nothing.
    """

    concurrency: Annotated[int, Field(ge=1, lt=2**31)]
    max_staleness: Annotated[int, Field(ge=0, lt=2**31)] = 10


class DownlinkTerms(Term):
    """How a task's models go down coded; docs/downlink.md says what each number costs.

    Every published model lies on a grid: its tensors hold whole numbers of `bits` bits, and a step
    from model to model takes at most `rate` bits a coordinate. What a step leaves out stays with
    the server, for the next. A device that holds one of the last `keep` models before the newest
    gets the difference, any other the newest whole, coded.
    """

    bits: Annotated[int, Field(ge=4, le=14)] = 12
    rate: Annotated[float, Field(gt=0, le=3.2)] = 1.0
    keep: Annotated[int, Field(ge=1, le=256)] = 8
    coder: Literal["huffman", "auto"] = "huffman"
    """"auto" gets more into the same bytes; slow to read on a device without fast kernels."""


class SelectionTerms(Term):
    """Which of the devices that wait are assigned; docs/selection.md compares the policies.

    "first": whoever comes first, at once. The others choose once `candidates` devices wait, or
    `window` seconds after the first did, and again whenever places are left or given back:
    "uniform", each as likely; "weighted", in proportion to examples; "seldom", in inverse
    proportion to the assignments that a device has had; "reliable", in proportion to the share of
    them that came to an upload; "loss", those with the highest loss among `candidates` drawn in
    proportion to examples.
    """

    policy: Literal["first", "uniform", "weighted", "seldom", "reliable", "loss"] = "first"
    candidates: Annotated[int, Field(ge=1, lt=2**20)] | None = None
    """None: twice as many as places are to be filled."""
    window: Annotated[float, Field(gt=0)] = 10.0


class Eligibility(Term):
    """What one attribute must be: a number in [`minimum`, `maximum`], or any value of `one_of`."""

    minimum: float | None = None
    maximum: float | None = None
    one_of: Annotated[tuple[Attribute, ...], Field(max_length=256)] = ()

    @model_validator(mode="after")
    def _asks_for_one_thing(self) -> Eligibility:
        least, most = self.minimum, self.maximum
        if (least is not None or most is not None) == bool(self.one_of):
            raise ValueError("give one_of, or minimum or maximum or both")
        if least is not None and most is not None and least > most:
            raise ValueError(f"minimum {least:g} is larger than maximum {most:g}")
        return self

    def admits(self, value: Attribute | None) -> bool:
        """Whether an attribute may be `value`; None, one that is missing, never may."""
        if value is None or isinstance(value, str) or self.one_of:
            return value in self.one_of
        return (self.minimum is None or value >= self.minimum) and (
            self.maximum is None or value <= self.maximum
        )


class EvaluationTerms(Term):
    """What a task makes of its devices' evaluation reports.

    The best model is the one with the `goal` of `metric`, of several the first. With `patience` the
    task ends, as after its last round, once that many models in a row are not better than the best
    before them by more than `min_delta`. `group_by` names the attribute of devices whose values
    the metrics are shown by. What fewer than `least_clients` devices report is not shown by group
    or class, and makes a model neither the best nor a reason to end.
    """

    metric: Name = "loss"
    goal: Literal["lowest", "highest"] = "lowest"
    patience: Annotated[int, Field(ge=1)] | None = None
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    group_by: Name | None = None
    least_clients: Annotated[int, Field(ge=1)] = 1

    def cost(self, value: float) -> float:
        """The less, the better."""
        return value if self.goal == "lowest" else -value


class RetentionTerms(Term):
    """Which of a task's versions keep their files: the newest `last`, and one of `every`.

    Besides, always: the first, the best, those that an alias has pointed to, and whatever a round
    needs. Rows stay of all.
    """

    last: Annotated[int, Field(ge=1, lt=2**31)] = 10
    every: Annotated[int, Field(ge=1, lt=2**31)] | None = None


class TaskConfig(Term):
    """What an operator starts a task with; the initial model is registered before.

    A task that names no profiles gets them, see `defaults`.
    """

    task: Name
    model: Digest
    rounds: Annotated[int, Field(ge=1, lt=2**31)]
    strategy: dict[str, Any] = Field(default_factory=lambda: {"id": "fedavg"})
    lane: Literal["clear", "masked"] = "clear"
    masking: MaskingTerms | None = None
    """Of the masked lane; None there stands for the defaults."""
    profiles: Annotated[tuple[Profile, ...], Field(min_length=1, max_length=256)]
    """Those of all rounds, or of those after the `schedule`."""
    schedule: Schedule = ()
    """What the rounds have before: warm-ups, other rates."""
    policies: Policies = ()
    """Which of `profiles` a round has, and each client of it. With any these are a ladder, the
    gentlest first; without, the assignments of a round have them in turn."""
    schedule_after: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Rounds before the schedule begins; a continuation, whose optimizer begins anew, sets it."""
    training: TrainingTerms = TrainingTerms()
    cohort: CohortRules
    round_seconds: Annotated[float, Field(gt=0, lt=2**31)] = 600.0
    at_end: Literal["finished", "paused"] = "finished"
    """What becomes of the task after its last round."""
    max_attempts: Annotated[int, Field(ge=1, lt=2**31)] = 10
    """Attempts at one round before the task is cancelled."""
    max_abs: Annotated[float, Field(gt=0)] = 256.0
    max_examples: Annotated[int, Field(ge=1, lt=2**32)] = 65536
    members: Annotated[tuple[Identifier, ...], Field(max_length=65536)] = ()
    """The clients that may take part; none named: all."""
    eligible: Annotated[dict[Name, Eligibility], Field(max_length=32)] = Field(default_factory=dict)
    """By attribute: what it must be for a device to be assigned."""
    selection: SelectionTerms = SelectionTerms()
    evaluation: EvaluationTerms = EvaluationTerms()
    asynchronous: AsynchronousTerms | None = None
    """None: round by round."""
    downlink: DownlinkTerms | None = None
    """None: models go down as they are. Else the first model is rounded to the grid, and has
    another digest than `model`."""
    retention: RetentionTerms | None = RetentionTerms()
    """None: the files of all versions stay."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Derives the public seeds of the rounds; None draws one at random."""

    @model_validator(mode="before")
    @classmethod
    def _completed(cls, data: Any) -> Any:
        return completed(data) if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _can_select(self) -> TaskConfig:
        terms = self.selection
        if terms.policy == "first":
            return self
        if terms.window >= self.round_seconds:
            raise ValueError(
                f"selection.window of {terms.window:g} s in rounds of {self.round_seconds:g} s; "
                "choose a shorter one, since those chosen have the rest of the round"
            )
        places = 1 if self.asynchronous else self.cohort.assigned
        if terms.candidates is not None and terms.candidates < places:
            raise ValueError(
                f"selection.candidates of {terms.candidates} for {places} places, which leaves "
                "nothing to choose; give as many at least, or none"
            )
        return self

    @property
    def every_profile(self) -> tuple[Profile, ...]:
        """Those of the schedule's periods in order, of the rounds after, and of probes."""
        periods = [each for period in self.schedule for each in period.profiles]
        probing = prober(self.policies)
        return (*periods, *self.profiles, *([] if probing is None else [probing.reference]))

    def check_new(self) -> None:
        """Raise IncompatiblePlan for what no task may begin with any more. Tasks that were begun
        before are read as they are."""
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
    def _can_be_asynchronous(self) -> TaskConfig:
        if self.asynchronous is None:
            return self
        if self.lane == "masked":
            raise ValueError(
                "an asynchronous task in the masked lane, whose clients have to be there at the "
                "same time; use the clear lane, or a task without asynchronous terms"
            )
        needs = frozenset[str]().union(*(each.compressor.needs for each in self.every_profile))
        if needs & {"own", "basis"}:
            raise ValueError(
                "an asynchronous task, and what an upload stands for hangs on the round that it is "
                "of; use another compressor than delta and powersgd in two trips, or a task "
                "without asynchronous terms"
            )
        if self.cohort.minimum != self.cohort.size:
            raise ValueError(
                f"cohort.minimum of {self.cohort.minimum} where an asynchronous task makes every "
                f"model of cohort.size = {self.cohort.size} uploads; set both the same"
            )
        if self.cohort.over_selection != 1:
            raise ValueError(
                f"over_selection of {self.cohort.over_selection:g} in an asynchronous task, where "
                "no upload is one too many; asynchronous.concurrency says how many clients train"
            )
        return self
