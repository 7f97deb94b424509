"""The ring-cut attack: corrupt clients try one transcript after the other until they stand well.

    python benchmarks/ring_cut.py [--clients 200 1000 10000] [--corrupt 0.1] [--dropout 0.05]
        [--trials 20] [--seed 0]

A transcript only says which client stands where on the ring of a session's graph, so a trial of the
attack is a draw of the corrupt clients' places; 2**TRIALS are drawn. In each, all sets of honest
clients are looked at, not arcs alone, by a certificate: s honest clients whose sum can be opened
have (2 t - k) s neighbours, counted for each, among themselves or the corrupt. Among the corrupt
each has no more than the one with the most, which is counted, and among themselves they have no
more than the expander mixing lemma lets any s; but for a few small s the lemma says so of both
together, wherever the corrupt stand. Where that is too few for every s up to half of the honest
clients, nobody can be cut off by any choice of the server's. It is printed in how many trials the
certificate failed, and by how many neighbours a client the worst one fell short.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedpress_protocols.masking.graph import (
    Parameters,
    distances,
    parameters,
    search,
    second_eigenvalue,
)

Counts = npt.NDArray[np.int64]
_TOGETHER = 2**22
"""Places on rings that are drawn at a time."""


@dataclass(frozen=True)
class Ring:
    """The places of a graph's ring, and how neighbours stand on it."""

    n: int
    found: Parameters
    steps: npt.NDArray[np.int64]
    num_corrupt: int

    @classmethod
    def spread(cls, n: int, corrupt: float, dropout: float) -> Ring:
        """The graph of sessions against a server that deviates."""
        found = parameters(n, corrupt=corrupt, dropout=dropout, adversary="malicious")
        return cls(n, found, distances(n, found.degree), math.floor(corrupt * n))

    @classmethod
    def lattice(cls, n: int, corrupt: float, dropout: float) -> Ring:
        """The graph that such sessions had before: neighbours are those who stand next."""
        found = search(n, corrupt=corrupt, dropout=dropout, adversary="malicious")
        return cls(n, found, np.arange(1, found.degree // 2 + 1), math.floor(corrupt * n))

    def near(self, is_corrupt: npt.NDArray[np.bool_]) -> Counts:
        """[..., n]: corrupt neighbours of every place."""
        ring = np.zeros(self.n, np.float32)
        ring[self.steps] = ring[-self.steps] = 1.0
        both = np.fft.rfft(is_corrupt.astype(np.float32)) * np.fft.rfft(ring)
        return np.rint(np.fft.irfft(both, self.n)).astype(np.int64)


def placed(ring: Ring, trials: int, rng: np.random.Generator) -> Iterator[npt.NDArray[np.bool_]]:
    """[batch, n]: where the corrupt clients stand, for `trials` transcripts in all."""
    batch = max(1, _TOGETHER // ring.n)
    for at in range(0, trials, batch):
        keys = rng.random((min(batch, trials - at), ring.n), np.float32)
        order = np.argpartition(keys, ring.num_corrupt, axis=1)[:, : ring.num_corrupt]
        is_corrupt = np.zeros(keys.shape, bool)
        np.put_along_axis(is_corrupt, order, True, axis=1)
        yield is_corrupt


def margins(ring: Ring, is_corrupt: npt.NDArray[np.bool_]) -> tuple[Counts, npt.NDArray[Any]]:
    """Of each trial, the most corrupt neighbours of an honest client; and by how many neighbours a
    client the best set of up to half of the honest clients falls short of being opened, among the
    sizes for which it matters where the corrupt stand: above 0, no such set can be."""
    n, degree, gap = ring.n, ring.found.degree, second_eigenvalue(ring.n, ring.found.degree)
    size = np.arange(1.0, (n - ring.num_corrupt) // 2 + 1)
    both = size + ring.num_corrupt
    inside = degree * size / n + gap * (1 - size / n)
    near = degree * both / n + gap * np.sqrt(both / size * (1 - size / n) * (1 - both / n))
    needed = 2 * ring.found.threshold - degree
    most = np.where(is_corrupt, -1, ring.near(is_corrupt)).max(axis=1)
    return most, needed - most - inside[near >= needed].max()


def smallest_cut(ring: Ring, is_corrupt: npt.NDArray[np.bool_]) -> int:
    """The fewest honest clients of an arc that a server can open alone by telling those within it
    of no survivors near but themselves and the corrupt: each has t of them for neighbours. `n` if
    there is no such arc. Of one trial."""
    best, n, threshold = ring.n, ring.n, ring.found.threshold
    for length in range(threshold // 2, n // 2):
        arc = np.arange(length)
        for start in range(n):
            places = (start + arc) % n
            honest = places[~is_corrupt[places]]
            if not 0 < len(honest) < best:
                continue
            is_told = is_corrupt.copy()
            is_told[honest] = True
            if (ring.near(is_told)[honest] >= threshold).all():
                best = len(honest)
    return best


def measure(ring: Ring, trials: int, rng: np.random.Generator) -> dict[str, Any]:
    began, most, short = time.process_time(), 0, math.inf
    failed = done = 0
    for is_corrupt in placed(ring, trials, rng):
        worst, left = margins(ring, is_corrupt)
        most, short = max(most, int(worst.max())), min(short, float(left.min()))
        failed, done = failed + int((left <= 0).sum()), done + len(left)
    return {
        "trials": done,
        "failed": failed,
        "most": most,
        "short": short,
        "seconds": time.process_time() - began,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[200, 1_000, 10_000])
    parser.add_argument("--corrupt", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.05)
    parser.add_argument("--trials", type=int, default=20, help="the power of two (default 20)")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    print("| n | k | t | trials | cuts | most corrupt neighbours | cut from | short by | CPU s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for n in asked.clients:
        ring = Ring.spread(n, asked.corrupt, asked.dropout)
        found = measure(ring, 2**asked.trials, np.random.default_rng([asked.seed, n]))
        degree, threshold = ring.found.degree, ring.found.threshold
        print(
            f"| {n:,} | {degree} | {threshold} | {found['trials']:,} | {found['failed']} | "
            f"{found['most']} | {2 * threshold - degree} | {found['short']:.1f} | "
            f"{found['seconds']:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
