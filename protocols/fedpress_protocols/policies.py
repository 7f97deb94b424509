"""The words of policies over rounds: how a task asks for them, and what a round's record says that
they decided. A server decides; a device reads no more than the name of its uplink.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.plan import Profile, SketchCells, Term

TELLING = 16 * 1024
"""Bytes of a body that takes long enough to tell of a link: the first 14 kB or so of any travel at
once, whatever the link."""
UPLINK = "uplink_mbps"
"""The attribute under which a device says what its uplink is, in Mbit/s; see `CheckInRequest`."""
LEAST_COMPARED = 4
"""The fewest clients whose updates a probe compares."""
Rung = Annotated[int, Field(ge=0, lt=256)]
"""The index of a profile in the ladder."""
Momentum = Annotated[float, Field(ge=0, lt=1)]


class Comparison(Term):
    """The result of a probe: the mean of the compressed updates compared with that of the updates
    before compression, by the sketches that clients send of these.

    `progress` is the length of the compressed mean along the direction of the other, over the
    other's own: 1 where nothing is lost. `cosine` is that of the two directions. `nmse` is the
    squared distance of the two means over the squared norm of the other. All three are of the means
    that infinitely many clients would have, as well as these few tell, and None where they drown
    in the differences between clients. `error` is the standard error of `progress`, None where that
    is nothing. `energy` is the mean squared norm of a compressed update over that of an update.
    `inner` and `norm` are the numerator and the denominator of `progress`, by which several probes
    are pooled, relative to the mean squared norm of an update.
    """

    progress: float | None
    error: float | None
    cosine: float | None
    nmse: float | None
    energy: float
    inner: float
    norm: float
    clients: int


class Trend(Term):
    """State of `AccuracyDriven`.

    `since`: the model after which the rung is in use. From model `at`, `level` its log loss, the
    track falls by `pace` for each factor e of rounds. By rung: how often it was given up
    (`strikes`), and the round before which it is not tried again (`barred`).
    """

    rung: Rung = 0
    since: int = 0
    at: float = 1.0
    level: float | None = None
    pace: float = 0.0
    strikes: tuple[int, ...] = ()
    barred: tuple[int, ...] = ()


class Watch(Term):
    """State of `DivergenceGuard`.

    No rung beyond `ceiling` is used. `strikes` findings came in a row; the next probe is in round
    `probe_at`; findings of losses and classes count for models after `since`.
    """

    ceiling: Rung
    strikes: int = 0
    probe_at: int = 1
    since: int = 0
    inner: float = 0.0
    norm: float = 0.0


class Pace(Term):
    """State of `Auto`.

    `rung` is in use since the round `since`; no harder one is tried before round `barred`. `inner`
    and `norm` are the pooled numerator and denominator of the probes' `progress`, `probes` how
    many were pooled since the last change; the next probe is in round `probe_at`. `far_short` once
    the progress was so far below the floor that more than the floor is asked for from then on.
    """

    rung: Rung
    since: int = 1
    barred: int = 1
    far_short: bool = False
    probe_at: int = 1
    probes: int = 0
    inner: float = 0.0
    norm: float = 0.0

    @model_serializer(mode="wrap")
    def _without_far_short(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialize(self)
        if not fields.get("far_short", True):  # so that who knows of none can read it
            del fields["far_short"]
        return fields


class Course(Term):
    """The policies' decision for a round. Plans have the profiles from `gentlest` to `hardest`, and
    in a `probe` ask for sketches. The server's step has `momentum` at most, where it is given."""

    round: Annotated[int, Field(ge=1)]
    gentlest: Rung
    hardest: Rung
    probe: bool = False
    momentum: Momentum | None = None
    warnings: tuple[str, ...] = ()
    why: str = ""
    trend: Trend | None = None
    watch: Watch | None = None
    pace: Pace | None = None
    """Of `Auto`; there only with it."""
    comparison: Comparison | None = None
    """Once the round is over, if it was a probe and enough uploads came."""

    @model_serializer(mode="wrap")
    def _without_absent(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialize(self)
        for name in ("pace", "momentum"):
            if fields.get(name, ...) is None:  # so that who knows of none can read it
                del fields[name]
        return fields


class AccuracyDriven(Term):
    """Choose a round's profile from the ladder by the loss of the models so far.

    Losses fall by something like a power of the rounds, so the track is a line of the log loss
    over the log round: drawn from the last models of the gentlest profile, with `keep` of the
    slope that they had. While the mean of `window` models, or of a tenth of the rounds if these are
    more, is on the track, the next window has the next harder profile; if it lies above by more
    than `slack`, or by two standard errors where these are more, a gentler one. What was given up
    is not tried again for two windows, then for four, eight and so on. Each harder profile has the
    track again from where it begins, with the steepest slope so far; back at the gentlest it is
    drawn with the slope of the day. The first half of `settle` of the rounds has the gentlest, and
    over the last `settle` of them the rate is not raised any more.

    Models whose loss nobody has measured yet are passed over; where none of `window` new ones was
    measured, the rate stays as it is, and the round says so.
    """

    id: Literal["accuracy_driven"] = "accuracy_driven"
    window: Annotated[int, Field(ge=3, le=1000)] = 5
    keep: Annotated[float, Field(gt=0, le=1)] = 0.6
    slack: Annotated[float, Field(gt=0, lt=1)] = 0.05
    settle: Annotated[float, Field(ge=0, lt=1)] = 0.2


class BandwidthAware(Term):
    """Each client uses the gentlest of the task's profiles with which it is expected in before the
    deadline, by its own uplink and by the time that its training takes.

    The estimate may take `margin` of the time that is left. It is the median of the client's last
    `window` uploads, as the server saw them come: bodies of 16 kB and more for the uplink, or else
    what the device says of it, or else what small bodies prove at least. A client of which nothing
    is known has the middle profile. Each assignment that it missed since its last upload doubles
    the time that it is expected to take.
    """

    id: Literal["bandwidth_aware"] = "bandwidth_aware"
    margin: Annotated[float, Field(gt=0, le=1)] = 0.75
    window: Annotated[int, Field(ge=1, le=64)] = 5


class DivergenceGuard(Term):
    """No harder profile than the task bears.

    In the first `first` rounds and in every `every`-th after, clients send besides a `sketch` of so
    many cells of their update before it is compressed. A finding is a `progress` below `floor`, an
    `energy` above `most_energy` (see `Comparison`), a loss that is above the best so far by more
    than `rise` of it, or a class whose accuracy has fallen by more than `blind_spot`, each of the
    last five models that were measured. A finding warns, and the next round probes again; the
    `patience`-th in a row lowers the rate by one profile, for good. Until `settle` rounds after
    that, losses and classes find nothing.
    """

    id: Literal["divergence_guard"] = "divergence_guard"
    sketch: SketchCells = 2048
    """0: no probes; losses and classes alone."""
    first: Annotated[int, Field(ge=0)] = 3
    every: Annotated[int, Field(ge=1)] = 25
    floor: Annotated[float, Field(ge=0, lt=1)] = 0.2
    most_energy: Annotated[float, Field(gt=1)] = 16.0
    rise: Annotated[float, Field(gt=0)] = 0.5
    blind_spot: Annotated[float, Field(gt=0, le=1)] = 0.2
    patience: Annotated[int, Field(ge=1)] = 2
    settle: Annotated[int, Field(ge=1)] = 10


class Auto(Term):
    """The rate of each round by what the server observes; a task that names no profiles has it.

    It begins with the profile that `gap` asks for. It goes gentler where the mean of the compressed
    updates goes less than `floor` of the way of the updates before compression, or where the loss
    that devices measure rises by more than `rise` of it, and one harder again after a `window` of
    rounds where the mean goes well more. The way is measured at the end of a window until the rate
    has settled, then every `every` rounds: clients send besides a `sketch` of so many cells of
    their update: of at most a sixteenth of its values, of 64 at least. Where clients upload more
    than nine times in the task, `floor` is lower, and higher where they upload less often. What
    was given up is not tried again for four windows, nor before a probe speaks for it. A cohort
    too small for a probe begins three profiles gentler and goes harder in steps.

    With `careful_momentum` the server's step has so much momentum at most while the loss has not
    begun to fall, while it is above the least so far, and for ten models after it jumped where the
    same clients come in every round. In cohorts below ten that holds where the same clients come
    alone. While updates are flat, and of a model with running statistics, it has .5 at most.
    """

    id: Literal["auto"] = "auto"
    gap: Annotated[float, Field(gt=0, le=100)] = 0.5
    """Points of accuracy below an uncompressed task that are accepted."""
    upload_bytes: Annotated[int, Field(ge=1, lt=2**53)] | None = None
    """Budget for the bodies of all rounds together; the rate is raised to stay within it, as far as
    there are profiles for it."""
    window: Annotated[int, Field(ge=1, le=1000)] = 4
    every: Annotated[int, Field(ge=1)] = 30
    sketch: SketchCells = 2048
    """0: no probes; losses alone."""
    floor: Annotated[float, Field(ge=0, lt=1)] = 0.55
    rise: Annotated[float, Field(gt=0)] = 0.3
    reserve: Annotated[int, Field(ge=0, le=100)] = 0
    """Of the most compressed profiles, those that wait for clients that upload nine times in the
    task or more often, as the server estimates."""
    flat_reserve: Annotated[int, Field(ge=0, le=100)] = 0
    """Of the most compressed profiles, those that no round has while updates are flat; two more
    wait for clients that upload often."""
    statistics_reserve: Annotated[int, Field(ge=0, le=100)] = 0
    """Of the most compressed profiles, those that no round has of a model with running statistics,
    as of BatchNorm."""
    careful_momentum: Momentum | None = None
    """None: what the strategy is configured with, throughout."""


Policy = Annotated[
    BandwidthAware | AccuracyDriven | DivergenceGuard | Auto, Field(discriminator="id")
]
Policies = Annotated[tuple[Policy, ...], Field(max_length=3)]
PolicyT = TypeVar("PolicyT", AccuracyDriven, Auto, BandwidthAware, DivergenceGuard)


def bandwidth_aware(policies: Sequence[Policy]) -> BandwidthAware | None:
    return _one(policies, BandwidthAware)


def divergence_guard(policies: Sequence[Policy]) -> DivergenceGuard | None:
    return _one(policies, DivergenceGuard)


def automatic(policies: Sequence[Policy]) -> Auto | None:
    return _one(policies, Auto)


def prober(policies: Sequence[Policy]) -> DivergenceGuard | Auto | None:
    """The policy that probes, if one does."""
    chosen = divergence_guard(policies) or automatic(policies)
    return chosen if chosen is not None and chosen.sketch else None


def accuracy_driven(policies: Sequence[Policy]) -> AccuracyDriven | None:
    return _one(policies, AccuracyDriven)


def check_policies(
    policies: Sequence[Policy], ladder: Sequence[Profile], *, lane: str, size: int
) -> None:
    """Raise ConfigurationError where a task of this `lane` and cohort `size` cannot have them."""
    if not policies:
        return
    ids = [each.id for each in policies]
    if len(set(ids)) < len(ids):
        raise ConfigurationError(f"a policy twice: {', '.join(ids)}")
    masked = lane == "masked"
    if automatic(policies) is not None:
        _check_auto(ids, is_masked=masked)
    if len(ladder) < 2:
        raise ConfigurationError(
            f"{', '.join(ids)} over one profile, which leaves nothing to choose",
            hint="give the task's profiles in order, the gentlest first",
        )
    guard = divergence_guard(policies)
    if masked and bandwidth_aware(policies) is not None:
        raise ConfigurationError(
            "bandwidth_aware in the masked lane, whose cohort adds up one kind of numbers",
            hint="use the clear lane, or accuracy_driven, which gives all of a cohort one profile",
        )
    if guard is None or not guard.sketch:
        return
    if masked:
        raise ConfigurationError(
            "a divergence_guard that probes in the masked lane, where no update is seen by itself",
            hint="set its sketch to 0: losses and accuracies by class are watched still",
        )
    if size < LEAST_COMPARED:
        raise ConfigurationError(
            f"a divergence_guard that probes cohorts of {size}, where {LEAST_COMPARED} updates are "
            "the least that can be compared",
            hint=f"make cohort.size {LEAST_COMPARED} or more, or set sketch to 0",
        )


def _check_auto(ids: Sequence[str], *, is_masked: bool) -> None:
    """As `check_policies`, of the rules that are auto's own."""
    if is_masked:
        raise ConfigurationError(
            "auto in the masked lane, where no update is seen by itself",
            hint="leave policies and profiles out: a masked task then has a fixed profile",
        )
    others = [each for each in ids if each in ("accuracy_driven", "divergence_guard")]
    if others:
        raise ConfigurationError(
            f"auto beside {', '.join(others)}: auto decides on the rate of a round by itself",
            hint="remove one of them; auto goes with bandwidth_aware alone",
        )


def _one(policies: Sequence[Policy], kind: type[PolicyT]) -> PolicyT | None:
    return next((each for each in policies if isinstance(each, kind)), None)
