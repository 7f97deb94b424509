"""The facts by which policies decide when a round opens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

FLAT_ROUNDS = 8
"""The newest rounds, whose flat updates are counted."""
_HALVINGS = 30
_ERRORS, _UNKNOWN = 3, 4


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
    the cohort; `population`: the clients that cohorts are drawn from, None where nobody counted;
    `least_population`: the fewest that they may be, None where `population` is exact. `are_flat`:
    whether most of the newest rounds' updates were, as far as their devices said;
    `has_statistics`: whether the model has running statistics, as of BatchNorm.
    """

    number: int
    rounds: int
    losses: Sequence[float | None] = ()
    classes: Mapping[int, Mapping[str, Tally]] = field(default_factory=dict)
    uploaded: Sequence[int] = ()
    size: int = 0
    population: float | None = None
    least_population: float | None = None
    are_flat: bool = False
    has_statistics: bool = False


def mostly_flat(num_flat: int, num_updates: int) -> bool:
    return 2 * num_flat > num_updates


def estimated_population(uploads: int, clients: float) -> float | None:
    """Estimate how many clients uploads come from, if `uploads` of them, drawn at random, are of
    `clients` different ones (the classical occupancy problem).

    Infinite if each is of another client; None without uploads.
    """
    if not uploads:
        return None
    if clients >= uploads:
        return math.inf
    least, most = float(clients), float(clients)
    while _different(uploads, most := 2 * most) < clients:
        least = most
    for _ in range(_HALVINGS):
        middle = (least + most) / 2
        least, most = (middle, most) if _different(uploads, middle) < clients else (least, middle)
    return most


def least_population(uploads: int, clients: int, size: int) -> float | None:
    """The fewest clients that `uploads`, cohorts of `size` of them, may come from if they are of
    `clients`; 0 if nothing can be said.

    Of the clients that came, three standard errors are taken off, and four more, since of few
    repeats the error is not known. A cohort has no client twice, which makes estimates too large.
    """
    population = estimated_population(uploads, clients)
    if population is None:
        return None
    share = uploads / population
    variance = population * math.exp(-share) * (1 - (1 + share) * math.exp(-share)) if share else 0
    error = _ERRORS * math.sqrt(variance + 1) + _UNKNOWN
    fewest = estimated_population(uploads, max(1.0, clients - error)) or 0.0
    return fewest * max(0.0, 1 - size / uploads)


def _different(uploads: int, population: float) -> float:
    """How many clients uploads are expected to come from."""
    return -population * math.expm1(uploads * math.log1p(-1 / population))
