"""The facts by which policies decide when a round opens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Tally:
    """Of a class, as devices counted it: examples, and how many the model was right of."""

    num_examples: int
    correct: int


@dataclass(frozen=True)
class Facts:
    """The observations that policies decide by when round `number` of `rounds` opens.

    `losses[i]` is what devices measured of the model that round i made, 0 the first one, None where
    too few did; `classes[i]`, by class, what they counted. `uploaded`: the bytes of the bodies of
    each round that the policies have had, where one of them has a budget of bytes; `size`: that of
    the cohort.
    """

    number: int
    rounds: int
    losses: Sequence[float | None] = ()
    classes: Mapping[int, Mapping[str, Tally]] = field(default_factory=dict)
    uploaded: Sequence[int] = ()
    size: int = 0
