"""The server's noise in sums of clear uploads: the central lane of differential privacy.

    sum of integers → + rounded Gaussian noise → over cohort.size → as any mean

Noise is derived from a secret of the task and from all that a sum depends on, the plan and the
uploads' digests. The same aggregation done again has the same noise, whichever server does it; and
no other sum ever has it, also after a restore, when a round may be run again with other uploads.

Noise that is correlated over rounds takes from a round's sum parts of the noise of rounds before,
which is drawn again from what those sums depended on. Nothing of it is stored.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from fedpress_compression.compressor import Public
from fedpress_compression.fixed_point import FINEST_BITS, MAX_SCALE_BITS, FixedPoint
from fedpress_compression.linear import support_of
from fedpress_compression.tensors import ModelSpec
from fedpress_compression.update import Indices
from fedpress_protocols.errors import IncompatiblePlan
from fedpress_protocols.plan import FixedPointTerms, PrivacyTerms, RoundPlan
from fedpress_protocols.privacy import gaussian
from fedpress_protocols.privacy.clipping import NORM_TOLERANCE
from fedpress_protocols.privacy.correlated import Correlation
from fedpress_strategies.strategy import Delta, Strategy, UniformMean, WeightedMean

Ints = npt.NDArray[np.int64]

_DOMAIN = b"fedpress central noise v1"
_COUNT_DOMAIN = b"fedpress central count v1"
_COUNT_STEPS = 2**17
"""The noise of a count is drawn on steps of this part of a device."""
_FINEST = gaussian.MAX_DEVIATION / 4
"""The largest deviation, in its own steps, that a draw of correlated noise is made finer for."""
_FINE = 2.0**10
"""The deviation of a draw of correlated noise over what is added to it for rounding, where steps
can be so fine. Finer ones take longer to draw."""
_SMALLEST = FixedPoint(0, 1.0, 1)
_MAX_ROUNDING = 0.02
"""Share of the clip that rounding to the sum's steps may add to the sensitivity."""


class PlannedSum(Protocol):
    """A round's plan, the tensors that its uploads are over, and what its compressors derive."""

    @property
    def plan(self) -> RoundPlan: ...
    @property
    def shared(self) -> ModelSpec: ...
    @property
    def public(self) -> Public: ...


class NoisedSum(NamedTuple):
    """The digests that a sum depends on: of its plan, and of its uploads."""

    plan: str
    uploads: tuple[str, ...]


def has_own_noise(plan: RoundPlan) -> bool:
    """Whether the server adds the noise of the plan's sums."""
    return plan.privacy is not None and plan.privacy.lane == "central"


def fixed_point_of(
    terms: PrivacyTerms | None, max_abs: float, max_examples: int, size: int
) -> FixedPointTerms:
    """The scale of the sums of `size` clear uploads. Under privacy `terms` all devices count the
    same, and in the central lane steps are as fine as the noise can be drawn."""
    bits = FINEST_BITS
    if terms is not None:
        max_examples = 1
        if terms.lane == "central":
            deviation = terms.update_multiplier * terms.clip
            max_abs = min(max_abs, terms.clip)
            bits = min(MAX_SCALE_BITS, max(1, FINEST_BITS - math.ceil(math.log2(deviation))))
    bounds = FixedPoint.widest(max_abs=max_abs, max_weight=max_examples * size, scale_bits=bits)
    return FixedPointTerms(scale_bits=bounds.scale_bits, max_abs=max_abs, max_examples=max_examples)


def noised_mean(
    terms: PlannedSum,
    mean: WeightedMean,
    uploads: Sequence[str],
    secret: bytes,
    before: Sequence[NoisedSum] = (),
) -> Delta:
    """The mean [size] of the sums with noise; `uploads` are the digests of the bodies in it.

    `before` are the sums of the rounds before, newest first, whose noise this one's is correlated
    with. Noise lies on the coordinates that uploads can move. The denominator is `cohort.size`,
    also of fewer uploads, so that it tells nothing of who sent one.
    """
    plan, privacy = terms.plan, terms.plan.privacy
    if privacy is None:
        raise IncompatiblePlan("a plan without privacy terms has no noise")
    where = _support(terms)
    size = mean.sums.total[where].size
    sums = [NoisedSum(plan.digest, tuple(uploads))]
    if privacy.correlation is not None:
        sums += before[: privacy.correlation.rounds - 1]
    seeds = [noise_seed(each, secret) for each in sums]
    total = mean.sums.total.copy()
    total[where] += _noise(plan, privacy, size, seeds)
    return total / (plan.cohort.size * 2.0**plan.fixed_point.scale_bits)


