"""The opening of an attempt: the carry-over of the round before, and the profiles chosen for it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pydantic import ValidationError
from sqlalchemy.engine import Connection

from fedpress_compression.running_statistics import has_statistics
from fedpress_compression.tensors import ModelSpec
from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan
from fedpress_protocols.messages import TaskConfig
from fedpress_protocols.plan import (
    FixedPointTerms,
    MaskingTerms,
    PrivacyTerms,
    Profile,
    RoundPlan,
    clip_range,
)
from fedpress_protocols.policies import Comparison, Course
from fedpress_protocols.schedule import Period, period_at
from fedpress_protocols.upload import WITHIN_CLIP
from fedpress_protocols.validation import format_validation_errors
from fedpress_server.aggregation.aggregate import AggregationResult
from fedpress_server.aggregation.masked import Host, SessionOpening
from fedpress_server.aggregation.terms import RoundTerms
from fedpress_server.coordination.adaptive import course_of
from fedpress_server.coordination.attempts import Attempt
from fedpress_server.rounds import (
    Aggregated,
    BufferedRound,
    Event,
    MaskedRound,
    OpenRound,
    Round,
    Rules,
    SynchronousRound,
)
from fedpress_server.storage import records
from fedpress_server.storage.payloads import Payloads
from fedpress_server.storage.scoreboard import Scoreboard
from fedpress_strategies import Strategy, private
from fedpress_strategies.policies.decisions import (
    every_choice,
    next_course,
    profiles_of,
    sketch_of,
)
from fedpress_strategies.policies.facts import Facts


class History(NamedTuple):
    """The records of the rounds before: the fields of RoundCarryover of these names."""

    uploaded: tuple[int, ...] = ()
    course: Course | None = None


@dataclass(frozen=True)
class RoundCarryover:
    """The values that a round passes to the next one, and the first round has from the task.

    A new one is one field more, with its value at the beginning and the one `after` a round; the
    plan or the task's row keeps it over a restart.
    """

    model: str
    """The digest of the model to begin with."""
    spec: ModelSpec
    previous: str
    """The digest of the model before `model`; the same where a task starts."""
    activity: str | None = None
    """The digest of the map of how the coordinates moved; None before the first aggregation."""
    control: str | None = None
    """The digest of the strategy's vector for the clients' control terms; None as above."""
    bases: Mapping[str, str] = field(default_factory=dict)
    """Those of RoundTerms."""
    uploaded: tuple[int, ...] = ()
    """The bytes of each round since the schedule began, zeros where the schedule does not hang on
    them; empty without a schedule."""
    course: Course | None = None
    """The policies' decisions for the round to open; None if they start with it."""
    clip: float | None = None
    """Of adaptive privacy terms; None: the task's."""

    @classmethod
    def beginning(
        cls,
        model: str,
        spec: ModelSpec,
        *,
        previous: str | None = None,
        clip: float | None = None,
    ) -> RoundCarryover:
        """Return the carry-over of a task that starts, or continues, with this model and, if it is
        adaptive, with this clip. `previous`: the model before, where compressors continue from the
        last step."""
        return cls(model, spec, previous or model, clip=clip)

    @classmethod
    def after(
        cls, terms: RoundTerms, result: AggregationResult | None, history: History
    ) -> RoundCarryover:
        """Of an attempt under these terms that made `result`, None if it was given up."""
        plan = terms.plan
        if result is not None:
            return cls(
                model=result.model,
                spec=terms.spec,
                previous=plan.model,
                activity=result.activity,
                control=result.control,
                bases={**terms.bases, **result.bases},
                uploaded=history.uploaded,
                course=history.course,
                clip=result.clip,
            )
        control = plan.client_terms.control
        return cls(
            model=plan.model,
            spec=terms.spec,
            previous=plan.previous_model or plan.model,
            activity=plan.activity,
            control=control.server if control is not None else None,
            bases=terms.bases,
            uploaded=history.uploaded,
            course=history.course,
            clip=None if plan.privacy is None else plan.privacy.clip,
        )


