"""The plan of a round: the server's terms for every client, validated once at construction.

A plan travels as JSON. Both ends derive everything else from it and from the model's spec: layouts,
bounds, shared randomness. Unknown fields are refused, since a client cannot honour a term
that it does not know.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainSerializer,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from fedpress_compression.coding.fields import Known, Layout
from fedpress_compression.compressor import Compressor, Knowledge, Public, from_config, to_config
from fedpress_compression.compressors.powersgd import PowerSGD
from fedpress_compression.fixed_point import FixedPoint
from fedpress_compression.linear import as_linear, has_public_support, restricts, support_of
from fedpress_compression.randomness import PublicRandomness
from fedpress_compression.sketches import LEAST_CELLS, MOST_CELLS, num_bytes
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_compression.update import Indices
from fedpress_protocols.errors import FedpressError, IncompatiblePlan, WireVersionMismatch
from fedpress_protocols.masking.graph import Adversary, honest_survivors, parameters
from fedpress_protocols.masking.keystream import Suite
from fedpress_protocols.masking.transcript import MAX_CLIENTS
from fedpress_protocols.privacy import accounting, gaussian
from fedpress_protocols.privacy.accounting import Cost, PrivacyLane, SharedNoise, participation
from fedpress_protocols.privacy.clipping import Bounds
from fedpress_protocols.privacy.correlated import Correlation
from fedpress_protocols.upload import (
    MAX_REPORTS,
    REPORT_BYTES,
    WIRE_VERSION,
    WIRE_VERSIONS,
    WITHIN_CLIP,
    max_body_bytes,
)
from fedpress_protocols.validation import format_validation_errors

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class Term(BaseModel):
    """A frozen piece of a plan or a message; unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


TermT = TypeVar("TermT", bound=Term)


def _cells(value: int) -> int:
    if value and (value & (value - 1) or not LEAST_CELLS <= value <= MOST_CELLS):
        raise ValueError(
            f"a sketch has a power of two of cells, {LEAST_CELLS} to {MOST_CELLS}, not {value}; 0 "
            "means none"
        )
    return value


SketchCells = Annotated[int, Field(ge=0), AfterValidator(_cells)]


def _compressor(value: Any) -> Any:
    if not isinstance(value, dict) and not hasattr(value, "layout"):
        actual = repr(value[:32]) if isinstance(value, str) else f"a {type(value).__name__}"
        raise ValueError(f"a compressor is an object with an id, not {actual}")
    try:
        return from_config(value) if isinstance(value, dict) else value
    except FedpressError as exc:  # pydantic gathers ValueErrors under the field's name
        raise ValueError(str(exc)) from exc


AnyCompressor = Annotated[
    Any,
    BeforeValidator(_compressor),
    PlainSerializer(to_config, return_type=dict[str, Any]),
]


