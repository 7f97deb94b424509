"""Selection of clients: policies over a table of waiting candidates, and the selection window.

Pure, without I/O, clock or randomness of its own: the candidates' attributes, the time and the
stream of random numbers are arguments. A selection becomes an event of the round, so that a replay
does not select again.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from fedpress_compression.randomness import PublicRandomness, PublicStream
from fedpress_protocols.messages import Attributes, Eligibility, SelectionTerms

_ONE = 2**20
"""The integer that represents weight 1. Weights are integers, so that rounding cannot decide who is
chosen."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A device that waits, and what the task's records tell of it.

    `num_examples` and `loss` are the last that it told, None if it told none; `given` counts the
    assignments it has had, `delivered` those of them that came to an upload.
    """

    client_id: str
    num_examples: int | None = None
    loss: float | None = None
    given: int = 0
    delivered: int = 0


def choose(
    terms: SelectionTerms, candidates: Sequence[Candidate], places: int, stream: PublicStream
) -> tuple[str, ...]:
    """Whom the policy, any but "first", gives the `places`: as many of the `candidates` or, if
    there are no more, all. Their order says nothing.

    The same candidates in any order and the same stream give the same clients.
    """
    table = sorted(candidates, key=lambda each: each.client_id)
    if len(table) > places:
        table = _POLICIES[terms.policy](terms, table, places, stream)
    return tuple(each.client_id for each in table)


def stream_of(seed: int, task: str, number: int, attempt: int, seq: int) -> PublicStream:
    """Of the choice that becomes event `seq` of an attempt, in a task with this seed."""
    label = f"fedpress selection v1|{seed}|{task}|{number}|{attempt}|{seq}"
    return PublicRandomness(hashlib.sha256(label.encode()).digest()).stream("selection")


def is_eligible(rules: Mapping[str, Eligibility], attributes: Attributes) -> bool:
    """Whether every rule admits the attribute of its name."""
    return all(rule.admits(attributes.get(name)) for name, rule in rules.items())


# Policies


def _uniform(
    terms: SelectionTerms, table: list[Candidate], places: int, stream: PublicStream
) -> list[Candidate]:
    return _drawn(table, [1] * len(table), places, stream)


def _weighted(
    terms: SelectionTerms, table: list[Candidate], places: int, stream: PublicStream
) -> list[Candidate]:
    """Devices that have told no number of examples count as the mean of those that have."""
    sizes = [each.num_examples for each in table if each.num_examples]
    mean = max(1, sum(sizes) // len(sizes)) if sizes else 1
    return _drawn(table, [each.num_examples or mean for each in table], places, stream)


def _seldom(
    terms: SelectionTerms, table: list[Candidate], places: int, stream: PublicStream
) -> list[Candidate]:
    """In proportion to 1 / (1 + given): inverse frequency, so that over the rounds devices that
    are seldom there come closer to as many assignments as those that always are.

    Of assignments given and not of uploads included, or a device that never delivers would be
    preferred for ever.
    """
    return _drawn(table, [_ONE // (1 + each.given) or 1 for each in table], places, stream)


def _reliable(
    terms: SelectionTerms, table: list[Candidate], places: int, stream: PublicStream
) -> list[Candidate]:
    """In proportion to (1 + delivered) / (2 + given), Laplace's estimate of the chance that an
    assignment comes to an upload; a device without any counts as one half."""
    weights = [_ONE * (1 + each.delivered) // (2 + each.given) or 1 for each in table]
    return _drawn(table, weights, places, stream)


def _highest_loss(
    terms: SelectionTerms, table: list[Candidate], places: int, stream: PublicStream
) -> list[Candidate]:
    """Power of choice with stale losses: of d candidates, drawn in proportion to their examples,
    those with the highest loss. A device that has told none counts as infinite, and comes first;
    ties are drawn.

    Cho et al. 2020, arXiv:2010.01243, Section 4 (pow-d, and the variant rpow-d, which takes the
    loss that a device told last for its loss at the model of today).
    """
    drawn = _weighted(terms, table, min(len(table), terms.candidates or 2 * places), stream)
    ranks = stream.words(len(drawn)).tolist()
    order = sorted(range(len(drawn)), key=lambda i: (-_loss_of(drawn[i]), ranks[i]))
    return [drawn[i] for i in sorted(order[:places])]


def _loss_of(candidate: Candidate) -> float:
    return math.inf if candidate.loss is None else candidate.loss


_POLICIES: Mapping[
    str, Callable[[SelectionTerms, list[Candidate], int, PublicStream], list[Candidate]]
] = MappingProxyType(
    {
        "uniform": _uniform,
        "weighted": _weighted,
        "seldom": _seldom,
        "reliable": _reliable,
        "loss": _highest_loss,
    }
)


def _drawn(
    table: list[Candidate], weights: Sequence[int], places: int, stream: PublicStream
) -> list[Candidate]:
    """`places` of the table, in its order; each is in with the probability min(1, c w), to the
    last bit, where c makes the probabilities' sum `places`. With equal weights every set is as
    likely.

    Systematic sampling in a random order (Madow 1949, Ann. Math. Statist. 20(3)). What a plain
    draw one after the other lacks is that very property: its probabilities are not in proportion.
    """
    places = min(places, len(table))
    certain, rest = _split(weights, places)
    remaining = places - len(certain)
    if not remaining:
        return [table[i] for i in sorted(certain)]
    ranks = stream.words(len(rest)).tolist()
    rest = [i for _, i in sorted(zip(ranks, rest, strict=True))]
    total = sum(weights[i] for i in rest)
    # Each takes left * w of a line of length left * total, with a mark every `total`.
    mark, end = int(stream.below(total, 1)[0]), 0
    for i in rest:
        end += remaining * weights[i]
        if mark < end:
            certain.append(i)
            mark += total
    return [table[i] for i in sorted(certain)]


def _split(weights: Sequence[int], places: int) -> tuple[list[int], list[int]]:
    """Those whose probability comes to 1, and the others."""
    certain: list[int] = []
    heaviest = sorted(range(len(weights)), key=lambda i: -weights[i])
    total = sum(weights)
    for i in heaviest:
        if (places - len(certain)) * weights[i] < total:
            break
        certain.append(i)
        total -= weights[i]
    return certain, heaviest[len(certain) :]


# The wait


@dataclass(slots=True)
class Candidates:
    """Devices that wait for a place in a task, as far as this process has seen.

    A device stays for `patience` seconds after its last check-in: between two of them it is not
    connected, and still waits. Lost in a restart, after which devices check in again.
    """

    patience: float
    _seen: dict[str, float] = field(default_factory=dict)
    """By client, in the order of the times."""
    _looks: dict[str, int] = field(default_factory=dict)
    _uplinks: dict[str, float] = field(default_factory=dict)
    _since: float | None = None
    """When the window began: when the first of them came, after the attempt's opening or the last
    choice."""
    _attempt: object = None

    def add(
        self,
        client_id: str,
        attempt: object,
        now: float,
        looks: int = 0,
        uplink: float | None = None,
    ) -> None:
        """A device with no place in `attempt` checks in, for the `looks`th time where that is
        counted, and may say what its `uplink` is, in bytes a second."""
        self._let_go(now)
        if not self._seen or self._since is None or self._attempt != attempt:
            self._since, self._attempt = now, attempt
        self.remove(client_id)
        self._seen[client_id] = now
        if looks:
            self._looks[client_id] = looks
        if uplink is not None:
            self._uplinks[client_id] = uplink

    def remove(self, client_id: str) -> None:
        self._seen.pop(client_id, None)
        self._looks.pop(client_id, None)
        self._uplinks.pop(client_id, None)

    def looks(self, client_id: str) -> int:
        """The number that `add` was last given for the device; 0 if it does not wait."""
        return self._looks.get(client_id, 0) if client_id in self._seen else 0

    def uplink(self, client_id: str) -> float | None:
        """As the device reported it with its last check-in, in bytes a second."""
        return self._uplinks.get(client_id)

    def waiting(self, now: float) -> tuple[str, ...]:
        """Return the clients that wait, ordered by their last check-in, latest last."""
        self._let_go(now)
        return tuple(self._seen)

    def _let_go(self, now: float) -> None:
        while self._seen:
            client_id, last_seen = next(iter(self._seen.items()))
            if now < last_seen + self.patience:
                break
            self.remove(client_id)

    def is_due(
        self, terms: SelectionTerms, attempt: object, places: int, most: int | None, now: float
    ) -> bool:
        """Whether it is time to choose for `places` of the attempt; no more than `most` devices
        can wait."""
        self._let_go(now)
        if not self._seen or places < 1 or self._since is None or self._attempt != attempt:
            return False
        enough = terms.candidates or 2 * places
        if most is not None:
            enough = min(enough, most)
        return len(self._seen) >= enough or now >= self._since + terms.window

    def chosen(self, client_ids: Sequence[str]) -> None:
        """They have places now; for the others a new window begins when they look again."""
        for client_id in client_ids:
            self.remove(client_id)
        self._since = None
