"""An attack on private sums: how much of a device's update a likelihood-ratio test tells.

The adversary knows everything but the victim's update and the honest devices' noise: all other
updates (they are zeros), and that the victim sent nothing or a canary of its choice. As many
devices as may drop out have done so, and the corrupt ones have added no noise. Noise is all but
Gaussian in the direction of the canary, so the score along it is the likelihood ratio's test.

From its error rates follows, with 95 % confidence, a lower bound on the parameter of Gaussian
differential privacy and on epsilon (Nasr et al. 2023, arXiv:2302.07956, Section 4).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import optimize, stats

from fedpress_client import channels as channels_module
from fedpress_client.channels import PrivateChannel
from fedpress_client.ledger import Ledger
from fedpress_compression.compressor import Knowledge
from fedpress_compression.tensors import ModelSpec, Vector
from fedpress_protocols.masking import payload as payload_module
from fedpress_protocols.masking.payload import Payload
from fedpress_protocols.plan import PrivacyTerms, RoundPlan
from fedpress_protocols.privacy import discrete_gaussian, gaussian, skellam
from fedpress_protocols.privacy.clipping import Bounds, Shares
from fedpress_protocols.privacy.correlated import Correlation
from fedpress_protocols.privacy.grid import Grid, NarrowGrid
from fedpress_server.aggregation.accumulate import (
    AggregationJob,
    StagedUpload,
    sum_uploads,
)
from fedpress_server.aggregation.terms import RoundTerms
from fedpress_strategies import private
from fedpress_strategies.fedavg import FEDAVG
from fedpress_strategies.strategy import AggregationSpace
from tests.protocols.test_masked_payload import KNOWN, SHARED, SPEC, made_plan, secret_of


@pytest.fixture(autouse=True)
def _repeatable_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same noise in each run of a test, so that a test of chance cannot fail by chance."""
    repeats = SimpleNamespace(urandom=np.random.default_rng(5).bytes)
    monkeypatch.setattr(payload_module, "os", repeats)
    monkeypatch.setattr(channels_module, "os", repeats)


CLAIM = {"clip": 0.3, "noise_multiplier": 1.0, "participations": 1, "epsilon": 5.0, "delta": 1e-5}
CORRUPT = 1


def payload(noise: str = "skellam") -> Payload:
    """Of 10 devices 5 survive at least, 1 of them corrupt."""
    plan = made_plan(SHARED, privacy={**CLAIM, "noise": noise})
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
    """Dong, Roth and Su 2019, arXiv:1905.02383, Corollary 2.13; infinite beyond 200."""

    def excess(epsilon: float) -> float:
        return float(
            stats.norm.cdf(-epsilon / mu + mu / 2)
            - math.exp(epsilon) * stats.norm.cdf(-epsilon / mu - mu / 2)
            - delta
        )

    if mu <= 0 or excess(0) < 0:
        return 0.0
    return math.inf if excess(200) > 0 else float(optimize.brentq(excess, 0, 200))


def least_epsilon(made: Payload, runs: int) -> float:
    """The 95 % lower bound on epsilon that `runs` attacks of either kind show."""
    size = made.vectors[0].length
    canary = made._map.lift(np.full(size, 3 * CLAIM["clip"] / math.sqrt(size))).dense()
    without = scores(made, canary, runs, takes_part=False)
    return shown(without, scores(made, canary, runs, takes_part=True))


def shown(without: np.ndarray, with_canary: np.ndarray) -> float:
    """The 95 % lower bound on epsilon that scores without the canary and with it show."""
    runs = without.size
    half = runs // 2
    threshold = (np.mean(without[:half]) + np.mean(with_canary[:half])) / 2
    wrong = np.sum(without[half:] > threshold), np.sum(with_canary[half:] <= threshold)
    most = [stats.beta.ppf(0.975, each + 1, runs - half - each) for each in wrong]
    return epsilon_of_gaussian(-sum(map(stats.norm.ppf, most)), CLAIM["delta"])


def claim(lane: str = "distributed", noise: str = "skellam") -> float:
    return PrivacyTerms.model_validate({**CLAIM, "lane": lane, "noise": noise}).spent(1)


