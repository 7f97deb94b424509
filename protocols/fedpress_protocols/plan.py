"""What the server asks of every client in a round, checked once, when it is made.

A plan travels as JSON. Both ends derive everything else from it and from the model's spec: layouts,
bounds, shared randomness. An unknown field is refused, since a client that does not know a term
cannot honour it.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    model_validator,
)

from fedpress_protocols.coding.fields import Layout
from fedpress_protocols.compression.compressor import (
    Compressor,
    Knowledge,
    Public,
    from_config,
    to_config,
)
from fedpress_protocols.errors import FedpressError, IncompatiblePlan, WireVersionMismatch
from fedpress_protocols.fixed_point import FixedPoint
from fedpress_protocols.model import ModelSpec, Vector
from fedpress_protocols.randomness import PublicRandomness
from fedpress_protocols.upload import WIRE_VERSION, WIRE_VERSIONS, max_body_bytes

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class Term(BaseModel):
    """A frozen piece of a plan or a message; unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


TermT = TypeVar("TermT", bound=Term)


def _compressor(value: Any) -> Any:
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


class TrainingTerms(Term):
    """What a client does between two models. Terms left out are the trainer's own choice."""

    local_epochs: Annotated[int, Field(ge=1)] | None = None
    local_steps: Annotated[int, Field(ge=1)] | None = None
    batch_size: Annotated[int, Field(ge=1)] | None = None
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    gradient_accumulation: Annotated[int, Field(ge=1)] = 1

    @model_validator(mode="after")
    def _one_length(self) -> TrainingTerms:
        if self.local_epochs is not None and self.local_steps is not None:
            raise ValueError("give local_epochs or local_steps, not both")
        return self


class CohortRules(Term):
    """How many clients a round wants (`size`), asks and needs at least.

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


class RoundPlan(Term):
    """One attempt at one round: its model, profiles, terms, rules and bounds."""

    wire_version: int = WIRE_VERSION
    task: Name
    round: Annotated[int, Field(ge=1)]
    attempt: Annotated[int, Field(ge=1)]
    model: Digest
    spec: Digest
    lane: Literal["clear"] = "clear"
    profiles: Annotated[tuple[Profile, ...], Field(min_length=1, max_length=256)]
    training: TrainingTerms = TrainingTerms()
    cohort: CohortRules
    deadline: float
    fixed_point: FixedPointTerms
    public_seed: Digest
    previous_model: Digest | None = None
    """The model before `model`; `model` itself in the first round. Set if a profile needs it."""
    first_model: Digest | None = None
    """The task's first model. Set if a profile needs it."""

    @model_validator(mode="after")
    def _parts_fit(self) -> RoundPlan:
        names = [profile.name for profile in self.profiles]
        if len(set(names)) != len(names):
            raise ValueError(f"two profiles have one name: {', '.join(names)}")
        try:
            self.sum_bounds()
            self._has_models()
            self._has_one_mean()
        except FedpressError as exc:
            raise ValueError(str(exc)) from exc
        return self

    @classmethod
    def from_json(cls, text: str | bytes) -> RoundPlan:
        """Parse; raises IncompatiblePlan with every fault found."""
        return parsed(cls, text)

    def to_json(self) -> str:
        return self.model_dump_json()

    def sum_bounds(self) -> FixedPoint:
        """The fixed point in which `cohort.size` uploads are summed without overflow."""
        terms = self.fixed_point
        return FixedPoint(terms.scale_bits, terms.max_abs, terms.max_examples * self.cohort.size)

    def _has_models(self) -> None:
        if "own" in self.needs:
            raise IncompatiblePlan(
                "a profile codes the difference to each client's own last upload; the server keeps "
                "no client's upload, so that its memory does not grow with their number; use ef21, "
                "for which the mean is enough"
            )
        named = {"previous": self.previous_model, "drift": self.first_model}
        for what in sorted(self.needs):
            if named[what] is None:
                raise IncompatiblePlan(
                    f"a profile reads {what}, and the plan names no model for it"
                )

    def _has_one_mean(self) -> None:
        needs = [getattr(each.compressor, "needs_plain_mean", False) for each in self.profiles]
        if len(needs) > 1 and any(needs):
            raise IncompatiblePlan(
                f"the profile {self.profiles[needs.index(True)].name!r} follows the mean of all "
                "clients' estimates by the model's last step, which the uploads of other profiles "
                "move too; give the plan this profile alone and change its rate from round to "
                "round, or use error_feedback, whose residual serves every profile"
            )

    def profile_index(self, name: str) -> int:
        for index, profile in enumerate(self.profiles):
            if profile.name == name:
                return index
        raise IncompatiblePlan(f"the plan has no profile {name!r}")

    def compressor(self, name: str) -> Compressor[Any]:
        """The compressor of the profile `name`."""
        made: Compressor[Any] = self.profiles[self.profile_index(name)].compressor
        return made

    def layouts(self, spec: ModelSpec) -> tuple[Layout, ...]:
        return tuple(profile.compressor.layout(spec) for profile in self.profiles)

    def max_body_bytes(self, spec: ModelSpec) -> int:
        """The largest body any profile admits."""
        return max(max_body_bytes(layout) for layout in self.layouts(spec))

    @property
    def needs(self) -> frozenset[Knowledge]:
        """Which of `Public`'s vectors some profile reads."""
        return frozenset().union(*(profile.compressor.needs for profile in self.profiles))

    def public(
        self, spec: ModelSpec, *, previous: Vector | None = None, drift: Vector | None = None
    ) -> Public:
        """What both ends know before an upload; IncompatiblePlan for another model's spec.

        Whoever has the plan's models gives the vectors that the plan `needs`.
        """
        if spec.digest != self.spec:
            raise IncompatiblePlan(
                f"the plan is for a model spec {self.spec[:12]}, not {spec.digest[:12]}",
                hint="fetch the plan's model",
            )
        randomness = PublicRandomness(bytes.fromhex(self.public_seed))
        return Public(spec, randomness, previous, drift, self.round)


def parsed(cls: type[TermT], text: str | bytes) -> TermT:
    """`cls` from JSON; raises IncompatiblePlan that names every field that is off."""
    try:
        return cls.model_validate_json(text)
    except ValidationError as exc:
        raise IncompatiblePlan(explained(exc)) from exc


def explained(exc: ValidationError) -> str:
    """What pydantic found, one clause a field: where, what is wrong."""
    clauses = []
    for fault in exc.errors(include_url=False, include_input=False):
        where = ".".join(str(part) for part in fault["loc"]) or "the whole"
        clauses.append(f"{where}: {fault['msg']}")
    return "; ".join(clauses)


def agreed_version(offered: tuple[int, ...]) -> int:
    """The newest wire version in `offered` that this end speaks; raises WireVersionMismatch."""
    common = [version for version in WIRE_VERSIONS if version in offered]
    if not common:
        raise WireVersionMismatch(
            f"one end speaks wire versions {list(offered)}, the other {list(WIRE_VERSIONS)}"
        )
    return common[0]
