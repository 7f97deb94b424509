"""What policies know when a round opens, and what they made of it.

A task's profiles are then a ladder, the gentlest first. Each policy is a function of the course of
the round before and of these facts; the round's plan says the outcome and its record keeps the
course, so that nobody who reads them again has to ask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from fedpress_protocols.plan import Term

Rung = Annotated[int, Field(ge=0, lt=256)]
"""The index of a profile in the ladder."""


class Comparison(Term):
    """What a probe came to: the mean of the compressed updates beside that of the reference.

    `progress` is the length of the compressed mean along the direction of the reference's, over the
    reference's own: 1 where nothing is lost. `cosine` is that of the two directions. `nmse` is the
    squared distance of the two means over the squared norm of the reference's. All three are of
    the means that infinitely many clients would have, as well as these few tell, and None where
    they drown in the differences between clients. `energy` is the mean squared norm of a compressed
    update over that of an update of the reference. `inner` and `norm` are the numerator and the
    denominator of `progress`, by which several probes are pooled.
    """

    progress: float | None
    cosine: float | None
    nmse: float | None
    energy: float
    inner: float
    norm: float
    compressed: int
    reference: int
    extra_bytes: int = 0
    """What the bodies of the reference cost beyond as many compressed ones, at their mean size."""


class Trend(Term):
    """Where `AccuracyDriven` is.

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
    """Where `DivergenceGuard` is.

    No rung beyond `ceiling` is used. `strikes` findings came in a row; the next probe is in round
    `probe_at`; findings of losses and classes count for models after `since`.
    """

    ceiling: Rung
    strikes: int = 0
    probe_at: int = 1
    since: int = 0
    inner: float = 0.0
    norm: float = 0.0


class Course(Term):
    """What the policies made of a round. Plans have the profiles from `gentlest` to `hardest`, and
    in a `probe` the reference besides."""

    round: Annotated[int, Field(ge=1)]
    gentlest: Rung
    hardest: Rung
    probe: bool = False
    warnings: tuple[str, ...] = ()
    why: str = ""
    trend: Trend | None = None
    watch: Watch | None = None
    comparison: Comparison | None = None
    """Once the round is over, if it was a probe and enough of both kinds came."""


@dataclass(frozen=True, slots=True)
class Tally:
    """Of a class, as devices counted it: examples, and how many the model was right of."""

    num_examples: int
    correct: int


@dataclass(frozen=True)
class Facts:
    """What is known when round `number` of `rounds` opens.

    `losses[i]` is what devices measured of the model that round i made, 0 the first one, None where
    too few did; `classes[i]`, by class, what they counted.
    """

    number: int
    rounds: int
    losses: Sequence[float | None] = ()
    classes: Mapping[int, Mapping[str, Tally]] = field(default_factory=dict)
