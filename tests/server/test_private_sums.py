"""The server's noise in a sum: where it lies, how large it is, what it is drawn from."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpress_compression.fixed_point import FixedPoint
from fedpress_compression.linear import support_of
from fedpress_compression.tensors import ModelSpec, TensorSpec
from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan
from fedpress_protocols.plan import RoundPlan
from fedpress_protocols.privacy import gaussian
from fedpress_protocols.privacy.correlated import Correlation
from fedpress_server.aggregation.terms import RoundTerms
from fedpress_server.storage.payloads import LocalPayloads
from fedpress_strategies import from_config, private
from fedpress_strategies.private import NoisedSum
from fedpress_strategies.strategy import WeightedMean
from tests.protocols.test_masked_payload import plan_fields

SECRET = bytes(range(32))
WHOLE = {"id": "none"}
QUARTER, HALF = ({"id": "shared_support", "fraction": each} for each in (0.25, 0.5))
CORRELATION = Correlation(separation=3, rounds=4, weight=1.0, decay=1.0)
CORRELATED: dict[str, Any] = {"correlation": CORRELATION}


def terms_of(
    tmp_path: Path, size: int, *compressors: dict[str, Any], scale_bits: int = 30, **privacy: Any
) -> RoundTerms:
    spec = ModelSpec((TensorSpec("w", (size,)),))
    fields = plan_fields(
        WHOLE,
        lane="clear",
        masking=None,
        previous_model="a" * 64,
        spec=spec.digest,
        profiles=[
            {"name": f"p{number}", "compressor": each} for number, each in enumerate(compressors)
        ],
        fixed_point={"scale_bits": scale_bits, "max_abs": 0.3, "max_examples": 1},
        privacy={
            "lane": "central", "clip": 0.3, "noise_multiplier": 4.0, "participations": 1,
            "epsilon": 6.0, **privacy,
        },
    )  # fmt: skip
    if "adaptive" in privacy:
        fields["report"] = ["within-clip"]
    return RoundTerms(RoundPlan.model_validate(fields), spec, LocalPayloads(tmp_path))


def noise_of(terms: RoundTerms, *uploads: str, before: tuple[NoisedSum, ...] = ()) -> np.ndarray:
    """The noise in a mean of zeros."""
    points = terms.plan.fixed_point
    fixed = FixedPoint(points.scale_bits, points.max_abs, points.max_examples)
    mean = WeightedMean(terms.shared.size, fixed)
    return np.asarray(private.noised_mean(terms, mean, uploads, SECRET, before))


@pytest.mark.parametrize(
    "compressors",
    [[WHOLE], [QUARTER], [QUARTER, WHOLE], [HALF, QUARTER]],
    ids=["all", "a support", "a support and all", "two supports"],
)
def test_noise_lies_on_every_number_that_some_device_can_send_and_on_no_other(
    tmp_path: Path, compressors: list[dict[str, Any]]
) -> None:
    terms = terms_of(tmp_path, 64, *compressors)
    reached = set[int]()
    for profile in terms.plan.profiles:
        support = support_of(profile.compressor, terms.public)
        reached |= set(range(64) if support is None else support.tolist())
    assert set(np.flatnonzero(noise_of(terms, "a" * 64)).tolist()) == reached


def test_the_sum_itself_stays_as_it_was(tmp_path: Path) -> None:
    terms = terms_of(tmp_path, 8, WHOLE)
    mean = WeightedMean(8, FixedPoint(30, 0.3, 1))
    mean.sums.total[:] = np.arange(8) << 20
    noised = np.asarray(private.noised_mean(terms, mean, ["a" * 64], SECRET))
    expected = np.arange(8) * 2.0**-10 / 10 + noise_of(terms, "a" * 64)
    np.testing.assert_allclose(noised, expected, rtol=0, atol=1e-15)
    assert (mean.sums.total == np.arange(8) << 20).all()


@pytest.mark.parametrize("scale_bits", [8, 30])
@pytest.mark.parametrize("adaptive", [{}, {"adaptive": {"count_noise": 5.0}}])
def test_the_deviation_covers_the_clip_and_the_rounding_of_every_number(
    tmp_path: Path, scale_bits: int, adaptive: dict[str, Any]
) -> None:
    """In steps of 2**-8 the rounding of 40,000 numbers moves a sum more than the clip does."""
    terms = terms_of(tmp_path, 40_000, WHOLE, scale_bits=scale_bits, **adaptive)
    privacy = terms.plan.privacy
    assert privacy is not None
    sensitivity = 0.3 + math.sqrt(40_000) / 2 * 2.0**-scale_bits
    expected = privacy.update_multiplier * sensitivity / 10
    assert np.std(noise_of(terms, "a" * 64)) == pytest.approx(expected, rel=0.015)
    steps = private._deviation(terms.plan, privacy, 40_000) * 2.0**-scale_bits
    assert sensitivity < steps / privacy.update_multiplier < sensitivity + 1e-8


def test_correlated_noise_is_its_own_draw_and_parts_of_the_draws_before(tmp_path: Path) -> None:
    """C has 1, 1/2 and 3/8 in its first column, so that its inverse has 1, -1/2, -1/8, 1/4, and
    the noise of four rounds is drawn together."""
    terms = terms_of(tmp_path, 400, WHOLE, **CORRELATED)
    sums = [NoisedSum(terms.plan.digest, (digest * 64,)) for digest in "abcdef"]
    own = [noise_of(terms, *each.uploads) for each in sums]
    found = noise_of(terms, *sums[0].uploads, before=tuple(sums[1:]))
    expected = own[0] - own[1] / 2 - own[2] / 8 + own[3] / 4
    assert np.abs(found - expected).max() <= 3 * 2.0**-30 / 10
    first = noise_of(terms, *sums[0].uploads, before=tuple(sums[1:2]))
    assert np.abs(first - (own[0] - own[1] / 2)).max() <= 3 * 2.0**-30 / 10


@pytest.mark.parametrize("multiplier", [1.0, 4.0, 200.0])
@pytest.mark.parametrize("size", [1, 1000, 10**6, 10**10])
def test_draws_of_correlated_noise_are_fine_and_pay_for_their_rounding(
    tmp_path: Path, multiplier: float, size: int
) -> None:
    """Rounding 4 sums of `size` numbers, a half each, moves draws by `gain` of that twice. Steps
    are so fine that this costs a thousandth, up to a deviation of 2**34."""
    terms = terms_of(tmp_path, 4, WHOLE, noise_multiplier=multiplier, epsilon=30.0, **CORRELATED)
    plan, privacy = terms.plan, terms.plan.privacy
    assert privacy is not None
    fine, steps = private._drawn(plan, privacy, CORRELATION, size)
    deviation = private._deviation(plan, privacy, size)
    assert math.log2(steps) % 1 == 0
    assert steps >= 1
    twice = 2 * CORRELATION.gain * math.sqrt(CORRELATION.rounds * size) / 2
    paid = fine - deviation * steps
    assert twice <= paid / multiplier <= 1.2 * twice
    assert paid <= fine / 1000 or fine >= 2.0**34
    assert steps == 1 or paid >= fine / 3000 or fine < 2.0**35
    assert fine <= gaussian.MAX_DEVIATION


def test_a_seed_is_of_its_plan_its_uploads_its_secret_and_its_purpose() -> None:
    noised = NoisedSum("plan", ("a", "b", "c"))
    seed = private.noise_seed(noised, SECRET)
    assert len(seed) == gaussian.SECRET_BYTES
    assert len({seed[:16], seed[16:32], seed[32:48]}) == 3
    assert private.noise_seed(NoisedSum("plan", ("c", "a", "b")), SECRET) == seed
    others = [
        private.noise_seed(NoisedSum("other", noised.uploads), SECRET),
        private.noise_seed(NoisedSum("plan", ("a", "b")), SECRET),
        private.noise_seed(NoisedSum("plan", ("a", "b", "c", "c")), SECRET),
        private.noise_seed(noised, bytes(32)),
        private.noise_seed(noised, SECRET, private._COUNT_DOMAIN),
    ]
    halves = [each[start : start + 24] for each in (seed, *others) for start in (0, 24)]
    assert len(set(halves)) == 12


def test_noise_of_a_seed_is_the_same_in_every_release(tmp_path: Path) -> None:
    """A server that is upgraded within a task draws the noise of the rounds before again."""
    seeds = [private.noise_seed(NoisedSum("plan", (each,)), SECRET) for each in "abc"]
    assert seeds[0].hex() == FROZEN_SEED
    for correlation, frozen in zip(({}, CORRELATED), FROZEN, strict=True):
        terms = terms_of(tmp_path, 4, WHOLE, **correlation)
        assert terms.plan.privacy is not None
        noise = private._noise(terms.plan, terms.plan.privacy, 4, seeds)
        assert noise.tolist() == frozen


FROZEN_SEED = (
    "69eef4b33690456e040656615357d8593db722d16807af79"
    "cca8b48199e6ea55b00ae9ee87f254b5cf4b3546204aaaf0"
)
FROZEN = [
    [797224028, -3843785271, -1196606609, 67880473],
    [1357204081, -3925975409, -1580330757, -391311122],
]


def adapted(terms: RoundTerms, within: list[float], upload: str = "a" * 64) -> float:
    clip = private.adapted_clip(terms.plan, within, [upload], SECRET, 0.3)
    assert clip is not None
    return clip


def test_the_clip_after_moves_by_the_share_of_bits_within_it(tmp_path: Path) -> None:
    """By clip * exp(-rate (share - quantile)): Andrew et al. 2021, arXiv:1905.03871."""
    adaptive = {"count_noise": 2.1, "quantile": 0.7, "learning_rate": 0.5}
    terms = terms_of(tmp_path, 4, WHOLE, adaptive=adaptive)
    nobody = adapted(terms, [])
    for within, share in [([1.0] * 3, 0.15), ([0.0] * 3, -0.15), ([0.5, 0.49], 0.0)]:
        expected = nobody * math.exp(-0.5 * share)
        assert adapted(terms, within) == pytest.approx(expected, rel=2e-5)
    noises = [
        -math.log(adapted(terms, [], f"{number:064}") / 0.3) / 0.5 + 0.7 - 0.5
        for number in range(400)
    ]
    assert np.mean(noises) == pytest.approx(0.0, abs=0.04)
    assert np.std(noises) == pytest.approx(0.21, rel=0.1)


def test_a_clip_that_is_fixed_moves_nowhere(tmp_path: Path) -> None:
    terms = terms_of(tmp_path, 4, WHOLE)
    assert private.adapted_clip(terms.plan, [1.0], ["a" * 64], SECRET, 0.3) is None


def test_sums_whose_rounding_is_much_of_the_clip_are_refused(tmp_path: Path) -> None:
    """Of `size` numbers in steps s it is sqrt(size) / 2 * s, and may be 2 % of the clip."""
    strategy = from_config({"id": "fedavg"})
    size = int((2 * 0.02 * 0.3 * 2.0**12) ** 2)
    private.check_private_strategy(terms_of(tmp_path, size, WHOLE, scale_bits=12), strategy)
    with pytest.raises(IncompatiblePlan, match=r"a clip of 0.3 is too small for sums of"):
        private.check_private_strategy(
            terms_of(tmp_path, size + 50, WHOLE, scale_bits=12), strategy
        )


def test_draws_of_correlated_noise_that_are_too_large_are_refused(tmp_path: Path) -> None:
    """What pays for their rounding comes on top of noise that could be drawn by itself."""
    strategy = from_config({"id": "fedavg"})
    largest = (1 - 1e-9) * gaussian.MAX_DEVIATION / (0.3 * 2.0**30 + 1)
    plain, small, large = (
        terms_of(tmp_path, 4, WHOLE, noise_multiplier=multiplier, **more)
        for multiplier, more in [(largest, {}), (0.9 * largest, CORRELATED), (largest, CORRELATED)]
    )
    private.check_private_strategy(plain, strategy)
    private.check_private_strategy(small, strategy)
    with pytest.raises(ConfigurationError, match="choose a clip and a noise_multiplier nearer"):
        private.check_private_strategy(large, strategy)


@pytest.mark.parametrize("strategy", ["median", "krum"])
def test_a_strategy_that_looks_at_single_updates_is_refused(tmp_path: Path, strategy: str) -> None:
    with pytest.raises(IncompatiblePlan, match="the noise of the central lane is for their sum"):
        private.check_private_strategy(terms_of(tmp_path, 4, WHOLE), from_config({"id": strategy}))