def _noise_halved(patch: pytest.MonkeyPatch) -> None:
    def noise(grid: Grid, secret: bytes) -> np.ndarray:
        return skellam.sample(grid.size, max(1, grid.variance // 4), secret)

    def narrow(grid: NarrowGrid, secret: bytes) -> np.ndarray:
        return discrete_gaussian.sample(grid.size, max(1, grid.variance // 4), secret)

    patch.setattr(Grid, "noise", noise)
    patch.setattr(NarrowGrid, "noise", narrow)


def _clip_skipped(patch: pytest.MonkeyPatch) -> None:
    for grid in (Grid, NarrowGrid):
        patch.setattr(
            grid,
            "rounded",
            lambda grid, numbers, secret: np.rint(numbers / grid.step).astype(np.int64),
        )


def _drop_outs_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RoundPlan, "noise_shares", property(lambda plan: plan.cohort.size))


# A test of a right build makes no fewer runs than those that find a broken one.
BROKEN = ((_noise_halved, 200), (_clip_skipped, 150), (_drop_outs_forgotten, 500))


@pytest.mark.parametrize(("noise", "runs"), [("skellam", 500), ("discrete_gaussian", 700)])
def test_a_sum_tells_no_more_than_is_claimed(noise: str, runs: int) -> None:
    assert 2.0 < least_epsilon(payload(noise), runs) < claim(noise=noise)


@pytest.mark.parametrize(("breaks", "runs"), BROKEN)
def test_the_attack_finds_a_broken_build(
    breaks: Callable[[pytest.MonkeyPatch], None], runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks(monkeypatch)
    assert least_epsilon(payload(), runs) > claim()


@pytest.mark.parametrize("breaks", [breaks for breaks, _ in BROKEN])
def test_the_attack_finds_a_broken_build_with_discrete_gaussian_noise(
    breaks: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks(monkeypatch)
    assert least_epsilon(payload("discrete_gaussian"), 700) > claim(noise="discrete_gaussian")


@pytest.mark.slow
def test_a_sum_tells_no_more_than_is_claimed_in_many_runs() -> None:
    assert 3.9 < least_epsilon(payload(), 20_000) < claim()


# Noise in the clear lane


PER_TENSOR = (("w", 2.0), ("b", 0.5), ("conv", 1.0))


def clear_scores(lane: str, runs: int, *, takes_part: bool, per_tensor: Shares = ()) -> np.ndarray:
    """As `scores`, of means that a server makes of the bodies of real ledgers: of two devices in
    the central lane, whose bodies are without noise and the same in all runs; of the victim alone
    in the local lane, where the server is the adversary. The canary is three times as long as is
    allowed, in each part that has a bound."""
    devices = 2 if lane == "central" else 1
    plan = made_plan(
        {"id": "error_feedback", "inner": {**SHARED, "clip": 1.0}},
        privacy={**CLAIM, "lane": lane, "per_tensor": per_tensor},
        lane="clear",
        masking=None,
        cohort={"size": devices, "minimum": devices},
        fixed_point={
            "scale_bits": 30,
            "max_abs": 0.3 if lane == "central" else 8,
            "max_examples": 1,
        },
    )
    bodies: dict[str, bytes] = {}
    payloads: Any = SimpleNamespace(get=bodies.__getitem__)
    terms = RoundTerms(plan, SPEC, payloads)
    knowledge: dict[Knowledge, Vector] = {"previous": KNOWN}
    vars(terms)["public"] = plan.public(SPEC, knowledge)
    support = plan.profiles[0].compressor.lossy.support(terms.public)
    canary = np.zeros(SPEC.size, np.float32)
    shares, whole = dict(per_tensor), math.hypot(*(share for _, share in per_tensor))
    for name, where in SPEC.slices.items() if per_tensor else {"": slice(0, SPEC.size)}.items():
        part = support[(support >= where.start) & (support < where.stop)]
        length = CLAIM["clip"] * (shares[name] / whole if per_tensor else 1)
        canary[part] = 3 * length / math.sqrt(part.size)
    direction = canary / np.linalg.norm(canary)
    updates = [canary if takes_part else np.zeros_like(canary), np.zeros_like(canary)]
    found, rng = np.empty(runs), np.random.default_rng([takes_part, 3])

    def sent(update: np.ndarray) -> StagedUpload:
        assignment: Any = SimpleNamespace(assignment="a", plan=plan, profile="only")
        _, body = Ledger("digits", "me").prepare(
            assignment, update, 5, SPEC, rng, knowledge=knowledge
        )
        assert body is not None
        digest = hashlib.sha256(body).hexdigest()
        bodies[digest] = body
        return StagedUpload(digest, digest, "only")

    uploads = tuple(sent(update) for update in updates[:devices])
    for run in range(runs):
        if lane == "local":
            uploads = (sent(updates[0]),)
        job = AggregationJob(terms, FEDAVG, None, uploads, noise_secret=rng.bytes(32))
        mean = sum_uploads(job, payloads, AggregationSpace(), {}).delta
        found[run] = mean @ direction * devices / CLAIM["clip"]
    return found


def least_epsilon_in_clear(lane: str, runs: int, per_tensor: Shares = ()) -> float:
    without = clear_scores(lane, runs, takes_part=False, per_tensor=per_tensor)
    return shown(without, clear_scores(lane, runs, takes_part=True, per_tensor=per_tensor))


def _gaussian_halved(patch: pytest.MonkeyPatch) -> None:
    exact = gaussian.sample
    patch.setattr(
        gaussian, "sample", lambda size, deviation, secret: exact(size, deviation / 2, secret)
    )


def _noise_missing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gaussian, "sample", lambda size, deviation, secret: np.zeros(size, np.int64))


def _noise_repeated(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(private, "noise_seed", lambda *about: bytes(48))


def _norm_unbounded(patch: pytest.MonkeyPatch) -> None:
    def compress(channel: PrivateChannel, *what: Any) -> Any:
        channel.clear.report = (0.0,) * len(channel.clear.plan.report)
        symbols, after = channel.clear.compress(*what)
        channel.body, channel.sent = channel.clear.body, channel.clear.sent
        return symbols, after

    patch.setattr(PrivateChannel, "compress", compress)


@pytest.mark.parametrize("lane", ["central", "local"])
def test_a_noised_clear_sum_tells_no_more_than_is_claimed(lane: str) -> None:
    assert 2.0 < least_epsilon_in_clear(lane, 500 if lane == "central" else 300) < claim(lane)


BROKEN_IN_CLEAR = (
    ("central", _gaussian_halved, 250),
    ("central", _noise_missing, 100),
    ("central", _noise_repeated, 100),
    ("central", _norm_unbounded, 100),
    ("local", _gaussian_halved, 150),
    ("local", _noise_missing, 60),
    ("local", _clip_skipped, 100),
)


@pytest.mark.parametrize(("lane", "breaks", "runs"), BROKEN_IN_CLEAR)
def test_the_attack_finds_a_broken_build_in_clear(
    lane: str,
    breaks: Callable[[pytest.MonkeyPatch], None],
    runs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    breaks(monkeypatch)
    assert least_epsilon_in_clear(lane, runs) > claim(lane)


def _each_tensor_clipped_to_the_whole(patch: pytest.MonkeyPatch) -> None:
    exact = Bounds.of.__func__  # type: ignore[attr-defined]

    def of(cls: type[Bounds], clip: float, shares: Shares, spec: ModelSpec) -> Bounds:
        bounds: Bounds = exact(cls, clip, shares, spec)
        return replace(bounds, clips=np.full(bounds.clips.size, clip))

    patch.setattr(Bounds, "of", classmethod(of))


def _one_tensor_not_clipped(patch: pytest.MonkeyPatch) -> None:
    exact = Bounds.norms
    patch.setattr(Bounds, "norms", lambda bounds, update: exact(bounds, update) * [0, 1, 1])


def test_tensors_with_clips_of_their_own_tell_no_more_than_is_claimed() -> None:
    assert 2.0 < least_epsilon_in_clear("central", 500, PER_TENSOR) < claim("central")


@pytest.mark.parametrize(
    ("breaks", "runs"),
    [
        (_norm_unbounded, 100),
        (_each_tensor_clipped_to_the_whole, 400),
        (_one_tensor_not_clipped, 150),
        (_gaussian_halved, 250),
    ],
)
def test_the_attack_finds_a_broken_build_with_clips_of_tensors(
    breaks: Callable[[pytest.MonkeyPatch], None], runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks(monkeypatch)
    assert least_epsilon_in_clear("central", runs, PER_TENSOR) > claim("central")


# Correlated noise, over all rounds of a task

CORRELATION = Correlation(separation=3, rounds=7, weight=1.9, decay=1.05)
CORRELATED = {**CLAIM, "lane": "central", "participations": 2,
              "correlation": CORRELATION.model_dump(),
              "noise_multiplier": 1.8, "epsilon": 7.0}  # fmt: skip
ROUNDS, TAKEN = 7, (1, 4)


def correlated_plan(number: int) -> RoundPlan:
    return made_plan(
        {"id": "error_feedback", "inner": {"id": "none"}},
        privacy=CORRELATED,
        round=number,
        lane="clear",
        masking=None,
        cohort={"size": 2, "minimum": 2},
        fixed_point={"scale_bits": 30, "max_abs": 0.3, "max_examples": 1},
    )


def correlated_releases(runs: int, *, takes_part: bool) -> np.ndarray:
    """By run and round, what the server released along the canary's direction."""
    bodies: dict[str, bytes] = {}
    payloads: Any = SimpleNamespace(get=bodies.__getitem__)
    plans = [correlated_plan(number) for number in range(1, ROUNDS + 1)]
    each_terms = [RoundTerms(plan, SPEC, payloads) for plan in plans]
    for plan, terms in zip(plans, each_terms, strict=True):
        vars(terms)["public"] = plan.public(SPEC, {})
    direction = np.full(SPEC.size, 1 / math.sqrt(SPEC.size))
    canary = (3 * CLAIM["clip"] * direction).astype(np.float32)
    nothing = np.zeros_like(canary)
    rng = np.random.default_rng([takes_part, 4])

    def sent(number: int, update: np.ndarray) -> StagedUpload:
        assignment: Any = SimpleNamespace(assignment="a", plan=plans[number], profile="only")
        _, body = Ledger("digits", "me").prepare(assignment, update, 5, SPEC, rng, knowledge={})
        assert body is not None
        digest = hashlib.sha256(body).hexdigest()
        bodies[digest] = body
        return StagedUpload(digest, digest, "only")

    uploads = []
    for number in range(ROUNDS):
        victim = canary if takes_part and number in TAKEN else nothing
        uploads.append((sent(number, victim), sent(number, nothing)))
    released = np.empty((runs, ROUNDS))
    for run in range(runs):
        secret, before = rng.bytes(32), tuple[private.NoisedSum, ...]()
        for number, (terms, staged) in enumerate(zip(each_terms, uploads, strict=True)):
            job = AggregationJob(
                terms, FEDAVG, None, staged, noise_secret=secret, noised_before=before
            )
            mean = sum_uploads(job, payloads, AggregationSpace(), {}).delta
            released[run, number] = mean @ direction * 2 / CLAIM["clip"]
            digests = tuple(each.digest for each in staged)
            before = (private.NoisedSum(plans[number].digest, digests), *before)
    return released


def least_epsilon_of_correlated(runs: int) -> float:
    """The attacker learns the linear score of a whole task from half of the runs, so that it is the
    best one whatever the noise's correlation is, and of a broken build, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gaussian, "sample", lru_cache(2 * ROUNDS)(gaussian.sample))  # for speed
        without = correlated_releases(runs, takes_part=False)
        with_canary = correlated_releases(runs, takes_part=True)
    half = runs // 2
    spread = np.cov(without[:half].T) + 1e-6 * np.eye(ROUNDS)
    shift = with_canary[:half].mean(axis=0) - without[:half].mean(axis=0)
    score = np.linalg.solve(spread, shift)
    return shown(without @ score, with_canary @ score)


def test_all_rounds_of_correlated_noise_tell_no_more_than_is_claimed() -> None:
    assert 2.0 < least_epsilon_of_correlated(200) < PrivacyTerms(**CORRELATED).spent(2)


def _accounted_as_if_independent(patch: pytest.MonkeyPatch) -> None:
    """The noise of a claim that forgets what a column of C has below its first entry."""
    exact, norm = gaussian.sample, CORRELATION.sensitivity
    patch.setattr(
        gaussian, "sample", lambda size, deviation, secret: exact(size, deviation / norm, secret)
    )


def _draws_repeated(patch: pytest.MonkeyPatch) -> None:
    """Each round takes off its own draw again, and not those of the rounds before."""
    exact = private._noise
    patch.setattr(
        private,
        "_noise",
        lambda plan, terms, size, seeds: exact(plan, terms, size, [seeds[0]] * len(seeds)),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("breaks", "runs"),
    [
        (_gaussian_halved, 250),
        (_noise_missing, 100),
        (_accounted_as_if_independent, 500),
        (_draws_repeated, 100),
    ],
)
def test_the_attack_finds_a_broken_build_of_correlated_noise(
    breaks: Callable[[pytest.MonkeyPatch], None], runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimed = PrivacyTerms(**CORRELATED).spent(2)
    breaks(monkeypatch)
    assert least_epsilon_of_correlated(runs) > claimed


# An adaptive clip: the sum and the count of a round together

ADAPTIVE = {**CLAIM, "lane": "central", "adaptive": {"count_noise": 0.6}}
"""The count spends two thirds of a participation, so that an attack on it alone shows much."""


def adaptive_releases(runs: int, *, takes_part: bool) -> np.ndarray:
    """By run, what the server released of a round: the sum along the canary's direction, and the
    count that its next clip tells, in devices.

    The victim's update is far beyond the clip, so that its bit is 0; without it there is neither.
    """
    plan = made_plan(
        {"id": "error_feedback", "inner": {"id": "none"}},
        privacy=ADAPTIVE,
        report=("within-clip",),
        lane="clear",
        masking=None,
        cohort={"size": 2, "minimum": 2},
        fixed_point={"scale_bits": 30, "max_abs": 0.3, "max_examples": 1},
    )
    bodies: dict[str, bytes] = {}
    payloads: Any = SimpleNamespace(get=bodies.__getitem__)
    terms = RoundTerms(plan, SPEC, payloads)
    vars(terms)["public"] = plan.public(SPEC, {})
    direction = np.full(SPEC.size, 1 / math.sqrt(SPEC.size))
    canary = (3 * CLAIM["clip"] * direction).astype(np.float32)
    rng = np.random.default_rng([takes_part, 6])
    staged = []
    for update in (np.zeros_like(canary), canary)[: 1 + takes_part]:
        assignment: Any = SimpleNamespace(assignment="a", plan=plan, profile="only")
        _, body = Ledger("digits", "me").prepare(assignment, update, 5, SPEC, rng, knowledge={})
        assert body is not None
        digest = hashlib.sha256(body).hexdigest()
        bodies[digest] = body
        staged.append(StagedUpload(digest, digest, "only"))
    released = np.empty((runs, 2))
    for run in range(runs):
        job = AggregationJob(
            terms, FEDAVG, None, tuple(staged), noise_secret=rng.bytes(32), first_clip=0.3
        )
        summed = sum_uploads(job, payloads, AggregationSpace(), {})
        assert summed.clip is not None
        share = 0.5 - math.log(summed.clip / 0.3) / 0.2
        released[run] = summed.delta @ direction * 2 / CLAIM["clip"], 2 * share
    return released


def least_epsilon_of_adaptive(runs: int) -> float:
    """As `least_epsilon_of_correlated`; values that the range of a share cuts off tell less."""
    without = adaptive_releases(runs, takes_part=False)
    with_canary = adaptive_releases(runs, takes_part=True)
    half = runs // 2
    spread = np.cov(without[:half].T) + 1e-6 * np.eye(2)
    shift = with_canary[:half].mean(axis=0) - without[:half].mean(axis=0)
    score = np.linalg.solve(spread, shift)
    return shown(without @ score, with_canary @ score)


def test_sum_and_count_of_an_adaptive_clip_tell_no_more_than_is_claimed() -> None:
    assert 1.5 < least_epsilon_of_adaptive(300) < PrivacyTerms.model_validate(ADAPTIVE).spent(1)


def _count_without_noise(patch: pytest.MonkeyPatch) -> None:
    exact = gaussian.sample
    patch.setattr(
        gaussian,
        "sample",
        lambda size, deviation, secret: (
            np.zeros(1, np.int64) if size == 1 else exact(size, deviation, secret)
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("breaks", "runs"),
    [
        (_count_without_noise, 150),
        (_gaussian_halved, 400),
        (_noise_missing, 100),
        (_noise_repeated, 100),
        (_norm_unbounded, 400),
    ],
)
def test_the_attack_finds_a_broken_build_of_an_adaptive_clip(
    breaks: Callable[[pytest.MonkeyPatch], None], runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks(monkeypatch)
    assert least_epsilon_of_adaptive(runs) > PrivacyTerms.model_validate(ADAPTIVE).spent(1)
