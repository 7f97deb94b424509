"""Probes of few clients: what their number lets be told from noise."""

from __future__ import annotations

import numpy as np
import pytest

from fedpress_compression.update import Update
from fedpress_strategies.policies.probing import Probe

SIZE = 2000


def progress(clients: int, common: float) -> float | None:
    """The progress that a probe tells of so many clients of either kind, whose updates have a part
    `common` of their squared norm in one direction, the rest each in its own."""
    probe = Probe(SIZE)
    for client in range(2 * clients):
        update = np.zeros(SIZE, np.float32)
        update[0] = np.sqrt(common)
        update[1 + client] = np.sqrt(1 - common)
        probe.add(Update.from_dense(update), 10, 100, is_reference=client % 2 == 0)
    comparison = probe.comparison()
    assert comparison is not None
    return comparison.progress


@pytest.mark.parametrize(("clients", "common"), [(2, 0.09), (3, 0.05), (5, 0.03), (20, 0.006)])
def test_a_mean_that_is_within_the_noise_of_its_pairs_tells_nothing(
    clients: int, common: float
) -> None:
    assert progress(clients, common) is None


@pytest.mark.parametrize(("clients", "common"), [(2, 0.11), (3, 0.07), (5, 0.04), (20, 0.01)])
def test_the_more_clients_the_smaller_a_mean_is_told(clients: int, common: float) -> None:
    assert progress(clients, common) == pytest.approx(1.0)
