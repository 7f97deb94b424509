"""Corrupt clients that look for a good place in the graph: on the plain ring they cut an arc off,
on the spread one nobody."""

from __future__ import annotations

import math

import numpy as np
import pytest
import ring_cut as benchmark
from ring_cut import Ring

from fedpress_protocols.masking import graph


def beside_an_arc(ring: Ring, length: int) -> np.ndarray:
    """All corrupt clients next to an arc, half on either side: placed when the graph was known."""
    half = ring.num_corrupt // 2
    is_corrupt = np.zeros(ring.n, bool)
    is_corrupt[np.r_[length : length + half, -half:0]] = True
    return is_corrupt


def test_corrupt_clients_on_both_sides_cut_an_arc_off_the_plain_ring() -> None:
    """The graph that the malicious profile had: 24 of 180 honest clients in a sum of their own."""
    ring = Ring.lattice(200, 0.1, 0.05)
    assert benchmark.smallest_cut(ring, beside_an_arc(ring, 24)) <= 24


@pytest.mark.parametrize("n", [200, 1000])
def test_nowhere_on_the_spread_ring_do_they(n: int) -> None:
    ring = Ring.spread(n, 0.1, 0.05)
    for length in (24, n // 4):
        placed = beside_an_arc(ring, length)[np.newaxis]
        assert benchmark.margins(ring, placed)[1].min() > 0
    if n == 200:
        assert benchmark.smallest_cut(ring, placed[0]) == n


def test_a_cut_that_is_there_fails_the_certificate() -> None:
    """All neighbours of one client corrupt, and so many that it could be opened alone."""
    ring = Ring.spread(1000, 0.2, 0.05)
    is_corrupt = np.zeros(1000, bool)
    is_corrupt[ring.steps] = is_corrupt[-ring.steps] = True
    is_corrupt[np.flatnonzero(is_corrupt)[ring.num_corrupt :]] = False
    most, short = benchmark.margins(ring, is_corrupt[np.newaxis])
    assert most[0] >= 2 * ring.found.threshold - ring.found.degree
    assert short[0] <= 0


@pytest.mark.parametrize(("n", "trials"), [(200, 2**14), (1000, 2**12), (10_000, 2**8)])
def test_grinding_finds_no_cut(n: int, trials: int) -> None:
    """So many transcripts are drawn here, and 2**20 by the script; what the 2**64 that the
    parameters leave room for may come to, the exact chance of one says, by which those that were
    drawn behave."""
    ring = Ring.spread(n, 0.1, 0.05)
    worst = []
    for is_corrupt in benchmark.placed(ring, trials, np.random.default_rng(n)):
        assert (is_corrupt.sum(axis=1) == ring.num_corrupt).all()
        most, short = benchmark.margins(ring, is_corrupt)
        assert short.min() > 0
        worst += most.tolist()
    logs = graph._log_factorials(n)
    chances = graph._hypergeometric(n - 1, ring.num_corrupt, ring.found.degree, logs)
    reaching = np.cumsum(chances[::-1])[::-1] * (n - ring.num_corrupt)
    cut = 2 * ring.found.threshold - ring.found.degree
    assert cut > ring.num_corrupt or reaching[cut] * 2.0**64 <= 2.0**-64
    # The union bound over all honest clients is one, and no looser than by a small factor.
    level = int(np.argmax(reaching < 0.05))
    seen = np.mean(np.array(worst) >= level)
    assert reaching[level] / 4 < seen < reaching[level] + 4 * math.sqrt(0.05 / trials)


@pytest.mark.parametrize("n", [129, 200, 1000, 10_000])
@pytest.mark.parametrize("corrupt", [0.05, 0.1, 0.2])
def test_of_every_sum_are_more_than_half_of_the_honest_clients(n: int, corrupt: float) -> None:
    found = graph.parameters(n, corrupt=corrupt, dropout=0.05, adversary="malicious")
    num_honest = n - math.floor(corrupt * n)
    if found.degree < n - 1:
        assert 2 * found.honest > num_honest
