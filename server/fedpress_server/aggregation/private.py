"""The server's noise in sums of clear uploads: the central lane of differential privacy.

    sum of integers → + rounded Gaussian noise → over cohort.size → as any mean

Noise is derived from a secret of the task and from all that a sum depends on, the plan and the
uploads' digests. The same aggregation done again has the same noise, whichever server does it; and
no other sum ever has it, also after a restore, when a round may be run again with other uploads.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Iterable, Sequence

import numpy as np

from fedpress_compression.fixed_point import FixedPoint
from fedpress_compression.linear import support_of
from fedpress_compression.update import Indices
from fedpress_protocols.errors import IncompatiblePlan
from fedpress_protocols.plan import PrivacyTerms, RoundPlan
from fedpress_protocols.privacy import gaussian
from fedpress_server.aggregation.terms import NORM_TOLERANCE, RoundTerms
from fedpress_strategies import Strategy
from fedpress_strategies.strategy import Delta, UniformMean, WeightedMean

_DOMAIN = b"fedpress central noise v1"
_SMALLEST = FixedPoint(0, 1.0, 1)
_MAX_ROUNDING = 0.02
"""Share of the clip that rounding to the sum's steps may add to the sensitivity."""


def has_own_noise(plan: RoundPlan) -> bool:
    """Whether the server adds the noise of the plan's sums."""
    return plan.privacy is not None and plan.privacy.lane == "central"


def noised_mean(
    terms: RoundTerms, mean: WeightedMean, uploads: Iterable[str], secret: bytes
) -> Delta:
    """The mean [size] of the sums with noise; `uploads` are the digests of the bodies in it.

    Noise lies on the coordinates that uploads can move. The denominator is `cohort.size`, also of
    fewer uploads, so that it tells nothing of who sent one.
    """
    plan, privacy = terms.plan, terms.plan.privacy
    if privacy is None:
        raise IncompatiblePlan("a plan without privacy terms has no noise")
    where = _support(terms)
    size = mean.sums.total[where].size
    drawn = gaussian.sample(
        size, _deviation(plan, privacy, size), noise_seed(plan, uploads, secret)
    )
    total = mean.sums.total.copy()
    total[where] += drawn
    return total / (plan.cohort.size * 2.0**plan.fixed_point.scale_bits)


def check_private_strategy(terms: RoundTerms, strategy: Strategy) -> None:
    """Raise IncompatiblePlan unless the sum of the plan's uploads is all that the strategy needs,
    and its steps are fine enough for the clip."""
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


def _deviation(plan: RoundPlan, privacy: PrivacyTerms, size: int) -> float:
    """Of the noise in steps: the sensitivity is the clip and what rounding `size` values adds."""
    clip = privacy.clip * (1 + NORM_TOLERANCE) * 2.0**plan.fixed_point.scale_bits
    return privacy.noise_multiplier * (clip + math.sqrt(size) / 2)


def _support(terms: RoundTerms) -> slice | Indices:
    """The coordinates that some profile can send."""
    everywhere = slice(0, terms.shared.size)
    supports: Sequence[Indices | None] = [
        support_of(profile.compressor, terms.public) for profile in terms.plan.profiles
    ]
    each = [support for support in supports if support is not None]
    if len(each) < len(supports):
        return everywhere
    return np.unique(np.concatenate(each))


def noise_seed(plan: RoundPlan, uploads: Iterable[str], secret: bytes) -> bytes:
    """The noise's secret: of the same plan and uploads the same, of all others another one."""
    about = "|".join([plan.digest, *sorted(uploads)]).encode()

    def derived(part: bytes) -> bytes:
        return hmac.digest(secret, b"|".join([_DOMAIN, part, about]), hashlib.sha256)

    return (derived(b"1") + derived(b"2"))[: gaussian.SECRET_BYTES]
