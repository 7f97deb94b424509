"""Graph parameters equal the published ones, and every client finds the same neighbours."""

from __future__ import annotations

import hashlib
import math
from fractions import Fraction

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan
from fedpress_protocols.masking import graph
from fedpress_protocols.masking.graph import (
    Adversary,
    Parameters,
    neighbours,
    neighbours_of,
    parameters,
    search,
    sound_search,
)
from tests.lengths import examples

# n, corrupt, dropout; degree and threshold of a plain ring against a server that only looks, and
# those that were used against one that deviates. Security 2**-40, correctness 2**-20.
THIRD = 1 / 3
TABLE = [
    (100, 0.05, 0.05, (12, 6), (16, 11)),
    (100, 0.10, 0.05, (16, 11), (22, 17)),
    (100, 0.05, 0.30, (26, 6), (66, 36)),
    (100, 0.10, 0.30, (34, 11), (72, 42)),
    (1_000, 0.05, 0.05, (30, 17), (52, 37)),
    (1_000, 0.10, 0.05, (38, 24), (66, 49)),
    (1_000, 0.05, 0.30, (66, 23), (314, 179)),
    (1_000, 0.10, 0.30, (88, 36), (414, 247)),
    (1_000, THIRD, 0.05, (78, 60), (138, 114)),
    (10_000, 0.05, 0.05, (34, 20), (62, 44)),
    (10_000, 0.10, 0.05, (42, 27), (80, 59)),
    (10_000, 0.05, 0.30, (80, 29), (522, 299)),
    (10_000, 0.10, 0.30, (108, 44), (778, 465)),
    (10_000, THIRD, 0.05, (92, 70), (178, 146)),
    # Caps that a random drop-out of 5 % and 30 % on the mean keeps to, but for 2**-20.
    (1_000, 0.10, 0.086, (42, 25), (86, 61)),
    (1_000, 0.10, 0.370, (110, 40), (698, 399)),
    (10_000, 0.10, 0.061, (46, 28), (88, 64)),
    (10_000, 0.10, 0.322, (118, 46), (1046, 617)),
]
# Degrees of federated-compute's Harary graph finder, and thresholds, as its tests state them.
PUBLISHED: list[tuple[int, float, float, Adversary, int, int]] = [
    (100, 0.45, 0.45, "semi-honest", 92, 46),
    (1_000, 0.45, 0.45, "semi-honest", 822, 417),
    (10_000, 0.45, 0.45, "semi-honest", 3494, 1771),
    (10, 0.33, 0.33, "semi-honest", 8, 4),
    (100, 0.33, 0.33, "semi-honest", 68, 34),
    (1_000, 0.33, 0.33, "semi-honest", 286, 150),
    (10_000, 0.33, 0.33, "semi-honest", 422, 221),
    (100, 0.3, 0.3, "malicious", 92, 62),
    (1_000, 0.3, 0.3, "malicious", 872, 584),
    (10, 0.05, 0.33, "malicious", 8, 5),
    (100, 0.33, 0.0, "semi-honest", 26, 25),
    (1_000, 0.33, 0.05, "malicious", 132, 109),
    (1_000, 0.33, 0.0, "malicious", 38, 37),
    (1_000, 0.0, 0.33, "malicious", 228, 115),
]
SEED = bytes(range(32))
ADVERSARIES: tuple[Adversary, ...] = ("semi-honest", "malicious")


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_the_search_gives_the_table_row_by_row(
    row: tuple[int, float, float, tuple[int, int], tuple[int, int]],
) -> None:
    n, corrupt, dropout, *due = row
    for adversary, (degree, threshold) in zip(ADVERSARIES, due, strict=True):
        found = search(n, corrupt=corrupt, dropout=dropout, adversary=adversary)
        assert found == Parameters(degree, threshold), adversary
        if n > graph.COMPLETE_UP_TO and adversary == "semi-honest":
            asked = parameters(n, corrupt=corrupt, dropout=dropout, adversary=adversary)
            assert asked == found