def adapted_clip(
    plan: RoundPlan, within: Sequence[float], uploads: Sequence[str], secret: bytes, initial: float
) -> float | None:
    """The clip of the round after, by the devices' bits `within` the clip; None for a clip that is
    fixed. `initial` is the task's first clip, `uploads` and `secret` as in `noised_mean`.

    The noise is drawn as that of the sum, from another seed. A device that is missing in the cohort
    counts a half, as one whose bit is not known.
    """
    privacy = plan.privacy
    if privacy is None or privacy.adaptive is None:
        return None
    adaptive, size = privacy.adaptive, plan.cohort.size
    half = _COUNT_STEPS // 2
    above = sum(half if bit >= 0.5 else -half for bit in within)
    seed = noise_seed(NoisedSum(plan.digest, tuple(uploads)), secret, _COUNT_DOMAIN)
    noise = int(gaussian.sample(1, adaptive.count_noise * _COUNT_STEPS, seed)[0])
    share = (above + noise) / (_COUNT_STEPS * size) + 0.5
    return adaptive.next_clip(privacy.clip, share, initial)


def check_private_strategy(terms: PlannedSum, strategy: Strategy) -> None:
    """Raise IncompatiblePlan unless the sum of the plan's uploads is all that the strategy needs,
    its steps are fine enough for the clip, and clips of tensors fit the model."""
    plan, privacy = terms.plan, terms.plan.privacy
    if privacy is None or not has_own_noise(plan):
        return
    is_mean = type(strategy.aggregator(1, _SMALLEST)) in (WeightedMean, UniformMean)
    if not is_mean or strategy.planned_aggregator or strategy.symbol_aggregator:
        raise IncompatiblePlan(
            "the strategy looks at updates one by one or at their symbols, and the noise of the "
            "central lane is for their sum",
            hint="choose a strategy that takes the mean of the updates, such as fedavg",
        )
    step, size = 2.0**-plan.fixed_point.scale_bits, terms.shared.size
    if math.sqrt(size) / 2 * step > _MAX_ROUNDING * privacy.clip:
        raise IncompatiblePlan(
            f"a clip of {privacy.clip:g} is too small for sums of {size:,} numbers in steps of "
            f"{step:.3g}",
            hint="raise privacy.clip, or lower noise_multiplier or cohort.size",
        )
    privacy.bounds(terms.shared)
    if privacy.correlation is not None:
        gaussian.check_deviation(_drawn(plan, privacy, privacy.correlation, size)[0])


def _noise(plan: RoundPlan, privacy: PrivacyTerms, size: int, seeds: Sequence[bytes]) -> Ints:
    """The noise [size] of a sum in steps, from the seeds of its round and of those before.

    The draws of correlated noise are on steps so fine that rounding what is taken off of them costs
    next to nothing, see `_drawn`.
    """
    correlation = privacy.correlation
    if correlation is None:
        return gaussian.sample(size, _deviation(plan, privacy, size), seeds[0])
    fine, steps = _drawn(plan, privacy, correlation, size)
    earlier = np.zeros(size)
    for factor, seed in zip(correlation.noising[1:], seeds[1:], strict=False):
        earlier += factor * gaussian.sample(size, fine, seed)
    noise = gaussian.sample(size, fine, seeds[0]) + np.rint(earlier).astype(np.int64)
    return np.rint(noise / steps).astype(np.int64)


def _drawn(
    plan: RoundPlan, privacy: PrivacyTerms, correlation: Correlation, size: int
) -> tuple[float, float]:
    """The deviation of the draws of correlated noise in their own steps, and how many of these are
    one step of the sum.

    Draws that follow from results and a device's updates differ from those without its updates by
    C times the updates, and C times two roundings in each round: `gain` of their norm at most.
    """
    deviation = _deviation(plan, privacy, size)
    rounding = 1.1 * correlation.gain * math.sqrt(correlation.rounds * size)
    rounding *= privacy.noise_multiplier
    due = min(_FINEST, _FINE * rounding)
    steps = 2.0 ** max(0, math.ceil(math.log2(due / deviation)))
    return deviation * steps + rounding, steps


def _deviation(plan: RoundPlan, privacy: PrivacyTerms, size: int) -> float:
    """Of the noise in steps: the sensitivity is the clip and what rounding `size` values adds."""
    clip = privacy.clip * (1 + NORM_TOLERANCE) * 2.0**plan.fixed_point.scale_bits
    return privacy.update_multiplier * (clip + math.sqrt(size) / 2)


def _support(terms: PlannedSum) -> slice | Indices:
    """The coordinates that some profile can send."""
    everywhere = slice(0, terms.shared.size)
    supports: Sequence[Indices | None] = [
        support_of(profile.compressor, terms.public) for profile in terms.plan.profiles
    ]
    each = [support for support in supports if support is not None]
    if len(each) < len(supports):
        return everywhere
    return np.unique(np.concatenate(each))


def noise_seed(noised: NoisedSum, secret: bytes, domain: bytes = _DOMAIN) -> bytes:
    """The noise's secret: of the same plan and uploads the same, of all others another one."""
    about = "|".join([noised.plan, *sorted(noised.uploads)]).encode()

    def derived(part: bytes) -> bytes:
        return hmac.digest(secret, b"|".join([domain, part, about]), hashlib.sha256)

    return (derived(b"1") + derived(b"2"))[: gaussian.SECRET_BYTES]
