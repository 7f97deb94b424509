"""The jobs that an attempt has come to: a function of the attempt, the same to every server."""

from __future__ import annotations

from fedpress_server.coordination.attempts import Attempt
from fedpress_server.storage.leases import Job
from fedpress_strategies import Strategy

BATCH = 64
"""Uploads that are added up together, in the order of their assignments."""


def jobs_of(attempt: Attempt, strategy: Strategy) -> list[Job]:
    """None while there is nothing to make. What is added up under masks is one sum already."""
    key, round_ = attempt.key, attempt.round
    if round_.phase != "folding":
        return []
    due = [Job(key, "fold")]
    num_staged = len(round_.staged)
    if num_staged > BATCH and strategy.divisible and not round_.is_masked:
        starts = range(0, num_staged, BATCH)
        stops = [min(start + BATCH, num_staged) for start in starts]
        sums = enumerate(zip(starts, stops, strict=True))
        due += [Job(key, "sum", batch, start, stop) for batch, (start, stop) in sums]
    return due