@pytest.mark.parametrize("row", PUBLISHED, ids=str)
def test_the_search_gives_what_others_found(
    row: tuple[int, float, float, Adversary, int, int],
) -> None:
    n, corrupt, dropout, adversary, degree, threshold = row
    found = search(n, corrupt=corrupt, dropout=dropout, adversary=adversary)
    assert found == Parameters(degree, threshold)


@pytest.mark.parametrize(
    ("n", "semi_honest", "malicious"), [(10, 4, 7), (100, 51, 67), (128, 65, 86), (3, 2, 3)]
)
def test_up_to_128_clients_the_graph_is_complete(n: int, semi_honest: int, malicious: int) -> None:
    for adversary, due in (("semi-honest", semi_honest), ("malicious", malicious)):
        found = parameters(n, corrupt=0.1, dropout=0.3, adversary=adversary)  # type: ignore[arg-type]
        assert found == Parameters(n - 1, due)


@given(st.integers(2, 128), st.floats(0, 0.99), st.sampled_from(ADVERSARIES))
def test_the_threshold_of_a_complete_graph_is_safe(
    n: int, corrupt: float, adversary: Adversary
) -> None:
    """Nobody's corrupt neighbours reach it; and honest ones cannot serve two groups that do."""
    num_corrupt = math.floor(n * corrupt)
    threshold = parameters(n, corrupt=corrupt, dropout=0, adversary=adversary).threshold
    assert 2 <= threshold <= n
    assert threshold > num_corrupt
    if adversary == "malicious":
        assert 2 * threshold > n + num_corrupt


def exact_tail(n: int, marked: int, drawn: int, least: int) -> Fraction:
    """The chance that at least `least` of the `marked` are among `drawn` of n, in whole numbers."""
    ways = sum(
        math.comb(marked, x) * math.comb(n - marked, drawn - x)
        for x in range(least, min(marked, drawn) + 1)
    )
    return Fraction(ways, math.comb(n, drawn))


@pytest.mark.parametrize("row", TABLE[4:9], ids=str)
def test_the_table_keeps_its_promises_by_exact_arithmetic(
    row: tuple[int, float, float, tuple[int, int], tuple[int, int]],
) -> None:
    n, corrupt, dropout, (degree, threshold), (k, t) = row
    num_corrupt, num_left = math.floor(corrupt * n), n - math.floor(dropout * n)
    assert n * exact_tail(n, num_corrupt, degree, threshold) <= Fraction(1, 2**41)
    assert n * (1 - exact_tail(n, num_left, degree, threshold)) <= Fraction(1, 2**20)
    # Corrupt neighbours of whom honest ones, in two halves, could make two thresholds.
    assert n * exact_tail(n, num_corrupt, k, 2 * t - k) <= Fraction(1, 2**41)
    assert n * (1 - exact_tail(n, num_left, k, t)) <= Fraction(1, 2**20)
    # One less would not do.
    smaller = search(n, corrupt=corrupt, dropout=dropout, adversary="semi-honest").threshold - 1
    assert n * exact_tail(n, num_corrupt, degree, smaller) > Fraction(1, 2**41)


def test_what_no_graph_bears_is_refused() -> None:
    parameters(10, corrupt=0.1, dropout=0.3, adversary="malicious")
    with pytest.raises(IncompatiblePlan, match=r"7 of 10 clients must stay, but 0\.4"):
        parameters(10, corrupt=0.1, dropout=0.4, adversary="malicious")
    with pytest.raises(IncompatiblePlan, match="141 of 200 clients must stay"):
        parameters(200, corrupt=0.4, dropout=0.5, adversary="malicious")
    with pytest.raises(IncompatiblePlan, match="no sparse graph on 2000 clients"):
        parameters(2000, corrupt=0.1, dropout=0.3, adversary="malicious")
    with pytest.raises(
        IncompatiblePlan, match=r"tolerates 0\.6 of them corrupt and 0\.7 dropping out"
    ):
        parameters(200, corrupt=0.6, dropout=0.7, adversary="semi-honest")