class Chosen(NamedTuple):
    """The profiles of a round, whether it is of a warm-up, and what policies made of it."""

    profiles: tuple[Profile, ...]
    warms_up: bool = False
    course: Course | None = None


def chosen_profiles(config: TaskConfig, carryover: RoundCarryover, number: int) -> Chosen:
    """Choose the profiles of round `number`: the schedule's, and after it those of the policies.

    It is decided once, when the round is opened; the plan keeps the answer, and no replay asks.
    """
    period = _period(config, carryover.spec, carryover.uploaded)
    if period is not None:
        return Chosen(period.profiles, period.warms_up)
    if not config.policies:
        return Chosen(config.profiles)
    course = carryover.course
    if course is None:
        has = has_statistics(carryover.spec)
        facts = Facts(number, config.rounds, size=config.cohort.size, has_statistics=has)
        course = next_course(config.policies, len(config.profiles), None, facts)
    return Chosen(profiles_of(config.profiles, course), course=course)


def _period(config: TaskConfig, spec: ModelSpec, uploaded: tuple[int, ...]) -> Period | None:
    rounds = config.rounds - config.schedule_after
    return period_at(config.schedule, uploaded, 4 * spec.size * config.cohort.size * rounds)


def history_before(
    connection: Connection,
    config: TaskConfig,
    spec: ModelSpec,
    board: Scoreboard,
    opens: OpenRound,
    event: Event,
) -> History:
    """Read the history that the profiles of the round opened by `opens` depend on.

    `event` ends the previous round; `board` is the task's scoreboard.
    """
    after = config.schedule_after
    uploaded: tuple[int, ...] = ()
    if config.schedule:
        uploaded = _uploaded(connection, config, opens.number - after - 1)
    if _period(config, spec, uploaded) is not None:
        return History(uploaded)
    comparison = event.comparison if isinstance(event, Aggregated) else None
    probed = None if comparison is None else Comparison.model_validate(dict(comparison))
    course = course_of(
        connection,
        config,
        board,
        opens.number,
        opens.attempt,
        probed,
        has_statistics=has_statistics(spec),
    )
    return History(uploaded, course)


def _uploaded(connection: Connection, config: TaskConfig, num: int) -> tuple[int, ...]:
    """The bytes of the schedule's `num` rounds so far. Where no period hangs on them, how many
    rounds there were is all that tells, and no upload is looked at."""
    if all(period.budget is None for period in config.schedule):
        return (0,) * num
    return tuple(records.uploaded(connection, config.task, config.schedule_after)[:num])


def opened(
    config: TaskConfig,
    strategy: Strategy,
    payloads: Payloads,
    host: Host,
    *,
    carryover: RoundCarryover,
    number: int,
    attempt: int,
    now: float,
) -> Attempt:
    """Attempt `attempt` at round `number`, from its carry-over; raises IncompatiblePlan."""
    profiles, warms_up, course = chosen_profiles(config, carryover, number)
    privacy, report = config.privacy, strategy.report
    if privacy is not None and privacy.adaptive is not None:
        privacy = privacy.with_clip(carryover.clip or privacy.clip)
        report = (*report, WITHIN_CLIP)
    fixed_point = fixed_point_of(config, privacy)
    needs = frozenset().union(*(profile.compressor.needs for profile in profiles))
    masking = config.masking
    if config.lane == "masked":
        masking, needs = masking or MaskingTerms(), needs | {"previous"}
    seed = f"fedpress public seed v1|{config.seed}|{config.task}|{number}|{attempt}"
    try:
        plan = RoundPlan(
            task=config.task,
            round=number,
            attempt=attempt,
            model=carryover.model,
            spec=carryover.spec.digest,
            lane=config.lane,
            masking=masking,
            privacy=privacy,
            profiles=profiles,
            training=config.training,
            client_terms=strategy.client_terms.with_control(carryover.control),
            report=report,
            cohort=config.cohort,
            fixed_cohort=bool(config.members),
            deadline=now + config.round_seconds,
            fixed_point=fixed_point,
            previous_model=carryover.previous if "previous" in needs else None,
            first_model=config.model if "drift" in needs else None,
            activity=carryover.activity if "activity" in needs else None,
            warming=warms_up,
            sketch=sketch_of(config.policies, course, carryover.spec.size),
            public_seed=hashlib.sha256(seed.encode()).hexdigest(),
        )
    except ValidationError as exc:
        raise IncompatiblePlan(format_validation_errors(exc)) from exc
    terms = RoundTerms(plan, carryover.spec, payloads, carryover.bases)
    return Attempt(masked_by(round_of(config, plan, now), host, terms, now), terms, course=course)


