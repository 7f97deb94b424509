"""Gaussian noise rounded to integers, and the exact cost of Gaussian noise."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from scipy import special, stats

from fedpress_compression.compressors.none import Uncompressed
from fedpress_compression.compressors.per_tensor import PerTensor
from fedpress_compression.compressors.quantize import Quantize
from fedpress_compression.compressors.topk import TopK
from fedpress_compression.linear import has_public_support
from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.plan import PrivacyTerms, RoundPlan
from fedpress_protocols.privacy import accounting, gaussian
from tests.protocols.test_masked_payload import secret_of

# dp-accounting 0.6.0: the privacy loss distribution of the Gaussian mechanism of the noise
# multiplier (connect the dots, at intervals of 1e-4), composed so many times, epsilon at delta; two
# settings of the literature, and 20 drawn at random.
PLD = [
    (1.0, 1, 1e-5, 4.377178),
    (4.0, 10, 1e-6, 3.747218),
    (3.4437, 1, 1e-05, 1.091934),
    (6.1634, 1, 1e-08, 0.819203),
    (1.022, 150, 1e-06, 127.928596),
    (9.7651, 1, 1e-07, 0.458451),
    (6.6278, 10, 1e-06, 2.141131),
    (9.5332, 1, 1e-06, 0.417672),
    (3.2013, 1, 1e-06, 1.349514),
    (9.765, 3, 1e-07, 0.820192),
    (4.2703, 10, 1e-08, 4.146643),
    (10.2616, 10, 1e-05, 1.165735),
    (6.4667, 3, 1e-07, 1.271997),
    (6.1042, 1, 0.0001, 0.480669),
    (10.2132, 1, 1e-06, 0.388006),
    (7.2105, 10, 0.0001, 1.461823),
    (2.9854, 40, 0.0001, 9.549213),
    (4.0279, 40, 1e-07, 8.957006),
    (3.4121, 10, 1e-08, 5.308477),
    (1.708, 40, 1e-06, 23.816251),
    (6.6114, 40, 1e-06, 4.646351),
    (2.4247, 3, 1e-08, 3.986518),
]


@pytest.mark.parametrize(("noise", "count", "delta", "epsilon"), PLD)
def test_epsilon_of_gaussian_noise_is_that_of_its_loss_distribution(
    noise: float, count: int, delta: float, epsilon: float
) -> None:
    cost = accounting.gaussian_participation(noise).times(count)
    assert cost.epsilon(delta) == pytest.approx(epsilon, rel=1e-4)


@pytest.mark.parametrize("mu", [1e-3, 0.1, 1.0, 7.5, 60.0, 300.0])
@pytest.mark.parametrize("delta", [1e-10, 1e-5, 0.01])
def test_epsilon_of_gaussian_noise_solves_its_curve(mu: float, delta: float) -> None:
    epsilon = accounting.gaussian_epsilon(mu, delta)
    first, second = epsilon / mu - mu / 2, epsilon / mu + mu / 2
    log_second = epsilon + stats.norm.logsf(second)
    exact = math.exp(stats.norm.logsf(first)) - math.exp(log_second)
    assert exact <= delta
    assert exact == pytest.approx(delta, rel=0.02) or epsilon == 0


def test_gaussian_and_skellam_costs_add_up_by_renyi() -> None:
    one, other = accounting.gaussian_participation(2.0), accounting.skellam_participation(3.0)
    both = accounting.together([one.times(4), other.times(2)])
    alone = accounting.together([one.times(4), accounting.gaussian_participation(3.0).times(2)])
    assert alone.skellam is None
    assert other.skellam is not None
    assert both.epsilon(1e-5) > alone.epsilon(1e-5) > one.times(4).epsilon(1e-5)
    curve = 4 * accounting.gaussian(2.0) + 2 * other.skellam
    assert both.epsilon(1e-5) == pytest.approx(accounting.epsilon_of(curve, 1e-5))


def test_exact_accounting_of_gaussian_noise_spends_less_than_its_renyi_curve() -> None:
    terms = {"clip": 1.0, "noise_multiplier": 2.1, "participations": 10, "epsilon": 8.0}
    assert PrivacyTerms(lane="central", **terms).spent(10) < 0.95 * PrivacyTerms(**terms).spent(10)


@pytest.mark.parametrize("deviation", [1.0, 2.7, 1000.3])
def test_values_have_the_distribution_of_a_rounded_normal_variable(deviation: float) -> None:
    values = gaussian.sample(200_000, deviation, secret_of(1))
    edges = np.unique(np.round(np.linspace(-2.5 * deviation, 2.5 * deviation, 40)))
    cumulative = stats.norm.cdf((edges + 0.5) / deviation)
    probability = np.diff(np.concatenate([[0], cumulative, [1]]))
    counts = np.bincount(np.searchsorted(edges, values, side="left"), minlength=edges.size + 1)
    assert stats.chisquare(counts, probability * values.size).pvalue > 1e-4
    assert abs(values).max() <= gaussian.REACH * deviation + 0.5


def test_values_do_not_depend_on_how_well_quantiles_are_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another mathematical library, whose error is as large as is allowed for."""
    expected = gaussian.sample(20_000, 2.0**33 + 0.125, secret_of(2))
    exact = gaussian._quantile

    def worse(tail: np.ndarray) -> np.ndarray:
        sign = np.where(np.arange(tail.size) % 2, 1, -1)
        return exact(tail) * (1 + sign * 0.8 * gaussian._ERROR)

    monkeypatch.setattr(gaussian, "_quantile", worse)
    np.testing.assert_array_equal(gaussian.sample(20_000, 2.0**33 + 0.125, secret_of(2)), expected)


