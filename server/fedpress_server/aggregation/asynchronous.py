"""Checks of an asynchronous task's plan and strategy; rounds/buffered.py runs such tasks."""

from __future__ import annotations

from fedpress_compression.fixed_point import FixedPoint
from fedpress_protocols.errors import IncompatiblePlan
from fedpress_protocols.messages import AsynchronousTerms
from fedpress_server.aggregation.terms import RoundTerms
from fedpress_strategies import Strategy
from fedpress_strategies.staleness import DiscountedMean

_SMALLEST = FixedPoint(0, 1.0, 1)


def check_asynchronous(
    terms: RoundTerms, strategy: Strategy, asynchronous: AsynchronousTerms | None
) -> None:
    """Raises IncompatiblePlan unless uploads of the task, which is asynchronous or not, can be
    trained from models as different as it lets them be."""
    plan, aggregator = terms.plan, strategy.aggregator(1, _SMALLEST)
    by_age = aggregator if isinstance(aggregator, DiscountedMean) else None
    if asynchronous is None:
        if by_age is not None:
            raise IncompatiblePlan(
                "the strategy counts uploads by how old their models are, and here all are new",
                hint="give the task asynchronous terms, or choose fedavg or fedavgm",
            )
        return
    if by_age is None:
        raise IncompatiblePlan(
            "the strategy takes all uploads of a round for updates of one model, and those of an "
            "asynchronous task come from models of different age",
            hint="choose fedbuff or fedasync, or leave out the asynchronous terms",
        )
    if by_age.mixes and plan.cohort.size > 1:
        raise IncompatiblePlan(
            f"the strategy makes a model of every single upload, and cohort.size is "
            f"{plan.cohort.size}",
            hint="set cohort.size and cohort.minimum to 1, or choose fedbuff",
        )
    if plan.client_terms.control is not None:
        raise IncompatiblePlan(
            "the strategy's control variates have to move with the server's, and a client whose "
            "upload waits trains on with an old one"
        )
    for profile in plan.profiles:
        if getattr(profile.compressor, "needs_plain_mean", False):
            raise IncompatiblePlan(
                f"profile {profile.name!r} counts on a model that moves by the very mean of the "
                "updates, and stale ones count less; use error_feedback"
            )
