"""The masking graph of a session: neighbours, degree and secret-sharing threshold.

Up to 128 clients the graph is complete (Bonawitz et al. 2017, eprint 2017/281). Above, a
client masks with `degree` neighbours and shares its secrets among them (Bell et al. 2020, eprint
2020/704): those at fixed distances on a ring that is shuffled by the transcript.

Against a semi-honest server the distances are the shortest ones, a Harary graph: no cheaper graph
stays connected. A malicious server could open the sum of an arc of it alone: the clients at the
ends of the arc have half of their neighbours inside, and only the server tells them about the
others. So against a malicious server, distances are spread over the whole ring, and `sound_search`
requires so many of them that only a large set of clients is closed; see docs/secure-aggregation.md.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedpress_compression.randomness import PublicRandomness
from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan

Adversary = Literal["semi-honest", "malicious"]
Slots = npt.NDArray[np.int64]

COMPLETE_UP_TO = 128
"""Clients up to which the graph is complete."""
SECURITY_BITS = 40
"""A semi-honest adversary learns some client's update with a probability of at most 2**-40."""
GRAPH_BITS = 128
"""Against a malicious server a graph is bad with a probability of at most 2**-128: after 2**64
graphs that it has tried, 64 bits are left."""
COMPLETE_AT_MOST = 1024
"""Clients up to which the graph is complete if no sparse graph tolerates the faults."""
CORRECTNESS_BITS = 20
"""Probability of at most 2**-20 that some client's secret cannot be reconstructed."""

_SMALL = 32
_ROUNDING = 1e-14
"""A share of clients given as 0.3 is 3 of 10, not 2."""
_LABEL = "secure aggregation graph"


@dataclass(frozen=True, slots=True)
class Parameters:
    """Each client has `degree` neighbours; `threshold` shares reconstruct one of its secrets.

    In a complete graph (`degree` is n - 1) the threshold counts a client's own share too, if it
    keeps one: t of n, as in Bonawitz et al. In a sparse graph shares go to neighbours alone.
    """

    degree: int
    threshold: int
    honest: int = 0
    """In a sparse graph against a malicious server: the minimum number of honest clients in any
    sum, whatever the server claims about the survivors; more than half of them, so there is one
    sum."""