def test_every_value_is_decided_by_exact_tails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = gaussian.sample(300, 12.5, secret_of(3))
    monkeypatch.setattr(gaussian, "_RARE", 2**64 - 1)
    np.testing.assert_array_equal(gaussian.sample(300, 12.5, secret_of(3)), expected)


@pytest.mark.parametrize("exact", [1, 2**100, 2**190, 2**250, 2**255 - 1])
def test_rare_values_lie_between_their_tails(exact: int) -> None:
    deviation = 1000.0
    k = gaussian._magnitude(exact, deviation)
    with localcontext(gaussian._DIGITS):
        tails = [gaussian._upper_tail(Decimal(max(0, 2 * k + d)) / 2000) for d in (1, -1)]
        assert tails[0] <= Decimal(exact) / Decimal(2**256) <= tails[1]
    assert k <= gaussian.REACH * deviation


@pytest.mark.parametrize("z", ["0.05", "1", "4.5", "12", "18.9"])
def test_exact_tails_are_those_of_the_normal_distribution(z: str) -> None:
    with localcontext(gaussian._DIGITS):
        tail = float(gaussian._upper_tail(Decimal(z)))
    assert tail == pytest.approx(0.5 * special.erfc(float(z) / math.sqrt(2)), rel=1e-9)


def test_a_secret_gives_the_same_values_whatever_the_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = gaussian.sample(1000, 50.0, secret_of(1))
    monkeypatch.setattr(gaussian, "_CHUNK", 64)
    np.testing.assert_array_equal(gaussian.sample(1000, 50.0, secret_of(1)), whole)
    assert whole[:8].tolist() == FROZEN


FROZEN = [59, -41, -157, -30, -29, 60, 98, -57]


@pytest.mark.parametrize("deviation", [0.5, 2.0**36 * 1.01, math.inf, math.nan])
def test_deviations_out_of_range_are_refused(deviation: float) -> None:
    with pytest.raises(ConfigurationError, match="expected 1 to"):
        gaussian.sample(3, deviation, secret_of(0))


def central_plan(**changes: Any) -> RoundPlan:
    fields: dict[str, Any] = {
        "task": "t",
        "round": 1,
        "attempt": 1,
        "model": "a" * 64,
        "spec": "b" * 64,
        "profiles": [{"name": "a", "compressor": {"id": "quantize"}}],
        "cohort": {"size": 8, "minimum": 4},
        "deadline": 0.0,
        "fixed_point": {"scale_bits": 30, "max_abs": 1.0, "max_examples": 1},
        "public_seed": "0" * 64,
        "privacy": CENTRAL,
    }
    return RoundPlan.model_validate({**fields, **changes})


DENSE = {"id": "quantize"}
CENTRAL = {
    "lane": "central",
    "clip": 1.0,
    "noise_multiplier": 20.0,
    "participations": 1,
    "epsilon": 1.0,
    "delta": 1e-5,
}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fixed_point": {"scale_bits": 30, "max_abs": 1.0, "max_examples": 2}}, "must be 1"),
        ({"fixed_point": {"scale_bits": 30, "max_abs": 2.0, "max_examples": 1}}, "within a norm"),
        (
            {
                "fixed_point": {"scale_bits": 38, "max_abs": 1.0, "max_examples": 1},
                "cohort": {"size": 2**24, "minimum": 4},
                "privacy": {**CENTRAL, "noise_multiplier": 0.22, "epsilon": 30},
            },
            "overflow",
        ),
        (
            {
                "profiles": [
                    {"name": "a", "compressor": {"id": "ef21", "inner": {"id": "quantize"}}}
                ]
            },
            "sums without noise",
        ),
    ],
)
def test_a_clear_plan_that_cannot_be_private_is_refused(
    changes: dict[str, Any], reason: str
) -> None:
    assert central_plan().privacy is not None
    with pytest.raises(ValidationError, match=reason):
        central_plan(**changes)


def test_parts_of_a_model_have_a_public_support_if_each_has() -> None:
    assert has_public_support(PerTensor(Quantize(8), Uncompressed()))
    assert not has_public_support(PerTensor(TopK(0.1), Uncompressed()))


def test_what_is_sent_by_nobody_costs_nothing() -> None:
    assert accounting._gaussian_delta(1.0, 0.0) == 0.0