def fixed_point_of(config: TaskConfig, terms: PrivacyTerms | None) -> FixedPointTerms:
    """The scale of the sums of a round under privacy `terms`."""
    of_clear = terms if config.lane == "clear" else None
    return private.fixed_point_of(of_clear, config.max_abs, config.max_examples, config.cohort.size)


def later_periods(config: TaskConfig) -> Iterator[TaskConfig]:
    """Tasks that begin where a later period of `config` does, or with what its policies or an
    adaptive clip may choose, by which it can be checked."""
    for index in range(len(config.schedule)):
        yield config.model_copy(update={"schedule": config.schedule[index + 1 :]})
    if config.policies:
        for profiles in every_choice(config.policies, config.profiles):
            changes = {"schedule": (), "policies": (), "profiles": profiles}
            yield config.model_copy(update=changes)
    terms = config.privacy
    if terms is not None and terms.adaptive is not None:
        for clip in clip_range(terms.clip):
            yield config.model_copy(update={"privacy": terms.with_clip(clip)})


def check_warm_up(terms: RoundTerms, strategy: Strategy) -> None:
    """Raise IncompatiblePlan if the first round, of these `terms`, is to be of a warm-up."""
    if strategy.needs_warm_up and not terms.plan.warming:
        raise IncompatiblePlan(
            "the strategy freezes what a warm-up settles, and the first round is of none",
            hint="begin the task's schedule with a period that warms_up",
        )


def round_of(config: TaskConfig, plan: RoundPlan, opened_at: float) -> Round:
    """The state in which an attempt of the task's round protocol begins."""
    asynchronous = config.asynchronous
    rules = Rules(
        number=plan.round,
        attempt=plan.attempt,
        last_round=config.rounds,
        max_attempts=config.max_attempts,
        size=config.cohort.size,
        minimum=config.cohort.minimum,
        places=asynchronous.concurrency if asynchronous else config.cohort.assigned,
        seconds=config.round_seconds,
        members=frozenset(config.members) or None,
        chooses=config.selection.policy != "first",
        at_end=config.at_end,
    )
    if asynchronous is not None:
        return BufferedRound(rules, math.inf, max_staleness=asynchronous.max_staleness)
    kind = MaskedRound if config.lane == "masked" else SynchronousRound
    return kind(rules, opened_at + config.round_seconds)


def masked_by(round_: Round, host: Host, terms: RoundTerms, opened_at: float) -> Round:
    """With all that its session begins with, if it has one."""
    if not isinstance(round_, MaskedRound):
        return round_
    return replace(round_, opens=SessionOpening(host, terms, opened_at))


def checked_bound(terms: RoundTerms, most: int) -> int:
    """The plan's largest body; raises IncompatiblePlan for a profile the model does not fit."""
    try:
        if terms.plan.lane == "masked":
            bound = terms.payload.packing.num_bytes
        else:
            bound = terms.plan.max_body_bytes(terms.spec)
    except ValueError as exc:
        raise IncompatiblePlan(f"a profile does not fit the model: {exc}") from exc
    if bound > most:
        raise ConfigurationError(
            f"an upload may need {bound} bytes where the server takes {most}",
            hint="raise max_body_bytes, or choose a profile that compresses more",
        )
    return bound