def parameters(n: int, *, corrupt: float, dropout: float, adversary: Adversary) -> Parameters:
    """The graph for `n` clients, n >= 2, of which up to the share `corrupt` colludes with the
    server and up to the share `dropout` drops out between key exchange and sum.

    Up to 128 clients the graph is complete, and the threshold is more than 2n/3 against a malicious
    server, more than n/2 against a semi-honest one (n/3 below 32 clients, where drop-outs matter
    more than collusion), or more if `corrupt` requires it; above, `sound_search` finds both against
    a malicious server, `search` against a semi-honest one. Raises IncompatiblePlan if no graph
    tolerates both shares, ConfigurationError for invalid shares.
    """
    _check(n, corrupt, dropout, adversary)
    if n > COMPLETE_UP_TO:
        if adversary == "semi-honest":
            return search(n, corrupt=corrupt, dropout=dropout, adversary=adversary)
        sound = sound_search(n, corrupt=corrupt, dropout=dropout)
        if sound is not None:
            return sound
        if n > COMPLETE_AT_MOST:
            raise IncompatiblePlan(
                f"no sparse graph on {n} clients tolerates {corrupt:g} of them corrupt and "
                f"{dropout:g} "
                "dropping out against a malicious server",
                hint="lower either share: a session lasts seconds, and few clients drop out of it",
            )
    num_corrupt = _at_most(corrupt, n)
    if adversary == "malicious":
        threshold = max(2 * n // 3, (n + num_corrupt) // 2) + 1
    else:
        threshold = max(n // (3 if n < _SMALL else 2), num_corrupt, 1) + 1
    if n - _at_most(dropout, n) < threshold:
        raise IncompatiblePlan(
            f"{threshold} of {n} clients must stay, but {dropout:g} of them may drop out",
            hint="lower masking.dropout or masking.corrupt, or enlarge the cohort",
        )
    return Parameters(n - 1, threshold)


@lru_cache(maxsize=256)
def search(n: int, *, corrupt: float, dropout: float, adversary: Adversary) -> Parameters:
    """The least degree of a Harary graph on `n` clients, and its least threshold, such that, except
    with probability 2**-40, the graph of honest remaining clients is connected and no client's
    neighbours reveal its secrets, and, except with probability 2**-20, enough neighbours of every
    client remain.

    A threshold t is safe if no client has t corrupt neighbours; against a malicious server, which
    may ask half of the honest neighbours for one secret and half for the other, if 2t is more than
    the degree and the corrupt neighbours (Bell et al. 2020). Raises IncompatiblePlan if only a
    complete graph is enough.
    """
    _check(n, corrupt, dropout, adversary)
    logs = _log_factorials(n)
    num_corrupt = _at_most(corrupt, n)
    num_gone = min(num_corrupt + _at_most(dropout, n), n)
    num_left = math.ceil((1 - dropout - _ROUNDING) * n)
    insecure = math.exp2(-(SECURITY_BITS + 1))  # half for each of two ways to fail
    incorrect = math.exp2(-CORRECTNESS_BITS)
    for degree in range(2, n - 1, 2):
        if _log_cut(n, degree, num_gone, logs) >= math.log(insecure):
            continue
        corrupt_neighbours = _hypergeometric(n, num_corrupt, degree, logs)
        reaching = np.append(np.cumsum(corrupt_neighbours[::-1])[::-1], 0.0)
        most_corrupt = int(np.argmax(reaching <= insecure / n)) - 1
        staying = np.cumsum(_hypergeometric(n, num_left, degree, logs))
        most = int(np.searchsorted(staying, incorrect / n, side="right"))
        least = most_corrupt + 1
        if adversary == "malicious":
            least = (degree + most_corrupt) // 2 + 1
        if least <= most:
            return Parameters(degree, max(least, 2))
    raise IncompatiblePlan(
        f"no sparse graph on {n} clients tolerates {corrupt:g} of them corrupt and {dropout:g} "
        "dropping out",
        hint="lower either share, or enlarge the cohort",
    )


@lru_cache(maxsize=256)
def sound_search(n: int, *, corrupt: float, dropout: float) -> Parameters | None:
    """The least even degree of a spread graph on `n` clients, and its greatest threshold, such that
    a malicious server can open at most one sum, of more than half of the honest clients; None if
    no degree below n - 1 is enough.

    Except with probability 2**-128 no honest client has more than c corrupt neighbours, and except
    with 2**-20, t neighbours of every client remain. Then 2t > degree + c keeps each client's two
    secrets apart, and a set of honest clients whose sum can be opened is *closed*: each of its
    members has 2t - degree neighbours within it or among the corrupt. `_least_closed` bounds the
    size of a closed set by the graph's second eigenvalue.
    """
    _check(n, corrupt, dropout, "malicious")
    logs = _log_factorials(n)
    num_corrupt = _at_most(corrupt, n)
    num_left = n - _at_most(dropout, n)
    if 4 * num_left <= 3 * n + num_corrupt:  # half of the honest would be closed in any graph
        return None
    bad, incorrect = math.exp2(-GRAPH_BITS) / n, math.exp2(-CORRECTNESS_BITS) / n
    for degree in range(2, n - 1, 2):
        # Among the n - 1 others of an honest client, and of a remaining client.
        corrupt_neighbours = _hypergeometric(n - 1, num_corrupt, degree, logs)
        reaching = np.append(np.cumsum(corrupt_neighbours[::-1])[::-1], 0.0)
        most_corrupt = int(np.argmax(reaching <= bad)) - 1
        staying = np.cumsum(_hypergeometric(n - 1, num_left - 1, degree, logs))
        threshold = int(np.searchsorted(staying, incorrect, side="right"))
        if 2 * threshold <= degree + most_corrupt:
            continue
        honest = _least_closed(n, degree, threshold, num_corrupt, most_corrupt)
        if 2 * honest > n - num_corrupt:
            return Parameters(degree, threshold, honest)
    return None


def honest_survivors(minimum: int, maximum: int, *, corrupt: float, adversary: Adversary) -> int:
    """The least number of honest clients in any sum that can be unmasked, of a session of up to
    `maximum` clients that ends with `minimum` or more, as the survivors are said to be.

    Of a complete graph, and against a server that keeps to the protocol, survivors are what they
    are said to be. In a sparse graph a malicious server may leave up to half of the honest ones out
    of the sum, see `Parameters.honest`.
    """
    least = max(0, minimum - _at_most(corrupt, maximum))
    if adversary == "malicious" and maximum > COMPLETE_UP_TO:
        fewest = max(minimum, COMPLETE_UP_TO + 1)
        least = min(least, (fewest - _at_most(corrupt, fewest)) // 2 + 1)
    return least


def neighbours(n: int, degree: int, seed: bytes, *, is_spread: bool = False) -> Slots:
    """[n, degree]: the neighbours of every slot, ascending.

    `seed` is 32 bytes of the transcript. Slots stand on a ring in the order of a Fisher-Yates
    shuffle; neighbours are those up to degree // 2 places away and, for an odd degree (n is even
    then), the one opposite. Where the graph `is_spread`, of even degree, they are those at
    `distances`. Raises ConfigurationError if there is no such graph.
    """
    order = _ring(n, degree, seed)
    places = np.arange(n)[:, np.newaxis] + _offsets(n, degree, is_spread)
    neighbour_slots = np.empty((n, degree), np.int64)
    neighbour_slots[order] = np.sort(order[places % n], axis=1)
    return neighbour_slots


def neighbours_of(slot: int, n: int, degree: int, seed: bytes, *, is_spread: bool = False) -> Slots:
    """[degree]: the row of `neighbours` for one slot, without the others."""
    order = _ring(n, degree, seed)
    if not 0 <= slot < n:
        raise ConfigurationError(f"slot {slot} outside [0, {n})")
    place = int(np.flatnonzero(order == slot)[0])
    return np.sort(order[(place + _offsets(n, degree, is_spread)) % n])


@lru_cache(maxsize=8)
def distances(n: int, degree: int) -> Slots:
    """[degree / 2]: the distances between neighbours on the ring of a spread graph, in [1, n / 2),
    ascending. They depend on n and degree only, not on the transcript."""
    if degree % 2 or not 2 <= degree < n:
        raise ConfigurationError(f"no spread graph gives each of {n} clients {degree} neighbours")
    label = f"fedpress secure aggregation distances v1|{n}|{degree}"
    stream = PublicRandomness(hashlib.sha256(label.encode()).digest()).stream(_LABEL)
    offsets = stream.distinct((n - 1) // 2, degree // 2) + 1
    offsets.setflags(write=False)
    return offsets


def second_eigenvalue(n: int, degree: int) -> float:
    """The largest magnitude of an eigenvalue of a spread graph other than `degree`, rounded up to a
    sixteenth, so that every machine gets the same value."""
    ring = np.zeros(n)
    ring[distances(n, degree)] = 2.0
    return math.ceil(16 * float(np.abs(np.fft.fft(ring)[1:].real).max())) / 16


@lru_cache(maxsize=4)
def _ring(n: int, degree: int, seed: bytes) -> Slots:
    if not 1 <= degree < n or (degree * n) % 2:
        raise ConfigurationError(f"no graph gives each of {n} clients {degree} neighbours")
    stream = PublicRandomness(seed).stream(_LABEL)
    order = list(range(n))
    for last in range(n - 1, 0, -1):
        other = int(stream.below(last + 1, 1)[0])
        order[last], order[other] = order[other], order[last]
    shuffled = np.array(order, np.int64)
    shuffled.setflags(write=False)
    return shuffled


def _offsets(n: int, degree: int, is_spread: bool) -> Slots:
    near = distances(n, degree) if is_spread else np.arange(1, degree // 2 + 1)
    opposite = [n // 2] if degree % 2 else []
    return np.concatenate([-near, near, opposite]).astype(np.int64)


def _check(n: int, corrupt: float, dropout: float, adversary: str) -> None:
    if n < 2:
        raise ConfigurationError(f"secure aggregation needs at least 2 clients, not {n}")
    if not (0 <= corrupt < 1 and 0 <= dropout < 1):
        raise ConfigurationError(
            f"corrupt and dropout must be in [0, 1), not {corrupt:g} and {dropout:g}"
        )
    if adversary not in ("semi-honest", "malicious"):
        raise ConfigurationError(f"adversary must be semi-honest or malicious, not {adversary!r}")


def _at_most(share: float, n: int) -> int:
    return min(math.floor((share + _ROUNDING) * n), n - 1)


def _log_factorials(n: int) -> npt.NDArray[np.float64]:
    return np.cumsum(np.log(np.maximum(np.arange(n + 1), 1.0)))


def _least_closed(n: int, degree: int, threshold: int, num_corrupt: int, most_corrupt: int) -> int:
    """The least size s of a set K of honest clients, each of which has 2t - k neighbours within K
    or among the corrupt C, of which it has `most_corrupt` at most.

    By the expander mixing lemma, with l the second eigenvalue and k the degree, K has within itself
    at most k s^2/n + l s (1 - s/n) pairs of neighbours, both orders counted, and with K and C at
    most k s b/n + l sqrt(s b (1 - s/n) (1 - b/n)), b = s + |C|.
    """
    size = np.arange(1.0, n - num_corrupt + 1)
    both, gap = size + num_corrupt, second_eigenvalue(n, degree)
    inside = degree * size**2 / n + gap * size * (1 - size / n)
    near = degree * size * both / n
    near += gap * np.sqrt(size * both * (1 - size / n) * (1 - both / n))
    required = (2 * threshold - degree) * size
    is_possible = (required - most_corrupt * size <= inside) & (required <= near)
    return int(np.argmax(is_possible)) + 1


def _log_cut(n: int, degree: int, num_gone: int, logs: npt.NDArray[np.float64]) -> float:
    """A bound on the log probability that drop-outs disconnect the ring: that at any two places
    degree / 2 clients in a row have dropped out."""
    if degree > num_gone:
        return -math.inf
    places = math.log(n) + math.log(n - degree - 1) - math.log(2)
    log_run = logs[num_gone] - logs[num_gone - degree] + logs[n - degree] - logs[n]
    return float(places + log_run)


def _hypergeometric(
    n: int, marked: int, drawn: int, logs: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """[drawn + 1]: the probability of each number of `marked` among `drawn` of `n`."""
    counts = np.arange(drawn + 1)
    possible = (counts <= marked) & (drawn - counts <= n - marked)
    x = counts[possible]
    chances = np.zeros(drawn + 1)
    chances[possible] = np.exp(
        (logs[drawn] - logs[x] - logs[drawn - x])
        + (logs[n - drawn] - logs[marked - x] - logs[n - drawn - marked + x])
        - (logs[n] - logs[marked] - logs[n - marked])
    )
    return chances