def test_arguments_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="not 1"):
        parameters(1, corrupt=0, dropout=0, adversary="malicious")
    with pytest.raises(ConfigurationError, match="not 1 and 0"):
        parameters(5, corrupt=1, dropout=0, adversary="malicious")
    with pytest.raises(ConfigurationError, match="'lazy'"):
        search(5, corrupt=0, dropout=0, adversary="lazy")
    for n, degree in ((5, 3), (5, 5), (5, 0)):
        with pytest.raises(ConfigurationError, match=f"each of {n} clients {degree} neighbours"):
            neighbours(n, degree, SEED)
    with pytest.raises(ConfigurationError, match="slot 6 outside"):
        neighbours_of(6, 6, 2, SEED)


# n, corrupt, dropout; degree, threshold and honest clients of a spread ring.
SOUND = [
    (129, 0.10, 0.05, (44, 38, 65)),
    (200, 0.10, 0.05, (68, 58, 96)),
    (1_000, 0.05, 0.05, (140, 116, 493)),
    (1_000, 0.10, 0.05, (162, 136, 478)),
    (10_000, 0.10, 0.05, (230, 193, 4627)),
]


@pytest.mark.parametrize("row", SOUND, ids=str)
def test_against_a_server_that_deviates_the_ring_is_spread(
    row: tuple[int, float, float, tuple[int, int, int]],
) -> None:
    n, corrupt, dropout, due = row
    found = parameters(n, corrupt=corrupt, dropout=dropout, adversary="malicious")
    assert found == Parameters(*due)
    # By exact arithmetic: corrupt neighbours of an honest client, and those that stay of one's.
    degree, threshold, _ = due
    num_corrupt, num_left = math.floor(corrupt * n), n - math.floor(dropout * n)
    reach = 2 * threshold - degree
    assert n * exact_tail(n - 1, num_corrupt, degree, reach) <= Fraction(1, 2**128)
    assert n * (1 - exact_tail(n - 1, num_left - 1, degree, threshold)) <= Fraction(1, 2**20)


def test_where_no_spread_ring_will_do_the_graph_is_complete() -> None:
    """Up to 1,024 clients, with the threshold of a complete graph."""
    found = parameters(1000, corrupt=0.1, dropout=0.3, adversary="malicious")
    assert found == Parameters(999, 667)


@pytest.mark.parametrize(("n", "degree"), [(129, 44), (200, 68), (1000, 162)])
def test_the_second_eigenvalue_is_that_of_the_graph(n: int, degree: int) -> None:
    rows = neighbours(n, degree, SEED, is_spread=True)
    linked = np.zeros((n, n))
    np.put_along_axis(linked, rows, 1.0, axis=1)
    assert (linked == linked.T).all()
    assert (linked.sum(axis=1) == degree).all()
    values = np.linalg.eigvalsh(linked)
    assert values[-1] == pytest.approx(degree)
    largest = max(abs(values[0]), values[-2])
    assert largest <= graph.second_eigenvalue(n, degree) < largest + 1 / 15
    # Of random edges it would be 2 sqrt(degree - 1), and of a plain ring nearly the degree.
    assert largest < 3 * math.sqrt(degree)