class Profile(Term):
    """A compressor at a rate, by a name that an assignment can call."""

    name: Name
    compressor: AnyCompressor
    learning_rate_factor: Annotated[float, Field(gt=0, le=4)] = 1.0
    """Multiplier of the plan's learning rate for clients with this profile."""

    @model_serializer(mode="wrap")
    def _without_factor(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialize(self)
        if (
            fields.get("learning_rate_factor") == 1
        ):  # so that older releases, which do not know the field, can read it
            del fields["learning_rate_factor"]
        return fields


class TrainingTerms(Term):
    """Terms of local training. Terms left out are the trainer's choice."""

    local_epochs: Annotated[int, Field(ge=1)] | None = None
    local_steps: Annotated[int, Field(ge=1)] | None = None
    batch_size: Annotated[int, Field(ge=1)] | None = None
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    gradient_accumulation: Annotated[int, Field(ge=1)] = 1
    restricted: bool = False
    """Train only coordinates of the profile's support, so that no update is left over."""

    @model_validator(mode="after")
    def _one_length(self) -> TrainingTerms:
        if self.local_epochs is not None and self.local_steps is not None:
            raise ValueError("set local_epochs or local_steps, not both")
        return self


class ControlTerms(Term):
    """Control variates (SCAFFOLD): a vector [d] of each client, initially zero, subtracted from
    gradients.

    To each gradient a trainer adds `server`'s vector less the client's own, and what it uploads is
    its update plus `offset` times `server`'s. Once an upload is included, the client's vector moves
    by `scale` times what the upload decodes to, and so the mean of all clients' moves by what the
    server knows: `scale` times the uploads' sum over the number of clients.
    """

    scale: float
    offset: float = 0.0
    server: Digest | None = None
    """The server's vector, an artefact of 4 d bytes, float32; None stands for zeros."""


Pattern = Annotated[str, Field(min_length=1, max_length=128)]


class ClientTerms(Term):
    """Terms of a strategy for its clients beyond plain local training; by default none."""

    proximal: Annotated[float, Field(ge=0)] = 0.0
    """Factor of the proximal term: it times (parameters - round's model) is added to each
    gradient."""
    control: ControlTerms | None = None
    full_batch: bool = False
    """Take one step along the mean gradient over all local examples."""
    normalise: bool = False
    """Divide the update by the number of steps, which the upload reports."""
    personal: Annotated[tuple[Pattern, ...], FailFast(), Field(max_length=256)] = ()
    """Patterns (`*`, `?`, `[abc]`) of the names of tensors that stay on the device."""

    @property
    def of_trainer(self) -> frozenset[str]:
        """The names of the terms that only a trainer can honour."""
        names = {name for name in ("proximal", "control", "full_batch") if getattr(self, name)}
        return frozenset(names)

    def with_control(self, server: str | None) -> ClientTerms:
        """Return these terms with the control vector `server`, if clients have one."""
        if self.control is None:
            return self
        control = self.control.model_copy(update={"server": server})
        return self.model_copy(update={"control": control})


class CohortRules(Term):
    """Cohort limits of a round: target (`size`), assigned, and minimum (quorum).

    ceil(size * over_selection) are assigned; the round closes when `size` uploads are in, or at
    the deadline with `minimum` of them, and is abandoned with fewer.
    """

    size: Annotated[int, Field(ge=1)]
    minimum: Annotated[int, Field(ge=1)]
    over_selection: Annotated[float, Field(ge=1, le=10)] = 1.0

    @model_validator(mode="after")
    def _minimum_within(self) -> CohortRules:
        if self.minimum > self.size:
            raise ValueError(f"minimum {self.minimum} is larger than size {self.size}")
        return self

    @property
    def assigned(self) -> int:
        return math.ceil(round(self.size * self.over_selection, 6))


class FixedPointTerms(Term):
    """The scale of the sum, see `fixed_point.FixedPoint`; `max_examples` bounds one client."""

    scale_bits: int
    max_abs: float
    max_examples: Annotated[int, Field(ge=1, lt=2**32)]


class PhaseTerms(Term):
    """Timeout in seconds of each phase of a masked session."""

    advertise: Annotated[int, Field(ge=1, lt=2**32)] = 30
    share: Annotated[int, Field(ge=1, lt=2**32)] = 30
    mask: Annotated[int, Field(ge=1, lt=2**32)] = 120
    consent: Annotated[int, Field(ge=1, lt=2**32)] = 30
    reveal: Annotated[int, Field(ge=1, lt=2**32)] = 30


class MaskingTerms(Term):
    """Terms of a masked sum: the protocol's parameters and the integer encoding.

    A number in [-`levels`, `levels`] of each client takes log2(2 * levels * cohort.size + 1) bits.
    Its step follows from public data: the largest number stands for `headroom` times the root mean
    square of the model's last step there, or for `first_range` without such a step. A compressor's
    own bits, clip and rounding apply to the clear lane only.
    """

    adversary: Adversary = "malicious"
    corrupt: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """The share of the cohort that may collude with the server."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """The share of the cohort that may drop out between key exchange and sum."""
    suite: Suite = "chacha20"
    hybrid: bool = False
    """Whether pairs use ML-KEM-768 besides X25519."""
    seconds: PhaseTerms = PhaseTerms()
    levels: Annotated[int, Field(ge=1, lt=2**31)] = 15
    headroom: Annotated[float, Field(gt=0, le=2.0**20)] = 8.0
    first_range: Annotated[float, Field(ge=1e-6, le=2.0**20)] = 0.1
    max_weight: Annotated[int, Field(ge=1, lt=2**32)] | None = None
    """Updates are weighted by examples up to this number; None: all have the same weight."""
    support: Digest | None = None
    """The expected digest of the coordinates and their steps; clients verify it, see `Payload`."""

    @property
    def adversaries(self) -> str:
        """Whom the noise of a private sum's honest clients protects from, in words."""
        server = "curious" if self.adversary == "semi-honest" else "lying"
        return (
            f"a {server} server with {self.corrupt:.0%} of a cohort at most, other devices, and "
            "the public"
        )


MAX_PARTICIPATIONS = 2**20
"""Maximum participations of a device in a private task."""
Share = Annotated[float, Field(ge=1e-6, le=1e6)]
MIN_CLIP, MAX_CLIP = 1e-9, 2.0**20
CLIP_SPAN = 2.0**10
"""An adaptive clip stays within this factor of the task's, both ways."""


class AdaptiveClip(Term):
    """A clip that follows a quantile of the norms of what devices would send without it.

    Each upload reports whether its norm is within the round's clip. The server counts these bits
    with noise of its own, of deviation `count_noise` in devices, and multiplies the next round's
    clip by exp(-`learning_rate` * (share within - `quantile`)).

    Andrew, Thakkar, McMahan and Ramaswamy 2021, arXiv:1905.03871, Algorithm 1.
    """

    quantile: Annotated[float, Field(gt=0, lt=1)] = 0.5
    learning_rate: Annotated[float, Field(gt=0, le=2)] = 0.2
    count_noise: Annotated[float, Field(ge=0, le=2.0**18)] = 0.0
    """A twentieth of the cohort is usual. 0 is refused."""

    def next_clip(self, clip: float, share: float, initial: float) -> float:
        """The clip after one of `clip` that the `share` of devices was within, of a task that began
        with `initial`: of six digits, so that no machine's arithmetic shows."""
        moved = clip * math.exp(-self.learning_rate * (min(max(share, 0.0), 1.0) - self.quantile))
        low, high = clip_range(initial)
        return min(max(float(f"{moved:.6g}"), low), high)


def clip_range(initial: float) -> tuple[float, float]:
    """The least and the largest clip of an adaptive task that begins with `initial`."""
    return max(MIN_CLIP, initial / CLIP_SPAN), min(MAX_CLIP, initial * CLIP_SPAN)


class PrivacyTerms(Term):
    """Terms of user-level differential privacy.

    The numbers of an update that are sent have an L2 norm of at most `clip`, and the noise has a
    standard deviation of at least `noise_multiplier` * `clip` in each number. By `lane` it is

    - `distributed`: the noise of a masked sum's honest devices together (Skellam or, by `noise`,
      discrete Gaussian, which costs less epsilon and fewer bits),
    - `central`: the server's, added once to a round's sum of clear uploads (Gaussian),
    - `local`: each device's own, added to a clear upload before it is compressed (Gaussian).

    A device takes part `participations` times at most; for that many the terms claim (`epsilon`,
    `delta`), and terms whose noise is too small for it are refused.

    In the central lane the noise may have a `correlation` over rounds. A device that takes part in
    a round then does so again `separation` rounds later at the earliest.

    With `adaptive` terms the server chooses each round's clip by a count that has noise too. A
    participation then spends on both together what `noise_multiplier` says.

    By `per_tensor` each tensor has a bound of its own, in proportion to its share; the root of the
    sum of their squares is `clip`, see `clipping`.
    """

    lane: PrivacyLane = "distributed"
    """Left out where it is `distributed`: older releases do not know it."""
    clip: Annotated[float, Field(ge=MIN_CLIP, le=MAX_CLIP)]
    """Of a round's plan; in a task that of all rounds or, if it is `adaptive`, of the first."""
    noise_multiplier: Annotated[float, Field(ge=0.01, le=2.0**20)]
    participations: Annotated[int, Field(ge=1, le=MAX_PARTICIPATIONS)]
    epsilon: Annotated[float, Field(gt=0, le=30)]
    delta: Annotated[float, Field(ge=1e-11, lt=0.1)] = 1e-5
    correlation: Correlation | None = None
    """Left out where it is None: older releases do not know it."""
    adaptive: AdaptiveClip | None = None
    """Left out where it is None: older releases do not know it."""
    noise: SharedNoise = "skellam"
    """Left out where it is `skellam`: older releases know no other."""
    per_tensor: Annotated[tuple[tuple[Pattern, Share], ...], FailFast(), Field(max_length=256)] = ()
    """Left out where it is empty: older releases do not know it."""

    @model_serializer(mode="wrap")
    def _without_defaults(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialize(self)
        usual = {"lane": "distributed", "correlation": None, "adaptive": None, "noise": "skellam"}
        for name, value in usual.items():
            if fields.get(name, ...) == value:
                del fields[name]
        if not fields.get("per_tensor", ...):
            del fields["per_tensor"]
        return fields

    @property
    def update_multiplier(self) -> float:
        """The noise in each number of a round over `clip`: `noise_multiplier`, or more where the
        count of an adaptive clip spends a part.

        A device moves the sum by `clip` at most and the count of bits less a half by a half at
        most, so both are one Gaussian mechanism of sensitivity over deviation
        sqrt(update_multiplier**-2 + (2 count_noise)**-2) = 1 / noise_multiplier.
        """
        if self.adaptive is None:
            return self.noise_multiplier
        rest = self.noise_multiplier**-2 - (2 * self.adaptive.count_noise) ** -2
        return (1 + 1e-12) / math.sqrt(rest)

    def with_clip(self, clip: float) -> PrivacyTerms:
        """These terms in a round whose clip is this."""
        return self.model_copy(update={"clip": clip})

    def bounds(self, spec: ModelSpec) -> Bounds:
        """The largest norms of what a device sends, of an update over `spec`; raises
        IncompatiblePlan where the patterns of `per_tensor` do not fit its tensors."""
        return Bounds.of(self.clip, self.per_tensor, spec)

    @property
    def separation(self) -> int:
        """The least distance, in rounds, of two participations of a device."""
        return 1 if self.correlation is None else self.correlation.separation

    @property
    def needs_masks(self) -> bool:
        return self.lane == "distributed"

    def against(self, masking: MaskingTerms | None = None) -> str:
        """The adversaries that epsilon covers, in words; `masking` are the plan's terms."""
        if self.lane == "local":
            return "any server, other devices, and the public"
        if self.lane == "central":
            return "other devices and the public, who see models, and not the server"
        return "" if masking is None else masking.adversaries

    def cost(self, participations: int) -> Cost:
        """The cost of so many participations."""
        return self._participation(self.noise_multiplier).times(participations)

    @property
    def _participation(self) -> Callable[[float], Cost]:
        return participation(self.lane, self.correlation, self.noise)

    def spent(self, participations: int) -> float:
        """Epsilon, at `delta`, after so many participations."""
        return self.cost(participations).epsilon(self.delta)

    @model_validator(mode="after")
    def _can_be_correlated(self) -> PrivacyTerms:
        if self.lane != "central" and self.correlation is not None:
            raise ValueError(
                f"a correlation in the {self.lane} lane: noise is correlated over rounds only "
                "where the server adds it; set lane to central, or leave correlation out"
            )
        return self

    @model_validator(mode="after")
    def _has_noise(self) -> PrivacyTerms:
        if self.lane != "distributed" and self.noise != "skellam":
            raise ValueError(
                f"{self.noise} noise in the {self.lane} lane, where noise is Gaussian; leave noise "
                "out, or leave lane out and use the masked lane"
            )
        return self

    @model_validator(mode="after")
    def _can_adapt(self) -> PrivacyTerms:
        if self.adaptive is None:
            return self
        if self.lane != "central":
            raise ValueError(
                f"an adaptive clip in the {self.lane} lane: the count of devices within the clip "
                "gets its noise from the server; set lane to central, or leave adaptive out"
            )
        if self.correlation is not None:
            raise ValueError(
                "an adaptive clip under noise that is correlated over rounds: a round takes noise "
                "of earlier rounds away, which was drawn for other clips, so that it would neither "
                "cancel nor cover the claim; leave correlation out, or adaptive"
            )
        noise, least = self.adaptive.count_noise, self.noise_multiplier / 2
        if not noise:
            raise ValueError(
                "the adaptive clip's count of devices within the clip has no noise, and each "
                "round's clip would tell of single devices; set adaptive.count_noise to a "
                f"twentieth of cohort.size, and to more than {least:g}"
            )
        if not noise > least * (1 + 1e-6):
            raise ValueError(
                f"a count_noise of {noise:g} spends more than all of what a noise_multiplier of "
                f"{self.noise_multiplier:g} allows in a round; set adaptive.count_noise to more "
                f"than {least:g}, such as {2.5 * self.noise_multiplier:g}, which leaves the noise "
                "of updates 2 % larger, or raise epsilon"
            )
        return self

    @model_validator(mode="after")
    def _can_clip_tensors(self) -> PrivacyTerms:
        if not self.per_tensor:
            return self
        if self.lane != "central":
            raise ValueError(
                f"per_tensor clips in the {self.lane} lane, where a device clips and rounds all "
                "that it sends as one vector; set lane to central, or leave per_tensor out"
            )
        if self.adaptive is not None:
            raise ValueError(
                "per_tensor clips with an adaptive clip: a device's one bit tells whether the "
                "whole update was within the clip, and says nothing of single tensors; leave "
                "per_tensor out, or adaptive"
            )
        return self

    @model_validator(mode="after")
    def _keeps_claim(self) -> PrivacyTerms:
        spent = self.spent(self.participations)
        if spent <= self.epsilon:
            return self
        try:
            enough = accounting.noise_multiplier_for(
                self.epsilon,
                self.delta,
                self.participations,
                self._participation,
            )
            advice = f"raise noise_multiplier to {enough:g}, lower participations, or"
        except FedpressError:
            advice = "lower participations, or"
        raise ValueError(
            f"a noise_multiplier of {self.noise_multiplier:g} spends epsilon {spent:.4g} at delta "
            f"{self.delta:g} in {self.participations} participations, more than epsilon "
            f"{self.epsilon:g}; {advice} raise epsilon"
        )


LEAST_MASKED = 3
"""Minimum number of clients in a masked sum: of two, each learns the other's update."""
LEAST_CENTRAL = 2
"""Minimum number of clients in a sum that the server adds noise to."""
LEAST_HONEST = 2
"""Minimum number of honest devices that share the noise of a private sum."""


TWO_PHASES = (
    "powersgd in two trips needs two exchanges in every round, which servers run no more; begin a "
    "new task with powersgd in one trip, or with lowrank"
)
"""The reason for which a task with such a profile is refused, and an open one is cancelled."""


class RoundPlan(Term):
    """One attempt at one round: its model, profiles, terms, rules and bounds."""

    wire_version: int = WIRE_VERSION
    task: Name
    round: Annotated[int, Field(ge=1)]
    attempt: Annotated[int, Field(ge=1)]
    model: Digest
    spec: Digest
    lane: Literal["clear", "masked"] = "clear"
    masking: MaskingTerms | None = None
    """Set in the masked lane only."""
    privacy: PrivacyTerms | None = None
    """Left out where updates are sent without noise; older releases do not know it."""
    profiles: Annotated[tuple[Profile, ...], FailFast(), Field(min_length=1, max_length=256)]
    training: TrainingTerms = TrainingTerms()
    client_terms: ClientTerms = ClientTerms()
    report: Annotated[tuple[Name, ...], FailFast(), Field(max_length=MAX_REPORTS)] = ()
    """Names of the numbers that an upload reports, in order; see `upload.REPORT_BOUNDS`."""
    cohort: CohortRules
    fixed_cohort: bool = False
    """Whether the task lists its members."""
    deadline: float
    fixed_point: FixedPointTerms
    public_seed: Digest
    previous_model: Digest | None = None
    """The model before `model`; `model` itself in the first round. Set if a profile needs it."""
    first_model: Digest | None = None
    """The task's first model. Set if a profile needs it."""
    activity: Digest | None = None
    """Digest of the map of recent activity by coordinate. Set from the second round on, if a
    profile needs it."""
    warming: bool = False
    """Whether the round is part of a warm-up, after which a strategy freezes some of its state."""
    sketch: SketchCells = 0
    """Cells of the sketch that an upload has of the update before it was compressed, which a probe
    asks for; 0, and left out, for none."""

    @model_validator(mode="after")
    def _parts_fit(self) -> RoundPlan:
        names = [profile.name for profile in self.profiles]
        if len(set(names)) != len(names):
            raise ValueError(f"profile names must be unique, not {', '.join(names)}")
        if len(set(self.report)) != len(self.report):
            raise ValueError(f"report must not repeat a name: {', '.join(self.report)}")
        if self.client_terms.normalise and "steps" not in self.report:
            raise ValueError("normalised updates need the number of steps; add steps to report")
        try:
            self.sum_bounds()
            self._fits_lane()
            self._can_be_private()
            self._can_be_sketched()
            self._can_restrict()
            self._has_models()
            self._has_one_basis()
            self._has_one_mean()
            self._has_one_memory()
            self._can_correct()
        except FedpressError as exc:
            raise ValueError(str(exc)) from exc
        return self

    @model_serializer(mode="wrap")
    def _without_the_unused(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialize(self)
        if fields.get("privacy", ...) is None:
            del fields["privacy"]
        if not fields.get("sketch", True):
            del fields["sketch"]
        return fields

    @classmethod
    def from_json(cls, text: str | bytes) -> RoundPlan:
        """Parse a plan; raises IncompatiblePlan with all errors."""
        return parsed(cls, text)

    def to_json(self) -> str:
        return self.model_dump_json()

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of everything the cohort of an attempt has in common: all but the deadline,
        which is extended while too few clients have answered."""
        return hashlib.sha256(self.model_dump_json(exclude={"deadline"}).encode()).hexdigest()

    def sum_bounds(self) -> FixedPoint:
        """The fixed point in which `cohort.size` uploads are summed without overflow."""
        terms = self.fixed_point
        return FixedPoint(terms.scale_bits, terms.max_abs, terms.max_examples * self.cohort.size)

    def _fits_lane(self) -> None:
        if self.lane == "clear":
            if self.masking is not None:
                raise IncompatiblePlan("masking terms are set, but the lane is clear")
            return
        if self.masking is None:
            raise IncompatiblePlan("the masked lane needs masking terms; {} means the defaults")
        if len(self.profiles) > 1:
            raise IncompatiblePlan(
                f"{len(self.profiles)} profiles in the masked lane, whose cohort adds up one kind "
                "of numbers; give the plan one, and slow clients the clear lane of another task"
            )
        if self.cohort.minimum < LEAST_MASKED:
            raise IncompatiblePlan(
                f"a masked sum of {self.cohort.minimum} would be unmasked, which reveals too "
                f"much of each client; raise cohort.minimum to {LEAST_MASKED} or, better, more"
            )
        if self.cohort.size > MAX_CLIENTS:
            raise IncompatiblePlan(
                f"a cohort of {self.cohort.size} in the masked lane, which has at most "
                f"{MAX_CLIENTS}; lower cohort.size"
            )
        as_linear(self.profiles[0].compressor)
        terms = self.masking
        for n in {self.cohort.minimum, self.cohort.size}:
            parameters(n, corrupt=terms.corrupt, dropout=terms.dropout, adversary=terms.adversary)

    def _can_be_private(self) -> None:
        if self.privacy is None:
            if WITHIN_CLIP in self.report:
                raise IncompatiblePlan(
                    f"{WITHIN_CLIP} in report is of privacy terms with an adaptive clip, and the "
                    "plan has none; leave it out"
                )
            return
        if self.privacy.needs_masks:
            self._can_distribute_noise()
        else:
            self._can_be_private_in_clear(self.privacy)
        if self.privacy.adaptive is not None and WITHIN_CLIP not in self.report:
            raise IncompatiblePlan(
                f"an adaptive clip without {WITHIN_CLIP} in report, by which the devices within it "
                "are counted; add it, or leave privacy.adaptive out"
            )
        if self.trainer_report or (self.report and self.privacy.adaptive is None):
            raise IncompatiblePlan(
                f"reported numbers ({', '.join(self.report)}) are sent without noise, which the "
                "privacy terms do not allow; choose a strategy that needs no reports"
            )
        if self.client_terms.control is not None:
            raise IncompatiblePlan(
                "control variates follow updates without noise, and the noisy mean drifts away "
                "from them; choose a strategy without them, such as fedavg"
            )

    def _can_be_sketched(self) -> None:
        if self.sketch and (self.lane == "masked" or self.privacy is not None):
            raise IncompatiblePlan(
                "a sketch of each update, which would tell of one by itself, in the masked lane or "
                "under privacy terms; set sketch to 0"
            )

    def _can_distribute_noise(self) -> None:
        if self.masking is None:
            raise IncompatiblePlan(
                "privacy terms in the clear lane, where the noise of one device alone would be all "
                "that hides its update; use the masked lane, where the noise of a cohort adds up, "
                "or set privacy.lane to central, where the server is trusted, or to local"
            )
        if self.masking.max_weight is not None:
            raise IncompatiblePlan(
                "privacy terms bound what one device contributes, and max_weight counts devices by "
                "their examples, which are private too; leave max_weight out"
            )
        if self.noise_shares < LEAST_HONEST:
            raise IncompatiblePlan(
                f"of {self.cohort.minimum} survivors in a cohort of {self.cohort.size} only "
                f"{self.noise_shares} are sure to be honest, fewer than {LEAST_HONEST}; raise "
                "cohort.minimum, or lower masking.corrupt"
            )

    def _can_be_private_in_clear(self, terms: PrivacyTerms) -> None:
        if self.lane != "clear":
            raise IncompatiblePlan(
                f"privacy.lane is {terms.lane} in the masked lane, where devices share the noise; "
                "leave privacy.lane out, or set lane to clear"
            )
        if self.fixed_point.max_examples != 1:
            raise IncompatiblePlan(
                "privacy terms bound what one device contributes, so all devices count the same; "
                f"fixed_point.max_examples must be 1, not {self.fixed_point.max_examples}"
            )
        for profile in self.profiles:
            if not has_public_support(profile.compressor):
                raise IncompatiblePlan(
                    f"the profile {profile.name!r} chooses the coordinates that it sends by the "
                    "device's data, and noise hides values at coordinates that all devices have "
                    "in common; use shared_support, quantize or none"
                )
            needs_plain = getattr(profile.compressor, "needs_plain_mean", False)
            if needs_plain or "own" in profile.compressor.needs:
                raise IncompatiblePlan(
                    f"the profile {profile.name!r} counts on sums without noise; use "
                    "error_feedback around shared_support, quantize or none"
                )
            if terms.correlation is not None and restricts(profile.compressor):
                raise IncompatiblePlan(
                    f"the profile {profile.name!r} sends some coordinates only, others in each "
                    "round, and noise that is correlated over rounds takes itself away only where "
                    "all are sent; use quantize or none, or leave privacy.correlation out"
                )
        if terms.lane == "local":
            return
        if self.cohort.minimum < LEAST_CENTRAL:
            raise IncompatiblePlan(
                f"the noise of a round is for a cohort, and cohort.minimum is "
                f"{self.cohort.minimum}; raise it to {LEAST_CENTRAL} or, better, more"
            )
        bounds, steps = self.sum_bounds(), 2.0**self.fixed_point.scale_bits
        deviation = terms.update_multiplier * terms.clip * steps
        if terms.clip < bounds.max_abs:
            raise IncompatiblePlan(
                f"values up to {bounds.max_abs:g} cannot be within a norm of {terms.clip:g}; set "
                "fixed_point.max_abs to privacy.clip or less"
            )
        gaussian.check_deviation(deviation)
        reach = gaussian.REACH * 2 * deviation + bounds.max_abs * steps * bounds.max_weight
        if not reach < 2.0**62:
            raise IncompatiblePlan(
                f"noise of deviation {deviation:g} steps can overflow a sum of 63 bits; lower "
                "fixed_point.scale_bits"
            )

    @property
    def trainer_report(self) -> tuple[str, ...]:
        """The names in `report` whose numbers trainers tell; the others follow from the update."""
        return tuple(name for name in self.report if name != WITHIN_CLIP)

    @property
    def private_against(self) -> str:
        """The adversaries that the privacy terms' epsilon covers, in words; empty without terms."""
        return "" if self.privacy is None else self.privacy.against(self.masking)

    @property
    def noise_shares(self) -> int:
        """The number of devices in any sum whose noise counts: survivors that are honest for
        certain, however many drop out. 0 outside of the masked lane."""
        terms = self.masking
        if terms is None:
            return 0
        return honest_survivors(
            self.cohort.minimum, self.cohort.size, corrupt=terms.corrupt, adversary=terms.adversary
        )

    def _can_restrict(self) -> None:
        if not self.training.restricted:
            return
        for profile in self.profiles:
            if not restricts(profile.compressor):
                raise IncompatiblePlan(
                    f"training is restricted, but the support of {profile.name!r} is not known "
                    "before training; use shared_support or randomk with a shared seed, or "
                    "train all"
                )

    def _has_models(self) -> None:
        if "own" in self.needs and not self.fixed_cohort:
            raise IncompatiblePlan(
                "a profile codes the difference to each client's own last upload, which the server "
                "keeps of every client; name the task's members, so that their number is bounded, "
                "or use ef21, for which the mean is enough"
            )
        for vector, digest in self.sources.items():
            if digest is None and (vector != "activity" or self.round > 1):
                raise IncompatiblePlan(
                    f"a profile reads {vector}, but the plan has no digest for it"
                )

    def _has_one_basis(self) -> None:
        if "basis" in self.needs and (len(self.profiles) > 1 or self.first_trip is None):
            raise IncompatiblePlan(
                "powersgd in two exchanges needs the whole upload of every client; give the "
                "plan this profile alone, within error_feedback or by itself, and put "
                "the other wrappers into `rest`"
            )

    @property
    def first_trip(self) -> PowerSGD | None:
        """The compressor of the first exchange, if clients send two bodies in a round."""
        compressor = self.profiles[0].compressor
        inner = compressor.lossy
        return inner if isinstance(inner, PowerSGD) and inner.trips == 2 else None

    def _has_one_mean(self) -> None:
        needs = [getattr(each.compressor, "needs_plain_mean", False) for each in self.profiles]
        if len(needs) > 1 and any(needs):
            raise IncompatiblePlan(
                f"the profile {self.profiles[needs.index(True)].name!r} follows the mean of all "
                "clients' estimates by the model's last step, which the uploads of other profiles "
                "move too; give the plan this profile alone and change its rate from round to "
                "round, or use error_feedback, whose residual serves every profile"
            )

    def _has_one_memory(self) -> None:
        if self.client_terms.control is None:
            return
        for profile in self.profiles:
            if profile.compressor.keeps_residual:
                raise IncompatiblePlan(
                    f"the profile {profile.name!r} adds what was not sent to the next update, and "
                    "the strategy's control variate knows of it already: counted twice it "
                    f"diverges; use {to_config(profile.compressor.inner)['id']} without error "
                    "feedback"
                )

    def _can_correct(self) -> None:
        corrected = [each.name for each in self.profiles if each.learning_rate_factor != 1]
        if not corrected:
            return
        if self.training.learning_rate is None:
            raise IncompatiblePlan(
                f"the profile {corrected[0]!r} corrects the learning rate, and the plan leaves "
                "that to the trainers; set training.learning_rate"
            )
        if self.client_terms.control is not None:
            raise IncompatiblePlan(
                f"the profile {corrected[0]!r} corrects the learning rate, and the strategy's "
                "control variates count on the plan's; leave learning_rate_factor out"
            )

    def training_of(self, name: str) -> TrainingTerms:
        """The training terms of a client with the profile `name`."""
        factor = self.profiles[self.profile_index(name)].learning_rate_factor
        if factor == 1 or self.training.learning_rate is None:
            return self.training
        corrected = {"learning_rate": factor * self.training.learning_rate}
        return self.training.model_copy(update=corrected)

    def profile_index(self, name: str) -> int:
        for index, profile in enumerate(self.profiles):
            if profile.name == name:
                return index
        raise IncompatiblePlan(f"the plan has no profile {name!r}")

    def compressor(self, name: str) -> Compressor[Any]:
        """The compressor of the profile `name`."""
        compressor: Compressor[Any] = self.profiles[self.profile_index(name)].compressor
        return compressor

    def shared(self, spec: ModelSpec) -> ModelSpec:
        """The spec that uploads cover: `spec`, or without its personal tensors and then without its
        buffers. Raises IncompatiblePlan for patterns that match no tensor or all of them."""
        patterns = self.client_terms.personal
        if not patterns:
            return spec
        names = [tensor.name for tensor in spec.trained]
        idle = [each for each in patterns if not any(fnmatchcase(name, each) for name in names)]
        if idle:
            raise IncompatiblePlan(f"personal patterns match no trained tensor: {', '.join(idle)}")
        shared_names = [
            name for name in names if not any(fnmatchcase(name, each) for each in patterns)
        ]
        if not shared_names:
            raise IncompatiblePlan(f"every tensor is personal under {', '.join(patterns)}")
        return spec.select(shared_names)

    def layouts(self, spec: ModelSpec) -> tuple[Layout, ...]:
        shared = self.shared(spec)
        return tuple(profile.compressor.layout(shared) for profile in self.profiles)

    def max_body_bytes(self, spec: ModelSpec) -> int:
        """The largest body any profile admits."""
        layouts = self.layouts(spec)
        if self.first_trip is not None:
            layouts = (*layouts, self.first_trip.first_layout(self.shared(spec)))
        of_head = REPORT_BYTES * len(self.report)
        if self.sketch:
            of_head += num_bytes(self.sketch)
        return of_head + max(max_body_bytes(layout) for layout in layouts)

    @property
    def needs(self) -> frozenset[Knowledge]:
        """The vectors of `Public` that some profile reads, or the steps of the masked lane."""
        of_lane: frozenset[Knowledge] = frozenset({"previous"} if self.lane == "masked" else ())
        return of_lane.union(*(profile.compressor.needs for profile in self.profiles))

    @property
    def artefacts(self) -> frozenset[str]:
        """Digests of the artefacts that the plan names besides models."""
        control = self.client_terms.control
        digests = (self.activity, None if control is None else control.server)
        return frozenset(digest for digest in digests if digest is not None)

    @property
    def sources(self) -> dict[Known, str | None]:
        """By vector that profiles read: the digest of its source."""
        digests: dict[Known, str | None] = {
            "previous": self.previous_model,
            "drift": self.first_model,
            "activity": self.activity,
        }
        return {kind: digest for kind, digest in digests.items() if kind in self.needs}

    def support(self, profile: str, spec: ModelSpec, public: Public) -> Indices | None:
        """The coordinates of a model of `spec` that training may change, ascending: the support of
        the upload and the personal tensors. None: all."""
        support = support_of(self.compressor(profile), public)
        if not self.training.restricted or support is None:
            return None
        is_trained = np.zeros(public.spec.size, bool)
        is_trained[support] = True
        free = np.ones(spec.size, bool)
        for name, where in public.spec.slices.items():
            free[spec.slices[name]] = is_trained[where]
        return np.flatnonzero(free)

    def public(
        self,
        spec: ModelSpec,
        knowledge: Mapping[Knowledge, Vector] = MappingProxyType({}),
    ) -> Public:
        """The public knowledge of both ends before an upload; IncompatiblePlan for another model
        spec.

        Its spec is `shared`. The caller, who has the plan's models, passes the side information
        [shared size] that the plan `needs`.
        """
        if spec.digest != self.spec:
            raise IncompatiblePlan(
                f"the plan is for a model spec {self.spec[:12]}, not {spec.digest[:12]}",
                hint="fetch the plan's model",
            )
        if self.first_trip is not None:
            raise IncompatiblePlan(TWO_PHASES)
        randomness = PublicRandomness(bytes.fromhex(self.public_seed))
        return Public(self.shared(spec), randomness, knowledge, self.round)


def parsed(cls: type[TermT], text: str | bytes) -> TermT:
    """Parse `cls` from JSON; raises IncompatiblePlan that names every invalid field."""
    try:
        return cls.model_validate_json(text)
    except ValidationError as exc:
        raise IncompatiblePlan(format_validation_errors(exc)) from exc


def agreed_version(offered: tuple[int, ...]) -> int:
    """The newest wire version in `offered` that this end supports; raises WireVersionMismatch."""
    common = [version for version in WIRE_VERSIONS if version in offered]
    if not common:
        raise WireVersionMismatch(
            f"one end supports wire versions {list(offered)}, the other {list(WIRE_VERSIONS)}"
        )
    return common[0]
