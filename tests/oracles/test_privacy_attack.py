"""An attack on private sums: how much of a device's update a likelihood-ratio test tells.

The adversary knows everything but the victim's update and the honest devices' noise: all other
updates (they are zeros), and that the victim sent nothing or a canary of its choice. As many
devices as may drop out have done so, and the corrupt ones have added no noise. Noise is all but
Gaussian in the direction of the canary, so the score along it is the likelihood ratio's test.

From its error rates follows, with 95 % confidence, a lower bound on the parameter of Gaussian
differential privacy and on epsilon (Nasr et al. 2023, arXiv:2302.07956, Section 4).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import optimize, stats

from fedpress_protocols.masking import payload as payload_module
from fedpress_protocols.masking.payload import Payload
from fedpress_protocols.plan import PrivacyTerms, RoundPlan
from fedpress_protocols.privacy import skellam
from fedpress_protocols.privacy.grid import Grid
from tests.protocols.test_masked_payload import KNOWN, SHARED, SPEC, made_plan, secret_of


@pytest.fixture(autouse=True)
def _repeatable_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same noise in each run of a test, so that a test of chance cannot fail by chance."""
    repeats = SimpleNamespace(urandom=np.random.default_rng(5).bytes)
    monkeypatch.setattr(payload_module, "os", repeats)


CLAIM = {"clip": 0.3, "noise_multiplier": 1.0, "participations": 1, "epsilon": 5.0, "delta": 1e-5}
CORRUPT = 1


def payload() -> Payload:
    """Of 10 devices 5 survive at least, 1 of them corrupt."""
    plan = made_plan(SHARED, privacy=CLAIM)
    return Payload(plan, plan.public(SPEC, {"previous": KNOWN}))


def scores(made: Payload, canary: np.ndarray, runs: int, *, takes_part: bool) -> np.ndarray:
    """The sums' inner products with the canary's direction, in units of the clip."""
    plan = made.plan
    direction = made._map.project(canary)
    direction = direction / np.linalg.norm(direction)
    nothing = np.zeros(SPEC.size, np.float32)
    found = np.empty(runs)
    packing = made.packing
    for run in range(runs):
        words = np.zeros(packing.num_words, np.uint64)
        for device in range(plan.cohort.minimum - CORRUPT):
            update = canary if device == 0 and takes_part else nothing
            secret = secret_of(1000 * run + device)
            contribution = made.compress(update, 10, {}, secret)
            words += packing.pack(contribution.integers)
        values = packing.unpack(words)["values"]
        aggregate = made.decompress({"values": values}, plan.cohort.minimum)
        found[run] = aggregate.numbers @ direction * plan.cohort.minimum / CLAIM["clip"]
    return found


def epsilon_of_gaussian(mu: float, delta: float) -> float:
    """Dong, Roth and Su 2019, arXiv:1905.02383, Corollary 2.13."""

    def excess(epsilon: float) -> float:
        return float(
            stats.norm.cdf(-epsilon / mu + mu / 2)
            - math.exp(epsilon) * stats.norm.cdf(-epsilon / mu - mu / 2)
            - delta
        )

    return 0.0 if mu <= 0 or excess(0) < 0 else float(optimize.brentq(excess, 0, 200))


def least_epsilon(made: Payload, runs: int) -> float:
    """The 95 % lower bound on epsilon that `runs` attacks of either kind show."""
    size = made.vectors[0].length
    canary = made._map.lift(np.full(size, 3 * CLAIM["clip"] / math.sqrt(size))).dense()
    without = scores(made, canary, runs, takes_part=False)
    with_canary = scores(made, canary, runs, takes_part=True)
    half = runs // 2
    threshold = (np.mean(without[:half]) + np.mean(with_canary[:half])) / 2
    wrong = np.sum(without[half:] > threshold), np.sum(with_canary[half:] <= threshold)
    most = [stats.beta.ppf(0.975, each + 1, runs - half - each) for each in wrong]
    return epsilon_of_gaussian(-sum(map(stats.norm.ppf, most)), CLAIM["delta"])


def claim() -> float:
    return PrivacyTerms(**CLAIM).spent(1)


def _noise_halved(patch: pytest.MonkeyPatch) -> None:
    def noise(grid: Grid, secret: bytes) -> np.ndarray:
        return skellam.sample(grid.size, max(1, grid.variance // 4), secret)

    patch.setattr(Grid, "noise", noise)


def _clip_skipped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Grid, "rounded", lambda grid, numbers, secret: np.rint(numbers / grid.step).astype(np.int64)
    )


def _drop_outs_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RoundPlan, "noise_shares", property(lambda plan: plan.cohort.size))


def _corrupt_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RoundPlan, "noise_shares", property(lambda plan: 2 * plan.cohort.minimum))


BROKEN = (_noise_halved, _clip_skipped, _drop_outs_forgotten, _corrupt_forgotten)


def test_a_sum_tells_no_more_than_is_claimed() -> None:
    assert 2.5 < least_epsilon(payload(), 700) < claim()


@pytest.mark.parametrize("breaks", BROKEN)
def test_the_attack_finds_a_broken_build(
    breaks: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks(monkeypatch)
    assert least_epsilon(payload(), 700) > claim()


@pytest.mark.slow
def test_a_sum_tells_no_more_than_is_claimed_in_many_runs() -> None:
    assert 3.9 < least_epsilon(payload(), 20_000) < claim()