def slow_distances(n: int, degree: int) -> list[int]:
    """As the specification says it, on a key stream made here."""
    seed = hashlib.sha256(b"fedpress secure aggregation distances v1|%d|%d" % (n, degree)).digest()
    label = b"fedpress public randomness v1\x00" + seed + b"secure aggregation graph"
    stream = Cipher(ChaCha20(hashlib.sha256(label).digest(), bytes(16)), mode=None).encryptor()
    bound = (n - 1) // 2
    wanted = min(degree // 2, bound - degree // 2) if degree > bound else degree // 2
    drawn: set[int] = set()
    while len(drawn) < wanted:
        word = int.from_bytes(stream.update(bytes(8)), "little")
        if word < 2**64 // bound * bound:
            drawn.add(word % bound)
    if degree > bound:
        drawn = set(range(bound)) - drawn
    return sorted(each + 1 for each in drawn)


@pytest.mark.parametrize(("n", "degree"), [(129, 44), (130, 90), (200, 68), (1000, 162)])
def test_distances_are_those_of_the_specification(n: int, degree: int) -> None:
    steps = slow_distances(n, degree)
    assert graph.distances(n, degree).tolist() == steps
    rows = neighbours(n, degree, SEED, is_spread=True)
    ring = graph._ring(n, degree, SEED).tolist()
    for place in (0, 1, n - 1):
        due = {ring[(place + step) % n] for each in steps for step in (each, -each)}
        assert rows[ring[place]].tolist() == sorted(due)
        slot = ring[place]
        assert neighbours_of(slot, n, degree, SEED, is_spread=True).tolist() == sorted(due)
    with pytest.raises(ConfigurationError, match="no spread graph gives each of 10 clients 3"):
        graph.distances(10, 3)


def slow_neighbours(n: int, degree: int, seed: bytes) -> list[list[int]]:
    """As the specification says it, on a key stream made here."""
    label = b"secure aggregation graph"
    key = hashlib.sha256(b"fedpress public randomness v1\x00" + seed + label).digest()
    stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    order = list(range(n))
    for last in range(n - 1, 0, -1):
        while (word := int.from_bytes(stream.update(bytes(8)), "little")) >= (
            2**64 // (last + 1) * (last + 1)
        ):
            pass
        other = word % (last + 1)
        order[last], order[other] = order[other], order[last]
    found = []
    for slot in range(n):
        at = order.index(slot)
        ring = [order[(at + step) % n] for step in range(-(degree // 2), degree // 2 + 1) if step]
        found.append(sorted(ring + ([order[(at + n // 2) % n]] if degree % 2 else [])))
    return found


@settings(max_examples=examples(12, 40))
@given(st.integers(2, 40), st.integers(1, 39), st.binary(min_size=32, max_size=32))
def test_neighbours_are_those_of_the_specification(n: int, degree: int, seed: bytes) -> None:
    degree = min(degree, n - 1)
    degree -= degree * n % 2
    if not degree:
        return
    found = neighbours(n, degree, seed)
    assert found.tolist() == slow_neighbours(n, degree, seed)
    for slot in {0, n // 2, n - 1}:
        assert neighbours_of(slot, n, degree, seed).tolist() == found[slot].tolist()


@pytest.mark.parametrize(("n", "degree"), [(10, 9), (100, 99), (1000, 52), (1000, 7), (101, 100)])
def test_a_graph_is_regular_and_mutual_and_connected(n: int, degree: int) -> None:
    found = neighbours(n, degree, SEED)
    linked = np.zeros((n, n), bool)
    np.put_along_axis(linked, found, True, axis=1)
    assert (linked.sum(axis=1) == degree).all()
    assert not linked.diagonal().any()
    assert (linked == linked.T).all()
    reached = np.zeros(n, bool)
    reached[0] = True
    while (grown := reached | linked[reached].any(axis=0)).sum() > reached.sum():
        reached = grown
    assert reached.all()


def test_another_transcript_gives_another_graph() -> None:
    other = hashlib.sha256(SEED).digest()
    assert neighbours(1000, 52, SEED).tolist() != neighbours(1000, 52, other).tolist()


def test_a_cohort_too_small_for_a_spread_graph_has_none() -> None:
    assert sound_search(5, corrupt=0.2, dropout=0.0) is None


@pytest.mark.parametrize(("n", "degree", "num_gone"), [(12, 4, 5), (11, 6, 7), (10, 2, 2)])
def test_the_bound_on_a_cut_counts_every_pair_of_places(n: int, degree: int, num_gone: int) -> None:
    """Two runs of degree / 2 clients with somebody between them on either side, all of whom drop
    out: so many pairs, each with the probability that all of one set are among those gone."""
    half = degree // 2
    runs = [{(start + step) % n for step in range(half)} for start in range(n)]
    longer = [run | {(start - 1) % n, (start + half) % n} for start, run in enumerate(runs)]
    pairs = sum(not longer[i] & runs[j] for i in range(n) for j in range(i))
    chance = Fraction(math.comb(n - degree, num_gone - degree), math.comb(n, num_gone))
    logs = np.array([math.lgamma(number + 1) for number in range(n + 1)])
    assert graph._log_cut(n, degree, num_gone, logs) == pytest.approx(math.log(pairs * chance))
    assert graph._log_cut(n, degree, degree - 1, logs) == -math.inf
