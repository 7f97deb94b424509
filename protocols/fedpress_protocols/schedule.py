"""Schedules of what changes over a task's rounds: warm-ups, and rates that grow with time.

A schedule is plain data: periods, one after the other, each for a number of rounds or for a budget
of bytes, and after the last of them the task's own profiles. Which of them a round has is a
function of the schedule and of what the rounds before uploaded; the round's plan then says it, so
that whoever reads the plan again need not ask.

What clients keep goes on from period to period wherever the method does: residuals, velocities and
estimates do not hang on a rate, see `compression.compressor.state_key`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field, model_validator

from fedpress_compression.compressor import Compressor, state_key, to_config
from fedpress_compression.compressors.dgc import SPARSITIES
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.topk import TopK
from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.plan import Profile, Term


class Period(Term):
    """`profiles` for as many rounds as `rounds` says, or while they stay within a `budget`.

    The budget is a share of the bytes that all the task's rounds would upload in float32, cohorts
    at their size: a warm-up with a budget of b alone leaves room for a ratio of 1 / b, whatever its
    rounds cost, where one of a tenth of the rounds in float32 leaves room for 10. A period goes on
    while another round like its last stays within the budget, and has one round at least.
    """

    profiles: Annotated[tuple[Profile, ...], Field(min_length=1, max_length=256)]
    rounds: Annotated[int, Field(ge=1)] | None = None
    budget: Annotated[float, Field(gt=0, le=1)] | None = None
    warms_up: bool = False
    """Whether a strategy that freezes something settles it now, as onebit_adam does."""

    @model_validator(mode="after")
    def _one_length(self) -> Period:
        if (self.rounds is None) == (self.budget is None):
            raise ValueError("a period has rounds or a budget, one of them")
        return self

    def length(self, uploaded: Sequence[int], whole: int) -> int | None:
        """Return how many of the rounds that `uploaded` so many bytes were its own, from the first
        on; None while the next one is, too. `whole` is what the budget is a share of."""
        if self.budget is None:
            return self.rounds if self.rounds is not None and len(uploaded) >= self.rounds else None
        spent = 0
        for count, cost in enumerate(uploaded, 1):
            spent += cost
            if spent + cost > self.budget * whole:
                return count
        return None


Schedule = Annotated[tuple[Period, ...], Field(max_length=256)]


def period_at(schedule: Sequence[Period], uploaded: Sequence[int], whole: int) -> Period | None:
    """Return a round's period, when the rounds before it `uploaded` so many bytes each; None
    after the last one. `whole`: the bytes of all the rounds in float32."""
    start = 0
    for period in schedule:
        length = period.length(uploaded[start:], whole)
        if length is None:
            return period
        start += length
    return None


def check_schedule(schedule: Sequence[Period], profiles: Sequence[Profile]) -> None:
    """Raise ConfigurationError where what one period leaves is not what the next one builds on;
    `profiles` are those after the last."""
    compressors = [[p.compressor for p in each.profiles] for each in schedule]
    compressors.append([profile.compressor for profile in profiles])
    reads = [any("activity" in one.needs for one in each) for each in compressors]
    if any(reads) and not all(reads):
        raise ConfigurationError(
            "a compressor reads activity in one period and none does in another, and the map is "
            "drawn in rounds that read it alone",
            hint="give every period a profile that reads it, or none",
        )
    if any(getattr(one, "needs_plain_mean", False) for each in compressors for one in each):
        every = [one for each in compressors for one in each]
        strange = next((one for one in every if _goes_on(one) != _goes_on(every[-1])), None)
        if strange is not None:
            raise ConfigurationError(
                f"{to_config(strange)['id']} before or after a compressor that follows its own "
                "uploads by the model's last step, which its uploads would move too",
                hint="let the rate of the same method change, or use error_feedback",
            )


def _goes_on(compressor: Compressor[Any]) -> tuple[bool, Any]:
    """Equal for compressors of which one goes on where the other has left."""
    return compressor.keeps_residual, state_key(compressor.lossy)


def sparsity_warm_up(
    compressor: ErrorFeedback,
    *,
    rounds: int | None = None,
    budget: float | None = None,
    name: str = "only",
) -> tuple[Period, ...]:
    """Periods of `compressor`, which is error feedback or dgc around top-k, at the sparsities of
    Lin et al. 2018, arXiv:1712.01887, Section 3.3, as far as these are below its own.

    Each has `rounds` rounds (an epoch, in the paper), or an equal part of the `budget`: then the
    sparser last longer. `name` is the profile's.
    """
    inner = compressor.inner
    if not isinstance(inner, TopK) or inner.count is not None:
        raise ConfigurationError(
            f"a warm-up of sparsities is for top-k by its fraction, not for {inner}"
        )
    fractions = [1 - sparsity for sparsity in SPARSITIES if 1 - sparsity > 1.001 * inner.fraction]
    if budget is not None and fractions:
        budget /= len(fractions)
    return tuple(
        Period(
            profiles=(
                Profile(
                    name=name, compressor=replace(compressor, inner=replace(inner, fraction=share))
                ),
            ),
            rounds=rounds,
            budget=budget,
        )
        for share in (round(fraction, 6) for fraction in fractions)
    )
